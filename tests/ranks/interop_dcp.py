"""Two ranks load a DCP folder into their halves of each tensor, by rows or by columns, and compare.

interop_dcp.py FOLDER EXPECTED
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

folder, expected = sys.argv[1:]
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
wanted = load_file(expected)
state = {
    name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(number % tensor.ndim)])
    for number, (name, tensor) in enumerate(wanted.items())
}
dcp.load(state, checkpoint_id=folder)
for name, tensor in state.items():
    assert torch.equal(tensor.full_tensor(), wanted[name]), name
print("equal")
dist.destroy_process_group()
