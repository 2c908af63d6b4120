"""Layouts of any number of ranks: each rank is played in turn by this process, with a backend that sends
nothing, so that only what a rank computes alone is used. What every rank holds was dealt out by torch
itself, from the same weights; ``tests/reshard`` does the same with real ranks, four at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from ftckpt.capture import capture
from ftckpt.capture.parts import local_of
from ftckpt.capture.sharding import Cut, in_order, like_sharded, rows_held
from ftckpt.errors import UnsupportedValue
from tests.capture.memory import Saved, contents, restore, same_bits, save, whole_tensors


class Model(nn.Module):
    """Sizes that few numbers of ranks divide, a scalar buffer, and a layer that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3, bias=False)
        self.spare = nn.Linear(6, 1)
        self.register_buffer("seen", torch.tensor(3))


PLAN = {
    "embed": ColwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(),
}


@dataclass(frozen=True)
class Layout:
    """How a world is arranged: the sizes of its mesh, and what is done to a model on it."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    apply: Callable[[nn.Module, object], object]

    @property
    def world(self) -> int:
        return torch.Size(self.sizes).numel()


def tensor_parallel(model, mesh):
    for plan in PLAN.values():
        plan.src_data_rank = None
    parallelize_module(model, mesh, PLAN, src_data_rank=None)


def along_columns(model, mesh):
    """FSDP2 over the second dimension where it can be divided."""
    parts = mesh.size()
    fully_shard(
        model,
        mesh=mesh,
        shard_placement_fn=lambda p: Shard(1 if p.ndim > 1 and p.shape[1] % parts == 0 else 0),
    )


def both(data: tuple[str, ...] | str):
    def apply(model, mesh):
        tensor_parallel(model, mesh["tp"])
        fully_shard(model.up, mesh=mesh[data])
        fully_shard(model, mesh=mesh[data])

    return apply


def flattened(model, mesh):
    fully_shard(model, mesh=mesh["a", "b"]._flatten("ab"))


def alone(model, mesh):
    fully_shard(model, mesh=mesh)


LAYOUTS = {
    "plain": Layout((1,), ("dp",), lambda model, mesh: None),
    "fsdp 1": Layout((1,), ("dp",), alone),
    "fsdp 3": Layout((3,), ("dp",), alone),
    "fsdp 8": Layout((8,), ("dp",), alone),
    "columns 3": Layout((3,), ("dp",), along_columns),
    "tp 5": Layout((5,), ("tp",), tensor_parallel),
    "hsdp 2x3": Layout((2, 3), ("r", "s"), alone),
    "fsdp 2 x tp 2": Layout((2, 2), ("dp", "tp"), both("dp")),
    "fsdp 3 x tp 2": Layout((3, 2), ("dp", "tp"), both("dp")),
    "fsdp 2 x tp 3": Layout((2, 3), ("dp", "tp"), both("dp")),
    "tp 3 beside 2": Layout((2, 3), ("dp", "tp"), lambda model, mesh: tensor_parallel(model, mesh["tp"])),
    "hsdp 2x2 x tp 2": Layout((2, 2, 2), ("r", "s", "tp"), both(("r", "s"))),
    "flattened 2x3": Layout((2, 3), ("a", "b"), flattened),
    "flattened beside 2": Layout((2, 2, 2), ("a", "b", "c"), flattened),
}


@contextmanager
def rank_of(world: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it keeps meshes, which to it are equal whoever looks at them


def lay_out(layout: Layout, *, filled: bool, stepped: bool) -> dict:
    """A model and its optimizer in that layout; ``filled`` with numbers, or with nothing of use."""
    torch.manual_seed(0)
    model = Model()
    if not filled:
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.fill_(-1)
    layout.apply(model, init_device_mesh("cpu", layout.sizes, mesh_dim_names=layout.names))
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optim = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "lr": 0.5}], lr=0.1 if filled else 7.0
    )
    for parameter in model.parameters() if stepped else ():
        if parameter is not model.spare.weight:
            local = local_of(parameter).detach()
            optim.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": like(parameter, local * 2 + 1),
                "exp_avg_sq": like(parameter, local * local),
            }
    return {"actor": model, "optim": optim}


def like(parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    return like_sharded(parameter, local) if isinstance(parameter, DTensor) else local


def saved_by(layout: Layout) -> list[Saved]:
    """What each rank saves."""
    found = []
    for rank in range(layout.world):
        with rank_of(layout.world, rank):
            state = lay_out(layout, filled=True, stepped=True)
            found.append(save(state, rank=rank, world=layout.world, rng=False))
    return found


@pytest.fixture(scope="module")
def everything() -> dict[str, list[Saved]]:
    return {name: saved_by(layout) for name, layout in LAYOUTS.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_parts_of_all_ranks_tile_every_tensor_and_name_all_their_holders(everything, name):
    """G1, G3, G4"""
    (plain,), ranks = everything["plain"], everything[name]
    pieces = [piece for rank in ranks for piece in rank]

    found, wanted = whole_tensors(pieces), whole_tensors(plain)

    assert found.keys() == wanted.keys()
    assert all(same_bits(found[leaf], wanted[leaf]) for leaf in wanted)
    for rank, saved in enumerate(ranks):
        for piece in saved:
            holders = [
                at for at, other in enumerate(ranks) if (piece.leaf, piece.box, piece.raw) in spots(other)
            ]
            assert rank in piece.ranks
            assert not piece.box.numel or list(piece.ranks) == holders, (piece.leaf, piece.box)


def spots(saved: Saved) -> set[tuple]:
    return {(piece.leaf, piece.box, piece.raw) for piece in saved}


NAMES = list(LAYOUTS)
MOVES = [(name, NAMES[(at + far) % len(NAMES)]) for at, name in enumerate(NAMES) for far in (1, 4, 9)]
"""Each layout to three others; every layout is met as often."""


@pytest.mark.parametrize("saved, to", MOVES)
def test_every_rank_of_any_layout_gets_the_bits_that_torch_would_have_dealt_it(everything, saved, to):
    """G4, G7: parameters, moments, groups, and a parameter without state."""
    layout, pieces = LAYOUTS[to], [piece for rank in everything[saved] for piece in rank]

    for rank in range(layout.world):
        with rank_of(layout.world, rank):
            live = lay_out(layout, filled=False, stepped=rank % 2 == 0)
            restore(pieces, live, rank=rank, world=layout.world, rng=False)
            again = save(live, rank=rank, world=layout.world, rng=False)

        assert contents(again) == contents(everything[to][rank])


# --- the order in which dimensions of a mesh cut a dimension of a tensor -------------------------------


def test_cuts_are_put_in_the_order_in_which_they_were_made():
    """Torch lists FSDP2 first and tensor parallelism after it; the latter came first."""
    data, experts, tensor = Cut(4, 0, split=2), Cut(3, 0, split=2), Cut(2, 0)

    assert in_order([data, tensor]) == [tensor, data]
    assert in_order([data, experts, tensor]) == [tensor, data, experts]
    assert in_order([tensor, data]) is None, "nothing was cut in two before"
    assert in_order([]) == []


@pytest.mark.parametrize("data, tensor", [(2, 2), (3, 2), (2, 3), (5, 4)])
@pytest.mark.parametrize("size", range(23))
def test_rows_are_those_that_fsdp2_deals_out_of_what_tensor_parallelism_left(size, data, tensor):
    rows = torch.arange(size)
    for row in range(data):
        for column in range(tensor):
            left = pad(rows.chunk(tensor), column)
            mine = pad(left.chunk(data), row).tolist()

            found = rows_held(size, [Cut(data, row, split=tensor), Cut(tensor, column)], len(mine))

            assert [one for start, stop in found for one in range(start, stop)] == mine


def pad(chunks, at: int) -> torch.Tensor:
    return chunks[at] if at < len(chunks) else torch.arange(0)


def test_rows_that_distribute_tensor_dealt_out_in_strides_are_told_by_their_number():
    """Seven rows over 3 x 2: where FSDP2 leaves the sixth to rank (2, 1), this leaves it to rank (2, 0)."""
    pieces = []
    for rank in range(6):
        with rank_of(6, rank):
            mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
            placed = [_StridedShard(0, split_factor=2), Shard(0)]
            tensor = distribute_tensor(torch.arange(7.0), mesh, placed, src_data_rank=None)
            pieces += save({"t": tensor}, rank=rank, world=6, rng=False)

    assert whole_tensors(pieces)["t.value"].tolist() == list(range(7))


# --- what cannot be told -------------------------------------------------------------------------------


def test_a_mesh_of_some_ranks_that_is_no_dimension_of_a_larger_one_is_refused():
    """G2: nobody can know who else holds it."""
    with rank_of(4, 0):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        tensor = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)

        with pytest.raises(UnsupportedValue, match=r"t\.w: it is a DTensor on a mesh of 2 ranks .* has 4"):
            capture({"t": {"w": tensor}}, rank=0, world=4)


class LowBits(torch.Tensor):
    """Codes and a scale, as 8-bit optimizers keep their moments."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _meta, _size, _stride):
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.view.default):
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


