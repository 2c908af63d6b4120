"""A tier and a far store with the tiny job of ``tests.protocol.world`` on them.

``Near`` is a tier whose writers live and die at the test's word. In a simulation both stores lie in
one, under two prefixes, so that a schedule can interleave calls to either.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from ftckpt import layout
from ftckpt.agent import Agent
from ftckpt.attempts import look
from ftckpt.clock import Clock, HandClock
from ftckpt.codec import Codec
from ftckpt.layout import Writer
from ftckpt.manifest import Commit, Position, Ref
from ftckpt.reader import check_commit
from ftckpt.retention import Keep
from ftckpt.session.tiered import TierJournal
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore
from ftckpt.tiers import mirror
from ftckpt.writer import SaveEngine
from tests.protocol.world import PATIENCE, SETTINGS, Saver, read_all, start_job, state_at, writer

KEEP = Keep(last=3)
AUTO = Codec()
_numbers = itertools.count(1)


def nonce() -> str:
    return f"{next(_numbers):032x}"


class Below:
    """A part of a store as a store."""

    def __init__(self, inner: ObjectStore, prefix: str) -> None:
        self._inner, self._prefix = inner, prefix

    @property
    def uri(self) -> str:
        return f"{self._inner.uri}/{self._prefix}"

    @property
    def conditional_create(self) -> bool:
        return True

    def create(self, key: str, body: Buffer) -> None:
        self._inner.create(f"{self._prefix}/{key}", body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        return self._inner.read(f"{self._prefix}/{key}", at)

    def size(self, key: str) -> int:
        return self._inner.size(f"{self._prefix}/{key}")

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        found = self._inner.scan(f"{self._prefix}/{prefix}" if prefix else self._prefix)
        return iter([ObjectInfo(i.key.removeprefix(f"{self._prefix}/"), i.size_bytes) for i in found])

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete([f"{self._prefix}/{key}" for key in keys])

    def overwrite(self, key: str, body: Buffer) -> None:
        self._inner.overwrite(f"{self._prefix}/{key}", body)

    def close(self) -> None:
        pass


@dataclass(slots=True)
class Near:
    """A tier whose writers are all dead but those in ``alive``."""

    store: ObjectStore
    alive: set[str] = field(default_factory=set)
    files: dict[str, bytes] = field(default_factory=dict)

    def is_alive(self, name: Writer | str) -> bool:
        return str(name) in self.alive

    @contextmanager
    def staged(self, name: Writer) -> Iterator[memoryview]:
        yield memoryview(self.files.get(str(name), b""))

    def bury(self) -> None:
        pass


@dataclass(slots=True)
class TierSaver(Saver):
    """A saver whose store is a tier."""

    keep: Keep = KEEP
    codec: Codec = AUTO

    def __post_init__(self) -> None:
        me = writer(self.group, self.life)
        self.engine = SaveEngine(
            self.store,
            me,
            parent=self.parent,
            settings=replace(SETTINGS, codec=self.codec),
            clock=self.clock,
            on_commit=self.on_ack,
            journal=TierJournal(self.store, me, shared=True, keep=self.keep),
        )


def run_tiered(
    far: ObjectStore, near: ObjectStore, *steps: int, clock: Clock | None = None, keep: Keep = KEEP
) -> tuple[int, list[Commit]]:
    """A new attempt of the far store that has saved these steps in the tier, and its commits there."""
    begun = start_job(far)
    mirror(far, near)
    attempt = begun.claim.attempt
    with TierSaver(near, clock or HandClock(), attempt, begun.start.parent, keep=keep) as saver:
        return attempt, [saver.save(step) for step in steps]


def agent(near: Near, far: ObjectStore, *, clock: Clock | None = None) -> Agent:
    return Agent(near, far, nonce=nonce, clock=clock or HandClock(), patience=PATIENCE)


def check_far(far: ObjectStore) -> list[int]:
    """Every readable commit, on the lineage or off it, has all it names, and reads as it was saved.
    The steps of the lineage, oldest first.
    """
    seen = look(far)
    for at in seen.view.readable:
        check_commit(far, seen.commits[at])
        assert read_all(far, seen.commits[at]) == state_at(at.step), at
    return [at.step for at in reversed(seen.lineage)]


def packs_of(far: ObjectStore, at: Position) -> list[str]:
    return [info.key for info in far.scan(layout.pack_prefix(at))]


def ref_of(store: ObjectStore, step: int, attempt: int = 1) -> Ref:
    return look(store).refs[Position(step, attempt)]
