"""Kinds C, J and K: what fails in the background is told, and never costs the step before it."""

from __future__ import annotations

from pathlib import Path

import pytest

import ftckpt
from ftckpt.chaos.faults.store import Corrupt, CutCreate, CutRead, Fail, Fault, FaultyStore, Lose, Pause
from ftckpt.clock import SystemClock
from ftckpt.errors import (
    CorruptError,
    FtckptError,
    RestoreIncomplete,
    SaveError,
    SaveFailed,
    StoreFull,
    TooManyFailedSaves,
)
from ftckpt.events import silent
from ftckpt.store import open_store
from ftckpt.store.retry import RetryStore
from tests.session.toy import Heard, Toy, run, straight
from tests.support.procs import run_ranks, wait_until

pytestmark = pytest.mark.timeout(120)  # programs that import torch, on a busy machine

FULL = Fail(error=StoreFull("injected: no space"))


def packs_of(step: int, do=FULL, **options) -> Fault:
    return Fault(do, op="create", prefix=f"packs/000001/{step:012d}", **options)


def steps_in(folder) -> list[int]:
    with ftckpt.open(folder) as found:
        assert found.verify() == []
        return [commit.step for commit in found.commits()]


# --- C3 ------------------------------------------------------------------------------------------


def test_a_failed_save_is_told_at_the_next_boundary_and_made_up_for(tmp_path):
    """C3: training goes on, the boundary that hears of it saves, and collecting does not trip over it."""
    store, heard, toy = FaultyStore(open_store(tmp_path / "run"), [packs_of(10)]), Heard(), Toy()
    with ftckpt.Session("ignored", toy.state, store=store, save_every=10, keep=1, events=heard) as session:
        for step in session.steps(until=30):
            toy.train(step)
            if step == 11:
                wait_until(lambda: heard.named("save.failed"), 20, "the save of step 10 to fail")

    (told,) = heard.named("session.save_failed")
    assert "step 10" in told["error"] and "no space" in told["error"]
    assert {event["step"] for event in heard.named("save.committed")} == {0, 11, 20, 30}
    assert not heard.named("gc.failed")
    assert steps_in(tmp_path / "run")[0] == 30


def test_a_handle_raises_what_became_of_its_save_and_the_next_one_succeeds(tmp_path):
    """C3: whoever waits for it hears the reason; the step before is untouched."""
    store, toy = FaultyStore(open_store(tmp_path / "run"), [packs_of(1)]), Toy()
    with ftckpt.Session("ignored", toy.state, store=store, events=silent) as session:
        with pytest.raises(SaveFailed, match="no space") as failure:
            session.save(1).wait(20)
        assert isinstance(failure.value.__cause__, StoreFull)
        assert session.save(2).wait(20).step == 2

    assert steps_in(tmp_path / "run") == [2, 0]


@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_failed_saves_in_a_row_stop_the_trainer_when_asked(tmp_path, limit):
    store, heard, toy = FaultyStore(open_store(tmp_path / "run")), Heard(), Toy()
    failed = 0
    with pytest.raises(TooManyFailedSaves, match="no space") as stop:  # noqa: SIM117
        with ftckpt.Session(
            "ignored", toy.state, store=store, save_every=1, max_failed_saves=limit, events=heard
        ) as session:
            wait_until(lambda: heard.named("save.committed"), 20, "step 0")
            store.plan = [Fault(FULL, op="create", prefix="packs")]
            for step in session.steps(until=20):
                toy.train(step)
                if step > 1:
                    failed += 1
                    wait_until(lambda: len(heard.named("save.failed")) == failed, 20)  # noqa: B023

    assert failed == limit and stop.value.failed == limit
    assert steps_in(tmp_path / "run") == [0]


# --- C7 ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def left(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """Programs that begin a save and leave at once, each in its own way: their runs and exit codes."""
    folder = tmp_path_factory.mktemp("left")
    gang = run_ranks("tests/ranks/session_forks.py", 1, "leave", folder, timeout_s=110).check()
    lines = [line.split() for line in gang.outputs[0].splitlines()]
    return folder, {name: int(code) for name, code in lines}


@pytest.mark.parametrize("name, code", [("returns", 0), ("exits", 3), ("fails", 1)])
def test_a_save_begun_just_before_the_end_is_complete_afterwards(left, name, code):
    """C7 (i): the program returns from main, exits, or fails."""
    folder, codes = left

    assert codes[name] == code, (folder / f"{name}.log").read_text()
    assert steps_in(folder / name) == [1, 0]


def test_a_program_whose_last_save_failed_does_not_end_well(left):
    """C: an error of the background surfaces at the latest on leaving, with another exit code than 0."""
    folder, codes = left

    assert codes["full"] == 1
    assert "SaveFailed: step 1 of attempt 1" in (folder / "full.log").read_text()
    assert steps_in(folder / "full") == [0]


