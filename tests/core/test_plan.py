"""Who writes what, and what is fetched: every element once, whoever holds it and whoever wants it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.boxes import Box, whole
from ftckpt.errors import RecordCorrupt
from ftckpt.leaf import Holding, LeafSpec
from ftckpt.manifest import BoxRecord, ChunkRecord, Fragment, LeafRecord, PackRef
from ftckpt.plan.assign import Place, chunk_spans, covers, held_twice, plan_save
from ftckpt.plan.restore import Fetch, coalesce, index_chunks, plan_restore
from tests.core.records import chunk, fragment, leaf
from tests.core.strategies import boxes_inside, elements, shapes, tilings

CHUNK_BYTES = 8


# --- saving -------------------------------------------------------------------------------------


@st.composite
def topologies(draw: st.DrawFn) -> tuple[int, list[list[list[Holding]]]]:
    """Ranks of some replica groups and what each holds: replicated, sharded, sharded and replicated
    (HSDP), and per rank. ``[group][rank]`` is in name order, as capture gives it.
    """
    groups, replicas, shards = draw(st.tuples(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3)))
    ranks = replicas * shards
    held: list[list[list[Holding]]] = [[[] for _ in range(ranks)] for _ in range(groups)]
    for number in range(draw(st.integers(1, 5))):
        shape = draw(shapes(max_dims=2))
        kind = draw(st.sampled_from(["replicated", "sharded", "per rank"]))
        dtype = draw(st.sampled_from(["uint8", "float32", "complex128"]))
        cut = (
            sorted(draw(st.lists(st.integers(0, shape[0]), min_size=shards - 1, max_size=shards - 1)))
            if shape
            else []
        )
        edges = [0, *cut, shape[0]] if shape else []
        for group in range(groups):
            for rank in range(ranks):
                spec = LeafSpec(f"leaf{number}", "tensor", dtype, shape)
                holding = Holding(spec, whole(shape), tuple(range(ranks)))
                if kind == "per rank":
                    owner = f"g{group}.{rank}"
                    spec = LeafSpec(f"leaf{number}@{owner}", "tensor", dtype, shape, owner)
                    holding = Holding(spec, whole(shape), (rank,), every_group=False)
                elif kind == "sharded" and shape:
                    low, high = edges[rank % shards], edges[rank % shards + 1]
                    box = Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))
                    same = tuple(r for r in range(ranks) if r % shards == rank % shards)
                    holding = Holding(spec, box, same)
                held[group][rank].append(holding)
    return groups, held


@given(topologies())
def test_over_all_ranks_every_element_is_written_once_and_every_leaf_is_named(topology):
    groups, held = topology
    written: dict[str, list[tuple[Box, int, int]]] = {}
    named: set[str] = set()

    for group, ranks in enumerate(held):
        for rank, holdings in enumerate(ranks):
            for task in plan_save(holdings, Place(group, groups, rank), CHUNK_BYTES):
                holding = holdings[task.holding]
                named.add(holding.leaf.name)
                if task.start < task.stop:
                    spans = written.setdefault(holding.leaf.name, [])
                    spans.append((holding.box, task.start, task.stop))

    for holding in (h for ranks in held for holdings in ranks for h in holdings):
        name, shape = holding.leaf.name, holding.leaf.shape
        flat = [elements(box, shape).reshape(-1)[start:stop] for box, start, stop in written.get(name, [])]
        found = np.concatenate([np.arange(0), *flat])
        np.testing.assert_array_equal(np.sort(found), np.arange(int(np.prod(shape))))
        assert name in named
        assert covers(shape, written.get(name, []))


@given(topologies())
def test_holders_of_the_same_leaves_write_the_same_amount_within_one_chunk(topology):
    groups, held = topology
    lines: dict[tuple[tuple[int, ...], int], tuple[int, Counter[tuple[int, int]]]] = {}

    for group, ranks in enumerate(held):
        for rank, holdings in enumerate(ranks):
            for line in {(h.ranks, h.every_group) for h in holdings}:
                key = (line[0], -1 if line[1] else group)
                size = sum(h.size_bytes for h in holdings if (h.ranks, h.every_group) == line)
                lines.setdefault(key, (size, Counter()))[1][group, rank] = 0
            for task in plan_save(holdings, Place(group, groups, rank), CHUNK_BYTES):
                h = holdings[task.holding]
                key = (h.ranks, -1 if h.every_group else group)
                lines[key][1][group, rank] += (task.stop - task.start) * h.leaf.itemsize_bytes

    for total_bytes, shares in lines.values():
        for share in shares.values():
            assert abs(share - total_bytes / len(shares)) <= max(CHUNK_BYTES, 16)


def test_two_groups_of_one_rank_split_one_tensor_in_the_middle():
    """16 float32 in chunks of 16 bytes: four chunks, two for each group."""
    holdings = [Holding(LeafSpec("w", "tensor", "float32", (4, 4)), whole((4, 4)), (0,))]

    shares = [plan_save(holdings, Place(group, 2, 0), 16) for group in range(2)]

    assert [[(t.start, t.stop) for t in share] for share in shares] == [[(0, 4), (4, 8)], [(8, 12), (12, 16)]]


@given(st.integers(0, 100), st.sampled_from([1, 2, 4, 16]), st.integers(1, 64))
def test_spans_follow_each_other_and_stay_below_the_chunk_size(numel, itemsize_bytes, chunk_bytes):
    spans = list(chunk_spans(numel, itemsize_bytes, chunk_bytes))

    assert [i for start, stop in spans for i in range(start, stop)] == list(range(numel))
    assert all((stop - start) * itemsize_bytes <= max(chunk_bytes, itemsize_bytes) for start, stop in spans)


@pytest.mark.parametrize(
    "spans, covered",
    [
        ([(0, 4)], True),
        ([(0, 2), (2, 4)], True),
        ([(2, 4), (0, 2), (2, 4)], True),  # two writers wrote one share
        ([(0, 3)], False),
        ([(0, 2), (3, 4)], False),
        ([(0, 2), (1, 3)], False),  # as many elements, one of them twice and one missing
        ([(0, 4), (1, 2)], False),
        ([], False),
    ],
)
def test_a_cover_has_every_element_and_none_twice(spans, covered):
    box = Box((0,), (4,))

    assert covers((4,), [(box, start, stop) for start, stop in spans]) is covered


def test_boxes_that_overlap_are_no_cover():
    left, right = Box((0,), (3,)), Box((2,), (1,))

    assert held_twice([(left, 0, 3), (right, 0, 1)])
    assert not covers((4,), [(left, 0, 3), (right, 0, 1)])
    assert covers((0, 3), [])
    assert covers((), [(Box((), ()), 0, 1)])


# --- restoring ----------------------------------------------------------------------------------


@st.composite
def saved_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Fragment], dict[str, bytes]]:
    """A tensor of numbered int32 elements, cut into boxes and chunks, scattered over packs of two writers."""
    shape = draw(shapes())
    packs: dict[str, bytearray] = {f"packs/000001/000000000001/{n}": bytearray() for n in "abc"}
    keys = list(packs)
    boxes: list[list[BoxRecord]] = [[], []]
    for box in draw(tilings(shape)):
        flat = elements(box, shape).astype(np.int32).reshape(-1)
        records = []
        for start, stop in chunk_spans(box.numel, 4, draw(st.sampled_from([4, 12, 20, 400]))):
            body = flat[start:stop].tobytes()
            digest = xxhash.xxh3_128_digest(body)
            number = draw(st.integers(0, 2))
            offset = len(packs[keys[number]])
            packs[keys[number]] += body
            records.append(ChunkRecord(start, stop, digest, digest, 0, number, offset, len(body)))
        boxes[draw(st.integers(0, 1))].append(BoxRecord(box.offset, box.extent, tuple(records)))
    refs = tuple(PackRef(key, len(packs[key])) for key in keys)
    fragments = [
        Fragment(
            format=1, attempt=1, step=1, writer=f"w{n}", quorum=1, members="", parent=None, packs=refs,
            leaves=(LeafRecord("t", "tensor", "int32", shape, "", tuple(part)),),
        )
        for n, part in enumerate(boxes)
    ]  # fmt: skip
    return shape, fragments, {key: bytes(body) for key, body in packs.items()}


def fill(
    fetches: Sequence[Fetch], packs: dict[str, bytes], wants: Sequence[Box]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Do what a reader does with a plan: per want, the elements and how often each was written."""
    filled = [(np.full(w.extent, -1, np.int32), np.zeros(w.extent, np.int32)) for w in wants]
    for item in fetches:
        raw = packs[item.pack][item.chunk.offset :][: item.chunk.size]
        assert len(raw) == item.raw_bytes
        for placement in item.placements:
            piece, region, want = placement.piece, placement.region, wants[placement.want]
            block = np.frombuffer(raw[placement.first_byte :][: piece.numel * 4], np.int32).reshape(
                piece.extent
            )
            source = tuple(
                slice(o - p, o - p + n)
                for o, p, n in zip(region.offset, piece.offset, region.extent, strict=True)
            )
            target = tuple(
                slice(o - w, o - w + n)
                for o, w, n in zip(region.offset, want.offset, region.extent, strict=True)
            )
            filled[placement.want][0][target] = block[source]
            filled[placement.want][1][target] += 1
    return filled


