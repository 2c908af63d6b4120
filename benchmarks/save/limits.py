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
from ftckpt.writer import WriteSettings


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
    """The state's bytes through obstore, in bodies as large as our packs."""
    from ftckpt.store.opening import open_store

    store = open_store(place.uri, environ=place.environ)
    return _best(size_bytes, (2, 4), lambda name, body: store.create(f"raw/{name}", body))


def raw_writes(place: Place, size_bytes: int) -> Numbers:
    """The state's bytes into files as large as our packs, each synced, and their folder."""
    folder = Path(place.uri)
    folder.mkdir(parents=True)
    numbers = _best(size_bytes, (1, 3), lambda name, body: _write(folder / name, body))
    fd = os.open(folder, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
    return numbers


def _best(size_bytes: int, in_flight: Sequence[int], send: Callable[[str, memoryview], None]) -> Numbers:
    """All of the state's bytes, so many bodies at a time; of those the fastest."""
    state = make_state(size_bytes)
    flat = touched(state.size_bytes)
    memcpy_s(state, flat)
    pack = WriteSettings().pack_bytes
    bodies = [flat[at : at + pack].data for at in range(0, flat.size, pack)]
    tries = []
    for threads in in_flight:
        with costs() as cost, ThreadPoolExecutor(threads) as pool:
            names = [f"{threads}-{number}" for number in range(len(bodies))]
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
