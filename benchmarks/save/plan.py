"""What is run: the cases of a round, in the order in which they take turns.

A case is a function that makes its state, measures, and returns numbers. What is compared stands side
by side, so that a machine that grows slow meanwhile is slow for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.save import holds, leaves, limits, ours, peers, windows
from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place

MIB = 1 << 20


Work = Callable[[Place, int], Numbers]


@dataclass(frozen=True, slots=True)
class Case:
    """``work(place, amount)`` in a process of its own. ``once``: one round is enough, it is no race."""

    name: str
    where: Literal["s3", "folder"]
    work: Work
    amount: int
    once: bool = False


def cases(size_bytes: int, *, quick: bool) -> Sequence[Case]:
    """All cases for a state of that size."""
    few, many = (2_000, 10_000) if quick else (20_000, 100_000)
    raw, bits = partial(ours.first_save, codec="raw"), partial(ours.first_save, incompressible=True)
    s3: list[tuple[str, Work]] = [
        ("raw PUTs", limits.raw_puts),
        ("ftckpt, incompressible", bits),
        ("ftckpt", ours.first_save),
        ("ftckpt, second save", ours.second_save),
        ("ftckpt, raw codec", raw),
        ("DCP save", peers.dcp),
        ("DCP async_save", peers.dcp_async),
        ("s3torchconnector save", peers.s3torchconnector),
        ("s3torchconnector async_save", peers.s3torchconnector_async),
        ("tensorstore zarr3", peers.tensorstore),
        ("torch.save", peers.torch_save),
        ("safetensors", peers.safetensors),
    ]
    folder: list[tuple[str, Work]] = [
        ("raw writes", limits.raw_writes),
        ("ftckpt", ours.first_save),
        ("ftckpt, raw codec", raw),
        ("DCP save", peers.dcp),
        ("DCP async_save", peers.dcp_async),
        ("tensorstore zarr3", peers.tensorstore),
        ("torch.save", peers.torch_save),
        ("safetensors", peers.safetensors),
    ]
    return [
        *(Case(f"s3: {name}", "s3", work, size_bytes) for name, work in s3),
        *(Case(f"folder: {name}", "folder", work, size_bytes) for name, work in folder),
        Case("stall", "folder", ours.stall, size_bytes),
        Case("stall, a sixteenth of the bytes", "folder", ours.stall, size_bytes // 16),
        Case("fence", "folder", windows.fence, size_bytes),
        Case("throughput", "folder", windows.throughput, size_bytes // 4),
        Case("fence beyond the budget", "folder", windows.fence_beyond_budget, 256 * MIB, once=True),
        Case("memory", "s3", ours.memory, size_bytes, once=True),
        Case("memory, four times the bytes", "s3", ours.memory, 4 * size_bytes, once=True),
        Case("hold, large tensors", "folder", holds.large_tensors, size_bytes // 4),
        Case("hold, 13,000 leaves", "folder", holds.many_leaves, 13_000),
        Case("leaves, a few", "folder", leaves.many_leaves, few, once=True),
        Case("leaves, many", "folder", leaves.many_leaves, many, once=True),
    ]
