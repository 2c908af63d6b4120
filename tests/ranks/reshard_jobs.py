"""Four processes that play jobs of one to four ranks, one after the other, saving and restoring for real.

    reshard_jobs.py FOLDER

Each job is a world of its own (``job``): its ranks initialise torch.distributed, enter sessions and
leave. Reference tensors are made by torch itself (``full_tensor``) and stay in rank 0's memory, so
every comparison happens here. Prints ``ok <case>`` for what held; what did not ends the rank.
"""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ftckpt
from ftckpt.elastic.launch import Launch
from ftckpt.errors import FtckptError, UnsupportedValue, WorldSizeMismatch
from ftckpt.events import silent

RANK = int(os.environ["RANK"])
FOLDER = Path(sys.argv[1])
LINK = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 4, is_master=RANK == 0)
WORLDS = (1, 2, 3, 4)
SHAPES = [(2,), (3,), (5, 7), (1, 4)]
CHUNK_BYTES = 256
JOBS = itertools.count(1)


@contextmanager
def job(world: int) -> Iterator[bool]:
    """One job of ``world`` ranks; yields whether this process is one of them. All four leave together."""
    number = next(JOBS)
    inside = world > RANK
    if inside:
        store = dist.PrefixStore(f"job{number}", LINK)
        dist.init_process_group("gloo", store=store, rank=RANK, world_size=world)
    yield inside
    if inside:
        dist.barrier()
        dist.destroy_process_group()
    if LINK.add(f"left{number}", 1) == 4:
        LINK.set(f"over{number}", "")
    LINK.wait([f"over{number}"])


def session(name: str, state: dict, world: int, **options) -> ftckpt.Session:
    options = {"events": silent, "deadline_s": 20, "chunk_bytes": CHUNK_BYTES} | options
    return ftckpt.Session(FOLDER / name, state, launch=Launch(rank=RANK, world=world), **options)


def save(name: str, state: dict, world: int, **options) -> None:
    with session(name, state, world, **options) as running:
        running.save(1).wait(30)


def restored(name: str, state: dict, world: int, **options) -> None:
    with session(name, state, world, step=1, on_empty="error", **options) as running:
        assert running.restored is not None and running.restored.step == 1


# --- a model whose sizes nothing divides, and an optimizer with two groups ------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embed(tokens)))).square().sum()


def build(kind: str, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """``kind``: plain, ddp or fsdp. A seed fills it with other numbers."""
    torch.manual_seed(seed)
    model = Model()
    wrapped: nn.Module = model
    if kind == "fsdp":
        mesh = DeviceMesh("cpu", torch.arange(world))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind == "ddp":
        wrapped = DistributedDataParallel(model)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    return wrapped, torch.optim.AdamW(groups, lr=0.01)


def bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors by name, put together by torch; and the groups by the names in them."""
    found = {}
    names = {}
    for name, parameter in bare(model).named_parameters():
        names[parameter] = name
        found[name] = full(parameter)
        for key, value in optim.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = full(value)
    found["seen"] = bare(model).seen.clone()
    for number, group in enumerate(optim.param_groups):
        for parameter in group["params"]:
            found[f"{names[parameter]}.group"] = torch.tensor([number, group["lr"], group["weight_decay"]])
    return found


def step_once(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step on one batch, the same on every rank."""
    model(torch.arange(7)).backward()
    optim.step()
    optim.zero_grad()
    bare(model).seen += 1


def step_with_same_gradient(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """A step whose gradient is given, so that it is the same for any number of ranks."""
    for number, parameter in enumerate(bare(model).parameters()):
        whole = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) / (number + 1)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole
    optim.step()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), (what, found.keys() ^ wanted.keys())
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), (what, name)
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor))
        assert torch.equal(left, right), (what, name, other, tensor)


# --- the cases: each saves in one job and is restored in others -----------------------------------

