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
from typing import Any, Literal, NoReturn

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
from ftckpt.errors import RecordCorrupt, StateMismatch, UnsupportedValue
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.values import TensorRef

INTERNAL = "ftckpt"
"""The component that is nobody's key: it says what of a step is what for DCP."""

DCP_VERSION = "1.0.0"
"""Of the metadata that DCP's own file writer makes."""

Form = Literal["plain", "packed", "stream", "given"]
"""How something that is no tensor is kept: in its component's tree; or as the bytes of a leaf of its own:
packed like a tree, the content of a ``BytesIO``, or just what the planner gave.
"""

Path = tuple[str | int, ...]


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
    return {**trees, INTERNAL: {"kind": "dcp", "tree": {"dcp": dcp}}}


def _ordered(keys: Iterable[str], planner_data: object) -> list[str]:
    """Keys in the order of the state dict, if the planner left it."""
    found = dict.fromkeys(keys)
    first = planner_data if isinstance(planner_data, Mapping) else ()
    return list(dict.fromkeys(key for key in (*first, *found) if key in found))


def _below(key: str, planner_data: object) -> Path:
    """The path of a key below its component."""
    path: object = planner_data.get(key) if isinstance(planner_data, Mapping) else None
    if not isinstance(path, tuple) or ".".join(map(str, path)) != key or type(path[0]) is not str:
        path = (key,)
    _, dot, tail = path[0].partition(".")
    return (*((tail,) if dot else ()), *path[1:])


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
    """
    internal = trees.get(INTERNAL)
    dcp = _get(_get(internal, "tree"), "dcp")
    if isinstance(dcp, dict):
        try:
            return _of_dcp(trees, dcp)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise RecordCorrupt(
                f"RecordCorrupt: what the step says of itself to DCP is not what this format writes: {error!r}\n"
                "  nothing was changed; another step may be intact"
            ) from error
    return _of_session(trees, specs)


def _get(node: object, key: str) -> object:
    return node.get(key) if isinstance(node, dict) else None


def _of_dcp(trees: Mapping[str, Any], dcp: Mapping[str, Any]) -> Contents:
    planner_data = dcp["planner"]
    tensors = {}
    for key, (dtype, shape) in dcp["tensors"].items():
        if dtype not in ITEMSIZE_BYTES or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"{key}: {dtype!r:.60} of shape {shape!r:.60}")
        tensors[key] = LeafSpec(leaf_name(key), "tensor", dtype, tuple(shape))
    kept = {}
    for key, (form, size_bytes, position) in dcp["bytes"].items():
        if form not in ("packed", "stream", "given") or type(size_bytes) is not int or size_bytes < 0:
            raise ValueError(f"{key}: {size_bytes!r:.60} bytes as {form!r:.60}")
        kept[key] = Kept(form, size_bytes, position)
    plain = {}
    for key in dcp["values"]:
        node = trees[component_of(key)]["tree"]
        for part in _below(key, planner_data):
            node = node[part]
        plain[key] = node
    return Contents(tensors, kept, plain, planner_data)


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
