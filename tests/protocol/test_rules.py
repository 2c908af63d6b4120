"""One rule of the protocol a test: who owns what, when a step is settled, what a collector may take."""

from __future__ import annotations

import itertools

import pytest

from ftckpt.attempts import claim, look, pin, read_intents, read_pins, unpin
from ftckpt.begin import Caller, begin
from ftckpt.clock import HandClock
from ftckpt.commit import Patience, failure, gather, put_fragment, settle
from ftckpt.errors import (
    AlreadyExists,
    AttemptTaken,
    Diverged,
    Fenced,
    GcStopped,
    ObjectDamaged,
    RecordCorrupt,
    SaveAborted,
    SaveFailed,
    StepNotFound,
)
from ftckpt.gc import collect
from ftckpt.layout import commit_key, fragment_key, start_key
from ftckpt.manifest import Intent, Position, ReplicaDigest, encode
from ftckpt.retention import Keep
from ftckpt.run import Run
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
from tests.support.stores import Sim


def readable_steps(sim: Sim) -> list[int]:
    return [at.step for at in look(sim.store).lineage]


def latest_state(sim: Sim) -> dict[str, bytes]:
    seen = look(sim.store)
    return read_all(sim.store, seen.commits[seen.lineage[0]])


# --- attempts -------------------------------------------------------------------------------------


def test_a_zombie_writes_on_and_disturbs_nobody(sim):
    """Must hold 4: the newer lineage is what it would be alone, the older reports ``Fenced``, and its
    commit is shown as an orphan.
    """
    _, parent = run_of(sim.store, HandClock(), 1, 2)
    _, newer = run_of(sim.store, HandClock(), 3, 4)
    zombie = Saver(sim.store, HandClock(), 1, parent, life="z", salt="zombie")

    with zombie, pytest.raises(Fenced, match="attempt 2"):
        zombie.save(3)
    with Saver(sim.store, HandClock(), 2, newer) as living:
        living.save(5)

    lines = {(e.at.step, e.at.attempt): e.status for e in Run(sim.store).entries()}
    assert lines == {
        (5, 2): "readable",
        (4, 2): "readable",
        (3, 2): "readable",
        (3, 1): "orphan",
        (2, 1): "readable",
        (1, 1): "readable",
    }
    assert latest_state(sim) == state_at(5)
    assert zombie.engine.outcome().fenced is not None


@pytest.mark.parametrize(
    "kind", ["attempts/", "starts/", "pins/", "packs/", "fragments/", "commits/", "run.json"]
)
@pytest.mark.parametrize("fate", ["lose", "fail"])
def test_an_unclear_or_refused_create_is_read_back_and_repeated(sim, kind, fate):
    """The protocol's section 2, for everything a job creates; a 409 is refused, not "exists"."""
    run_of(sim.store, HandClock(), 0)
    acked = []
    sim.actor("job", lambda store, clock: job(store, clock, 3, acked=lambda c: acked.append(c.step)))
    sim.until("job", "create", kind)

    sim.step("job", fate)
    attempt = sim.finish("job")

    # Nobody repeats a pack here: that is the retrying store's work.
    assert acked == ([2, 3] if kind == "packs/" else [1, 2, 3])
    assert attempt == 2
    assert latest_state(sim) == state_at(3)


def test_a_loser_says_who_won_and_takes_no_other_number(sim):
    first = claim(sim.store, attempt=1, nonce="a", host="h1", pid=11, command=(), cwd="/", groups=1, nproc=1)

    with pytest.raises(AttemptTaken, match="process 11 on h1") as caught:
        claim(sim.store, attempt=1, nonce="b", host="h2", pid=12, command=(), cwd="/", groups=1, nproc=1)

    assert first.attempt == 1
    assert (caught.value.attempt, caught.value.host) == (1, "h1")
    assert look(sim.store).view.claims == {1}


def test_a_fenced_attempt_does_not_begin(sim):
    """Its claim was there, and a newer one came before its start: a claim without a start."""
    run_of(sim.store, HandClock(), 1)
    sim.actor("slow", lambda store, clock: start_job(store))
    sim.until("slow", "create", "pins/")
    run_of(sim.store, HandClock(), 2)

    with pytest.raises(Fenced, match="attempt 3"):
        sim.finish("slow")

    assert sorted(look(sim.store).view.starts) == [1, 3]
    assert readable_steps(sim) == [2, 1]


