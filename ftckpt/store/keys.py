"""Which strings may be keys or prefixes, and how a body is looked at. No I/O.

Keys come from ``layout``, but also out of records that anyone may have written into the store, so
every store checks them: nothing may leave the run's prefix.
"""

from __future__ import annotations

from ftckpt.errors import StoreError
from ftckpt.store.api import Buffer

MAX_KEY_BYTES = 800
"""S3 allows 1024 with the prefix."""

MAX_PART_BYTES = 200
"""File systems allow 255; a temporary file's name must fit too."""

DOTTED = frozenset({".metadata"})
"""The only names with a dot in front: what makes a folder of torch's a checkpoint."""


def check_key(key: str, *, op: str, uri: str) -> None:
    """Raise ``StoreError`` unless ``key`` names an object below the prefix."""
    if (found := problem(key)) is not None:
        raise StoreError(
            f"{op} {key!r} in {uri}: not a key, because {found}\n  nothing was read or written",
            op=op,
            key=key,
            uri=uri,
        )


def problem(key: str) -> str | None:
    """Why a string is no key; ``None``: it is one."""
    if not key:
        return "it is empty"
    if len(key.encode("utf-8", "surrogateescape")) > MAX_KEY_BYTES:
        return f"it is longer than {MAX_KEY_BYTES} bytes"
    if "\\" in key or not key.isprintable():
        return "it holds a backslash or a character that cannot be printed"
    for part in key.split("/"):
        if not part:
            return "a part of it is empty"
        if part.startswith(".") and part not in DOTTED:
            return f"its part {part!r} begins with a dot"
        if len(part.encode("utf-8", "surrogateescape")) > MAX_PART_BYTES:
            return f"a part of it is longer than {MAX_PART_BYTES} bytes"
    return None


def check_prefix(prefix: str, *, uri: str) -> None:
    """As ``check_key``; ``""`` is the whole store."""
    if prefix:
        check_key(prefix, op="scan", uri=uri)


def view(body: Buffer) -> memoryview:
    """The body as a flat view of bytes. No copy."""
    return memoryview(body).cast("B")


def is_below(key: str, prefix: str) -> bool:
    """Whether a scan of ``prefix`` shows ``key``."""
    return not prefix or key.startswith(f"{prefix}/")
