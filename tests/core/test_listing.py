"""What a commit says of its leaves: true of every fragment, and close to it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.boxes import Box, intersect, whole
from ftckpt.errors import RecordCorrupt
from ftckpt.leaf import Holding, LeafSpec
from ftckpt.manifest import (
    CUT,
    OWN,
    WHOLE,
    BoxRecord,
    Commit,
    Fragment,
    FragmentRef,
    LeafRecord,
    decode,
    encode,
    leaf_range,
)
from ftckpt.plan.assign import SHORT_LINE_WRITERS, SMALLEST_PART_BYTES, Place, plan_save
from ftckpt.plan.listing import listed, mislisted, relevant, specs_of, values_of
from tests.core import records
from tests.core.strategies import boxes_inside, shapes, tilings


def record(name: str, shape: tuple[int, ...], box: Box | None, *, kind: str = "tensor", owner: str = ""):
    boxes = () if box is None else (BoxRecord(box.offset, box.extent, ()),)
    return LeafRecord(name, kind, "uint8", shape, owner, boxes)


def committed(*fragments: list[LeafRecord]) -> tuple[Commit, list[Fragment]]:
    made = [
        Fragment(
            format=1, attempt=1, step=2, writer=str(number), quorum=0, members="", parent=None,
            leaves=tuple(sorted(leaves, key=lambda leaf: leaf.name)),
        )
        for number, leaves in enumerate(fragments)
    ]  # fmt: skip
    refs = tuple(FragmentRef(f"fragments/000001/000000000002/{n}", 1, "", ()) for n in range(len(made)))
    return listed(Commit(format=1, attempt=1, step=2, fragments=refs), made), made


@st.composite
def jobs(draw: st.DrawFn) -> list[list[LeafRecord]]:
    """Leaves as two to four writers hold them: cut anyhow, whole at one or two of them, and their own."""
    writers: list[list[LeafRecord]] = [[] for _ in range(draw(st.integers(2, 4)))]
    numbers = st.integers(0, len(writers) - 1)
    for number in range(draw(st.integers(0, 12))):
        shape, name = draw(shapes(2, 5)), f"{draw(st.sampled_from('abc'))}.{number:02d}"
        if draw(st.booleans()):
            for box in draw(tilings(shape, max_cuts=1)):
                writers[draw(numbers)].append(record(name, shape, box))
        else:
            for writer in draw(st.sets(numbers, min_size=1, max_size=2)):
                writers[writer].append(record(name, shape, whole(shape)))
    for writer, leaves in enumerate(writers):
        if draw(st.booleans()):
            owner = f"g0.{writer}"
            leaves.append(record(f"d@{owner}", (3,), whole((3,)), kind="value", owner=owner))
            leaves.append(record(f"b.key@{owner}", (2,), whole((2,)), owner=owner))
    return writers


@given(jobs(), st.data())
def test_no_fragment_is_passed_over_that_holds_a_part_of_what_is_wanted(job, data):
    commit, fragments = committed(*job)
    specs = {leaf.name: leaf.spec for fragment in fragments for leaf in fragment.leaves}
    if not specs:
        return
    names = data.draw(st.lists(st.sampled_from(sorted(specs)), unique=True, max_size=4))
    wants = [(specs[name], data.draw(boxes_inside(specs[name].shape))) for name in names]

    near = relevant(commit, wants)

    for ref, fragment in zip(commit.fragments, fragments, strict=True):
        held = [(leaf.name, box.box) for leaf in fragment.leaves for box in leaf.boxes]
        if any(spec.name == name and intersect(box, part) for spec, box in wants for name, part in held):
            assert ref in near
    assert near == [ref for ref in commit.fragments if ref in near]


@given(jobs())
def test_every_leaf_is_listed_as_the_fragments_have_it(job):
    commit, fragments = committed(*job)

    found = {leaf.name: leaf.spec for fragment in fragments for leaf in fragment.leaves}
    assert specs_of(commit) == {name: spec for name, spec in found.items() if not spec.owner}
    assert set(values_of(commit)) == {name for name, spec in found.items() if spec.kind == "value"}
    assert {own.owner for own in commit.own} == {spec.owner for spec in found.values()} - {""}
    assert mislisted(commit, fragments) == []
    assert decode(Commit, encode(commit), "commits/000000000002-000001") == commit


@given(jobs(), st.data())
def test_a_list_that_says_something_else_is_found_out(job, data):
    commit, fragments = committed(*job)
    if not commit.leaves and not commit.own:
        return
    changed = []
    if commit.leaves:
        changed.append({"leaves": commit.leaves[1:]} if len(commit.leaves) > 1 or commit.own else {})
        cut = msgspec.structs.replace(commit.leaves[0], cut=not commit.leaves[0].cut)
        changed.append({"leaves": (cut, *commit.leaves[1:])})
    if commit.own:
        other = msgspec.structs.replace(commit.own[0], fragments=())
        changed.append({"own": (other, *commit.own[1:])})
    held = [n for n, fragment in enumerate(fragments) if fragment.leaves]
    refs = list(commit.fragments)
    refs[held[0]] = msgspec.structs.replace(refs[held[0]], ranges=refs[held[0]].ranges[1:])
    changed.append({"fragments": tuple(refs)})

    changes = data.draw(st.sampled_from([change for change in changed if change]))

    assert mislisted(msgspec.structs.replace(commit, **changes), fragments)


def job_of(ranks: int, layers: int) -> tuple[Commit, list[Fragment]]:
    """FSDP2 with Adam: two tensors of other lengths a layer with two moments each, a step for each tensor,
    and generators. All ranks share out the steps.
    """
    fragments: list[list[LeafRecord]] = [[] for _ in range(ranks)]
    steps = [f"optim.state.actor.{n:02d}.{part}.step" for n in range(layers) for part in "wb"]
    for rank, held in enumerate(fragments):
        for number in range(layers):
            for part, rows in (("w", 4 * ranks), ("b", ranks)):
                each = rows // ranks
                box = Box((rank * each,), (each,))
                name = f"actor.{number:02d}.{part}"
                held += [record(name, (rows,), box)]
                held += [record(f"optim.state.{name}.{m}", (rows,), box) for m in ("exp_avg", "exp_avg_sq")]
        mine = steps[rank * len(steps) // ranks : (rank + 1) * len(steps) // ranks]
        held += [record(name, (), whole(())) for name in mine]
        held += [record(f"rng@g0.{rank}", (9,), whole((9,)), kind="value", owner=f"g0.{rank}")]
    fragments[0] += [record(name, (5,), whole((5,)), kind="value") for name in ("actor", "optim")]
    return committed(*fragments)


def test_a_rank_that_goes_on_as_it_was_needs_its_own_fragment_and_those_with_what_all_share():
    """However many runs of leaves a fragment has: steps stand between moments in the order of names."""
    ranks, layers = 4, 60
    commit, _ = job_of(ranks, layers)
    specs = specs_of(commit)
    cut = [spec for name, spec in specs.items() if spec.shape in ((16,), (4,))]

    assert [{held.of for held in ref.ranges} for ref in commit.fragments] == [{WHOLE, CUT, OWN}] * 4
    assert max(len(ref.ranges) for ref in commit.fragments) == 3
    for rank in range(ranks):
        wants = [(s, Box((rank * s.shape[0] // 4,), (s.shape[0] // 4,))) for s in cut]
        rng = LeafSpec(f"rng@g0.{rank}", "value", "uint8", (9,), f"g0.{rank}")
        assert relevant(commit, [*wants, (rng, whole((9,)))]) == [commit.fragments[rank]]
        step = specs[f"optim.state.actor.{rank * 15:02d}.w.step"]
        assert relevant(commit, [(step, whole(()))]) == [commit.fragments[rank]]
    assert relevant(commit, [(specs["optim"], whole((5,)))]) == [commit.fragments[0]]


def test_leaves_of_unlike_rows_are_told_apart_by_their_rows_where_there_are_many():
    """Ranks past the short tensors' last row hold nothing of them, and are not asked for them."""
    long, short = (64,), (8,)
    fragments = [
        [record(f"m.{n:02d}", long, Box((rank * 8,), (8,))) for n in range(40)]
        + [record(f"m.{n:02d}s", short, Box((rank * 4,), (4,))) for n in range(40) if rank < 2]
        for rank in range(8)
    ]
    commit, _ = committed(*fragments)

    wants = [(LeafSpec(f"m.{n:02d}", "tensor", "uint8", long), Box((40,), (8,))) for n in range(40)]
    assert [len(ref.ranges) for ref in commit.fragments] == [2, 2, *[1] * 6]
    assert relevant(commit, wants)[-1] == commit.fragments[5] and len(relevant(commit, wants)) <= 2
    some = [(LeafSpec("m.03s", "tensor", "uint8", short), Box((0,), (4,)))]
    assert commit.fragments[0] in relevant(commit, some) and commit.fragments[7] not in relevant(commit, some)


