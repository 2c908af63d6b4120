"""Boxes of DTensors: which part of a global tensor this rank holds, and who holds the very same part.

Meshes and placements become a ``Box`` and a tuple of ranks, by arithmetic that every rank does
alone. What is not one box, or is not what the placements say, is refused by name: a wrong offset
would be a wrong file. Only imported once a DTensor is there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ftckpt.boxes import Box
from ftckpt.capture.parts import Part, Where
from ftckpt.capture.tensors import require_plain
from ftckpt.values import refuse

Run = tuple[int, int]
"""Rows ``start … stop`` of one dimension, in elements."""


def sharded_part(tensor: torch.Tensor, leaf: str, where: Where) -> Part:
    """What this rank holds of a DTensor."""
    assert isinstance(tensor, DTensor)
    shape = tuple(tensor.shape)
    local = require_plain(local_shard(tensor).detach(), leaf)
    spec = tensor._spec  # noqa: SLF001 — the order of sharding is told nowhere else
    ranks = _holders(tensor, spec.mesh, spec.placements, leaf, where)
    usual = spec.compute_default_shard_order(spec.placements)
    if not spec.use_strided_shard_as_shard_order and spec.shard_order != usual:
        refuse(tensor, leaf, f"a DTensor sharded in the unusual order {spec.shard_order} is not supported")
    box = _box(tensor, spec.mesh, spec.placements, leaf)
    if tuple(local.shape) != box.extent:
        refuse(
            tensor,
            leaf,
            f"this rank's part is {tuple(local.shape)}, but {shape} in {spec.placements} over a mesh of "
            f"{tuple(spec.mesh.shape)} puts {box.extent} here (was it built by from_local out of uneven parts?)",
        )
    return Part(local, shape, box, ranks)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part itself; ``to_local()`` would be a new tensor and a step of autograd."""
    assert isinstance(tensor, DTensor)
    local = tensor._local_tensor  # noqa: SLF001
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


def like_sharded(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """A DTensor laid out as ``tensor`` is, with another local part."""
    assert isinstance(tensor, DTensor)
    return DTensor.from_local(
        local,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def shard_runs(runs: Sequence[Run], parts: int, index: int) -> list[Run]:
    """The rows that part ``index`` of ``parts`` gets when rows are dealt out as ``torch.chunk`` does."""
    total = sum(stop - start for start, stop in runs)
    size = -(-total // parts)
    low, high = min(index * size, total), min((index + 1) * size, total)
    cut: list[Run] = []
    at = 0
    for start, stop in runs:
        first, last = max(low, at), min(high, at + stop - start)
        if first < last:
            piece = (start + first - at, start + last - at)
            if cut and cut[-1][1] == piece[0]:
                piece = (cut.pop()[0], piece[1])
            cut.append(piece)
        at += stop - start
    return cut


def strided_runs(runs: Sequence[Run], split: int, parts: int, index: int) -> list[Run]:
    """The rows of part ``index`` when each of ``split`` equal cuts is dealt out to ``parts`` by itself."""
    dealt: list[Run] = []
    for cut in range(split):
        dealt += shard_runs(shard_runs(runs, split, cut), parts, index)
    total = sum(stop - start for start, stop in dealt)
    return shard_runs(dealt, 1, 0) if total else []  # joins neighbours


def _box(tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], leaf: str) -> Box:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    runs: list[list[Run]] = [[(0, size)] if size else [] for size in tensor.shape]
    for at, parts, placement in zip(coordinate, mesh.shape, placements, strict=True):
        if isinstance(placement, _StridedShard):
            dim = placement.dim
            runs[dim] = strided_runs(runs[dim], int(placement.split_factor), parts, at)
        elif isinstance(placement, Shard):
            runs[placement.dim] = shard_runs(runs[placement.dim], parts, at)
        elif not isinstance(placement, Replicate):
            refuse(
                tensor,
                leaf,
                f"a DTensor placed as {placement} holds no finished values; redistribute it first",
            )
    if any(len(run) > 1 for run in runs):
        refuse(
            tensor, leaf, f"this rank holds scattered rows of it ({tuple(placements)}), which are not one box"
        )
    offset = tuple(run[0][0] if run else 0 for run in runs)
    extent = tuple(run[0][1] - run[0][0] if run else 0 for run in runs)
    return Box(offset, extent)


def _holders(
    tensor: DTensor, mesh: DeviceMesh, placements: Sequence[Placement], leaf: str, where: Where
) -> tuple[int, ...]:
    """Ranks inside the group that hold the same part, from the mesh alone."""
    members = sorted(mesh.mesh.flatten().tolist())
    coordinate = mesh.get_coordinate()
    if coordinate is None or len(members) != where.world:
        refuse(
            tensor,
            leaf,
            f"it is a DTensor on a mesh of {len(members)} ranks (this one {'not ' if coordinate is None else ''}"
            f"among them), and the group has {where.world}: who else holds it cannot be known. Put it on a mesh of "
            "the whole group, with Replicate() for the dimensions that do not cut it",
        )
    if members.index(int(mesh.mesh[tuple(coordinate)])) != where.rank:
        refuse(
            tensor, leaf, f"its mesh {members} does not have this process as rank {where.rank} of the group"
        )
    index = tuple(
        slice(None) if isinstance(placement, Replicate) else at
        for at, placement in zip(coordinate, placements, strict=True)
    )
    return tuple(sorted(members.index(rank) for rank in mesh.mesh[index].flatten().tolist()))
