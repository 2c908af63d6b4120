"""Names: which leaf of a step a key of a DCP state dict is, and what keys a step has for DCP.

Knows the keys and paths of DCP's planners and the names and trees of format 1. Refuses to know stores and
plans.

A key such as ``model.layers.0.weight`` is the leaf of the same name, so a step that a session saved and one
that DCP saved look alike: what stands before the first dot is the component, and each component has a
tree. ``@``, ``%``, ``/`` and control characters are escaped as in every leaf name. A tensor under a key
without a dot is the leaf ``key.value``. What only DCP needs stands in the component ``ftckpt``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, NoReturn, TypeVar

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ftckpt import values
from ftckpt.errors import FtckptError, RecordCorrupt, StateMismatch, UnsupportedValue
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.manifest import MAX_LEAF_BYTES, MAX_NDIM
from ftckpt.memory import require_memory
from ftckpt.values import TensorRef

INTERNAL = "ftckpt"
"""The component that is nobody's key: it says what of a step is what for DCP."""

_KIND = "dcp"

DCP_VERSION = "1.0.0"
"""Of the metadata that DCP's own file writer makes."""

Form = Literal["plain", "packed", "stream", "given"]
"""How something that is no tensor is kept: in its component's tree; or as the bytes of a leaf of its own:
packed like a tree, the content of a ``BytesIO``, or just what the planner gave.
"""

Path = tuple[str | int, ...]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Kept:
    """Something that is no tensor, in bytes of a leaf of its own. ``position`` is that of a stream."""

    form: Form
    size_bytes: int
    position: int = 0


@dataclass(frozen=True, slots=True)
class Contents:
    """What a step holds for DCP, by key. ``planner_data`` is what the planner that saves leaves for the one
    that loads; for the default planners the path of each key in the nested state dict.
    """

    tensors: Mapping[str, LeafSpec]
    kept: Mapping[str, Kept]
    plain: Mapping[str, object]
    planner_data: Any

    def spec(self, key: str) -> LeafSpec | None:
        """The leaf that holds a key's bytes, if it has one."""
        kept = self.kept.get(key)
        return self.tensors.get(key) if kept is None else bytes_spec(key, kept.size_bytes)


def leaf_name(key: str) -> str:
    """The leaf of a tensor, or of bytes, that stand under a key."""
    first, dot, rest = key.partition(".")
    name = (_escaped(first) or "%e") + dot + _escaped(rest)
    return name if dot else f"{name}.value"


def component_of(key: str) -> str:
    """The component that a key belongs to, escaped."""
    return leaf_name(key).partition(".")[0]


def bytes_spec(key: str, size_bytes: int) -> LeafSpec:
    """The leaf of something that is no tensor."""
    return LeafSpec(leaf_name(key), "tensor", "uint8", (size_bytes,))


def _escaped(text: str) -> str:
    return "".join(f"%{ord(c):02X}" if c in "@%/\x7f" or c < " " else c for c in text)


def _unescaped(text: str) -> str:
    plain = re.sub(r"%([0-9A-F]{2})", lambda found: chr(int(found[1], 16)), text)
    return "" if plain == "%e" else plain


# --- saving --------------------------------------------------------------------------------------


def component_values(contents: Contents) -> dict[str, object]:
    """The value leaves of a step: a tree for each component, and what DCP needs besides.

    Raises:
        UnsupportedValue: two keys mean one thing, a key belongs to nobody, or the planner's data has no form.
    """
    nodes: dict[str, object] = {key: TensorRef(leaf_name(key)) for key in (*contents.tensors, *contents.kept)}
    nodes |= contents.plain
    entries: dict[str, dict[Path, object]] = {}
    names: dict[str, str] = {}
    for key in _ordered(nodes, contents.planner_data):
        if names.setdefault(leaf_name(key), key) != key:
            _clash(names[leaf_name(key)], key)
        component = component_of(key)
        if component == INTERNAL:
            raise UnsupportedValue(
                f"UnsupportedValue: cannot save {key}: the name {INTERNAL!r} belongs to ftckpt itself\n"
                "  this step will not be readable; earlier commits are intact\n"
                "  give it another name in the state dict",
                leaf=key,
            )
        path = (component, *_below(key, contents.planner_data))
        if path in entries.setdefault(component, {}):
            _clash(key, key)
        entries[component][path] = nodes[key]
    trees: dict[str, object] = {
        name: {"kind": "tree", "tree": _nested(found, 1)} for name, found in entries.items()
    }
    dcp = {
        "planner": contents.planner_data,
        "tensors": {key: (spec.dtype, spec.shape) for key, spec in contents.tensors.items()},
        "bytes": {key: (kept.form, kept.size_bytes, kept.position) for key, kept in contents.kept.items()},
        "values": list(contents.plain),
    }
    return {**trees, INTERNAL: {"kind": _KIND, "tree": {"dcp": dcp}}}


