"""Two steps side by side: what is equal by its digests, and by how much the rest differs.

Records say most of it: a span of a box with the same digest on both sides is the same bytes, and is
never fetched. Only what is left is read, verified, a bounded part at a time, and compared number by
number. Bits decide what is equal; numbers only say how far apart the rest is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ftckpt import values
from ftckpt.boxes import Box, span_boxes, whole
from ftckpt.capture import as_bytes_view, place
from ftckpt.capture.tensors import fresh_tensor
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import Commit, Position
from ftckpt.plan.restore import Placement, Saved, index_chunks, packs_of, plan_restore
from ftckpt.reader import DEFAULT, Progress, ReadSettings, check_packs, fetch, leaf_specs, read_fragments
from ftckpt.store.api import ObjectStore

BATCH_BYTES = 64 << 20
"""How much of each side is held at a time; one chunk, if that is more."""

Verdict = Literal["changed", "reshaped", "only_a", "only_b"]
"""``reshaped``: kind, dtype or shape differ, so that there are no numbers to compare."""


@dataclass(frozen=True, slots=True)
class ValueChange:
    """A plain value inside a component that differs, both as text; ``absent`` where there is none."""

    path: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class LeafDiff:
    """A leaf that is not equal. ``max_abs``: the largest absolute difference; NaN when a number on one
    side is none on the other; ``None`` when there are no numbers to compare.
    """

    name: str
    component: str
    verdict: Verdict
    a: LeafSpec | None
    b: LeafSpec | None
    changed_elems: int = 0
    max_abs: float | None = None
    values: tuple[ValueChange, ...] = ()


@dataclass(frozen=True, slots=True)
class ComponentDiff:
    """Leaves of one component by what became of them."""

    name: str
    equal: int
    changed: int
    only_a: int
    only_b: int
    max_abs: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What ``compare`` found: every component, and every leaf that is not equal. ``read_bytes`` is what
    had to be fetched to know.
    """

    a: Position
    b: Position
    components: tuple[ComponentDiff, ...]
    leaves: tuple[LeafDiff, ...]
    read_bytes: int

    @property
    def equal(self) -> bool:
        return not self.leaves


def compare(
    a: tuple[ObjectStore, Commit],
    b: tuple[ObjectStore, Commit],
    *,
    settings: ReadSettings = DEFAULT,
    progress: Progress | None = None,
    batch_bytes: int = BATCH_BYTES,
) -> Comparison:
    """Compare two commits, in one store or in two. Blocks until it is done; changes nothing.

    Raises:
        CorruptError, StoreError: something that had to be read could not be.
    """
    sides = (_Side.read(*a, settings), _Side.read(*b, settings))
    names = sorted(sides[0].specs.keys() | sides[1].specs.keys())
    found: dict[str, LeafDiff] = {}
    open_: list[tuple[LeafSpec, Box]] = []
    for name in names:
        specs = [side.specs.get(name) for side in sides]
        if None in specs or specs[0] != specs[1]:
            found[name] = _unlike(name, specs[0], specs[1])
        else:
            assert specs[0] is not None
            open_ += [(specs[0], box) for box in _unequal(*(side.index.get(name, ()) for side in sides))]
    batches = list(_batches(open_, batch_bytes))
    total = sum(box.numel * spec.itemsize_bytes for spec, box in open_)
    done = 0
    for batch in batches:
        parts = [side.read_boxes(batch) for side in sides]
        for (spec, box), left, right in zip(batch, *parts, strict=True):
            _add(found, spec, left, right)
            done += box.numel * spec.itemsize_bytes
        if progress is not None:
            progress(done, total)
    for name, diff in found.items():
        if {spec.kind for spec in (diff.a, diff.b) if spec is not None} == {"value"} and diff.a and diff.b:
            found[name] = _with_values(diff, *(side.value(name) for side in sides))
    return Comparison(
        a[1].at,
        b[1].at,
        _components(names, found),
        tuple(found[name] for name in sorted(found)),
        sum(side.read_bytes for side in sides),
    )


