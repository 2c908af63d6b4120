"""Two FSDP2 ranks whose optimizer steps while a save of theirs has not read a byte.

session_fences.py FOLDER fenced|unfenced     prints which optimizers' saves hold the values of the call
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import ftckpt
from ftckpt.errors import SaveError
from ftckpt.events import silent
from ftckpt.session import core

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "single": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
}


class Job:
    """Seven rows over two ranks: shards of four and of three."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 7))
        fully_shard(self.model[0])
        fully_shard(self.model)
        self.optim = OPTIMIZERS[kind](self.model.parameters())

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.optim.step()

    def whole(self) -> dict[str, torch.Tensor]:
        """Parameters and their state, gathered."""
        found = {name: p.full_tensor().detach().clone() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optim.state[p].items():
                if isinstance(value, torch.Tensor) and value.ndim:
                    found[f"{name} {key}"] = value.full_tensor().clone()
        return found


def keeps(folder: Path, kind: str) -> bool:
    """Whether a save whose reading was held back until after three steps has the values of its call."""
    job, held = Job(kind), [False]
    with ftckpt.Session(
        folder,
        {"actor": job.model, "optim": job.optim},
        events=silent,
        yield_to=lambda: held[0],
    ) as session:
        job.step()
        expected = job.whole()
        held[0] = True
        handle = session.save(1)
        for _ in range(3):
            job.step()
        held[0] = False
        try:
            handle.wait(60)
        except SaveError:  # the version counter told
            return False
        dist.barrier()
    fresh = Job(kind)
    fresh.step()
    ftckpt.restore(folder, {"actor": fresh.model, "optim": fresh.optim}, step=1)
    found = fresh.whole()
    assert found.keys() == expected.keys() and len(found) > 4
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def main() -> None:
    dist.init_process_group("gloo")
    if sys.argv[2] == "unfenced":
        core.Session._before_change = lambda _self, _what, **_: None
    kept = [kind for kind in OPTIMIZERS if keeps(Path(sys.argv[1], kind), kind)]
    print("as it was:", *(kept or ["none"]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
