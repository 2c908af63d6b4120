"""Two ranks, each with its half of a value and all of a model, that save every step through tiers.

``pair.py FAR TIER``: one machine. ``pair.py FAR TIER apart``: TIER-0 and TIER-1, a machine each.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

import ftckpt
from ftckpt.events import Event

far, tier, *apart = sys.argv[1:]
rank = int(os.environ["RANK"])
if apart:
    tier = f"{tier}-{rank}"
    os.environ["LOCAL_RANK"] = "0"
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Linear(64, 64)
optim = torch.optim.AdamW(model.parameters(), fused=True)
mine = ftckpt.PerRank({"rank": torch.full((3,), float(rank))})


def events(event: Event) -> None:
    if event.name.startswith(("agent.", "session.agent", "save.failed")):
        print(event.name, event.fields, flush=True)


state = {"model": model, "optim": optim, "mine": mine}
with ftckpt.Session(far, state, tiers=[tier], save_every=1, keep=None, events=events, deadline_s=60) as ckpt:
    print("goes on from", ckpt.restored.step if ckpt.restored else None)
    for _ in ckpt.steps(until=ckpt.finished_step + 3):
        model(torch.ones(2, 64)).square().mean().backward()
        optim.step()
        optim.zero_grad()
    print("weights", float(model.weight.sum()), flush=True)
dist.destroy_process_group()
