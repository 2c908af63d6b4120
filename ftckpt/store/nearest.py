"""Several stores with the same objects, read as one: from the nearest that has what is asked for.

Only readers who know an object's digest or size can tell a good copy from a bad one, so they ask
``sources`` for the stores one by one; everybody else gets what the nearest has. Writes go to the last,
which is the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ftckpt.errors import ObjectNotFound, first_line
from ftckpt.events import Event, Events, silent
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore


class NearestStore:
    """``stores``, nearest first. Closing it closes none of them."""

    def __init__(self, stores: Sequence[ObjectStore], events: Events = silent) -> None:
        self.stores = tuple(stores)
        self.events = events

    def __repr__(self) -> str:
        return f"NearestStore({', '.join(map(repr, self.stores))})"

    @property
    def uri(self) -> str:
        return self.stores[-1].uri

    @property
    def conditional_create(self) -> bool:
        return self.stores[-1].conditional_create

    def create(self, key: str, body: Buffer) -> None:
        self.stores[-1].create(key, body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        for store in self.stores[:-1]:
            try:
                return store.read(key, at)
            except ObjectNotFound:
                continue
        return self.stores[-1].read(key, at)

    def size(self, key: str) -> int:
        for store in self.stores[:-1]:
            try:
                return store.size(key)
            except ObjectNotFound:
                continue
        return self.stores[-1].size(key)

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        for store in self.stores:
            for info in store.scan(prefix):
                found.setdefault(info.key, info)
        return iter([found[key] for key in sorted(found)])

    def delete(self, keys: Sequence[str]) -> None:
        self.stores[-1].delete(keys)

    def overwrite(self, key: str, body: Buffer) -> None:
        self.stores[-1].overwrite(key, body)

    def close(self) -> None:
        """They belong to whoever opened them."""


def sources(store: ObjectStore) -> tuple[ObjectStore, ...]:
    """The stores behind a store, nearest first."""
    return store.stores if isinstance(store, NearestStore) else (store,)


def tell_passed_over(store: ObjectStore, number: int, key: str, error: BaseException) -> None:
    """Say that the ``number``-th of the sources did not have good bytes, so the next is asked."""
    if isinstance(store, NearestStore):
        told = {"key": key, "store": store.stores[number].uri, "why": first_line(error)}
        store.events(Event("read.passed_over", told))
