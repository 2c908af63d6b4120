"""What ftckpt does, called as a user calls it: ``Session`` to save, ``ftckpt.restore`` to read."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal

import torch

import ftckpt
from benchmarks.restore.measured import blank, check, restore_numbers
from benchmarks.save.measure import Numbers, costs
from benchmarks.save.ours import WAIT_S
from benchmarks.save.places import Place
from benchmarks.save.state import make_state
from ftckpt.boxes import Box
from ftckpt.capture import capture
from ftckpt.capture import place as put_into
from ftckpt.codec import Codec
from ftckpt.events import silent
from ftckpt.leaf import LeafSpec
from ftckpt.plan.restore import Fetch, Placement, index_chunks, plan_restore
from ftckpt.reader import fetch, leaf_specs, read_fragments
from ftckpt.store import open_store
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore

STEPS = 8
TURNS = 3
PARTS = 8


def save(place: Place, size_bytes: int, *, codec: Literal["auto", "raw"] = "auto") -> Numbers:
    """Step 0 of a run."""
    state = make_state(size_bytes)
    with ftckpt.Session(place.uri, state.components, codec=codec, events=silent):
        pass
    with ftckpt.open(place.uri) as run:
        stored_bytes = sum(part.stored_bytes for part in run.commit(0).components.values())
    return {"raw_bytes": state.size_bytes, "stored_bytes": stored_bytes}


def restore(place: Place, size_bytes: int) -> Numbers:
    """All of it, into live tensors, by a process that has no connection yet."""
    state = blank(size_bytes)
    _import_clients()
    with costs() as cost:
        ftckpt.restore(place.uri, state.components)
    check(state.tensors, size_bytes)
    return restore_numbers(cost) | {"raw_bytes": state.size_bytes}


def save_chain(place: Place, size_bytes: int) -> Numbers:
    """Steps 0 to 8 at the learning rate of RL, as deltas wherever the default budget for bases allows."""
    return _save_steps(place, size_bytes, Codec("delta"))


def save_long_chain(place: Place, size_bytes: int) -> Numbers:
    """The same with memory for the bases of everything, so that all that gains a tenth is a delta."""
    return _save_steps(place, size_bytes, Codec("delta", base_budget_bytes=2 * size_bytes))


def _save_steps(place: Place, size_bytes: int, codec: Codec) -> Numbers:
    state = make_state(size_bytes)
    with ftckpt.Session(place.uri, state.components, codec=codec, keep=None, events=silent) as ckpt:
        for step in range(1, STEPS + 1):
            state.train()
            ckpt.save(step).wait(WAIT_S)
    return {"raw_bytes": state.size_bytes}


def chain(place: Place, size_bytes: int) -> Numbers:
    """The step that takes most bytes to read, against step 0, which has no deltas, by turns. What comes back
    is compared with the state as it was trained up to that step.
    """
    state = blank(size_bytes)
    plans = [_all_fetches(place.uri, step) for step in range(STEPS + 1)]
    sizes = [sum(item.stored_bytes for item in plan) for plan in plans]
    worst = sizes.index(max(sizes))
    taken: dict[int, list[float]] = {0: [], worst: []}
    for _ in range(TURNS):
        for step in (0, worst):
            begun_s = time.monotonic()
            ftckpt.restore(place.uri, state.components, step=step)
            taken[step].append(time.monotonic() - begun_s)
    check(state.tensors, size_bytes, steps=worst)
    return {
        "full_s": median(taken[0]),
        "restore_s": median(taken[worst]),
        "step": worst,
        "longest": max(len(item.bases) for item in plans[worst]),
        "full_bytes": sizes[0],
        "fetched_bytes": sizes[worst],
    }


def _all_fetches(uri: str, step: int) -> Sequence[Fetch]:
    store = open_store(uri)
    with ftckpt.open(uri) as run:
        fragments = read_fragments(store, run.commit(step))
    wants = [(leaf, Box((0,) * len(leaf.shape), leaf.shape)) for leaf in leaf_specs(fragments).values()]
    return plan_restore(wants, index_chunks(fragments))


def eighths(place: Place, size_bytes: int, *, dim: int) -> Numbers:
    """Each of eight readers wants its eighth of every tensor that has that dimension; bytes of all eight
    together, and of the chunks that hold any of what they want.
    """
    state = make_state(size_bytes)
    live = {leaf.holding.leaf.name: leaf.data for leaf in capture(state.components, rng=False)}
    store = Counting(open_store(place.uri))
    with ftckpt.open(place.uri) as run:
        commit = run.latest()
    specs = leaf_specs(read_fragments(store, commit)).values()
    named = {leaf.name: leaf for leaf in specs if leaf.kind == "tensor" and len(leaf.shape) > dim}
    needed_bytes = chunk_bytes = 0
    store.packs_bytes = store.gets = 0
    for part in range(PARTS):
        wants = [(leaf, _eighth(leaf.shape, dim, part)) for leaf in named.values()]
        fragments = read_fragments(store, commit, wants)
        fetches = plan_restore(wants, index_chunks(fragments, named.keys()))
        found = [torch.empty(box.extent, dtype=getattr(torch, leaf.dtype)) for leaf, box in wants]

        def put(
            placement: Placement,
            raw: memoryview,
            wants: Sequence[tuple[LeafSpec, Box]] = wants,
            found: Sequence[torch.Tensor] = found,
        ) -> None:
            leaf, box = wants[placement.want]
            piece = raw[placement.first_byte :][: placement.piece.numel * leaf.itemsize_bytes]
            put_into(found[placement.want], box, placement.piece, placement.region, piece, leaf.dtype)

        fetch(store, fetches, put, commit.at)
        needed_bytes += sum(box.numel * leaf.itemsize_bytes for leaf, box in wants)
        chunk_bytes += sum(item.stored_bytes for item in fetches)
        for (leaf, box), tensor in zip(wants, found, strict=True):
            saved = live[leaf.name]
            assert isinstance(saved, torch.Tensor)
            assert torch.equal(tensor, _cut(saved, box)), (leaf, box)
    return {
        "needed_bytes": needed_bytes,
        "chunk_bytes": chunk_bytes,
        "fetched_bytes": store.packs_bytes,
        "gets": store.gets,
    }


def _eighth(shape: tuple[int, ...], dim: int, part: int) -> Box:
    size = -(-shape[dim] // PARTS)
    low = min(part * size, shape[dim])
    offset, extent = [0] * len(shape), list(shape)
    offset[dim], extent[dim] = low, min(size, shape[dim] - low)
    return Box(tuple(offset), tuple(extent))


def _cut(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(low, low + size) for low, size in zip(box.offset, box.extent, strict=True))]


def _import_clients() -> None:
    """Importing a client is no part of a restore."""
    import obstore

    assert obstore.__version__


class Counting:
    """A store that counts reads of packs and their bytes."""

    def __init__(self, inner: ObjectStore) -> None:
        self._inner = inner
        self.gets = 0
        self.packs_bytes = 0

    @property
    def uri(self) -> str:
        return self._inner.uri

    @property
    def conditional_create(self) -> bool:
        return self._inner.conditional_create

    def create(self, key: str, body: Buffer) -> None:
        self._inner.create(key, body)

    def overwrite(self, key: str, body: Buffer) -> None:
        self._inner.overwrite(key, body)

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        body = self._inner.read(key, at)
        if key.startswith("packs/"):
            self.gets += 1
            self.packs_bytes += len(body)
        return body

    def size(self, key: str) -> int:
        return self._inner.size(key)

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        return self._inner.scan(prefix)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def close(self) -> None:
        self._inner.close()
