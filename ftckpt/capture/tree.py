"""Nested values: taking the tensors out of them at a save, and putting them back at a restore.

Knows containers, marks and the names of leaves. Refuses to know modules and optimizers: they bring
their own names and use the two values here, a ``Draft`` (leaves found so far, at a save) and a
``Filling`` (wants, problems and steps found so far, at a restore).

Names: a leaf is ``component.path.to.leaf`` with each part escaped (``values.path_part``); list items
are plain numbers, which cannot meet dict keys because a container is one or the other. A component
that is itself a tensor has the leaf ``component.value``. A leaf of a ``PerRank`` value ends in
``@group.rank``; where such a value stands inside another, the outer tree holds the ``TensorRef``
``path@`` and the inner one is a value leaf of its own, ``path@group.rank``.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec
import numpy as np
import torch

from ftckpt import values
from ftckpt.boxes import Box, whole
from ftckpt.capture.marks import Frozen, PerRank
from ftckpt.capture.parts import Where, fresh_like, is_dtensor, local_of, part_of
from ftckpt.capture.tensors import can_fill, dtype_name, fresh_tensor
from ftckpt.errors import RecordCorrupt, UnsupportedValue
from ftckpt.leaf import ITEMSIZE_BYTES, Holding, LeafSpec, is_in
from ftckpt.plan.asked import EXACTLY, Asked, can_carry_over
from ftckpt.values import TensorRef

_DICTS = (dict, OrderedDict, Counter)
_BULK = frozenset({int, float, bool, type(None), bytes})


class LiveLeaf(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One leaf of the live state, as this rank holds it.

    ``data`` is the local part: a detached tensor that aliases live memory (not copied, maybe not
    contiguous), or packed bytes for a value leaf. ``lazy``: a captured optimizer owns it, so it
    cannot change between two optimizer steps.
    """

    holding: Holding
    data: torch.Tensor | bytes
    lazy: bool


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """Bytes asked of a reader: the elements ``box`` of the saved ``leaf``, to be put into ``data``."""

    leaf: LeafSpec
    box: Box
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class Within:
    """The marks that a value stands in. ``owner`` is ``group.rank`` inside ``PerRank``, else empty."""

    owner: str = ""
    frozen: bool = False

    @property
    def suffix(self) -> str:
        return f"@{self.owner}" if self.owner else ""


# --- saving --------------------------------------------------------------------------------------


class Draft:
    """The leaves of one capture, gathered component by component."""

    def __init__(self, where: Where) -> None:
        self.where = where
        self.leaves: dict[str, LiveLeaf] = {}
        self._met: dict[tuple[str, int], tuple[torch.Tensor, TensorRef]] = {}

    def tensor(
        self, component: str, path: str, tensor: torch.Tensor, within: Within, *, lazy: bool
    ) -> TensorRef:
        """Add a tensor, once per component however often it stands there."""
        met = self._met.get((component, id(tensor)))
        if met is not None:
            return met[1]
        name = path + within.suffix
        part = part_of(tensor, name, self.where)
        if within.owner and is_dtensor(tensor):
            values.refuse(tensor, name, "a DTensor belongs to all ranks of its mesh and cannot be PerRank")
        spec = LeafSpec(name, "tensor", dtype_name(part.local.dtype), part.shape, within.owner)
        ranks = (self.where.rank,) if within.owner else part.ranks
        holding = Holding(spec, part.box, ranks, not within.owner, within.frozen, owned=lazy)
        self._add(LiveLeaf(holding, part.local, lazy))
        ref = TensorRef(name)
        self._met[component, id(tensor)] = (tensor, ref)  # kept alive, so that no id is used twice
        return ref

    def value(self, path: str, tree: object, within: Within) -> None:
        """Add a value leaf. Its bytes are taken now."""
        name = path + within.suffix
        data = values.pack(tree, leaf=name)
        spec = LeafSpec(name, "value", "uint8", (len(data),), within.owner)
        ranks = (self.where.rank,) if within.owner else self.where.ranks
        self._add(
            LiveLeaf(
                Holding(spec, whole(spec.shape), ranks, not within.owner, within.frozen), data, lazy=False
            )
        )

    def _add(self, leaf: LiveLeaf) -> None:
        name = leaf.holding.leaf.name
        if name in self.leaves:
            raise UnsupportedValue(
                f"cannot save {name}: two different things have that name\n"
                "  nothing was written; earlier commits are untouched\n"
                "  rename one of them",
                leaf=name,
            )
        self.leaves[name] = leaf


