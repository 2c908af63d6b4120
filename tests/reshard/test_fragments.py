"""A rank reads the commit and those fragments that can hold what it wants: counted at the store.

One gang of four ranks saves and restores on four, three, two and one; see ``tests/ranks/sharded_reads.py``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ftckpt
from ftckpt.boxes import whole
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.copying import fork
from ftckpt.errors import ObjectDamaged, RecordCorrupt, StateMismatch
from ftckpt.events import silent
from ftckpt.layout import commit_key
from ftckpt.manifest import Commit, Fragment, decode, digest_of, encode
from ftckpt.plan.forecast import forecast, rows_of
from ftckpt.plan.restore import index_chunks, plan_restore
from ftckpt.reader import DEFAULT, leaf_specs, read_fragments, shared_out
from ftckpt.restoring import restore_into
from ftckpt.store import open_store
from tests.formats import independent_reader
from tests.support.procs import run_ranks

WORLDS = (4, 3, 2, 1)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, dict[str, list[Any]]]:
    """The run, and by number of ranks what each of them read."""
    folder = tmp_path_factory.mktemp("sharded") / "run"
    outputs = run_ranks("tests/ranks/sharded_reads.py", 4, folder, timeout_s=200).check().outputs
    told = next(line for line in outputs[0].splitlines() if line.startswith("told "))
    return folder, json.loads(told.removeprefix("told "))


@pytest.fixture
def copy(saved, tmp_path) -> Path:
    return Path(shutil.copytree(saved[0], tmp_path / "run"))


def holders(commit: Commit, fragments: Sequence[Fragment], world: int, rank: int) -> set[str]:
    """The fragments that hold a chunk of what a rank wants, found by looking into all of them."""
    specs = [leaf for leaf in leaf_specs(fragments).values() if not leaf.owner]
    wants = [
        (leaf, whole(leaf.shape) if leaf.kind == "value" else rows_of(leaf.shape, world, rank))
        for leaf in specs
    ]
    chunks = {
        (item.leaf, item.pack, item.chunk.offset) for item in plan_restore(wants, index_chunks(fragments))
    }
    found = {
        ref.key
        for ref, one in zip(commit.fragments, fragments, strict=True)
        for leaf in one.leaves
        for box in leaf.boxes
        for chunk in box.chunks
        if (leaf.name, one.packs[chunk.pack].key, chunk.offset) in chunks
    }
    own = commit.fragments[rank].key  # what is each rank's own goes back to as many ranks, and to no others
    return found | ({own} if world == 4 else set())


@pytest.mark.parametrize("world", WORLDS)
def test_a_rank_reads_those_fragments_that_hold_what_it_wants_once_and_no_others(saved, world):
    folder, told = saved
    with ftckpt.open(folder) as run:
        commit = run.commit(1)
        fragments = read_fragments(run.store, commit)

    for rank, read in enumerate(told[str(world)]):
        assert read["rank"] == rank
        assert len(read["fragments"]) == len(set(read["fragments"]))
        assert set(read["fragments"]) == holders(commit, fragments, world, rank)


@pytest.mark.parametrize("world", [3, 2, 1])
def test_a_forecast_says_what_a_restore_then_asks_for(saved, world):
    """On other numbers of ranks than saved: what is single ranks' own is in no forecast."""
    folder, told = saved
    with ftckpt.open(folder) as run:
        commit = run.commit(1)
        fragments = read_fragments(run.store, commit)
    leaves = leaf_specs(fragments).values()

    loads = forecast(
        commit, leaves, index_chunks(fragments), world, lambda all_: shared_out(all_, DEFAULT)[0]
    )

    for load, read in zip(loads, told[str(world)], strict=True):
        assert load.fragments == len(read["fragments"])
        assert load.requests == read["packs"]


def head(folder: Path, **how: Any) -> dict[str, Any]:
    state = {"head": {"w": torch.zeros(()), "plain": 0}}
    ftckpt.restore(folder, state, step=1, events=silent, **how)
    return state["head"]


def test_damage_in_a_fragment_stops_just_those_who_need_it_and_verify_names_it(saved, copy):
    folder, _ = saved
    with ftckpt.open(folder) as run:
        last = run.commit(1).fragments[-1].key
        actor = dict(run.tensors("actor", step=1))
    path = copy / last
    body = bytearray(path.read_bytes())
    body[100] ^= 1
    path.chmod(0o644)
    path.write_bytes(body)

    found = head(copy)

    assert torch.equal(found["w"], head(folder)["w"]) and found["plain"] == 1
    model = {"actor": torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 32))}
    with pytest.raises(ObjectDamaged) as refused:
        ftckpt.restore(copy, model, step=1, events=silent)
    assert refused.value.facts["key"] == last
    with ftckpt.open(copy) as run:
        first = run.tensor("actor.0.weight", step=1, box=rows_of((96, 64), 4, 0))
        with pytest.raises(ObjectDamaged):
            run.tensor("actor.0.weight", step=1)
        assert torch.equal(first, actor["actor.0.weight"][:24])
        assert {problem.key for problem in run.verify(1)} == {last}