@dataclass(slots=True)
class _Side:
    """One of the two: its leaves, where their chunks are, and how to read boxes of them."""

    store: ObjectStore
    at: Position
    specs: Mapping[str, LeafSpec]
    index: Mapping[str, Sequence[Saved]]
    settings: ReadSettings
    read_bytes: int = 0

    @classmethod
    def read(cls, store: ObjectStore, commit: Commit, settings: ReadSettings) -> _Side:
        fragments = read_fragments(store, commit)
        return cls(store, commit.at, leaf_specs(fragments), index_chunks(fragments), settings)

    def read_boxes(self, wants: Sequence[tuple[LeafSpec, Box]]) -> list[torch.Tensor]:
        """The boxes of leaves, verified."""
        parts = [fresh_tensor(box.extent, spec.dtype) for spec, box in wants]
        fetches = plan_restore(wants, self.index)
        check_packs(self.store, packs_of(fetches), self.at)

        def put(placement: Placement, raw: memoryview) -> None:
            spec, box = wants[placement.want]
            piece = raw[placement.first_byte :][: placement.piece.numel * spec.itemsize_bytes]
            place(parts[placement.want], box, placement.piece, placement.region, piece, spec.dtype)

        fetch(self.store, fetches, put, self.at, self.settings)
        self.read_bytes += sum(item.stored_bytes for item in fetches)
        return parts

    def value(self, name: str) -> Any:
        """The plain values in a value leaf."""
        spec = self.specs[name]
        (packed,) = self.read_boxes([(spec, whole(spec.shape))])
        return values.unpack(as_bytes_view(packed))


def _component_of(leaf: str) -> str:
    return leaf.partition("@")[0].partition(".")[0]


def _unlike(name: str, a: LeafSpec | None, b: LeafSpec | None) -> LeafDiff:
    if a is not None and b is not None:
        packed = a.kind == b.kind == "value"  # its shape is only how many bytes it takes
        verdict: Verdict = "changed" if packed else "reshaped"
    else:
        verdict = "only_a" if b is None else "only_b"
    return LeafDiff(name, _component_of(name), verdict, a, b)


def _unequal(a: Iterable[Saved], b: Iterable[Saved]) -> Iterator[Box]:
    """The parts of a leaf whose digests do not prove them equal."""
    known = {(s.box, s.chunk.start, s.chunk.stop, s.chunk.raw) for s in b}
    for saved in a:
        chunk = saved.chunk
        if (saved.box, chunk.start, chunk.stop, chunk.raw) not in known:
            yield from (piece for _, piece in span_boxes(saved.box, chunk.start, chunk.stop))


def _batches(parts: Iterable[tuple[LeafSpec, Box]], batch_bytes: int) -> Iterator[list[tuple[LeafSpec, Box]]]:
    batch: list[tuple[LeafSpec, Box]] = []
    size = 0
    for spec, box in parts:
        part_bytes = box.numel * spec.itemsize_bytes
        if batch and size + part_bytes > batch_bytes:
            yield batch
            batch, size = [], 0
        batch.append((spec, box))
        size += part_bytes
    if batch:
        yield batch


def _add(found: dict[str, LeafDiff], spec: LeafSpec, a: torch.Tensor, b: torch.Tensor) -> None:
    """Note what a part of a leaf adds to its difference. Parts with equal bytes add nothing."""
    raw_a, raw_b = (np.frombuffer(as_bytes_view(part), np.uint8) for part in (a, b))
    differ = (raw_a != raw_b).reshape(-1, spec.itemsize_bytes).any(axis=1)
    if not differ.any():
        return
    before = found.get(spec.name) or LeafDiff(spec.name, _component_of(spec.name), "changed", spec, spec)
    farthest = None if spec.kind == "value" else max_abs(raw_a, raw_b, spec.dtype, differ)
    found[spec.name] = LeafDiff(
        spec.name,
        before.component,
        "changed",
        spec,
        spec,
        before.changed_elems + int(differ.sum()),
        _farther(before.max_abs, farthest),
    )


def _farther(a: float | None, b: float | None) -> float | None:
    """The larger of two differences; NaN is larger than any."""
    known = [one for one in (a, b) if one is not None]
    return float(np.max(known)) if known else None


Bytes = npt.NDArray[np.uint8]


def max_abs(a: Bytes, b: Bytes, dtype: str, among: npt.NDArray[np.bool_] | None = None) -> float | None:
    """The largest absolute difference between numbers given as raw bytes; ``among`` chooses elements.

    Differences of integers are exact before they become a float. Infinities of one sign are no
    distance apart, and neither are two NaN. ``None``: the dtype has no numbers.
    """
    left, right = _numbers(a, dtype), _numbers(b, dtype)
    if left is None or right is None:
        return None
    if among is not None:
        left, right = left[among], right[among]
    if not left.size:
        return 0.0
    if left.dtype.kind in "iu":
        unsigned = np.dtype(f"u{left.itemsize}")  # wraps around to the exact distance
        apart = np.maximum(left, right).astype(unsigned) - np.minimum(left, right).astype(unsigned)
        return float(apart.max())
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.where(same, 0.0, np.abs(left - right)).max())