def flatten(
    draft: Draft, component: str, path: str, value: Any, within: Within, *, lazy: bool = False
) -> Any:
    """The same value with a ``TensorRef`` for every tensor, whose leaves go to ``draft``.

    Raises:
        UnsupportedValue: something in it cannot be saved; names the leaf in full.
    """
    return _Flattening(draft, component, within, lazy).walk(value, path, path, within, ())


@dataclass(frozen=True, slots=True, eq=False)
class _Flattening:
    draft: Draft
    component: str
    within: Within
    lazy: bool

    def walk(self, value: Any, path: str, own: str, within: Within, outer: tuple[int, ...]) -> Any:
        """``own`` is the path under which a value that is itself a tensor or mark was found first."""
        if isinstance(value, torch.Tensor):
            name = f"{path}.value" if path == own else path
            return self.draft.tensor(self.component, name, value, within, lazy=self.lazy)
        if isinstance(value, Frozen):
            return self.walk(value.value, path, own, Within(within.owner, frozen=True), outer)
        if isinstance(value, PerRank):
            return self._per_rank(value, path, within, outer)
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            values.refuse(value, path + within.suffix, "modules and optimizers are components of their own")
        kind = type(value)
        if kind not in (*_DICTS, list, tuple, deque):
            values.check(value, leaf=path + within.suffix)
            return value
        if id(value) in outer:
            values.refuse(value, path + within.suffix, "it contains itself")
        if len(outer) >= values.MAX_DEPTH:
            values.refuse(value, path + within.suffix, f"containers nest more than {values.MAX_DEPTH} deep")
        outer = (*outer, id(value))
        if kind in _DICTS:
            for key in value:
                if type(key) is str and key.isascii():
                    continue
                values.check(key, leaf=f"{path}{within.suffix}.(key {key!r:.60})")
            return rebuilt_dict(
                value, {k: self.walk(v, values.joined(path, k), own, within, outer) for k, v in value.items()}
            )
        if set(map(type, value)) <= _BULK:  # the common case, at C speed
            return value
        return rebuilt(value, [self.walk(v, f"{path}.{i}", own, within, outer) for i, v in enumerate(value)])

    def _per_rank(self, mark: PerRank[Any], path: str, within: Within, outer: tuple[int, ...]) -> TensorRef:
        if within.owner:
            values.refuse(mark, path + within.suffix, "a PerRank inside a PerRank")
        inner = Within(self.draft.where.owner, within.frozen)
        self.draft.value(path, self.walk(mark.value, path, path, inner, outer), inner)
        return TensorRef(f"{path}@")


def rebuilt(like: Any, items: list[Any]) -> Any:
    """A list, tuple or deque of the items, of the type of ``like``."""
    if type(like) is deque:
        return deque(items, like.maxlen)
    return tuple(items) if type(like) is tuple else items


def rebuilt_dict(like: Any, items: dict[Any, Any]) -> Any:
    """A dict of the items, of the type of ``like``."""
    built = type(like)()
    for key, value in items.items():
        built[key] = value
    return built


# --- restoring -----------------------------------------------------------------------------------

Fresh = Callable[[LeafSpec, object, object], torch.Tensor]
"""Makes unfilled memory for a saved tensor, given what is live there (or None) and its last key."""

