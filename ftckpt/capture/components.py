"""The components of a state: their names, marks and kinds, alike for a save and a restore."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from ftckpt import values
from ftckpt.capture import rng
from ftckpt.capture.marks import Frozen, PerRank, unmarked
from ftckpt.capture.modules import ModuleView, view_module
from ftckpt.capture.optimizers import ParameterNames, is_plain_optimizer, owned_ids
from ftckpt.capture.parts import is_dtensor
from ftckpt.capture.tree import LiveLeaf
from ftckpt.errors import UnsupportedValue
from ftckpt.leaf import LeafSpec

Kind = Literal["module", "optimizer", "scheduler", "object", "tree"]


@dataclass(frozen=True, slots=True, eq=False)
class Component:
    """One named object of the state, taken out of its marks. ``name`` is escaped, ready for leaves."""

    name: str
    value: Any
    kind: Kind
    frozen: bool
    per_rank: PerRank[Any] | None
    holder: Frozen[Any] | PerRank[Any] | MutableMapping[str, object] | None
    key: str

    @property
    def can_replace(self) -> bool:
        return self.holder is not None

    def replace(self, value: object) -> None:
        """Put another object in its place: into its mark, or into the state itself."""
        if isinstance(self.holder, (Frozen, PerRank)):
            self.holder.value = value
        else:
            assert self.holder is not None, self.name
            self.holder[self.key] = value


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """All components, with what has to be known about modules before optimizers make sense."""

    components: tuple[Component, ...]
    views: Mapping[str, ModuleView]
    names: ParameterNames
    owned: frozenset[int]


def survey(state: Mapping[str, object]) -> Survey:
    """Look at a state once. The only thing it runs is ``state_dict()`` of modules.

    Raises:
        UnsupportedValue: a component whose name or class cannot be saved.
    """
    components = tuple(_component(state, key, value) for key, value in state.items())
    views = {c.name: view_module(c.name, c.value) for c in components if c.kind == "module"}
    optimizers = [c.value for c in components if isinstance(c.value, torch.optim.Optimizer)]
    owned = frozenset(key for optimizer in optimizers for key in owned_ids(optimizer))
    names = ParameterNames([views[name] for name in sorted(views)])  # whatever order the state is listed in
    return Survey(components, views, names, owned)


def _component(state: Mapping[str, object], key: object, value: Any) -> Component:
    if type(key) is not str or key == rng.COMPONENT:
        reserved = f"the name {key!r} is taken by the random number generators, which are always saved"
        raise UnsupportedValue(
            f"cannot save component {key!r}: "
            f"{reserved if key == rng.COMPONENT else 'names of components are str'}\n"
            "  nothing was written or changed\n"
            "  give the component another name",
            leaf=str(key),
        )
    values.check(key, leaf=f"(component {key!r})")
    holder: Any = state if isinstance(state, MutableMapping) else None
    frozen, per_rank = False, None
    while isinstance(value, (Frozen, PerRank)):
        if isinstance(value, PerRank):
            if per_rank is not None:
                values.refuse(value, values.path_part(key), "a PerRank inside a PerRank")
            per_rank = value
        else:
            frozen = True
        holder, value = value, value.value
    return Component(values.path_part(key), value, kind_of(value), frozen, per_rank, holder, key)


def kind_of(value: object) -> Kind:
    """How the state of a component is asked for."""
    if isinstance(value, nn.Module):
        return "module"
    if is_plain_optimizer(value):
        return "optimizer"
    if isinstance(value, LRScheduler):
        return "scheduler"
    has_both = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
    return "object" if has_both and not isinstance(value, type) else "tree"


def module_leaves(state: Mapping[str, object], leaves: Iterable[LiveLeaf]) -> dict[str, LeafSpec]:
    """The tensors among ``leaves``, captured from ``state``, that modules of it hold, by name."""
    modules = {
        values.path_part(key) for key, value in state.items() if isinstance(unmarked(value), nn.Module)
    }
    tensors = (leaf.holding.leaf for leaf in leaves if leaf.holding.leaf.kind == "tensor")
    return {leaf.name: leaf for leaf in tensors if leaf.name.partition("@")[0].partition(".")[0] in modules}


def has_shards(state: Mapping[str, object]) -> bool:
    """Whether other ranks hold parts of it: a DTensor is among its modules, optimizers or nested values."""
    return _has_shards(state.values(), set())


def _has_shards(found: Iterable[object], seen: set[int]) -> bool:
    for value in map(unmarked, found):
        if is_dtensor(value):
            return True
        if id(value) in seen:
            continue
        seen.add(id(value))
        inner: Iterable[object] = ()
        if isinstance(value, nn.Module):
            value.state_dict()  # FSDP2 goes back to its shards, also from a forward without gradients
            inner = [*value.parameters(), *value.buffers()]
        elif isinstance(value, torch.optim.Optimizer):
            inner = [parameter for group in value.param_groups for parameter in group["params"]]
        elif isinstance(value, Mapping):
            inner = value.values()
        elif isinstance(value, (list, tuple, deque)):
            inner = value
        if _has_shards(inner, seen):
            return True
    return False
