"""A real S3 server for tests: the one of ``ftckpt.chaos.s3server``, with a bucket of its own.

``Weed.kill9`` and ``Weed.restart`` keep folder and ports, so that a test can take the store away
and give it back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ftckpt.chaos.s3server import S3Server as Weed
from ftckpt.chaos.s3server import start_s3

__all__ = ["Weed", "start_weed"]


@contextmanager
def start_weed(folder: Path) -> Iterator[Weed]:
    """A ready server with its files in ``folder``; stopped, and its files removed, on leaving."""
    with start_s3(folder, "ftckpt-test") as server:
        yield server
