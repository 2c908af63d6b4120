"""Optimizers: state by the names of parameters, never by position.

Knows ``param_groups`` and ``state``, and reads and writes them directly: ``Optimizer.state_dict`` is
positional, and ``load_state_dict`` casts moments to the dtype of their parameters. A name comes from
the identity of a parameter over all captured modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ftckpt import values
from ftckpt.capture.modules import ModuleView
from ftckpt.capture.parts import Where, fresh_like, is_dtensor, local_of
from ftckpt.capture.tensors import fresh_tensor
from ftckpt.capture.tree import OPTIMIZERS, Draft, Filling, Fresh, Inflating, Within, flatten, malformed
from ftckpt.errors import UnsupportedValue
from ftckpt.leaf import LeafSpec
from ftckpt.values import TensorRef

_KEPT_LIVE = frozenset({"params", "param_names"})
"""Entries of a group that a restore leaves alone: the live parameters and their order."""
_SCHEDULED = frozenset({"initial_lr", "max_lr", "min_lr", "swa_lr", "base_momentum", "max_momentum"})
"""Entries that schedules add to groups."""


class ParameterNames:
    """``component.fqn`` of every parameter of the captured modules, by identity."""

    def __init__(self, views: Sequence[ModuleView]) -> None:
        self._views = views  # keeps the parameters alive, so that their ids stay theirs
        self._by_id: dict[int, str] = {}
        for view in views:
            for key, (name, _) in view.parameters.items():
                self._by_id.setdefault(key, name)

    def group(self, component: str, optimizer: Optimizer, index: int) -> list[str]:
        """The names of the parameters of one group, in its order."""
        parameters = optimizer.param_groups[index]["params"]
        return [
            self.of(parameter, f"{component}.param_groups.{index}.params.{place}")
            for place, parameter in enumerate(parameters)
        ]

    def of(self, parameter: torch.Tensor, where: str) -> str:
        name = self._by_id.get(id(parameter))
        if name is None:
            raise UnsupportedValue(
                f"cannot save {where}: a parameter of shape {tuple(parameter.shape)} that belongs to no captured module\n"
                "  an optimizer's state goes by the names of its parameters, and this one has none\n"
                "  nothing was written or changed; earlier commits are untouched\n"
                "  put the module that owns it into the state as well",
                leaf=where,
                shape=tuple(parameter.shape),
            )
        return name


def is_plain_optimizer(value: object) -> bool:
    """An optimizer whose whole state is ``state`` and ``param_groups``. One that overrides
    ``state_dict`` has more to say, and is asked for it like any other object.
    """
    return isinstance(value, Optimizer) and type(value).state_dict is Optimizer.state_dict


def owned_ids(optimizer: Optimizer) -> Iterator[int]:
    """The ids of the parameters that only this optimizer's steps change."""
    return (id(parameter) for group in optimizer.param_groups for parameter in group["params"])


def capture_optimizer(
    draft: Draft, component: str, optimizer: Optimizer, names: ParameterNames, within: Within
) -> Any:
    """The tree ``{"state": {parameter: …}, "other": {key: …}, "param_groups": […]}``."""
    groups: list[Any] = []
    state: dict[str, Any] = {}
    other: dict[Any, Any] = {}
    live: dict[Any, Any] = optimizer.state  # some optimizers keep entries under keys that are no tensors
    for index, group in enumerate(optimizer.param_groups):
        path = f"{component}.param_groups.{index}"
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append(
            flatten(draft, component, path, hyper, within)
            | {"params": names.group(component, optimizer, index)}
        )
    for key, value in live.items():
        if isinstance(key, torch.Tensor):
            name = names.of(key, f"{component}.state.(a parameter in no group)")
            if value:  # reading an absent one leaves an empty one behind
                path = f"{component}.state.{name}"
                _refuse_local_shapes(key, value, path, draft.where)
                state[name] = flatten(draft, component, path, value, within, lazy=True)
        else:
            path = values.joined(f"{component}.other", key)
            other[key] = flatten(draft, component, path, value, within)
    ordered = dict(sorted(state.items()))  # which parameter was trained first is nobody's business
    return {"state": ordered, "other": other, "param_groups": groups}


