"""Two ranks that restore what one process saved, under other names and in another dtype, into FSDP2's shards.

    renamed_shards.py RUN

The run holds ``actor`` with a part ``module`` in its names, and ``optim``. Prints ``ok`` when every
parameter and moment, put together by torch itself, is the saved one, cast by torch itself.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ftckpt
from ftckpt.plan.asked import asked
from ftckpt.restoring import restore_into

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

dist.init_process_group("gloo")
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(torch.bfloat16)
fully_shard(model)
optim = torch.optim.AdamW(model.parameters(), lr=0.5)
with ftckpt.open(sys.argv[1]) as run:
    saved = dict(run.tensors())
    wish = asked(rename={"module.": ""}, dtype={"actor": torch.bfloat16})
    state = {"actor": model, "optim": optim}
    done = restore_into(run.store, run.latest(), state, rank=RANK, world=WORLD, subset=True, asked=wish)

for name, parameter in model.named_parameters():
    old = f"actor.module.{name}"
    assert torch.equal(parameter.full_tensor(), saved[old].to(torch.bfloat16)), name
    for key in ("exp_avg", "exp_avg_sq"):
        moment = optim.state[parameter][key]
        assert moment.to_local().shape == parameter.to_local().shape
        assert torch.equal(moment.full_tensor(), saved[f"optim.state.{old}.{key}"]), (name, key)
assert optim.param_groups[0]["lr"] == 0.01
assert len(done.casts) == 4

plain = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
fully_shard(plain)
with torch.no_grad():
    plain(torch.zeros(1, 5))  # leaves whole parameters behind, and they are shards all the same
ftckpt.restore(sys.argv[1], {"actor": plain}, rename={"module.": ""})
for name, parameter in plain.named_parameters():
    assert torch.equal(parameter.full_tensor(), saved[f"actor.module.{name}"]), name
print("ok", flush=True)
dist.barrier()
dist.destroy_process_group()
