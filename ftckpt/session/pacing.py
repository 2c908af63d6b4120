"""How far a restore is and how fast it goes, as events. Knows bytes and a clock, no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from ftckpt.events import Event, Events

TELL_EVERY_S = 2.0


class Pacing:
    """The ``Progress`` of one restore. Tells of it every two seconds, so of a short one not at all."""

    def __init__(self, step: int, events: Events, now_s: Callable[[], float] = time.monotonic) -> None:
        self._step = step
        self._events = events
        self._now_s = now_s
        self._begun_s = self._told_s = now_s()
        self._bytes = 0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        self._bytes = done_bytes
        if self._now_s() - self._told_s < TELL_EVERY_S or done_bytes == total_bytes:
            return
        self._told_s = self._now_s()
        rate = self.bytes_s
        left_s = round((total_bytes - done_bytes) / rate, 1) if rate else None
        told = {"step": self._step, "bytes": done_bytes, "total_bytes": total_bytes}
        self._events(Event("session.restoring", {**told, "bytes_s": rate, "left_s": left_s}))

    @property
    def seconds(self) -> float:
        """Since it began."""
        return self._now_s() - self._begun_s

    @property
    def bytes_s(self) -> int:
        """Bytes fetched a second so far."""
        return int(self._bytes / self.seconds) if self.seconds > 0 else 0