MODULES, OPTIMIZERS, OBJECTS, SCHEDULERS, GENERATORS = range(5)
"""The order in which ``finish`` applies what was read."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What a restore let pass because it was asked to. ``missing``: live, not saved, left as it is or begun
    anew; ``extra``: saved, not wanted here; ``reshaped``: left as it is, of another shape when saved.
    """

    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    reshaped: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Filling:
    """What one restore will do, gathered before anything live is changed."""

    where: Where
    saved: Mapping[str, LeafSpec]
    trees: Mapping[str, Any]
    strict: bool = True
    groups: int | None = None
    wants: list[Want] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    steps: list[tuple[int, str, Callable[[], None]]] = field(default_factory=list)
    asked: Asked = EXACTLY
    reshaped: list[str] = field(default_factory=list)
    casts: dict[str, str] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)
    unread: set[str] = field(default_factory=set)
    fresh_bytes: int = 0
    _claims: dict[int, list[tuple[int, int, str]]] = field(default_factory=dict)
    _owners: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, tree in self.trees.items():
            base, at, owner = name.partition("@")
            if at:
                self._owners.setdefault(base, {})[owner] = tree

    def owners(self, path: str) -> dict[str, Any]:
        """The saved trees of a ``PerRank`` value, by ``group.rank``."""
        return self._owners.get(path, {})

    def lacks(self, names: list[str], outcome: str = "kept as it is") -> None:
        """These are live and were not saved: an error, or let pass as ``outcome``."""
        self.missing += names
        if not self.strict:
            self.notes += [f"{outcome}, not in the checkpoint: {name}" for name in names]

    def leaves(self, names: list[str]) -> None:
        """These were saved and are not wanted here: an error, or let pass."""
        self.extra += names
        if not self.strict:
            self.notes += [f"in the checkpoint, not wanted here: {name}" for name in names]

    @property
    def passed(self) -> Passed:
        return Passed(tuple(self.missing), tuple(self.extra), tuple(self.reshaped))

    def takes(self, path: str) -> bool:
        """Whether what is called ``path`` here is to be restored: all of it."""
        if self.asked.only is None:
            return True
        found = [name for name in self.asked.only if is_in(path, name)]
        self.named.update(found)
        return bool(found)

    def reaches_into(self, path: str) -> bool:
        """Whether a part of it is."""
        return self.asked.only is not None and any(is_in(name, path) for name in self.asked.only)

    def dtype_of(self, spec: LeafSpec, live: object, path: str) -> str:
        """The dtype of the memory that a leaf is read into. Another than it was saved with only where it
        was asked for; and for what is not live yet, never of a scalar: those count.
        """
        asked = self.asked.casts.of(path)
        if asked is None or asked == spec.dtype or not can_carry_over(spec.dtype, asked):
            return spec.dtype
        is_live = isinstance(live, torch.Tensor) and dtype_name(live.dtype) == asked
        if not is_live and (isinstance(live, torch.Tensor) or not spec.shape):
            return spec.dtype
        self.casts[spec.name] = asked
        return asked

    def then(self, phase: int, component: str, step: Callable[[], None]) -> None:
        """Do this in ``finish``, in that phase; ``component`` is named if it fails."""
        self.steps.append((phase, component, step))

    def spec(self, ref: TensorRef) -> LeafSpec | None:
        """The saved leaf of a reference; notes it as missing when the save does not have it."""
        spec = self.saved.get(ref.name)
        if spec is None:
            self.lacks([f"{ref.name} (its tensor is not in the checkpoint)"])
        elif spec.dtype not in ITEMSIZE_BYTES or spec.kind != "tensor":
            raise RecordCorrupt(
                f"leaf {ref.name} is no tensor of a known dtype ({spec.dtype})", leaf=ref.name
            )
        return spec

    def want(self, spec: LeafSpec, tensor: torch.Tensor) -> None:
        """Ask for a leaf to be read into a tensor of its shape and dtype."""
        part = part_of(tensor, spec.name, self.where)
        if part.box.numel:
            self.wants.append(Want(spec, part.box, part.local))

    def want_fresh(self, spec: LeafSpec, tensor: torch.Tensor) -> None:
        """As ``want``, of memory that was made for it and is not touched yet."""
        local = local_of(tensor)
        if local.device.type == "cpu":
            self.fresh_bytes += local.nbytes
        self.want(spec, tensor)

    def fits(self, spec: LeafSpec, tensor: torch.Tensor, path: str) -> bool:
        """Whether dtype and global shape are the live ones, or values are to be carried over; notes the
        difference if not. ``path``: its name here.
        """
        live = (dtype_name(tensor.dtype), tuple(tensor.shape))
        if live == (spec.dtype, spec.shape):
            return True
        also = "" if path == spec.name.partition("@")[0] else f", which is {path} here"
        found = f"{spec.name}{also}: saved {spec.dtype}{list(spec.shape)}, live {live[0]}{list(live[1])}"
        if live[1] != spec.shape and not self.strict:
            self.reshaped.append(found)
            self.notes.append(f"kept as it is, of another shape: {found}")
            return False
        if live[1] == spec.shape and self.dtype_of(spec, tensor, path) == live[0]:
            return True
        self.changed.append(found)
        return False

    def claim(self, leaf: str, tensor: torch.Tensor) -> bool:
        """Reserve live memory for one leaf; false when another leaf is read into some of it already."""
        local = local_of(tensor)
        if not local.numel():
            return True
        low = int(local.storage_offset()) * local.itemsize
        reach = (
            sum(
                int(stride) * (int(size) - 1)
                for stride, size in zip(local.stride(), local.shape, strict=True)
            )
            + 1
        )
        high = low + reach * local.itemsize
        return self.claim_bytes(leaf, local.untyped_storage().data_ptr(), low, high)

    def claim_bytes(self, leaf: str, storage: int, low: int, high: int) -> bool:
        others = self._claims.setdefault(storage, [])
        if any(low < end and start < high and other != leaf for start, end, other in others):
            return False
        others.append((low, high, leaf))
        return True


