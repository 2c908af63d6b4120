"""Four processes that play jobs of one to four ranks which save and load through DCP, one job after the other.

    dcp_jobs.py FOLDER

As ``reshard_jobs.py``: each job is a world of its own; whole tensors put together by torch stay in rank
0's memory, so every comparison happens here. Prints ``ok <case>`` for what held. In the last two jobs, which
run at once, ranks 1 and 3 are killed.
"""

from __future__ import annotations

import io
import itertools
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ftckpt
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore, Kill
from ftckpt.errors import AccessDenied, SettingsDiffer
from ftckpt.events import silent
from ftckpt.store import open_store

RANK = int(os.environ["RANK"])
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


def writer(name: str, **options: Any) -> ftckpt.dcp.StorageWriter:
    options = {"events": silent, "chunk_bytes": CHUNK_BYTES, "deadline_s": 20} | options
    return ftckpt.dcp.StorageWriter(FOLDER / name, **options)


def reader(name: str, step: int | None = None) -> ftckpt.dcp.StorageReader:
    return ftckpt.dcp.StorageReader(FOLDER / name, step, events=silent)


def ok(case: str) -> None:
    dist.barrier()
    print(f"ok {case}", flush=True)


# --- a model whose sizes nothing divides ----------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 5))
        self.head = nn.Linear(5, 1)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(self.embed(tokens))).square().sum()


