"""Asks a store whether its creates are exclusive, instead of trusting its name.

Several creators race for one key, several times. One after another would prove nothing: a store
that looks first and writes then passes any such test.
"""

from __future__ import annotations

import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

from ftckpt.errors import AlreadyExists, StoreError, UnsafeStore
from ftckpt.store.api import ObjectStore

PROBES = "probes"


def probe(store: ObjectStore, *, creators: int = 8, rounds: int = 3) -> None:
    """Return when exactly one creator wins each race, the winner's bytes are what is read back, and
    the fresh object is listed at its size; raise ``UnsafeStore`` otherwise.

    Blocks for ``rounds`` races. What it wrote, below ``probes/``, is deleted again, also after a
    failure of the probe. A wrapper that lets fewer than ``creators`` calls through weakens it.
    """
    if not store.conditional_create:
        raise UnsafeStore(
            f"{store.uri}: creates are not exclusive there (a look, then a write)\n  nothing was written; "
            "choose another store, or allow_unconditional=True with exactly one writer",
            uri=store.uri,
        )
    folder = f"{PROBES}/{uuid.uuid4().hex}"
    keys = [f"{folder}/race-{number}" for number in range(rounds)]
    with ThreadPoolExecutor(creators, thread_name_prefix="ftckpt-probe") as pool:
        try:
            for key in keys:
                _race(store, key, creators, pool)
            _check_listing(store, folder, keys)
        finally:
            store.delete(keys)


def _race(store: ObjectStore, key: str, creators: int, pool: ThreadPoolExecutor) -> None:
    bodies = [f"creator {number} {uuid.uuid4().hex}".encode() for number in range(creators)]
    start = threading.Barrier(creators)

    def create(body: bytes) -> str:
        start.wait(timeout=60)
        try:
            store.create(key, body)
        except AlreadyExists:
            return "lost"
        except StoreError as error:
            if not error.retryable:
                raise
            return "unclear"
        return "won"

    outcomes = list(pool.map(create, bodies))
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome == "won"]
    found = bytes(store.read(key))
    # A create whose answer was lost may have won and been told "exists" when it was repeated.
    if len(winners) > 1 or (winners and winners[0] != found) or found not in bodies:
        raise UnsafeStore(
            f"{store.uri}: {len(winners)} of {creators} creators of one key were told that they had won, and "
            f"what is there {'is' if found in winners else 'is not'} one of theirs\n  a commit would "
            "prove nothing there; choose another store, or allow_unconditional=True with exactly one writer",
            uri=store.uri,
            key=key,
            winners=len(winners),
        )


def _check_listing(store: ObjectStore, folder: str, keys: list[str]) -> None:
    listed = {info.key: info.size_bytes for info in store.scan(folder)}
    for key in keys:
        if listed.get(key) != store.size(key):
            raise UnsafeStore(
                f"{store.uri}: an object that was just created is listed with {listed.get(key)} bytes, though "
                f"it has {store.size(key)}\n  ftckpt needs listings that are never behind",
                uri=store.uri,
                key=key,
            )
