"""A trainer that dies at every change of its tier, around one save and one fence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ftckpt
from ftckpt.cli import main
from ftckpt.gc import owed
from ftckpt.store.local import LocalStore
from tests.support.procs import run_ranks
from tests.tiers.trainer import restored

TRAINER = "tests/tiers/trainer.py"
SIGKILLED = -9


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_trainer_that_dies_between_any_two_changes_of_its_tier_leaves_the_old_step_or_the_new(tmp_path):
    """And the new one for certain, once the fence has returned."""
    ended = run_ranks(TRAINER, 1, "points", tmp_path, timeout_s=180).check()
    points = [json.loads(line) for line in ended.outputs[0].splitlines() if line.startswith("{")]
    died = [Path(tmp_path, one["folder"]) for one in points if one["code"] == SIGKILLED]

    for folder in died:
        assert main(["agent", str(folder / "far"), "--tier", str(folder / "tier"), "--once"]) == 0
        step, digest = restored(folder / "far")
        assert digest == (folder / f"digest{step}").read_text(), folder
        assert step == 2 or not (folder / "fenced").exists(), folder
        assert owed(LocalStore(folder / "tier")) == [], folder
        assert ftckpt.open(str(folder / "far")).verify() == [], folder
    assert len(died) >= 8
    assert any((folder / "fenced").exists() for folder in died)