def test_names_values_and_parts_of_tensors_are_found_without_the_other_fragments(saved):
    folder, _ = saved
    with ftckpt.open(folder) as run:
        refs = run.commit(1).fragments
        counted = FaultyStore(run.store)
        seen = type(run)(counted)

        seen.tensor("actor.0.weight", step=1, box=rows_of((96, 64), 4, 2))
        assert fragments_read(counted) == [refs[2].key]
        assert seen.value("head", step=1)["tree"]["plain"] == 1
        assert fragments_read(counted) == [refs[2].key, refs[0].key]
        own = dict(seen.tensors("own.key@g0.3", step=1))
        assert fragments_read(counted)[2:] == [refs[3].key]
        assert torch.equal(own["own.key@g0.3"], torch.full((5,), 4.0))
        assert set(dict(seen.tensors("own", step=1))) == {f"own.key@g0.{rank}" for rank in range(4)}
        with pytest.raises(StateMismatch, match=r"own\.key"):
            seen.tensor("own.key@g0.4", step=1)


def fragments_read(counted: FaultyStore) -> list[str]:
    return [call.key for call in counted.log if call.op == "read" and call.key.startswith("fragments/")]


def rewritten(folder: Path, **changes: Any) -> Commit:
    """Step 1 with another commit record, as if it had been written so."""
    with ftckpt.open(folder) as run:
        at = run.commit(1).at
        commit = msgspec.structs.replace(run.commit(1), **changes)
    path = folder / commit_key(at)
    path.chmod(0o644)
    path.write_bytes(encode(commit))
    return commit


def test_a_commit_that_lists_nothing_is_read_by_all_of_its_fragments(saved, copy):
    commit = rewritten(copy, leaves=(), own=())
    with ftckpt.open(copy) as run:
        counted = FaultyStore(run.store)
        state = {"head": {"w": torch.zeros(()), "plain": 0}}

        restore_into(counted, commit, state, subset=True)

    assert torch.equal(state["head"]["w"], head(saved[0])["w"])
    assert fragments_read(counted) == [ref.key for ref in commit.fragments]


def test_the_independent_reader_finds_the_list_of_leaves_true(saved, copy):
    run = independent_reader.Run(saved[0])
    found = run.read(run.lineage()[0])
    assert {"head.w", "own.key@g0.2", "optim.state.actor.0.weight.exp_avg"} <= found.leaves.keys()

    with ftckpt.open(saved[0]) as ours:
        leaves = ours.commit(1).leaves
    rewritten(copy, leaves=leaves[1:])

    other = independent_reader.Run(copy)
    with pytest.raises(independent_reader.Unreadable, match="another list"):
        other.read(other.lineage()[0])


def test_a_list_that_is_not_true_is_refused_by_who_meets_it_and_named_by_verify(saved, copy):
    with ftckpt.open(saved[0]) as run:
        leaves = run.commit(1).leaves
    shorter = [
        msgspec.structs.replace(group, shape=(2, 3)) if "head.w" in group.names else group for group in leaves
    ]
    commit = rewritten(copy, leaves=tuple(shorter))

    with pytest.raises(RecordCorrupt, match=r"head\.w"), ftckpt.open(copy) as run:
        run.tensor("head.w", step=1)
    with ftckpt.open(copy) as run:
        problems = [problem for problem in run.verify(1) if problem.key == commit_key(commit.at)]
    assert len(problems) == 1 and "head.w" in problems[0].error.facts["leaves"]


def test_a_fork_lists_its_leaves_too(saved, tmp_path):
    fork(open_store(saved[0]), open_store(tmp_path / "fork"), step=1)

    with ftckpt.open(saved[0]) as run, ftckpt.open(tmp_path / "fork") as forked:
        before, after = run.commit(1), forked.latest()
        assert (after.leaves, after.own) == (before.leaves, before.own)
        assert [ref.ranges for ref in after.fragments] == [ref.ranges for ref in before.fragments]
        assert not forked.verify()
        body = forked.store.read(after.fragments[3].key)
    assert digest_of(body) == after.fragments[3].digest and decode(Fragment, body, "key").step == after.step