@dataclass(frozen=True, slots=True, eq=False)
class Inflating:
    """Puts a saved tree together again.

    ``in_place``: live tensors, arrays, lists and dicts at the same places are filled (and stay the
    objects that others may hold); otherwise everything is new and shares memory with nothing.
    """

    filling: Filling
    component: str
    phase: int
    in_place: bool
    fresh: Fresh

    def walk(self, node: Any, live: Any, path: str, key: object = None) -> Any:
        """What will stand at ``path`` once the wants are filled and ``finish`` has run."""
        if self.filling.asked.only is not None and not self.filling.takes(path):
            return self._partly(node, live, path)
        if isinstance(live, Frozen):
            return self._into_mark(live, self.walk(node, live.value, path, key))
        if isinstance(node, TensorRef) and node.name.endswith("@"):
            return self._per_rank(node.name[:-1], live, path)
        if isinstance(live, PerRank):
            self.filling.changed.append(f"{path}: saved as common to all ranks, live is marked PerRank")
            return live
        if isinstance(node, TensorRef):
            return self._tensor(node, live, path, key)
        if isinstance(node, _DICTS):
            return self._dict(node, live, path)
        if type(node) in (
            list,
            tuple,
            deque,
        ):  # not a torch.Size, which is a tuple too and holds only numbers
            return self._sequence(node, live, path)
        if isinstance(node, np.ndarray):
            return self._array(node, live, path)
        return node

    def _tensor(self, ref: TensorRef, live: Any, path: str, key: object) -> Any:
        spec = self.filling.spec(ref)
        if spec is None:
            return live
        if self.in_place and isinstance(live, torch.Tensor):
            if not self.filling.fits(spec, live, path):
                return live
            if can_fill(live) and self.filling.claim(spec.name, live):
                self.filling.want(spec, live)
                return live
        fresh = self.fresh(
            msgspec.structs.replace(spec, dtype=self.filling.dtype_of(spec, live, path)), live, key
        )
        self.filling.want_fresh(spec, fresh)
        return fresh

    def _partly(self, node: Any, live: Any, path: str) -> Any:
        """Of a dict the keys that are asked for, or of what is in it; the others stay what they are."""
        if isinstance(live, Frozen):
            return self._into_mark(live, self._partly(node, live.value, path))
        if not self.filling.reaches_into(path):
            return live
        if not (self.in_place and isinstance(node, _DICTS) and type(live) is type(node)):
            self.filling.changed.append(f"{path}: only dicts that are dicts here too can be restored in part")
            return live
        self.filling.lacks(
            [name for key in live if key not in node for name in self._unsaved(live[key], path, key)]
        )
        paths = {key: values.joined(path, key) for key in node}
        built = {
            key: self.walk(node[key], live.get(key), inner, key)
            for key, inner in paths.items()
            if self.filling.takes(inner) or (key in live and self.filling.reaches_into(inner))
        }
        self.filling.then(self.phase, self.component, lambda: live.update(built))
        return live

    def _unsaved(self, live: Any, above: str, key: object) -> list[str]:
        """What is asked for of a live value that was not saved: itself, or what is there in it."""
        path = values.joined(above, key)
        if self.filling.takes(path):
            return [path]
        while isinstance(live, (Frozen, PerRank)):
            live = live.value
        if not (self.filling.reaches_into(path) and isinstance(live, _DICTS)):
            return []
        return [name for inner in live for name in self._unsaved(live[inner], path, inner)]

    def _dict(self, node: Any, live: Any, path: str) -> Any:
        old = live if isinstance(live, Mapping) else {}
        built = rebuilt_dict(
            node, {k: self.walk(v, old.get(k), values.joined(path, k), k) for k, v in node.items()}
        )
        if not self.in_place or type(live) is not type(node):
            return built

        def fill() -> None:
            live.clear()
            for key, value in built.items():
                live[key] = value

        self.filling.then(self.phase, self.component, fill)
        return live

    def _sequence(self, node: Any, live: Any, path: str) -> Any:
        old = live if isinstance(live, (list, tuple, deque)) else ()
        if set(map(type, node)) <= _BULK:
            items = list(node)
        else:
            pairs = [(item, old[i] if i < len(old) else None) for i, item in enumerate(node)]
            items = [self.walk(item, was, f"{path}.{i}", i) for i, (item, was) in enumerate(pairs)]
        if not self.in_place or type(live) is not type(node) or isinstance(node, tuple):
            return rebuilt(node, items)
        if isinstance(node, deque) and live.maxlen != node.maxlen:
            return rebuilt(node, items)

        def fill() -> None:
            live.clear()
            live.extend(items)

        self.filling.then(self.phase, self.component, fill)
        return live

    def _array(self, node: Any, live: Any, path: str) -> Any:
        same = type(live) is np.ndarray and live.dtype.str == node.dtype.str and live.shape == node.shape
        if not (self.in_place and same and live.flags.writeable and not _overlaps_itself(live)):
            return node.copy()
        if not self.filling.claim_bytes(path, 0, *np.lib.array_utils.byte_bounds(live)):
            return node.copy()
        self.filling.then(self.phase, self.component, lambda: np.copyto(live, node))
        return live

    def _into_mark(self, mark: Any, value: Any) -> Any:
        def fill() -> None:
            mark.value = value

        if value is not mark.value:
            self.filling.then(self.phase, self.component, fill)
        return mark

    def _per_rank(self, base: str, live: Any, path: str) -> Any:
        mark = live if isinstance(live, PerRank) else PerRank(live)
        tree = own_tree(self.filling, base, mark, self.component, lambda tree: self._merging(tree, path))
        return mark if tree is NOT_OURS else self._into_mark(mark, self.walk(tree, mark.value, path))

    def _merging(self, tree: Any, path: str) -> Any:
        return Inflating(self.filling, self.component, self.phase, False, self.fresh).walk(tree, None, path)


