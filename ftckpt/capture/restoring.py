"""From saved leaves back into a live state: what to read where, and what to do once it is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ftckpt.capture import rng as generators
from ftckpt.capture.components import Component, Survey, survey
from ftckpt.capture.marks import PerRank
from ftckpt.capture.modules import fill_module
from ftckpt.capture.optimizers import fill_optimizer
from ftckpt.capture.parts import Where
from ftckpt.capture.tree import (
    GENERATORS,
    MODULES,
    NOT_OURS,
    OBJECTS,
    SCHEDULERS,
    Filling,
    Inflating,
    Passed,
    Want,
    fresh_plain,
    malformed,
    own_tree,
)
from ftckpt.errors import RestoreIncomplete, StateMismatch, WorldSizeMismatch
from ftckpt.leaf import LeafSpec, is_in
from ftckpt.memory import require_memory
from ftckpt.plan.asked import EXACTLY, Asked
from ftckpt.values import TensorRef

_SHOWN = 12


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A restore that is ready to be filled.

    ``wants``: what to read, and the memory to read it into; until a reader does, nothing live has
    changed. ``notes``: what is not restored although it was asked for, and why that was allowed; ``passed``:
    the same by kind. ``casts``: the dtype here of every leaf that was saved with another one. ``unread``: names
    of value leaves without which nothing else here counts; with their trees the target has to be made again.
    """

    wants: tuple[Want, ...]
    notes: tuple[str, ...]
    passed: Passed
    casts: Mapping[str, str]
    components: frozenset[str]
    steps: tuple[tuple[int, str, Callable[[], None]], ...]
    unread: frozenset[str] = frozenset()

    def finish(self) -> None:
        """Apply the rest, once, after every want was filled: plain values, containers, extra state,
        hyper-parameters, ``load_state_dict`` of objects, then of schedulers, generators last.

        Raises:
            RestoreIncomplete: a component did not take its state. Facts: ``components``, it and
                those that come after it.
        """
        ordered = sorted(self.steps, key=lambda step: step[0])
        for done, (_, component, step) in enumerate(ordered):
            try:
                step()
            except Exception as error:
                left = tuple(dict.fromkeys(name for _, name, _ in ordered[done:]))
                raise RestoreIncomplete(
                    f"component {component} did not take its saved state: {type(error).__name__}: {error}\n"
                    f"  restored only in part: {', '.join(left)}; the checkpoint is untouched\n"
                    "  do not train on: mend the component and restore again",
                    components=left,
                ) from error


def target(
    state: Mapping[str, object],
    saved: Mapping[str, LeafSpec],
    trees: Mapping[str, object],
    *,
    group: str = "g0",
    rank: int = 0,
    world: int = 1,
    subset: bool = False,
    asked: Asked = EXACTLY,
    rng: bool | None = None,
    groups: int | None = None,
) -> Target:
    """Compare a live state with a saved one and say what has to be read where.

    ``saved``: the specs of all tensor leaves by name, but for those that only other ranks' own values refer to.
    ``trees``: the unpacked value leaves by name; of ``PerRank`` values those of all owners (``name@group.rank``).
    Those of components that are not live, and of single ranks, may be ``UNREAD``. Tensors may be taken from any
    mesh to any other. ``subset``: components that are saved but not live are left out in silence,
    and generators are left alone unless ``rng=True``. ``asked``: what may differ, and what is wanted;
    renames were applied before. ``groups``: how many replica groups restore, where that is known, so that the
    ``PerRank`` state of one that is gone is not passed over.

    Call it on every rank, on the trainer's thread. Changes nothing live, except that FSDP2 modules go
    back to their shards and objects are asked for their ``state_dict()``.

    Raises:
        WorldSizeMismatch: ``PerRank`` state was saved by other ranks.
        StateMismatch: facts ``missing``, ``extra``, ``changed``, all names.
        NotEnoughMemory: the host has less than all that is new would take.
    """
    where = Where(group, rank, world)
    seen = survey(state)
    filling = Filling(where, saved, trees, asked.strict, groups, asked=asked)
    names = {key.partition("@")[0] for key in trees}
    stored = {name for name in names if "." not in name} - {generators.COMPONENT}
    _compare(filling, {c.name for c in seen.components}, stored, subset=subset)
    for component in seen.components:
        if component.name in stored and _is_wanted(filling, component):
            _fill(filling, seen, component)
    if rng if rng is not None else not subset:
        _fill_generators(filling)
    if not filling.unread:
        _complain(filling, {component.name for component in seen.components})
    require_memory(filling.fresh_bytes, "what of the step has no memory in the live state yet")
    return Target(
        tuple(filling.wants),
        tuple(filling.notes),
        filling.passed,
        filling.casts,
        frozenset(component.name for component in seen.components),
        tuple(filling.steps),
        frozenset(filling.unread),
    )


def _compare(filling: Filling, live: set[str], stored: set[str], *, subset: bool) -> None:
    absent = [name for name in sorted(live - stored) if filling.takes(name) or filling.reaches_into(name)]
    filling.named.update(one for one in filling.asked.only or () if any(is_in(one, name) for name in absent))
    filling.lacks([f"{name} (a whole component)" for name in absent])
    filling.leaves([] if subset else [f"{name} (a whole component)" for name in sorted(stored - live)])


