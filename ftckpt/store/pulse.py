"""A store whose silence is measured: how long ago did it answer, and when is that too long?

Any answer counts, a refusal too; what can be tried again (no connection, throttled, no answer in
time) is no answer. So a large save on a slow store goes on for as long as anything moves, and one on
a store that went away ends by its deadline, however many calls it still had to make.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ftckpt.clock import Clock
from ftckpt.errors import StoreError, StoreGone
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore

T = TypeVar("T")


class PulseStore:
    """``inner``, which is not asked any more once it was silent for ``deadline_s``: every call then
    raises ``StoreGone`` at once, until ``begin``.
    """

    def __init__(self, inner: ObjectStore, *, deadline_s: float, clock: Clock) -> None:
        self._inner = inner
        self._deadline_s = deadline_s
        self._clock = clock
        self._answered_s = clock.now_s()
        self._asked_s: dict[int, float] = {}
        self._asking = threading.Lock()
        self._given_up = False

    def __repr__(self) -> str:
        return f"PulseStore({self._inner!r}, deadline_s={self._deadline_s})"

    def begin(self) -> None:
        """Give it another chance: silence counts from now."""
        self._given_up = False
        self._answered_s = self._clock.now_s()

    def give_up(self) -> None:
        """Take it for silent until ``begin``, whatever it answers yet."""
        self._given_up = True

    @property
    def silent_s(self) -> float:
        """Since its last answer, or since ``begin``."""
        return self._clock.now_s() - self._answered_s

    @property
    def hanging_s(self) -> float:
        """As ``silent_s``, while a call is under way; else 0."""
        with self._asking:
            asked_s = min(self._asked_s.values(), default=None)
        return 0.0 if asked_s is None else self._clock.now_s() - max(asked_s, self._answered_s)

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def conditional_create(self) -> bool:
        return self._inner.conditional_create

    def create(self, key: str, body: Buffer) -> None:
        self._ask("create", key, lambda: self._inner.create(key, body))

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        return self._ask("read", key, lambda: self._inner.read(key, at))

    def size(self, key: str) -> int:
        return self._ask("size", key, lambda: self._inner.size(key))

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._ask("scan", prefix, lambda: iter(list(self._inner.scan(prefix))))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", keys[0] if keys else "", lambda: self._inner.delete(keys))

    def overwrite(self, key: str, body: Buffer) -> None:
        self._ask("overwrite", key, lambda: self._inner.overwrite(key, body))

    def close(self) -> None:
        self._inner.close()

    def _ask(self, op: str, key: str, call: Callable[[], T]) -> T:
        if self._given_up or self.silent_s > self._deadline_s:
            raise self._gone(op, key)
        me = threading.get_ident()
        with self._asking:
            self._asked_s[me] = self._clock.now_s()
        try:
            done = call()
        except StoreError as error:
            if not error.retryable:
                self._answered_s = self._clock.now_s()
            raise
        finally:
            with self._asking:
                del self._asked_s[me]
        if self._given_up:
            raise self._gone(op, key)
        self._answered_s = self._clock.now_s()
        return done

    def _gone(self, op: str, key: str) -> StoreGone:
        silent_s = self.silent_s
        return StoreGone(
            f"{op} {key} in {self.uri}: the store has not answered for {silent_s:.1f} s "
            f"(deadline {self._deadline_s:g} s)\n  nothing more is asked of it in this save; the next one tries again",
            op=op,
            key=key,
            uri=self.uri,
            silent_s=silent_s,
        )
