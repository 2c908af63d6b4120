"""Kinds H and L: a run that was stopped anywhere is the run that was not."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

import ftckpt
from ftckpt.events import silent
from tests.session.toy import BATCH, SAMPLES, Toy, run
from tests.support.procs import run_ranks

EPOCH = SAMPLES // BATCH


def log_of(uri, until, **options) -> tuple[list[tuple], Toy]:
    """What a program logs from where it begins: (step, sample ids, learning rate)."""
    toy = Toy()
    with ftckpt.Session(uri, toy.state, events=silent, **options) as session:
        return [toy.train(step) for step in session.steps(until=until)], toy


@pytest.fixture(scope="module")
def straight() -> tuple[list[tuple], list[dict]]:
    """The undisturbed run: its log, and its bits after every step."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    toy = Toy()
    bits, lines = [toy.bits()], []
    for step in range(1, 3 * EPOCH + 1):
        lines.append(toy.train(step))
        bits.append(toy.bits())
    torch.use_deterministic_algorithms(before)
    return lines, bits


@pytest.mark.parametrize("stop", range(1, 13))
def test_a_resume_at_any_step_logs_the_same_steps_samples_and_rates(tmp_path, straight, stop):
    """H5: N updates are saved as step N and go on with N + 1; the rest of an epoch keeps its order."""
    lines, bits = straight

    before, toy = log_of(tmp_path / "run", stop)
    assert before == lines[:stop] and toy.bits() == bits[stop]
    after, toy = log_of(tmp_path / "run", 12)

    assert after == lines[stop:12]
    assert toy.bits() == bits[12]


def test_a_stop_at_the_end_of_an_epoch_leaves_the_next_epochs_whole(tmp_path, straight):
    """H1: saved exactly at the end of epoch 1 of 3; the ids of epochs 2 and 3, 24 updates in all."""
    lines, bits = straight
    log_of(tmp_path / "run", EPOCH)

    after, toy = log_of(tmp_path / "run", 3 * EPOCH)

    assert after == lines[EPOCH:] and len(lines) == 24
    assert all(
        sorted(i for _, ids, _ in lines[e * EPOCH :][:EPOCH] for i in ids) == list(range(SAMPLES))
        for e in range(3)
    )
    assert toy.bits() == bits[24]


def test_a_run_that_is_finished_has_nothing_left_to_do(tmp_path, straight):
    log_of(tmp_path / "run", 5)

    lines, toy = log_of(tmp_path / "run", 5)

    assert lines == [] and toy.bits() == straight[1][5]
    with ftckpt.open(tmp_path / "run") as found:
        assert [commit.at.step for commit in found.commits()] == [5, 0]


def test_many_resumes_are_one_run(tmp_path, straight):
    """H: stopped after every single step, by an exception now and then."""
    for until in range(1, 13):
        log_of(tmp_path / "run", until, keep=2)
        if until % 4 == 0:
            with pytest.raises(ZeroDivisionError):
                die_in_step(tmp_path / "run")

    with ftckpt.open(tmp_path / "run") as found:
        assert [commit.step for commit in found.commits()] == [12, 11]
    toy = Toy(seed=3)
    with ftckpt.Session(tmp_path / "run", toy.state, events=silent):
        assert toy.bits() == straight[1][12]


def die_in_step(uri) -> None:
    """Half of a step is done when it fails: weights moved, schedule and cursor not yet."""
    toy = Toy()
    with ftckpt.Session(uri, toy.state, events=silent) as session:
        for _ in session.steps(until=99):
            with torch.no_grad():
                toy.actor[0].weight.add_(1)
            raise ZeroDivisionError


def test_every_generator_goes_on_where_it_was(tmp_path):
    """H: Python, NumPy and torch draw after a resume what they would have drawn."""
    run(tmp_path / "run", 3)
    wanted = random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()  # noqa: NPY002

    random.seed(1), np.random.seed(1), torch.manual_seed(1)  # noqa: NPY002
    with ftckpt.Session(tmp_path / "run", Toy(seed=8).state, events=silent):
        found = random.random(), np.random.rand(3).tolist(), torch.rand(3).tolist()  # noqa: NPY002

    assert found == wanted


# --- L1 ------------------------------------------------------------------------------------------

ROUNDS = 20


@pytest.mark.timeout(120)
def test_a_signal_at_any_moment_stops_at_a_step_boundary_from_which_the_run_goes_on(tmp_path):
    """L1: the handler only sets a flag. What is saved is the state after a whole step, the last one that
    was trained; going on from it gives the bits of the run that nobody stopped."""
    gang = run_ranks("tests/ranks/session_forks.py", 1, "signals", tmp_path, ROUNDS, timeout_s=100).check()
    assert gang.outputs[0].split("\n")[:-1] == [f"round{n} 0" for n in range(ROUNDS)]
    stops = {}
    for number in range(ROUNDS):
        text = (tmp_path / f"round{number}.log").read_text()
        trained = re.findall(r"trained (\d+)", text)
        (stopped,) = re.findall(r"stopped (\d+) True", text)
        assert trained == [str(step) for step in range(1, int(stopped) + 1)]
        stops[f"round{number}"] = int(stopped)
    assert len(set(stops.values())) > 3, "the moments differ"
    toy, bits = Toy(), {}
    for step in range(1, max(stops.values()) + 4):
        toy.train(step)
        if {step, step - 3} & set(stops.values()):
            bits[step] = toy.bits()

    for name, stopped in stops.items():
        with ftckpt.open(tmp_path / name) as found:
            assert found.latest().step == stopped
        toy = Toy(seed=4)
        with ftckpt.Session(tmp_path / name, toy.state, events=silent) as session:
            assert toy.bits() == bits[stopped], name
            for step in session.steps(until=stopped + 3):
                toy.train(step)
        assert toy.bits() == bits[stopped + 3], name
