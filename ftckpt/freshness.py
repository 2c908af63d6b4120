"""Whether a save holds what training changed.

A component that an optimizer updated since the last commit, and of whose bytes not one is new, is
stale: the trainer trains something else than what is saved, or its updates change nothing. Pure: it
compares what was saved, so it does not matter which way the bytes were written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ftckpt import layout
from ftckpt.commit import component_of
from ftckpt.leaf import Holding
from ftckpt.manifest import Commit, Fragment, LeafRecord


@dataclass(frozen=True, slots=True)
class Stale:
    """``component`` of step ``step`` is bit for bit that of ``since_step``, ``updates`` updates later."""

    step: int
    component: str
    since_step: int
    updates: int

    @property
    def why(self) -> str:
        """In words, with what it usually is."""
        return (
            f"{self.component} was updated {self.updates} times since step {self.since_step}, but not a byte of "
            "it changed: a copy of it is trained instead, every gradient was zero, or the updates are below "
            "what its dtype can tell apart"
        )


def find_stale(
    fragment: Fragment, commit: Commit, holdings: Iterable[Holding], updates: Mapping[str, int]
) -> tuple[Stale, ...]:
    """The stale components of a step. ``updates`` counts, by component, optimizer steps that had
    something to change since the parent commit.

    A component is judged by the tensors of it that an optimizer owns, or by all where none is. One
    writer sees its own fragment; where others wrote too, the whole component must be reused.
    """
    if commit.parent is None:
        return ()
    owned = {holding.leaf.name for holding in holdings if holding.owned}
    fresh: dict[tuple[str, bool], bool] = {}
    for leaf in fragment.leaves:
        component = component_of(leaf)
        if leaf.kind == "tensor" and updates.get(component) and any(box.chunks for box in leaf.boxes):
            key = (component, leaf.name in owned)
            fresh[key] = fresh.get(key, False) or _is_fresh(leaf, fragment, commit)
    found = []
    for component in sorted({component for component, _ in fresh}):
        if fresh.get((component, True), fresh.get((component, False))):
            continue
        summary = commit.components[component]
        if len(commit.fragments) == 1 or summary.reused_bytes == summary.raw_bytes:
            found.append(Stale(commit.step, component, commit.parent.step, updates[component]))
    return tuple(found)


def _is_fresh(leaf: LeafRecord, fragment: Fragment, commit: Commit) -> bool:
    """Whether any chunk of it lies in a pack of this very step."""
    own = layout.pack_prefix(commit.at) + "/"
    return any(fragment.packs[chunk.pack].key.startswith(own) for box in leaf.boxes for chunk in box.chunks)