def _ordered(keys: Iterable[str], planner_data: object) -> list[str]:
    """Keys in the order of the state dict, if the planner left it."""
    found = dict.fromkeys(keys)
    first = planner_data if isinstance(planner_data, Mapping) else ()
    return list(dict.fromkeys(key for key in (*first, *found) if key in found))


def _below(key: str, planner_data: object) -> Path:
    """The path of a key below its component."""
    path: object = planner_data.get(key) if isinstance(planner_data, Mapping) else None
    first, *rest = path if isinstance(path, tuple) and _spells(path, key) else (key,)
    _, dot, tail = first.partition(".")
    return (*((tail,) if dot else ()), *rest)


def _spells(path: Sequence[object], key: object) -> bool:
    """Whether it is the path that DCP's planners give a key."""
    plain = all(type(part) in (str, int) for part in path) and path and type(path[0]) is str
    return bool(plain) and ".".join(map(str, path)) == key


def _nested(entries: Mapping[Path, object], depth: int) -> Any:
    """Nodes by path as the dicts and lists that the paths mean. A place in a list that nothing stands in is
    ``None``, as DCP has it.
    """
    at_end = next((path for path in entries if len(path) == depth), None)
    if at_end is not None:
        if len(entries) > 1:
            _clash(*(".".join(map(str, path)) for path in sorted(entries, key=len)[:2]))
        return entries[at_end]
    inside: dict[str | int, dict[Path, object]] = {}
    for path, node in entries.items():
        inside.setdefault(path[depth], {})[path] = node
    built = {part: _nested(found, depth + 1) for part, found in inside.items()}
    numbers = [part for part in built if isinstance(part, int)]
    if len(numbers) == len(built):
        return [built.get(place) for place in range(max(numbers) + 1)]
    return built


def _clash(one: str, other: str) -> NoReturn:
    raise UnsupportedValue(
        f"UnsupportedValue: cannot save {other}: {one} has the same name, or stands where it would lie\n"
        "  this step will not be readable; earlier commits are intact\n"
        "  rename one of them in the state dict",
        leaf=other,
    )


# --- loading -------------------------------------------------------------------------------------


def contents_of(trees: Mapping[str, Any], specs: Mapping[str, LeafSpec]) -> Contents:
    """What a step holds, from its unpacked value leaves and, if DCP did not save it, its tensor leaves.

    Raises:
        RecordCorrupt: a tree is not what the format writes.
        StateMismatch: two values of a session's step would have one key.
        NotEnoughMemory: DCP's tools would make lists of more places than memory holds.
    """
    try:
        if says_itself(trees):
            return _of_dcp(trees, trees[INTERNAL]["tree"]["dcp"])
        return _of_session(trees, specs)
    except FtckptError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise RecordCorrupt(
            "RecordCorrupt: what the step says that it holds is not what this format writes: "
            f"{type(error).__name__}: {str(error)[:200]}\n"
            "  nothing was changed; another step may be intact"
        ) from error


def says_itself(trees: Mapping[str, Any]) -> bool:
    """Whether DCP saved the step, so that one value leaf says all that it holds."""
    internal = trees.get(INTERNAL)
    return isinstance(internal, dict) and internal.get("kind") == _KIND


def _of_dcp(trees: Mapping[str, Any], dcp: Any) -> Contents:
    planner_data = _a(dict, dcp)["planner"]
    tensors: dict[str, LeafSpec] = {}
    for key, (dtype, shape) in _a(dict, dcp["tensors"]).items():
        tensors[key] = LeafSpec(leaf_name(_a(str, key)), "tensor", _a(str, dtype), _shape(shape, dtype))
    kept: dict[str, Kept] = {}
    for key, (form, size_bytes, position) in _a(dict, dcp["bytes"]).items():
        if form not in ("packed", "stream", "given"):
            raise ValueError(f"{key!r:.60} is kept as {form!r:.60}")
        _shape((size_bytes,), "uint8")
        if not 0 <= _a(int, position) <= MAX_LEAF_BYTES or (position and form != "stream"):
            raise ValueError(f"{key!r:.60}, kept as {form}, stands at {position}")
        kept[_a(str, key)] = Kept(form, size_bytes, position)
    plain: dict[str, object] = {}
    for key in _a(list, dcp["values"]):
        plain[key] = _standing(trees, _a(str, key), planner_data)
        if _holds_tensors(plain[key]):
            raise ValueError(f"the value {key!r:.60} holds a tensor")
    if len({*tensors, *kept, *plain}) != len(tensors) + len(kept) + len(dcp["values"]):
        raise ValueError("one key twice")
    for key in (*tensors, *kept):
        if _standing(trees, key, planner_data) != TensorRef(leaf_name(key)):
            raise ValueError(f"{key!r:.60} does not stand in the tree of its component")
    _bound_places(planner_data)
    return Contents(tensors, kept, plain, planner_data)


