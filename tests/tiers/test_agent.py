"""The agent on one tier and one far store: order, what it copies, what it gives up, and dying anywhere."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from ftckpt import layout
from ftckpt.attempts import claim, look, pin, read_pins
from ftckpt.chaos.faults.store import Crash, Fault, FaultyStore
from ftckpt.clock import HandClock
from ftckpt.codec import Codec
from ftckpt.commit import abort, read_commit
from ftckpt.errors import Fenced, SaveAborted
from ftckpt.events import silent
from ftckpt.gc import collect, owed
from ftckpt.manifest import Intent, Position, encode
from ftckpt.plan.restore import index_chunks
from ftckpt.reader import read_fragments
from ftckpt.retention import Keep
from ftckpt.store.retry import RetryStore
from ftckpt.tiers import mirror
from tests.protocol.test_crash_points import Meet, every_call
from tests.protocol.world import read_all, start_job
from tests.support.stores import Sim
from tests.tiers.world import (
    Near,
    TierSaver,
    agent,
    check_far,
    packs_of,
    run_tiered,
)

ALL = Keep(last=None)


@pytest.fixture
def far():
    return Sim().store


@pytest.fixture
def near():
    return Near(Sim().store)


def test_a_step_arrives_byte_for_byte_and_is_not_owed_any_more(far, near):
    run_tiered(far, near.store, 0, 1, keep=ALL)
    assert owed(near.store) == [Position(0, 1), Position(1, 1)]

    done = agent(near, far).drain()

    assert done.committed == (Position(0, 1), Position(1, 1))
    assert owed(near.store) == []
    assert read_pins(far) == []
    assert check_far(far) == [0, 1]
    for prefix in (layout.PACKS, layout.FRAGMENTS, layout.COMMITS):
        keys = [info.key for info in near.store.scan(prefix)]
        assert [info.key for info in far.scan(prefix)] == keys
        assert all(bytes(far.read(key)) == bytes(near.store.read(key)) for key in keys)


def test_what_never_changes_is_brought_once(far, near):
    """A frozen component, as the base model under an adapter: its chunks lie in the packs of step 0."""
    run_tiered(far, near.store, 0, 1, 2, keep=ALL)

    agent(near, far).drain()

    assert check_far(far) == [0, 1, 2]
    newest = look(far).commits[Position(2, 1)]
    where = {saved.pack for saved in index_chunks(read_fragments(far, newest))["frozen"]}
    assert where == set(packs_of(far, Position(0, 1)))


def test_deltas_arrive_with_the_bases_they_build_on(far, near):
    start = start_job(far).start
    mirror(far, near.store)
    body = bytearray(random.Random(0).randbytes(1 << 16))
    with TierSaver(
        near.store, HandClock(), 1, start.parent, chunk_bytes=1 << 14, keep=ALL, codec=Codec("delta")
    ) as saver:
        for step in range(6):
            body[step * 1000] ^= 1
            saver.save(step, {"actor.w": bytes(body)})

    for _ in range(3):
        agent(near, far).drain()

    newest = look(far).commits[Position(5, 1)]
    chunks = index_chunks(read_fragments(far, newest))["actor.w"]
    assert max(len(saved.bases) for saved in chunks) >= 3
    assert read_all(far, newest) == {"actor.w": bytes(body)}
    assert read_pins(far) == []


def test_no_step_is_there_before_the_one_that_precedes_it_is_settled(far, near):
    run_tiered(far, near.store, 0, 1, 2, keep=ALL)
    counted = FaultyStore(far)

    agent(near, counted).drain()

    made = [call.key for call in counted.log if call.op == "create"]
    commits = [layout.commit_key(Position(step, 1)) for step in (0, 1, 2)]
    assert [key for key in made if key in commits] == commits
    for step in (1, 2):
        first = next(n for n, key in enumerate(made) if f"/{step:012d}" in key)
        assert first > made.index(commits[step - 1])


def test_a_step_that_the_tier_gave_up_is_given_up_in_the_far_store(far, near):
    attempt, _ = run_tiered(far, near.store, 0)
    at = Position(1, attempt)
    with TierSaver(near.store, HandClock(), attempt, look(near.store).refs[Position(0, 1)]) as saver:
        abort(near.store, at, "a member died")
        with pytest.raises(SaveAborted, match="a member died"):
            saver.save(1)
        saver.save(2)

    done = agent(near, far).drain()

    assert done.given_up == (at,)
    assert read_commit(far, at)[0].aborted == "a member died"
    assert check_far(far) == [0, 2]


def test_a_pack_that_changed_in_the_tier_never_arrives_and_no_later_save_builds_on_it(far, near):
    attempt, _ = run_tiered(far, near.store, 0, 1)
    pack = packs_of(near.store, Position(1, attempt))[0]
    body = bytearray(near.store.read(pack))
    body[0] ^= 1
    near.store.delete([pack])
    near.store.create(pack, bytes(body))

    done = agent(near, far).drain()
    with TierSaver(near.store, HandClock(), attempt, look_ref(near.store, 1, attempt)) as saver:
        after = saver.save(2)
    again = agent(near, far).drain()

    assert done.given_up == (Position(1, attempt),)
    assert "has changed in the tier" in read_commit(far, Position(1, attempt))[0].aborted
    assert after.parent.at == Position(0, attempt)
    assert again.committed == (Position(2, attempt),)
    assert check_far(far) == [0, 2]


def look_ref(store, step, attempt):
    found = read_commit(store, Position(step, attempt))
    assert found is not None
    return found[1]


def test_a_tier_keeps_what_the_far_store_does_not_have_yet(far, near):
    run_tiered(far, near.store, 0, 1, 2, 3)

    before = collect(near.store, Keep(last=1), intent_id="a")
    agent(near, far).drain()
    after = collect(near.store, Keep(last=1), intent_id="b")

    assert before.victims == ()
    assert after.victims == (Position(0, 1), Position(1, 1), Position(2, 1))


def test_the_far_store_retains_what_the_session_asked_for(far, near):
    run_tiered(far, near.store, 0, 1, 2, 3, keep=Keep(last=2))

    agent(near, far).drain()

    assert check_far(far) == [2, 3]


def test_a_restored_attempt_reuses_what_the_tier_has_and_writes_all_of_it_into_a_new_tier(far):
    one, other = Near(Sim().store), Near(Sim().store)
    run_tiered(far, one.store, 0, keep=ALL)
    agent(one, far).drain()

    _, (same,) = run_tiered(far, one.store, 1, keep=ALL)
    agent(one, far).drain()
    _, (anchor,) = run_tiered(far, other.store, 2, keep=ALL)
    agent(other, far).drain()

    assert sum(c.reused_bytes for c in same.components.values()) == 32
    assert sum(c.reused_bytes for c in anchor.components.values()) == 0
    assert (same.parent.step, anchor.parent.step) == (0, 1)
    assert check_far(far) == [0, 1, 2]
    assert check_far(other.store) == [2]


# --- fences, pins, collectors ---------------------------------------------------------------------


def test_a_newer_claim_reaches_the_tier_and_stops_what_is_saved_there(far, near):
    attempt, _ = run_tiered(far, near.store, 0)
    watcher = agent(near, far)
    watcher.drain()
    start_job(far, "elsewhere")

    watcher.watch()

    parent = look_ref(near.store, 0, attempt)
    with (
        TierSaver(near.store, HandClock(), attempt, parent) as saver,
        pytest.raises(Fenced, match="attempt 2"),
    ):
        saver.save(1)


def test_what_lies_above_a_newer_start_is_given_up(far, near):
    run_tiered(far, near.store, 0)
    agent(near, far).drain()
    attempt = 1
    with TierSaver(near.store, HandClock(), attempt, look_ref(near.store, 0, attempt)) as saver:
        saver.save(1)
    start_job(far, "elsewhere")

    done = agent(near, far).drain()

    assert done.given_up == (Position(1, 1),)
    assert "attempt 2 goes on" in read_commit(far, Position(1, 1))[0].aborted
    assert packs_of(far, Position(1, 1)) == []


def test_a_claim_that_nobody_started_does_not_stop_the_draining(far, near):
    run_tiered(far, near.store, 0, 1)
    claim(far, nonce="n", host="h", pid=1, command=(), cwd="/", groups=1, nproc=1)

    done = agent(near, far).drain()

    assert len(done.committed) == 2
    assert check_far(far) == [0, 1]


def test_a_parent_that_is_being_collected_is_not_referred_to(far, near):
    run_tiered(far, near.store, 0)
    agent(near, far).drain()
    with TierSaver(near.store, HandClock(), 1, look_ref(near.store, 0, 1)) as saver:
        saver.save(1)
    far.create(layout.intent_key("open"), encode(Intent(intent="open", victims=((0, 1),))))

    done = agent(near, far).drain()

    assert done.given_up == (Position(1, 1),)
    assert "being collected" in read_commit(far, Position(1, 1))[0].aborted
    assert read_pins(far) == [p for p in read_pins(far) if p.kind != "agent"]


def test_the_next_attempt_settles_what_a_dead_agent_held_and_lets_go_of_its_pin(far, near):
    """The tier is lost with its machine; nobody else would ever release that pin."""
    run_tiered(far, near.store, 0)
    agent(near, far).drain()
    assert pin(far, "agent-000001-000000000001-x", Position(0, 1), "agent", "a", by_attempt=1, by_step=1)

    start_job(far, "elsewhere")

    assert [p.kind for p in read_pins(far)] == ["start"]
    assert read_commit(far, Position(1, 1))[0].aborted == "attempt 2 goes on"


# --- dying at every call --------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["before", "after", "lost"])
@pytest.mark.parametrize("which", ["far", "near"])
def test_an_agent_that_dies_at_any_call_is_run_again_and_finishes(how, which):
    """No far store ever has a commit that names absent packs, and nothing is left over."""
    points = 0
    for nth in itertools.count(1):
        far, near = Sim().store, Near(Sim().store)
        run_tiered(far, near.store, 0, 1, 2, keep=Keep(last=2))
        meet = Meet(nth, how, every_call)
        stores = {"far": far, "near": near.store}
        faulty = RetryStore(
            FaultyStore(stores[which], [Fault(meet)]), deadline_s=30.0, clock=HandClock(), events=silent
        )
        told = f"call {nth} of {which}, {how}"
        try:
            if which == "far":
                agent(near, faulty).drain()
            else:
                agent(replace(near, store=faulty), far).drain()
        except Crash:
            pass
        assert check_far(far) in ([], [0], [0, 1], [0, 1, 2], [1, 2]), told

        agent(near, far).drain()

        assert check_far(far)[-2:] == [1, 2], told
        assert owed(near.store) == [], told
        assert [p for p in read_pins(far) if p.kind == "agent"] == [], told
        if meet.met is None:
            break
        points += 1

    assert points > 25


def test_two_agents_at_once_are_harmless():
    for seed in range(60):
        sim = Sim()
        far, near = Sim(), Near(sim.store)
        run_tiered(far.store, near.store, 0, 1, 2, keep=ALL)
        far.actor("a", lambda store, clock, near=near: agent(near, store).drain())
        far.actor("b", lambda store, clock, near=near: agent(near, store).drain())

        far.explore(seed, fates={"lose": 0.05, "fail": 0.05}, mortal=["a"])
        agent(near, far.store).drain()

        assert check_far(far.store) == [0, 1, 2], far.story()
        far.end()
