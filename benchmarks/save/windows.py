"""Saves beside a trainer that goes on: fences that come at once, fences beyond the budget, throughput."""

from __future__ import annotations

import threading
import time
from statistics import median

import torch

import ftckpt
from benchmarks.save.limits import memcpy_s, touched
from benchmarks.save.measure import Numbers, idle_cores_between, idle_ticks
from benchmarks.save.ours import WAIT_S, Heard, begun
from benchmarks.save.places import Place
from benchmarks.save.state import State, make_state
from ftckpt.chaos.faults.store import Call, Fault, FaultyStore, Run
from ftckpt.errors import SaveError
from ftckpt.store import open_store

FENCE_DEADLINE_S = 2.0


def fence(place: Place, size_bytes: int) -> Numbers:
    """The worst case: the optimizer's step follows at once, so nearly everything must be staged. Each
    is compared with a copy of the same state into touched memory just before it.
    """
    state = make_state(size_bytes)
    memory = touched(state.size_bytes)
    budget_bytes = state.size_bytes * 3 // 2
    copies_s, fences_s = [], []
    heard = Heard()
    with ftckpt.Session(place.uri, state.components, staging_bytes=budget_bytes, events=heard) as ckpt:
        heard.first_save_s()
        for step in (1, 2, 3):
            copies_s.append(memcpy_s(state, memory))
            handle = ckpt.save(step)
            begun_s = time.monotonic()
            with ckpt.mutating():
                fences_s.append(time.monotonic() - begun_s)
            handle.wait(WAIT_S)
    staged = [int(event.fields["staged_bytes"]) for event in heard.fences]
    return {
        "memcpy_s": min(copies_s),
        "fence_s": median(fences_s),
        "ratio": median(fence_s / copy_s for fence_s, copy_s in zip(fences_s, copies_s, strict=True)),
        "staged_bytes": median(staged),
        "budget_bytes": budget_bytes,
    }


def fence_beyond_budget(place: Place, size_bytes: int) -> Numbers:
    """The store takes nothing, and a sixteenth of the state may be staged: the fence waits until its
    deadline, the save is given up, and the next one is good.
    """
    state = make_state(size_bytes)
    opened = threading.Event()
    opened.set()

    def hold(_call: Call) -> None:
        opened.wait(WAIT_S)

    store = FaultyStore(open_store(place.uri), [Fault(Run(hold), "create", "packs/")])
    heard = Heard()
    with ftckpt.Session(
        place.uri,
        state.components,
        staging_bytes=size_bytes // 16,
        fence_deadline_s=FENCE_DEADLINE_S,
        codec="raw",
        events=heard,
        store=store,
    ) as ckpt:
        heard.first_save_s()
        state.train()
        opened.clear()
        handle = ckpt.save(1)
        begun_s = time.monotonic()
        state.train()
        fence_s = time.monotonic() - begun_s
        opened.set()
        try:
            handle.wait(WAIT_S)
        except SaveError:
            aborted = 1.0
        else:
            aborted = 0.0
        good = ckpt.save(2).wait(WAIT_S).step == 2
    return {
        "fence_s": max(float(event.fields["seconds"]) for event in heard.fences),
        "deadline_s": FENCE_DEADLINE_S,
        "step_s": fence_s,
        "aborted": aborted,
        "next_is_good": float(good),
    }


def throughput(place: Place, size_bytes: int) -> Numbers:
    """Steps of a loop in which rollouts take four fifths of the time, with a save begun as soon as the
    last is done, against the same loop without saves, by turns. One thread trains.
    """
    state = make_state(size_bytes)
    matrix = torch.randn(512, 512) / 23
    with begun(place, {**state.components}) as ckpt:
        loop = _Loop(state, matrix, _rollouts_for(state, matrix))
        alone, beside, idle, saves = [], [], [], 0
        for _ in range(2):
            ticks, begun_s = idle_ticks(), time.monotonic()
            loop.run(3, None)
            alone.append(time.monotonic() - begun_s)
            idle.append(idle_cores_between(ticks, alone[-1]))
            before = ckpt.finished_step
            begun_s = time.monotonic()
            loop.run(3, ckpt)
            beside.append(time.monotonic() - begun_s)
            saves += ckpt.finished_step - before
            loop.wait()
    return {
        "ratio": sum(alone) / sum(beside),
        "alone_s": sum(alone),
        "beside_s": sum(beside),
        "saves": saves,
        "idle_cores": median(idle),
    }


class _Loop:
    """Rollouts, then a step; saves at the boundary when the last one is done."""

    def __init__(self, state: State, matrix: torch.Tensor, rollouts: int) -> None:
        self._state, self._matrix, self._rollouts = state, matrix, rollouts
        self._handle: ftckpt.SaveHandle | None = None

    def run(self, steps: int, ckpt: ftckpt.Session | None) -> None:
        for _ in range(steps):
            if ckpt is not None and (self._handle is None or self._handle.done):
                self._handle = ckpt.save(ckpt.finished_step + 1)
            roll(self._matrix, self._rollouts)
            self._state.train()

    def wait(self) -> None:
        if self._handle is not None:
            self._handle.wait(WAIT_S)


def roll(matrix: torch.Tensor, times: int) -> torch.Tensor:
    """Computing that stands for rollouts."""
    out = matrix
    for _ in range(times):
        out = torch.tanh(out @ matrix)
    return out


def _rollouts_for(state: State, matrix: torch.Tensor) -> int:
    begun_s = time.monotonic()
    state.train()
    step_s = time.monotonic() - begun_s
    begun_s = time.monotonic()
    roll(matrix, 50)
    return max(1, int(4 * step_s / (time.monotonic() - begun_s) * 50))
