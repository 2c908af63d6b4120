"""The plan of one rank's restore out of a job that is too large to run: its records alone are made.

Every rank of the job saved its rows of each tensor, as FSDP does. The commit names all their fragments;
of these only those exist that hold what the measured rank wants, so that reading any other one fails.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place
from ftckpt.births import no_collecting
from ftckpt.boxes import Box
from ftckpt.layout import Writer, commit_key, fragment_key, pack_key
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import (
    BoxRecord,
    ChunkRecord,
    Commit,
    Fragment,
    FragmentRef,
    LeafRecord,
    PackRef,
    Position,
    decode,
    digest_of,
    encode,
    leaf_range,
)
from ftckpt.plan.restore import Fetch, Run, coalesce, index_chunks, plan_restore, relevant
from ftckpt.reader import DEFAULT, read_fragments
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore

TENSORS = 2_000
ROWS_A_RANK = 2
COLUMNS = (4096, 4096, 1024, 2816)
"""Of the tensors, in turn."""

TURNS = 7
AT = Position(100, 1)


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
    """A commit's bytes, a store with the fragments that the measured rank needs, and what it wants."""

    commit: bytes
    store: ObjectStore
    wants: Sequence[tuple[LeafSpec, Box]]

    def read(self) -> Commit:
        return decode(Commit, self.commit, commit_key(AT))

    def plan(self) -> tuple[Sequence[Fragment], Sequence[Fetch], Sequence[Run]]:
        """Everything between the bytes of the commit and the list of requests."""
        fragments = read_fragments(self.store, self.read(), self.wants)
        fetches = plan_restore(self.wants, index_chunks(fragments))
        return fragments, fetches, coalesce(fetches, DEFAULT.gap_bytes, DEFAULT.run_bytes)


def records(world: int, ranks: int) -> Records:
    """What the rank in the middle of ``ranks`` needs of a job of ``world`` ranks."""
    rows = ROWS_A_RANK * world
    each = -(-rows // ranks)
    low = ranks // 2 * each
    wants = [(leaf, Box((low, 0), (each, leaf.shape[1]))) for leaf in _leaves(rows)]
    holders = range(low // ROWS_A_RANK, (low + each - 1) // ROWS_A_RANK + 1)
    held = [_fragment(rank, rows) for rank in holders]
    store = open_store(f"memory://{uuid.uuid4().hex}")
    for rank, fragment in zip(holders, held, strict=True):
        store.create(fragment_key(AT, _writer(rank)), encode(fragment))
    return Records(encode(_commit(world, held)), store, wants)


def _plan_of(world: int, ranks: int) -> Numbers:
    """Seconds of computing, of all threads. Fetching a record is its GET, its digest and decoding it."""
    made = records(world, ranks)
    all_s, commits_s, fragments_s, plans_s = [], [], [], []
    for _ in range(TURNS):
        begun_s = time.process_time()
        commit = made.read()
        read_s = time.process_time()
        fragments = read_fragments(made.store, commit, made.wants)
        got_s = time.process_time()
        relevant(commit.fragments, made.wants)
        chosen_s = time.process_time()
        with no_collecting():  # as a restore does
            fetches = plan_restore(made.wants, index_chunks(fragments))
        runs = coalesce(fetches, DEFAULT.gap_bytes, DEFAULT.run_bytes)
        end_s = time.process_time()
        plans_s.append(end_s - got_s)
        commits_s.append(read_s - begun_s)
        fragments_s.append(got_s - read_s - (chosen_s - got_s))
        all_s.append(end_s - begun_s - (chosen_s - got_s))
        assert len(fetches) == TENSORS * len(fragments)
    return {
        "plan_s": median(plans_s),
        "all_s": median(all_s),
        "commit_s": median(commits_s),
        "fragments_s": median(fragments_s),
        "fragments": len(fragments),
        "chunks": len(fetches),
        "requests": len(runs),
    }


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


def _writer(rank: int) -> Writer:
    return Writer("g0", rank, f"{rank:032x}")


def _fragment(rank: int, rows: int) -> Fragment:
    records, at = [], 0
    for leaf in _leaves(rows):
        columns = leaf.shape[1]
        size = ROWS_A_RANK * columns * leaf.itemsize_bytes
        digest = bytes.fromhex(digest_of(f"{leaf.name} {rank}".encode()))
        chunk = ChunkRecord(0, ROWS_A_RANK * columns, digest, digest, 0, 0, at, size)
        box = BoxRecord((rank * ROWS_A_RANK, 0), (ROWS_A_RANK, columns), (chunk,))
        records.append(LeafRecord(leaf.name, leaf.kind, leaf.dtype, leaf.shape, "", (box,)))
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


def _commit(world: int, known: Sequence[Fragment]) -> Commit:
    """It names a fragment of every rank; only the known ones by the digest of anything that exists."""
    rows = ROWS_A_RANK * world
    bodies = {fragment.writer: encode(fragment) for fragment in known}
    leaves = _leaves(rows)
    names = leaves[0].name, leaves[-1].name
    refs = []
    for rank in range(world):
        body = bodies.get(str(_writer(rank)), b"")
        one_row = LeafRecord(
            names[0], "tensor", "bfloat16", leaves[0].shape, "",
            (BoxRecord((rank * ROWS_A_RANK, 0), (ROWS_A_RANK, COLUMNS[0]), ()),),
        )  # fmt: skip
        last = LeafRecord(names[1], "tensor", "bfloat16", leaves[0].shape, "", one_row.boxes)
        refs.append(
            FragmentRef(
                fragment_key(AT, _writer(rank)), len(body), digest_of(body), leaf_range((one_row, last))
            )
        )
    return Commit(format=1, attempt=AT.attempt, step=AT.step, state="s", fragments=tuple(refs), quorums=(1,))
