"""Schedules 15 and 19 of the protocol's section 10, each as the exact interleaving it speaks of."""

from __future__ import annotations

import pytest

from ftckpt.attempts import read_pins
from ftckpt.clock import HandClock
from ftckpt.copying import Means, copy, fork
from ftckpt.errors import ObjectDamaged, StepNotFound
from ftckpt.gc import collect
from ftckpt.manifest import Position
from ftckpt.retention import Keep
from tests.interop.test_copying import check, steps_of
from tests.protocol.world import Saver, run_of, start_job
from tests.support.stores import Sim


@pytest.fixture
def sim():
    sim = Sim()
    yield sim
    sim.end()


def reader_pins(sim: Sim) -> list[int]:
    return sorted(pin.step for pin in read_pins(sim.store) if pin.kind == "reader")


# --- 15: fork of a live run -----------------------------------------------------------------------


def test_15_the_forked_step_outlives_a_collector_that_came_after_the_pin(sim):
    _, parent = run_of(sim.store, HandClock(), 1, 2, 3)
    dest = Sim()
    sim.actor("fork", lambda store, clock: fork(store, dest.store, step=1))
    sim.until("fork", "read", "packs/")  # pinned, and nothing read yet

    with Saver(sim.store, HandClock(), 1, parent) as saver:
        saver.save(4)
    collected = collect(sim.store, Keep(last=1), intent_id="gc1")
    sim.finish("fork")
    again = collect(sim.store, Keep(last=1), intent_id="gc2")

    assert collected.victims == (Position(2, 1), Position(3, 1))
    assert again.victims == (Position(1, 1),)
    assert check(dest.store) == [(1, 1)]
    assert reader_pins(sim) == []


