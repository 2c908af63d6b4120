"""How fast this session encodes and how fast its store takes bytes, measured while it saves.

Encoding and putting go on side by side, so a save takes as long as the slower of the two: compressing
pays while the encode threads together are faster than the store. Measures fade, so that a store that
slows down is noticed within some packs.

Before the first put has ended nobody knows. What is certain is that the store is no faster than the
puts that are still under way; until there is one, bytes go out as they are, so that a fast store is not
kept waiting for a slow encoder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_FADE = 0.9
_LEAST = 0.1
"""What must be saved of a chunk to be worth the computing, however slow the store is."""

_LEAD = 1.35
"""By how much encoding must be faster than the store: the same threads read and pack chunks, too."""

_ASSUMED_BYTES_S = 400e6
"""What one thread encodes a second, until that was measured."""


class Rates:
    """Used by all encode and put threads of one writer. ``now_s`` and ``cpu_s`` are clocks: of the
    wall, and of the calling thread's own computing.
    """

    def __init__(
        self,
        threads: int,
        now_s: Callable[[], float] = time.monotonic,
        cpu_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._threads = threads
        self._now_s, self.cpu_s = now_s, cpu_s
        self._lock = threading.Lock()
        self._encoded: dict[int, tuple[float, float]] = {}
        self._put_bytes = self._put_s = 0.0
        self._in_flight, self._since_s = 0, 0.0
        self._first_bytes, self._first_s = 0, 0.0

    @property
    def put_bytes_s(self) -> float | None:
        """Bytes the store takes a second, all puts together; ``None`` before the first. While that is
        under way, what it has taken at most.
        """
        with self._lock:
            if self._put_bytes:
                return self._put_bytes / self._put_s if self._put_s > 0 else None
            spent_s = self._now_s() - self._first_s
            return self._first_bytes / spent_s if self._first_bytes and spent_s > 0 else None

    def encode_bytes_s(self, codec: int) -> float | None:
        """Raw bytes that one thread encodes a second; ``None`` before the first chunk."""
        with self._lock:
            done, seconds = self._encoded.get(codec, (0.0, 0.0))
            return done / seconds if seconds > 0 else None

    def encoded(self, codec: int, raw_bytes: int, seconds: float) -> None:
        """One thread spent ``seconds`` of computing on a chunk."""
        with self._lock:
            done, spent = self._encoded.get(codec, (0.0, 0.0))
            self._encoded[codec] = (_FADE * done + raw_bytes, _FADE * spent + seconds)

    @contextmanager
    def putting(self, size_bytes: int) -> Iterator[None]:
        """Around one put. Seconds in which several are under way count once; one that raises brings no
        bytes.
        """
        self._tick(1)
        with self._lock:
            if not self._first_bytes:
                self._first_s = self._now_s()
            self._first_bytes += size_bytes
        taken = 0
        try:
            yield
            taken = size_bytes
        finally:
            self._tick(-1)
            with self._lock:
                self._first_bytes -= size_bytes
                if taken:
                    self._put_bytes = _FADE * self._put_bytes + taken
                    self._put_s *= _FADE

    def _tick(self, change: int) -> None:
        with self._lock:
            now_s = self._now_s()
            if self._in_flight:
                self._put_s += now_s - self._since_s
            self._since_s = now_s
            self._in_flight += change

    def pays(self, codec: int, raw_bytes: int, saved_bytes: int) -> bool:
        """Whether saving these bytes is worth the computing."""
        put_bytes_s, encode_bytes_s = self.put_bytes_s, self.encode_bytes_s(codec) or _ASSUMED_BYTES_S
        if put_bytes_s is None or saved_bytes < _LEAST * raw_bytes:
            return False
        return encode_bytes_s * self._threads > _LEAD * put_bytes_s
