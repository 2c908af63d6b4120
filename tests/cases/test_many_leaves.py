"""Kind D: what a save and a restore cost grows with the leaves and no faster, and makes no object a leaf.

Counted, not timed: calls of Python functions, of the store, objects, and open files.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.births import let_go
from ftckpt.boxes import Box
from ftckpt.capture import capture
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.commit import Expected, build, gather, uncovered
from ftckpt.events import silent
from ftckpt.layout import Writer
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import (
    BoxRecord,
    ChunkRecord,
    Fragment,
    LeafRecord,
    PackRef,
    Position,
    decode,
    encode,
    leaf_range,
)
from ftckpt.plan.assign import Place, plan_save
from ftckpt.plan.restore import coalesce, index_chunks, plan_restore
from ftckpt.store import open_store
from tests.session.toy import objects

SMALL, TIMES = 60, 4
"""A number of parameters, and how many times as many the other run has."""

SLACK = 1.15


@contextmanager
def counting(threads: bool = True) -> Iterator[Counter]:
    """Calls of Python functions on this thread, and on ``threads`` that are started meanwhile."""
    seen: Counter = Counter()

    def count(_frame, event, _argument):
        if event == "call":
            seen["calls"] += 1

    if threads:
        threading.setprofile(count)
    sys.setprofile(count)
    try:
        yield seen
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def calls(work: Callable[[], object], threads: bool = True) -> int:
    with counting(threads) as seen:
        work()
    return seen["calls"]


def trained(parameters: int) -> dict:
    model = torch.nn.Module()
    for number in range(parameters):
        model.register_parameter(f"p{number}", torch.nn.Parameter(torch.randn(8)))
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step(model, optim)
    return {"model": model, "optim": optim}


def step(model, optim) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()


def save_calls(folder, parameters: int, stage: str) -> dict[str, int]:
    """What each part of a save costs the trainer's thread: reading the state, the stall, the fence."""
    state = trained(parameters)
    costs = {"capture": calls(lambda: capture(state))}
    with ftckpt.Session(folder, state, events=silent, stage=stage) as session:
        session.save(1).wait(30)
        step(**state)
        with session.yielding():  # no thread of the save streams a leaf that the fence would have to stage
            costs["save"] = calls(lambda: session.save(2), threads=False)
            costs["fence"] = calls(lambda: session._before_change("the test"), threads=False)
        session.save(3).wait(30)
    return costs


@pytest.mark.parametrize("stage", ["lazy", "eager"])
def test_the_stall_and_the_fence_are_linear_in_the_leaves(tmp_path, stage):
    """D: four times the leaves, four times the calls on the trainer's thread."""
    few = save_calls(tmp_path / "few", SMALL, stage)
    many = save_calls(tmp_path / "many", TIMES * SMALL, stage)

    for part in few:
        assert many[part] <= TIMES * SLACK * few[part], (part, few, many)


def test_a_whole_save_in_the_background_is_linear_in_the_leaves(tmp_path):
    """D: encoding, packing, the fragment and settling, on whatever thread."""

    def cost(parameters: int) -> int:
        state = trained(parameters)
        session = ftckpt.Session(tmp_path / str(parameters), state, events=silent)
        with counting() as seen, session:  # counting before the engine's threads are started
            session.save(1).wait(30)
            step(**state)
            session.save(2).wait(30)
        return seen["calls"]

    few, many = cost(SMALL), cost(TIMES * SMALL)

    assert many <= TIMES * SLACK * few, (few, many)


def test_a_restore_is_linear_in_the_leaves(tmp_path):
    def cost(parameters: int) -> int:
        with ftckpt.Session(tmp_path / str(parameters), trained(parameters), events=silent):
            pass
        fresh = trained(parameters)
        return calls(lambda: ftckpt.restore(tmp_path / str(parameters), fresh))

    few, many = cost(SMALL), cost(TIMES * SMALL)

    assert many <= TIMES * SLACK * few, (few, many)


def test_leaves_make_no_objects_and_no_calls_of_the_store_of_their_own(tmp_path):
    """D6: as many objects, as many PUTs and as many GETs for 40 leaves as for 4,000."""
    seen = []
    for parameters in (10, 1000):
        folder = tmp_path / str(parameters)
        store = FaultyStore(open_store(folder))
        with ftckpt.Session("ignored", trained(parameters), store=store, events=silent):
            pass
        puts = sum(call.op == "create" and not call.key.startswith("probes") for call in store.log)
        restoring = FaultyStore(open_store(folder))
        with ftckpt.run.Run(restoring) as run:
            run.restore(fresh := trained(parameters), None)
        assert len(fresh["optim"].state) == parameters
        gets = sum(call.op == "read" for call in restoring.log)
        seen.append((len(objects(folder, "packs", "fragments", "commits")), puts, gets))

    (objects_few, puts_few, gets_few), (objects_many, puts_many, gets_many) = seen
    assert (objects_few, puts_few) == (objects_many, puts_many)
    assert gets_many <= gets_few + 4  # values of components that lie far apart in a pack


