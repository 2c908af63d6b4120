"""``ftckpt run --groups 2 --tier``: real groups, a real agent, and a group that dies in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

import ftckpt
from ftckpt.chaos.killing import Heard, Job
from ftckpt.events import silent
from ftckpt.tiers import open_tier
from tests.elastic.job import STEP, write
from tests.ranks.elastic_state import State, undisturbed
from tests.support.procs import ROOT, wait_until

WITHIN_S = 90.0
MEMBER = str(ROOT / "tests/ranks/elastic_tiered.py")


def said(group: str, text: str):
    """Whether that group printed a line with this in it."""

    def find(event: Heard) -> bool:
        rank = event.fields.get("rank")
        return event.name == "rank.output" and rank == f"{group}.0" and text in str(event.fields["line"])

    return find


def finished(job: Job, group: str) -> dict[int, str]:
    """The digest after each step that a group finished, over all its lives."""
    lines = [str(e.fields["line"]) for e in job.heard if said(group, "step ")(e)]
    return {int(step): digest for step, _, digest, _ in STEP.findall("\n".join(lines))}


def drained(tier: Path) -> list[int]:
    """The steps that the agent says it brought."""
    lines = (tier / ".ftckpt-agent.log").read_text().splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return [event["step"] for event in told if event["event"] == "agent.drained"]


@pytest.mark.slow
@pytest.mark.timeout(4 * WITHIN_S)
def test_a_group_is_killed_and_the_far_store_ends_with_the_newest_step_bit_for_bit(tmp_path):
    far, tier = tmp_path / "far", tmp_path / "tier"
    job = Job(tmp_path, (), {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    try:
        command = [sys.executable, MEMBER, str(tmp_path)]
        write(tmp_path / "hold.g1", "6")
        write(tmp_path / "unsaved.g1", "4")
        job.start("run", str(far), "--groups=2", f"--tier={tier}", "--json", "--", *command)
        for group in ("g0", "g1"):
            job.wait(f"{group} to be there", said(group, "ready"), WITHIN_S)
        (tmp_path / "go").touch()
        job.wait("g1 in the middle of step 6", said("g1", "of step 6"), WITHIN_S)

        (tmp_path / "go").unlink()
        job.kill("g1")
        at = len(job.heard)
        (tmp_path / "hold.g1").unlink()
        (tmp_path / "unsaved.g1").unlink()
        job.wait("g0 to go on alone", said("g0", "step 8 participants 1"), WITHIN_S)
        job.wait("g1's next life", said("g1", "ready"), WITHIN_S, at)
        (tmp_path / "go").touch()
        job.wait("g1 to be healed", said("g1", "session.healed"), WITHIN_S, at)
        for _ in range(4):
            at = 1 + job.heard.index(job.wait("both", said("g1", "participants 2"), WITHIN_S, at))
        os.kill(job.pids()["supervisor"], signal.SIGTERM)
        job.finish(WITHIN_S)
    finally:
        job.close()

    g0, g1 = finished(job, "g0"), finished(job, "g1")
    last = max(g0)
    expected = undisturbed(last)
    assert max(g1) == last > 8
    assert all(expected[step] == digest for found in (g0, g1) for step, digest in found.items())
    state = State(1, fsdp=False)
    assert ftckpt.restore(far, state.components()).step == last
    assert state.digest() == expected[last]
    with ftckpt.open(str(far)) as run:
        assert run.verify() == []
        steps = sorted(commit.step for commit in run.commits())
    assert {2, 4, last} <= set(steps), "g1 died with its share of step 4 in the staging file alone"
    assert set(drained(tier)) == set(steps), "the agent brought each of them"
    near = open_tier(tier, silent)
    wait_until(lambda: not near.agent_lives, WITHIN_S, "the agent to find nothing to do")
