"""What a restore asks of stores and of memory, counted: requests, bytes, and what one rank reads of many."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

import ftckpt
from benchmarks.restore.ours import Counting
from ftckpt.boxes import Box, whole
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore
from ftckpt.clock import SystemClock
from ftckpt.codec import RAW
from ftckpt.errors import ChunkCorrupt, StoreUnavailable
from ftckpt.events import Event, silent
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import (
    SCALE,
    ChunkRecord,
    Commit,
    FragmentRef,
    LeafRange,
    Position,
    fraction,
    may_hold,
)
from ftckpt.plan.assign import PARTS, SMALLEST_PART_BYTES, chunk_spans
from ftckpt.plan.listing import relevant
from ftckpt.plan.restore import Fetch, Placement, index_chunks, plan_restore
from ftckpt.reader import ReadSettings, check_packs, fetch, read_fragments
from ftckpt.session.pacing import Pacing
from ftckpt.store import RetryStore, open_store
from ftckpt.store.api import ByteRange
from ftckpt.store.nearest import NearestStore
from tests.core.records import PACK
from tests.support.stores import Sim

AT = Position(12, 2)
SIZE = 1000
"""Bytes of each chunk here."""


def chunks(count: int) -> tuple[bytes, list[Fetch]]:
    """A pack of so many raw chunks, and the fetches of all of them."""
    body = random.Random(count).randbytes(count * SIZE)
    fetches = []
    for number in range(count):
        digest = xxhash.xxh3_128_digest(body[number * SIZE : (number + 1) * SIZE])
        record = ChunkRecord(0, SIZE, digest, digest, RAW, 0, number * SIZE, SIZE)
        place = Placement(number, whole((SIZE,)), whole((SIZE,)), 0)
        fetches.append(Fetch(f"leaf.{number}", PACK, len(body), record, SIZE, (place,)))
    return body, fetches


class Ranges:
    """A store of one pack that keeps what it was asked for."""

    uri = "ranges://"
    conditional_create = True

    def __init__(self, body: bytes | None) -> None:
        self.body = body
        self.asked: list[tuple[int, int]] = []

    def read(self, key: str, at: ByteRange) -> memoryview:
        self.asked.append((at.start, at.end))
        return memoryview(bytes(at.size) if self.body is None else self.body[at.start : at.end])

    def size(self, key: str) -> int:
        return 0 if self.body is None else len(self.body)


def read_all(store, fetches: list[Fetch], settings: ReadSettings) -> dict[int, bytes]:
    placed: dict[int, bytes] = {}
    fetch(store, fetches, lambda where, raw: placed.update({where.want: bytes(raw)}), AT, settings)
    return placed


def test_a_bad_chunk_is_fetched_again_alone_and_from_the_next_source():
    body, fetches = chunks(10)
    bad = bytearray(body)
    bad[3 * SIZE + 7] ^= 1
    near, far, heard = Ranges(bytes(bad)), Ranges(body), list[Event]()

    placed = read_all(NearestStore([near, far], heard.append), fetches, ReadSettings(run_bytes=5 * SIZE))

    assert b"".join(placed[number] for number in range(10)) == body
    assert sorted(near.asked) == [(0, 5 * SIZE), (5 * SIZE, 10 * SIZE)]
    assert far.asked == [(3 * SIZE, 4 * SIZE)]
    assert [(event.name, event.fields["store"]) for event in heard] == [("read.passed_over", "ranges://")]


def test_what_two_sources_have_wrong_comes_from_the_third_or_is_an_error():
    body, fetches = chunks(2)
    wrong = bytes(len(body))
    heard: list[Event] = []

    placed = read_all(
        NearestStore([Ranges(wrong), Ranges(wrong), Ranges(body)], heard.append), fetches, ReadSettings()
    )

    assert b"".join(placed[number] for number in range(2)) == body
    assert len(heard) == 4
    with pytest.raises(ChunkCorrupt, match=r"leaf\.\d"):
        read_all(NearestStore([Ranges(wrong), Ranges(wrong)]), fetches, ReadSettings())


def test_a_range_that_is_answered_too_short_is_asked_of_the_next_source_and_never_taken_for_whole():
    body, fetches = chunks(3)
    heard: list[Event] = []

    placed = read_all(
        NearestStore([Ranges(body[:-100]), Ranges(body)], heard.append), fetches, ReadSettings()
    )
    with pytest.raises(StoreUnavailable, match=f"answered {3 * SIZE - 100} of {3 * SIZE} bytes"):
        read_all(Ranges(body[:-100]), fetches, ReadSettings())

    assert b"".join(placed[number] for number in range(3)) == body
    assert [event.name for event in heard] == ["read.passed_over"]


def test_a_transient_error_costs_one_range_and_nothing_is_read_twice():
    body, fetches = chunks(40)
    inner = Ranges(body)
    broken = StoreUnavailable("the connection broke")
    faulty = FaultyStore(inner, [Fault(Fail(error=broken), "read", nth=5, times=3)])
    store = RetryStore(faulty, deadline_s=30, clock=SystemClock(), events=silent, rng=random.Random(1))

    placed = read_all(store, fetches, ReadSettings(threads=2, run_bytes=4 * SIZE))

    assert b"".join(placed[number] for number in range(40)) == body
    assert len(faulty.log) == 10 + 3
    assert sorted(inner.asked) == [(n * 4 * SIZE, (n + 1) * 4 * SIZE) for n in range(10)]


@pytest.mark.parametrize("threads", [1, 8, 64])
def test_memory_is_bounded_by_the_budget_and_not_by_the_state(threads):
    """64 MiB of state through a budget of 4 MiB, in chunks of 256 KiB."""
    size, count, budget = 256 << 10, 256, 4 << 20
    digest = xxhash.xxh3_128_digest(bytes(size))
    fetches = [
        Fetch("w", PACK, size * count, ChunkRecord(0, size, digest, digest, RAW, 0, n * size, size), size, ())
        for n in range(count)
    ]
    store = Ranges(None)
    tracemalloc.start()

    try:
        fetch(
            store, fetches, lambda _where, _raw: None, AT, ReadSettings(threads=threads, budget_bytes=budget)
        )
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert sum(end - start for start, end in store.asked) == size * count
    assert peak_bytes <= budget + (1 << 20)


# --- what is there ------------------------------------------------------------------------------


@pytest.mark.parametrize("packs", [1, 8, 9, 40])
def test_few_packs_are_asked_for_one_by_one_and_many_by_a_listing(packs):
    """A rank of a job of thousands must not list what all of them wrote."""
    sim = Sim()
    keys = [f"packs/000002/000000000012/{number:03d}" for number in range(packs)]
    sim.objects.update(dict.fromkeys(keys, bytes(48)))
    store = FaultyStore(sim.store)

    check_packs(store, {(key, 48) for key in keys}, AT)

    assert {call.op for call in store.log} == {"size" if packs <= 8 else "scan"}
    assert len(store.log) == (packs if packs <= 8 else 1)


# --- which fragments ----------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "a.b", "a.c", "b", "c@g0.1"])


@st.composite
def refs(draw) -> FragmentRef:
    ranges = []
    for _ in range(draw(st.integers(0, 3))):
        first, last = sorted([draw(NAMES), draw(NAMES)])
        low, high = sorted([draw(st.integers(0, 8)), draw(st.integers(0, 8))])
        ranges.append(LeafRange(first, last, low * SCALE // 8, high * SCALE // 8))
    return FragmentRef(str(draw(st.integers(0, 10**9))), 1, "", tuple(ranges))


@st.composite
def wanted(draw) -> tuple[LeafSpec, Box]:
    low, high = sorted([draw(st.integers(0, 16)), draw(st.integers(0, 16))])
    return LeafSpec(draw(NAMES), "tensor", "int32", (16, 2)), Box((low, 0), (high - low, 2))


@given(st.lists(refs(), max_size=8, unique_by=lambda ref: ref.key), st.lists(wanted(), max_size=6))
def test_the_fragments_to_read_are_exactly_those_that_can_hold_a_want(found, wants):
    expected = [
        ref
        for ref in found
        if any(
            may_hold(ref.ranges, leaf.name, *fraction(box, leaf.shape)) for leaf, box in wants if box.numel
        )
    ]

    assert relevant(Commit(format=1, attempt=1, step=1, fragments=tuple(found)), wants) == expected


# --- eighths ------------------------------------------------------------------------------------


@given(
    st.integers(PARTS * SMALLEST_PART_BYTES // 4, 1 << 28),
    st.sampled_from([4, 8, 16]),
    st.integers(64 << 10, 64 << 20),
)
def test_large_boxes_are_cut_at_every_eighth_and_no_chunk_is_larger_than_allowed(
    numel, itemsize, chunk_bytes
):
    spans = list(chunk_spans(numel, itemsize, chunk_bytes))

    ends = [stop for _, stop in spans]
    assert spans == list(zip([0, *ends], ends, strict=False))
    assert {numel * part // PARTS for part in range(1, PARTS + 1)} <= set(ends)
    assert max(stop - start for start, stop in spans) * itemsize <= max(chunk_bytes, itemsize)


def parts(shape: tuple[int, int], dim: int) -> Iterator[Box]:
    for part in range(8):
        offset, extent = [0, 0], list(shape)
        extent[dim] //= 8
        offset[dim] = part * extent[dim]
        yield Box(tuple(offset), tuple(extent))


@pytest.fixture(scope="module")
def matrices(tmp_path_factory):
    """Of 2, 4 and 12 MiB, in one pack."""
    folder = tmp_path_factory.mktemp("matrices") / "run"
    state = {"m": {str(rows): torch.randn(rows, 512) for rows in (1024, 2048, 6144)}}
    with ftckpt.Session(folder, state, codec="raw", events=silent):
        pass
    return folder, state["m"]


@pytest.mark.parametrize("dim, at_most", [(0, 1.0), (1, 8.0)])
def test_an_eighth_of_the_rows_costs_an_eighth_of_the_bytes(matrices, dim, at_most):
    """Columns lie in all chunks, and no more than those are read."""
    folder, tensors = matrices
    store = Counting(open_store(folder))
    run = ftckpt.Run(store)
    needed = 0

    for name, tensor in tensors.items():
        for box in parts(tuple(tensor.shape), dim):
            rows, columns = (slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))
            assert torch.equal(run.tensor(f"m.{name}", box=box), tensor[rows, columns])
            needed += box.numel * 4

    assert store.packs_bytes <= at_most * needed
    if dim == 0:
        assert store.gets == 3 * 8


def test_eighths_of_several_tensors_are_fetched_by_one_request_where_they_lie_together(matrices):
    """And all of them by requests as large as they may be."""
    folder, tensors = matrices
    store = Counting(open_store(folder))
    commit = ftckpt.Run(store).latest()
    fragments = read_fragments(store, commit)
    wants = [
        (LeafSpec(f"m.{name}", "tensor", "float32", tuple(t.shape)), whole(tuple(t.shape)))
        for name, t in tensors.items()
    ]

    fetches = plan_restore(wants, index_chunks(fragments))
    placed: list[int] = []
    fetch(store, fetches, lambda where, _raw: placed.append(where.region.numel), commit.at)

    assert sum(placed) == sum(tensor.numel() for tensor in tensors.values())
    assert store.gets <= 3
    assert store.packs_bytes <= 1.01 * sum(item.stored_bytes for item in fetches)


# --- how far it is ------------------------------------------------------------------------------


def test_a_restore_that_takes_long_says_how_far_it_is_and_how_fast():
    heard: list[Event] = []
    now = [0.0]
    pacing = Pacing(7, heard.append, lambda: now[0])

    for second, done in [(1, 100), (2, 250), (3, 300), (5, 500), (6, 600)]:
        now[0] = float(second)
        pacing(done, 600)

    assert [event.fields for event in heard] == [
        {"step": 7, "bytes": 250, "total_bytes": 600, "bytes_s": 125, "left_s": 2.8},
        {"step": 7, "bytes": 500, "total_bytes": 600, "bytes_s": 100, "left_s": 1.0},
    ]
    assert (pacing.seconds, pacing.bytes_s) == (6.0, 100)


def test_whoever_asks_for_progress_is_told_to_the_end(matrices):
    folder, tensors = matrices
    live = {"m": {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}}
    told: list[tuple[int, int]] = []

    ftckpt.restore(folder, live, progress=lambda *bytes_: told.append(bytes_))

    assert told[-1][0] == told[-1][1] >= sum(tensor.nbytes for tensor in tensors.values())
    assert all(torch.equal(live["m"][name], tensor) for name, tensor in tensors.items())
