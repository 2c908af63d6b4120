"""Four ranks that save a state together, and any number of them that restore it: what each asks the store for.

    sharded_reads.py RUN

Rank 0 prints, per number of ranks and rank, what was read and what could have been needed, as JSON. Every rank
compares what came back with what torch put together before.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import ftckpt
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.events import silent
from ftckpt.restoring import restore_into

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def made(ranks: int, seed: int) -> dict[str, object]:
    """A sharded model with moments, a small head that every rank has, and what is each rank's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32))
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(ranks))))
    optim = torch.optim.AdamW(model.parameters(), lr=0.5 + seed)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    optim.step()
    head = {"w": torch.rand(()), "plain": seed}
    own = ftckpt.PerRank({"key": torch.full((5,), float(RANK + seed)), "at": RANK + seed}, on_resize="reseed")
    return {"actor": model, "optim": optim, "head": head, "own": own}


def whole(state: dict[str, object]) -> dict[str, torch.Tensor]:
    model, optim, head = state["actor"], state["optim"], state["head"]
    found = {name: tensor.full_tensor() for name, tensor in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments = optim.state[parameter]
        found |= {f"{name}.{key}": moments[key].full_tensor() for key in ("exp_avg", "exp_avg_sq")}
        found[f"{name}.step"] = moments["step"].clone()
    return found | {"head": head["w"].clone()}


dist.init_process_group("gloo")
state = made(WORLD, 1)
with ftckpt.Session(sys.argv[1], state, events=silent) as session:
    session.save(1).wait(60)
    expected = whole(state)
dist.barrier()
told: dict[str, object] = {}
for ranks in (4, 3, 2, 1):
    group = dist.new_group(list(range(ranks)))
    # every rank of the job makes every mesh; those outside of it have no part in it
    if ranks > RANK:
        live = made(ranks, 7)
        with ftckpt.open(sys.argv[1]) as run:
            commit = run.commit(1)
            counted = FaultyStore(run.store)
            done = restore_into(
                counted, commit, live, rank=RANK, world=ranks, groups=1, internal="ftckpt", events=silent
            )
        reads = Counter(call.key.partition("/")[0] for call in counted.log if call.op == "read")
        same = whole(live)
        assert all(torch.equal(same[name], expected[name]) for name in expected), (ranks, RANK)
        assert live["head"]["plain"] == 1 and live["optim"].param_groups[0]["lr"] == 1.5
        mine = live["own"].value
        assert mine["at"] == (RANK + 1 if ranks == WORLD else RANK + 7), mine
        assert torch.equal(mine["key"], torch.full((5,), float(mine["at"])))
        assert done.rng_restored is (ranks == WORLD)
        fragments = [call.key for call in counted.log if call.key.startswith("fragments/")]
        each = {"rank": RANK, "fragments": fragments, "packs": reads["packs"]}
        gathered: list[object] = [None] * ranks
        dist.all_gather_object(gathered, each, group)
        told[str(ranks)] = gathered
    dist.barrier()
if RANK == 0:
    print("told " + json.dumps(told), flush=True)
dist.destroy_process_group()
