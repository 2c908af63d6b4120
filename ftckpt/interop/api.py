"""What every format has in common: tensors by name, in a tree with plain values, read and written in parts.

A ``Source`` is a checkpoint of another format that becomes a step of a run, a ``Sink`` one that is made of
a step. Neither knows the other, nor what a run is: ``importing`` and ``exporting`` stand between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch

from ftckpt.boxes import Box, whole
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.store.api import Buffer

MARK = "ftckpt-export.json"
"""Stands in a folder for as long as an export into it has not ended."""

COMPARED_BYTES = 4 << 20
Progress = Callable[[int, int], None]
"""Hears of bytes done, and of bytes in all."""


@dataclass(frozen=True, slots=True)
class Array:
    """A tensor of the other format, under the name that it has there. ``dtype`` is torch's, without
    ``torch.``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.numel * self.itemsize_bytes


class Source(Protocol):
    """A checkpoint of another format, opened. Its structure is known; bytes are read when asked for."""

    @property
    def tree(self) -> Any:
        """Dicts, lists and plain values, with an ``Array`` wherever a tensor stands. Tied tensors are one
        and the same ``Array``.
        """
        ...

    @property
    def identity(self) -> str:
        """Tells this checkpoint from most others, without reading all of it: a run that claims to be made of it
        is read against it.
        """
        ...

    def read(self, array: Array, start: int, stop: int) -> Buffer:
        """Elements ``start`` to ``stop`` of an array, row-major. From any thread.

        Memory is bounded by what one stored part takes, or less where the format allows it.

        Raises:
            ForeignDamaged: they are not there.
        """
        ...


Want = tuple[Array, Box]
"""A part of an array."""


@dataclass(frozen=True, slots=True)
class Outline:
    """What is exported: ``arrays`` by name, in order, and of each component the ``trees`` that they
    stand in. ``bare``: it is one component, whose name is in front of no array. ``tied``: arrays whose bytes
    are those of another, by name. ``about`` says where it is from. ``apart``: the names of what each rank has
    its own of; in the trees ``None`` stands there.
    """

    arrays: tuple[Array, ...]
    trees: Mapping[str, Any]
    bare: bool = False
    tied: Mapping[str, str] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)
    apart: frozenset[str] = frozenset()


class Reading(Protocol):
    """Gives the parts of arrays that a sink asks for."""

    def __call__(self, wants: Iterable[Want]) -> Iterator[torch.Tensor]:
        """Each part, in that order: contiguous, in host memory, of the array's dtype. A few are read ahead.
        A part is valid until the next one is asked for: its memory is used again.
        """
        ...


class Sink(Protocol):
    """Where an export goes."""

    @property
    def single(self) -> str | None:
        """The one file that it writes, or ``None``: it fills a folder, of which it owns some names."""
        ...

    def refuses(self, outline: Outline) -> Sequence[str]:
        """What in it has no form in this format; empty: nothing. Called before anything is changed, so that
        whatever else the export takes is looked at here, too.
        """
        ...

    def owned(self, names: Collection[str], arrays: Sequence[str]) -> Sequence[str]:
        """Which of the files at the destination make up what an export in this format wrote there, so that
        ``--overwrite`` removes them. ``arrays``: those that exports had begun to write which did not end.

        Raises:
            DestinationTaken: what is there cannot be told from what others wrote.
        """
        ...

    def write(self, outline: Outline, read: Reading) -> Sequence[str]:
        """Write everything, and what makes it a whole checkpoint last of all. Returns what was left out."""
        ...


def parts(array: Array, limit_bytes: int) -> Iterator[Box]:
    """Cut an array into boxes of at most ``limit_bytes`` (an element at least), each of them one
    contiguous span of its row-major elements, in that order. An empty array has one empty part.
    """
    yield from _cut(whole(array.shape), max(1, limit_bytes // array.itemsize_bytes))


def _cut(box: Box, limit: int) -> Iterator[Box]:
    if box.numel <= limit or not box.extent:
        yield box
        return
    axis = next(i for i, n in enumerate(box.extent) if n > 1)
    row = prod(box.extent[axis + 1 :])
    step = max(1, limit // row)
    for start in range(0, box.extent[axis], step):
        count = min(step, box.extent[axis] - start)
        offset = (*box.offset[:axis], box.offset[axis] + start, *box.offset[axis + 1 :])
        yield from _cut(Box(offset, (*box.extent[:axis], count, *box.extent[axis + 1 :])), limit)


def walk(tree: Any, path: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], Any]]:
    """Every value of a tree that is no container, with its path."""
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from walk(value, (*path, key))
    elif isinstance(tree, list | tuple | deque) and tree:
        for index, value in enumerate(tree):
            yield from walk(value, (*path, index))
    else:
        yield path, tree


def plain_values(outline: Outline) -> list[str]:
    """What a format leaves out that holds arrays only: names, one for all of a container that has no array in it."""
    found = []
    for component, tree in outline.trees.items():
        _, names = _plain(tree, "" if outline.bare else component, outline.apart)
        found += [f"{name or component} (plain values)" for name in names]
    return found


def _plain(node: Any, path: str, apart: frozenset[str]) -> tuple[bool, list[str]]:
    """Whether arrays are in it, and the names of what is none."""
    if isinstance(node, Array):
        return True, []
    if not isinstance(node, Mapping | list | tuple | deque):
        return False, [] if path in apart else [path]
    items = node.items() if isinstance(node, Mapping) else enumerate(node)
    inside = [_plain(item, f"{path}.{key}".lstrip("."), apart) for key, item in items]
    names = [name for _, part in inside for name in part]
    if any(has_arrays for has_arrays, _ in inside):
        return True, names
    return False, [path] if names else []


def equal(source: Source, a: Array, b: Array) -> bool:
    """Whether two arrays have one dtype and shape, and hold the same bytes. Most that do not differ at once."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    step = 1024
    start = 0
    while start < a.numel:
        stop = min(start + step, a.numel)
        if memoryview(source.read(a, start, stop)) != memoryview(source.read(b, start, stop)):
            return False
        start, step = stop, max(step, COMPARED_BYTES // a.itemsize_bytes)
    return True
