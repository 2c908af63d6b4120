"""Copy and fork: what arrives, what is proven on the way, and what a death at any call leaves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftckpt.attempts import look, read_claim, read_pins, read_start
from ftckpt.begin import Caller, begin
from ftckpt.chaos.faults.store import Crash, Fault, FaultyStore
from ftckpt.clock import HandClock
from ftckpt.copying import Copied, Means, copy, fork
from ftckpt.errors import NoCommit, NotSameRun, ObjectDamaged, RunNotFound, StepNotFound
from ftckpt.events import Event, silent
from ftckpt.gc import collect
from ftckpt.manifest import Position
from ftckpt.reader import verify_commit
from ftckpt.retention import Keep
from ftckpt.store import LocalStore, open_store, server_side
from ftckpt.store.api import ObjectStore
from ftckpt.store.retry import RetryStore
from tests.protocol.test_crash_points import Meet, each_way, every_call
from tests.protocol.world import Saver, read_all, run_of, start_job, state_at
from tests.support.stores import Sim


@pytest.fixture
def run() -> Sim:
    """Attempt 1 saved 0 to 3; attempt 2 went on from 2 and saved 3 and 4: step 3 of attempt 1 is an orphan."""
    sim = Sim()
    run_of(sim.store, HandClock(), 0, 1, 2, 3)
    begun = start_job(sim.store, step=2)
    with Saver(sim.store, HandClock(), 2, begun.start.parent, life="b") as saver:
        saver.save(3)
        saver.save(4)
    return sim


def steps_of(store: ObjectStore) -> list[tuple[int, int]]:
    return [(at.step, at.attempt) for at in look(store).lineage]


def check(store: ObjectStore) -> list[tuple[int, int]]:
    """Everything readable is whole; the lineage."""
    seen = look(store)
    for at in seen.view.readable:
        assert read_all(store, seen.commits[at]) == state_at(at.step)
        assert verify_commit(store, seen.commits[at]) == []
    return [(at.step, at.attempt) for at in seen.lineage]


def without_pins(objects: dict[str, bytes]) -> dict[str, bytes]:
    return {key: body for key, body in objects.items() if not key.startswith("pins/copy-")}


# --- copy -----------------------------------------------------------------------------------------


def test_a_copy_of_a_run_is_the_run_byte_for_byte(run):
    dest, before = Sim(), dict(run.objects)

    done = copy(run.store, dest.store)

    kept = {k: v for k, v in before.items() if not k.startswith(("pins/", "probes/"))}
    assert dest.objects == kept
    assert run.objects == before
    assert check(dest.store) == check(run.store) == [(4, 2), (3, 2), (2, 1), (1, 1), (0, 1)]
    assert len(done.steps) == 6 and done.left_out == () and done.found_bytes == 0


def test_a_copy_of_one_step_holds_that_step_alone(run):
    dest = Sim()

    done = copy(run.store, dest.store, step=2)

    assert done.steps == (Position(2, 1),)
    assert check(dest.store) == [(2, 1)]
    assert {key.split("/")[1] for key in dest.objects if key.startswith("commits")} == {"000000000002-000001"}


def test_a_second_copy_brings_what_came_since_and_nothing_twice(run):
    dest = Sim()
    first = copy(run.store, dest.store)
    begun = start_job(run.store)
    with Saver(run.store, HandClock(), 3, begun.start.parent, life="c") as saver:
        saver.save(5)

    second = copy(run.store, dest.store)
    third = copy(run.store, dest.store)

    assert check(dest.store)[0] == (5, 3)
    assert second.found_bytes == first.copied_bytes and 0 < second.copied_bytes < first.copied_bytes
    assert third.copied_bytes == 0


def test_what_the_copy_keeps_and_the_run_has_collected_stays(run):
    dest = Sim()
    copy(run.store, dest.store)
    collect(run.store, Keep(last=1), intent_id="gc")

    copy(run.store, dest.store)

    assert (0, 1) in check(dest.store)


def test_what_the_copy_has_collected_by_itself_is_not_brought_back(run):
    dest = Sim()
    copy(run.store, dest.store)
    collect(dest.store, Keep(last=1), intent_id="gc")

    done = copy(run.store, dest.store)

    assert {at.step for at in done.left_out} >= {0, 1}
    assert check(dest.store) == [(4, 2)]
    with pytest.raises(StepNotFound, match="does not take it back"):
        copy(run.store, dest.store, step=1)


def test_training_goes_on_from_a_copy_and_then_it_is_a_run_of_its_own(run):
    dest = Sim()
    copy(run.store, dest.store)
    begun = start_job(dest.store)
    with Saver(dest.store, HandClock(), 3, begun.start.parent, life="d") as saver:
        saver.save(5)
    start_job(run.store)
    before = dict(dest.objects)

    with pytest.raises(NotSameRun, match="went on by itself"):
        copy(run.store, dest.store)

    assert dest.objects == before
    assert check(dest.store)[0] == (5, 3)


@pytest.mark.parametrize("move", [copy, fork])
def test_another_run_is_never_written_into(run, move):
    other = Sim()
    run_of(other.store, HandClock(), 0, 1)
    before = dict(other.objects)

    with pytest.raises(NotSameRun):
        move(run.store, other.store)

    assert other.objects == before


@pytest.mark.parametrize("move", [copy, fork])
def test_what_is_not_there_is_an_error_and_nothing_is_written(run, move):
    dest, empty = Sim(), Sim()

    with pytest.raises(RunNotFound):
        move(empty.store, dest.store)
    with pytest.raises(StepNotFound):
        move(run.store, dest.store, step=99)
    start_job(empty.store)
    with pytest.raises(NoCommit):
        move(empty.store, dest.store)

    assert dest.objects == {}


@pytest.mark.parametrize("move", [copy, fork])
@pytest.mark.parametrize("kind", ["packs/000002", "fragments/000002/000000000004"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_damage_is_met_before_any_commit_is_written(run, move, kind, how):
    dest = Sim()
    for key in [key for key in run.objects if key.startswith(kind)]:
        body = run.objects.pop(key)
        if how != "gone":
            run.objects[key] = body[:-1] if how == "cut" else bytes([body[0] ^ 1]) + body[1:]

    with pytest.raises(ObjectDamaged):
        move(run.store, dest.store)

    assert not [key for key in dest.objects if key.startswith(("commits", "run.json"))]
    assert read_pins(run.store) == [pin for pin in read_pins(run.store) if pin.kind != "reader"]


def test_nothing_is_pinned_where_the_run_may_only_be_read(run):
    dest = Sim()
    asked = []

    class ReadOnly:
        uri, conditional_create = "sim://run", True

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            assert name in ("read", "scan", "size"), name
            return getattr(run.store, name)

    copy(ReadOnly(), dest.store, means=Means(pins=False))  # type: ignore[arg-type]

    assert check(dest.store)[0] == (4, 2)
    assert asked


def test_progress_ends_with_everything_done(run):
    told: list[tuple[int, int]] = []

    done = copy(run.store, Sim().store, means=Means(progress=lambda a, b: told.append((a, b))))

    assert told[0] == (0, done.copied_bytes) and told[-1] == (done.copied_bytes, done.copied_bytes)


# --- fork -----------------------------------------------------------------------------------------


def test_a_fork_is_a_new_run_whose_first_attempt_goes_on_from_the_step(run):
    dest, before = Sim(), dict(run.objects)

    done = fork(run.store, dest.store, step=2)

    assert run.objects == before
    assert done.steps == (Position(2, 1),)
    assert check(dest.store) == [(2, 1)]
    assert dest.objects["run.json"] != run.objects["run.json"]
    claim, start = read_claim(dest.store, 1), read_start(dest.store, 1)
    assert claim.command == read_claim(run.store, 1).command
    assert claim.settings["forked_from"] == "sim://run@2"
    assert start.parent == look(dest.store).refs[Position(2, 1)]


def test_a_fork_trains_on_collects_and_never_meets_the_other_run_again(run):
    dest, before = Sim(), dict(run.objects)
    fork(run.store, dest.store, step=4)

    begun = start_job(dest.store)
    with Saver(dest.store, HandClock(), 2, begun.start.parent, life="f") as saver:
        saver.save(5)
        saver.save(6)
    collect(dest.store, Keep(last=1), intent_id="gc")
    start_job(dest.store)  # lets go of the pin of attempt 2's start
    collect(dest.store, Keep(last=1), intent_id="gc2")

    assert begun.start.parent.at == Position(4, 1)
    assert steps_of(dest.store) == [(6, 2)]
    assert read_all(dest.store, look(dest.store).commits[Position(6, 2)]) == state_at(6)
    assert {key.split("/")[1] for key in dest.objects if key.startswith("fragments")} == {"000002"}
    assert run.objects == before


def test_the_same_fork_again_changes_nothing(run):
    dest = Sim()
    fork(run.store, dest.store, step=4)
    start_job(dest.store)
    before = dict(dest.objects)

    done = fork(run.store, dest.store, step=4)

    assert done.steps == (Position(4, 1),)
    assert dest.objects == before
    with pytest.raises(NotSameRun):
        fork(run.store, dest.store, step=2)


def test_a_fork_of_a_fork_works(run):
    middle, end = Sim(), Sim()
    fork(run.store, middle.store, step=2)

    fork(middle.store, end.store)

    assert check(end.store) == [(2, 1)]


# --- deaths ---------------------------------------------------------------------------------------

Move = Callable[[ObjectStore, ObjectStore, Means], Copied]
MOVES: dict[str, Move] = {
    "copy": lambda source, dest, means: copy(source, dest, means=means),
    "fork": lambda source, dest, means: fork(source, dest, step=1, means=means),
}


@pytest.fixture
def short_run() -> Sim:
    """Attempt 1 saved 0 and 1, attempt 2 saved 2."""
    sim = Sim()
    run_of(sim.store, HandClock(), 0, 1)
    run_of(sim.store, HandClock(), 2)
    return sim


@pytest.mark.parametrize("name", MOVES)
@each_way
def test_a_death_at_any_call_leaves_whole_steps_and_the_next_try_ends_it(short_run, name, how):
    run, move, points = short_run, MOVES[name], 0
    want, before = Sim(), without_pins(run.objects)
    move(run.store, want.store, Means())
    for nth in itertools.count(1):
        dest, meet = Sim(), Meet(nth, how, every_call)
        stores = [
            RetryStore(FaultyStore(sim.store, [Fault(meet)]), deadline_s=9, clock=HandClock(), events=silent)
            for sim in (run, dest)
        ]
        told = f"{name}, call {nth}, {how}"

        try:
            move(*stores, Means())
        except Crash:
            assert how != "lost", told
        whole = check(dest.store)
        assert whole == [] or whole == check(want.store) or name == "copy", told
        assert without_pins(run.objects) == before, told
        if "run.json" not in dest.objects and any(k.startswith("attempts") for k in dest.objects):
            with pytest.raises(ObjectDamaged, match="has not ended"):
                begin(dest.store, Caller(("t",), "/", "h", 1), name="new", on_empty="start")
        move(run.store, dest.store, Means())

        assert check(dest.store) == check(want.store), told
        assert dest.objects.keys() == want.objects.keys(), told
        assert run.objects == before, told  # a pin that was left behind is gone as well
        if meet.met is None:
            break
        points += 1

    assert points > 30


# --- real stores ----------------------------------------------------------------------------------


@pytest.fixture
def on_s3(s3, run) -> Callable[[str], ObjectStore]:
    """Opens an address of the server; ``run`` is at ``moving/run``."""
    store = open_store(s3.uri("moving/run"))
    for key, body in run.objects.items():
        if not any(info.key == key for info in store.scan("")):
            store.create(key, body)
    return lambda name: open_store(s3.uri(name))


def test_the_server_copies_packs_itself_inside_one_bucket(on_s3, s3):
    within = server_side(s3.uri("moving/run"), s3.uri("moving/copy"))
    events: list[Event] = []
    asked: list[str] = []

    def counted(key: str, to: str) -> None:
        asked.append(key)
        within(key, to)

    done = copy(
        on_s3("moving/run"), on_s3("moving/copy"), means=Means(server_side=counted, events=events.append)
    )

    assert events == [] and asked and all(key.startswith("packs/") for key in asked)
    assert check(on_s3("moving/copy")) == [(4, 2), (3, 2), (2, 1), (1, 1), (0, 1)]
    assert done.copied_bytes > 0


def test_what_the_server_cannot_copy_is_streamed_and_told_of(on_s3, s3):
    events: list[Event] = []
    elsewhere = server_side(s3.uri("moving/nothing"), s3.uri("moving/x"))

    def refuse(key: str, to: str) -> None:
        from ftckpt.errors import UnsafeStore

        raise UnsafeStore("copy: the server does not know this kind of request")

    fork(on_s3("moving/run"), on_s3("moving/fork"), means=Means(server_side=refuse, events=events.append))

    assert {event.name for event in events} == {"copy.streamed"}
    assert check(on_s3("moving/fork")) == [(4, 1)]
    with pytest.raises(ObjectDamaged, match="is not in"):
        copy(on_s3("moving/run"), on_s3("moving/x"), means=Means(server_side=elsewhere))


def test_a_server_side_copy_overwrites_nothing(on_s3, s3):
    store = on_s3("moving/there")
    key = next(info.key for info in on_s3("moving/run").scan("packs"))
    store.create(key, b"there first")
    within = server_side(s3.uri("moving/run"), s3.uri("moving/there"))

    with pytest.raises(FileExistsError):
        within(key, key)

    assert bytes(store.read(key)) == b"there first"


@pytest.mark.parametrize("way", ["to a folder", "from a folder"])
def test_runs_move_between_kinds_of_stores(on_s3, way, tmp_path: Path):
    folder = LocalStore(tmp_path / "run")
    copy(on_s3("moving/run"), folder)
    if way == "from a folder":
        copy(folder, on_s3("moving/back"))

    store = folder if way == "to a folder" else on_s3("moving/back")

    assert check(store) == [(4, 2), (3, 2), (2, 1), (1, 1), (0, 1)]


@pytest.mark.parametrize(
    "source, dest",
    [
        ("/a", "/b"),
        ("s3://b/a", "/b"),
        ("s3://b/a", "s3://c/a"),
        ("s3://b/a", "gs://b/a"),
        ("memory://a", "memory://b"),
    ],
)
def test_no_server_is_asked_to_copy_between_two_places(source, dest):
    assert server_side(source, dest) is None