def fill_optimizer(
    filling: Filling, component: str, optimizer: Optimizer, names: ParameterNames, tree: Any
) -> None:
    """Want every state tensor, in place where it exists; hyper-parameters follow in ``finish``."""
    _check_tree(component, tree)
    saved_groups, path = tree["param_groups"], f"{component}.param_groups"
    live_names = [names.group(component, optimizer, index) for index in range(len(optimizer.param_groups))]
    asked_for = filling.takes(path) or filling.reaches_into(path)
    if asked_for:  # without their settings groups may be anything: state goes by name
        if len(saved_groups) != len(live_names):
            filling.changed.append(f"{path}: {len(saved_groups)} saved, {len(live_names)} live")
            return
        _compare_groups(filling, component, [group["params"] for group in saved_groups], live_names)
    known = {name for group in saved_groups for name in group["params"]}
    for index, group in enumerate(optimizer.param_groups):
        settings = group
        if filling.takes(f"{path}.{index}"):
            settings = saved_groups[index]
            _compare_settings(filling, f"{path}.{index}", settings, group, optimizer.defaults)
            _fill_group(filling, component, index, settings, group)
        for name, parameter in zip(live_names[index], group["params"], strict=True):
            if not filling.takes(f"{component}.state.{name}"):
                continue
            if name not in known and not asked_for:
                filling.lacks([f"{component}.state.{name}"], "begins anew")
            if name not in known or _is_reshaped(filling, component, name, parameter):
                filling.then(OPTIMIZERS, component, partial(_drop, optimizer, parameter))
            else:
                saved = tree["state"].get(name)
                _fill_state(filling, component, optimizer, parameter, name, saved, settings)
    grouped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if filling.takes(f"{component}.other"):
        _fill_ungrouped(filling, component, optimizer, tree["other"], grouped)


def _check_tree(component: str, tree: Any) -> None:
    if not isinstance(tree, dict) or not {"state", "other", "param_groups"} <= set(tree):
        malformed(component, "an optimizer's tree lacks its parts")
    if not (isinstance(tree["state"], dict) and isinstance(tree["other"], dict)):
        malformed(component, "an optimizer's state is no dict")
    groups = tree["param_groups"]
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        malformed(component, "an optimizer's groups are no list of dicts")
    for group in groups:
        names = group.get("params")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            malformed(component, "an optimizer's group names no parameters")


def _compare_groups(
    filling: Filling, component: str, saved: Sequence[Sequence[str]], live: Sequence[Sequence[str]]
) -> None:
    """State goes by name wherever its parameter is; settings and schedules go by the number of a group."""
    path = f"{component}.param_groups"
    saved_at, live_at = _group_of(saved), _group_of(live)
    missing = [f"{path}.{index}: {name}" for name, index in live_at.items() if name not in saved_at]
    extra = [f"{path}.{index}: {name}" for name, index in saved_at.items() if name not in live_at]
    moved = [
        f"{name} was in group {saved_at[name]} when saved and is in group {index} here"
        for name, index in live_at.items()
        if saved_at.get(name, index) != index
    ]
    if moved and sorted(map(sorted, saved)) == sorted(map(sorted, live)):
        order = ", ".join(str(saved_at[group[0]]) if group else "an empty one" for group in live)
        filling.changed.append(
            f"{path}: the saved groups in another order: here they are {order}; give the optimizer its groups "
            "in the order in which they were saved, or their settings and schedules would change places"
        )
    elif filling.strict:
        filling.changed += [f"{path}: {line}" for line in moved]
    else:
        filling.notes += [
            f"{path}: {line}; its state is kept, its settings are that group's" for line in moved
        ]
    filling.lacks(missing, "begins anew")
    filling.leaves(extra)


def _is_reshaped(filling: Filling, component: str, name: str, parameter: torch.Tensor) -> bool:
    """Whether the saved state was made for another shape than the parameter has here, and that is let pass."""
    owner, _, path = name.partition(".")
    record: Any = filling.trees.get(owner)
    tree = record.get("tree") if isinstance(record, dict) else None
    ref = tree.get(path) if isinstance(tree, dict) else None
    spec = filling.saved.get(ref.name) if isinstance(ref, TensorRef) else None
    if filling.strict or spec is None or spec.shape == tuple(parameter.shape):
        return False
    filling.notes.append(f"begins anew, as its parameter has another shape: {component}.state.{name}")
    return True


