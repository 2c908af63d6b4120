"""How much memory is left: asked before a record's word makes anybody take it.

A chunk that decodes to a gigabyte of zeros takes twenty bytes in the store, so what a record states is no
measure of what somebody has written. Nothing here is exact: it tells what cannot be from what can.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ftckpt.errors import NotEnoughMemory

ALWAYS_BYTES = 64 << 20
"""So much is taken without asking."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """What the machine, or the control group of this container, has left; ``None`` where nobody says."""
    left = [found for found in (_of_machine(root), _of_group(root)) if found is not None]
    return min(left) if left else None


def require_memory(size_bytes: int, what: str, available: Callable[[], int | None] = available_bytes) -> None:
    """Go on if that much can be taken.

    Raises:
        NotEnoughMemory: there is less. Facts: ``needed_bytes``, ``available_bytes``.
    """
    if size_bytes <= ALWAYS_BYTES:
        return
    left = available()
    if left is not None and size_bytes > left:
        raise NotEnoughMemory(
            f"NotEnoughMemory: {what} takes {size_bytes} bytes, and this machine has {left} left\n"
            "  nothing was changed; read fewer components, or on a machine with more memory\n"
            "  a record that states what was never saved does this too: `ftckpt show RUN` tells what a step holds",
            needed_bytes=size_bytes,
            available_bytes=left,
        )


def _of_machine(root: Path) -> int | None:
    return _line(root / "proc/meminfo", "MemAvailable:", 1024)


def _of_group(root: Path) -> int | None:
    folder = root / "sys/fs/cgroup"
    try:
        most, used = (folder / "memory.max").read_text(), (folder / "memory.current").read_text()
    except OSError:
        return None
    if not most.strip().isdecimal():
        return None  # "max"
    cache = _line(folder / "memory.stat", "inactive_file", 1) or 0
    return max(0, int(most) - int(used) + cache)


def _line(path: Path, name: str, unit_bytes: int) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    found = (line.split() for line in lines)
    return next((int(parts[1]) * unit_bytes for parts in found if parts[:1] == [name]), None)
