"""One rank of one replica group that trains a tiny model by slots; prints a line for every step.

    elastic_train.py STEPS [plain|fsdp] [slot_delay_s]

The line is ``step N participants P hash H``: H covers parameters, both AdamW moments, the
scheduler's learning rate and a buffer that counts finished steps.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ftckpt.elastic import Launch, ReplicaGroup

SLOTS = 8


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class State:
    """A model with a buffer, AdamW and a scheduler; healed in place."""

    def __init__(self, launch: Launch, *, fsdp: bool) -> None:
        torch.manual_seed(0)
        self.launch = launch
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 9))
        self.model.register_buffer("finished", torch.zeros((), dtype=torch.int64))
        if fsdp:
            mesh = init_device_mesh("cpu", (launch.world,))
            for layer in (self.model[0], self.model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.params = list(self.model.parameters())
        self.optim = torch.optim.AdamW(self.params, lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optim, 0.1, 1.0, total_iters=50)
        for p in self.params:  # moments exist from the start, so that healing writes in place
            self.optim.state[p] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(p),
                "exp_avg_sq": torch.zeros_like(p),
            }

    @property
    def numel(self) -> int:
        return sum(local(p).numel() for p in self.params)

    def tensors(self) -> dict[str, Tensor]:
        found = {"finished": self.model.finished}
        for i, p in enumerate(self.params):
            found[f"{i}"] = local(p).detach()
            for name, value in self.optim.state[p].items():
                found[f"{i}.{name}"] = local(value)
        return found

    def save(self) -> dict[str, object]:
        plain = {
            "scheduler": self.scheduler.state_dict(),
            "lr": [group["lr"] for group in self.optim.param_groups],
        }
        return {**self.tensors(), "plain": json.dumps(plain).encode()}

    def load(self, state: dict[str, object]) -> None:
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(state[name])
        plain = json.loads(state["plain"])
        self.scheduler.load_state_dict(plain["scheduler"])
        for group, lr in zip(self.optim.param_groups, plain["lr"], strict=True):
            group["lr"] = lr

    def slot_gradient(self, x: Tensor) -> Tensor:
        for p in self.params:
            p.grad = None
        self.model(x).square().mean().backward()
        return torch.cat([local(p.grad).reshape(-1) for p in self.params])

    def apply(self, gradient: Tensor) -> None:
        at = 0
        for p in self.params:
            count = local(p).numel()
            local(p.grad).copy_(gradient[at : at + count].view_as(local(p)))
            at += count
        self.optim.step()
        self.scheduler.step()
        self.model.finished += 1

    def digest(self) -> str:
        digest = hashlib.sha256()
        for tensor in self.tensors().values():
            digest.update(tensor.contiguous().numpy().tobytes())
        digest.update(repr(self.scheduler.get_last_lr()).encode())
        return digest.hexdigest()[:16]


def payload(step: int, slot: int) -> Tensor:
    """A slot's batch: a function of step and slot alone."""
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(step * 1000 + slot))


def main() -> None:
    steps = int(sys.argv[1])
    fsdp = len(sys.argv) > 2 and sys.argv[2] == "fsdp"
    delay_s = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    torch.set_num_threads(1)
    launch = Launch.from_env()
    if fsdp:
        dist.init_process_group("gloo")
    state = State(launch, fsdp=fsdp)
    group = ReplicaGroup(launch, slots=SLOTS, heal_time_s=10.0)
    start = int(os.environ.get("START_STEP", "0"))
    group.open(step=start, heal=state)
    hold = os.environ.get("HOLD_FILE")
    share = slice(launch.rank * 4 // launch.world, (launch.rank + 1) * 4 // launch.world)
    step = start + 1
    while step <= steps:
        turn = group.begin(step)
        step = turn.step
        if step > steps:
            break
        if turn.healed:
            print(f"healed to {step - 1}", flush=True)
        batch = group.exchange(turn, {slot: payload(step, slot) for slot in turn.slots})

        def gradient(slot: int) -> Tensor:
            print(f"slot {slot} of step {step}", flush=True)  # noqa: B023
            while hold is not None and Path(hold).exists() and Path(hold).read_text() == f"{launch.group} {step}":  # noqa: B023
                time.sleep(0.01)  # held in the middle of a step until the test has killed us
            time.sleep(delay_s)
            return state.slot_gradient(batch[slot][share])  # noqa: B023

        total = group.reduce(turn, gradient, state.numel, torch.float32)
        if group.vote():
            state.apply(total / SLOTS)
            print(
                f"step {step} participants {len(turn.participants)} hash {state.digest()} "
                f"members {','.join(turn.participants)} digest {group.membership.digest()} "
                f"carries {group.carries}",
                flush=True,
            )
            step += 1
        else:
            print(f"failed vote on step {step}", flush=True)
    group.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
