"""The benchmark of saves runs, and its arithmetic is right. Nothing here looks at how fast anything is."""

from __future__ import annotations

import time

import pytest
import torch

from benchmarks.save.figures import figures
from benchmarks.save.holds import Probe
from benchmarks.save.state import make_state
from tests.bench.quick import quick
from tests.support.procs import wait_until

CASES = [
    "s3: raw PUTs",
    "s3: ftckpt, second save",
    "folder: ftckpt",
    "folder: DCP async_save",
    "fence",
    "hold, large tensors",
    "hold, 13,000 leaves",
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_quick_run_measures_every_case_that_was_asked_for(tmp_path):
    told, printed = quick("benchmarks.save", CASES, tmp_path)

    assert set(CASES) <= {name for name, rounds in told["cases"].items() if rounds}
    by_name = {figure["name"]: figure for figure in told["figures"]}
    assert by_name["second save after a step at lr 1e-6: bytes of the frozen reference"]["measured"] == 0
    assert "fence beyond the budget" in printed


def test_a_ratio_is_taken_round_by_round_and_its_median_counts():
    results = {
        "s3: ftckpt": [{"commit_s": 2.0, "stored_bytes": 1, "raw_bytes": 2}] * 3,
        "s3: raw PUTs": [{"commit_s": seconds, "cpu_s": 1.0} for seconds in (1.0, 2.0, 8.0)],
    }

    found = next(f for f in figures(results) if f.name.startswith("S3: RL state / raw PUTs"))

    assert found.rounds == (2.0, 1.0, 0.25)
    assert found.measured == 1.0
    assert found.reached is True


def test_a_call_that_does_not_let_go_of_the_interpreter_is_seen():
    numbers = torch.rand(1 << 20).tolist()
    with Probe() as probe:
        begun_s = time.thread_time()
        numbers.sort()  # one call into C
        sorting_s = time.thread_time() - begun_s

        wait_until(lambda: probe.hold_s > sorting_s / 2, 10)


def test_what_was_not_run_is_neither_reached_nor_missed():
    assert {figure.reached for figure in figures({})} == {None}


def test_the_state_is_the_same_each_time_and_a_step_changes_few_bits_of_its_weights():
    first, second = make_state(4 << 20), make_state(4 << 20)
    before = {name: tensor.clone() for name, tensor in first.tensors.items()}

    second.train()

    assert all(before[name].equal(tensor) for name, tensor in make_state(4 << 20).tensors.items())
    weights = [name for name in before if name.startswith("actor.") and before[name].ndim == 2]
    changed = sum(int((before[name] != second.tensors[name]).sum()) for name in weights)
    assert 0 < changed < 0.05 * sum(before[name].numel() for name in weights)
