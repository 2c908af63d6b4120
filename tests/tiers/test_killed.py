"""Kill -9 right after a fence: what had been saved is committed all the same, by the agent."""

from __future__ import annotations

import itertools
import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

import ftckpt
from ftckpt.agent import Agent
from ftckpt.chaos.faults.store import Crash, Fault, FaultyStore
from ftckpt.cli import main
from ftckpt.clock import HandClock, SystemClock
from ftckpt.errors import FtckptError
from ftckpt.events import silent
from ftckpt.store import open_store
from ftckpt.store.retry import RetryStore
from ftckpt.tiers import open_tier
from tests.protocol.test_crash_points import Meet, every_change
from tests.support.procs import run_ranks, start_ranks
from tests.tiers.trainer import Job, restored
from tests.tiers.world import nonce

TRAINER = "tests/tiers/trainer.py"
SIGKILLED = -9

pytestmark = pytest.mark.timeout(150)  # starting a trainer takes long on a machine that does much else


def killed(far: str | Path, tier: Path, hold: str, go: Path, **env: str) -> list[str]:
    """Run the trainer to its death; the digests of steps 1 and 2."""
    go.touch()
    ended = run_ranks(TRAINER, 1, far, tier, hold, go, timeout_s=100, env=env)
    assert ended.exit_codes == (SIGKILLED,), ended.report()
    return [line for line in ended.outputs[0].splitlines() if len(line) == 32]


@pytest.mark.parametrize(
    "hold", ["save.begun", "save.staged", ""], ids=["no pack", "some packs", "as it comes"]
)
def test_a_step_whose_trainer_is_killed_after_the_fence_is_committed_bit_for_bit(tmp_path, capsys, hold):
    """Held before the first pack, every chunk comes from the staging file; held before the last, some."""
    far, tier = tmp_path / "far", tmp_path / "tier"
    _, two = killed(far, tier, hold, tmp_path / "go")
    with pytest.raises(FtckptError, match="no readable commit"):
        ftckpt.open(str(far)).latest()

    code = main(["agent", str(far), "--tier", str(tier), "--once", "--json"])

    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    drained = [line["step"] for line in told if line["event"] == "agent.drained"]
    assert (code, drained) == (0, [0, 1, 2]), told
    assert restored(far) == (2, two)
    assert ftckpt.open(str(far)).verify() == []
    if hold:
        assert [line["step"] for line in told if line["event"] == "agent.finished"] == [2]
    left = {path.name for path in tier.iterdir() if path.name.startswith(".")}
    assert left == set(), "what the dead trainer left beside the objects"


def test_neither_a_dead_far_store_nor_a_dead_trainer_loses_the_step(tmp_path, s3):
    far, tier, go = s3.uri("killed"), tmp_path / "tier", tmp_path / "go"
    with start_ranks(TRAINER, 1, far, tier, "save.begun", go, timeout_s=100) as gang:
        gang.wait_for_output(0, "one is saved")
        s3.kill9()
        go.touch()
        ended = gang.wait()
    s3.restart()
    assert ended.exit_codes == (SIGKILLED,), ended.report()

    assert main(["agent", far, "--tier", str(tier), "--once"]) == 0

    assert restored(far) == (2, [line for line in ended.outputs[0].splitlines() if len(line) == 32][1])


def test_a_session_that_is_started_again_goes_on_from_the_staged_step(left_behind, tmp_path):
    """Nobody ran an agent: the next attempt drains before it claims."""
    source, (_, two) = left_behind
    here = shutil.copytree(source, tmp_path / "here")
    job = Job(seed=7)

    with ftckpt.Session(here / "far", job.state, tiers=[here / "tier"], start_agent=False) as ckpt:
        restored_step = ckpt.restored and ckpt.restored.step

    assert (restored_step, job.digest()) == (2, two)


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory) -> tuple[Path, list[str]]:
    """A tier and a far store as a killed trainer left them."""
    folder = tmp_path_factory.mktemp("left")
    return folder, killed(folder / "far", folder / "tier", "save.begun", folder / "go")


@pytest.mark.parametrize("which", ["near", "far"])
@pytest.mark.parametrize("how", ["before", "after", "lost"])
def test_an_agent_that_dies_while_it_finishes_is_run_again(left_behind, tmp_path, which, how):
    source, (_, two) = left_behind
    for nth in itertools.count(1):
        here = tmp_path / str(nth)
        shutil.copytree(source, here)
        tier, far = open_tier(here / "tier", silent), open_store(here / "far")
        meet = Meet(nth, how, every_change)
        inner = tier.store if which == "near" else far
        faulty = RetryStore(
            FaultyStore(inner, [Fault(meet)]), deadline_s=30.0, clock=HandClock(), events=silent
        )
        told = f"change {nth} of {which}, {how}"
        near = replace(tier, store=faulty) if which == "near" else tier
        with suppress(Crash):
            Agent(near, faulty if which == "far" else far, nonce=nonce, clock=SystemClock()).drain()
        assert ftckpt.open(str(here / "far")).verify() == [], told

        Agent(open_tier(here / "tier", silent), far, nonce=nonce, clock=SystemClock()).drain()

        assert restored(here / "far") == (2, two), told
        shutil.rmtree(here)
        if meet.met is None:
            break
    assert nth > 6
