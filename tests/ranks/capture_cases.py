"""Four ranks that save and restore sharded state, each case writing pieces for its test to judge.

    capture_cases.py FOLDER

A case writes ``FOLDER/<case>/<rank>`` (its pieces) and, on rank 0, ``FOLDER/<case>/full`` (what
``full_tensor()`` says the tensors are). Refusals are printed as ``<case>: <leaf>: <first line>``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ftckpt.capture import capture
from ftckpt.errors import UnsupportedValue
from tests.capture.memory import Saved, load, restore, same_bits, save, write

SHAPES = [(2,), (3,), (5, 7), (1, 4), (4, 0)]
PLACEMENTS = [
    (Shard(0), Shard(0)),
    (Shard(0), Replicate()),
    (Replicate(), Shard(-1)),
    (Shard(-1), Shard(0)),
    (Replicate(), Replicate()),
]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


class Model(nn.Module):
    """Sizes that no number of ranks divides, a tie, a buffer and a scalar parameter's worth of bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.one = nn.Linear(5, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.block(self.embed(tokens))
        return self.head(h).sum() + self.one(h).square().sum()


def fill(module: nn.Module) -> None:
    with torch.no_grad():
        for at, parameter in enumerate(module.parameters()):
            parameter.copy_(numbered(tuple(parameter.shape)) / 8 + at)


def full_state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"actor.{name}": p for name, p in model.named_parameters()}
    for name, parameter in list(found.items()):
        for key, value in optim.state[parameter].items():
            found[f"optim.state.{name}.{key}"] = value
    found["actor.seen"] = model.seen
    return {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in found.items()}


def put(folder: Path, saved: Saved, rank: int, full: dict[str, torch.Tensor] | None = None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write(saved, folder / str(rank))
    if rank == 0 and full is not None:
        write(save({"full": full}, rng=False), folder / "full")


def refused(case: str, state: dict, rank: int, world: int) -> None:
    try:
        capture(state, rank=rank, world=world)
    except UnsupportedValue as error:
        print(f"{case}: {error.leaf}: {str(error).splitlines()[0]}", flush=True)
    else:
        print(f"{case}: not refused", flush=True)


def boxes(folder: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for number, placements in enumerate(PLACEMENTS):
        state, full = {}, {}
        for shape in SHAPES:
            tensor = distribute_tensor(numbered(shape), mesh, placements)
            name = "x".join(map(str, shape))
            state[name], full[f"t.{name}"] = tensor, tensor.full_tensor()
            assert torch.equal(full[f"t.{name}"], numbered(shape))
        put(folder / f"boxes{number}", save({"t": state}, rank=rank, world=4), rank, full)


def refusals(rank: int) -> None:
    pair = DeviceMesh("cpu", torch.arange(2))
    line = DeviceMesh("cpu", torch.arange(4))
    if rank < 2:
        rows = (1, 4)[rank]
        uneven = DTensor.from_local(
            torch.zeros(rows, 3), pair, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1)
        )
        refused("uneven", {"t": {"w": uneven}}, rank, 2)
        small = distribute_tensor(torch.zeros(4), pair, [Shard(0)], src_data_rank=None)
        refused("mesh", {"t": {"w": small}}, rank, 4)
    partial = DTensor.from_local(torch.zeros(3), line, [Partial()], run_check=False)
    refused("partial", {"t": {"w": partial}}, rank, 4)
    refused(
        "other rank", {"t": {"w": distribute_tensor(torch.zeros(4), line, [Shard(0)])}}, (rank + 1) % 4, 4
    )
    sharded = nn.Linear(4, 4)
    fully_shard(sharded, mesh=line)
    optim = torch.optim.SGD(sharded.parameters())
    optim.state[sharded.weight] = {"local": torch.zeros(1, 4)}
    refused("local state", {"m": sharded, "o": optim}, rank, 4)


def tensor_parallel(folder: Path, rank: int) -> None:
    """Weights sharded by tensor parallelism first and FSDP2 second, whole and after a step."""
    for rows in (16, 6):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(4, rows, bias=False), nn.Linear(rows, 4, bias=False))
        with torch.no_grad():
            for layer in model:
                layer.weight.copy_(numbered(tuple(layer.weight.shape)))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        for when in ("before", "after"):
            full = {f"actor.{name}": p.full_tensor() for name, p in model.named_parameters()}
            put(
                folder / f"tp{rows}{when}",
                save({"actor": model, "optim": optim}, rank=rank, world=4, rng=False),
                rank,
                full,
            )
            if when == "before":
                assert torch.equal(full["actor.0.weight"], numbered((rows, 4)))
            model(torch.ones(2, 4)).sum().backward()
            optim.step()


def build(ranks: int, rank: int, meshes: dict[int, DeviceMesh]) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Model()
    fill(model)
    if ranks > 1:
        fully_shard(model.block, mesh=meshes[ranks])
        fully_shard(model, mesh=meshes[ranks])
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=ranks % 2 == 0)


def reshard(folder: Path, rank: int) -> None:
    """FSDP2 saved on n ranks and restored on m, for n and m in 1 … 4."""
    meshes = {n: DeviceMesh("cpu", torch.arange(n)) for n in (1, 2, 3, 4)}
    for n in (1, 2, 3, 4):
        if rank >= n:
            continue
        model, optim = build(n, rank, meshes)
        model(torch.arange(7)).backward()
        optim.step()
        model.seen += 5
        with torch.no_grad():
            model(torch.arange(7))  # leaves the root unsharded, which capture must undo
        saved = save({"actor": model, "optim": optim}, rank=rank, world=n, rng=False)
        put(folder / f"fsdp{n}", saved, rank, full_state(model, optim))
    dist.barrier()
    for m in (1, 2, 3, 4):
        for n in (1, 2, 3, 4):
            if rank >= m:
                continue
            saved = load([folder / f"fsdp{n}" / str(r) for r in range(n)])
            model, optim = build(m, rank, meshes)
            if n % 2:  # a live optimizer that has stepped, and one that is fresh
                model(torch.arange(3)).backward()
                optim.step()
            restore(saved, {"actor": model, "optim": optim}, rank=rank, world=m, rng=False)
            again = save({"actor": model, "optim": optim}, rank=rank, world=m, rng=False)
            put(folder / f"fsdp{n}to{m}", again, rank, full_state(model, optim))
            model(torch.arange(7)).backward()
            optim.step()


def hybrid(folder: Path, rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Model()
    fill(model)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(7)).backward()
    optim.step()
    put(
        folder / "hsdp",
        save({"actor": model, "optim": optim}, rank=rank, world=4, rng=False),
        rank,
        full_state(model, optim),
    )


def data_parallel(folder: Path, rank: int) -> None:
    model = Model()
    fill(model)
    optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    wrapped = DistributedDataParallel(model)
    put(
        folder / "ddp",
        save({"actor": wrapped, "optim": optim}, rank=rank, world=4, rng=False),
        rank,
        full_state(model, optim),
    )
    fresh = Model()
    saved = load([folder / "ddp" / str(rank)])
    restore(saved, {"actor": fresh, "optim": torch.optim.AdamW(fresh.parameters())}, rng=False)
    assert all(map(same_bits, fresh.parameters(), model.parameters()))


def main() -> None:
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    boxes(folder, rank)
    refusals(rank)
    tensor_parallel(folder, rank)
    reshard(folder, rank)
    hybrid(folder, rank)
    data_parallel(folder, rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
