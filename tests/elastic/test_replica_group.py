"""Replica groups as real processes in a real quorum, killed while they train."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.elastic.job import Job, start_job
from tests.elastic.zygote import Zygote
from tests.ranks.elastic_state import undisturbed


@pytest.fixture(scope="module")
def zygote(tmp_path_factory) -> Iterator[Zygote]:
    server = Zygote(tmp_path_factory.mktemp("zygote"))
    yield server
    server.close()


def assert_same_bits(job: Job, groups: list[str], expected: dict[int, str], rank: int = 0) -> None:
    found = [(group, s.step, s.hash) for group in groups for s in job.steps(group, rank)]
    assert found == [(group, step, expected[step]) for group, step, _ in found]


def end_soon(job: Job, *groups: str) -> int:
    """Let the job end some steps later than where it is, so that all groups hear of it in time."""
    last = max(s.step for group in groups for s in job.steps(group)) + 10
    job.end_after(last)
    job.finish()
    return last


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_group_of_three_is_killed_in_the_middle_of_a_step_and_rejoins_without_a_bit_differing(
    tmp_path, zygote
):
    with start_job(zygote, tmp_path, limit_s=120) as job:
        for group in ("g0", "g1", "g2"):
            job.start(group)
        job.hold("g1", 6)
        job.go("g0", "g1", "g2")
        job.wait_for("g1", "of step 6")

        job.kill9("g1")
        job.release("g1")
        job.hold("g0", 9)
        job.wait_for_step("g0", 8, participants=2)
        job.start("g1", life=1)
        job.wait_for_ready("g1", life=1)
        job.release("g0")
        job.wait_for("g1", "healed to")
        job.wait_for_step("g1", 9, participants=3)
        last = end_soon(job, "g0", "g1", "g2")

        assert "failed vote on step 6" in job.output("g0")
        assert_same_bits(job, ["g0", "g1", "g2"], undisturbed(last))
        assert {s.participants for s in job.steps("g0")} >= {2, 3}
        assert [job.steps(group)[-1].step for group in ("g0", "g1", "g2")] == [last] * 3
        assert "carries True" in job.output("g1").split("healed to")[1].splitlines()[0]
        assert_members_agree(job)
        assert_status_tells_of_the_failed_vote(job)


def assert_members_agree(job: Job) -> None:
    """Groups in one quorum compute the same digest of its members, and it changes with a life."""
    g1 = {s.step: s for s in job.steps("g1")}
    both = [(s.members, g1[s.step].members) for s in job.steps("g0") if s.participants == 3 and s.step in g1]
    assert all(mine == theirs for mine, theirs in both)
    assert len({mine for mine, _ in both}) == 2


def assert_status_tells_of_the_failed_vote(job: Job) -> None:
    lines = [json.loads(line) for line in (job.folder / "g0.status").read_text().splitlines()]
    failed = [e for e in lines if e["event"] == "group.turn" and e["phase"] == "voted" and not e["vote"]]
    assert next((e["step"], e["finished_step"]) for e in failed) == (6, 5)
    assert all(e["reason"] for e in failed)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_groups_of_two_fsdp_ranks_survive_a_kill_with_the_same_bits(tmp_path, zygote):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with start_job(zygote, tmp_path / "two", "fsdp", nproc=2, limit_s=110) as job:
        job.start("g0")
        job.start("g1")
        job.hold("g0", 4)
        job.go("g0", "g1")
        job.wait_for("g0", "of step 4")

        job.kill9("g0")
        job.release("g0")
        job.hold("g1", 6)
        job.wait_for_step("g1", 5, participants=1)
        job.start("g0", life=1)
        job.wait_for_ready("g0", life=1)
        job.release("g1")
        job.wait_for("g0", "healed to")
        job.wait_for_step("g0", 6, participants=2)
        last = end_soon(job, "g0", "g1")

        with start_job(zygote, tmp_path / "one", "fsdp", nproc=2, limit_s=60) as calm:
            calm.end_after(last)
            calm.start("g0")
            calm.go("g0")
            calm.finish()
            for rank in range(2):
                expected = {s.step: s.hash for s in calm.steps("g0", rank)}
                assert len(expected) == last
                assert_same_bits(job, ["g0", "g1"], expected, rank)
        assert "failed vote on step 4" in job.output("g1")


@pytest.mark.timeout(150)
def test_a_lighthouse_that_comes_back_costs_no_step_its_bits(tmp_path, zygote):
    with start_job(zygote, tmp_path, limit_s=120) as job:
        job.start("g0")
        job.start("g1")
        job.go("g0", "g1")
        job.wait_for_step("g1", 4, participants=2)

        job.kill_lighthouse()
        seen = job.steps("g0")[-1].step
        job.start_lighthouse()
        job.wait_for_step("g0", seen + 3)
        last = end_soon(job, "g0", "g1")

        assert_same_bits(job, ["g0", "g1"], undisturbed(last))


@pytest.mark.timeout(150)
def test_a_group_of_an_older_attempt_leaves_and_never_gives_its_state_to_the_newer(tmp_path, zygote):
    with start_job(zygote, tmp_path, limit_s=120) as job:
        job.start("g0", attempt=1)
        job.start("g1", attempt=2)
        job.go("g0", "g1")

        assert job.exit_code("g0") == 1
        job.wait_for_step("g1", len(job.steps("g1")) + 1, participants=1)
        last = end_soon_alone(job, "g1")

        assert "belongs to attempt 1, but the quorum is attempt 2's" in job.output("g0")
        assert "healed" not in job.output("g0")
        assert "healed" not in job.output("g1")
        assert [s.step for s in job.steps("g1")] == list(range(1, last + 1))


def end_soon_alone(job: Job, group: str) -> int:
    last = job.steps(group)[-1].step + 3
    job.end_after(last)
    assert job.exit_code(group) == 0, job.output(group)
    return last