def _is_wanted(filling: Filling, component: Component) -> bool:
    """Whether any of it is to be restored. What takes its state in one call takes all of it or nothing."""
    if filling.takes(component.name):
        return True
    wanted = filling.reaches_into(component.name)
    if wanted and component.kind in ("object", "scheduler"):
        filling.changed.append(
            f"{component.name}: takes its state in one call, and cannot be restored in part"
        )
        return False
    return wanted


def _fill(filling: Filling, seen: Survey, component: Component) -> None:
    name, mark = component.name, component.per_rank
    if (name in filling.trees) is (mark is not None):
        saved, live = ("common to all ranks", "marked PerRank") if mark else ("PerRank", "not marked so")
        filling.changed.append(f"{name}: saved as {saved}, live is {live}")
        return
    record = filling.trees.get(name)
    if mark is not None:
        record = own_tree(filling, name, mark, name, lambda record: _merging(filling, component, record))
        if record is NOT_OURS:
            return
    tree = _tree_of(component, record, filling)
    if tree is NOT_OURS:
        return
    if component.kind == "module":
        fill_module(filling, seen.views[name], tree)
    elif component.kind == "optimizer":
        fill_optimizer(filling, name, component.value, seen.names, tree)
    elif component.kind == "tree":
        _fill_tree(filling, component, tree)
    else:
        phase = SCHEDULERS if component.kind == "scheduler" else OBJECTS
        live = component.value.state_dict()
        loaded = Inflating(filling, name, phase, False, fresh_plain).walk(tree, live, name)
        filling.then(phase, name, lambda: component.value.load_state_dict(loaded))


def _fill_tree(filling: Filling, component: Component, tree: Any) -> None:
    name = component.name
    itself = isinstance(tree, TensorRef) and not tree.name.endswith("@")
    path = f"{name}.value" if itself else name
    built = Inflating(filling, name, MODULES, True, fresh_plain).walk(tree, component.value, path)
    if built is component.value:
        return
    if component.can_replace:
        filling.then(MODULES, name, lambda: component.replace(built))
    elif built != component.value:
        filling.changed.append(
            f"{name}: cannot be changed in place, and the state given is no dict to put it into"
        )


def _merging(filling: Filling, component: Component, record: Any) -> Any:
    tree = _tree_of(component, record, filling)
    return Inflating(filling, component.name, OBJECTS, False, fresh_plain).walk(tree, None, component.name)


def _tree_of(component: Component, record: Any, filling: Filling) -> Any:
    if not isinstance(record, dict) or not {"kind", "tree"} <= set(record):
        malformed(component.name, "no kind and tree")
    if record["kind"] != component.kind:
        filling.changed.append(f"{component.name}: saved as {record['kind']}, live is {component.kind}")
        return NOT_OURS
    return record["tree"]


def _fill_generators(filling: Filling) -> None:
    name = generators.COMPONENT
    if not filling.owners(name):
        filling.notes.append("random number generators are not in the checkpoint and go on as they are")
        return
    record = own_tree(filling, name, PerRank(None, on_resize="reseed"), name, lambda record: record)
    if record is NOT_OURS:
        return
    if not isinstance(record, dict) or not isinstance(record.get("tree"), dict):
        malformed(name, "no tree")
    state = record["tree"]
    if not generators.same_devices(state):
        filling.notes.append(
            "the generators of CUDA devices go on as they are: saved on another number of devices"
        )
    filling.then(GENERATORS, name, lambda: generators.resume_generators(state))


def _complain(filling: Filling, live: set[str]) -> None:
    unknown = [name for name in filling.asked.only or () if name not in filling.named]
    if unknown and not filling.changed:
        stored = {key.partition("@")[0] for key in filling.trees}
        saved = [name for name in unknown if name.partition(".")[0] in stored - live]
        what = "which nothing here or in the checkpoint is"
        if saved == unknown:
            what = "and the state given has no such component; the checkpoint has it"
        raise StateMismatch(
            f"StateMismatch: only= names {', '.join(map(repr, unknown))}, {what}\n"
            "  nothing was changed; `ftckpt show RUN --leaves` prints the names, rename= gives them others here",
            names=tuple(unknown),
        )
    if filling.resized:
        raise WorldSizeMismatch(
            "per-rank state was saved by other ranks than those that ask for it\n"
            f"{_listed('', filling.resized)}"
            "  nothing was changed; the checkpoint is untouched\n"
            "  resume with the same groups and ranks, or mark it PerRank(x, on_resize='merge') or 'reseed'",
            leaves=tuple(filling.resized),
        )
    if filling.changed or (filling.strict and (filling.missing or filling.extra)):
        raise StateMismatch(
            "the live state does not fit the saved one\n"
            f"{_listed('live, not saved: ', filling.missing if filling.strict else ())}"
            f"{_listed('saved, not live: ', filling.extra if filling.strict else ())}"
            f"{_listed('differs: ', filling.changed)}"
            "  nothing was changed; the checkpoint is untouched\n"
            "  build the state as it was when saved; ask for what may differ: rename= for names, dtype= for dtypes,"
            " only= for parts, strict=False for missing, extra and reshaped ones",
            missing=tuple(filling.missing),
            extra=tuple(filling.extra),
            changed=tuple(filling.changed),
        )


def _listed(label: str, lines: Sequence[str]) -> str:
    shown = "".join(f"  {label}{line}\n" for line in lines[:_SHOWN])
    return shown + (f"  {label}… and {len(lines) - _SHOWN} more\n" if len(lines) > _SHOWN else "")