def test_a_commit_of_one_fragment_lists_nothing_and_says_what_it_did_before():
    commit, fragments = committed([record("a.w", (4,), whole((4,)))])

    assert (commit.leaves, commit.own) == ((), ())
    assert commit.fragments[0].ranges == leaf_range(fragments[0].leaves)


@pytest.mark.parametrize(
    "changes",
    [
        {"leaves": (["tensor", "float33", [3], False, ["a"]],)},
        {"leaves": (["tensor", "float32", [-3], False, ["a"]],)},
        {"leaves": (["tensor", "float32", [1 << 62, 8], False, ["a"]],)},
        {"leaves": (["tensor", "float32", [1] * 65, False, ["a"]],)},
        {"leaves": (["value", "float32", [3], False, ["a"]],)},
        {"leaves": (["value", "uint8", [1 << 33], False, ["a"]],)},
        {"own": (["g0.1", ["rng"], [1]],)},
        {"own": (["g0.1", ["rng"], [0, -1]],)},
    ],
)
def test_lists_that_cannot_be_are_refused(changes):
    crafted = msgspec.structs.replace(records.commit(), **changes)

    with pytest.raises(RecordCorrupt):
        decode(Commit, encode(crafted), "commits/000000000012-000002")


def test_a_short_line_is_written_by_few_so_that_few_have_to_be_asked_for_it():
    ranks = tuple(range(64))
    steps = [
        Holding(LeafSpec(f"optim.{n:03d}.step", "tensor", "float32", ()), whole(()), ranks)
        for n in range(200)
    ]
    shape = (SMALLEST_PART_BYTES * 16,)
    large = Holding(LeafSpec("w", "tensor", "uint8", shape), whole(shape), ranks)

    def writers(holdings: list[Holding]) -> list[int]:
        return [rank for rank in ranks if plan_save(holdings, Place(0, 1, rank))]

    assert writers(steps) == list(range(SHORT_LINE_WRITERS))
    assert writers([*steps, large])[0] == 0 and len(writers([*steps, large])) == 8
    written = [task.holding for rank in ranks for task in plan_save(steps, Place(0, 1, rank))]
    assert sorted(written) == list(range(200))
