"""A tiny trainer's state, for processes and for the undisturbed run that they are compared with."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor

from ftckpt.slots import Alone

SLOTS = 8


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class State:
    """A model with a buffer, AdamW and a scheduler; healed in place."""

    def __init__(self, world: int, *, fsdp: bool) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.GELU(), torch.nn.Linear(33, 9))
        self.model.register_buffer("finished", torch.zeros((), dtype=torch.int64))
        if fsdp:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (world,))
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

    def components(self) -> dict[str, object]:
        """As a session takes them."""
        return {"model": self.model, "optim": self.optim, "scheduler": self.scheduler}

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


def undisturbed(steps: int) -> dict[int, str]:
    """Digest after each step of one group that nothing ever happens to."""
    state, group, digests = State(1, fsdp=False), Alone(SLOTS), {}
    for step in range(1, steps + 1):
        turn = group.begin(step)
        batch = group.exchange(turn, {slot: payload(step, slot) for slot in turn.slots})
        total = group.reduce(turn, lambda s: state.slot_gradient(batch[s]), state.numel, torch.float32)  # noqa: B023
        state.apply(total / SLOTS)
        digests[step] = state.digest()
    return digests
