"""A store whose credentials run out while it is used: made anew with fresh ones, and asked again.

Knows when a refusal means that credentials are stale, and whom to ask for others; refuses to know
what a credential looks like, and waiting (``retry`` stands outside).

A refused call is repeated once at once if there are other credentials than those it was refused
with. Where there are none *yet*, because the file, the variable or the provider still has the old
ones, ``CredentialsExpired`` asks for another try later, within the deadline of the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ftckpt.errors import AccessDenied, CredentialsExpired, SettingsError, StoreError
from ftckpt.events import Event, Events
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore, Stream, StreamingStore

T = TypeVar("T")

_EXPIRED = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired", "InvalidToken"}
)


@dataclass(frozen=True, slots=True)
class Opened:
    """A store and what it was opened with. ``credentials`` are only compared; ``None``: the machine's
    own, which may be others at every opening. ``renewable``: a later opening may find others.
    """

    store: StreamingStore
    credentials: object = field(repr=False)
    renewable: bool


class RenewingStore:
    """The store that ``opening`` gives, opened again whenever its credentials are refused.

    ``opening`` does no I/O but for asking a person's own credential provider.
    """

    def __init__(self, opening: Callable[[], Opened], *, events: Events) -> None:
        self._opening = opening
        self._events = events
        self._lock = threading.Lock()
        self._now = opening()
        self._worked = False

    def __repr__(self) -> str:
        return f"RenewingStore({self._now.store!r})"

    @property
    def uri(self) -> str:
        return self._now.store.uri

    @property
    def conditional_create(self) -> bool:
        return self._now.store.conditional_create

    def create(self, key: str, body: Buffer) -> None:
        self._ask(lambda store: store.create(key, body))

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        return self._ask(lambda store: store.read(key, at))

    def size(self, key: str) -> int:
        return self._ask(lambda store: store.size(key))

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._ask(lambda store: iter(list(store.scan(prefix))))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask(lambda store: store.delete(keys))

    def overwrite(self, key: str, body: Buffer) -> None:
        self._ask(lambda store: store.overwrite(key, body))

    def stream(self, key: str) -> Stream:
        """With the credentials of the moment: a stream that outlives them fails."""
        return self._now.store.stream(key)

    def close(self) -> None:
        self._now.store.close()

    def _ask(self, call: Callable[[ObjectStore], T]) -> T:
        used = self._now
        try:
            done = call(used.store)
        except StoreError as refusal:
            if not _may_be_stale(refusal, used):
                raise
            fresh = self._renewed(used, refusal)
        else:
            self._worked = True
            return done
        try:
            done = call(fresh.store)
        except StoreError as again:
            if _is_expired(again):
                raise self._later(again) from again
            raise
        self._worked = True
        return done

    def _renewed(self, used: Opened, refusal: StoreError) -> Opened:
        """Another opening than the one that was refused; raises when there is none to be had now."""
        with self._lock:
            if self._now is not used:  # another thread was quicker
                return self._now
            try:
                made = self._opening()
            except SettingsError as error:
                raise self._later(refusal) from error
            if made.credentials is not None and made.credentials == used.credentials:
                if _is_expired(refusal) and used.renewable and self._worked:
                    raise self._later(refusal) from refusal
                raise refusal
            self._now = made
        self._events(
            Event("store.credentials_renewed", {"uri": made.store.uri, "why": str(refusal).splitlines()[0]})
        )
        return made

    def _later(self, refusal: StoreError) -> StoreError:
        """For a store that worked before, new credentials may be on their way."""
        if not self._worked:
            return refusal
        return CredentialsExpired(
            f"{str(refusal).splitlines()[0]}\n  the credentials ran out, and there are no other ones yet\n"
            "  nothing was changed; renew what the store was opened with: the variables AWS_*, the file "
            "AWS_SHARED_CREDENTIALS_FILE, or store_options={'credential_provider': …}",
            **refusal.facts,
        )


def _is_expired(error: StoreError) -> bool:
    """An answer that says so; to HEAD a server says no more than that the request was bad."""
    status, code = error.facts.get("status"), error.facts.get("code")
    head = error.facts.get("op") == "size" and status in (400, 401)
    return code in _EXPIRED or head or (status == 401 and isinstance(error, AccessDenied))


def _may_be_stale(error: StoreError, used: Opened) -> bool:
    """Keys that were replaced are refused as unknown, not as expired. Those of the machine are renewed
    by the machine, so a plain refusal of them is final.
    """
    return _is_expired(error) or (isinstance(error, AccessDenied) and used.credentials is not None)
