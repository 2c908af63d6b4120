"""What the store and the disk allow: fetching the bytes of a run and doing nothing with them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import local

import numpy as np

from benchmarks.restore.measured import restore_numbers
from benchmarks.save.measure import Numbers, costs
from benchmarks.save.places import Place
from ftckpt.store import open_store
from ftckpt.store.api import ByteRange

RANGE_BYTES = 16 << 20

Read = Callable[[str, ByteRange], object]


def raw_gets(place: Place, _size_bytes: int) -> Numbers:
    """Every pack of a run through obstore, range by range; the bodies are dropped."""
    store = open_store(place.uri, environ=place.environ)
    packs = {info.key: info.size_bytes for info in store.scan("packs")}
    return _best(packs, (4, 8, 16), store.read)


def raw_reads(place: Place, _size_bytes: int) -> Numbers:
    """Every pack of a run, range by range, into memory whose pages were touched."""
    folder = Path(place.uri)
    packs = {str(path): path.stat().st_size for path in folder.glob("packs/*/*/*")}
    mine = local()

    def read(key: str, at: ByteRange) -> None:
        if not hasattr(mine, "memory"):
            mine.memory = np.ones(RANGE_BYTES, np.uint8)
        fd = os.open(key, os.O_RDONLY)
        try:
            assert os.preadv(fd, [mine.memory[: at.size]], at.start) == at.size
        finally:
            os.close(fd)

    return _best(packs, (1, 2, 4), read)


def _best(packs: dict[str, int], in_flight: Sequence[int], read: Read) -> Numbers:
    """All bytes of the packs, so many ranges at a time; of those the fastest."""
    ranges = [
        (key, ByteRange(at, min(at + RANGE_BYTES, size)))
        for key, size in sorted(packs.items())
        for at in range(0, size, RANGE_BYTES)
    ]
    tries = []
    for threads in in_flight:
        with ThreadPoolExecutor(threads) as pool, costs() as cost:
            for _ in pool.map(lambda one: read(*one), ranges):
                pass
        tries.append(cost)
    best = min(tries, key=lambda cost: cost.seconds)
    return restore_numbers(best) | {"fetched_bytes": sum(packs.values())}
