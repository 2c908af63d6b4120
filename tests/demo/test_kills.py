"""Must hold 5: whatever is killed, and when, the job ends in the bits of a run that nobody disturbed."""

from __future__ import annotations

import pytest

from ftckpt.chaos.killing import Job, differences, finished_step, read_digest
from ftckpt.chaos.sequences import Moment, draw, play
from tests.demo.conftest import TRAINING, environ

FIXED = [(4, 1), (6, 2), (7, 3)]
"""Seeds and groups that every `make test` plays."""
RANDOM = [(seed, 1 + seed % 3) for seed in range(100, 120)]


def suffer_and_compare(folder, seed, groups, undisturbed):
    plan = draw(seed, groups)
    job = Job(folder, plan.names, environ())
    try:
        fired = play(
            plan,
            job,
            "checkpoints",
            TRAINING.command(),
            save_every=TRAINING.save_every,
            patience_step=TRAINING.steps - 14,
            limit_s=600.0,
            tell=print,
        )
    finally:
        job.close()

    assert len(fired) == len(plan.kills)
    assert finished_step(job.heard) == TRAINING.steps
    ends = sorted(folder.glob("digest.*.json"))
    assert ends
    for end in ends:
        assert differences(undisturbed, read_digest(end)) == [], end.name


@pytest.mark.slow
@pytest.mark.timeout(900)  # half a minute alone on two cores, but other tests and their groups share them
@pytest.mark.parametrize("seed, groups", FIXED)
def test_a_job_that_is_killed_ends_in_the_bits_of_an_undisturbed_one(seed, groups, undisturbed, tmp_path):
    suffer_and_compare(tmp_path, seed, groups, undisturbed)


@pytest.mark.stress
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed, groups", RANDOM)
def test_kills_at_random_moments_never_change_the_bits(seed, groups, undisturbed, tmp_path):
    suffer_and_compare(tmp_path, seed, groups, undisturbed)


def test_a_seed_always_means_the_same_kills():
    assert draw(7, 2) == draw(7, 2)
    assert draw(7, 2) != draw(8, 2)


def test_the_random_sequences_cover_every_kind_of_kill():
    kills = [(plan, kill) for plan in (draw(*case) for case in RANDOM) for kill in plan.kills]

    assert {kill.moment for _, kill in kills} == set(Moment)
    assert any(kill.victims == ("g0",) and plan.groups > 1 for plan, kill in kills)
    assert any(len(kill.victims) > 1 for _, kill in kills)
    assert any(kill.victims == ("supervisor",) for _, kill in kills)
    assert {plan.groups for plan, _ in kills} == {1, 2, 3}
    assert any(plan.resume_groups < plan.groups for plan, _ in kills)