NOT_OURS = object()
"""What ``own_tree`` gives when this rank's live value is to be left as it is."""

UNREAD = object()
"""Stands for a saved tree that is there and was not read: of a component that is not live, or another
rank's own.
"""


def own_tree(
    filling: Filling, path: str, mark: PerRank[Any], component: str, inflate: Callable[[Any], Any]
) -> Any:
    """The tree that this very rank saved for a ``PerRank`` value.

    When other ranks saved it, or groups saved it of which there are fewer now, follows the mark's policy:
    notes it as resized, notes that it is left alone, or has the value merge what all of them saved. Then
    it gives ``NOT_OURS``. What may be begun anew is taken whenever this rank has its own. A tree that is
    needed and was not read is noted as ``unread``.
    """
    where, owners = filling.where, filling.owners(path)
    saved_by = {owner.rpartition(".")[2] for owner in owners if owner.rpartition(".")[0] == where.group}
    groups = {owner.rpartition(".")[0] for owner in owners}
    all_here = filling.groups is None or len(groups) <= filling.groups or mark.on_resize == "reseed"
    if saved_by == {str(rank) for rank in where.ranks} and all_here:
        if owners[where.owner] is UNREAD:
            filling.unread.add(f"{path}@{where.owner}")
            return NOT_OURS
        return owners[where.owner]
    owners = dict(sorted(owners.items(), key=_rank_order))
    found = (
        f"{path}: saved by {', '.join(owners) or 'nobody'}; asked for by {where.owner} of {where.world}"
        f"{'' if filling.groups is None else f' in {filling.groups} groups'}"
    )
    if mark.on_resize == "error":
        filling.resized.append(found)
    elif mark.on_resize == "reseed":
        filling.notes.append(f"not restored, because the ranks differ: {found}")
    elif any(tree is UNREAD for tree in owners.values()):
        filling.unread.update(f"{path}@{owner}" for owner in owners)
    else:
        states = {owner: inflate(tree) for owner, tree in owners.items()}
        filling.notes.append(f"merged by its own reshard(), because the ranks differ: {found}")
        filling.then(
            OBJECTS,
            component,
            lambda: mark.value.reshard(states, group=where.group, rank=where.rank, world=where.world),
        )
    return NOT_OURS


def _rank_order(item: tuple[str, object]) -> tuple[str, int, str]:
    group, _, rank = item[0].rpartition(".")
    return (group, int(rank) if rank.isdecimal() else 0, rank)


def fresh_plain(spec: LeafSpec, live: object, _key: object) -> torch.Tensor:
    """Like the live tensor where there is one of that shape; else a plain tensor, on its device or the CPU."""
    if isinstance(live, torch.Tensor) and tuple(live.shape) == spec.shape and not live.is_meta:
        if is_dtensor(live):
            return fresh_like(live, spec.dtype)
        return fresh_tensor(spec.shape, spec.dtype, live.device)
    device = live.device if isinstance(live, torch.Tensor) and not live.is_meta else "cpu"
    return fresh_tensor(spec.shape, spec.dtype, device)


def _overlaps_itself(array: Any) -> bool:
    return any(stride == 0 and size > 1 for stride, size in zip(array.strides, array.shape, strict=True))


def malformed(component: str, what: str) -> NoReturn:
    raise RecordCorrupt(
        f"the saved structure of component {component} is not what this format writes: {what}\n"
        "  nothing was changed; another step may be intact",
        component=component,
    )