def test_a_start_whose_object_is_gone_is_no_empty_run(sim):
    run_of(sim.store, HandClock(), 1)
    sim.store.delete([start_key(1)])

    with pytest.raises(ObjectDamaged, match="starts/000001 is absent"):
        start_job(sim.store)

    assert look(sim.store).view.claims == {1}


def test_a_record_under_another_records_key_is_damage(sim):
    run_of(sim.store, HandClock(), 1, 2)
    sim.objects[commit_key(Position(2, 1))] = sim.objects[commit_key(Position(1, 1))]

    with pytest.raises(RecordCorrupt, match="holds the record of step 1"):
        start_job(sim.store)


# --- saving ---------------------------------------------------------------------------------------


def pair_of(sim: Sim) -> tuple:
    """Two writers about to save step 2 on top of step 1."""
    _, parent = run_of(sim.store, HandClock(), 1)
    return parent, expected(Position(2, 1), parent, [writer(0), writer(1)])


def settler(save, group, fragment, gone=frozenset):
    return lambda store, clock: settle(store, clock, save, save.writers[group], fragment, PATIENCE, gone)


@pytest.mark.parametrize(
    "other",
    [
        {"quorum": 2},
        {"members": "another quorum with the same id"},
        {"parent": None},
    ],
    ids=lambda v: next(iter(v)),
)
def test_fragments_of_another_quorum_membership_or_parent_are_not_of_this_save(sim, other):
    parent, save = pair_of(sim)
    theirs = expected(save.at, **{"parent": parent, "writers": save.writers, **other})
    put_fragment(sim.store, share(sim.store, save, save.writers[0], state_at(2)), save.writers[0])
    put_fragment(sim.store, share(sim.store, theirs, save.writers[1], state_at(2)), save.writers[1])

    found = gather(sim.store, save)

    assert set(found) == {save.writers[0]}


def test_a_fragment_of_a_life_that_is_not_expected_is_not_of_this_save(sim):
    """It says all that the others say, and differs by its incarnation alone."""
    parent, save = pair_of(sim)
    stranger = expected(save.at, parent, [save.writers[0], writer(1, "dead")], members=save.members)
    put_fragment(sim.store, share(sim.store, stranger, stranger.writers[1], state_at(2)), stranger.writers[1])
    put_fragment(sim.store, failure(save, writer(1, "dead"), "a dead life failed"), writer(2, "dead"))

    assert gather(sim.store, save) == {}


def test_another_writer_takes_over_when_the_committer_dies(sim):
    _, save = pair_of(sim)
    fragments = [share(sim.store, save, w, state_at(2)) for w in save.writers]
    for fragment, me in zip(fragments, save.writers, strict=True):
        put_fragment(sim.store, fragment, me)
    for group in (0, 1):
        sim.actor(f"g{group}", settler(save, group, fragments[group]))
    sim.until("g0", "create", "commits/")

    sim.kill("g0")
    record, _ = sim.finish("g1")

    assert not record.aborted
    assert sim.now_s >= PATIENCE.takeover_s
    assert readable_steps(sim) == [2, 1]
    assert latest_state(sim) == state_at(2)


def test_two_committers_at_once_make_one_commit(sim):
    _, save = pair_of(sim)
    fragments = [share(sim.store, save, w, state_at(2)) for w in save.writers]
    for fragment, me in zip(fragments, save.writers, strict=True):
        put_fragment(sim.store, fragment, me)
    for group in (0, 1):
        sim.actor(f"g{group}", settler(save, group, fragments[group]))
        sim.until(f"g{group}", "create", "commits/")

    second = sim.finish("g1")
    first = sim.finish("g0")

    assert first == second


def test_a_share_that_does_not_come_is_given_up_at_the_deadline(sim):
    _, save = pair_of(sim)
    fragment = share(sim.store, save, save.writers[0], state_at(2))
    put_fragment(sim.store, fragment, save.writers[0])
    sim.actor("g0", settler(save, 0, fragment))

    record, _ = sim.finish("g0")

    assert "no fragment of g1.0" in record.aborted
    assert "within 20 s" in record.aborted
    assert PATIENCE.deadline_s <= sim.now_s < PATIENCE.deadline_s + 2 * PATIENCE.max_poll_s
    assert readable_steps(sim) == [1]


