"""From a live state to leaves: the first step of every save."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ftckpt import values
from ftckpt.capture import rng as generators
from ftckpt.capture.components import Component, Survey, survey
from ftckpt.capture.modules import capture_module
from ftckpt.capture.optimizers import capture_optimizer
from ftckpt.capture.parts import Where
from ftckpt.capture.tree import Draft, LiveLeaf, Within, flatten


def capture(
    state: Mapping[str, object], *, group: str = "g0", rank: int = 0, world: int = 1, rng: bool = True
) -> tuple[LiveLeaf, ...]:
    """All leaves of a state as this rank holds them, ordered by name.

    Call it on the trainer's thread, between two optimizer steps, on every rank. Runs no collective
    and changes no live state; copies no tensor (``LiveLeaf.data`` aliases it). Plain values are
    packed now, so later changes to them do not matter.

    Each component has one value leaf named like itself: the packed ``{"kind": …, "tree": …}``, where
    the tree has a ``TensorRef`` wherever a tensor stands.

    Raises:
        UnsupportedValue: something cannot be saved faithfully; names the leaf in full.
    """
    assert "@" not in group and 0 <= rank < world, (group, rank, world)
    where = Where(group, rank, world)
    seen = survey(state)
    draft = Draft(where)
    for component in seen.components:
        within = Within(where.owner if component.per_rank else "", component.frozen)
        tree = _capture(draft, seen, component, within)
        draft.value(component.name, {"kind": component.kind, "tree": tree}, within)
    if rng:
        within = Within(where.owner)
        tree = {"kind": "rng", "tree": generators.generators()}
        draft.value(generators.COMPONENT, tree, within)
    return tuple(leaf for _, leaf in sorted(draft.leaves.items()))


def _capture(draft: Draft, seen: Survey, component: Component, within: Within) -> Any:
    name, value = component.name, component.value
    if component.kind == "module":
        view = seen.views[name]
        if component.frozen and any(key in seen.owned for key in view.parameters):
            values.refuse(value, name, "it is marked Frozen, but an optimizer changes its parameters")
        return capture_module(draft, view, within, seen.owned)
    if component.kind == "optimizer":
        return capture_optimizer(draft, name, value, seen.names, within)
    if component.kind in ("scheduler", "object"):
        value = value.state_dict()
    return flatten(draft, name, name, value, within)
