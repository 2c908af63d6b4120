"""The snapshot of a save: the bytes of this rank's chunks, as they were when ``save`` was called.

Eager staging copies them into host memory before ``save`` returns. The seam for staging later is
``Snapshot``: whoever streams asks it for one chunk at a time and does not care when it was copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import xxhash

from ftckpt.capture import LiveLeaf, as_bytes_view
from ftckpt.errors import SaveFailed
from ftckpt.leaf import Holding
from ftckpt.manifest import ReplicaDigest
from ftckpt.plan.assign import ChunkTask
from ftckpt.store.api import Buffer


class Snapshot(Protocol):
    """Bytes of chunks that nothing can change any more."""

    @property
    def holdings(self) -> Sequence[Holding]:
        """What the task's ``holding`` numbers mean."""
        ...

    @property
    def tasks(self) -> Sequence[ChunkTask]:
        """The chunks of this rank, in leaf order."""
        ...

    def read(self, number: int) -> Buffer:
        """The raw bytes of task ``number``. Empty tasks give no bytes."""
        ...

    def release(self, number: int) -> None:
        """Task ``number`` is not read again; its memory may go."""
        ...


@dataclass(slots=True)
class Staged:
    """Every chunk copied before the trainer went on."""

    holdings: tuple[Holding, ...]
    tasks: tuple[ChunkTask, ...]
    _chunks: list[Buffer]

    def read(self, number: int) -> Buffer:
        return self._chunks[number]

    def release(self, number: int) -> None:
        self._chunks[number] = b""


def stage(leaves: Sequence[LiveLeaf], tasks: Sequence[ChunkTask], budget_bytes: int | None = None) -> Staged:
    """Copy this rank's chunks into host memory. Blocks for as long as the copy takes.

    Raises:
        SaveFailed: the copies need more than ``budget_bytes``. Nothing was copied.
    """
    holdings = tuple(leaf.holding for leaf in leaves)
    need_bytes = sum(_size_bytes(holdings, task) for task in tasks)
    if budget_bytes is not None and need_bytes > budget_bytes:
        raise SaveFailed(
            f"SaveFailed: this rank's share is {need_bytes} bytes; the staging budget is {budget_bytes} bytes\n"
            "  training goes on and earlier commits are intact; raise staging_bytes, or save on more ranks",
            need_bytes=need_bytes,
            budget_bytes=budget_bytes,
        )
    chunks: list[Buffer] = []
    last, view = -1, memoryview(b"")
    for task in tasks:
        if task.holding != last:
            last, view = task.holding, host_bytes(leaves[task.holding].data)
        itemsize = holdings[task.holding].leaf.itemsize_bytes
        chunks.append(_copy(view[task.start * itemsize : task.stop * itemsize]))
    return Staged(holdings, tuple(tasks), chunks)


def _size_bytes(holdings: Sequence[Holding], task: ChunkTask) -> int:
    return (task.stop - task.start) * holdings[task.holding].leaf.itemsize_bytes


def host_bytes(data: torch.Tensor | bytes) -> memoryview:
    """The raw bytes of a local part, row-major; aliases live memory when it is contiguous on the host."""
    if isinstance(data, bytes):
        return memoryview(data)
    return as_bytes_view(data.cpu().contiguous())


def _copy(view: memoryview) -> Buffer:
    """A copy made by NumPy, which releases the GIL while it copies."""
    return np.frombuffer(view, np.uint8).copy().data if len(view) else b""


def replica_digests(leaves: Sequence[LiveLeaf], holders: int) -> tuple[ReplicaDigest, ...]:
    """Digests of all that others hold too, so that replicas which differ never commit together.

    ``holders`` is the number of participating groups. Reads every replicated byte once.
    """
    return tuple(
        ReplicaDigest(
            leaf.holding.leaf.name,
            leaf.holding.box.offset,
            xxhash.xxh3_128_digest(host_bytes(leaf.data)),
        )
        for leaf in leaves
        if len(leaf.holding.ranks) * (holders if leaf.holding.every_group else 1) > 1
    )