def test_a_share_of_the_dead_is_not_waited_for(sim):
    _, save = pair_of(sim)
    fragment = share(sim.store, save, save.writers[0], state_at(2))
    put_fragment(sim.store, fragment, save.writers[0])

    sim.actor("g0", settler(save, 0, fragment, lambda: {save.writers[1].incarnation}))
    record, _ = sim.finish("g0")

    assert "died before its share" in record.aborted
    assert sim.now_s < PATIENCE.takeover_s


def test_the_share_of_one_who_died_after_writing_it_counts(sim):
    _, save = pair_of(sim)
    fragments = [share(sim.store, save, w, state_at(2)) for w in save.writers]
    for fragment, me in zip(fragments, save.writers, strict=True):
        put_fragment(sim.store, fragment, me)

    sim.actor("g1", settler(save, 1, fragments[1], lambda: {save.writers[0].incarnation}))
    record, _ = sim.finish("g1")

    assert not record.aborted
    assert sim.now_s < PATIENCE.takeover_s


def test_a_failure_fragment_ends_the_waiting_of_all(sim):
    _, save = pair_of(sim)
    fragment = share(sim.store, save, save.writers[0], state_at(2))
    put_fragment(sim.store, fragment, save.writers[0])
    failed = failure(save, save.writers[1], "disk on fire")
    put_fragment(sim.store, failed, save.writers[1])
    for group, mine in ((0, fragment), (1, failed)):
        sim.actor(f"g{group}", settler(save, group, mine))

    records = [sim.finish(f"g{group}")[0] for group in (0, 1)]

    assert records[0] == records[1]
    assert records[0].aborted == f"{save.writers[1]}: disk on fire"
    assert sim.now_s < PATIENCE.takeover_s


def test_a_save_whose_pack_is_refused_fails_and_the_next_one_succeeds(sim):
    _, parent = run_of(sim.store, HandClock(), 1)
    errors = []

    def save(store, clock):
        with Saver(store, clock, 1, parent) as saver:
            for step in (2, 3):
                try:
                    saver.save(step)
                except SaveFailed as error:
                    errors.append(str(error))

    sim.actor("job", save)
    sim.until("job", "create", "packs/")
    sim.step("job", "fail")
    sim.finish("job")

    assert len(errors) == 1
    assert "step 2 of attempt 1 was not saved" in errors[0]
    assert readable_steps(sim) == [3, 1]
    assert latest_state(sim) == state_at(3)


def test_replicas_that_differ_never_commit_and_the_leaf_is_named(sim):
    _, save = pair_of(sim)
    for group, salt in ((0, ""), (1, "other")):
        fragment = share(sim.store, save, save.writers[group], state_at(2))
        digest = ReplicaDigest("actor.w", (0,), (salt * 16).encode()[:16].ljust(16))
        fragment = type(fragment)(
            **{f: getattr(fragment, f) for f in fragment.__struct_fields__} | {"replicas": (digest,)}
        )
        put_fragment(sim.store, fragment, save.writers[group])
    sim.actor("g0", settler(save, 0, fragment))

    record, _ = sim.finish("g0")

    assert record.aborted == "replicas diverged: actor.w"


def test_chunks_that_do_not_cover_a_leaf_never_commit(sim):
    """Both writers took the first half, as ranks that plan with different chunk sizes would."""
    _, save = pair_of(sim)
    fragment = share(sim.store, save, save.writers[0], state_at(2))
    for me in save.writers:
        put_fragment(sim.store, fragment, me)
    sim.actor("g0", settler(save, 0, fragment))

    record, _ = sim.finish("g0")

    assert record.aborted.startswith("the fragments do not cover ")


def test_a_commit_that_was_not_acknowledged_is_the_parent_of_the_next_all_the_same(sim):
    """The look for newer claims failed after the commit. Reusing chunks of the commit before it, which
    a collector may take, would make the next step unreadable.
    """
    _, parent = run_of(sim.store, HandClock(), 1)
    outcomes = []

    def save(store, clock):
        with Saver(store, clock, 1, parent) as saver:
            for step in (2, 3):
                try:
                    outcomes.append(saver.save(step).parent.step)
                except OSError as error:
                    outcomes.append(type(error).__name__)

    sim.actor("job", save)
    sim.until("job", "create", "commits/000000000002")
    sim.until("job", "scan", "attempts")
    sim.step("job", "fail")
    collect(sim.store, Keep(last=1), intent_id="gc1")
    sim.finish("job")

    assert outcomes == ["StoreUnavailable", 2]
    assert latest_state(sim) == state_at(3)