def build(kind: str, world: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    if kind == "fsdp":
        mesh = DeviceMesh("cpu", torch.arange(world))
        fully_shard(model.block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
    for _ in range(seed):
        model(torch.arange(7)).backward()
        optim.step()
        optim.zero_grad()
        model.seen += 1
    return model, optim


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Whole tensors by name, put together by torch."""
    found = {"seen": model.seen.clone(), "lr": torch.tensor(optim.param_groups[0]["lr"])}
    for name, parameter in model.named_parameters():
        found[name] = full(parameter)
        for key, value in optim.state[parameter].items():
            found[f"{name}.{key}"] = full(value)
    return found


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), (what, found.keys() ^ wanted.keys())
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), (what, name)
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor))
        assert torch.equal(left, right), (what, name, other, tensor)


KINDS = [("plain", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4)]
WANTED: dict[str, dict[str, torch.Tensor]] = {}


def extras(world: int) -> dict[str, Any]:
    """What is no tensor: common values, and each rank's own under a key of its own."""
    stream = io.BytesIO(b"abc")
    stream.seek(2)
    return {
        "step": 12,
        "stream": stream,
        "large": list(range(20_000)),
        **{f"dp_rank_{rank}": {"cursor": rank * 10, "bytes": bytes([rank]) * 3} for rank in range(world)},
    }


def save_model(kind: str, world: int) -> None:
    model, optim = build(kind, world, seed=2)
    name = f"{kind}{world}"
    WANTED[name] = full_state(model, optim)
    model_state, optim_state = get_state_dict(model, optim)
    state = {"model": model_state, "optim": optim_state, "train": extras(world)}
    target = writer(name)
    if world % 2:
        dcp.save(state, storage_writer=target, checkpoint_id="step-5")
    else:  # the live state goes on while it is saved
        saving = dcp.async_save(state, storage_writer=target, checkpoint_id="step-5")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        saving.result(30)
    ok(f"saved {name}")


def load_models(kind: str, world: int) -> None:
    for old, old_world in KINDS:
        saved, here = f"{old}{old_world}", f"{kind}{world}"
        model, optim = build(kind, world, seed=1)
        model_state, optim_state = get_state_dict(model, optim)
        own = f"dp_rank_{RANK % old_world}"
        state = {
            "model": model_state,
            "optim": optim_state,
            "train": {"step": 0, "stream": None, "large": None, own: {"cursor": None, "bytes": None}},
        }
        dcp.load(state, storage_reader=reader(saved))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        found = full_state(model, optim)
        if RANK == 0:
            same(found, WANTED[saved], f"{saved} to {here}")
        train, wanted = state["train"], extras(old_world)
        assert (train["stream"].tell(), train["stream"].getvalue()) == (2, b"abc")
        assert train.items() >= {k: wanted[k] for k in ("step", "large", own)}.items(), train
        ok(f"{saved} to {here}")


# --- meshes of two dimensions ---------------------------------------------------------------------

SHAPES = [(2,), (3,), (5, 7), (1, 4)]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def save_meshes() -> None:
    """G1: shards of two dimensions, some of them empty. G3: tensor parallel and FSDP2 at once. G4: numbers
    are their places.
    """
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Any] = {
        "x".join(map(str, shape)): distribute_tensor(numbered(*shape), mesh, [Shard(0), Shard(0)])
        for shape in SHAPES
    }
    state["columns"] = distribute_tensor(numbered(6, 5), mesh, [Shard(1), Shard(0)])
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 16, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(numbered(16, 4))
    parallelize_module(model, two["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=two["dp"])
    dcp.save({"mesh": state, "rows": model.state_dict()}, storage_writer=writer("mesh"))
    ok("saved meshes")


def load_meshes(world: int) -> None:
    state: dict[str, Any] = {
        "mesh": {"x".join(map(str, shape)): torch.zeros(shape) for shape in SHAPES},
        "rows": {"0.weight": torch.zeros(16, 4)},
    }
    state["mesh"]["columns"] = torch.zeros(6, 5)
    if world > 1:
        mesh = DeviceMesh("cpu", torch.arange(world))
        state["mesh"]["columns"] = distribute_tensor(torch.zeros(6, 5), mesh, [Shard(1)])
        state["rows"]["0.weight"] = distribute_tensor(torch.zeros(16, 4), mesh, [Shard(0)])
    dcp.load(state, storage_reader=reader("mesh"))
    found = {name: full(tensor) for part in state.values() for name, tensor in part.items()}
    wanted = {"x".join(map(str, shape)): numbered(*shape) for shape in SHAPES}
    same(found, wanted | {"columns": numbered(6, 5), "0.weight": numbered(16, 4)}, f"meshes to {world}")
    ok(f"meshes to {world}")


# --- when something goes wrong on one rank --------------------------------------------------------


def small(fill: float) -> dict[str, Any]:
    """A tensor that all ranks share out, and one of each rank."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "shared": distribute_tensor(torch.full((64,), fill), mesh, [Shard(0)]),
        f"own{RANK}": torch.full((8,), fill),
        "n": fill,
    }


def failed(state: dict[str, Any], target: ftckpt.dcp.StorageWriter, step: int) -> dict[int, BaseException]:
    """The errors by rank, which must be the same on all ranks."""
    try:
        dcp.save(state, storage_writer=target, checkpoint_id=step)
    except CheckpointException as error:
        return {rank: found[0] for rank, found in error.failures.items()}
    raise AssertionError("the save did not fail")


def steps_of(name: str) -> list[tuple[int, str]]:
    with ftckpt.open(FOLDER / name) as run:
        return [(entry.at.step, entry.status) for entry in run.entries()]


def one_rank_fails() -> None:
    """Rank 1 cannot put its packs in the first save, rank 0 its commit in the second."""
    plans = {
        0: [Fault(Fail(error=AccessDenied("no", op="create", key="commits")), "create", "commits/", nth=2)],
        1: [Fault(Fail(error=AccessDenied("no", op="create", key="packs")), "create", "packs/", nth=2)],
    }
    store = FaultyStore(open_store(FOLDER / "fails"), plans[RANK])
    target = writer("fails", store=store)
    dcp.save(small(1.0), storage_writer=target, checkpoint_id=1)

    errors = failed(small(2.0), target, 2)
    assert set(errors) == {1} and isinstance(errors[1], AccessDenied), errors
    dist.barrier()
    assert steps_of("fails") == [(2, "aborted"), (1, "readable")], steps_of("fails")

    errors = failed(small(3.0), target, 3)
    assert set(errors) == {0} and isinstance(errors[0], AccessDenied), errors
    dist.barrier()
    assert steps_of("fails") == [(3, "aborted"), (2, "aborted"), (1, "readable")]

    dcp.save(small(4.0), storage_writer=target, checkpoint_id=4)
    state = small(0.0)
    dcp.load(state, storage_reader=reader("fails"))
    assert (state["n"], full(state["shared"]).mean()) == (4.0, 4.0)
    with ftckpt.open(FOLDER / "fails") as run:
        assert run.verify() == [] and run.latest().attempt == 1
    ok("one rank fails")


def other_settings() -> None:
    """A11: the ranks are told different steps, then different runs."""
    target = writer("settings")
    dcp.save(small(1.0), storage_writer=target, checkpoint_id=1)
    errors = failed(small(2.0), target, 2 + RANK)
    assert set(errors) == {1} and isinstance(errors[1], SettingsDiffer), errors
    assert "rank 1 has 3, the coordinator 2" in str(errors[1]), errors[1]
    errors = failed(small(2.0), writer(f"settings{RANK or ''}"), 4)
    assert set(errors) == {1} and isinstance(errors[1], SettingsDiffer), errors
    assert not (FOLDER / "settings1").exists(), "another run that is there would have been touched"
    ok("other settings")


def own_disks() -> None:
    """G9: every machine has a folder of that name to itself."""
    target = writer("disk", store=_Claimed(open_store(FOLDER / f"disk{RANK}"), "disk://run"))
    errors = failed(small(1.0), target, 1)
    assert set(errors) == {0} and "shares of g0.1." in str(errors[0]), errors
    ok("own disks")


class _Claimed:
    """A store that has another address than it says."""

    def __init__(self, inner: Any, uri: str) -> None:
        self._inner, self.uri = inner, uri

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def coordinator_chooses() -> None:
    """Each rank looks at the newest step, and they see different ones: all read that of the coordinator."""
    target = writer("choice")
    for step in (1, 2):
        dcp.save(small(float(step)), storage_writer=target)
    state = small(0.0)
    dcp.load(state, storage_reader=reader("choice", 1 + RANK))
    assert (state["n"], full(state["shared"]).mean(), state[f"own{RANK}"].mean()) == (1.0, 1.0, 1.0)
    ok("coordinator chooses")


def another_process() -> None:
    """DCP's checkpoint process is sent the writer anew for every save: they are one attempt."""
    target = writer("process")
    for step in (1, 2):
        saving = dcp.async_save(
            small(float(step)),
            storage_writer=target,
            checkpoint_id=step,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        saving.result(60)
    state = small(0.0)
    dcp.load(state, storage_reader=reader("process"))
    assert (state["n"], full(state["shared"]).mean()) == (2.0, 2.0)
    with ftckpt.open(FOLDER / "process") as run:
        assert [(c.step, c.attempt) for c in run.commits()] == [(2, 1), (1, 1)]
    ok("another process")


# --- when a rank is killed ------------------------------------------------------------------------


def killed(name: str, ranks: tuple[int, int], victim: int, prefix: str) -> None:
    """The victim is killed at its second create below the prefix: in the save of step 2. Ends this process."""
    store = dist.PrefixStore(name, LINK)
    dist.init_process_group("gloo", store=store, rank=ranks.index(RANK), world_size=2)
    plan = [Fault(Kill(), "create", prefix, nth=2)] if victim == RANK else []
    target = writer(name, store=FaultyStore(open_store(FOLDER / name), plan))
    mesh = init_device_mesh("cpu", (2,))
    try:
        for step in (1, 2):
            tensor = distribute_tensor(torch.full((64,), float(step)), mesh, [Shard(0)])
            dcp.save({"t": tensor, "n": step}, storage_writer=target, checkpoint_id=step)
            print("saved", name, step, flush=True)
    except RuntimeError as error:
        print("heard of", name, str(error).splitlines()[0], flush=True)
    LINK.set(f"heard of {name}", "")
    if RANK == 0:  # the others need the store in this process
        LINK.wait(["heard of killed share", "heard of killed commit"])
    os._exit(0)


def main() -> None:
    for kind, world in KINDS:
        with job(world) as inside:
            if inside:
                save_model(kind, world)
    for kind, world in KINDS:
        with job(world) as inside:
            if inside:
                load_models(kind, world)
    with job(4):
        save_meshes()
    for world in (1, 3, 4):
        with job(world) as inside:
            if inside:
                load_meshes(world)
    with job(2) as inside:
        if inside:
            for case in (one_rank_fails, other_settings, own_disks, coordinator_chooses, another_process):
                case()
    if RANK in (2, 3):
        killed("killed share", (2, 3), 3, "packs/")
    killed("killed commit", (1, 0), 1, "commits/")


if __name__ == "__main__":
    FOLDER = Path(sys.argv[1])
    LINK = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 4, is_master=RANK == 0)
    main()
