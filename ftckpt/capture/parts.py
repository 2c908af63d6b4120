"""The part of a tensor that this rank holds, be it whole or sharded.

Everything else in this room asks here and needs not know of DTensors. Their class is looked at only
when somebody has imported it: that import takes longer than the rest of torch, and without it no
tensor can be one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

from ftckpt.boxes import Box, whole
from ftckpt.capture.tensors import fresh_tensor, require_plain


@dataclass(frozen=True, slots=True)
class Where:
    """Who is asking: a rank of a replica group of ``world`` ranks."""

    group: str
    rank: int
    world: int

    @property
    def owner(self) -> str:
        return f"{self.group}.{self.rank}"

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(range(self.world))


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The local part of a tensor: ``local`` aliases its memory and has the extents of ``box``.

    ``shape`` is the global one, ``ranks`` those of the group that hold the very same part.
    """

    local: torch.Tensor
    shape: tuple[int, ...]
    box: Box
    ranks: tuple[int, ...]


def is_dtensor(tensor: object) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def part_of(tensor: torch.Tensor, leaf: str, where: Where) -> Part:
    """What this rank holds of a tensor. One that is no DTensor is held by all ranks alike.

    Raises:
        UnsupportedValue: it cannot be saved faithfully, or nobody can tell which part this is.
    """
    if is_dtensor(tensor):
        from ftckpt.capture import sharding

        return sharding.sharded_part(tensor, leaf, where)
    plain = require_plain(tensor, leaf)
    return Part(plain, tuple(plain.shape), whole(plain.shape), where.ranks)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor that is on this rank."""
    if is_dtensor(tensor):
        from ftckpt.capture import sharding

        return sharding.local_shard(tensor)
    return tensor


def fresh_like(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    """Unfilled memory for a tensor of the same shape, device, sharding and memory order."""
    local = local_of(tensor)
    fresh = fresh_tensor(local.shape, dtype, local.device)
    if not local.is_contiguous() and dtype != "complex32":
        fresh = torch.empty_like(local, dtype=fresh.dtype, requires_grad=False)
    if is_dtensor(tensor):
        from ftckpt.capture import sharding

        return sharding.like_sharded(tensor, fresh)
    return fresh
