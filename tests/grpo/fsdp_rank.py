"""One rank of a sharded group. Trains the same run alone, sharded, and sharded again from a resume
in its middle; prints what it found as one JSON line."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ftckpt.integrations.grpo import GRPOTrainer
from ftckpt.integrations.grpo.digest import digests
from tests.grpo.conftest import SMALL, Remembered

warnings.filterwarnings("error", message="FSDP2")
torch.use_deterministic_algorithms(True)
torch.set_num_threads(1)
CONFIG = replace(SMALL, steps=3, slots=2, warmup_sft_steps=10)


def trained(steps=CONFIG.steps):
    trainer = GRPOTrainer(replace(CONFIG, steps=steps), metrics=Remembered())
    trainer.train()
    return trainer


def figures(trainer):
    return [
        {k: v for k, v in one.items() if k not in {"step_s", "groups"}} for _, one in trainer._metrics.lines
    ]


alone = trained()
dist.init_process_group("gloo")
first, again = trained(), trained(steps=2)
again.config = first.config
again.train()
batch = first.buffer.state_dict()["batch"]
everybodys = [torch.empty_like(batch) for _ in range(dist.get_world_size())]
dist.all_gather(everybodys, batch)
parameters = [*first.actor.parameters(), *first.critic.parameters(), *first.reference.parameters()]
found = {
    "sharded": all(isinstance(p, DTensor) for p in parameters),
    "moments_sharded": all(isinstance(s["exp_avg"], DTensor) for s in first.optim.state.values()),
    "repeats": digests(first) == digests(again),
    "buffer": hashlib.sha256(batch.numpy().tobytes()).hexdigest(),
    "buffer_full": bool(batch.any()),
    "buffer_equal": all(other.equal(batch) for other in everybodys),
    "slots_generated": first.slots_generated,
    "digests": digests(first),
    "alone": figures(alone),
    "figures": figures(first),
}
print(json.dumps(found), flush=True)
dist.barrier()
dist.destroy_process_group()
