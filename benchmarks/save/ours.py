"""What ftckpt does with the state, called as a user calls it: ``Session``, ``save``, ``wait``."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import ftckpt
from benchmarks.save.measure import Numbers, costs, peak_bytes, resident_bytes
from benchmarks.save.places import Place
from benchmarks.save.state import State, make_state
from ftckpt.events import Event

WAIT_S = 900.0


class Heard:
    """Listens to a session: when its first save ended, and what its fences did."""

    def __init__(self) -> None:
        self.fences: list[Event] = []
        self._ended = threading.Event()
        self._first: Event | None = None

    def __call__(self, event: Event) -> None:
        if event.name in ("save.committed", "save.failed") and not self._ended.is_set():
            self._first = event
            self._ended.set()
        if event.name == "save.fence":
            self.fences.append(event)

    def first_save_s(self) -> float:
        """Waits for it; seconds from its call to its commit."""
        if not self._ended.wait(WAIT_S) or self._first is None or self._first.name == "save.failed":
            raise RuntimeError(f"the first save did not become a commit: {self._first}")
        return float(self._first.fields["total_s"])


@contextmanager
def begun(place: Place, components: dict[str, object]) -> Iterator[ftckpt.Session]:
    """A session whose first save, that of step 0, is committed."""
    heard = Heard()
    with ftckpt.Session(place.uri, components, events=heard) as ckpt:
        heard.first_save_s()
        yield ckpt


def first_save(
    place: Place, size_bytes: int, *, codec: Literal["auto", "raw"] = "auto", incompressible: bool = False
) -> Numbers:
    """The first save of a run, from the call inside ``Session.__enter__`` to the commit, as its event tells.
    ``cpu_s`` counts entering and leaving the session, too.
    """
    state = make_state(size_bytes, incompressible=incompressible)
    heard = Heard()
    with costs() as cost, ftckpt.Session(place.uri, state.components, codec=codec, events=heard):
        commit_s = heard.first_save_s()
    numbers = cost.numbers() | {"commit_s": commit_s, "raw_bytes": state.size_bytes}
    with ftckpt.open(place.uri) as run:
        numbers["stored_bytes"] = sum(part.stored_bytes for part in run.commit(0).components.values())
    return numbers


def second_save(place: Place, size_bytes: int) -> Numbers:
    """The save after one step of AdamW at lr 1e-6, which has the first to build on. A frozen reference
    model, which the first one wrote, is in the state here and is not counted in ``raw_bytes``.
    """
    state = make_state(size_bytes)
    reference = ftckpt.Frozen(make_state(size_bytes).policy)
    with begun(place, {**state.components, "reference": reference}) as ckpt:
        state.train()
        with costs() as cost:
            begun_s = time.monotonic()
            handle = ckpt.save(1)
            stall_s = time.monotonic() - begun_s
            commit = handle.wait(WAIT_S)
    parts = commit.components
    own = [parts[name] for name in state.components]
    stored_bytes = sum(part.stored_bytes for part in own)
    return cost.numbers() | {
        "stall_s": stall_s,
        "raw_bytes": state.size_bytes,
        "stored_bytes": stored_bytes,
        "actor_part": parts["actor"].stored_bytes / parts["actor"].raw_bytes,
        "whole_part": stored_bytes / sum(part.raw_bytes for part in own),
        "reference_part": parts["reference"].stored_bytes / parts["reference"].raw_bytes,
    }


def memory(place: Place, size_bytes: int) -> Numbers:
    """Memory beyond the state's in two saves that have all the time they need, so that nothing is staged;
    the second makes deltas. The optimizer step between them is not looked at.
    """
    state = make_state(size_bytes)
    heard = Heard()
    before_bytes = resident_bytes()
    with ftckpt.Session(place.uri, state.components, events=heard) as ckpt:
        heard.first_save_s()
        first_bytes = peak_bytes()
        state.train()
        resident_bytes()
        ckpt.save(1).wait(WAIT_S)
        second_bytes = peak_bytes()
    staged_bytes = sum(int(event.fields["staged_bytes"]) for event in heard.fences)
    assert not staged_bytes, staged_bytes
    return {"extra_bytes": max(first_bytes, second_bytes) - before_bytes, "raw_bytes": state.size_bytes}


def stall(place: Place, size_bytes: int) -> Numbers:
    """How long ``save`` keeps the trainer: the median of several, the state unchanged between them."""
    state = make_state(size_bytes)
    stalls_s = []
    with begun(place, state.components) as ckpt:
        for step in range(1, 8):
            begun_s = time.monotonic()
            handle = ckpt.save(step)
            stalls_s.append(time.monotonic() - begun_s)
            handle.wait(WAIT_S)
    return {"stall_s": sorted(stalls_s)[len(stalls_s) // 2], "leaves": _leaves(state)}


def _leaves(state: State) -> int:
    return len(state.tensors)
