"""Many objects at once: made without the collector of cycles looking at them meanwhile, and freed piece by piece.

Python's collector runs by the number of new objects. Where a hundred thousand leaves are listed it finds
nothing again and again, in half of the time that listing them takes, on the trainer's thread.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_collecting() -> Iterator[None]:
    """Around work that makes many objects and no cycles. Collecting goes on afterwards, if it was on.

    The switch is the process's: hold it no longer than a save's stall, and not in the background.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def let_go(many: list[Any] | dict[Any, Any]) -> None:
    """Empty a container, one item after the other: many objects that are freed with what held them hold every
    thread for as long as that takes.
    """
    take = many.pop if isinstance(many, list) else many.popitem
    while many:
        take()
