"""The random number generators of Python, NumPy and torch, as one plain value."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch

from ftckpt.capture.tensors import as_bytes_view

COMPONENT = "rng"


def generators() -> dict[str, Any]:
    """The state of every generator, as numbers and bytes. Draws nothing, starts no device."""
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 — the global one is what trainers draw from
        "torch": bytes(as_bytes_view(torch.get_rng_state())),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = [bytes(as_bytes_view(one)) for one in torch.cuda.get_rng_state_all()]
    return state


def resume_generators(state: dict[str, Any]) -> None:
    """Make every generator go on where ``generators`` saw it."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(_byte_tensor(state["torch"]))
    if same_devices(state):
        for device, one in enumerate(state.get("cuda", ())):
            torch.cuda.set_rng_state(_byte_tensor(one), device)


def same_devices(state: dict[str, Any]) -> bool:
    """Whether the saved generators of CUDA devices fit the devices that are here."""
    saved = len(state.get("cuda", ()))
    return saved in (0, torch.cuda.device_count())


def reseed(run_seed: int, step: int, rank: int) -> None:
    """Seed every generator from (run seed, step, rank): the same three give the same draws anywhere."""
    digest = hashlib.blake2b(f"{run_seed}:{step}:{rank}".encode(), digest_size=48).digest()
    random.seed(int.from_bytes(digest[:16], "little"))
    np.random.seed(np.frombuffer(digest[16:32], dtype=np.uint32))  # noqa: NPY002
    torch.manual_seed(int.from_bytes(digest[32:40], "little") >> 1)


def _byte_tensor(raw: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint8).copy())
