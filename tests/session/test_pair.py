"""Kinds A and C with two ranks: they fail together, in time, by name; and what a dead rank left counts
for nothing."""

from __future__ import annotations

import fcntl
import json
import shutil
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.events import silent
from ftckpt.gc import collect
from ftckpt.retention import Keep
from ftckpt.store import open_store
from tests.session.toy import objects
from tests.support.procs import run_ranks

pytestmark = pytest.mark.timeout(200)
SCRIPT = "tests/ranks/session_pair.py"


@pytest.fixture(scope="module")
def held(tmp_path_factory, worker_id) -> list[set[str]]:
    """The cases that held, by rank. One gang runs for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    told = shared / "pair-outputs.json"
    with (shared / "pair-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            folder = tmp_path_factory.mktemp("pair")
            gang = run_ranks(SCRIPT, 2, "together", folder, timeout_s=180).check()
            told.write_text(json.dumps(gang.outputs))
    outputs = json.loads(told.read_text())
    return [{line[3:] for line in text.splitlines() if line.startswith("ok ")} for text in outputs]


@pytest.mark.parametrize("argument", ["uri", "keep", "step", "save_every", "codec", "components"])
def test_ranks_that_were_told_different_things_are_refused_by_the_name_of_the_argument(held, argument):
    """A11: on both ranks, before anything is written."""
    assert all(f"A11 {argument}" in cases for cases in held)


def test_ranks_that_save_different_steps_save_neither(held):
    """A11"""
    assert all("A11 saved steps" in cases for cases in held)


@pytest.mark.parametrize(
    "phase", ["state", "begin", "read starts", "read commits", "read fragments", "read packs"]
)
def test_a_rank_that_cannot_enter_stops_the_other_too_and_both_name_it_and_the_cause(held, phase):
    """C2: in every phase of entering, within the limit of the case."""
    assert all(f"C2 {phase}" in cases and "C2 entered afterwards" in cases for cases in held)


@pytest.mark.parametrize("phase", ["capture", "write packs", "write fragments", "write commits"])
def test_a_rank_that_cannot_save_tells_the_other_and_the_next_save_works(held, phase):
    """C2: in every phase of a save, within the limit of the case."""
    assert all(f"C2 {phase}" in cases for cases in held)


def test_replicas_that_differ_never_commit_and_the_leaf_is_named(held):
    """G8"""
    assert all("diverged" in cases for cases in held)


@pytest.mark.parametrize("disks", ["empty", "with an older copy of the run"])
def test_ranks_that_see_different_stores_at_one_address_are_refused_at_the_start(held, disks):
    """G9: a folder of each machine's own disk; told on both ranks."""
    assert all(f"G9 {disks}" in cases for cases in held)


@pytest.fixture(scope="module")
def killed(tmp_path_factory) -> Path:
    """A run whose rank 1 was killed when its part of step 2 was in the store."""
    folder = tmp_path_factory.mktemp("killed")
    gang = run_ranks(SCRIPT, 2, "killed", folder, timeout_s=100)
    assert not gang.timed_out and gang.exit_codes == (0, -9), gang.report()
    assert "no fragment of g0.1" in gang.outputs[0]
    return folder / "run"


@pytest.mark.parametrize("who", ["rank 1", "both ranks"])
def test_what_a_killed_rank_left_is_no_step_and_never_mixes_with_the_next_try(killed, tmp_path, who):
    """A2, A4: step 1 is the latest. A restart with another number of ranks saves step 2 again: its bytes
    are of the second try alone, and what the first one left is collected. Had both ranks been killed,
    nobody would have recorded that the step was given up."""
    folder = Path(shutil.copytree(killed, tmp_path / "run"))
    if who == "both ranks":
        (folder / "commits/000000000002-000001").unlink()
    left = objects(folder, "packs/000001/000000000002", "fragments/000001/000000000002")
    assert any("/g0.1." in key for key in left)
    with ftckpt.open(folder) as found:
        assert [commit.step for commit in found.commits()] == [1, 0]

    state = {"t": torch.zeros(64), "n": {"value": 0}}
    with ftckpt.Session(folder, state, events=silent) as session:
        assert session.restored.step == 1 and torch.equal(state["t"], torch.full((64,), 2.0))
        state["t"] += 7
        session.save(2).wait(20)

    with ftckpt.open(folder) as found:
        commit = found.latest()
        assert (commit.step, commit.attempt) == (2, 2) and found.verify() == []
        assert all(ref.key.startswith("fragments/000002/") for ref in commit.fragments)
    again = {"t": torch.zeros(64)}
    ftckpt.restore(folder, again)
    assert torch.equal(again["t"], torch.full((64,), 9.0))
    collect(open_store(folder), Keep(), intent_id="by-hand")
    assert not set(left) & set(objects(folder)), "the leavings of the first try are collected"