KINDS = [("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("ddp", 3)]
WANTED: dict[str, dict[str, torch.Tensor]] = {}
"""What rank 0 saw when it saved, by case."""


def save_model(kind: str, world: int) -> None:
    model, optim = build(kind, world, seed=1)
    step_once(model, optim)
    step_once(model, optim)
    name = f"{kind}{world}"
    WANTED[name] = full_state(model, optim)
    save(name, {"actor": model, "optim": optim}, world)
    step_once(model, optim)
    WANTED[f"{name} trained on"] = full_state(model, optim)


def load_models(kind: str, world: int) -> None:
    """Every saved kind and world size, restored here. Nothing depends on what was live before."""
    for old, old_world in KINDS:
        saved, here = f"{old}{old_world}", f"{kind}{world}"
        model, optim = build(kind, world, seed=2)
        if old_world % 2:  # a live optimizer that has moments of its own, and one without
            step_once(model, optim)
        restored(saved, {"actor": model, "optim": optim}, world)
        check(full_state(model, optim), saved, f"{saved} to {here}")
        if saved == here:
            step_once(model, optim)
            check(full_state(model, optim), f"{saved} trained on", f"next step of {saved}")
        else:
            step_with_same_gradient(model, optim)
            found = full_state(model, optim)
            WANTED.setdefault(f"{saved} stepped", found)
            check(found, f"{saved} stepped", f"next step after {saved} to {here}")


def check(found: dict[str, torch.Tensor], wanted: str, case: str) -> None:
    if RANK == 0:
        same(found, WANTED[wanted], case)
        print(f"ok {case}", flush=True)


@contextmanager
def raises(kind: type[FtckptError], text: str) -> Iterator[None]:
    try:
        yield
    except kind as error:
        if not re.search(text, str(error), re.DOTALL):
            raise AssertionError(f"not {text!r}") from error
    else:
        raise AssertionError(f"no {kind.__name__}")


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def save_uneven() -> None:
    """G1: two-dimensional meshes that leave ranks with nothing."""
    mesh = init_device_mesh("cpu", (2, 2))
    tensors = {"x".join(map(str, shape)): numbered(shape) for shape in SHAPES}
    placed = {name: distribute_tensor(t, mesh, [Shard(0), Shard(0)]) for name, t in tensors.items()}
    WANTED["uneven"] = {name: full(tensor) for name, tensor in placed.items()}
    same(WANTED["uneven"], tensors, "full_tensor of uneven shards")
    save("uneven", {"t": placed}, 4)


def load_uneven(world: int) -> None:
    blank = {"x".join(map(str, shape)): torch.full(shape, -1.0) for shape in SHAPES}
    if world > 1:
        mesh = DeviceMesh("cpu", torch.arange(world))
        blank = {name: distribute_tensor(t, mesh, [Shard(t.ndim - 1)]) for name, t in blank.items()}
    restored("uneven", {"t": blank}, world)
    check({name: full(tensor) for name, tensor in blank.items()}, "uneven", f"G1 uneven to {world}")


def refuse_pieces(world: int) -> None:
    """G2: local parts of sizes that the placements do not mean: refused before anything is written."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    for rows in ((1, 4), (4, 1)):
        odd = DTensor.from_local(
            torch.zeros(rows[RANK], 3), mesh, [Shard(0)], run_check=False, shape=(5, 3), stride=(3, 1)
        )
        name = f"pieces{rows[0]}"
        with raises(UnsupportedValue, r"t\.w.*\(5, 3\)"), session(name, {"t": {"w": odd}}, world):
            pass
        assert not (FOLDER / name).exists()
        print(f"ok G2 pieces {rows}", flush=True)


def tensor_parallel(rows: int, mesh: DeviceMesh | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, rows, bias=False), nn.Linear(rows, 4, bias=False))
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(numbered(tuple(layer.weight.shape)) if mesh else torch.tensor(-1.0))
    if mesh is not None:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    return model


def save_tensor_parallel() -> None:
    """G3: sharded by tensor parallelism and FSDP2 at once, before and after a step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for rows in (16, 6):
        model = tensor_parallel(rows, mesh)
        optim = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
        whole = {name: full(p) for name, p in model.named_parameters()}
        same(whole, {name: numbered(tuple(t.shape)) for name, t in whole.items()}, "numbers in order")
        for when in ("before", "after"):
            if when == "after":
                model(torch.ones(2, 4)).sum().backward()
                optim.step()
            WANTED[f"tp{rows}{when}"] = {name: full(p) for name, p in model.named_parameters()}
            save(f"tp{rows}{when}", {"actor": model, "optim": optim}, 4)


def load_tensor_parallel() -> None:
    for rows in (16, 6):
        for when in ("before", "after"):
            model = tensor_parallel(rows, None)
            restored(f"tp{rows}{when}", {"actor": model, "optim": torch.optim.AdamW(model.parameters())}, 1)
            found = {name: full(p) for name, p in model.named_parameters()}
            check(found, f"tp{rows}{when}", f"G3 rows {rows} {when} a step")


def indexed(world: int, fill: bool) -> nn.Module:
    model = Model()
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(numbered(tuple(parameter.shape)) + 1000 * number if fill else torch.tensor(-1.0))
    if world > 1:
        fully_shard(model, mesh=DeviceMesh("cpu", torch.arange(world)))
    return model


def load_indexed(world: int) -> None:
    """G4: every element holds its own index, so that any exchange of two shows."""
    model = indexed(world, fill=False)
    restored("indexed", {"actor": model}, world)
    for number, (name, parameter) in enumerate(model.named_parameters()):
        assert torch.equal(full(parameter), numbered(tuple(parameter.shape)) + 1000 * number), name
    if RANK == 0:
        print(f"ok G4 4 to {world}", flush=True)


def per_rank(world: int, **options) -> dict:
    return {"w": torch.zeros(3), "own": ftckpt.PerRank({"rank": RANK, "t": torch.tensor([RANK])}, **options)}


def load_per_rank(world: int) -> None:
    """Per-rank state goes back to its own ranks, and to no others unless that is asked for."""
    state = per_rank(world)
    state["own"].value = {"rank": -1, "t": torch.tensor([-1])}
    if world == 2:
        restored("own", state, world)
        assert state["own"].value["rank"] == RANK and int(state["own"].value["t"]) == RANK
        print("ok own", flush=True)
        return
    before = objects_of("own")
    with raises(WorldSizeMismatch, "own"):
        restored("own", state, world)
    assert state["own"].value["rank"] == -1 and int(state["own"].value["t"]) == -1
    assert {key for key in objects_of("own") - before if key.startswith(("packs", "commits"))} == set()
    heard: list = []
    restored("own", per_rank(world, on_resize="reseed"), world, events=heard.append)
    notes = [event.fields for event in heard if event.name == "session.restored"]
    assert "own" in str(notes), notes
    assert notes[0]["guarantee"] == "E3" and "reseeded" in str(notes[0]["why"]), notes
    print(f"ok own refused on {world}", flush=True)


def objects_of(name: str) -> set[str]:
    return {str(p.relative_to(FOLDER / name)) for p in (FOLDER / name).rglob("*") if p.is_file()}


def main() -> None:
    for world in WORLDS:
        with job(world) as inside:
            if not inside:
                continue
            for kind, ranks in KINDS:
                if ranks == world:
                    save_model(kind, world)
            if world == 2:
                refuse_pieces(world)
                save("own", per_rank(world), world)
            if world == 4:
                save_uneven()
                save_tensor_parallel()
                save("indexed", {"actor": indexed(4, fill=True)}, 4)
    for world in WORLDS:
        with job(world) as inside:
            if not inside:
                continue
            for kind, ranks in KINDS:
                if ranks == world:
                    load_models(kind, world)
            load_uneven(world)
            load_indexed(world)
            if world == 1:
                load_tensor_parallel()
            if world < 4:
                load_per_rank(world)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    main()
