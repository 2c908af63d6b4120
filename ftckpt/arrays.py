"""Saved tensors without a trainer: as lazy arrays, and one after another.

A lazy array is TensorStore's: it can be sliced, strided and handed on, and nothing is fetched before it
is read. Knows how a region becomes chunks, and keeps the few decoded ones that its neighbours want next.
Refuses to know which step is asked for, and what a tensor is for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ftckpt.boxes import Box, whole
from ftckpt.errors import ExtraMissing, UnsupportedValue
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import Fragment, Position
from ftckpt.plan.grid import arranged, cell_shape
from ftckpt.plan.restore import Fetch, Placement, index_chunks, packs_of, plan_restore
from ftckpt.reader import ReadSettings, check_packs, fetch
from ftckpt.store.api import ObjectStore

if TYPE_CHECKING:
    import tensorstore
    import torch

KEPT_BYTES = 32 << 20
"""Decoded chunks that a view keeps for the cells beside the one that was read."""
BATCH_BYTES = 64 << 20
"""Tensors that are read in one go, unless one alone is larger."""

_NUMBERS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16"}
_NOT_TENSORSTORE = frozenset({"complex32", "float4_e2m1fn_x2"})


def open_array(
    store: ObjectStore, at: Position, fragments: Sequence[Fragment], spec: LeafSpec, settings: ReadSettings
) -> tensorstore.TensorStore:
    """A lazy view of one tensor of the commit at ``at``, of which these are the fragments.

    Raises:
        ExtraMissing: TensorStore is not installed.
        UnsupportedValue: it knows no such dtype.
        ObjectDamaged: a pack that the tensor needs is not there.
    """
    try:
        import tensorstore as ts
    except ImportError as error:
        raise ExtraMissing(
            "ExtraMissing: lazy arrays need the package tensorstore, which is not installed\n"
            "  nothing was changed; install it with: pip install tensorstore\n"
            "  run.tensor(name, box=…) and run.tensors(…) do without it",
            extra="tensorstore",
        ) from error
    if spec.dtype in _NOT_TENSORSTORE:
        raise UnsupportedValue(
            f"UnsupportedValue: {spec.name} is of dtype {spec.dtype}, which TensorStore does not know\n"
            "  run.tensor(name) reads it as a torch tensor",
            leaf=spec.name,
            dtype=spec.dtype,
        )
    everything = [(spec, whole(spec.shape))]
    index = index_chunks(fragments, {spec.name})
    check_packs(store, packs_of(plan_restore(everything, index)), at)
    saved = arranged(index.get(spec.name, ()))
    spans = [(one.box, one.chunk.start, one.chunk.stop) for _, chunks in saved.parts for one in chunks]
    chunks = _Chunks(store, at, settings)

    def read(domain: Any, array: npt.NDArray[Any], _parameters: object) -> None:
        cell = Box(tuple(domain.inclusive_min), tuple(domain.shape))
        for item in plan_restore([(spec, cell)], {spec.name: list(saved.meeting(cell))}):
            raw = chunks.of(item)
            for placement in item.placements:
                put(array, cell, placement, raw, spec.itemsize_bytes)

    cells = ts.ChunkLayout(read_chunk_shape=cell_shape(spec.shape, spec.itemsize_bytes, spans))
    return ts.virtual_chunked(read, dtype=ts.dtype(spec.dtype), shape=spec.shape, chunk_layout=cells)


def put(
    array: npt.NDArray[Any], cell: Box, placement: Placement, raw: memoryview, itemsize_bytes: int
) -> None:
    """Copy a placement out of a decoded chunk into ``array``, which holds ``cell``. Bit for bit: elements
    move as numbers of their size, whatever they mean.
    """
    kind = np.dtype(_NUMBERS[itemsize_bytes])
    piece, region = placement.piece, placement.region
    source = np.frombuffer(raw, kind, piece.numel, placement.first_byte).reshape(piece.extent)
    array.view(kind)[_within(region, cell)] = source[_within(region, piece)]


def _within(region: Box, outer: Box) -> tuple[Any, ...]:
    low = zip(region.offset, region.extent, outer.offset, strict=True)
    return (*(slice(at - origin, at - origin + size) for at, size, origin in low), ...)


class _Chunks:
    """Decoded and verified chunks, each fetched once while it is among the last that were asked for,
    whoever asks: a cell's neighbours are read at the same time, by threads of TensorStore.
    """

    def __init__(self, store: ObjectStore, at: Position, settings: ReadSettings) -> None:
        self._store, self._at, self._settings = store, at, settings
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, int], tuple[Future[memoryview], int]] = OrderedDict()

    def of(self, item: Fetch) -> memoryview:
        key = (item.pack, item.chunk.offset)
        with self._lock:
            found = self._kept.get(key)
            if found is None:
                future: Future[memoryview] = Future()
                self._kept[key] = future, item.raw_bytes
            else:
                future = found[0]
            self._kept.move_to_end(key)
            self._forget(key)
        if found is None:
            try:
                future.set_result(self._fetched(item))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(key, None)
                future.set_exception(error)
                raise
        return future.result()

    def _forget(self, newest: tuple[str, int]) -> None:
        held = sum(size for _, size in self._kept.values())
        for key in [key for key in self._kept if key != newest]:
            if held <= KEPT_BYTES:
                break
            held -= self._kept.pop(key)[1]

    def _fetched(self, item: Fetch) -> memoryview:
        got: list[memoryview] = []
        fetch(self._store, [item], lambda _, raw: got.append(raw), self._at, self._settings)
        return got[0]


def stream(
    store: ObjectStore,
    at: Position,
    fragments: Sequence[Fragment],
    specs: Sequence[LeafSpec],
    settings: ReadSettings,
) -> Iterator[tuple[str, torch.Tensor]]:
    """These tensors, one after another, each verified; at most a batch of them is in memory beside what
    the caller keeps.
    """
    wants = [(spec, whole(spec.shape)) for spec in specs]
    index = index_chunks(fragments, {spec.name for spec in specs})
    check_packs(store, packs_of(plan_restore(wants, index)), at)
    return _batches(store, at, specs, index, settings)


def _batches(
    store: ObjectStore, at: Position, specs: Sequence[LeafSpec], index: Any, settings: ReadSettings
) -> Iterator[tuple[str, torch.Tensor]]:
    batch: list[LeafSpec] = []
    size_bytes = 0
    for spec in specs:
        leaf_bytes = prod(spec.shape) * spec.itemsize_bytes
        if batch and size_bytes + leaf_bytes > BATCH_BYTES:
            yield from _read(store, at, batch, index, settings)
            batch, size_bytes = [], 0
        batch.append(spec)
        size_bytes += leaf_bytes
    yield from _read(store, at, batch, index, settings)


def _read(
    store: ObjectStore, at: Position, specs: Sequence[LeafSpec], index: Any, settings: ReadSettings
) -> Iterator[tuple[str, torch.Tensor]]:
    from ftckpt.capture.tensors import fresh_tensor, place

    tensors = [fresh_tensor(spec.shape, spec.dtype) for spec in specs]
    wants = [(spec, whole(spec.shape)) for spec in specs]

    def fill(placement: Placement, raw: memoryview) -> None:
        spec, box = wants[placement.want]
        piece = raw[placement.first_byte :][: placement.piece.numel * spec.itemsize_bytes]
        place(tensors[placement.want], box, placement.piece, placement.region, piece, spec.dtype)

    fetch(store, plan_restore(wants, index), fill, at, settings)
    for spec in specs:
        yield spec.name, tensors.pop(0)  # kept by whoever asked, and not here
