"""A live state of zeros to restore into, and whether what came back is what was saved."""

from __future__ import annotations

import torch

from benchmarks.save.measure import Cost, Numbers
from benchmarks.save.state import State, make_state

Tensors = dict[str, torch.Tensor]


def blank(size_bytes: int) -> State:
    """The state, its pages touched and all its tensors zero."""
    state = make_state(size_bytes)
    for tensor in state.tensors.values():
        tensor.zero_()
    return state


def check(tensors: Tensors, size_bytes: int, steps: int = 0) -> None:
    """Every bit is that of the state which was saved, trained for so many steps before."""
    state = make_state(size_bytes)
    for _ in range(steps):
        state.train()
    for name, saved in state.tensors.items():
        assert torch.equal(tensors[name].view(torch.uint8), saved.view(torch.uint8)), name


def restore_numbers(cost: Cost) -> Numbers:
    return {"restore_s": cost.seconds, "cpu_s": cost.cpu_s, "extra_bytes": cost.extra_bytes}
