"""Time, handed in as an argument so that tests can wind it by hand.

Durations only: nothing in the protocol compares wall clocks of two machines.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds since some fixed moment, and a way to let them pass."""

    def now_s(self) -> float:
        """Monotonic seconds."""
        ...

    def sleep(self, seconds: float) -> None:
        """Return after that many seconds of this clock."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class HandClock:
    """A clock that moves only when someone sleeps on it or winds it."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self._now_s += max(0.0, seconds)
