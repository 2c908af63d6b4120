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
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import ftckpt
from ftckpt.elastic.launch import Launch
from ftckpt.errors import (
    Diverged,
    FtckptError,
    SaveError,
    StateMismatch,
    StepNotFound,
    UnsupportedValue,
    WorldSizeMismatch,
)
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
        _clear_sharding_prop_cache()  # it keeps meshes, and they the names of groups that are no more
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


# --- a model whose sizes nothing divides, an optimizer with two groups, and what goes with them --------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.block = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 5))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 1)
        self.spare = nn.Linear(5, 2).requires_grad_(False)
        self.register_buffer("seen", torch.tensor(0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.block(self.embed(tokens)))).square().sum()


@dataclass
class Job:
    """What is trained: ``spare`` never is, and so has no state in the optimizer."""

    model: nn.Module
    optim: torch.optim.Optimizer
    sched: torch.optim.lr_scheduler.LRScheduler
    buffer: dict

    @property
    def bare(self) -> nn.Module:
        return self.model.module if isinstance(self.model, DistributedDataParallel) else self.model

    @property
    def state(self) -> dict:
        return {"actor": self.model, "optim": self.optim, "sched": self.sched, "buffer": self.buffer}


def build(kind: str, world: int, seed: int) -> Job:
    """A job of that layout. A seed fills it with other numbers."""
    torch.manual_seed(seed)
    model = lay_out(kind, world, Model())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.02}]
    optim = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    sched = torch.optim.lr_scheduler.LambdaLR(optim, lambda n: 1 / (1 + n))
    return Job(model, optim, sched, {"rewards": torch.full((3,), float(seed)), "log": [seed], "n": seed})


def lay_out(kind: str, world: int, model: nn.Module) -> nn.Module:
    plan = {"block.0": ColwiseParallel(), "block.1": RowwiseParallel()}
    line = DeviceMesh("cpu", torch.arange(world))
    match kind:
        case "ddp":
            return DistributedDataParallel(model)
        case "fsdp":
            shard(model, line)
        case "tp":
            parallelize_module(model, line, plan)
        case "hsdp":
            shard(model, init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard")))
        case "dp_tp" | "fsdp_tp":
            mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
            parallelize_module(model, mesh["tp"], plan)
            if kind == "fsdp_tp":
                shard(model, mesh["dp"])
    return model


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full_state(job: Job) -> dict[str, torch.Tensor]:
    """Whole tensors by name, put together by torch; and the rest as tensors too."""
    found = {}
    names = {}
    for name, parameter in job.bare.named_parameters():
        names[parameter] = name
        found[name] = full(parameter)
        for key, value in job.optim.state.get(parameter, {}).items():
            found[f"{name}.{key}"] = full(value)
    found["seen"] = job.bare.seen.clone()
    for number, group in enumerate(job.optim.param_groups):
        for parameter in group["params"]:
            found[f"{names[parameter]}.group"] = torch.tensor([number, group["lr"], group["weight_decay"]])
    found["sched"] = torch.tensor([job.sched.last_epoch, *job.sched.base_lrs])
    found["buffer"] = torch.tensor([*job.buffer["rewards"].tolist(), *job.buffer["log"], job.buffer["n"]])
    return found


def step_once(job: Job) -> None:
    """A step on one batch, the same on every rank."""
    job.model(torch.arange(7)).backward()
    job.optim.step()
    job.sched.step()
    job.optim.zero_grad()
    job.bare.seen += 1
    job.buffer["rewards"] += 0.5
    job.buffer["log"].append(int(job.bare.seen))


def step_with_same_gradient(job: Job) -> None:
    """A step whose gradient is given, so that it is the same for any number of ranks."""
    for number, parameter in enumerate(job.bare.parameters()):
        whole = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape) / (number + 1)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = whole
    job.optim.step()
    job.sched.step()


