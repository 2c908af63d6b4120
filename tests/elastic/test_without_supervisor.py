"""Replica groups that nobody supervises: a lighthouse, and the same command once per group.

Schedule 14 of the protocol with real processes: the attempt is claimed once, a restarted group takes
the one that its peers carry, and only when nobody is left does a new one begin.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftckpt.attempts import look
from ftckpt.chaos.killing import differences, read_digest
from ftckpt.elastic.lighthouse import _extension
from ftckpt.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 32
LIMIT_S = 240.0
FLAGS = (
    f"--steps={STEPS}",
    "--save-every=4",
    "--prompts-per-step=32",
    "--samples-per-prompt=16",
    "--warmup-sft-steps=2",
)


class Job:
    """One trainer per group, started by hand as an operator's own scripts would."""

    def __init__(self, folder: Path, lighthouse: str | None) -> None:
        self.folder = folder
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith(("FTCKPT", "TORCHFT"))}
        self.environ |= {"OMP_NUM_THREADS": "1"}
        if lighthouse is not None:
            self.environ["TORCHFT_LIGHTHOUSE"] = lighthouse
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *groups: str) -> None:
        for group in groups:
            with (self.folder / f"log.{group}").open("ab") as log:
                self.processes[group] = subprocess.Popen(
                    [
                        *(sys.executable, "-m", "ftckpt.integrations.grpo", "run", *FLAGS),
                        *("--digest=digest.{group}.json", "--out=out"),
                    ],
                    cwd=self.folder,
                    env=self.environ | {"FTCKPT_GROUP": group},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def kill(self, *groups: str) -> None:
        for group in groups:
            self.processes[group].send_signal(signal.SIGKILL)
            self.processes[group].wait()

    def finish(self) -> None:
        for group, process in self.processes.items():
            assert process.wait(LIMIT_S) == 0, self.log(group)

    def log(self, group: str) -> str:
        return (self.folder / f"log.{group}").read_text()

    def newest(self) -> int:
        """The step of the newest commit; 0 before there is one."""
        keys = sorted(path.name for path in (self.folder / "run" / "commits").glob("[0-9]*"))
        return int(keys[-1].split("-")[0]) if keys else 0

    def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < deadline_s, {group: self.log(group) for group in self.processes}
            ended = {g: p.poll() for g, p in self.processes.items()}
            assert any(code is None for code in ended.values()), {g: self.log(g) for g in ended}
            time.sleep(0.05)

    def attempts(self) -> set[int]:
        return set(look(open_store(str(self.folder / "run"))).view.claims)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = _extension().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=2000
    )
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


@pytest.fixture
def job(tmp_path: Path, lighthouse: str) -> Iterator[Job]:
    found = Job(tmp_path, lighthouse)
    yield found
    for process in found.processes.values():
        with suppress(ProcessLookupError):
            process.kill()
        process.wait()


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    alone = Job(tmp_path_factory.mktemp("alone"), None)
    alone.start("g0")
    alone.finish()
    return read_digest(alone.folder / "digest.g0.json")


def test_groups_share_one_attempt_a_restarted_one_adopts_it_and_a_new_one_begins_when_all_died(
    job, undisturbed
):
    job.start("g0", "g1")
    job.until(lambda: job.newest() >= 8)
    assert job.attempts() == {1}, "one of the two claimed, the other was told"

    job.kill("g0")  # g0 sorts first and comes back knowing nothing
    job.start("g0")
    job.until(lambda: job.newest() >= 16)
    assert job.attempts() == {1}, "the restarted group took the attempt that its peer carries"

    job.kill("g0", "g1")
    job.start("g0", "g1")
    job.finish()

    assert job.attempts() == {1, 2}
    for group in ("g0", "g1"):
        assert differences(undisturbed, read_digest(job.folder / f"digest.{group}.json")) == []