def _numbers(raw: Bytes, dtype: str) -> Any:
    """Raw bytes as integers, or as floats wide enough for every value; ``None``: no numbers."""
    if dtype == "bool":
        return (raw != 0).astype(np.uint8)
    if dtype in _WIDER:
        return raw.view(dtype).astype(_WIDER[dtype])
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "complex32":
        pairs = raw.view(np.float16).astype(np.float64).reshape(-1, 2)
        return pairs[:, 0] + 1j * pairs[:, 1]
    if dtype.startswith("float8"):
        table = torch.arange(256, dtype=torch.uint8).view(getattr(torch, dtype)).to(torch.float64).numpy()
        return table[raw]
    return raw.view(dtype) if dtype in _INTEGERS else None


_WIDER = {
    "float16": np.float64,
    "float32": np.float64,
    "float64": np.float64,
    "complex64": np.complex128,
    "complex128": np.complex128,
}
_INTEGERS = frozenset({"uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"})


# --- plain values ---------------------------------------------------------------------------------


def _with_values(diff: LeafDiff, a: Any, b: Any) -> LeafDiff:
    if isinstance(a, dict) and isinstance(b, dict) and "tree" in a and "tree" in b:
        changes = [*_changes(a.get("kind"), b.get("kind"), f"{diff.name} (kind)")]
        changes += _changes(a["tree"], b["tree"], diff.name)
    else:
        changes = [*_changes(a, b, diff.name)]
    farthest: float | None = None
    for _, distance in changes:
        farthest = _farther(farthest, distance)
    told = tuple(change for change, _ in changes)
    return LeafDiff(diff.name, diff.component, "changed", diff.a, diff.b, len(told), farthest, told)


_ABSENT = object()


def _changes(a: Any, b: Any, path: str) -> Iterator[tuple[ValueChange, float | None]]:
    """Every value that differs, and by how much if both are numbers."""
    if type(a) is type(b) and isinstance(a, dict):
        for key in [*a, *(key for key in b if key not in a)]:
            yield from _changes(a.get(key, _ABSENT), b.get(key, _ABSENT), values.joined(path, key))
        if list(a) != list(b) and a.keys() == b.keys():
            yield ValueChange(f"{path} (order of keys)", _text(list(a)), _text(list(b))), None
    elif type(a) is type(b) and isinstance(a, (list, tuple, deque)) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _changes(one, other, f"{path}.{number}")
    elif a is _ABSENT or b is _ABSENT or not _same(a, b):
        yield ValueChange(path, _text(a), _text(b)), _distance(a, b)


def _same(a: Any, b: Any) -> bool:
    return values.pack(a, leaf="a") == values.pack(b, leaf="b")


def _text(value: Any) -> str:
    text = "absent" if value is _ABSENT else repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def _distance(a: Any, b: Any) -> float | None:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape and a.dtype == b.dtype:
        name = a.dtype.name
        raw = [np.frombuffer(np.ascontiguousarray(one).tobytes(), np.uint8) for one in (a, b)]
        return max_abs(raw[0], raw[1], name) if name in {"bool", *_WIDER, *_INTEGERS} else None
    numbers = (int, float, np.integer, np.floating)
    if isinstance(a, numbers) and isinstance(b, numbers) and bool not in (type(a), type(b)):
        try:
            return abs(float(a) - float(b)) if isinstance(a, (float, np.floating)) else float(abs(a - b))
        except OverflowError:
            return inf
    return None


def _components(names: Iterable[str], found: Mapping[str, LeafDiff]) -> tuple[ComponentDiff, ...]:
    sums: dict[str, list[int]] = {}
    farthest: dict[str, float | None] = {}
    for name in names:
        component = _component_of(name)
        counts = sums.setdefault(component, [0, 0, 0, 0])
        diff = found.get(name)
        verdict = "equal" if diff is None else diff.verdict
        counts[{"equal": 0, "changed": 1, "reshaped": 1, "only_a": 2, "only_b": 3}[verdict]] += 1
        farthest[component] = _farther(farthest.get(component), diff.max_abs if diff else None)
    return tuple(
        ComponentDiff(name, equal, changed, only_a, only_b, farthest[name])
        for name, (equal, changed, only_a, only_b) in sorted(sums.items())
    )
