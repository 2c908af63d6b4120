"""Sessions with a real tier, a real agent process and real far stores."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.errors import SettingsError
from ftckpt.store import open_store
from ftckpt.tiers import open_tier
from tests.session.toy import Heard, Toy, run, straight
from tests.support.procs import wait_until

WITHIN_S = 40.0


@pytest.fixture(autouse=True)
def deterministic():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def steps(uri: str | Path) -> list[int]:
    with ftckpt.open(str(uri)) as found:
        assert found.verify() == []
        return sorted(commit.step for commit in found.commits())


def agent_has_ended(tier: Path) -> bool:
    return not open_tier(tier, Heard()).agent_lives


def test_what_a_session_saves_into_its_tier_is_in_the_run_when_it_ends(tmp_path, s3):
    """No agent was started by hand, and no store but the environment says how to reach it."""
    far, tier = s3.uri("tiered"), tmp_path / "tier"

    run(far, 20, tiers=[tier, far], keep=None, deadline_s=WITHIN_S / 2)

    assert steps(far) == [0, 10, 20] == steps(tier)
    wait_until(lambda: agent_has_ended(tier), WITHIN_S, "the agent to find nothing to do")


def test_a_run_goes_on_in_its_tier_and_without_it_with_the_same_bits(tmp_path):
    far, tier = tmp_path / "far", tmp_path / "tier"
    run(far, 10, tiers=[tier], deadline_s=WITHIN_S / 2)
    run(far, 20, Toy(seed=1), tiers=[tier], deadline_s=WITHIN_S / 2)
    wait_until(lambda: agent_has_ended(tier), WITHIN_S, "the agent to end")
    shutil.rmtree(tier)

    toy = run(far, 30, Toy(seed=2), tiers=[tmp_path / "another"], deadline_s=WITHIN_S / 2)

    assert toy.bits() == straight(30).bits()
    assert steps(far)[-1] == 30


def test_a_tier_acknowledges_what_the_far_store_does_not_have_yet(tmp_path):
    far, tier = tmp_path / "far", tmp_path / "tier"
    toy = Toy()
    with (
        pytest.raises(TimeoutError, match="not yet in"),
        ftckpt.Session(
            far, toy.state, tiers=[tier], start_agent=False, deadline_s=0.5, events=Heard()
        ) as ckpt,
    ):
        toy.train(1)
        handle = ckpt.save(1)
        here = handle.wait(WITHIN_S, tier="local")
        handle.wait(0.2)

    assert here.step == 1
    assert steps(tier) == [0, 1]
    with pytest.raises(ftckpt.FtckptError, match="no readable commit"):
        ftckpt.open(str(far)).latest()


def test_what_a_tier_still_owes_is_brought_before_the_next_attempt_is_claimed(tmp_path):
    far, tier = tmp_path / "far", tmp_path / "tier"
    toy = Toy()
    with ftckpt.Session(far, toy.state, tiers=[tier], start_agent=False, events=Heard()) as ckpt:
        toy.train(1)
        ckpt.save(1).wait(WITHIN_S, tier="local")

    again = Toy(seed=5)
    with ftckpt.Session(far, again.state, tiers=[tier], start_agent=False, events=Heard()) as ckpt:
        restored = ckpt.restored

    assert restored is not None and restored.step == 1
    assert again.bits() == toy.bits()


def test_a_tier_of_another_run_is_refused(tmp_path):
    tier = tmp_path / "tier"
    run(tmp_path / "one", 1, tiers=[tier], deadline_s=WITHIN_S / 2)

    with pytest.raises(SettingsError, match="belongs to another run"):
        run(tmp_path / "other", 1, tiers=[tier])


@pytest.mark.parametrize("tiers", [["s3://bucket/fast"], ["a", "b", "c"], [""]])
def test_only_one_folder_of_this_machine_is_a_tier(tmp_path, tiers):
    with pytest.raises(SettingsError, match=r"nothing was changed|give one folder"):
        run(tmp_path / "run", 1, tiers=tiers)

    assert list(open_store(tmp_path / "run").scan("")) == []
