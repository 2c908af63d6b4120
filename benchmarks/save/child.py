"""Runs one case in a fresh process, forked from a clean one that has only imported what takes long.

Nothing of one case (its memory, its threads, its connections) is there in the next.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection

from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place
from benchmarks.save.plan import Case

PRELOADED = ["torch.distributed.checkpoint", "benchmarks.save.plan", "ftckpt.session", "ftckpt.run"]


class Failed(Exception):
    """A case raised, or its process died."""


def run(case: Case, place: Place, timeout_s: float) -> Numbers:
    """What the case measured.

    Raises:
        Failed: it did not end well; the text is its traceback.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(case.work, place, case.amount, there))
    process.start()
    there.close()
    try:
        if not here.poll(timeout_s):
            raise Failed(f"{case.name} has not ended after {timeout_s:g} s")
        told: Numbers | str = here.recv()
    except EOFError as error:
        process.join()
        raise Failed(f"{case.name} died with exit code {process.exitcode}") from error
    finally:
        process.kill()
        process.join()
    if isinstance(told, str):
        raise Failed(told)
    return told


def _child(work: Callable[[Place, int], Numbers], place: Place, amount: int, out: Connection) -> None:
    os.environ.update(place.environ)
    warnings.filterwarnings("ignore", "torch.distributed is disabled")  # it is: one process saves
    try:
        told: Numbers | str = work(place, amount)
    except BaseException:
        told = traceback.format_exc()
    out.send(told)