def test_15_a_step_that_a_collector_has_named_is_not_forked(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    dest = Sim()
    sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc1"))
    sim.actor("fork", lambda store, clock: fork(store, dest.store, step=1))
    sim.until("fork", "create", "pins/")  # it has chosen step 1
    sim.until("gc", "create", "collected/")  # it has read the pins: the victims are certain

    with pytest.raises(StepNotFound, match="being collected"):
        sim.finish("fork")
    sim.finish("gc")

    assert steps_of(sim.store) == [(3, 1)]
    assert dest.objects == {}
    assert reader_pins(sim) == []


def test_15_the_run_goes_on_as_if_nobody_had_forked_it(sim):
    """A resume and its saves come between any two calls of the fork; neither run sees the other's."""
    run_of(sim.store, HandClock(), 1, 2)
    dest = Sim()
    sim.actor("fork", lambda store, clock: fork(store, dest.store))
    sim.until("fork", "read", "fragments/")

    begun = start_job(sim.store)
    with Saver(sim.store, HandClock(), 2, begun.start.parent, life="b") as saver:
        saver.save(3)
    sim.finish("fork")
    forked = start_job(dest.store)
    with Saver(dest.store, HandClock(), 2, forked.start.parent, life="c") as saver:
        saver.save(3)

    assert check(sim.store) == [(3, 2), (2, 1), (1, 1)]
    assert check(dest.store) == [(3, 2), (2, 1)]


def test_15_an_unpinned_fork_that_loses_its_step_fails_loudly(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    dest = Sim()
    sim.actor("fork", lambda store, clock: fork(store, dest.store, step=2, means=Means(pins=False)))
    sim.until("fork", "read", "packs/")
    collect(sim.store, Keep(last=1), intent_id="gc1")

    with pytest.raises(ObjectDamaged, match="is not in sim://run"):
        sim.finish("fork")

    assert not [key for key in dest.objects if key.startswith("commits")]


# --- 19: copy while written -----------------------------------------------------------------------


def test_19_commits_that_come_during_a_copy_are_for_the_next_one(sim):
    _, parent = run_of(sim.store, HandClock(), 1, 2)
    dest = Sim()
    sim.actor("copy", lambda store, clock: copy(store, dest.store))
    sim.until("copy", "scan", "attempts")  # commits were listed: 1 and 2

    with Saver(sim.store, HandClock(), 1, parent) as saver:
        saver.save(3)
    first = sim.finish("copy")
    among = check(dest.store)
    copy(sim.store, dest.store)

    assert [at.step for at in first.steps] == [1, 2]
    assert among == [(2, 1), (1, 1)]
    assert check(dest.store) == [(3, 1), (2, 1), (1, 1)]


def test_19_an_attempt_that_begins_during_a_copy_leaves_a_lineage_that_was_true(sim):
    """The copy lists commits 1 and 2; 3 is committed, and attempt 2 goes on from it; then the copy lists
    the starts. Its newest start names a parent that it does not have, and its lineage is still 2, 1.
    """
    _, parent = run_of(sim.store, HandClock(), 1, 2)
    dest = Sim()
    sim.actor("copy", lambda store, clock: copy(store, dest.store))
    sim.until("copy", "scan", "attempts")
    with Saver(sim.store, HandClock(), 1, parent) as saver:
        saver.save(3)
    start_job(sim.store)

    sim.finish("copy")

    assert check(dest.store) == [(2, 1), (1, 1)]
    assert start_job(dest.store).start.parent.at == Position(2, 1)


def test_19_a_step_that_is_collected_before_it_is_held_is_left_out_and_named(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    dest = Sim()
    sim.actor("copy", lambda store, clock: copy(store, dest.store))
    sim.until("copy", "create", "pins/")  # it means to take 1, 2 and 3
    collect(sim.store, Keep(last=1), intent_id="gc1")

    done = sim.finish("copy")

    assert [at.step for at in done.left_out] == [1, 2]
    assert check(dest.store) == [(3, 1)]
    assert reader_pins(sim) == []


def test_19_what_is_held_stays_until_the_copy_has_ended(sim):
    _, parent = run_of(sim.store, HandClock(), 1, 2)
    dest = Sim()
    sim.actor("copy", lambda store, clock: copy(store, dest.store))
    sim.until("copy", "read", "packs/")
    with Saver(sim.store, HandClock(), 1, parent) as saver:
        saver.save(3)

    collected = collect(sim.store, Keep(last=1), intent_id="gc1")
    sim.finish("copy")

    assert collected.victims == ()
    assert check(dest.store) == [(2, 1), (1, 1)]


def test_19_a_reader_of_the_copy_sees_whole_steps_at_every_moment(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    source = Sim()
    source.objects.update(sim.objects)
    dest = Sim()
    dest.actor("copy", lambda store, clock: copy(source.store, store))
    moments = set()

    while dest.pending("copy") is not None:
        moments.add(tuple(check(dest.store)))
        dest.step("copy")
    moments.add(tuple(check(dest.store)))

    whole = [(3, 1), (2, 1), (1, 1)]
    assert moments == {tuple(whole[n:]) for n in range(4)}


@pytest.mark.parametrize("what", ["copy", "fork"])
def test_in_any_order_a_moved_step_is_whole_or_not_there(what):
    """A job, a collector and a copy or a fork, in orders drawn from seeds, with deaths."""
    for seed in range(40):
        sim, dest = Sim(), Sim()
        _, parent = run_of(sim.store, HandClock(), 1, 2)

        def train(store, clock, parent=parent):
            with Saver(store, clock, 1, parent) as saver:
                for step in (3, 4):
                    saver.save(step)

        move = copy if what == "copy" else fork
        sim.actor("job", train)
        sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc"))
        sim.actor("move", lambda store, clock, dest=dest, move=move: move(store, dest.store))
        sim.explore(seed, mortal=["gc", "move"])
        error = sim.actors["move"].error

        assert isinstance(error, type(None) | StepNotFound) or type(error).__name__ == "Crash", sim.story()
        check(dest.store)
        collect(sim.store, Keep(last=1), intent_id="gc2")
        move(sim.store, dest.store) if not dest.objects or what == "copy" else None
        check(dest.store)
        sim.end()
