"""The schedules of the protocol's section 10, each as the exact interleaving it speaks of.

Real code on both sides (begin, attempts, commit, save engine, collector); only the store and the
clock are simulated. Searches around these schedules are in ``test_search``.
"""

from __future__ import annotations

import pytest

from ftckpt.attempts import adopt, look
from ftckpt.clock import HandClock
from ftckpt.commit import abort, build, gather, put_fragment, settle
from ftckpt.errors import (
    AttemptTaken,
    Diverged,
    Fenced,
    GcStopped,
    SaveFailed,
    StepNotFound,
    UnsafeStore,
)
from ftckpt.events import silent
from ftckpt.gc import collect
from ftckpt.layout import commit_key, fragment_key, pack_prefix
from ftckpt.lineage import orphans
from ftckpt.manifest import Position
from ftckpt.retention import Keep
from ftckpt.store.retry import RetryStore
from tests.protocol.world import (
    PATIENCE,
    Saver,
    expected,
    job,
    read_all,
    run_of,
    share,
    start_job,
    state_at,
    writer,
)
from tests.support.stores import CheckThenPutStore, Sim


def steps_of(sim: Sim) -> list[tuple[int, int]]:
    """(step, attempt) of the lineage, newest first."""
    return [(at.step, at.attempt) for at in look(sim.store).lineage]


def latest_state(sim: Sim) -> dict[str, bytes]:
    seen = look(sim.store)
    return read_all(sim.store, seen.commits[seen.lineage[0]])


# --- 1: a resumer looks, the job commits and acknowledges, the resumer starts ---------------------


def test_1_what_was_acknowledged_before_the_claim_is_what_the_resumer_starts_from(sim):
    _, parent = run_of(sim.store, HandClock(), 9, 10)
    sim.actor("resumer", lambda store, clock: start_job(store).start)
    sim.until("resumer", "create", "attempts/")  # it has listed already: tip 10

    with Saver(sim.store, HandClock(), 1, parent) as saver:
        acknowledged = saver.save(11)
    start = sim.finish("resumer")

    assert acknowledged.step == 11
    assert (start.parent.step, start.parent.attempt) == (11, 1)


def test_1_what_is_committed_after_the_claim_is_not_acknowledged(sim):
    _, parent = run_of(sim.store, HandClock(), 9, 10)
    sim.actor("resumer", lambda store, clock: start_job(store).start)
    sim.until("resumer", "create", "starts/")  # claimed, and looked: tip 10

    with Saver(sim.store, HandClock(), 1, parent) as saver, pytest.raises(Fenced, match="attempt 2"):
        saver.save(11)
    start = sim.finish("resumer")

    assert start.parent.step == 10
    assert steps_of(sim) == [(10, 1), (9, 1)]
    assert orphans(look(sim.store).view) == [Position(11, 1)]


# --- 2: two resumes at once, equal bytes, lost answers --------------------------------------------


@pytest.mark.parametrize("fate", ["lose", "delay", "fail"])
def test_2_of_two_resumes_with_a_lost_answer_exactly_one_has_the_attempt(sim, fate):
    run_of(sim.store, HandClock(), 10)
    for name in ("a", "b"):
        sim.actor(name, lambda store, clock: start_job(store, "same-host").claim)
        sim.until(name, "create", "attempts/000002")

    sim.step("a", fate)
    outcomes = {}
    for name in ("b", "a"):
        try:
            outcomes[name] = sim.finish(name).attempt
        except AttemptTaken as error:
            outcomes[name] = f"taken: {error.attempt}"
    sim.land()

    seen = look(sim.store)
    assert outcomes == ({"a": 2, "b": "taken: 2"} if fate == "lose" else {"b": 2, "a": "taken: 2"})
    assert seen.view.newest_claim == 2
    assert sorted(seen.view.starts) == [1, 2]


def test_2_a_lost_answer_to_the_start_is_read_back(sim):
    run_of(sim.store, HandClock(), 10)
    sim.actor("a", lambda store, clock: start_job(store).start)
    sim.until("a", "create", "starts/")

    sim.step("a", "lose")
    start = sim.finish("a")

    assert start.parent.step == 10
    assert steps_of(sim) == [(10, 1)]


# --- 3: all groups die and restart inside the attempt ---------------------------------------------


