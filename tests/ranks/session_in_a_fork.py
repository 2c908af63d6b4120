"""A session whose process forks while a save is under way; the child tries all of it.

    session_in_a_fork.py FOLDER

Prints what the child was told for each way to use the session, and the child's exit code.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from ftckpt.chaos.faults.store import Delay, Fault, FaultyStore
from ftckpt.errors import FtckptError
from ftckpt.events import silent
from ftckpt.session import Session
from ftckpt.store import open_store
from ftckpt.writer import SaveHandle


def step_once(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Without autograd, which cannot be used in a child of a process that has used it."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def tried(what: str, use: Callable[[], object]) -> None:
    try:
        use()
        print(f"{what}: fine", flush=True)
    except FtckptError as error:
        print(f"{what}: {error}".splitlines()[0], flush=True)


def in_the_child(session: Session, handle: SaveHandle, step: Callable[[], None]) -> None:
    tried("save", lambda: session.save(99))
    tried("wait", lambda: handle.wait(60))
    tried("steps", lambda: next(session.steps(until=9)))
    tried("attempt", lambda: session.attempt)
    tried("yielding", lambda: session.yielding().__enter__())
    tried("optimizer step", step)


def main() -> None:
    folder = Path(sys.argv[1])
    slow = Fault(Delay(1.0), op="create", prefix="packs/000001/000000000002")
    store = FaultyStore(open_store(folder / "run"), [slow])
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pid = None
    state = {"m": model, "o": optimizer}
    with Session("ignored", state, store=store, keep=None, events=silent) as session:
        for number in (1, 2):
            step_once(model, optimizer)
            handle = session.save(number)
        if (pid := os.fork()) == 0:
            faulthandler.dump_traceback_later(60, exit=True)
            in_the_child(session, handle, lambda: step_once(model, optimizer))
        else:
            print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
            step_once(model, optimizer)
            session.save(3)
    if pid == 0:
        print("left", flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
