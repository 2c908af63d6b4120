"""What one rank writes of a save: the items of DCP's plan as a snapshot that the save engine's writer streams.

An item is resolved when its first chunk is asked for and let go of after its last: a planner may make
copies. Nothing changes meanwhile: DCP holds the trainer, or has staged what it gives.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ftckpt.boxes import Box, whole
from ftckpt.capture.tensors import dtype_name, require_plain
from ftckpt.errors import UnsupportedValue
from ftckpt.leaf import ITEMSIZE_BYTES, Holding, LeafSpec
from ftckpt.manifest import ChunkRecord, PackRef, ReplicaDigest
from ftckpt.plan.assign import Place, plan_save
from ftckpt.snapshot import host_bytes
from ftckpt.store.api import Buffer


@dataclass(frozen=True, slots=True)
class Part:
    """One box of a leaf, and how to get its bytes."""

    leaf: LeafSpec
    box: Box
    resolve: Callable[[], torch.Tensor | bytes]


class Share:
    """A snapshot of parts; read from several threads."""

    def __init__(self, parts: Sequence[Part], chunk_bytes: int) -> None:
        ordered = sorted(parts, key=lambda part: (part.leaf.name, part.box))
        self.holdings = tuple(Holding(part.leaf, part.box, (0,)) for part in ordered)
        self.tasks = plan_save(self.holdings, Place(0, 1, 0), chunk_bytes)
        self._parts = ordered
        self._locks = [threading.Lock() for _ in ordered]
        self._views: dict[int, memoryview] = {}
        self._left = Counter(task.holding for task in self.tasks)

    def read(self, number: int) -> Buffer:
        task = self.tasks[number]
        with self._locks[task.holding]:
            view = self._views.get(task.holding)
            if view is None:
                view = self._views[task.holding] = host_bytes(self._parts[task.holding].resolve())
        itemsize = self.holdings[task.holding].leaf.itemsize_bytes
        return view[task.start * itemsize : task.stop * itemsize]

    def release(self, number: int) -> None:
        holding = self.tasks[number].holding
        self._left[holding] -= 1
        if not self._left[holding]:
            self._views.pop(holding, None)

    def seen(self, number: int) -> None:
        """Nothing is known of its memory."""

    def written(self, number: int, chunk: ChunkRecord) -> None:
        """Of no interest: nobody finishes what this process does not."""

    def durable(self, pack: int, ref: PackRef) -> None:
        """Of no interest."""

    def replicas(self) -> tuple[ReplicaDigest, ...]:
        """None: DCP has chosen who writes what several ranks hold, and asks the others for nothing."""
        return ()

    def close(self) -> None:
        self._views.clear()


def tensor_part(item: WriteItem, planner: SavePlanner, name: str) -> Part:
    """The part of a tensor that an item of the plan is.

    Raises:
        UnsupportedValue: its dtype has no form in the format. Later, when it is resolved: it is not what
            the plan says, or cannot be saved faithfully.
    """
    data = item.tensor_data
    assert data is not None and data.chunk is not None, item
    dtype = dtype_name(data.properties.dtype)
    if dtype not in ITEMSIZE_BYTES:
        _refuse(name, f"a tensor of dtype {dtype} has no form in the checkpoint format")
    leaf = LeafSpec(name, "tensor", dtype, tuple(data.size))
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))

    def resolve() -> torch.Tensor:
        found = planner.resolve_data(item)
        assert isinstance(found, torch.Tensor), type(found)
        plain = require_plain(found, name)
        if (dtype_name(plain.dtype), tuple(plain.shape)) != (dtype, box.extent):
            _refuse(
                name,
                f"the planner gave {plain.dtype} {list(plain.shape)} for what its plan says is {dtype} "
                f"{list(box.extent)}",
            )
        return plain

    return Part(leaf, box, resolve)


def bytes_part(leaf: LeafSpec, data: bytes) -> Part:
    """Bytes as a whole leaf."""
    return Part(leaf, whole(leaf.shape), lambda: data)


def _refuse(leaf: str, why: str) -> None:
    raise UnsupportedValue(
        f"UnsupportedValue: cannot save {leaf}: {why}\n"
        "  this step will not be readable; earlier commits are intact",
        leaf=leaf,
    )