def same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == wanted.keys(), (what, found.keys() ^ wanted.keys())
    for name, tensor in wanted.items():
        other = found[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape), (what, name)
        left, right = (t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor))
        assert torch.equal(left, right), (what, name, other, tensor)


# --- the cases: each saves in one job and is restored in others -----------------------------------

OLD = [("plain", 1), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3), ("fsdp", 4), ("ddp", 3)]
NEW = [("tp", 2), ("hsdp", 4), ("dp_tp", 4), ("fsdp_tp", 4)]
KINDS = OLD + NEW
WANTED: dict[str, dict[str, torch.Tensor]] = {}
"""What rank 0 saw when it saved, by case."""


def save_model(kind: str, world: int) -> None:
    job = build(kind, world, seed=1)
    step_once(job)
    step_once(job)
    name = f"{kind}{world}"
    WANTED[name] = full_state(job)
    save(name, job.state, world)
    step_once(job)
    WANTED[f"{name} trained on"] = full_state(job)


def load_models(kind: str, world: int) -> None:
    """Every saved layout, restored here. Nothing depends on what was live before."""
    for old, old_world in KINDS:
        saved, here = f"{old}{old_world}", f"{kind}{world}"
        job = build(kind, world, seed=2)
        if old_world % 2:  # a live optimizer that has moments of its own, and one without
            step_once(job)
        restored(saved, job.state, world)
        check(full_state(job), saved, f"{saved} to {here}")
        if saved == here:
            step_once(job)
            check(full_state(job), f"{saved} trained on", f"next step of {saved}")
        else:
            step_with_same_gradient(job)
            found = full_state(job)
            WANTED.setdefault(f"{saved} stepped", found)
            check(found, f"{saved} stepped", f"next step after {saved} to {here}")


def load_once(world: int) -> None:
    """``ftckpt.restore`` on all ranks of a sharded state: one step for all, refused for all."""
    kind = "fsdp" if world > 1 else "plain"
    job = build(kind, world, seed=2)
    commit = ftckpt.restore(FOLDER / "fsdp_tp4", {"actor": job.model, "optim": job.optim})
    assert commit.step == 1
    found = {name: full(parameter) for name, parameter in job.bare.named_parameters()}
    if RANK == 0:
        same(found, {name: WANTED["fsdp_tp4"][name] for name in found}, "once")
    with raises(StepNotFound, "step 7"):
        ftckpt.restore(FOLDER / "fsdp_tp4", {"actor": job.model}, step=7)
    print(f"ok once on {world}", flush=True)


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


class Loader:
    """The samples that are left to this rank, dealt out anew when the number of ranks changes."""

    def __init__(self, ids: Sequence[int] = (), epoch: int = 0) -> None:
        self.ids, self.epoch = torch.tensor(list(ids)), epoch

    def state_dict(self) -> dict:
        return {"ids": self.ids, "epoch": self.epoch}

    def load_state_dict(self, state: dict) -> None:
        self.ids, self.epoch = state["ids"], state["epoch"]

    def reshard(self, states, *, group: str, rank: int, world: int) -> None:
        assert group == "g0" and list(states) == [f"g0.{old}" for old in range(len(states))]
        (self.epoch,) = {state["epoch"] for state in states.values()}
        left = torch.cat([state["ids"] for state in states.values()]).sort().values
        self.ids = left[rank::world]


def loader_state(loader: Loader, on_resize: str) -> dict:
    return {"w": torch.zeros(3), "data": {"loader": 1}, "loader": ftckpt.PerRank(loader, on_resize)}


def save_loader(world: int) -> None:
    """G6: every rank has another number of samples left."""
    ids = range(100 * RANK, 100 * RANK + 5 + RANK)
    save(f"loader{world}", loader_state(Loader(ids, epoch=3), "error"), world)