@given(saved_tensors(), st.data())
def test_however_it_was_cut_every_wanted_element_is_read_once_from_its_place(saved, data):
    """
    Any tiling saved, any boxes wanted, 0-dimensional and empty ones too: each wanted element comes
    from exactly one chunk and exactly the right bytes, and no chunk is fetched twice or for nothing.
    """
    shape, fragments, packs = saved
    wants = [data.draw(boxes_inside(shape)) for _ in range(data.draw(st.integers(1, 3)))]
    spec = LeafSpec("t", "tensor", "int32", shape)

    fetches = plan_restore([(spec, want) for want in wants], index_chunks(fragments))

    for want, (found, times) in zip(wants, fill(fetches, packs, wants), strict=True):
        np.testing.assert_array_equal(found, elements(want, shape))
        assert (times == 1).all()
    assert all(item.placements for item in fetches)
    places = [(item.pack, item.chunk.offset) for item in fetches]
    assert places == sorted(set(places))


@given(saved_tensors(), st.integers(0, 20), st.integers(1, 60))
def test_runs_join_neighbours_and_hold_every_chunk_once(saved, gap_bytes, run_bytes):
    shape, fragments, _ = saved
    spec = LeafSpec("t", "tensor", "int32", shape)
    fetches = plan_restore([(spec, whole(shape))], index_chunks(fragments))

    runs = coalesce(fetches, gap_bytes, run_bytes)

    assert [item for run in runs for item in run.fetches] == list(fetches)
    for run in runs:
        assert all(item.pack == run.pack for item in run.fetches)
        ends = [item.chunk.offset + item.chunk.size for item in run.fetches]
        assert (run.start, run.end) == (run.fetches[0].chunk.offset, max(ends))
        assert len(run.fetches) == 1 or run.end - run.start <= run_bytes
        starts = [item.chunk.offset for item in run.fetches]
        assert all(start - end <= gap_bytes for start, end in zip(starts[1:], ends, strict=False))


