"""A tiny job on the real rooms: what it trains, how it saves, and what a reader gets back.

The state is three leaves of bytes: ``frozen`` never changes (and so is reused from parent to
parent), ``actor.w`` and the value ``meta`` are a function of the step and of a salt. All groups
hold all of it, so that they share the writing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

from ftckpt.attempts import look
from ftckpt.begin import Begun, Caller, begin
from ftckpt.boxes import Box, whole
from ftckpt.clock import Clock
from ftckpt.commit import Expected, Patience
from ftckpt.errors import Fenced, SaveError
from ftckpt.layout import Writer
from ftckpt.leaf import Holding, LeafSpec
from ftckpt.manifest import Commit, Fragment, Position, Ref
from ftckpt.plan.assign import Place, plan_save
from ftckpt.plan.restore import Placement, index_chunks, plan_restore
from ftckpt.reader import ReadSettings, check_commit, fetch, leaf_specs
from ftckpt.snapshot import Staged
from ftckpt.store.api import ObjectStore
from ftckpt.writer import SaveEngine, SaveJob, WriteSettings, write_share

CHUNK_BYTES = 8
PATIENCE = Patience(deadline_s=20.0, takeover_s=4.0, poll_s=0.5, max_poll_s=2.0)
SETTINGS = WriteSettings(
    pack_bytes=1 << 20, packs_in_flight=1, encode_threads=1, patience=PATIENCE, backlog=1
)
READ = ReadSettings(threads=1)
State = dict[str, bytes]


def state_at(step: int, salt: str = "") -> State:
    """The whole state after ``step`` steps; the same for everybody who trains with the same salt."""
    line = f"{salt}/{step:04d}".encode()
    return {
        "frozen": bytes(range(32)),
        "actor.w": (line * 24)[:24],
        "meta": line * (1 + step % 3),
    }


def staged(state: State, group: int = 0, groups: int = 1, chunk_bytes: int = CHUNK_BYTES) -> Staged:
    """This group's share of the state, staged."""
    holdings = tuple(
        Holding(
            LeafSpec(name, "value" if name == "meta" else "tensor", "uint8", (len(body),)),
            whole((len(body),)),
            (0,),
        )
        for name, body in sorted(state.items())
    )
    tasks = plan_save(holdings, Place(group, groups, 0), chunk_bytes)
    chunks = [state[holdings[t.holding].leaf.name][t.start : t.stop] for t in tasks]
    return Staged(holdings, tasks, list(chunks))


def read_all(store: ObjectStore, commit: Commit) -> State:
    """Every leaf of a commit, read as a restore reads: existence first, each chunk verified."""
    fragments = check_commit(store, commit)
    specs = list(leaf_specs(fragments).values())
    buffers = [bytearray(spec.shape[0]) for spec in specs]
    fetches = plan_restore([(spec, Box((0,), spec.shape)) for spec in specs], index_chunks(fragments))

    def place(placement: Placement, raw: memoryview) -> None:
        start, size = placement.region.offset[0], placement.region.extent[0]
        skip = placement.first_byte + start - placement.piece.offset[0]
        buffers[placement.want][start : start + size] = raw[skip : skip + size]

    fetch(store, fetches, place, commit.at, READ)
    return {spec.name: bytes(buffer) for spec, buffer in zip(specs, buffers, strict=True)}


def writer(group: int = 0, life: str = "a") -> Writer:
    return Writer(f"g{group}", 0, (life.encode().hex() + "0" * 32)[:32])


def expected(
    at: Position,
    parent: Ref | None,
    writers: Sequence[Writer],
    *,
    quorum: int = 1,
    members: str | None = None,
) -> Expected:
    """The save of a step by all of ``writers``; the members' digest is made of their incarnations."""
    lives = "".join(sorted(w.incarnation for w in writers))
    return Expected(at, parent, quorum, members if members is not None else lives, tuple(writers))


def share(store: ObjectStore, save: Expected, me: Writer, state: State) -> Fragment:
    """Put the packs of this writer's share; returns the fragment, which is not put yet."""
    job = SaveJob(save, staged(state, save.writers.index(me), len(save.writers)))
    return write_share(store, job, save, me, SETTINGS, {})


def start_job(store: ObjectStore, host: str = "job", *, step: int | None = None) -> Begun:
    """Begin the next attempt."""
    caller = Caller(("train",), "/", host, 1)
    return begin(store, caller, name="run", on_empty="start", step=step)


@dataclass(slots=True)
class Saver:
    """A save engine and what it was told; closed when its block ends."""

    store: ObjectStore
    clock: Clock
    attempt: int
    parent: Ref | None
    group: int = 0
    groups: int = 1
    life: str = "a"
    salt: str = ""
    chunk_bytes: int = CHUNK_BYTES
    on_ack: Callable[[Commit], None] = lambda _commit: None
    engine: SaveEngine = field(init=False)

    def __post_init__(self) -> None:
        me = writer(self.group, self.life)
        self.engine = SaveEngine(
            self.store, me, parent=self.parent, settings=SETTINGS, clock=self.clock, on_commit=self.on_ack
        )

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.engine.close(30)

    def save(self, step: int, state: State | None = None) -> Commit:
        """Save and wait."""
        writers = [writer(g, self.life) for g in range(self.groups)]
        save = expected(Position(step, self.attempt), None, writers)
        content = staged(state or state_at(step, self.salt), self.group, self.groups, self.chunk_bytes)
        return self.engine.submit(SaveJob(save, content)).wait(60)


def job(
    store: ObjectStore,
    clock: Clock,
    steps: int,
    *,
    host: str = "job",
    step: int | None = None,
    acked: Callable[[Commit], None] = lambda _commit: None,
) -> int:
    """Begin, then train and save ``steps`` steps, as a whole job of one process does. Stops when it is
    fenced; a failed save does not stop it. Returns its attempt.
    """
    begun = start_job(store, host, step=step)
    parent = begun.start.parent
    first = parent.step + 1 if parent else 0
    with Saver(store, clock, begun.claim.attempt, parent, on_ack=acked) as saver:
        for number in range(first, first + steps):
            try:
                saver.save(number)
            except SaveError:
                continue
            except Fenced:
                break
    return begun.claim.attempt


def run_of(store: ObjectStore, clock: Clock, *steps: int) -> tuple[int, Ref]:
    """Arrange a run: a new attempt that has saved these steps. Its number and its newest commit."""
    begun = start_job(store)
    with Saver(store, clock, begun.claim.attempt, begun.start.parent) as saver:
        for step in steps:
            saver.save(step)
    seen = look(store)
    return begun.claim.attempt, seen.refs[seen.lineage[0]]
