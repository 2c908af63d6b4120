"""Two ranks with one tier, and with a tier each."""

from __future__ import annotations

import pytest

import ftckpt
from ftckpt.events import silent
from ftckpt.tiers import open_tier
from tests.support.procs import run_ranks, wait_until

SCRIPT = "tests/tiers/pair.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(450)]


@pytest.mark.parametrize("apart", [(), ("apart",)], ids=["one machine", "two machines"])
def test_two_ranks_save_through_tiers_and_go_on_from_what_arrived(tmp_path, apart):
    far, tier = tmp_path / "far", tmp_path / "tier"

    first = run_ranks(SCRIPT, 2, far, tier, *apart, timeout_s=180).check()
    again = run_ranks(SCRIPT, 2, far, tier, *apart, timeout_s=180).check()

    with ftckpt.open(str(far)) as run:
        commits = run.commits()
        assert run.verify() == []
    assert [commit.step for commit in commits] == [6, 5, 4, 3, 2, 1, 0]
    assert all(len(commit.fragments) == 2 for commit in commits)
    assert all("goes on from None" in output for output in first.outputs)
    assert all("goes on from 3" in output for output in again.outputs)
    tiers = [tmp_path / f"tier-{rank}" for rank in (0, 1)] if apart else [tier]
    for folder in tiers:
        wait_until(
            lambda folder=folder: not open_tier(folder, silent).agent_lives, 60, "the agents to be done"
        )
    if not apart:
        with ftckpt.open(str(tier)) as here:
            assert here.verify() == []
            assert [commit.step for commit in here.commits()] == [6, 5, 4, 3, 2, 1, 0]