def test_two_groups_become_three():
    """A (4, 3) tensor saved as rows 0-1 and 2-3, wanted as rows 0, 1-2 and 3: the chunks are rows."""
    rows = tuple(chunk(3 * n, 3 * n + 3, offset=12 * n, size=12) for n in range(2))
    saved = [
        leaf(*rows, name="w", shape=(4, 3), offset=(0, 0), extent=(2, 3)),
        leaf(*(chunk(3 * n, 3 * n + 3, offset=24 + 12 * n, size=12) for n in range(2)), name="w", shape=(4, 3),
             offset=(2, 0), extent=(2, 3)),
    ]  # fmt: skip
    wants = [Box((0, 0), (1, 3)), Box((1, 0), (2, 3)), Box((3, 0), (1, 3))]

    fetches = plan_restore(
        [(saved[0].spec, want) for want in wants], index_chunks([fragment(part) for part in saved])
    )

    assert [(f.chunk.offset, [(p.want, p.region.offset) for p in f.placements]) for f in fetches] == [
        (0, [(0, (0, 0))]),
        (12, [(1, (1, 0))]),
        (24, [(1, (2, 0))]),
        (36, [(2, (3, 0))]),
    ]


@pytest.mark.parametrize(
    "spans", [[(0, 2)], [(0, 2), (1, 3)], [(0, 3), (1, 4)], [(0, 4), (0, 2)], []], ids=str
)
def test_chunks_that_do_not_tile_a_wanted_leaf_are_refused_by_its_name(spans):
    chunks = [chunk(a, b, offset=0, size=4 * (b - a)) for a, b in spans]
    found = leaf(*chunks, name="actor.bias", shape=(4,), offset=(0,), extent=(4,))

    with pytest.raises(RecordCorrupt, match=r"actor\.bias") as caught:
        plan_restore([(found.spec, whole((4,)))], index_chunks([fragment(found)]))

    assert caught.value.leaf == "actor.bias"


def test_a_share_that_two_writers_wrote_is_read_once():
    """A slow owner and the survivor who took over its share both wrote it."""
    part = leaf(chunk(0, 6, size=24), chunk(6, 12, offset=24, size=24))

    fetches = plan_restore([(part.spec, whole((3, 4)))], index_chunks([fragment(part), fragment(part)]))

    assert [(f.chunk.start, f.chunk.stop) for f in fetches] == [(0, 6), (6, 12)]


def test_a_leaf_that_nobody_saved_is_refused():
    wanted = LeafSpec("absent", "tensor", "int32", (2,))

    with pytest.raises(RecordCorrupt, match="absent"):
        plan_restore([(wanted, whole((2,)))], {})
    assert plan_restore([(wanted, Box((0,), (0,)))], {}) == ()
