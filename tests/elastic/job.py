"""A job of replica groups as a test sees it: a lighthouse, groups to start and kill, lines to read."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ftckpt.elastic.lighthouse import lighthouse_command
from tests.elastic.zygote import Forked, Zygote
from tests.support.procs import ROOT, free_port, kill_tree, rank_env, spawn, wait_until

STEP = re.compile(r"^step (\d+) participants (\d+) hash (\w+) (\w+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Step:
    step: int
    participants: int
    hash: str
    members: str


class Job:
    def __init__(self, zygote: Zygote, folder: Path, mode: str, nproc: int, deadline_s: float) -> None:
        self._zygote = zygote
        self.folder = folder
        self._mode = mode
        self._nproc = nproc
        self._deadline_s = deadline_s
        self._port = free_port()
        self._running: dict[str, list[Forked]] = {}
        self._may_end: set[str] = set()
        self._lighthouse: subprocess.Popen[bytes] | None = None

    def start_lighthouse(self) -> None:
        command = lighthouse_command(
            sys.executable, self._port, min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=1500
        )
        self._lighthouse = spawn(command, self.folder / "lighthouse.log", {})

    def kill_lighthouse(self) -> None:
        kill_tree(self._lighthouse)
        assert self._lighthouse.returncode == -9

    def start(self, group: str, life: int = 0, attempt: int = 1) -> None:
        port = free_port()
        self._running[group] = []
        for rank in range(self._nproc):
            env = {
                **rank_env(rank, self._nproc, port),
                "FTCKPT_ATTEMPT": str(attempt),
                "FTCKPT_GROUP": group,
                "FTCKPT_REJOIN": str(life),
                "FTCKPT_STATUS": str(self.folder / f"{group}.status"),
                "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self._port}",
                "RUST_LOG": "warn",
            }
            argv = [str(ROOT / "tests/ranks/elastic_train.py"), self._mode, str(self.folder)]
            self._running[group].append(self._zygote.fork(argv, self._log(group, rank), env))

    def kill9(self, group: str) -> None:
        """SIGKILL every rank of a group, and prove that it was the signal that ended it."""
        for process in self._running[group]:
            kill_tree(process)
        assert [p.returncode for p in self._running[group]] == [-9] * self._nproc

    def go(self, *groups: str) -> None:
        """Let groups join together once all of them are ready."""
        for group in groups:
            self.wait_for(group, "ready")
        (self.folder / "go").touch()

    def hold(self, group: str, step: int) -> None:
        write(self.folder / f"hold.{group}", str(step))

    def release(self, group: str) -> None:
        (self.folder / f"hold.{group}").unlink()

    def end_after(self, step: int) -> None:
        write(self.folder / "last", str(step))

    def output(self, group: str, rank: int = 0) -> str:
        log = self._log(group, rank)
        return log.read_text(errors="replace") if log.exists() else ""

    def steps(self, group: str, rank: int = 0) -> list[Step]:
        """The steps a rank finished, over all its lives, in order."""
        return [Step(int(s), int(p), h, m) for s, p, h, m in STEP.findall(self.output(group, rank))]

    def wait_for(self, group: str, text: str, rank: int = 0) -> None:
        self._wait(lambda: text in self.output(group, rank), group, repr(text))

    def wait_for_step(self, group: str, step: int, participants: int | None = None) -> None:
        """Return once a step not below ``step`` was finished, by that many participants."""
        self._wait(
            lambda: any(s.step >= step and participants in (None, s.participants) for s in self.steps(group)),
            group,
            f"step {step} with {participants} participants",
        )

    def wait_for_ready(self, group: str, life: int) -> None:
        """Return once every rank of that life has imported everything and only has to join."""
        for rank in range(self._nproc):
            self._wait(
                lambda rank=rank: self.output(group, rank).count("ready\n") > life, group, "ready again"
            )

    def finish(self) -> None:
        """Wait for all groups to end by themselves."""
        for group, processes in self._running.items():
            for rank, process in enumerate(processes):
                try:
                    code = process.wait(timeout=max(0.1, self._deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    code = None
                assert code == 0, f"{group}.{rank} ended with {code}:\n{self.output(group, rank)[-6000:]}"

    def exit_code(self, group: str, rank: int = 0) -> int:
        self._may_end.add(group)
        return self._running[group][rank].wait(timeout=max(0.1, self._deadline_s - time.monotonic()))

    def kill_all(self) -> None:
        for process in [p for processes in self._running.values() for p in processes]:
            kill_tree(process)
        if self._lighthouse is not None:
            kill_tree(self._lighthouse)

    def _wait(self, condition, group: str, what: str) -> None:
        def seen() -> bool:
            if condition():
                return True
            ended = [p.poll() for p in self._running[group] if p.poll() is not None]
            assert not ended or condition(), f"{group} ended ({ended}) before {what}:\n{self._everything()}"
            assert not self._failed(), (
                f"{self._failed()} failed before {what} of {group}:\n{self._everything()}"
            )
            return False

        wait_until(
            seen, self._deadline_s - time.monotonic(), lambda: f"{what} of {group}:\n{self._everything()}"
        )

    def _failed(self) -> list[str]:
        """Groups that ended with an error nobody asked for."""
        return [
            group
            for group, ranks in self._running.items()
            if group not in self._may_end and any(p.poll() not in (None, 0, -9) for p in ranks)
        ]

    def _everything(self) -> str:
        """The last lines of every rank, and where those that live are just now."""
        ranks = [(group, rank, p) for group, found in self._running.items() for rank, p in enumerate(found)]
        for _, _, process in ranks:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1.0)
        return "\n".join(
            f"--- {group}.{rank}, exit code {process.poll()}\n{self.output(group, rank)[-4000:]}"
            for group, rank, process in ranks
        )

    def _log(self, group: str, rank: int) -> Path:
        return self.folder / f"{group}.{rank}.log"


@contextmanager
def start_job(
    zygote: Zygote, folder: Path, mode: str = "plain", nproc: int = 1, limit_s: float = 80.0
) -> Iterator[Job]:
    job = Job(zygote, folder, mode, nproc, time.monotonic() + limit_s)
    try:
        job.start_lighthouse()
        yield job
    finally:
        job.kill_all()


def write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.rename(path)
