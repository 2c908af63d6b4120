"""A store that lets only so many calls through at a time, so that a save does not flood a server."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore


class LimitStore:
    """``inner`` with at most ``max_calls`` calls at once; the others wait their turn."""

    def __init__(self, inner: ObjectStore, *, max_calls: int) -> None:
        assert max_calls >= 1, max_calls
        self._inner = inner
        self._max_calls = max_calls
        self._turns = threading.BoundedSemaphore(max_calls)

    def __repr__(self) -> str:
        return f"LimitStore({self._inner!r}, max_calls={self._max_calls})"

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def conditional_create(self) -> bool:
        return self._inner.conditional_create

    def create(self, key: str, body: Buffer) -> None:
        with self._turns:
            self._inner.create(key, body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        with self._turns:
            return self._inner.read(key, at)

    def size(self, key: str) -> int:
        with self._turns:
            return self._inner.size(key)

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        with self._turns:
            return iter(list(self._inner.scan(prefix)))

    def delete(self, keys: Sequence[str]) -> None:
        with self._turns:
            self._inner.delete(keys)

    def overwrite(self, key: str, body: Buffer) -> None:
        with self._turns:
            self._inner.overwrite(key, body)

    def close(self) -> None:
        self._inner.close()
