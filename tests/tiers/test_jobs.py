"""Supervised jobs with a tier: the agent is kept running, and a new attempt begins after the draining."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import ftckpt
from ftckpt.attempts import claim, read_claim
from ftckpt.cli import main
from ftckpt.clock import HandClock
from ftckpt.elastic.keeper import LONGEST_PAUSE_S, AgentKeeper
from ftckpt.events import silent
from ftckpt.store.local import LocalStore
from ftckpt.tiers import open_tier
from tests.protocol.world import start_job
from tests.session.toy import Heard
from tests.support.procs import ROOT, kill_tree, spawn, wait_until
from tests.tiers.trainer import Job, restored

WITHIN_S = 110.0
TRAINER = str(ROOT / "tests/tiers/trainer.py")


def heard(log: Path) -> list[dict]:
    """The events of a supervisor so far."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.timeout(3 * WITHIN_S)
def test_a_job_loses_trainer_and_agent_and_ends_with_the_bits_of_an_undisturbed_one(tmp_path):
    far, tier, log = tmp_path / "far", tmp_path / "tier", tmp_path / "log"
    argv = [sys.executable, "-m", "ftckpt.cli", "run", str(far), "--tier", str(tier), "--json"]

    def events(name: str) -> list[dict]:
        return [event for event in heard(log) if event["event"] == name]

    def trained(step: int, attempt: int) -> bool:
        line = f"trained step {step} in attempt {attempt}"
        return any(event["line"] == line for event in events("rank.output"))

    with ExitStack() as stack:
        supervisor = spawn([*argv, "--", sys.executable, TRAINER, "job", str(tmp_path)], log, {})
        stack.callback(kill_tree, supervisor)
        near = open_tier(tier, silent)
        wait_until(lambda: trained(3, attempt=2), WITHIN_S, lambda: log.read_text()[-3000:])
        wait_until(lambda: near.agent_name() != "", WITHIN_S, "an agent")
        before = near.agent_name()
        os.kill(int(before.partition("-")[0]), signal.SIGKILL)
        wait_until(lambda: near.agent_name() not in ("", before), WITHIN_S, "another agent")
        (tmp_path / "go").touch()
        wait_until(lambda: supervisor.poll() is not None, WITHIN_S, lambda: log.read_text()[-3000:])

    assert supervisor.returncode == 0, log.read_text()[-3000:]
    assert not trained(2, attempt=2)
    assert events("attempt.goes_on")[1]["step"] == 2
    assert [e["how"] for e in events("agent.died")] == ["killed by SIGKILL"]
    assert events("agent.died")[0]["unix_s"] <= events("job.finished")[0]["unix_s"]
    assert events("session.agent_replaced") or events("session.agent_died"), "told at the next boundary"
    calm = Job()
    for _ in range(5):
        calm.train()
    assert (tmp_path / "digest").read_text() == calm.digest()
    assert restored(far) == (5, calm.digest())
    assert ftckpt.open(str(far)).verify() == []
    wait_until(lambda: near.agent_name() == "", WITHIN_S, "the agent to find nothing to do")


def test_resume_finds_the_tier_where_the_claim_says(tmp_path, capsys):
    far, tier = tmp_path / "far", tmp_path / "tier"
    job = Job()
    with ftckpt.Session(far, job.state, tiers=[tier], start_agent=False, events=silent) as ckpt:
        job.train()
        ckpt.save(1).wait(30, tier="local")
    store = LocalStore(far)
    assert read_claim(store, 1).settings["tier"] == str(tier)
    told = {"tier": str(tier), "run": str(far)}
    claim(
        store,
        nonce="n",
        host="h",
        pid=1,
        command=("true",),
        cwd=str(tmp_path),
        groups=1,
        nproc=1,
        settings=told,
    )

    code = main(["resume", str(far), "--json"])

    events = {event["event"]: event for event in map(json.loads, capsys.readouterr().out.splitlines())}
    assert code == 0
    assert events["attempt.goes_on"]["step"] == 1
    assert read_claim(store, 3).settings["tier"] == str(tier)


# --- the keeper -----------------------------------------------------------------------------------


class Watched:
    """A keeper over a tier, and what it did. Its agents run in ``folder``."""

    def __init__(self, folder: Path) -> None:
        start_job(LocalStore(folder / "far"))
        self.tier = open_tier(folder / "tier", silent)
        self.heard = Heard()
        self.clock = HandClock()
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.keeper = AgentKeeper(self.tier, str(folder / "far"), environ, self.heard, clock=self.clock)

    def until(self, condition) -> None:
        def look() -> bool:
            self.clock.sleep(0.02)
            self.keeper.look()
            return bool(condition())

        wait_until(look, WITHIN_S, lambda: str(list(self.heard)))

    @property
    def names(self) -> list[str]:
        return [event.name for event in self.heard]


@pytest.mark.timeout(2 * WITHIN_S)
def test_a_keeper_starts_one_agent_notices_its_death_and_starts_another(tmp_path):
    watched = Watched(tmp_path)
    with watched.tier.life("somebody"):
        watched.until(lambda: watched.tier.agent_lives)
        first = watched.tier.agent_name()
        for _ in range(5):
            watched.keeper.look()
        started = list(watched.names)
        os.kill(int(first.partition("-")[0]), signal.SIGKILL)
        watched.until(lambda: watched.tier.agent_name() not in ("", first))

    assert started == ["agent.started"]
    assert watched.names == ["agent.started", "agent.died", "agent.started"]
    wait_until(lambda: not watched.tier.agent_lives, WITHIN_S, "the agent to end: nobody else lives here")


def test_a_keeper_replaces_a_dead_agent_within_five_seconds(tmp_path):
    """One that dies at once, again and again: the pauses grow, and end below what was promised."""
    watched = Watched(tmp_path)
    watched.keeper._command = (sys.executable, "-S", "-c", "raise SystemExit(3)")
    died_s, pauses_s = 0.0, []
    for number in range(1, 8):
        watched.until(lambda number=number: watched.names.count("agent.started") == number)
        pauses_s.append(watched.clock.now_s() - died_s)
        watched.until(lambda number=number: watched.names.count("agent.died") == number)
        died_s = watched.clock.now_s()

    assert pauses_s[1] < pauses_s[-1] <= LONGEST_PAUSE_S + 0.1 < 5
    assert watched.heard.named("agent.died")[0]["how"] == "exit code 3"