def _compare_settings(
    filling: Filling,
    path: str,
    saved: Mapping[str, Any],
    live: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> None:
    """Settings that only one side has may come and go with versions; on both sides they are of another class."""
    foreign = sorted(set(saved) - set(live) - _KEPT_LIVE - _SCHEDULED)
    lacking = sorted(set(defaults) - set(saved))
    if foreign and lacking:
        line = f"{path}: saved by another kind of optimizer: with {', '.join(foreign)}, without {', '.join(lacking)}"
        (filling.changed if filling.strict else filling.notes).append(line)


def _group_of(groups: Sequence[Sequence[str]]) -> dict[str, int]:
    return {name: index for index, names in enumerate(groups) for name in names}


def _fill_group(
    filling: Filling, component: str, index: int, saved: Mapping[str, Any], group: dict[str, Any]
) -> None:
    """Set all saved hyper-parameters. One that only the live group has (a newer torch's) stays."""
    path = f"{component}.param_groups.{index}"
    inflating = Inflating(filling, component, OPTIMIZERS, True, _fresh_hyper)
    hyper = {
        key: inflating.walk(node, group.get(key), values.joined(path, key), key)
        for key, node in saved.items()
        if key not in _KEPT_LIVE
    }
    filling.notes += [
        f"kept as it is, not in the checkpoint: {values.joined(path, key)}"
        for key in group
        if key not in saved and key not in _KEPT_LIVE
    ]
    filling.then(OPTIMIZERS, component, lambda: group.update(hyper))


def _fill_state(
    filling: Filling,
    component: str,
    optimizer: Optimizer,
    parameter: torch.Tensor,
    name: str,
    saved: Any,
    group: Mapping[str, Any],
) -> None:
    if saved is None:  # never stepped when it was saved: whatever state it has now is stale
        filling.then(OPTIMIZERS, component, lambda: _drop(optimizer, parameter))
        return
    inflating = Inflating(filling, component, OPTIMIZERS, True, _fresh_state(parameter, group))
    built = inflating.walk(saved, dict(optimizer.state.get(parameter, {})), f"{component}.state.{name}")

    def put() -> None:
        optimizer.state[parameter] = built

    filling.then(OPTIMIZERS, component, put)


def _fill_ungrouped(
    filling: Filling, component: str, optimizer: Optimizer, other: Mapping[Any, Any], grouped: set[int]
) -> None:
    """State under keys of the optimizer's own; and what belongs to no group any more goes."""
    inflating = Inflating(filling, component, OPTIMIZERS, True, _fresh_hyper)
    state: dict[Any, Any] = optimizer.state
    live = {key: value for key, value in state.items() if not isinstance(key, torch.Tensor)}
    built = {
        key: inflating.walk(node, live.get(key), values.joined(f"{component}.other", key), key)
        for key, node in other.items()
    }

    def put() -> None:
        for key in [k for k in state if id(k) not in grouped]:
            del state[key]
        state.update(built)

    filling.then(OPTIMIZERS, component, put)


def _drop(optimizer: Optimizer, parameter: torch.Tensor) -> None:
    optimizer.state.pop(parameter, None)


def _fresh_state(parameter: torch.Tensor, group: Mapping[str, Any]) -> Fresh:
    def make(spec: LeafSpec, _live: object, key: object) -> torch.Tensor:
        if key == "step":  # as torch has it
            on_device = bool(group.get("capturable") or group.get("fused"))
            return fresh_tensor(spec.shape, spec.dtype, parameter.device if on_device else "cpu")
        if spec.shape == tuple(parameter.shape):
            return fresh_like(parameter, spec.dtype)
        return fresh_tensor(spec.shape, spec.dtype, parameter.device)

    return make


def _fresh_hyper(spec: LeafSpec, live: object, _key: object) -> torch.Tensor:
    device = live.device if isinstance(live, torch.Tensor) else "cpu"
    return fresh_tensor(spec.shape, spec.dtype, device)


def _refuse_local_shapes(parameter: torch.Tensor, state: Any, path: str, where: Where) -> None:
    """A plain tensor that has the shape of this rank's part only is not the same on every rank."""
    if not is_dtensor(parameter) or where.world == 1 or not isinstance(state, Mapping):
        return
    local = local_of(parameter).shape
    for key, value in state.items():
        if (
            isinstance(value, torch.Tensor)
            and not is_dtensor(value)
            and value.shape == local != parameter.shape
        ):
            values.refuse(
                value,
                values.joined(path, key),
                f"a plain tensor {tuple(value.shape)} for a parameter sharded from {tuple(parameter.shape)}: "
                "each rank has another part, and nothing says which",
            )
