"""How an address is spelled: a folder's path, or ``scheme://`` and what a store of that kind calls a place.

Knows spelling; refuses to know which schemes there are, and whether anything is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")
_WITHOUT_OPTIONS = ("", "file", "memory")


def split(address: str) -> tuple[str, str]:
    """The scheme in small letters, and the rest. The scheme of a plain path is ``""``."""
    found = _SCHEME.match(address)
    return ("", address) if found is None else (found[1].lower(), address[found.end() :])


def from_anywhere(address: str | os.PathLike[str]) -> str:
    """The address as it is from any working folder."""
    text = os.fspath(address)
    return text if split(text)[0] else str(Path(text).absolute())


def options_for(
    address: str | os.PathLike[str], options: Mapping[str, object] | None
) -> Mapping[str, object]:
    """The options of several addresses for one of them: folders and memory take none."""
    return {} if split(os.fspath(address))[0] in _WITHOUT_OPTIONS else dict(options or {})
