"""Processes that do not outlive their supervisor, and files that are read while they grow.

Knows operating-system facts only: sessions, signals, exit codes, the parent-death signal of Linux.
No policy: who is started when is ``supervisor``'s business.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1


class Process:
    """One child in a session of its own, which the kernel kills when this process dies.

    The kernel means the *thread* that started it: start from one that lives as long as the child
    should. Children of the child are in its session and die with ``kill``; when this process is
    itself killed with SIGKILL, only the child is sure to die.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], cwd: str | None, log: Path) -> None:
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                list(argv),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_dies_with(os.getpid()),  # noqa: PLW1509  # only system calls between fork and exec
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    def exit_code(self) -> int | None:
        """``None`` while it runs; negative for a signal."""
        return self._popen.poll()

    def signal(self, number: int) -> None:
        """Send a signal to the child alone. Harmless when it is gone."""
        self._popen.send_signal(number)

    def kill(self) -> None:
        """SIGKILL the child's whole session and wait until the child is gone."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()


class Tail:
    """The lines that were added to a file since the last look. The file may not exist yet."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self._path = path
        self._at = path.stat().st_size if from_end and path.exists() else 0
        self._rest = b""

    def lines(self) -> list[str]:
        """Whole lines only; the end of a half-written one comes next time."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def rest(self) -> str:
        """What came after the last newline."""
        return self._rest.decode(errors="replace")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int) -> str:
    """``exit code 3``, ``killed by SIGKILL``."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _dies_with(parent: int) -> Callable[[], None] | None:
    """What a child does before it becomes its program, so that it cannot outlive ``parent``."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def ask() -> None:
        prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:  # it died before we asked
            os._exit(1)

    return ask
