"""The state of a trainer as a few SHA-256 sums, to compare two runs bit for bit.

Shards are gathered first, so the sums do not depend on how the state lies over the ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ftckpt.integrations.grpo.trainer import GRPOTrainer


def digests(trainer: GRPOTrainer) -> dict[str, Any]:
    """What must be equal when two runs are. All ranks of a group call it together."""
    found: dict[str, Any] = {
        "step": trainer.counters.step,
        "actor": _of_tensors(_model(trainer.actor)),
        "reference": _of_tensors(_model(trainer.reference)),
        "optim": _of_tensors(_moments(trainer.actor, trainer.optim)),
        "buffer": _of_tensors(iter([("batch", trainer.buffer.state_dict()["batch"])])),
        "schedule": _of_values(trainer.schedule.state_dict()),
        "rng": _of_values([random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()]),  # noqa: NPY002
        "sampler": trainer.sampler.state_dict(),
        "counters": trainer.counters.state_dict(),
    }
    if trainer.critic is not None and trainer.critic_optim is not None:
        found["critic"] = _of_tensors(_model(trainer.critic))
        found["critic_optim"] = _of_tensors(_moments(trainer.critic, trainer.critic_optim))
    return found


def write_digests(path: Path, found: dict[str, Any]) -> None:
    """As JSON, whole or not at all: members of a run may write the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    spare = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    spare.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    spare.replace(path)


def _model(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.state_dict().items()


def _moments(model: nn.Module, optim: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """By parameter name; the settings of the groups come as one more tensor each."""
    for name, parameter in model.named_parameters():
        for key, value in sorted(optim.state[parameter].items() if parameter in optim.state else ()):
            yield f"{name}.{key}", value
    for group in optim.param_groups:
        for key, value in sorted(group.items()):
            if isinstance(value, float):
                yield key, torch.tensor(value, dtype=torch.float64)


def _of_tensors(tensors: Iterator[tuple[str, Tensor]]) -> str:
    sum_ = hashlib.sha256()
    for name, tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        flat = whole.detach().cpu().contiguous().reshape(-1)
        sum_.update(f"{name} {whole.dtype} {tuple(whole.shape)}\n".encode())
        sum_.update(flat.view(torch.uint8).numpy().tobytes())
    return sum_.hexdigest()


def _of_values(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()
