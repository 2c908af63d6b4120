"""Schedules 11 and 18 of the protocol's section 10, each as the exact interleaving it speaks of."""

from __future__ import annotations

import pytest

from ftckpt.attempts import look, read_pins
from ftckpt.clock import HandClock
from ftckpt.commit import Patience, read_commit
from ftckpt.errors import SaveAborted
from ftckpt.gc import collect
from ftckpt.manifest import Position
from ftckpt.retention import Keep
from ftckpt.tiers import wait_until_settled
from tests.protocol.world import Saver, start_job
from tests.support.stores import Sim
from tests.tiers.world import Near, TierSaver, agent, check_far, ref_of, run_tiered


@pytest.fixture
def sim():
    sim = Sim()
    yield sim
    sim.end()


@pytest.fixture
def near():
    return Near(Sim().store)


def step_1_owed_and_step_5_written_directly(sim: Sim, near: Near) -> None:
    """Step 0 is in both stores; the tier owes step 1, which shares packs with step 0; a direct writer
    has committed step 5 in the far store, so that a collector may take step 0.
    """
    run_tiered(sim.store, near.store, 0)
    agent(near, sim.store).drain()
    with TierSaver(near.store, HandClock(), 1, ref_of(near.store, 0)) as saver:
        saver.save(1)
    with Saver(sim.store, HandClock(), 1, ref_of(sim.store, 0), life="b") as direct:
        direct.save(5)


def take_pins_of_starts(sim: Sim) -> None:
    sim.store.delete([f"pins/{pin.pin}" for pin in read_pins(sim.store)])


def test_11_a_parent_that_a_collector_has_named_is_not_referred_to(sim, near):
    step_1_owed_and_step_5_written_directly(sim, near)
    take_pins_of_starts(sim)
    sim.actor("collector", lambda store, clock: collect(store, Keep(last=1), intent_id="c"))
    sim.until("collector", "create", "collected/")  # pins were read: the victims are certain
    sim.actor("agent", lambda store, clock: agent(near, store).drain())

    drained = sim.finish("agent")
    collected = sim.finish("collector")

    assert collected.victims == (Position(0, 1),)
    assert drained.given_up == (Position(1, 1),)
    assert check_far(sim.store) == [5]


def test_11_a_parent_that_the_agent_has_pinned_is_not_collected(sim, near):
    step_1_owed_and_step_5_written_directly(sim, near)
    take_pins_of_starts(sim)
    sim.actor("collector", lambda store, clock: collect(store, Keep(last=1), intent_id="c"))
    sim.actor("agent", lambda store, clock: agent(near, store).drain())
    sim.until("collector", "create", "gc/")  # it saw no pin, and means to take step 0
    sim.until("agent", "create", "packs/")  # pinned, and no intent was there yet

    collected = sim.finish("collector")
    drained = sim.finish("agent")

    assert collected.victims == ()
    assert drained.committed == (Position(1, 1),)
    assert check_far(sim.store) == [0, 1, 5]


def test_11_in_any_order_no_commit_names_absent_packs(near):
    for seed in range(80):
        sim, mine = Sim(), Near(Sim().store)
        step_1_owed_and_step_5_written_directly(sim, mine)
        take_pins_of_starts(sim)
        sim.actor("collector", lambda store, clock: collect(store, Keep(last=1), intent_id="c"))
        sim.actor("agent", lambda store, clock, mine=mine: agent(mine, store).drain())

        sim.explore(seed, mortal=["collector", "agent"])
        agent(mine, sim.store).drain()

        assert check_far(sim.store)[-1] == 5, sim.story()
        sim.end()


def test_18_a_step_that_only_the_tier_acknowledged_dies_with_its_machine(sim, near):
    run_tiered(sim.store, near.store, 0)
    agent(near, sim.store).drain()
    with TierSaver(near.store, HandClock(), 1, ref_of(near.store, 0)) as saver:
        acknowledged = saver.save(1)

    begun = start_job(sim.store, "another machine")  # the first one is gone, and its tier with it
    with Saver(sim.store, HandClock(), 2, begun.start.parent) as saver:
        saver.save(1)
    agent(near, sim.store).drain()  # it was only cut off, and comes back

    assert acknowledged.at == Position(1, 1)
    assert begun.start.parent.at == Position(0, 1)
    assert read_commit(sim.store, Position(1, 1))[0].aborted
    assert look(sim.store).lineage == [Position(1, 2), Position(0, 1)]
    assert check_far(sim.store) == [0, 1]


def test_18_who_waits_for_the_far_store_is_not_told_of_what_is_only_here(sim, near):
    run_tiered(sim.store, near.store, 0)
    at, patience = Position(0, 1), Patience()

    with pytest.raises(TimeoutError, match="not yet in sim://run after 5 s"):
        wait_until_settled(sim.store, at, HandClock(), 5, patience)
    start_job(sim.store, "another machine")
    agent(near, sim.store).drain()

    with pytest.raises(SaveAborted, match="attempt 2 goes on"):
        wait_until_settled(sim.store, at, HandClock(), 5, patience)
