"""Seeds derived from what a draw is for, never from how many draws came before it.

A seed is a hash of (run seed, purpose, step, prompt, sibling, …). So a draw is the same on any
rank of any world size, before and after a restart. This module keeps no generator.
"""

from __future__ import annotations

import random
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor


def derive(run_seed: int, *purpose: str | int) -> int:
    """63 bits that depend on every part and on its place."""
    text = "\x1f".join(str(part) for part in (run_seed, *purpose))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def uniforms(seed: int, count: int) -> Tensor:
    """``count`` float64 numbers in [0, 1). Philox's raw words are fixed by its definition, so these
    numbers do not change with the version of NumPy.
    """
    words = np.random.Philox(key=seed).random_raw(count)
    return torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def permutation(seed: int, size: int) -> list[int]:
    """The numbers below ``size`` in an order that only the seed decides."""
    return sorted(range(size), key=lambda item: (derive(seed, item), item))


def seed_everything(run_seed: int, step: int) -> None:
    """Set the generators of Python, NumPy and torch to the state that belongs to ``step``.

    Nothing in this trainer draws from them; a library might. Whatever it drew, and on however many
    members, a step begins and ends with the same states everywhere.
    """
    seed = derive(run_seed, "global", step)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 -- it is the legacy global generator that is meant
    torch.manual_seed(seed)