def load_loader(saved: int, world: int) -> None:
    mine = Loader([-1])
    if world != saved:
        with raises(WorldSizeMismatch, r"loader: saved by g0\.0, .*or 'reseed'"):
            restored(f"loader{saved}", loader_state(mine, "error"), world)
        assert mine.ids.tolist() == [-1]
        heard: list = []
        restored(f"loader{saved}", loader_state(mine, "reseed"), world, events=heard.append)
        assert mine.ids.tolist() == [-1] and "not restored, because the ranks differ" in str(heard)
    restored(f"loader{saved}", loader_state(mine, "merge"), world)
    assert mine.epoch == 3
    everybodys: list = [None] * world
    dist.all_gather_object(everybodys, mine.ids.tolist())
    all_ids = [one for rank in range(saved) for one in range(100 * rank, 100 * rank + 5 + rank)]
    assert sorted(itertools.chain(*everybodys)) == all_ids, everybodys
    if saved == 2:  # what was dealt out is each rank's own from now on
        save(f"loader2to{world}", loader_state(mine, "error"), world)
        restored(f"loader2to{world}", loader_state(own := Loader(), "error"), world)
        assert own.ids.tolist() == mine.ids.tolist() and own.epoch == 3
    if RANK == 0:
        print(f"ok G6 {saved} to {world}", flush=True)


def undeclared(world: int) -> None:
    """G5, G8: what differs between ranks and is not declared so is refused at the save, by name."""
    drifted = torch.ones(6)
    drifted.view(torch.uint8)[5] ^= RANK  # one bit, on rank 1
    for case, odd in {
        "list": {"items": list(range(1 + 4 * RANK))},
        "number": {"n": 0.5 + RANK},
        "bit": {"w": drifted},
        "shape": {"w": torch.ones(2, 3) if RANK else torch.ones(3, 2)},
        "name": {"w": torch.ones(2)} | ({"more": torch.ones(2)} if RANK else {}),
        "mark": {"p": ftckpt.PerRank([1]) if RANK else [1]},
    }.items():
        with (
            raises(Diverged, r"odd.*PerRank"),
            session(f"odd {case}", {"w": torch.ones(2), "odd": odd}, world),
        ):
            pass
        print(f"ok undeclared {case}", flush=True)
    marked = ftckpt.PerRank([1]) if RANK else [1]
    with raises(SaveError, "do not cover odd"), session("odd component", {"odd": marked}, world):
        pass
    print("ok undeclared component", flush=True)
    declared = {"items": ftckpt.PerRank(list(range(1 + 4 * RANK))), "w": ftckpt.PerRank(drifted)}
    save("declared", declared, world)
    live = {"items": ftckpt.PerRank([]), "w": ftckpt.PerRank(torch.zeros(6))}
    restored("declared", live, world)
    assert live["items"].value == list(range(1 + 4 * RANK))
    same({"w": live["w"].value}, {"w": drifted}, "declared")
    print("ok declared", flush=True)


