"""What happened, as values: for logs, counters, the supervisor's status line and the checkers.

The core never formats or prints; it emits. An ``Events`` is any callable that takes one ``Event``;
it must be quick, safe to call from any thread, and must not raise.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TextIO

Events = Callable[["Event"], None]


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. ``name`` is ``room.what``; ``fields`` are plain JSON values.

    ``unix_s`` is for people reading a log; no decision rests on it.
    """

    name: str
    fields: dict[str, Any] = field(default_factory=dict)
    unix_s: float = field(default_factory=time.time)


def silent(_event: Event) -> None:
    """Events nobody wants."""


_BAD = frozenset({"failed", "save_failed", "aborted", "fenced", "diverged", "retry", "warning", "stale"})
_EVERY_STEP = frozenset({"session.step", "group.turn"})


def to_logging(event: Event) -> None:
    """Send events to the standard logger ``ftckpt``: what went wrong as warnings, what happens at
    every step as debug lines, the rest as info.
    """
    level = logging.DEBUG if event.name in _EVERY_STEP else logging.INFO
    if event.name.rsplit(".", 1)[-1] in _BAD:
        level = logging.WARNING
    logging.getLogger("ftckpt").log(
        level, "%s %s", event.name, " ".join(f"{k}={v}" for k, v in event.fields.items())
    )


class JsonLines:
    """Write every event as one JSON line, flushed at once."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = json.dumps({"event": event.name, "unix_s": event.unix_s, **event.fields}, default=str)
        with self._lock:
            self._stream.write(line + "\n")
            self._stream.flush()


def both(first: Events, second: Events) -> Events:
    """Tell two listeners."""

    def tell(event: Event) -> None:
        first(event)
        second(event)

    return tell
