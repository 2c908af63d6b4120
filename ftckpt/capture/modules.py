"""Modules: every tensor of a module under one name that no wrapper changes.

Knows what ``torch.compile``, activation checkpointing and DDP put into names and takes it out; that
one parameter under two names is one leaf; and that a value which ``state_dict()`` made up on the way
(extra state, hooks) has to go back through the module, not through memory.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from ftckpt import values
from ftckpt.capture.parts import fresh_like, local_of
from ftckpt.capture.tensors import can_fill
from ftckpt.capture.tree import MODULES, Draft, Filling, Inflating, Within, flatten, fresh_plain, malformed
from ftckpt.values import TensorRef, joined

_WRAPPERS: dict[str, str] = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.ActivationWrapper": "_checkpoint_wrapped_module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
}
"""Classes that add themselves to names, and what they add. By name: most are never imported."""

_FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel"
_EXTRA = "_extra_state"


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One item of a module's state. ``key`` is torch's name, ``path`` ours, both without the component.

    ``home`` and ``attribute`` say where it lives. ``live``: it is the parameter or buffer itself,
    so bytes can be put straight into it.
    """

    key: str
    path: str
    value: Any
    home: nn.Module
    attribute: str
    live: bool

    @property
    def is_extra(self) -> bool:
        return self.attribute == _EXTRA


@dataclass(frozen=True, slots=True, eq=False)
class ModuleView:
    """A module as it is now: its entries in order, and the full name of every parameter by identity."""

    component: str
    module: nn.Module
    entries: tuple[Entry, ...]
    parameters: Mapping[int, tuple[str, nn.Parameter]]


def view_module(component: str, module: nn.Module) -> ModuleView:
    """Look at a module. Changes nothing but what ``state_dict()`` does: FSDP2 goes back to its shards."""
    for name, inner in module.named_modules():
        if _FSDP1 in _class_names(type(inner)):
            values.refuse(
                inner, values.joined(component, name), "FSDP1 is not supported; use fully_shard (FSDP2)"
            )
    asks = inspect.signature(module.state_dict).parameters  # a class may have its own state_dict
    keeps = "keep_vars" in asks or any(p.kind is p.VAR_KEYWORD for p in asks.values())
    state: Mapping[str, Any] = module.state_dict(keep_vars=True) if keeps else module.state_dict()
    entries = tuple(_entry(module, key, value) for key, value in state.items())
    parameters: dict[int, tuple[str, nn.Parameter]] = {}
    paths = {entry.key: entry.path for entry in entries if entry.live}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        path = paths[key] if key in paths else _locate(module, key)[0]
        parameters.setdefault(id(parameter), (f"{component}.{path}", parameter))
    return ModuleView(component, module, entries, parameters)


def capture_module(draft: Draft, view: ModuleView, within: Within, owned: frozenset[int]) -> Any:
    """The module's tree: our path -> reference, or value for extra state. ``owned``: ids that an optimizer owns."""
    tree: dict[str, Any] = {}
    for entry in view.entries:
        path = f"{view.component}.{entry.path}"
        if entry.path in tree:
            values.refuse(entry.value, path, "two entries have that name once wrappers are taken out of it")
        if isinstance(entry.value, torch.Tensor):
            lazy = id(entry.value) in owned
            tree[entry.path] = draft.tensor(view.component, path, entry.value, within, lazy=lazy)
        else:
            tree[entry.path] = flatten(draft, view.component, path, entry.value, within)
    return tree


