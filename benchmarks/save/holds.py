"""How long a save keeps the interpreter from everybody else, at a stretch.

A thread asks for the interpreter all the time, as a trainer's, a tokenizer's or a server's does. What it
waits beyond its pause is how long somebody held it: a call into C that does not let go. What the probe
waited for a core instead is known from the kernel and not counted. Whoever holds it may wait for a core,
too, so no more is counted than this process computed meanwhile; what was waited in all is shown beside.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Self

import torch
from torch import nn

from benchmarks.save.measure import Numbers
from benchmarks.save.ours import WAIT_S, begun
from benchmarks.save.places import Place
from benchmarks.save.state import make_state

PAUSE_S = 2e-4
SWITCH_S = 1e-4
"""Code in Python gives the interpreter up after so long when asked to: only C is seen to hold it longer."""

SAVES = 5
_STATES_A_PARAMETER = 4
"""Leaves: itself, its step and its two moments."""


class Probe:
    """At work inside its context, where only C can hold the interpreter for long. Since ``forget`` was called:
    the longest hold, and the longest wait, in which others than this process may have had the core.
    """

    def __init__(self) -> None:
        self.hold_s = self.wait_s = 0.0
        self._looks, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="probe", daemon=True)
        self._before_s = sys.getswitchinterval()

    def __enter__(self) -> Self:
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        self._looks.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._before_s)

    def forget(self) -> None:
        self.hold_s = self.wait_s = 0.0

    def _watch(self) -> None:
        with Path("/proc/thread-self/schedstat").open("rb", buffering=0) as told:
            before_s, computed_s, delayed_s = time.monotonic(), time.process_time(), _delayed_s(told.fileno())
            self._looks.set()
            while not self._stop.is_set():
                time.sleep(PAUSE_S)
                now_s, now_computed_s = time.monotonic(), time.process_time()
                now_delayed_s = _delayed_s(told.fileno())
                wait_s = now_s - before_s - PAUSE_S - (now_delayed_s - delayed_s)
                self.wait_s = max(self.wait_s, wait_s)
                self.hold_s = max(self.hold_s, min(wait_s, now_computed_s - computed_s))
                before_s, computed_s, delayed_s = now_s, now_computed_s, now_delayed_s


def _delayed_s(schedstat: int) -> float:
    """How long this thread has been ready to run and had no core."""
    return int(os.pread(schedstat, 80, 0).split()[1]) / 1e9


def large_tensors(place: Place, size_bytes: int) -> Numbers:
    """Of saves with deltas, each fenced at once, so that nearly everything is staged first."""
    state = make_state(size_bytes)
    return _holds(place, state.components, state.train, fenced=True) | {"raw_bytes": state.size_bytes}


def many_leaves(place: Place, count: int) -> Numbers:
    """Of saves of so many leaves: small parameters with AdamW's state, all of which each step changes."""
    parameters = nn.ParameterList([torch.zeros(16) for _ in range(count // _STATES_A_PARAMETER)])
    optim = torch.optim.AdamW(parameters.parameters(), lr=1e-3)

    def train() -> None:
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optim.step()

    train()
    return _holds(place, {"actor": parameters, "optim": optim}, train, fenced=False) | {"leaves": count}


def _holds(
    place: Place, components: dict[str, object], train: Callable[[], None], *, fenced: bool
) -> Numbers:
    """The longest hold from when ``save`` has returned to the commit, and the longest wait: medians of
    several saves. ``idle_s``: the longest wait while nothing is saved.
    """
    holds_s, waits_s = [], []
    with begun(place, components) as ckpt, Probe() as probe:
        for step in range(1, SAVES + 1):
            train()
            handle = ckpt.save(step)
            probe.forget()
            if fenced:
                with ckpt.mutating():
                    pass
            handle.wait(WAIT_S)
            holds_s.append(probe.hold_s)
            waits_s.append(probe.wait_s)
        probe.forget()
        time.sleep(0.2)
        idle_s = probe.wait_s
    return {"hold_s": median(holds_s), "most_s": max(holds_s), "wait_s": median(waits_s), "idle_s": idle_s}
