"""The benchmark of restores runs, and its arithmetic is right. Nothing here looks at how fast anything is."""

from __future__ import annotations

import pytest

from benchmarks.restore import simulated
from benchmarks.restore.figures import figures
from tests.bench.quick import quick
from tests.cases.test_many_leaves import calls

CASES = ["s3: raw GETs", "s3: ftckpt, stored raw", "an eighth along dim 0", "chain, all"]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_quick_run_measures_every_case_that_was_asked_for(tmp_path):
    told, printed = quick("benchmarks.restore", CASES, tmp_path)

    assert all(any(name in case for case, rounds in told["cases"].items() if rounds) for name in CASES)
    by_name = {figure["name"]: figure for figure in told["figures"]}
    assert by_name["S3, stored raw / raw GETs of the same bytes"]["measured"] > 0
    assert by_name["plan of a rank, beside its fetches"]["measured"] is None
    assert "s3: ftckpt, stored raw" in printed


def test_a_ratio_says_how_many_times_as_fast_ftckpt_is_round_by_round():
    results = {
        "s3: ftckpt": [{"restore_s": 2.0}] * 3,
        "s3: DCP": [{"restore_s": seconds} for seconds in (10.0, 18.0, 40.0)],
    }

    found = next(f for f in figures(results) if f.name.startswith("S3 / DCP"))

    assert found.rounds == (5.0, 9.0, 20.0)
    assert (found.measured, found.reached) == (9.0, True)


def test_what_was_not_run_is_neither_reached_nor_missed():
    assert {figure.reached for figure in figures({})} == {None}


@pytest.mark.parametrize("times", [1, 0.75, 0.5])
def test_a_rank_of_a_job_of_four_times_the_ranks_plans_with_as_many_calls(monkeypatch, times):
    """It wants as much in both. Looking at the references of fragments, which grows, calls nothing."""
    monkeypatch.setattr(simulated, "TENSORS", 50)
    monkeypatch.setattr(simulated, "TURNS", 1)

    few, many = (simulated.records(ranks, int(ranks * times)) for ranks in (64, 256))

    for made in (few, many):  # and what is imported at first use is
        assert made.plan()["fragments"] == (2 if times == 1 else 3)  # one of them has what all share
    assert calls(many.plan) <= 1.1 * calls(few.plan)
