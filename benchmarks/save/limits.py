"""What the machine allows: copying the bytes, putting them, writing and syncing them. No format at all."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.save.measure import Numbers, costs
from benchmarks.save.places import Place
from benchmarks.save.state import State, make_state
from ftckpt.writer import WriteSettings, fitted


def memcpy_s(state: State, into: np.ndarray) -> float:
    """Seconds of one copy of the state, tensor by tensor, into memory whose pages were touched."""
    begun_s, at = time.monotonic(), 0
    for part in state.parts():
        np.copyto(into[at : at + part.size], part)
        at += part.size
    return time.monotonic() - begun_s


def touched(size_bytes: int) -> np.ndarray:
    memory = np.empty(size_bytes, np.uint8)
    memory.fill(1)
    return memory


def raw_puts(place: Place, size_bytes: int) -> Numbers:
    """The state's bytes through obstore, in bodies as large as our packs, and in larger ones."""
    from ftckpt.store.opening import open_store

    store = open_store(place.uri, environ=place.environ)
    return _best(
        size_bytes,
        [_as_ours(), (32 << 20, 2), (32 << 20, 4)],
        lambda name, body: store.create(f"raw/{name}", body),
    )


def raw_writes(place: Place, size_bytes: int) -> Numbers:
    """The state's bytes into files as large as our packs, and into larger ones, each synced, and their folder."""
    folder = Path(place.uri)
    folder.mkdir(parents=True)
    numbers = _best(
        size_bytes, [_as_ours(), (32 << 20, 1), (32 << 20, 3)], lambda name, body: _write(folder / name, body)
    )
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return numbers


def _as_ours() -> tuple[int, int]:
    """The size of our packs on this machine, and how many are under way at a time."""
    ours = fitted(WriteSettings(), len(os.sched_getaffinity(0)))
    return ours.pack_bytes, ours.packs_in_flight


def _best(
    size_bytes: int, ways: Sequence[tuple[int, int]], send: Callable[[str, memoryview], None]
) -> Numbers:
    """All of the state's bytes, in bodies of one size, some of them at a time; the fastest way counts."""
    state = make_state(size_bytes)
    flat = touched(state.size_bytes)
    memcpy_s(state, flat)
    tries = []
    for body_bytes, threads in ways:
        bodies = [flat[at : at + body_bytes].data for at in range(0, flat.size, body_bytes)]
        with costs() as cost, ThreadPoolExecutor(threads) as pool:
            names = [f"{body_bytes}-{threads}-{number}" for number in range(len(bodies))]
            list(pool.map(send, names, bodies))
        tries.append(cost)
    best = min(tries, key=lambda cost: cost.seconds)
    return best.numbers() | {"raw_bytes": state.size_bytes, "stored_bytes": state.size_bytes}


def _write(path: Path, body: memoryview) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        while body:
            body = body[os.write(fd, body) :]
        os.fsync(fd)
    finally:
        os.close(fd)
