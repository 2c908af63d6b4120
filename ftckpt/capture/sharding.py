"""Boxes of DTensors: which part of a global tensor this rank holds, and who holds the very same part.

Meshes and placements become a ``Box`` and a tuple of ranks, by arithmetic that every rank does
alone. What is not one box, or is not what the placements say, is refused by name: a wrong offset
would be a wrong file. Only imported once a DTensor is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from ftckpt.boxes import Box
from ftckpt.capture.parts import Part, Where
from ftckpt.capture.tensors import require_plain
from ftckpt.values import refuse

Run = tuple[int, int]
"""Rows ``start … stop`` of one dimension, in elements."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A mesh dimension that deals out one dimension of a tensor to ``parts``, the ``index``-th to this rank.

    ``split``: in so many it was cut before, by mesh dimensions that are listed after this one. FSDP2 over
    tensor parallelism lists itself first although it cuts last.
    """

    parts: int
    index: int
    split: int = 1


def sharded_part(tensor: torch.Tensor, leaf: str, where: Where) -> Part:
    """What this rank holds of a DTensor."""
    assert isinstance(tensor, DTensor)
    shape = tuple(tensor.shape)
    local = require_plain(local_shard(tensor).detach(), leaf)
    spec = tensor._spec  # noqa: SLF001 — the order of sharding is told nowhere else
    ranks = _holders(tensor, leaf, where)
    usual = spec.compute_default_shard_order(spec.placements)
    if not spec.use_strided_shard_as_shard_order and spec.shard_order != usual:
        refuse(tensor, leaf, f"a DTensor sharded in the unusual order {spec.shard_order} is not supported")
    box = _box(tensor, tuple(local.shape), leaf)
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
    total = size_of(runs)
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
    total = size_of(dealt)
    return shard_runs(dealt, 1, 0) if total else []  # joins neighbours


def size_of(runs: Sequence[Run]) -> int:
    """How many rows there are."""
    return sum(stop - start for start, stop in runs)


def in_order(cuts: Sequence[Cut]) -> list[Cut] | None:
    """The cuts as they were made, first to last; ``None`` when what was split before does not tell."""
    ordered: list[Cut] = []
    for cut in reversed(cuts):
        before = [1]
        for other in ordered:
            before.append(before[-1] * other.parts)
        if cut.split not in before:
            return None
        ordered.insert(before.index(cut.split), cut)
    return ordered


def rows_held(size: int, cuts: Sequence[Cut], held: int) -> list[Run]:
    """The rows out of ``size`` that this rank has, being ``held`` many.

    FSDP2 deals out what tensor parallelism left it. ``distribute_tensor`` deals out rows from each of the
    parts that will be, which for some uneven sizes is not the same. The number of rows tells which it
    was; if neither gives so many, the first reading is returned.
    """
    made: list[Run] = [(0, size)] if size else []
    listed, ordered = made, in_order(cuts)
    for cut in cuts:
        listed = strided_runs(listed, cut.split, cut.parts, cut.index)
    for cut in ordered or ():
        made = shard_runs(made, cut.parts, cut.index)
    if ordered is None or size_of(made) != held == size_of(listed):
        return listed
    return made


def _box(tensor: DTensor, held: tuple[int, ...], leaf: str) -> Box:
    """The box of this rank's part, which has the extents ``held``."""
    mesh: DeviceMesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    cuts: list[list[Cut]] = [[] for _ in tensor.shape]
    for at, parts, placement in zip(coordinate, mesh.shape, tensor.placements, strict=True):
        if isinstance(placement, _StridedShard):
            cuts[placement.dim].append(Cut(parts, at, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            cuts[placement.dim].append(Cut(parts, at))
        elif not isinstance(placement, Replicate):
            refuse(
                tensor,
                leaf,
                f"a DTensor placed as {placement} holds no finished values; redistribute it first",
            )
    runs = [rows_held(*one) for one in zip(tensor.shape, cuts, held, strict=True)]
    if any(len(run) > 1 for run in runs):
        refuse(
            tensor,
            leaf,
            f"this rank holds scattered rows of it ({tensor.placements}), which are not one box",
        )
    box = Box(tuple(run[0][0] if run else 0 for run in runs), tuple(map(size_of, runs)))
    if held != box.extent:
        refuse(
            tensor,
            leaf,
            f"this rank's part is {held}, but {tuple(tensor.shape)} in {tensor.placements} over a mesh of "
            f"{tuple(mesh.shape)} puts {box.extent} here (was it built by from_local out of uneven parts?)",
        )
    return box


def _holders(tensor: DTensor, leaf: str, where: Where) -> tuple[int, ...]:
    """Ranks inside the group that hold the same part, from the mesh alone."""
    mesh: DeviceMesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    cut = tuple(not isinstance(placement, Replicate) for placement in tensor.placements)
    root: DeviceMesh = getattr(mesh, "_root_mesh", None) or mesh
    spread = _spread(mesh, root, mesh.get_rank(), None if coordinate is None else tuple(coordinate), cut)
    if not spread.holders or spread.world != where.world:
        refuse(
            tensor,
            leaf,
            f"it is a DTensor on a mesh of {spread.world} ranks (this one {'' if spread.holders else 'not '}"
            f"among them), and the group has {where.world}: who else holds it cannot be known. Put it on a mesh of "
            "the whole group, or on some dimensions of one",
        )
    if spread.rank != where.rank:
        refuse(
            tensor,
            leaf,
            f"this process is rank {where.rank} of the group, but rank {spread.rank} of its mesh",
        )
    return spread.holders


@dataclass(frozen=True, slots=True)
class _Spread:
    """The ranks that a tensor is spread over, counted in their order: how many they are, which of them this
    process is, and which hold the same part as it (none: it is not among them).
    """

    world: int
    rank: int = 0
    holders: tuple[int, ...] = ()


@lru_cache(maxsize=256)
def _spread(
    mesh: DeviceMesh, root: DeviceMesh, rank: int, coordinate: tuple[int, ...] | None, cut: tuple[bool, ...]
) -> _Spread:
    """``rank``: this process, at ``coordinate`` of ``mesh``; ``cut``: the dimensions that cut the tensor.

    A mesh that is some dimensions of ``root`` has siblings along the others, and a tensor on it has the same
    parts there: under FSDP2 over one dimension of two, all that no tensor parallelism touched.
    """
    here = np.array(mesh.mesh.tolist())
    if coordinate is None:
        return _Spread(here.size)
    everybody = np.array(root.mesh.tolist())
    spots = np.argwhere(np.isin(everybody, here))
    siblings = tuple(np.flatnonzero(spots.min(axis=0) == spots.max(axis=0)).tolist())
    if here.size * np.prod([everybody.shape[dim] for dim in siblings], dtype=int) != everybody.size:
        everybody, siblings = here, ()  # it is not made of whole dimensions
    alike = here[tuple(at if is_cut else slice(None) for at, is_cut in zip(coordinate, cut, strict=True))]
    same = np.isin(everybody, alike)
    if siblings:
        same = np.broadcast_to(same.any(axis=siblings, keepdims=True), everybody.shape)
    members = sorted(everybody.flatten().tolist())
    holders = sorted(members.index(rank) for rank in everybody[same].tolist())
    return _Spread(len(members), members.index(rank), tuple(holders))
