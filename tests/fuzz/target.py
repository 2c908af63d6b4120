"""What a decoder is to the fuzzer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from ftckpt.errors import FtckptError

Check = Callable[[bytes], bool]


@dataclass(frozen=True, slots=True)
class Target:
    """A decoder. ``seeds`` are inputs that it takes; ``craft`` makes an input with structure, from a seed."""

    name: str
    check: Check
    seeds: Sequence[bytes]
    craft: Callable[[Random], bytes]
    most: int = 1 << 16
    """The longest input that is tried."""


def refused(call: Callable[[], object]) -> bool:
    """Whether the call ended in one of our own errors. Others pass through."""
    try:
        call()
    except FtckptError:
        return True
    return False