def test_a_fragment_whose_answers_were_lost_is_in_the_commit_and_the_save_is_good(sim):
    """The writer put a failure fragment after it, which found the key taken by the good one."""
    _, parent = run_of(sim.store, HandClock(), 1)
    sim.actor("job", lambda store, clock: _save_all(store, clock, parent, 2, 3))
    sim.until("job", "create", "fragments/")
    sim.step("job", "lose")
    sim.step("job", "fail")  # it reads back, and tries again
    sim.step("job")  # which meets its own object
    sim.step("job", "fail")

    parents = sim.finish("job")

    assert parents == [1, 2]
    assert latest_state(sim) == state_at(3)


def _save_all(store, clock, parent, *steps):
    with Saver(store, clock, 1, parent) as saver:
        return [saver.save(step).parent.step for step in steps]


def test_fragments_that_a_collector_took_meanwhile_are_no_error_for_a_slow_writer(sim):
    """The step was given up by others and its leavings collected, between this writer's list and read."""
    _, save = pair_of(sim)
    fragments = [share(sim.store, save, w, state_at(2)) for w in save.writers]
    for fragment, me in zip(fragments, save.writers, strict=True):
        put_fragment(sim.store, fragment, me)
    sim.actor("g0", settler(save, 0, fragments[0]))
    sim.until("g0", "read", "fragments/")
    run_of(sim.store, HandClock(), 2, 3)
    for number in range(2):
        collect(sim.store, Keep(last=3), intent_id=f"gc{number}")

    record, _ = sim.finish("g0")

    assert "given up for a dead attempt" in record.aborted
    assert readable_steps(sim) == [3, 2, 1]


def test_a_writer_that_was_left_out_and_cannot_read_what_was_committed_says_so(sim):
    """Adopting a commit means having compared it: damage is no reason to skip that."""
    _, save = pair_of(sim)
    alone = expected(save.at, save.parent, [save.writers[0]])
    committed = share(sim.store, alone, alone.writers[0], state_at(2))
    put_fragment(sim.store, committed, alone.writers[0])
    settle(sim.store, HandClock(), alone, alone.writers[0], committed, PATIENCE)
    key = fragment_key(save.at, alone.writers[0])
    sim.objects[key] = sim.objects[key][:-5]

    with pytest.raises(RecordCorrupt, match=key):
        mine = share(sim.store, save, save.writers[1], state_at(2))
        settle(sim.store, HandClock(), save, save.writers[1], mine, PATIENCE)


def test_a_second_life_that_repeats_a_committed_step_adopts_it_or_is_told(sim):
    _, parent = run_of(sim.store, HandClock(), 1)
    with Saver(sim.store, HandClock(), 1, parent, life="a") as saver:
        first = saver.save(2)

    with Saver(sim.store, HandClock(), 1, parent, life="b") as saver:
        again = saver.save(2)
    with Saver(sim.store, HandClock(), 1, parent, life="c", salt="c") as saver, pytest.raises(Diverged):
        saver.save(2)

    assert again == first


# --- pins and intents -----------------------------------------------------------------------------


def test_a_pin_id_is_for_one_commit(sim):
    run_of(sim.store, HandClock(), 1, 2)
    assert pin(sim.store, "mine", Position(1, 1), "reader", "me")

    assert pin(sim.store, "mine", Position(1, 1), "reader", "me")
    with pytest.raises(AlreadyExists, match="holds step 1"):
        pin(sim.store, "mine", Position(2, 1), "reader", "me")
    unpin(sim.store, "mine")

    assert pin(sim.store, "mine", Position(2, 1), "reader", "me")
    assert [p.step for p in read_pins(sim.store) if p.kind == "reader"] == [2]