def test_3_fragments_of_two_lives_never_commit_together(sim):
    """Quorum ids repeat after a lighthouse restart, so only the incarnations tell the lives apart."""
    clock = HandClock()
    _, parent = run_of(sim.store, clock, 1)
    at = Position(2, 1)
    old = expected(at, parent, [writer(0, "a"), writer(1, "a")])
    new = expected(at, parent, [writer(0, "b"), writer(1, "b")])
    mine = [share(sim.store, new, w, state_at(2, "b")) for w in new.writers]

    put_fragment(sim.store, share(sim.store, old, old.writers[0], state_at(2, "a")), old.writers[0])
    put_fragment(sim.store, mine[1], new.writers[1])
    half = gather(sim.store, new)
    put_fragment(sim.store, mine[0], new.writers[0])
    record, _ = settle(sim.store, clock, new, new.writers[0], mine[0], PATIENCE)

    assert set(half) == {new.writers[1]}
    assert [ref.key for ref in record.fragments] == [fragment_key(at, w) for w in new.writers]
    assert read_all(sim.store, record) == state_at(2, "b")


def test_3_a_slow_old_life_meets_the_commit_of_the_new_one(sim):
    """Equal state is success, another state is ``Diverged``; the commit stays what it was."""
    clock = HandClock()
    _, parent = run_of(sim.store, clock, 1)
    at = Position(2, 1)
    new = expected(at, parent, [writer(0, "b")])
    fragment = share(sim.store, new, new.writers[0], state_at(2))
    put_fragment(sim.store, fragment, new.writers[0])
    record, ref = settle(sim.store, clock, new, new.writers[0], fragment, PATIENCE)

    same = expected(at, parent, [writer(0, "a"), writer(1, "a")])
    equal = share(sim.store, same, same.writers[1], state_at(2))
    other = share(sim.store, expected(at, parent, [writer(0, "c")]), writer(0, "c"), state_at(2, "c"))

    assert settle(sim.store, clock, same, same.writers[1], equal, PATIENCE) == (record, ref)
    with pytest.raises(Diverged, match="another state"):
        settle(sim.store, clock, expected(at, parent, [writer(0, "c")]), writer(0, "c"), other, PATIENCE)
    assert latest_state(sim) == state_at(2)


def test_3_whoever_diverged_does_not_save_on(sim):
    """Its next step would be a commit like any other; it is given up until state comes from peers."""
    _, parent = run_of(sim.store, HandClock(), 1)
    with Saver(sim.store, HandClock(), 1, parent, life="b") as saver:
        saver.save(2)

    with Saver(sim.store, HandClock(), 1, parent, life="c", salt="c") as saver:
        with pytest.raises(Diverged):
            saver.save(2)
        with pytest.raises(SaveFailed, match="Diverged"):
            saver.save(3)
        saver.engine.healed(Position(2, 1))
        saver.save(4, state_at(4))

    assert steps_of(sim) == [(4, 1), (2, 1), (1, 1)]
    assert latest_state(sim) == state_at(4)


# --- 4: the create of N times out, N+1 commits, gc, then N lands ----------------------------------


def test_4_a_commit_that_lands_late_finds_its_step_settled(sim):
    _, parent = run_of(sim.store, HandClock(), 0, 1)
    outcomes = []

    def save_two(store, clock):
        with Saver(store, clock, 1, parent) as saver:
            for step in (2, 3):
                try:
                    outcomes.append(saver.save(step).step)
                except SaveFailed:
                    outcomes.append("unclear")

    sim.actor("job", save_two)
    late = commit_key(Position(2, 1))
    while not outcomes:
        call = sim.pending("job")
        sim.step("job", "delay" if (call.op, call.key) == ("create", late) else "ok")
    sim.finish("job")
    collect(sim.store, Keep(last=1), intent_id="gc1")
    assert sim.delayed
    sim.land()
    collect(sim.store, Keep(last=1), intent_id="gc2")

    assert outcomes == ["unclear", 3]
    assert steps_of(sim) == [(3, 1)]
    assert latest_state(sim) == state_at(3)
    assert late in sim.objects
    assert Position(2, 1) not in look(sim.store).view.readable


# --- 5: one writer saw N commit, another did not --------------------------------------------------


