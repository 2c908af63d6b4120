"""Kind C with two ranks: no wait is without an end, and nothing of a save meets the trainer's collectives."""

from __future__ import annotations

import fcntl
import json
import signal

import pytest

import ftckpt
from tests.support.procs import run_ranks, start_ranks

pytestmark = pytest.mark.timeout(240)
SCRIPT = "tests/ranks/case_hangs.py"


@pytest.fixture(scope="module")
def held(tmp_path_factory, worker_id) -> list[set[str]]:
    """The cases that held, by rank. One gang runs for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    told = shared / "hangs-outputs.json"
    with (shared / "hangs-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            folder = tmp_path_factory.mktemp("hangs")
            gang = run_ranks(SCRIPT, 2, "together", folder, timeout_s=200).check()
            told.write_text(json.dumps(gang.outputs))
    outputs = json.loads(told.read_text())
    return [{line[3:] for line in text.splitlines() if line.startswith("ok ")} for text in outputs]


def test_saves_at_every_step_beside_collectives_of_the_trainer_end(held):
    """C1: the background runs no collective, so there is none to cross the trainer's."""
    assert all("C1" in cases for cases in held)


def test_two_saves_as_the_very_first_calls_end_whatever_the_order(held):
    """C4"""
    assert all("C4" in cases for cases in held)


def test_a_listener_and_a_wait_on_one_rank_only_need_no_other(held):
    """C5"""
    assert all("C5" in cases for cases in held)


def test_a_slow_store_of_one_rank_trips_no_timeout_of_the_training_group(held):
    """C6"""
    assert all("C6" in cases for cases in held)


def test_threads_with_locks_and_a_forked_loader_hold_up_no_save(held):
    """C8"""
    assert all("C8" in cases for cases in held)


def test_a_rank_that_stands_still_in_a_save_is_named_in_time_and_the_next_save_is_good(tmp_path):
    """C2: SIGSTOP in the middle of a share; the other rank is told within its deadline and goes on; let go
    on, the stopped one hears the same outcome and saves again."""
    with start_ranks(SCRIPT, 2, "stopped", tmp_path, timeout_s=120) as gang:
        gang.wait_for_output(1, "in the share")
        gang.signal(1, signal.SIGSTOP)
        gang.wait_for_output(0, "went on")
        gang.signal(1, signal.SIGCONT)
        done = gang.wait().check()

    assert "told:" in done.outputs[0] and "no fragment of g0.1" in done.outputs[0]
    assert "told:" in done.outputs[1] and "no fragment of g0.1" in done.outputs[1]
    assert all("next is good" in text for text in done.outputs)
    with ftckpt.open(tmp_path / "stopped") as run:
        assert run.latest().step == 2 and run.verify() == []


def test_saving_sharded_state_at_every_step_leaves_training_as_it_is(tmp_path):
    """B5: the losses with a save at every step are those without any, bit for bit."""
    done = run_ranks(SCRIPT, 2, "sharded", tmp_path, timeout_s=200).check()

    assert all("ok B5" in text for text in done.outputs)