def test_sharded_moments_of_a_tensor_subclass_are_refused_by_name():
    """E3"""
    with rank_of(2, 1):
        mesh = init_device_mesh("cpu", (2,))
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=mesh)
        optim = torch.optim.AdamW(model.parameters())
        codes = LowBits(torch.zeros(2, 4, dtype=torch.uint8), torch.tensor(0.5))
        moment = DTensor.from_local(codes, mesh, [Shard(0)], run_check=False)
        optim.state[model.weight] = {"step": torch.tensor(1.0), "exp_avg": moment}

        with pytest.raises(UnsupportedValue, match="LowBits") as refused:
            capture({"actor": model, "optim": optim}, rank=1, world=2)

    assert refused.value.leaf == "optim.state.actor.weight.exp_avg"


def test_replicas_on_a_mesh_are_those_of_all_its_ranks():
    with rank_of(6, 4):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        placed = {
            "all": DTensor.from_local(torch.zeros(2), mesh, [Replicate(), Replicate()], run_check=False),
            "b": DTensor.from_local(torch.zeros(2), mesh["b"], [Replicate()], run_check=False),
            "cut": distribute_tensor(torch.zeros(6), mesh["b"], [Shard(0)], src_data_rank=None),
        }

        found = {leaf.holding.leaf.name: leaf.holding for leaf in capture({"t": placed}, rank=4, world=6)}

    assert found["t.all"].ranks == found["t.b"].ranks == (0, 1, 2, 3, 4, 5)
    assert found["t.cut"].ranks == (1, 4) and found["t.cut"].box.offset == (2,)