def fill_module(filling: Filling, view: ModuleView, tree: Any) -> None:
    """Want every tensor in place; what does not live in memory goes through the module in ``finish``."""
    if not isinstance(tree, dict):
        malformed(view.component, "a module's tree is no dict")
    component, module = view.component, view.module
    taken = [entry for entry in view.entries if filling.takes(f"{component}.{entry.path}")]
    given = {id(entry.value) for entry in taken if entry.path in tree}
    asked = [e.path for e in taken if e.path in tree or id(e.value) not in given]  # a tie is filled once
    _compare(filling, component, asked, [path for path in tree if filling.takes(f"{component}.{path}")])
    detour: dict[str, Any] = {}
    leaf_of: dict[int, str] = {}
    inflating = Inflating(filling, component, MODULES, False, fresh_plain)
    for entry in view.entries:
        if entry.path not in tree or not filling.takes(f"{component}.{entry.path}"):
            continue
        node, path = tree[entry.path], f"{component}.{entry.path}"
        if entry.is_extra:
            value = inflating.walk(node, entry.value, path)
            filling.then(MODULES, component, partial(entry.home.set_extra_state, value))
        elif not isinstance(entry.value, torch.Tensor):
            detour[entry.key] = inflating.walk(node, entry.value, path)
        elif not isinstance(node, TensorRef):
            filling.changed.append(f"{path}: saved as a {type(node).__name__}, live is a tensor")
        elif not entry.live:
            spec = filling.spec(node)
            if spec is not None and filling.fits(spec, entry.value, path):
                detour[entry.key] = inflating.walk(node, entry.value, path)
        elif leaf_of.setdefault(id(entry.value), node.name) != node.name:
            filling.changed.append(
                f"{path}: tied to {leaf_of[id(entry.value)]} here, but saved apart from it"
            )
        else:
            _fill_tensor(filling, component, entry, node, path)
    if detour:
        filling.then(MODULES, component, lambda: _load(module, view, detour))


def _fill_tensor(filling: Filling, component: str, entry: Entry, ref: TensorRef, path: str) -> None:
    spec = filling.spec(ref)
    if spec is None or not filling.fits(spec, entry.value, path):
        return
    if can_fill(local_of(entry.value)):
        filling.claim(spec.name, entry.value)
        filling.want(spec, entry.value)
        return
    dtype = filling.dtype_of(spec, entry.value, path)
    fresh = fresh_like(entry.value, dtype).contiguous()  # expanded memory cannot hold what was saved
    filling.want_fresh(spec, fresh)

    def put() -> None:
        entry.value.data = fresh

    filling.then(MODULES, component, put)


def _compare(filling: Filling, component: str, live: list[str], saved: list[str]) -> None:
    saved_set, live_set = set(saved), set(live)
    filling.lacks([f"{component}.{path}" for path in live if path not in saved_set])
    filling.leaves([f"{component}.{path}" for path in saved if path not in live_set])


def _load(module: nn.Module, view: ModuleView, detour: dict[str, Any]) -> None:
    """Give the module a whole state dict, the parts already in place being themselves."""
    state = {e.key: detour.get(e.key, e.value) for e in view.entries if not e.is_extra}
    found = module.load_state_dict(state, strict=False)
    lost = [key for key in (*found.unexpected_keys, *found.missing_keys) if key in detour]
    if lost:
        raise ValueError(f"load_state_dict() did not take {', '.join(lost)}, which state_dict() gave")


def _entry(module: nn.Module, key: str, value: Any) -> Entry:
    path, home, attribute = _locate(module, key)
    live = isinstance(value, torch.Tensor) and getattr(home, attribute, None) is value
    return Entry(key, path, value, home, attribute, live)


def _locate(root: nn.Module, key: str) -> tuple[str, nn.Module, str]:
    """Our path for a key of ``state_dict``, the module it ends in and the attribute it names there.

    A wrapper's part is dropped where a wrapper's class stands, so a user's own submodule called
    ``module`` keeps its name. Some wrappers take their part out of the keys themselves.
    """
    home, left, kept = root, key.split("."), []
    while True:
        inner = _wrapped(home)
        if inner is not None:
            name, home = inner
            if len(left) > 1 and left[0] == name:
                left = left[1:]
            continue
        child = getattr(home, left[0], None) if len(left) > 1 else None
        if not isinstance(child, nn.Module):
            break
        kept.append(left[0])
        home, left = child, left[1:]
    attribute = ".".join(left)
    path = values.path_part((kept or left)[0])
    for part in [*kept, *left][1:]:
        path = joined(path, part)
    return path, home, attribute


def _wrapped(module: nn.Module) -> tuple[str, nn.Module] | None:
    kind: Any = type(module)  # mypy does not take classes of modules for hashable
    attribute = _wraps_as(kind)
    return (attribute, module.get_submodule(attribute)) if attribute else None


@lru_cache(maxsize=4096)
def _wraps_as(kind: type) -> str | None:
    return next((_WRAPPERS[name] for name in _class_names(kind) if name in _WRAPPERS), None)


def _class_names(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        yield f"{base.__module__}.{base.__qualname__}"