def test_5_a_writer_that_did_not_see_its_commit_settles_it_before_the_next_save(sim):
    _, parent = run_of(sim.store, HandClock(), 0)
    saved: dict[int, list[object]] = {0: [], 1: []}

    def save(group):
        def body(store, clock):
            with Saver(store, clock, 1, parent, group=group, groups=2) as saver:
                for step in (1, 2):
                    try:
                        saved[group].append(saver.save(step).parent.step)
                    except SaveFailed:
                        saved[group].append("unclear")

        return body

    for group in (0, 1):
        sim.actor(f"g{group}", save(group))
    sim.until("g1", "read", commit_key(Position(1, 1)))  # its fragment is there
    while not saved[0]:
        sim.step("g0")  # commits step 1, and sees it
    while not saved[1]:
        sim.step("g1", "lose" if sim.pending("g1").op == "read" else "ok")  # gets no answer, to the end
    sim.until("g0", "scan", "fragments/000001/000000000002")  # its fragment of step 2 is there
    sim.finish("g1")
    sim.finish("g0")

    assert saved == {0: [0, 1], 1: ["unclear", 1]}
    assert steps_of(sim) == [(2, 1), (1, 1), (0, 1)]
    assert latest_state(sim) == state_at(2)


def test_5_fragments_with_different_parents_never_commit_together(sim):
    clock = HandClock()
    _, first = run_of(sim.store, clock, 0)
    with Saver(sim.store, clock, 1, first) as saver:
        saver.save(1)
    second = look(sim.store).refs[Position(1, 1)]
    at, both = Position(2, 1), [writer(0), writer(1)]
    behind, ahead = expected(at, first, both), expected(at, second, both)
    mine = share(sim.store, ahead, both[0], state_at(2))

    put_fragment(sim.store, mine, both[0])
    put_fragment(sim.store, share(sim.store, behind, both[1], state_at(2)), both[1])
    record, _ = settle(sim.store, clock, ahead, both[0], mine, PATIENCE)

    assert "no fragment of g1.0" in record.aborted
    assert steps_of(sim) == [(1, 1), (0, 1)]


# --- 6: the first PUT is delayed, its retry succeeds, retention deletes, the first PUT lands ------


@pytest.mark.parametrize("kind", ["packs/", "fragments/", "commits/"])
def test_6_a_put_that_lands_after_its_object_was_deleted_brings_nothing_back(sim, kind):
    _, parent = run_of(sim.store, HandClock(), 0)

    def save(store, clock):
        patient = RetryStore(store, deadline_s=30.0, clock=clock, events=silent)
        with Saver(patient, clock, 1, parent) as saver:
            for step in (1, 2):
                saver.save(step)

    sim.actor("job", save)
    sim.until("job", "create", kind)
    sim.step("job", "delay")
    sim.finish("job")
    collect(sim.store, Keep(last=1), intent_id="gc1")
    kept = dict(sim.objects)
    sim.land()
    offered = steps_of(sim)
    collect(sim.store, Keep(last=1), intent_id="gc2")

    assert offered == steps_of(sim) == [(2, 1)]
    assert latest_state(sim) == state_at(2)
    assert {key for key in sim.objects if not key.startswith("collected")} <= set(kept)


# --- 7: retention by multiples, and lineages across the gaps --------------------------------------


def test_7_keeping_every_fourth_step_works_across_resumes_whose_parents_are_gone(sim):
    clock = HandClock()
    run_of(sim.store, clock, *range(7))
    run_of(sim.store, clock, *range(7, 11))
    run_of(sim.store, clock, *range(11, 14))

    for number in range(3):
        collect(sim.store, Keep(last=2, every=4), intent_id=f"gc{number}")

    # Step 10 is where attempt 3 began: its start's pin holds it until the next start.
    assert steps_of(sim) == [(13, 3), (12, 3), (10, 2), (8, 2), (4, 1), (0, 1)]
    for at in look(sim.store).lineage:
        assert read_all(sim.store, look(sim.store).commits[at]) == state_at(at.step)
    assert start_job(sim.store, step=4).start.parent.step == 4
    assert steps_of(sim) == [(4, 1), (0, 1)]


# --- 8: gc reads pins, a resume pins and starts, gc deletes ---------------------------------------