def test_open_files_do_not_grow_with_leaves_or_saves(tmp_path):
    """D: descriptors before, after one save and after eight; and after a restore."""
    state = trained(100)

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    with ftckpt.Session(tmp_path / "run", state, events=silent) as session:
        session.save(1).wait(30)
        first = descriptors()
        for number in range(2, 9):
            step(**state)
            session.save(number).wait(30)
            assert descriptors() <= first + 2
    ftckpt.restore(tmp_path / "run", state)
    assert descriptors() <= first


# --- D2: plans over many shards -------------------------------------------------------------------


def sharded(leaves: int, shards: int) -> list[Fragment]:
    """Fragments of ``shards`` writers that hold one row each of ``leaves`` tensors."""
    row = 64
    return [
        Fragment(
            format=1,
            attempt=1,
            step=1,
            writer=str(writer(shard)),
            quorum=1,
            members="m",
            parent=None,
            packs=(
                PackRef(f"packs/000001/000000000001/{writer(shard)}-000000", leaves * 4 * row, b"d" * 16),
            ),
            leaves=tuple(
                LeafRecord(
                    f"model.{number:06d}",
                    "tensor",
                    "float32",
                    (shards, row),
                    "",
                    (
                        BoxRecord(
                            (shard, 0),
                            (1, row),
                            (ChunkRecord(0, row, b"r" * 16, b"r" * 16, 0, 0, number * 4 * row, 4 * row),),
                        ),
                    ),
                )
                for number in range(leaves)
            ),
        )
        for shard in range(shards)
    ]


def writer(shard: int) -> Writer:
    return Writer("g0", shard, f"{shard:032x}")


def plan_all(fragments: list[Fragment], leaves: int, shards: int) -> None:
    """Everything that is planned or checked over a commit's records."""
    assert uncovered(fragments) == []
    for fragment in fragments[:2]:
        decode(Fragment, encode(fragment), "key")
        assert len(leaf_range(fragment.leaves)) == 1
    wants = [
        (LeafSpec(f"model.{number:06d}", "tensor", "float32", (shards, 64)), Box((0, 0), (shards, 64)))
        for number in range(leaves)
    ]
    fetches = plan_restore(wants, index_chunks(fragments))
    assert len(fetches) == leaves * shards
    assert len(coalesce(fetches, 64 << 10, 16 << 20)) == shards


@pytest.mark.parametrize("leaves, shards", [(20, 64), (80, 16)])
def test_planning_is_near_linear_in_shards_and_in_leaves(leaves, shards):
    """D2: four times the shards, or four times the leaves: at most five times the work."""
    few = calls(partial(plan_all, sharded(leaves, shards), leaves, shards))
    more_shards = calls(partial(plan_all, sharded(leaves, TIMES * shards), leaves, TIMES * shards))
    more_leaves = calls(partial(plan_all, sharded(TIMES * leaves, shards), TIMES * leaves, shards))

    assert more_shards <= TIMES * 1.25 * few, (few, more_shards)
    assert more_leaves <= TIMES * SLACK * few, (few, more_leaves)


def test_committing_is_near_linear_in_writers():
    """D5: the committer reads every fragment once, whoever wrote it."""
    costs = []
    for shards in (16, 64):
        store = open_store(f"memory://writers-{shards}")
        fragments = sharded(8, shards)
        expected = Expected(Position(1, 1), None, 1, "m", tuple(writer(n) for n in range(shards)))
        for number, fragment in enumerate(fragments):
            store.create(f"fragments/000001/000000000001/{writer(number)}", encode(fragment))
        counted = FaultyStore(store)
        costs.append(calls(lambda c=counted, e=expected: build(e, gather(c, e))))
        assert Counter(call.op for call in counted.log) == {"scan": 1, "read": shards}

    assert costs[1] <= TIMES * 1.25 * costs[0], costs


def test_what_is_known_of_a_leaf_is_no_business_of_the_collector_of_cycles():
    """It looks at everything that it tracks, in one call that holds every thread."""
    leaves = capture(trained(SMALL))
    holdings = [leaf.holding for leaf in leaves]
    tasks = plan_save(holdings, Place(0, 1, 0))

    known = [*leaves, *holdings, *tasks, *(one.leaf for one in holdings), *(one.box for one in holdings)]

    assert len(known) > 5 * SMALL
    assert not any(map(gc.is_tracked, known))


@pytest.mark.parametrize("many", [[1, 2, 3], {1: 2, 3: 4}, []])
def test_letting_go_leaves_nothing(many):
    let_go(many)

    assert not many
