"""Hooks that are told before captured memory changes: optimizer steps and ``load_state_dict``.

The step hook is process-wide, so an optimizer that is not part of the state but owns a captured
parameter is noticed as well, on whatever thread it steps. In-place version counters are not relied
on: fused optimizers do not raise them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ftckpt.capture.marks import is_frozen, unmarked
from ftckpt.capture.parts import local_of


class BeforeChange(Protocol):
    """Hears ``what`` is about to change captured memory, and whether that of frozen components."""

    def __call__(self, what: str, *, frozen_too: bool) -> None: ...


class Fences:
    """Installed hooks; ``remove`` takes them out again.

    ``before_change(what)`` is called on the thread that is about to change captured memory and may
    block it. ``foreign(what)`` hears, once an optimizer, of one that is not in the state but steps a
    captured parameter.

    ``updates`` counts, by component, the optimizer steps that had something to change in it: a
    gradient, and a learning rate that is not zero. Frozen components are not counted.
    """

    def __init__(
        self, state: Mapping[str, object], before_change: BeforeChange, foreign: Callable[[str], None]
    ) -> None:
        self._before_change = before_change
        self._foreign = foreign
        self._own: dict[int, str] = {}
        self._memory: set[int] = set()
        self._verdicts: dict[int, tuple[Optimizer, bool]] = {}
        self._components: dict[int, set[str]] = {}
        self._parts: dict[int, tuple[Optimizer, int, _Parts]] = {}
        self.updates: dict[str, int] = {}
        self._handles: list[Any] = [register_optimizer_step_pre_hook(self._before_step)]
        for name, value in state.items():
            self._watch(name, unmarked(value), learns=not is_frozen(value))

    def remove(self) -> None:
        """Take all hooks out."""
        for handle in self._handles:
            with suppress(KeyError):
                handle.remove()
        self._handles = []

    def _watch(self, name: str, value: object, *, learns: bool) -> None:
        def loading(*_args: object) -> None:
            self._before_change(f"{name}.load_state_dict", frozen_too=True)

        if isinstance(value, torch.nn.Module):
            self._memory.update(_addresses(value.parameters()))
            addresses = set(_addresses(value.parameters())) - {_NO_MEMORY}
            for address in addresses if learns else ():
                self._components.setdefault(address, set()).add(name)
            for module in value.modules():
                self._handles.append(module.register_load_state_dict_pre_hook(loading))
        elif isinstance(value, Optimizer):
            self._own[id(value)] = name
            self._handles.append(value.register_load_state_dict_pre_hook(loading))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> None:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first is the optimizer
        self._count(optimizer, has_closure=closure is not None)
        kind = type(optimizer).__name__
        if id(optimizer) in self._own:  # what it owns cannot be frozen
            self._before_change(f"{kind}.step", frozen_too=False)
            return
        known = self._verdicts.get(id(optimizer))
        if known is None or known[0] is not optimizer:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            touches = not self._memory.isdisjoint(_addresses(parameters))
            self._verdicts[id(optimizer)] = known = (optimizer, touches)
            if touches:
                self._foreign(f"{kind}.step")
        if known[1]:
            self._before_change(f"{kind}.step", frozen_too=True)

    def _count(self, optimizer: Optimizer, *, has_closure: bool) -> None:
        """Note which components this step means to change. A closure computes gradients later."""
        learning = {
            component
            for component, parts in self._parts_of(optimizer).items()
            if any(
                _learns(optimizer.param_groups[number])
                and (has_closure or any(p.grad is not None for p in parameters))
                for number, parameters in parts.items()
            )
        }
        if learning and id(optimizer) in self._own:
            learning.add(self._own[id(optimizer)])
        for component in learning:
            self.updates[component] = self.updates.get(component, 0) + 1

    def _parts_of(self, optimizer: Optimizer) -> _Parts:
        """What of which component an optimizer steps, by parameter group."""
        known = self._parts.get(id(optimizer))
        if known is not None and known[0] is optimizer and known[1] == len(optimizer.param_groups):
            return known[2]
        parts: _Parts = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter, address in zip(group["params"], _addresses(iter(group["params"])), strict=True):
                for component in self._components.get(address, ()):
                    parts.setdefault(component, {}).setdefault(number, []).append(parameter)
        self._parts[id(optimizer)] = (optimizer, len(optimizer.param_groups), parts)
        return parts


_NO_MEMORY = 0
"""The address of every empty shard."""

_Parts = dict[str, dict[int, list[torch.Tensor]]]
"""Parameters by component and by number of the optimizer's parameter group."""


def _learns(group: Mapping[str, Any]) -> bool:
    """Whether its learning rate is not zero. One on a device is not waited for."""
    lr = group.get("lr", 1.0)
    if isinstance(lr, torch.Tensor) and lr.device.type != "cpu":
        return True
    return float(lr) != 0.0


def _addresses(parameters: Iterator[torch.Tensor]) -> Iterator[int]:
    """Where parameters' local memory is; identity alone would miss two views of one."""
    return (local_of(p).untyped_storage().data_ptr() for p in parameters)
