"""A tiny trainer with every kind of state, and ways to compare it bit for bit and to damage its run."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import torch

import ftckpt
from ftckpt.capture.rng import generators
from ftckpt.events import Event

SAMPLES, BATCH = 64, 8


class Cursor:
    """Shuffled sample numbers, epoch after epoch; the order of an epoch is drawn when it begins."""

    def __init__(self) -> None:
        self.epoch, self.at, self.order = 0, SAMPLES, []
        self.loads = 0

    def next_ids(self) -> list[int]:
        if self.at == SAMPLES:
            self.epoch, self.at, self.order = self.epoch + 1, 0, torch.randperm(SAMPLES).tolist()
        self.at += BATCH
        return self.order[self.at - BATCH : self.at]

    def state_dict(self) -> dict:
        return {"epoch": self.epoch, "at": self.at, "order": list(self.order)}

    def load_state_dict(self, state: dict) -> None:
        self.epoch, self.at, self.order = state["epoch"], state["at"], list(state["order"])
        self.loads += 1


class Toy:
    """An actor, AdamW with two groups, a schedule, a data cursor, a tensor buffer and plain values."""

    def __init__(self, seed: int = 0, width: int = 6) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - trainers draw from the global one
        self.actor = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.LayerNorm(width), torch.nn.Linear(width, 3)
        )
        weights = [p for p in self.actor.parameters() if p.ndim > 1]
        others = [p for p in self.actor.parameters() if p.ndim <= 1]
        self.optim = torch.optim.AdamW(
            [{"params": weights, "weight_decay": 0.1}, {"params": others, "lr": 0.02}], lr=0.01
        )
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda n: 1 / (1 + n))
        self.cursor = Cursor()
        self.state = {
            "actor": self.actor,
            "optim": self.optim,
            "sched": self.sched,
            "cursor": self.cursor,
            "buffer": {"rewards": torch.zeros(5, 2), "marks": np.zeros(3), "log": []},
        }

    def train(self, step: int) -> tuple:
        """One step; returns what a log would show: (step, sample ids, learning rate)."""
        ids = self.cursor.next_ids()
        lr = self.optim.param_groups[0]["lr"]
        x = torch.randn(BATCH, 4) + random.random() + float(np.random.rand())  # noqa: NPY002
        loss = (self.actor(x) - torch.tensor(ids, dtype=torch.float32)[:, None] / SAMPLES).square().mean()
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.sched.step()
        buffer = self.state["buffer"]
        buffer["rewards"] += loss.detach()
        buffer["marks"][step % 3] = loss.item()
        buffer["log"].append((step, ids[0]))
        return step, tuple(ids), lr

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every live tensor by name."""
        found = {f"actor.{name}": p.detach() for name, p in self.actor.named_parameters()}
        for name, p in self.actor.named_parameters():
            found.update({f"optim.{name}.{key}": value for key, value in self.optim.state.get(p, {}).items()})
        return {**found, "rewards": self.state["buffer"]["rewards"]}

    def plain(self) -> dict[str, str]:
        """Everything else, printed; floats print exactly."""
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optim.param_groups]
        buffer = self.state["buffer"]
        return {
            "groups": repr(groups),
            "sched": repr(sorted((k, v) for k, v in self.sched.state_dict().items() if k != "lr_lambdas")),
            "cursor": repr(self.cursor.state_dict()),
            "buffer": repr((buffer["marks"].tolist(), buffer["log"])),
            "rng": repr(generators()),
        }

    def bits(self) -> dict[str, object]:
        """All of it, so that equal means equal bit for bit."""
        return {**{name: raw(t) for name, t in self.tensors().items()}, **self.plain()}


def raw(tensor: torch.Tensor) -> tuple:
    return (
        str(tensor.dtype),
        tuple(tensor.shape),
        tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
    )


class Heard(list):
    """Events, kept."""

    def __call__(self, event: Event) -> None:
        self.append(event)

    def named(self, name: str) -> list[dict]:
        return [event.fields for event in self if event.name == name]


def run(uri: str | Path, until: int, toy: Toy | None = None, **options) -> Toy:
    """Train to step ``until`` inside a session."""
    toy = toy or Toy()
    options = {"save_every": 10, "events": Heard()} | options
    with ftckpt.Session(uri, toy.state, **options) as session:
        for step in session.steps(until=until):
            toy.train(step)
    return toy


def straight(until: int) -> Toy:
    """The same training without sessions, stops or saves."""
    toy = Toy()
    for step in range(1, until + 1):
        toy.train(step)
    return toy


def objects(folder: Path, *prefixes: str) -> list[str]:
    """The keys of a run, in order; only those that begin with one of ``prefixes``, when given."""
    keys = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    return [key for key in keys if not prefixes or key.startswith(prefixes)]


def of_step(folder: Path, step: int, attempt: int = 1) -> list[str]:
    """The packs, fragments and the commit record that one save wrote."""
    return objects(
        folder,
        f"packs/{attempt:06d}/{step:012d}/",
        f"fragments/{attempt:06d}/{step:012d}/",
        f"commits/{step:012d}-{attempt:06d}",
    )


def copy_with(folder: Path, place: Path, key: str, body: bytes | None) -> Path:
    """A copy of a run in which the object ``key`` holds ``body``, or is gone."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    (place / key).unlink()
    if body is not None:
        (place / key).write_bytes(body)
    return place