def test_8_a_resume_that_meets_an_open_collection_of_its_step_chooses_again(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc1"))
    sim.until("gc", "create", "collected/")  # it has re-read the pins

    with pytest.raises(StepNotFound, match="being collected"):
        start_job(sim.store, step=1)
    sim.finish("gc")

    assert steps_of(sim) == [(3, 1)]
    assert not [key for key in sim.objects if key.startswith("pins/start-000002")]
    assert start_job(sim.store).start.parent.step == 3


def test_8_a_pin_that_was_there_first_makes_the_collector_shrink_its_list(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc1"))
    sim.until("gc", "create", "gc/")  # it means to take 1 and 2
    sim.actor("resumer", lambda store, clock: start_job(store, step=1).start)
    sim.until("resumer", "create", "pins/start")
    sim.until("resumer", "scan", "gc")  # pinned, not looked for intents yet

    sim.until("gc", "create", "collected/")  # its intent is there, and it saw the pin
    with pytest.raises(StepNotFound, match="being collected"):  # the resumer sees the intent
        sim.finish("resumer")
    result = sim.finish("gc")

    assert [at.step for at in result.victims] == [2]
    assert read_all(sim.store, look(sim.store).commits[Position(1, 1)]) == state_at(1)


def test_8_a_start_that_saw_no_intent_keeps_its_parent_whatever_the_collector_read_before(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc1"))
    sim.until("gc", "create", "gc/")  # pins were read: none

    start = start_job(sim.store, step=1).start
    result = sim.finish("gc")

    assert start.parent.step == 1
    assert Position(1, 1) not in result.victims
    assert latest_state(sim) == state_at(1)


# --- 9: two collectors with different views -------------------------------------------------------


def test_9_a_collector_with_an_old_view_takes_nothing_that_a_newer_one_keeps(sim):
    _, parent = run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("old", lambda store, clock: collect(store, Keep(last=2), intent_id="old"))
    sim.until("old", "create", "collected/")
    with Saver(sim.store, HandClock(), 1, parent) as saver:
        for step in (4, 5, 6):
            saver.save(step)

    newer = collect(sim.store, Keep(last=1), intent_id="new")
    sim.finish("old")

    assert [at.step for at in newer.victims] == [1, 2, 3, 4, 5]
    assert steps_of(sim) == [(6, 1)]
    assert latest_state(sim) == state_at(6)
    assert not [key for key in sim.objects if key.startswith("gc/")]


def test_9_a_collector_that_cannot_read_what_it_keeps_any_more_stops(sim):
    """Another collector took what this one's older view keeps: absent is not empty."""
    _, parent = run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("old", lambda store, clock: collect(store, Keep(last=2), intent_id="old"))
    sim.until("old", "create", "gc/")
    sim.until("old", "scan", "pins")  # its second look is over: it keeps 2 and 3
    with Saver(sim.store, HandClock(), 1, parent) as saver:
        saver.save(4)
    collect(sim.store, Keep(last=1), intent_id="new")

    with pytest.raises(GcStopped, match="deleted nothing"):
        sim.finish("old")

    assert steps_of(sim) == [(4, 1)]
    assert latest_state(sim) == state_at(4)
    assert not [key for key in sim.objects if key.startswith("gc/")]


# --- 10: gc beside what is not committed yet ------------------------------------------------------


@pytest.mark.parametrize("moment", ["fragments/", "commits/"])
def test_10_packs_and_fragments_of_a_save_under_way_are_left_alone(sim, moment):
    _, parent = run_of(sim.store, HandClock(), 1, 2)

    def save(store, clock):
        with Saver(store, clock, 1, parent) as saver:
            saver.save(3)

    sim.actor("job", save)
    sim.until("job", "create", moment)
    collect(sim.store, Keep(last=1), intent_id="gc1")
    sim.finish("job")

    assert steps_of(sim) == [(3, 1), (2, 1)]
    assert latest_state(sim) == state_at(3)


def test_10_an_attempt_that_is_claimed_and_not_started_fences_and_loses_nothing(sim):
    _, parent = run_of(sim.store, HandClock(), 1, 2)
    sim.actor("resumer", lambda store, clock: start_job(store).start)
    sim.until("resumer", "create", "starts/")

    collect(sim.store, Keep(last=1), intent_id="gc1")
    with Saver(sim.store, HandClock(), 1, parent) as saver, pytest.raises(Fenced):
        saver.save(3)
    collect(sim.store, Keep(last=1), intent_id="gc2")
    start = sim.finish("resumer")

    assert start.parent.step == 2
    assert latest_state(sim) == state_at(2)


def test_10_a_first_attempt_that_has_not_started_loses_nothing_either(sim):
    sim.actor("job", lambda store, clock: job(store, clock, 2))
    sim.until("job", "create", "starts/")
    collect(sim.store, Keep(last=1), intent_id="gc1")
    sim.until("job", "create", "fragments/")
    collect(sim.store, Keep(last=1), intent_id="gc2")
    sim.finish("job")

    assert steps_of(sim) == [(1, 1), (0, 1)]
    assert latest_state(sim) == state_at(1)


@pytest.mark.parametrize("moment", ["packs/", "fragments/", "commits/"])
def test_10_an_older_attempt_that_drains_is_given_up_and_disturbs_nobody(sim, moment):
    _, parent = run_of(sim.store, HandClock(), 1, 2)

    def save(store, clock):
        with Saver(store, clock, 1, parent) as saver:
            saver.save(3)

    sim.actor("zombie", save)
    sim.until("zombie", "create", moment)
    run_of(sim.store, HandClock(), 3, 4)
    for number in range(2):
        collect(sim.store, Keep(last=5), intent_id=f"gc{number}")
    with pytest.raises(Fenced):
        sim.finish("zombie")
    collect(sim.store, Keep(last=5), intent_id="gc3")

    assert steps_of(sim) == [(4, 2), (3, 2), (2, 1), (1, 1)]
    assert latest_state(sim) == state_at(4)


# --- 14: a restarted group that knows no attempt --------------------------------------------------


def test_14_a_restarted_group_takes_the_attempt_that_its_peers_carry(sim):
    _, parent = run_of(sim.store, HandClock(), 1)
    carried = {"g0": None, "g1": 1}  # g0 was restarted, and sorts first

    attempt = adopt([carried[group] for group in sorted(carried)])
    with Saver(sim.store, HandClock(), attempt, parent) as saver:
        record = saver.save(2)

    assert record.attempt == 1
    assert look(sim.store).view.claims == {1}
    assert adopt([None, None]) is None
    assert adopt([]) is None
    assert adopt([2, None, 3]) == 3


# --- 16: a slow owner and a take-over both write a share ------------------------------------------


def test_16_a_share_that_was_written_twice_commits_once_and_both_are_content(sim):
    clock = HandClock()
    _, parent = run_of(sim.store, clock, 1)
    at, state = Position(2, 1), state_at(2)
    pair = expected(at, parent, [writer(0), writer(1)], members="quorum")
    slow = share(sim.store, pair, writer(1), state)
    alone = expected(at, parent, [writer(0)], members="quorum")
    taken = share(sim.store, alone, writer(0), state)  # the survivor writes both shares

    put_fragment(sim.store, taken, writer(0))
    put_fragment(sim.store, slow, writer(1))
    record = build(pair, gather(sim.store, pair))
    settled = settle(sim.store, clock, alone, writer(0), taken, PATIENCE)

    assert not record.aborted
    assert record.state == settled[0].state
    assert settle(sim.store, clock, pair, writer(1), slow, PATIENCE) == settled
    assert read_all(sim.store, record) == state


# --- 17: a store that checks and then puts --------------------------------------------------------


def test_17_a_store_that_checks_and_then_puts_is_refused_before_anything_is_claimed():
    store = CheckThenPutStore(racers=8)

    with pytest.raises(UnsafeStore, match="8 of 8 creators"):
        start_job(store)

    assert list(store.scan("")) == []


def test_giving_up_says_who_was_first(sim):
    _, parent = run_of(sim.store, HandClock(), 1)

    committed, ref = abort(sim.store, Position(1, 1), "too late")
    first, _ = abort(sim.store, Position(2, 1), "nobody came")
    second, _ = abort(sim.store, Position(2, 1), "another reason")

    assert (committed.aborted, ref) == ("", parent)
    assert first == second
    assert first.aborted == "nobody came"
    assert not [key for key in sim.objects if key.startswith(pack_prefix(Position(2, 1)))]
