"""What a test tells a process of its own through a file that may come and go at any time."""

from __future__ import annotations

from pathlib import Path


def number(path: Path, default: int) -> int:
    """The number in the file; 0 in an empty one, ``default`` when there is none."""
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return default