def drifting(world: int) -> None:
    """G8: replicas of a shard, and what tensor parallelism left whole, that differ in one bit."""
    for kind, name in (("hsdp", "block.0.weight"), ("fsdp_tp", "norm.weight"), ("tp", "embed.weight")):
        job = build(kind, world, seed=1)
        parameter = job.bare.get_parameter(name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if RANK == 2:
            local.detach().reshape(-1).view(torch.int32)[0] ^= 1
        with raises(Diverged, rf"actor\.{name}"), session(f"drift {kind}", job.state, world):
            pass
        print(f"ok G8 {kind}", flush=True)


def staged() -> None:
    """A pipeline of two stages, each sharded by FSDP2 over two ranks: no state that all ranks hold."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = RANK // 2

    def pipeline(kind: str, layer: nn.Linear) -> dict:
        module = nn.Sequential(OrderedDict({f"layer{stage}" if kind == "names" else "layer": layer}))
        fully_shard(module, mesh=mesh["dp"])
        return {"actor": module, "n": 1}

    torch.manual_seed(0)
    for kind, layer, told in (
        ("names", nn.Linear(4, 4), r"ranks 0, 1: actor\.layer0\..*ranks 2, 3: actor\.layer1\."),
        (
            "shapes",
            nn.Linear(4 + stage, 4),
            r"ranks 0, 1: .* float32\[4, 4\].*ranks 2, 3: .* float32\[4, 5\]",
        ),
    ):
        with raises(StateMismatch, told + ".*stages"), session(f"pp {kind}", pipeline(kind, layer), 4):
            pass
        assert not objects_of(f"pp {kind}")
        print(f"ok staged {kind}", flush=True)
    torch.manual_seed(stage)
    with raises(Diverged, r"actor\.layer\..*stages of a pipeline"):
        save("pp values", pipeline("values", nn.Linear(4, 4)), 4)
    print("ok staged values", flush=True)
    torch.manual_seed(0)
    save("replicas", pipeline("values", nn.Linear(4, 4)), 4)
    print("ok staged replicas", flush=True)


def unlike(world: int) -> None:
    """Plain modules with another layer on one rank, as experts that one rank has; declared, they are saved."""

    def experts() -> nn.ModuleDict:
        return nn.ModuleDict({str(expert): nn.Linear(2, 2) for expert in range(1 + RANK)})

    told = r"ranks 0: nothing that the others lack\n  ranks 1: moe\.1\.bias float32\[2\], moe\.1\.weight"
    with raises(StateMismatch, told), session("unlike", {"moe": experts()}, world):
        pass
    assert not objects_of("unlike")
    save("unlike", {"moe": ftckpt.PerRank(experts())}, world)
    print("ok unlike", flush=True)


SCALARS = [torch.tensor(1.5), torch.tensor(-7), torch.tensor(True), torch.tensor(0.1, dtype=torch.bfloat16)]


def scalars(world: int, fill: bool) -> dict:
    """E6: tensors of no dimension, plain and on a mesh."""
    mesh = DeviceMesh("cpu", torch.arange(world))
    plain = [one.clone() if fill else torch.zeros_like(one) for one in SCALARS]
    placed = [DTensor.from_local(one.clone(), mesh, [Replicate()], run_check=False) for one in plain]
    return {"t": {"plain": plain, "placed": placed if world > 1 else [one.clone() for one in plain]}}


def load_scalars(world: int) -> None:
    state = scalars(world, fill=False)
    restored("scalars", state, world)
    for found in state["t"].values():
        for one, wanted in zip(found, SCALARS, strict=True):
            same({"t": full(one)}, {"t": wanted}, "scalars")
    if RANK == 0:
        print(f"ok E6 2 to {world}", flush=True)


def objects_of(name: str) -> set[str]:
    return {str(p.relative_to(FOLDER / name)) for p in (FOLDER / name).rglob("*") if p.is_file()}


def main() -> None:
    for world in WORLDS:
        with job(world) as inside:
            if inside:
                save_all(world)
    for world in WORLDS:
        with job(world) as inside:
            if inside:
                load_all(world)


def save_all(world: int) -> None:
    for kind, ranks in KINDS:
        if ranks == world:
            save_model(kind, world)
    if world == 2:
        refuse_pieces(world)
        save("own", per_rank(world), world)
        save("scalars", scalars(world, fill=True), world)
        save_loader(world)
        undeclared(world)
        unlike(world)
    if world == 4:
        save_uneven()
        save_tensor_parallel()
        save("indexed", {"actor": indexed(4, fill=True)}, 4)
        save_loader(world)
        drifting(world)
        staged()


def load_all(world: int) -> None:
    for kind, ranks in KINDS:
        if ranks == world:
            load_models(kind, world)
    load_once(world)
    load_uneven(world)
    load_indexed(world)
    for saved in (2, 4):
        load_loader(saved, world)
    if world == 1:
        load_tensor_parallel()
    if world < 4:
        load_per_rank(world)
    if world < 3:
        load_scalars(world)


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    main()
