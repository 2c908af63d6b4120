"""Manners beside a rollout engine in the same process: when saves hold back, and whose host memory they use.

Knows neither saves nor engines: a gate that the saver's threads pass before every chunk and every
PUT, and a budget that several users of host memory share.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

POLL_S = 0.02
ASKED_LIMIT_S = 30.0
"""For so long at a stretch a callable may hold saves back."""


class Gate:
    """Closed while somebody is inside of ``closed`` or while ``ask()`` is true; never for longer than
    the deadline of whoever closes it, so that an engine that hangs costs no checkpoint.

    ``ask`` is called by the saver's threads every ``POLL_S`` while they wait; it must be quick. What
    it raises fails the save.
    """

    def __init__(
        self,
        ask: Callable[[], bool] | None = None,
        now_s: Callable[[], float] = time.monotonic,
        asked_limit_s: float = ASKED_LIMIT_S,
    ) -> None:
        self._ask = ask
        self._now_s = now_s
        self._asked_limit_s = asked_limit_s
        self._asked_since_s: float | None = None
        self._changed = threading.Condition()
        self._ends_s: dict[object, float] = {}
        self._off = False
        self.waiting = 0
        """Threads that wait now."""

    @property
    def is_held(self) -> bool:
        """Whether anybody is inside of ``closed``, its deadline passed or not."""
        return bool(self._ends_s)

    @contextmanager
    def closed(self, deadline_s: float) -> Iterator[None]:
        """Nobody passes, for at most so long."""
        token = object()
        with self._changed:
            self._ends_s[token] = self._now_s() + deadline_s
        try:
            yield
        finally:
            with self._changed:
                del self._ends_s[token]
                self._changed.notify_all()

    def wait(self) -> float:
        """Pass, once it is open; returns the seconds that it took."""
        begun_s = self._now_s()
        while True:
            asked_s = self._asked_s()
            with self._changed:
                held_s = max((end_s - self._now_s() for end_s in self._ends_s.values()), default=0.0)
                left_s = max(held_s, asked_s)
                if left_s <= 0 or self._off:
                    return self._now_s() - begun_s
                self.waiting += 1
                self._changed.wait(min(left_s, POLL_S) if self._ask is not None else left_s)
                self.waiting -= 1

    def take_away(self) -> None:
        """Open from now on, whoever holds it: the session is being left."""
        with self._changed:
            self._off = True
            self._changed.notify_all()

    def _asked_s(self) -> float:
        """For how much longer ``ask`` may hold."""
        if self._ask is None or not self._ask():
            self._asked_since_s = None
            return 0.0
        now_s = self._now_s()
        self._asked_since_s = since_s = now_s if self._asked_since_s is None else self._asked_since_s
        return self._asked_limit_s - (now_s - since_s)


class HostBudget(Protocol):
    """Bytes of host memory that several users share. Called from any thread; must not block."""

    def take(self, size_bytes: int) -> bool:
        """Reserve so many; false: there are not so many left, and nothing was reserved."""
        ...

    def give(self, size_bytes: int) -> None:
        """Give back what was reserved."""
        ...


class SharedBudget:
    """A ``HostBudget`` of a fixed size, for everybody who is handed this object."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = total_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """What is reserved now."""
        return self._used_bytes

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if self._used_bytes + size_bytes > self.total_bytes:
                return False
            self._used_bytes += size_bytes
            return True

    def give(self, size_bytes: int) -> None:
        with self._lock:
            assert size_bytes <= self._used_bytes, (size_bytes, self._used_bytes)
            self._used_bytes -= size_bytes


class Unshared:
    """Nobody shares: there is no other bound than the pool's own."""

    def take(self, size_bytes: int) -> bool:
        return True

    def give(self, size_bytes: int) -> None:
        pass
