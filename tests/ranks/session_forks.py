"""Whole programs with a session, forked from one process that has imported everything already.

    session_forks.py leave FOLDER            one program for each way in LEAVING
    session_forks.py signals FOLDER ROUNDS   programs that get SIGTERM or SIGUSR1 at a random moment

Each program has a run ``FOLDER/<name>`` and a log ``FOLDER/<name>.log``; its exit code is printed as
``<name> <code>``. A program is a real process and ends as one; only its imports are shared.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ftckpt.chaos.faults.store import Action, Delay, Fail, Fault, FaultyStore
from ftckpt.errors import StoreFull
from ftckpt.events import silent
from ftckpt.session import Session
from ftckpt.store import open_store
from tests.session.toy import Toy

SLOW, FULL = Delay(0.3), Fail(error=StoreFull("no space"))
LEAVING: dict[str, tuple[Action, Callable[[], object]]] = {
    "returns": (SLOW, lambda: None),
    "exits": (SLOW, lambda: sys.exit(3)),
    "fails": (SLOW, lambda: 1 // 0),
    "full": (FULL, lambda: None),
}


def leave(folder: Path, name: str) -> None:
    """Begin a save and leave at once."""
    action, how = LEAVING[name]
    plan = [Fault(action, op="create", prefix="packs/000001/000000000001")]
    store = FaultyStore(open_store(folder / name), plan)
    with Session("ignored", {"t": torch.ones(64)}, store=store, events=silent) as session:
        session.save(1)
        how()


def train(folder: Path, name: str) -> None:
    """A loop that is stopped by a signal; it dwells in the middle of a step as well as between steps."""
    torch.use_deterministic_algorithms(True)
    toy = Toy()
    for parameter in toy.actor.parameters():
        parameter.register_hook(lambda _grad: time.sleep(0.0003))
    with Session(folder / name, toy.state, save_every=7, events=silent) as session:
        for step in session.steps(until=100_000):
            toy.train(step)
            print("trained", step, flush=True)
        print("stopped", session.finished_step, session.stop_requested, flush=True)


def warm_up(folder: Path) -> None:
    """Import whatever a session and a step import when they first run. No backward pass: autograd
    cannot be used in a child of a process that has used it.
    """
    toy = Toy()
    with Session(folder / "warm", toy.state, events=silent) as session:
        for _ in session.steps(until=1):
            for parameter in toy.actor.parameters():
                parameter.grad = torch.ones_like(parameter)
            toy.optim.step()
            toy.sched.step()


def fork(folder: Path, name: str) -> int:
    """Like ``os.fork``; what the child prints goes to its log."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        log = os.open(folder / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
    return pid


def ended(name: str, pid: int) -> None:
    print(name, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    if what == "leave":
        started = {}
        for name in LEAVING:
            started[name] = fork(folder, name)
            if started[name] == 0:
                leave(folder, name)
                return
        for name, pid in started.items():
            ended(name, pid)
        return
    warm_up(folder)
    draw = random.Random(7)
    for number in range(int(sys.argv[3])):
        name = f"round{number}"
        pid = fork(folder, name)
        if pid == 0:
            train(folder, name)
            os._exit(0)  # tearing the interpreter down takes longer than all the rest
        log = folder / f"{name}.log"
        while "trained 1\n" not in (log.read_text() if log.exists() else ""):
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.15))
        for _ in range(1 + number % 2):  # once, or again while it is stopping
            os.kill(pid, draw.choice([signal.SIGTERM, signal.SIGUSR1]))
        ended(name, pid)


if __name__ == "__main__":
    main()
