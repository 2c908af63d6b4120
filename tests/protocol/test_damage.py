"""Must hold 2, at the level of the store: one byte flipped or cut anywhere is named, and never read.

A small run with every kind of object: raw and compressed chunks, reuse, two writers, two attempts, a
step that was given up, tombstones, pins and an intent. One trial damages one object of a copy.
"""

from __future__ import annotations

from random import Random

import pytest

from ftckpt.attempts import Look, look
from ftckpt.clock import HandClock
from ftckpt.commit import abort
from ftckpt.errors import CorruptError, ObjectDamaged
from ftckpt.gc import collect
from ftckpt.layout import parse_commit, parse_position
from ftckpt.manifest import Intent, Position, encode
from ftckpt.retention import Keep
from ftckpt.run import Run
from tests.protocol.world import Saver, State, read_all, run_of, start_job
from tests.support.stores import Sim

TRIALS = 520
PARTS = 4


def states() -> dict[int, State]:
    """Of steps 1 and 4: large enough for compressed chunks beside raw ones."""
    noise = Random(3)
    frozen = b"the reference policy never changes; " * 20
    return {
        step: {"frozen": frozen, "actor.w": noise.randbytes(300), "meta": b"step %d " % step * 40}
        for step in (1, 4)
    }


@pytest.fixture(scope="module")
def run() -> dict[str, bytes]:
    sim, clock = Sim(), HandClock()
    _, first = run_of(sim.store, clock, 0)
    with Saver(sim.store, clock, 1, first, chunk_bytes=256) as saver:
        parent = saver.save(1, states()[1])
    begun = start_job(sim.store)
    abort(sim.store, Position(3, 2), "nobody was there")
    with Saver(sim.store, clock, 2, begun.start.parent, chunk_bytes=256) as saver:
        saver.save(4, states()[4])
    collect(sim.store, Keep(last=None), intent_id="gc1")
    sim.store.create("gc/open", encode(Intent(intent="open", victims=((0, 1),))))
    assert parent.step == 1
    return sim.objects


def damaged(body: bytes, rng: Random) -> bytes:
    """One byte flipped, or the end cut off at a random place."""
    at = rng.randrange(len(body))
    if rng.random() < 0.3:
        return body[:at]
    return body[:at] + bytes([body[at] ^ rng.randrange(1, 256)]) + body[at + 1 :]


def named_by_verify(sim: Sim) -> set[str]:
    """The objects that ``verify`` finds damaged; a run that cannot even be opened names one too."""
    try:
        return {problem.key for problem in Run(sim.store).verify()}
    except CorruptError as error:
        return {str(error.facts["key"])}


def read(sim: Sim, seen: Look, at: Position) -> State | CorruptError:
    """The whole state of a commit, or why it was refused."""
    if at in seen.damaged:
        return seen.damaged[at]
    try:
        return read_all(sim.store, seen.commits[at])
    except CorruptError as error:
        return error


def look_at(sim: Sim) -> Look | CorruptError:
    try:
        return look(sim.store)
    except CorruptError as error:
        return error


def test_the_undamaged_run_has_every_kind_of_object_and_no_problem(run):
    sim = Sim()
    sim.objects = dict(run)

    assert named_by_verify(sim) == set()
    assert {key.split("/")[0] for key in run} == {
        "run.json", "attempts", "starts", "packs", "fragments", "commits", "collected", "pins", "gc",
    }  # fmt: skip
    seen = look(sim.store)
    assert {at.step: read(sim, seen, at) for at in seen.lineage if at.step} == states()


@pytest.mark.parametrize("part", range(PARTS))
def test_one_damaged_byte_is_named_and_never_read(run, part):
    whole = Sim()
    whole.objects = dict(run)
    good = {at: read_all(whole.store, look(whole.store).commits[at]) for at in look(whole.store).lineage}
    for trial in range(part, TRIALS, PARTS):
        rng = Random(trial)
        key = rng.choice(sorted(run))
        sim = Sim()
        sim.objects = {**run, key: damaged(run[key], rng)}

        told = f"trial {trial}: {key}"
        assert key in named_by_verify(sim), told
        owner = parse_commit(key) or parse_position(key)
        seen = look_at(sim)
        if isinstance(seen, CorruptError):
            assert key.startswith("starts/"), told
            assert seen.facts["key"] == key, told
            continue
        for at, state in good.items():
            found = read(sim, seen, at)
            if isinstance(found, CorruptError):
                assert key in (found.facts.get("key"), found.facts.get("pack")), told
            else:
                assert found == state, told
                assert at != owner, told


@pytest.mark.parametrize("kind", ["commits", "fragments", "packs", "starts", "run.json"])
def test_an_object_that_is_gone_is_named_too(run, kind):
    """What a commit needs is checked for before anything is read."""
    key = max(key for key in run if key.startswith(kind))
    sim = Sim()
    sim.objects = {k: body for k, body in run.items() if k != key}

    if kind in ("fragments", "packs"):
        assert named_by_verify(sim) == {key}
        seen = look(sim.store)
        with pytest.raises(CorruptError, match=key):
            read_all(sim.store, seen.commits[seen.lineage[0]])
    elif kind == "commits":
        assert look(sim.store).lineage[0].step == 1  # a commit that is not there was never made
    elif kind == "starts":
        with pytest.raises(ObjectDamaged, match=key):
            start_job(sim.store)  # or it would go on from step 1 in silence
    else:
        with pytest.raises(FileNotFoundError):
            Run(sim.store)
