"""Saved structures under the names that they have here.

Knows how each kind of component spells names: a module lists the paths of its tensors, an optimizer goes
by the names of parameters, everything else nests dicts. Only structure is rewritten: a ``TensorRef``
keeps the name under which its bytes were saved. Refuses to know live objects.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ftckpt.errors import StateMismatch
from ftckpt.plan.asked import Renames
from ftckpt.values import TensorRef, path_part

_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Relabelled:
    """``trees`` by their names here; ``changed``: (saved, here) of every name that differs; ``homes``: the
    component here of every tensor, by its saved name.
    """

    trees: Mapping[str, Any]
    changed: tuple[tuple[str, str], ...] = ()
    homes: Mapping[str, str] = field(default_factory=dict)


def relabel(trees: Mapping[str, Any], rules: Renames, *, idle: bool, untouched: str) -> Relabelled:
    """Apply rules to all records; ``untouched`` is a component that has no names to give. Without ``idle``
    every rule has to fit something.

    Raises:
        StateMismatch: two things would have one name here, a rule would move something to where it cannot
            be, or fits nothing. Facts: ``rules`` or ``names``.
    """
    if not rules:
        return Relabelled(trees)
    work = _Work(rules)
    for name, record in trees.items():
        base, _, owner = name.partition("@")
        if "." in base or base == untouched or not _is_record(record):
            work.put(name, record, name)
        elif record["kind"] == "module":
            work.module(base, owner, record)
        elif record["kind"] == "optimizer":
            work.put(_of_owner(work.component(base), owner), _optimizer(work, record), name)
        else:
            work.other(base, owner, record)
    unused = [rule for rule in rules.lefts if rule not in work.used]
    if unused and not idle:
        raise StateMismatch(
            f"StateMismatch: nothing was saved that rename= could apply {', '.join(map(repr, unused))} to\n"
            "  nothing was changed; rules name what was saved, as `ftckpt show RUN --leaves` prints it\n"
            "  state of optimizers follows the names of parameters and needs no rules of its own",
            rules=tuple(unused),
        )
    return Relabelled(
        work.trees, tuple((old, new) for old, new in work.names.items() if old != new), work.homes()
    )


@dataclass(slots=True)
class _Work:
    rules: Renames
    trees: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    taken: dict[str, str] = field(default_factory=dict)

    def of(self, name: str) -> str:
        here, used = self.rules.of(name)
        self.used.update(used)
        self.names[name] = here
        return here

    def component(self, name: str) -> str:
        here = self.of(name)
        if "." in here:
            raise _misplaced(name, here, "a component has a name of one part")
        return here

    def put(self, name: str, record: Any, saved: str) -> None:
        if name in self.trees:
            raise _collision(name, self.taken.get(name, name), saved)
        self.trees[name], self.taken[name] = record, saved

    def module(self, base: str, owner: str, record: Any) -> None:
        """Entries may go from one module to another."""
        if not record["tree"]:
            self.put(_of_owner(self.component(base), owner), record, base)
        for path, node in record["tree"].items():
            saved = f"{base}.{path}"
            here = self.of(saved)
            component, _, rest = here.partition(".")
            if not rest:
                raise _misplaced(saved, here, "it would be a component, and is a part of one")
            name = _of_owner(component, owner)
            into = self.trees.setdefault(name, {**record, "tree": {}})
            if not isinstance(into, dict) or into.get("kind") != "module":
                raise _collision(here, component, saved)
            full = _of_owner(here, owner)
            if full in self.taken:
                raise _collision(here, self.taken[full], saved)
            into["tree"][rest], self.taken[full] = node, saved

    def other(self, base: str, owner: str, record: Any) -> None:
        """A nested value: its keys may get other names, in the dict where they are."""
        tree = record["tree"]
        component = self._home(base, tree)
        self.put(_of_owner(component, owner), {**record, "tree": self.inside(tree, base, component)}, base)

    def _home(self, base: str, tree: Any) -> str:
        """Where a component goes whose keys may be named one by one: all have to go to the same."""
        keys = [key for key in tree if isinstance(key, str) and key] if isinstance(tree, dict) else []
        if not keys:
            return self.component(base)
        homes = {self.of(f"{base}.{key}").partition(".")[0]: f"{base}.{key}" for key in keys}
        if len(homes) > 1:
            first, second = list(homes.items())[:2]
            raise _misplaced(
                second[1], second[0], f"{first[1]} goes to {first[0]}, and both are of one value"
            )
        return next(iter(homes))

    def inside(self, node: Any, saved: str, here: str) -> Any:
        if isinstance(node, dict):
            built: Any = type(node)()
            for key, value in node.items():
                new = self._key(key, saved, here)
                if new in built:
                    raise _collision(f"{here}.{new}", f"another key of {saved}", f"{saved}.{key}")
                part = key if isinstance(key, str) else path_part(key)
                built[new] = self.inside(
                    value, f"{saved}.{part}", f"{here}.{new if isinstance(new, str) else part}"
                )
            return built
        if type(node) in (list, tuple):
            return type(node)(
                self.inside(item, f"{saved}.{number}", f"{here}.{number}") for number, item in enumerate(node)
            )
        return node

    def _key(self, key: Any, saved: str, here: str) -> Any:
        if not isinstance(key, str) or not key:
            return key
        name = self.of(f"{saved}.{key}")
        if not name.startswith(f"{here}."):
            raise _misplaced(f"{saved}.{key}", name, f"it can get another name, but has to stay in {here}")
        return name[len(here) + 1 :]

    def homes(self) -> dict[str, str]:
        """The component of every tensor that a record refers to."""
        return {
            ref.name: name.partition("@")[0].partition(".")[0]
            for name, record in self.trees.items()
            for ref in _refs(record)
        }


def _optimizer(work: _Work, record: Any) -> Any:
    tree = record["tree"]
    if not _is_optimizer(tree):
        return record  # whoever fills it says what is wrong with it
    state: dict[str, Any] = {}
    for name, node in tree["state"].items():
        here = work.of(name)
        if here in state:
            raise _collision(here, f"the state of {here}", f"the state of {name}")
        state[here] = node
    groups = [
        {**group, "params": [work.of(name) for name in group["params"]]} for group in tree["param_groups"]
    ]
    return {**record, "tree": {**tree, "state": state, "param_groups": groups}}


def _is_optimizer(tree: Any) -> bool:
    if not isinstance(tree, dict) or not isinstance(tree.get("state"), dict):
        return False
    groups = tree.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in (*group["params"], *tree["state"]))
        for group in groups
    )


def _refs(node: Any) -> Iterator[TensorRef]:
    if isinstance(node, TensorRef):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _refs(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from _refs(value)


def _is_record(record: Any) -> bool:
    return (
        isinstance(record, dict)
        and {"kind", "tree"} <= set(record)
        and (record["kind"] != "module" or isinstance(record["tree"], dict))
    )


def _of_owner(name: str, owner: str) -> str:
    return f"{name}@{owner}" if owner else name


def _collision(here: str, first: str, second: str) -> StateMismatch:
    return StateMismatch(
        f"StateMismatch: with these rules of rename= two things would be {here} here\n"
        f"  saved as: {first}; and as: {second}\n"
        "  nothing was changed; give one of them another name, too",
        names=(first, second),
        here=here,
    )


def _misplaced(saved: str, here: str, why: str) -> StateMismatch:
    return StateMismatch(
        f"StateMismatch: rename= cannot make {saved} into {here}\n  {why}\n  nothing was changed",
        names=(saved,),
        here=here,
    )