def _a(kind: type[_T], value: object) -> _T:
    if type(value) is not kind:
        raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
    return value


def _shape(shape: object, dtype: str) -> tuple[int, ...]:
    """Extents that a leaf of that dtype can have."""
    extents = _a(tuple, shape)
    if len(extents) > MAX_NDIM or any(type(n) is not int or n < 0 for n in extents):
        raise ValueError(f"shape {extents!r:.60}")
    if prod(n or 1 for n in extents) * ITEMSIZE_BYTES[dtype] > MAX_LEAF_BYTES:
        raise ValueError(f"{dtype} of shape {extents!r:.60} is larger than a leaf can be")
    return extents


def _standing(trees: Mapping[str, Any], key: str, planner_data: object) -> object:
    """What stands under a key in the tree of its component."""
    node: object = trees[component_of(key)]["tree"]
    for part in _below(key, planner_data):
        if isinstance(node, list) and type(part) is int and part >= 0:
            node = node[part]
        else:
            node = _a(dict, node)[part]
    return node


def _bound_places(planner_data: object) -> None:
    """DCP's tools make lists as long as a path says. Where a path spells its key it was followed, and the list is
    in the tree; where it does not, it is the planner's own affair, and must not take all memory.
    """
    paths = planner_data.items() if isinstance(planner_data, Mapping) else ()
    odd = [p for key, p in paths if isinstance(p, list) or (isinstance(p, tuple) and not _spells(p, key))]
    places = sum(part for path in odd for part in path if type(part) is int and part > 0)
    require_memory(8 * places, "lists as long as the paths say that the planner left")


def _of_session(trees: Mapping[str, Any], specs: Mapping[str, LeafSpec]) -> Contents:
    """Keys as DCP's planner would give them to the same nested values. What belongs to single ranks, or
    stands with tensors in a tuple, has none.
    """
    tensors: dict[str, LeafSpec] = {}
    plain: dict[str, object] = {}
    paths: dict[str, Path] = {}

    def visit(path: Path, value: object) -> None:
        key = ".".join(map(str, path))
        if isinstance(value, TensorRef):
            spec = specs.get(value.name)
            if spec is None:
                return
            if spec.kind != "tensor":
                raise ValueError(f"{key!r:.60} is said to be a tensor, and {spec.name} is none")
            tensors[key] = spec
        elif _holds_tensors(value):
            return
        else:
            plain[key] = value
        if paths.setdefault(key, path) is not path:
            raise StateMismatch(
                f"StateMismatch: two values of the step would be {key!r} in a DCP state dict\n"
                "  nothing was changed; restore it with ftckpt.restore",
                leaf=key,
            )

    for name, record in trees.items():
        if "@" in name or name == INTERNAL or not isinstance(record, dict) or "tree" not in record:
            continue
        tree = record["tree"]
        if record.get("kind") == "module" and isinstance(tree, dict):
            tree = {_unescaped(path): node for path, node in tree.items()}
        traverse_state_dict({_unescaped(name): tree}, visit, _is_ref)
    return Contents(tensors, {}, plain, paths)


def _is_ref(value: object) -> Any:
    return isinstance(value, TensorRef)


def _holds_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes, range)):
        return any(map(_holds_tensors, value))
    return isinstance(value, TensorRef)


def metadata_of(contents: Contents, where: Mapping[str, object]) -> Metadata:
    """What DCP's planners and tools want to know. A tensor is one chunk to them, however it was sharded:
    which bytes a read needs is found out when it is known.
    """
    found: dict[str, Any] = {key: BytesStorageMetadata() for key in (*contents.plain, *contents.kept)}
    for key, spec in contents.tensors.items():
        size = torch.Size(spec.shape)
        found[key] = TensorStorageMetadata(
            TensorProperties(dtype=getattr(torch, spec.dtype)),
            size,
            [ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
        )
    found = {key: found[key] for key in _ordered(found, contents.planner_data)}
    return Metadata(found, contents.planner_data, dict(where), version=DCP_VERSION)


def packed(contents: Contents) -> dict[str, bytes]:
    """The bytes of the value leaves of a step, by name."""
    return {name: values.pack(tree, leaf=name) for name, tree in component_values(contents).items()}
