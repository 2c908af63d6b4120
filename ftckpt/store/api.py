"""What a store must do: the contract every other room relies on.

Keys are relative to the run's prefix, use ``/`` between parts, and never begin or end with it.
Retry, limits and injected faults are stores wrapped around stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Buffer = bytes | bytearray | memoryview
"""What a body may be. A store must not keep it after the call returned."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes ``start`` up to, not including, ``end``. Never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        assert 0 <= self.start < self.end, (self.start, self.end)

    @property
    def size(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One line of a listing."""

    key: str
    size_bytes: int


class ObjectStore(Protocol):
    """Bytes under keys, linearizable for create, read, size and scan (protocol: "The store is
    asked, not trusted").

    Safe to call from many threads. Any call may be repeated by a wrapper, so a caller of
    ``create`` must be able to tell "I already wrote this" from "someone else did": records that
    confer ownership carry a nonce and are read back.

    Every failure is a ``StoreError``; its ``retryable`` says whether trying again can help.
    No message, event or ``repr`` ever holds a credential.
    """

    @property
    def uri(self) -> str:
        """Address of the prefix, without credentials, for people and error messages."""
        ...

    @property
    def conditional_create(self) -> bool:
        """Whether ``create`` is exclusive between writers. False means one writer only."""
        ...

    def create(self, key: str, body: Buffer) -> None:
        """Store ``body`` under a key that has no object yet; atomic and durable on return.

        A reader sees all of the object or none of it. Raises ``AlreadyExists`` and leaves the
        object alone when there is one. After ``StoreTimeout`` or ``StoreUnavailable`` the object
        may exist, now or later.
        """
        ...

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        """The object's bytes, or those of a range that must lie inside it.

        Exactly the asked number of bytes comes back: a body that ends early is
        ``StoreUnavailable``; a range that the object does not hold is a ``StoreError`` with
        ``retryable`` false and the object's real ``size_bytes``. Raises ``ObjectNotFound``.
        """
        ...

    def size(self, key: str) -> int:
        """The object's size in bytes. Raises ``ObjectNotFound``."""
        ...

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key begins with ``prefix`` + ``/`` (all of them for ``""``), in key
        order, never from a cache. Objects created before the call are all seen. An absent
        prefix yields nothing; an absent bucket raises ``BucketNotFound``. The listing is complete
        before the first line is handed out, so errors come from the call and not from the loop.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. Absent keys are fine. Not atomic over several keys."""
        ...

    def overwrite(self, key: str, body: Buffer) -> None:
        """Store ``body`` under a key whatever is there; atomic and durable on return.

        For repair alone, with bytes that are proven to be those the key was created with: nobody who
        reads at that moment sees anything but the damaged object or the good one (see design/0010).
        """
        ...

    def close(self) -> None:
        """Release sockets and threads. Idempotent."""
        ...


class Stream(Protocol):
    """One object on its way out, part by part. One thread at a time."""

    def write(self, data: Buffer) -> None:
        """Add bytes to its end. They may be sent now or later; the buffer is the caller's again at once."""
        ...

    def close(self) -> None:
        """The object is there, whole and durable; what had its name before is gone."""
        ...

    def abort(self) -> None:
        """It will not be. Nothing appears under its name, and what had it before stays."""
        ...


class StreamingStore(ObjectStore, Protocol):
    """A store that also takes objects too large for memory. Not for a run: a stream is not create-only.

    What a stream sends is tried again inside it, where a server can be asked again; a call that failed is
    final, since nobody else has the bytes before it.
    """

    def stream(self, key: str) -> Stream:
        """Begin an object."""
        ...
