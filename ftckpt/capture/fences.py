"""Hooks that are told before captured memory changes: optimizer steps and ``load_state_dict``.

The step hook is process-wide, so an optimizer that is not part of the state but owns a captured
parameter is noticed as well, on whatever thread it steps. In-place version counters are not relied
on: fused optimizers do not raise them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftckpt.capture.marks import Frozen, PerRank
from ftckpt.capture.parts import local_of

Told = Callable[[str], None]


class Fences:
    """Installed hooks; ``remove`` takes them out again.

    ``before_change(what)`` is called on the thread that is about to change captured memory and may
    block it. ``foreign(what)`` hears, once an optimizer, of one that is not in the state but steps a
    captured parameter.
    """

    def __init__(self, state: Mapping[str, object], before_change: Told, foreign: Told) -> None:
        self._before_change = before_change
        self._foreign = foreign
        self._own: set[int] = set()
        self._memory: set[int] = set()
        self._verdicts: dict[int, tuple[Optimizer, bool]] = {}
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._before_step)]
        for name, value in state.items():
            self._watch(name, _unmarked(value))

    def remove(self) -> None:
        """Take all hooks out."""
        for handle in self._handles:
            with suppress(KeyError):
                handle.remove()
        self._handles = []

    def _watch(self, name: str, value: object) -> None:
        def loading(*_args: object) -> None:
            self._before_change(f"{name}.load_state_dict")

        if isinstance(value, torch.nn.Module):
            self._memory.update(_addresses(value.parameters()))
            for module in value.modules():
                self._handles.append(module.register_load_state_dict_pre_hook(loading))
        elif isinstance(value, Optimizer):
            self._own.add(id(value))
            self._handles.append(value.register_load_state_dict_pre_hook(loading))

    def _before_step(self, optimizer: Optimizer, _args: object, _kwargs: object) -> None:
        kind = type(optimizer).__name__
        if id(optimizer) in self._own:
            self._before_change(f"{kind}.step")
            return
        known = self._verdicts.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            touches = not self._memory.isdisjoint(_addresses(parameters))
            self._verdicts[id(optimizer)] = known = (optimizer, touches)
            if touches:
                self._foreign(f"{kind}.step")
        if known[1]:
            self._before_change(f"{kind}.step")


def _unmarked(value: object) -> object:
    while isinstance(value, Frozen | PerRank):
        value = value.value
    return value


def _addresses(parameters: Iterator[torch.Tensor]) -> Iterator[int]:
    """Where parameters' local memory is; identity alone would miss two views of one."""
    return (local_of(p).untyped_storage().data_ptr() for p in parameters)
