"""Ranks without their imports: one process imports torch and torchft, and forks a rank when asked.

Importing takes longer than everything that these tests do with a rank. A forked rank is as real as
any: a process of its own in its own session, killed by the same signals.

Run as a script it is the server: a JSON line in for every rank, ``pid N`` back, and ``exit N CODE``
when one ends.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.procs import ROOT, dies_with_parent, kill_tree


class Forked:
    """One rank; as much of ``subprocess.Popen`` as tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self.ended.wait(timeout):
            raise subprocess.TimeoutExpired(["rank", str(self.pid)], timeout or 0.0)
        assert self.returncode is not None
        return self.returncode


class Zygote:
    """The server as a test sees it."""

    def __init__(self, folder: Path) -> None:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._log = folder / "zygote.log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*dies_with_parent(), sys.executable, __file__],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                    "OMP_NUM_THREADS": "1",
                    "RUST_LOG": "warn",
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._ranks: dict[int, Forked] = {}
        self._new: queue.Queue[Forked] = queue.Queue()
        self._reader = threading.Thread(target=self._listen, daemon=True)
        self._reader.start()

    def fork(self, argv: Sequence[str], log: Path, env: Mapping[str, str]) -> Forked:
        """Start ``argv`` (a script and its arguments). Blocks until the server has imported everything."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"argv": list(argv), "log": str(log), "env": dict(env)}) + "\n")
        self._process.stdin.flush()
        try:
            return self._new.get(timeout=90)
        except queue.Empty:
            raise AssertionError(f"no rank was forked:\n{self._log.read_text()}") from None

    def close(self) -> None:
        for rank in self._ranks.values():
            if rank.poll() is None:
                kill_tree(rank)
        kill_tree(self._process)
        self._reader.join(timeout=10)
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, pid, *code = line.split()
            if word == "pid":
                self._ranks[int(pid)] = Forked(int(pid))
                self._new.put(self._ranks[int(pid)])
            else:
                rank = self._ranks[int(pid)]
                rank.returncode = int(code[0])
                rank.ended.set()


def serve() -> None:
    import selectors

    import torchft  # noqa: F401  # children find it imported

    import ftckpt.elastic.replica_group  # noqa: F401
    from tests.ranks.elastic_state import State

    State(1, fsdp=False)  # the first optimizer and scheduler import much more
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"  # noqa: PTH208
    asked = selectors.DefaultSelector()
    asked.register(sys.stdin, selectors.EVENT_READ)
    os.set_blocking(0, False)
    rest = ""
    while True:
        if asked.select(timeout=0.02):
            text = os.read(0, 1 << 16).decode()
            if not text:
                return
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                start(json.loads(line))
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            print("exit", pid, os.waitstatus_to_exitcode(status), flush=True)


def start(wanted: dict) -> None:
    parent = os.getpid()
    pid = os.fork()
    if pid:
        print("pid", pid, flush=True)
        return
    code = 1
    try:
        import ctypes
        import runpy

        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        log = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(wanted["env"])
        sys.argv = wanted["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 1
    except BaseException:  # the test reads it in the rank's log
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        threading._shutdown()  # as the interpreter does at its end
        os._exit(code)


if __name__ == "__main__":
    serve()
