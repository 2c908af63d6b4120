"""The plan of one rank's restore out of a job that is too large to run: its records alone are made.

Every rank of the job saved its rows of each tensor, as FSDP does, and its generators; the first also the values
that all share. The commit names all their fragments and lists their leaves, as a session's does; of the fragments
only those exist that hold what the measured rank wants, so that reading any other one fails.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

import msgspec

from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place
from ftckpt.births import no_collecting
from ftckpt.boxes import Box, whole
from ftckpt.contents import contents
from ftckpt.layout import Writer, commit_key, fragment_key, pack_key
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import (
    OWN,
    SCALE,
    BoxRecord,
    ChunkRecord,
    Commit,
    Fragment,
    FragmentRef,
    LeafRange,
    LeafRecord,
    OwnRecord,
    PackRef,
    Position,
    decode,
    digest_of,
    encode,
)
from ftckpt.plan.listing import Want, listing, relevant
from ftckpt.plan.restore import coalesce, index_chunks, plan_restore
from ftckpt.reader import DEFAULT
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore

TENSORS = 2_000
ROWS_A_RANK = 2
COLUMNS = (4096, 4096, 1024, 2816)
"""Of the tensors, in turn."""

TURNS = 7
AT = Position(100, 1)
VALUES = LeafSpec("actor", "value", "uint8", (60_000,))
"""The names of all tensors."""


def nothing(_place: Place, _world: int) -> Numbers:
    """There is nothing to save."""
    return {}


def plan(_place: Place, world: int) -> Numbers:
    """A rank in the middle of a job that goes on with as many ranks as saved, with three quarters of them,
    or with half; the slowest of the three. And the same in a job of a sixteenth of the size, whose ranks
    want as much each.
    """
    large = [_plan_of(world, ranks) for ranks in _layouts(world)]
    small = [_plan_of(world // 16, ranks) for ranks in _layouts(world // 16)]
    told = {key: max(one[key] for one in large) for key in large[0]}
    return {"ranks": world, "tensors": TENSORS, **told, "sixteenth_s": max(one["plan_s"] for one in small)}


def _layouts(world: int) -> tuple[int, int, int]:
    return world, world * 3 // 4, world // 2


@dataclass(frozen=True, slots=True)
class Records:
    """A commit's bytes, a store with the fragments that the measured rank needs, and what it wants: first the
    values, which say what else there is.
    """

    commit: bytes
    store: ObjectStore
    values: Sequence[Want]
    tensors: Sequence[Want]

    def read(self) -> Commit:
        return decode(Commit, self.commit, commit_key(AT))

    def plan(self) -> Numbers:
        """Everything between the bytes of the commit and the list of requests. Seconds of computing, of all
        threads; fetching a record is its GET, its digest and decoding it.
        """
        wants = [*self.values, *self.tensors]
        times_s = [time.process_time()]
        commit = self.read()
        times_s.append(time.process_time())
        with no_collecting():  # as a restore does
            saved = contents(self.store, commit)
            times_s.append(time.process_time())
            relevant(commit, wants)
            times_s.append(time.process_time())
            fragments = saved.fragments(wants)
            times_s.append(time.process_time())
            names = {leaf.name for leaf, _ in wants}
            index = index_chunks(fragments, names)
            runs = [
                run
                for part in (self.values, self.tensors)
                for run in coalesce(plan_restore(part, index), DEFAULT.gap_bytes, DEFAULT.run_bytes)
            ]
            times_s.append(time.process_time())
        read_s, listed_s, chosen_s, got_s, planned_s = (b - a for a, b in pairwise(times_s))
        return {
            "plan_s": listed_s + chosen_s + planned_s,
            "all_s": times_s[-1] - times_s[0] - chosen_s,  # which was done twice
            "commit_s": read_s,
            "fragments_s": got_s - chosen_s,
            "fragments": len(fragments),
            "chunks": sum(len(run.fetches) for run in runs),
            "requests": len(runs),
        }


def records(world: int, ranks: int) -> Records:
    """What the rank in the middle of ``ranks`` needs of a job of ``world`` ranks."""
    rows = ROWS_A_RANK * world
    each = -(-rows // ranks)
    rank = ranks // 2
    low = rank * each
    tensors = [(leaf, Box((low, 0), (each, leaf.shape[1]))) for leaf in _leaves(rows)]
    values = [(VALUES, whole(VALUES.shape))]
    if ranks == world:  # generators go back to as many ranks as saved them
        values.append((_generators(rank), whole(VALUES.shape)))
    holders = range(low // ROWS_A_RANK, (low + each - 1) // ROWS_A_RANK + 1)
    held = {rank: _fragment(rank, rows) for rank in sorted({0, *holders})}
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for rank, fragment in held.items():
        store.create(fragment_key(AT, _writer(rank)), encode(fragment))
    return Records(encode(_commit(world, held)), store, values, tensors)


def _plan_of(world: int, ranks: int) -> Numbers:
    made = records(world, ranks)
    turns = [made.plan() for _ in range(TURNS)]
    return {key: median(turn[key] for turn in turns) for key in turns[0]}


def _leaves(rows: int) -> list[LeafSpec]:
    return [
        LeafSpec(
            f"actor.layers.{number // 10:03d}.p{number % 10}",
            "tensor",
            "bfloat16",
            (rows, COLUMNS[number % len(COLUMNS)]),
        )
        for number in range(TENSORS)
    ]


def _generators(rank: int) -> LeafSpec:
    return LeafSpec(f"rng@g0.{rank}", "value", "uint8", VALUES.shape, f"g0.{rank}")


def _writer(rank: int) -> Writer:
    return Writer("g0", rank, f"{rank:032x}")


def _fragment(rank: int, rows: int) -> Fragment:
    parts = [(leaf, Box((rank * ROWS_A_RANK, 0), (ROWS_A_RANK, leaf.shape[1]))) for leaf in _leaves(rows)]
    parts += [(leaf, whole(leaf.shape)) for leaf in (_generators(rank), *([VALUES] if not rank else ()))]
    records, at = [], 0
    for leaf, box in sorted(parts, key=lambda part: part[0].name):
        size = box.numel * leaf.itemsize_bytes
        digest = bytes.fromhex(digest_of(f"{leaf.name} {rank}".encode()))
        chunk = ChunkRecord(0, box.numel, digest, digest, 0, 0, at, size)
        record = BoxRecord(box.offset, box.extent, (chunk,))
        records.append(LeafRecord(leaf.name, leaf.kind, leaf.dtype, leaf.shape, leaf.owner, (record,)))
        at += size
    return Fragment(
        format=1,
        attempt=AT.attempt,
        step=AT.step,
        writer=str(_writer(rank)),
        quorum=1,
        members="m",
        parent=None,
        packs=(PackRef(pack_key(AT, _writer(rank), 0), at, b"d" * 16),),
        leaves=tuple(records),
    )


def _commit(world: int, known: Mapping[int, Fragment]) -> Commit:
    """It names a fragment of every rank; only the known ones by the digest of anything that exists. Of each
    it says what a committer would, without all of them being made.
    """
    bodies = {rank: encode(fragment) for rank, fragment in known.items()}
    some = listing([_fragment(0, ROWS_A_RANK * world), _fragment(1, ROWS_A_RANK * world)])
    refs, own = [], []
    for rank in range(world):
        body, generators = bodies.get(rank, b""), _generators(rank)
        low = rank * SCALE // world
        ranges = [
            msgspec.structs.replace(held, low=low, high=low + SCALE // world) for held in some.ranges[1][:1]
        ]
        ranges.append(LeafRange(generators.name, generators.name, 0, SCALE, OWN))
        refs.append(
            FragmentRef(
                fragment_key(AT, _writer(rank)),
                len(body),
                digest_of(body),
                tuple(ranges) if rank else some.ranges[0],
            )
        )
        own.append(OwnRecord(generators.owner, ("rng",), (rank,)))
    return Commit(
        format=1, attempt=AT.attempt, step=AT.step, state="s", fragments=tuple(refs), quorums=(1,),
        leaves=some.leaves, own=tuple(own),
    )  # fmt: skip
