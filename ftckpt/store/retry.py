"""A store that tries again. Knows deadlines and backoff; nothing of any server.

Only errors whose ``retryable`` is true are tried again: exponential backoff with full jitter,
within one deadline for the whole call.

**What a repeated create can mean.** A create that ended in a timeout or a broken connection may
have taken effect. When its repeat meets ``AlreadyExists``, the object may be our own, so that
error is raised with the fact ``after_unclear`` true, and nothing is hidden: a caller whose body carries a
nonce reads it back and compares; a caller whose key nobody else can use (a pack's name
holds the incarnation of its writer) may take it as done once the size is right.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from ftckpt.clock import Clock
from ftckpt.errors import AlreadyExists, StoreError
from ftckpt.events import Event, Events
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore

T = TypeVar("T")

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0


class RetryStore:
    """``inner``, tried again for at most ``deadline_s`` per call.

    Until one call was answered, a server that cannot be connected to is more likely a mistyped
    address than a passing fault, so such a call gives up after ``first_contact_s``.
    """

    def __init__(
        self,
        inner: ObjectStore,
        *,
        deadline_s: float,
        clock: Clock,
        events: Events,
        rng: random.Random | None = None,
        first_contact_s: float = 5.0,
    ) -> None:
        self._inner = inner
        self._deadline_s = deadline_s
        self._first_contact_s = min(first_contact_s, deadline_s)
        self._clock = clock
        self._events = events
        self._rng = rng or random.Random()
        self._answered = False

    def __repr__(self) -> str:
        return f"RetryStore({self._inner!r}, deadline_s={self._deadline_s})"

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def conditional_create(self) -> bool:
        return self._inner.conditional_create

    def create(self, key: str, body: Buffer) -> None:
        self._repeat("create", key, lambda: self._inner.create(key, body))

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        return self._repeat("read", key, lambda: self._inner.read(key, at))

    def size(self, key: str) -> int:
        return self._repeat("size", key, lambda: self._inner.size(key))

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        return iter(self._repeat("scan", prefix, lambda: list(self._inner.scan(prefix))))

    def delete(self, keys: Sequence[str]) -> None:
        self._repeat("delete", keys[0] if keys else "", lambda: self._inner.delete(keys))

    def overwrite(self, key: str, body: Buffer) -> None:
        self._repeat("overwrite", key, lambda: self._inner.overwrite(key, body))

    def close(self) -> None:
        self._inner.close()

    def _repeat(self, op: str, key: str, call: Callable[[], T]) -> T:
        started_s = self._clock.now_s()
        tries = 0
        while True:
            tries += 1
            try:
                result = call()
            except AlreadyExists as error:
                self._answered = True
                if tries == 1:
                    raise
                raise AlreadyExists(
                    f"{error}\n  an earlier try of the same create got no clear answer, so the object may "
                    "be ours: read it back",
                    **{**error.facts, "after_unclear": True},
                ) from error
            except StoreError as error:
                if not error.retryable:
                    self._answered = True
                    raise
                self._wait_or_give_up(error, op, key, tries, started_s)
            else:
                self._answered = True
                return result

    def _wait_or_give_up(self, error: StoreError, op: str, key: str, tries: int, started_s: float) -> None:
        unreached = not self._answered and error.facts.get("connected") is False
        deadline_s = self._first_contact_s if unreached else self._deadline_s
        spent_s = self._clock.now_s() - started_s
        wait_s = self._rng.random() * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(tries, 30))
        if spent_s + wait_s >= deadline_s:
            raise type(error)(
                f"{error}\n  gave up after {tries} tries in {spent_s:.1f} s (deadline {deadline_s:g} s)",
                **{**error.facts, "tries": tries, "spent_s": spent_s},
            ) from error
        self._events(
            Event(
                "store.retry",
                {
                    "op": op,
                    "key": key,
                    "uri": self.uri,
                    "tries": tries,
                    "wait_s": round(wait_s, 3),
                    "error": type(error).__name__,
                    "why": str(error).splitlines()[0],
                },
            )
        )
        self._clock.sleep(wait_s)