def test_the_error_of_training_comes_first_and_the_failed_save_is_attached(tmp_path):
    """C7 (ii)"""
    store, toy = FaultyStore(open_store(tmp_path / "run"), [packs_of(1)]), Toy()
    with pytest.raises(ValueError, match=r"^train") as failure:  # noqa: SIM117
        with ftckpt.Session("ignored", toy.state, store=store, events=silent) as session:
            session.save(1)
            raise ValueError("train")

    assert any("SaveFailed: step 1" in note and "no space" in note for note in failure.value.__notes__)


def test_leaving_with_a_store_that_hangs_ends_in_time_and_hides_nothing(tmp_path):
    """C7: even the limit for the background does not hide what training failed with."""
    pause, toy = Pause(timeout_s=20), Toy()
    store = FaultyStore(open_store(tmp_path / "run"), [packs_of(1, pause)])
    with pytest.raises(ValueError, match=r"^train") as failure:  # noqa: SIM117
        with ftckpt.Session("ignored", toy.state, store=store, events=silent, deadline_s=0.2) as session:
            session.save(1)
            assert pause.arrived.wait(20)
            raise ValueError("train")
    pause.release()

    assert any("still being written" in note for note in failure.value.__notes__)


# --- J6, J7, J12 ---------------------------------------------------------------------------------


@pytest.mark.parametrize("do", [CutCreate(0.6), CutCreate(0.0), Lose()], ids=["part", "nothing", "absent"])
@pytest.mark.parametrize("prefix", ["packs", "fragments"])
def test_a_store_that_keeps_less_than_it_was_given_is_found_out_before_the_step_exists(tmp_path, prefix, do):
    """J6, J7: the record is created only after every object is confirmed from the store."""
    toy = Toy()
    key = f"{prefix}/000001/000000000001"
    store = FaultyStore(open_store(tmp_path / "run"), [Fault(do, op="create", prefix=key)])
    with ftckpt.Session("ignored", toy.state, store=store, events=silent, deadline_s=2) as session:
        with pytest.raises(SaveError):
            session.save(1).wait(20)
        assert session.save(2).wait(20).step == 2

    assert steps_in(tmp_path / "run") == [2, 0]


def test_bytes_that_changed_on_the_way_in_never_reach_a_tensor(tmp_path):
    """J7: a byte of the right size but another value is found by its checksum."""
    toy = Toy()
    store = FaultyStore(open_store(tmp_path / "run"), [packs_of(1, Corrupt(at=-3))])
    with ftckpt.Session("ignored", toy.state, store=store, events=silent) as session:
        session.save(1).wait(20)

    with ftckpt.open(tmp_path / "run") as found:
        assert [problem.step for problem in found.verify()] == [1]
    with pytest.raises((CorruptError, RestoreIncomplete)):
        ftckpt.Session(tmp_path / "run", Toy().state, events=silent).__enter__()


@pytest.mark.parametrize("seed", range(3))
def test_reads_that_break_off_are_repeated_until_they_are_whole(tmp_path, seed):
    """J12: a fifth of all reads ends early with an error."""
    run(tmp_path / "run", 10)
    cut = Fault(CutRead(0.4), op="read", chance=0.2, seed=seed)
    broken = FaultyStore(open_store(tmp_path / "run"), [cut])
    heard = Heard()
    store = RetryStore(broken, deadline_s=20, clock=SystemClock(), events=heard)
    toy = Toy(seed=7)

    with ftckpt.Session("ignored", toy.state, store=store, events=silent) as session:
        assert session.restored.step == 10 and toy.bits() == straight(10).bits()


def test_reads_that_end_early_in_silence_are_never_taken_for_whole(tmp_path):
    """J12: the same without an error: right, or refused with nothing wrong in any tensor."""
    run(tmp_path / "run", 10)
    wanted, refused = straight(10), 0
    for seed in range(12):
        cut = Fault(CutRead(0.4, silent=True), op="read", chance=0.2, seed=seed)
        toy = Toy(seed=7)
        before = toy.tensors() and {name: tensor.clone() for name, tensor in toy.tensors().items()}
        store = FaultyStore(open_store(tmp_path / "run"), [cut])
        try:
            with ftckpt.Session("ignored", toy.state, store=store, events=silent):
                assert toy.bits() == wanted.bits()
        except FtckptError:
            refused += 1
            assert_old_or_saved(toy, before, wanted.tensors())
    assert refused


def assert_old_or_saved(toy, before, saved) -> None:
    """Every element of every live tensor is as it was before, or as it was saved."""
    for name, tensor in toy.tensors().items():
        old = before.get(name, tensor)
        assert bool(((tensor == old) | (tensor == saved[name])).all()), name
