"""Real processes for tests: a gang of ranks with a deadline.

``run_ranks`` is what most tests want: start n ranks, wait, look at what they printed. A test that
kills or watches single ranks uses ``start_ranks`` and the ``Gang`` it yields. Scripts are files
(``tests/ranks/*.py``) run as ``python tests/ranks/x.py ARGS`` with torch's rendezvous variables set.

Whatever happens to the test, no process outlives it: gangs are killed on leaving, and where
``setpriv`` exists the kernel kills what a killed pytest leaves behind.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class RankResult:
    """How one rank ended. ``exit_code`` is negative for a signal, as in ``subprocess``."""

    rank: int
    exit_code: int
    output: str
    """What it printed, stdout and stderr in the order they came."""


@dataclass(frozen=True, slots=True)
class RanksResult:
    """How a gang ended."""

    ranks: tuple[RankResult, ...]
    timed_out: bool
    """True when ranks were still running at the deadline and were killed."""

    @property
    def exit_codes(self) -> tuple[int, ...]:
        return tuple(rank.exit_code for rank in self.ranks)

    @property
    def outputs(self) -> tuple[str, ...]:
        return tuple(rank.output for rank in self.ranks)

    def check(self) -> RanksResult:
        """Self when every rank ended in time with exit code 0; otherwise fails, showing what they printed."""
        if self.timed_out or any(self.exit_codes):
            raise AssertionError(self.report())
        return self

    def report(self) -> str:
        head = "ranks killed at the deadline" if self.timed_out else "ranks ended"
        parts = [f"{head}; exit codes {self.exit_codes}"]
        parts += [f"--- rank {r.rank} (exit {r.exit_code})\n{r.output}" for r in self.ranks]
        return "\n".join(parts)


class Gang:
    """Ranks that are running. Made by ``start_ranks``."""

    def __init__(
        self, processes: Sequence[subprocess.Popen[bytes]], logs: Sequence[Path], deadline_s: float
    ) -> None:
        self._processes = processes
        self._logs = logs
        self._deadline_s = deadline_s

    def pid(self, rank: int) -> int:
        return self._processes[rank].pid

    def output(self, rank: int) -> str:
        """What the rank has printed so far."""
        return self._logs[rank].read_text(errors="replace")

    def kill9(self, rank: int) -> None:
        """SIGKILL one rank and wait until it is gone."""
        self.signal(rank, signal.SIGKILL)
        self._processes[rank].wait(timeout=10)

    def signal(self, rank: int, signum: int) -> None:
        self._processes[rank].send_signal(signum)

    def wait_for_output(self, rank: int, text: str) -> None:
        """Return once the rank has printed ``text``; fails when it ends, or the deadline comes, without."""

        def seen() -> bool:
            ended = self._processes[rank].poll() is not None
            if text in self.output(rank):
                return True
            assert not ended, f"rank {rank} ended without printing {text!r}:\n{self.output(rank)}"
            return False

        wait_until(seen, self._deadline_s - time.monotonic(), lambda: f"{text!r} in:\n{self.output(rank)}")

    def wait(self) -> RanksResult:
        """Wait for all ranks, at most until the deadline; then kill those that are left."""
        timed_out = False
        for process in self._processes:
            try:
                process.wait(timeout=max(0.0, self._deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                timed_out = True
                break
        self.kill()
        return RanksResult(
            tuple(
                RankResult(rank, process.returncode, self.output(rank))
                for rank, process in enumerate(self._processes)
            ),
            timed_out,
        )

    def kill(self) -> None:
        """SIGKILL whatever of the gang still runs, children of its ranks included."""
        for process in self._processes:
            kill_tree(process)


def run_ranks(
    script: str | Path,
    nprocs: int,
    *args: object,
    timeout_s: float = 30.0,
    env: Mapping[str, str] | None = None,
) -> RanksResult:
    """Run ``python script args`` as ``nprocs`` ranks and wait for all of them.

    ``script`` is relative to the repository (``"tests/ranks/x.py"``) or absolute. Returns how each
    rank ended, also when the deadline killed them; ``.check()`` turns anything but success into a
    test failure that shows the output.
    """
    with start_ranks(script, nprocs, *args, timeout_s=timeout_s, env=env) as gang:
        return gang.wait()


@contextmanager
def start_ranks(
    script: str | Path,
    nprocs: int,
    *args: object,
    timeout_s: float = 30.0,
    env: Mapping[str, str] | None = None,
) -> Iterator[Gang]:
    """Start ranks and yield the gang; on leaving, all of it is dead."""
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryDirectory(prefix="ftckpt-ranks-") as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(nprocs)]
        gang = Gang(processes, logs, time.monotonic() + timeout_s)
        try:
            for rank, log in enumerate(logs):
                argv = [sys.executable, str(ROOT / script), *map(str, args)]
                processes.append(spawn(argv, log, {**rank_env(rank, nprocs, port), **(env or {})}))
            yield gang
        finally:
            gang.kill()


def rank_env(rank: int, nprocs: int, port: int) -> dict[str, str]:
    """The variables that ``torch.distributed.init_process_group("gloo")`` reads.

    Every rank hashes strings differently, as real ranks do.
    """
    return {
        "PYTHONHASHSEED": str(rank + 1),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nprocs),
        "LOCAL_WORLD_SIZE": str(nprocs),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def spawn(argv: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a process in its own session, at the root of the repository, printing into ``log``.

    It sees this process's environment with ``env`` over it, and can import the repository.
    """
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    full_env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **env,
    }
    with log.open("ab") as out:
        return subprocess.Popen(
            [*dies_with_parent(), *argv],
            cwd=ROOT,
            env=full_env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def dies_with_parent() -> list[str]:
    """What to put before a command so that the kernel kills it when this process dies; empty where unknown.

    The kernel means the *thread* that started it: start from one that lives as long as the process should.
    """
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "KILL"] if setpriv else []


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL the session that ``spawn`` started, its leader's children included, and reap the leader."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)


def wait_until(
    condition: Callable[[], bool], timeout_s: float, what: str | Callable[[], str] = "the condition"
) -> None:
    """Return once ``condition()`` is true; fails after ``timeout_s``, saying ``what`` was waited for."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"waited {timeout_s:.1f} s in vain for {text}")
        time.sleep(POLL_S)


def free_port(low: int = 20_000, high: int = 32_000, together: Sequence[int] = (0,)) -> int:
    """A port P in [low, high) such that P + each offset in ``together`` can be bound on loopback now.

    Drawn at random below the range that the kernel hands out by itself, so that two test processes
    seldom meet and outgoing connections never do.
    """
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.randrange(low, high)
        if all(_can_bind(port + offset) for offset in together):
            return port
    raise AssertionError(f"no free port in {low}..{high}")


def _can_bind(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