def test_a_pin_that_lands_late_does_not_stand_in_for_the_next_choice(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    sim.store.create("gc/dead", encode(Intent(intent="dead", victims=((3, 1),))))
    sim.actor("resumer", lambda store, clock: start_job(store).start)
    sim.until("resumer", "create", "pins/start")
    sim.step("resumer", "delay")
    sim.until("resumer", "delete", "pins/")  # refused by the intent, it lets go
    sim.store.delete(["gc/dead"])
    sim.step("resumer")
    sim.land()

    start = sim.finish("resumer")

    holds = {(p.step, p.attempt) for p in read_pins(sim.store) if p.by_attempt == 2}
    assert (start.parent.step, start.parent.attempt) in holds


def test_an_intent_of_a_dead_collector_does_not_hang_a_start(sim):
    run_of(sim.store, HandClock(), 1, 2)
    sim.store.create("gc/dead", encode(Intent(intent="dead", victims=((2, 1),))))

    with pytest.raises(StepNotFound, match="`ftckpt gc` finishes one that died"):
        start_job(sim.store)


def test_a_collector_that_died_is_finished_by_the_next_and_its_intent_goes(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc1"))
    sim.until("gc", "create", "collected/000000000002")
    sim.kill("gc")
    half = [i.intent for i in read_intents(sim.store)]

    collect(sim.store, Keep(last=1), intent_id="gc2")

    assert half == ["gc1"]
    assert read_intents(sim.store) == []
    assert readable_steps(sim) == [3]


def test_an_intent_whose_collector_may_live_stays(sim):
    """It names a commit without a tombstone: that collector may have read the pins already."""
    run_of(sim.store, HandClock(), 1, 2, 3)
    sim.actor("gc", lambda store, clock: collect(store, Keep(last=1), intent_id="gc1"))
    sim.until("gc", "create", "collected/")

    collect(sim.store, Keep(last=2), intent_id="gc2")
    left = [i.intent for i in read_intents(sim.store)]
    sim.finish("gc")

    assert left == ["gc1"]
    assert read_intents(sim.store) == []


# --- collecting -----------------------------------------------------------------------------------


def run_with_leavings(sim: Sim) -> None:
    """Two attempts, an orphan, a save that was given up, and one that died half way."""
    clock = HandClock()
    _, parent = run_of(sim.store, clock, 0, 1, 2)
    run_of(sim.store, clock, 3, 4)
    with Saver(sim.store, clock, 1, parent, life="z") as zombie, pytest.raises(Fenced):
        zombie.save(3)
    save = expected(Position(5, 2), look(sim.store).refs[Position(4, 2)], [writer(0), writer(1)])
    put_fragment(sim.store, share(sim.store, save, writer(0), state_at(5)), writer(0))
    broken = failure(save, writer(1), "no space")
    put_fragment(sim.store, broken, writer(1))
    settle(sim.store, clock, save, writer(0), broken, PATIENCE)
    with Saver(sim.store, clock, 2, save.parent, life="y") as saver:
        saver.save(6)
    share(sim.store, expected(Position(7, 2), save.parent, [writer(0)]), writer(0), state_at(7))


def test_a_collector_dies_at_every_call_and_the_next_one_completes(sim):
    run_with_leavings(sim)
    before = dict(sim.objects)
    keep = Keep(last=1)
    collect(sim.store, keep, intent_id="gc0", abandoned=True)
    done = {key: body for key, body in sim.objects.items() if not key.startswith("collected/")}

    deaths = 0
    for number, fate in ((n // 2, ("die", "die after")[n % 2]) for n in itertools.count()):
        again = Sim()
        again.objects = dict(before)
        again.actor("gc", lambda store, clock: collect(store, keep, intent_id="gc1", abandoned=True))
        for _ in range(number):
            if again.pending("gc") is not None:
                again.step("gc")
        if again.pending("gc") is None:
            break
        again.step("gc", fate)
        again.end()
        deaths += 1

        assert readable_steps(again)[:1] == [6]
        for at in look(again.store).lineage:
            assert read_all(again.store, look(again.store).commits[at]) == state_at(at.step)
        collect(again.store, keep, intent_id="gc2", abandoned=True)
        left = {key: body for key, body in again.objects.items() if not key.startswith("collected/")}
        assert left == done
        assert readable_steps(again) == [6, 2]  # the parent of attempt 2 is pinned by its start
    assert deaths > 50


def test_a_collection_takes_all_leavings_and_nothing_of_a_save_under_way(sim):
    run_with_leavings(sim)

    result = collect(sim.store, Keep(last=1), intent_id="gc1", abandoned=True)

    assert [(at.step, at.attempt) for at in result.victims] == [(0, 1), (1, 1), (3, 1), (3, 2), (4, 2)]
    assert result.freed_bytes > 0
    steps = {key.split("/")[2] for key in sim.objects if key.startswith("packs/")}
    assert steps == {f"{n:012d}" for n in (0, 2, 6, 7)}  # 0 holds what never changed; 7 is under way
    assert latest_state(sim) == state_at(6)


def test_a_dry_run_says_the_same_and_does_nothing(sim):
    run_with_leavings(sim)
    before = dict(sim.objects)

    planned = collect(sim.store, Keep(last=1), intent_id="gc1", abandoned=True, dry_run=True)

    assert sim.objects == before
    assert planned == collect(sim.store, Keep(last=1), intent_id="gc2", abandoned=True)


def test_orphans_stay_until_they_are_asked_for(sim):
    run_with_leavings(sim)

    collect(sim.store, Keep(last=1), intent_id="gc1")

    assert Position(3, 1) in look(sim.store).view.readable


@pytest.mark.parametrize("damage", ["cut", "gone"])
@pytest.mark.parametrize("kind", ["commits/000000000002", "fragments/000001/000000000002"])
def test_a_collector_that_cannot_read_what_it_keeps_deletes_nothing(sim, kind, damage):
    run_of(sim.store, HandClock(), 0, 1, 2, 3)
    key = next(key for key in sim.objects if key.startswith(kind))
    if damage == "cut":
        sim.objects[key] = sim.objects[key][:-1]
    elif kind.startswith("fragments"):
        del sim.objects[key]
    else:
        sim.objects[key] = b""
    before = dict(sim.objects)

    with pytest.raises(GcStopped, match="cannot read it"):
        collect(sim.store, Keep(last=2), intent_id="gc1")

    assert sim.objects == before


def test_damage_in_what_is_to_go_does_not_stop_a_collector(sim):
    run_of(sim.store, HandClock(), 0, 1, 2, 3)
    for key in [key for key in sim.objects if "/000000000001" in key]:
        sim.objects[key] = b"rubbish"

    collect(sim.store, Keep(last=1), intent_id="gc1")

    assert readable_steps(sim) == [3]
    assert latest_state(sim) == state_at(3)


def test_the_newest_commit_is_never_collected_whatever_is_pinned_or_asked(sim):
    """K1: keep=1 once deleted the old one before the new one was safe."""
    run_of(sim.store, HandClock(), 1, 2)
    begun = start_job(sim.store)
    sim.actor("job", lambda store, clock: _save_all(store, clock, begun.start.parent, 3))
    while sim.pending("job") is not None:
        collect(sim.store, Keep(last=1), intent_id=f"gc-{len(sim.trace)}", abandoned=True)
        assert latest_state(sim) in (state_at(2), state_at(3))
        sim.step("job")

    assert latest_state(sim) in (state_at(2), state_at(3))


def test_a_rewind_pins_the_tip_it_leaves(sim):
    run_of(sim.store, HandClock(), 1, 2, 3)

    begin(sim.store, Caller((), "/", "h", 1), name="run", step=1)
    collect(sim.store, Keep(last=1), intent_id="gc1", abandoned=True)

    assert readable_steps(sim) == [1]
    assert Position(3, 1) in look(sim.store).view.readable
    assert Position(2, 1) not in look(sim.store).view.readable


def test_the_longest_patience_is_one_deadline(sim):
    """Every wait has an end, also when the store never answers."""
    _, save = pair_of(sim)
    fragment = share(sim.store, save, save.writers[0], state_at(2))
    patience = Patience(deadline_s=5.0, poll_s=0.1, max_poll_s=1.0)
    sim.actor("g0", lambda store, clock: settle(store, clock, save, save.writers[0], fragment, patience))

    while sim.pending("g0") is not None:
        sim.step("g0", "ok" if sim.pending("g0").op == "sleep" else "fail")

    assert type(sim.actors["g0"].error).__name__ == "StoreUnavailable"
    assert sim.now_s <= 6.0


def test_a_given_up_step_says_so_to_whoever_waits_for_it(sim):
    _, parent = run_of(sim.store, HandClock(), 1)

    with (
        Saver(sim.store, HandClock(), 1, parent, groups=2) as saver,
        pytest.raises(SaveAborted, match=r"g1\.0"),
    ):
        saver.save(2)

    assert readable_steps(sim) == [1]
