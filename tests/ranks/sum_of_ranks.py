"""Each rank contributes its number; prints the sum. With ``hang`` the last rank never takes part."""

from __future__ import annotations

import sys
import threading

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
print("joined", flush=True)
if "hang" in sys.argv[1:] and rank == world_size - 1:
    threading.Event().wait()
total = torch.tensor(rank)
dist.all_reduce(total)
print("sum", total.item(), flush=True)
dist.destroy_process_group()
