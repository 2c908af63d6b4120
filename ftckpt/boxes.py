"""Geometry of shards: axis-aligned boxes inside a global tensor.

A ``Box`` says which elements of a global tensor a shard holds. Resharding is nothing more than
intersecting the boxes that were saved with the boxes that are wanted, so everything in this module
is arithmetic on integers: no torch, no store, no ranks.

Units: every offset and extent counts *elements*, never bytes. A *span* is a run of elements in the
row-major order of one box.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import msgspec


class Box(msgspec.Struct, frozen=True, order=True, gc=False):
    """A hyper-rectangle of elements.

    ``offset`` and ``extent`` both have length ndim. A zero-dimensional tensor is the box with two
    empty tuples and holds one element.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.offset) == len(self.extent), (self.offset, self.extent)
        assert min(self.extent, default=0) >= 0 <= min(self.offset, default=0), (self.offset, self.extent)

    @property
    def numel(self) -> int:
        return prod(self.extent)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether the box lies within a tensor of that shape."""
        return len(shape) == len(self.extent) and all(
            o + n <= size for o, n, size in zip(self.offset, self.extent, shape, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box of a tensor that is not sharded."""
    return Box((0,) * len(shape), tuple(shape))


def intersect(a: Box, b: Box) -> Box | None:
    """The elements in both boxes, or ``None`` when they share none."""
    if a == b:
        return a if a.numel else None
    low = tuple(map(max, a.offset, b.offset))
    high = tuple(min(i + n, j + m) for i, n, j, m in zip(a.offset, a.extent, b.offset, b.extent, strict=True))
    if any(end <= start for start, end in zip(low, high, strict=True)):
        return None
    return Box(low, tuple(end - start for start, end in zip(low, high, strict=True)))


def span_boxes(box: Box, start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Cut a span of ``box`` into boxes in global coordinates, in span order.

    Yields ``(first, piece)``: the elements of ``piece``, row-major, are the elements
    ``first … first + piece.numel`` of the span's box. At most 2 * ndim - 1 pieces.
    """
    assert 0 <= start <= stop <= box.numel, (start, stop, box)
    if start == stop:
        return
    if stop - start == box.numel:
        yield 0, box
        return
    row = prod(box.extent[1:])
    first_row, last_row = start // row, (stop - 1) // row
    if start == first_row * row and stop == (last_row + 1) * row:
        yield start, _rows(box, first_row, last_row + 1)
    elif first_row == last_row:
        inner = Box(box.offset[1:], box.extent[1:])
        for first, piece in span_boxes(inner, start - first_row * row, stop - first_row * row):
            yield first_row * row + first, Box((box.offset[0] + first_row, *piece.offset), (1, *piece.extent))
    else:
        head = -(-start // row)  # the first row that is whole
        tail = stop // row
        if start < head * row:
            yield from span_boxes(box, start, head * row)
        if head < tail:
            yield head * row, _rows(box, head, tail)
        if tail * row < stop:
            yield from span_boxes(box, tail * row, stop)


def _rows(box: Box, first: int, last: int) -> Box:
    return Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.extent[1:]))


def rows_touched(box: Box, region: Box) -> tuple[int, int]:
    """The smallest span of ``box`` that holds every element of ``region``, which lies inside it."""
    first = last = 0
    for offset, extent, low, size in zip(box.offset, box.extent, region.offset, region.extent, strict=True):
        first = first * extent + (low - offset)
        last = last * extent + (low - offset + size - 1)
    return first, last + 1


def overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that share an element, or ``None``. Near linear for boxes that tile along the
    first dimension, as shards do.
    """
    todo = sorted((box for box in boxes if box.numel), key=lambda box: (box.offset, box.extent))
    if not todo or not todo[0].extent:
        return (todo[0], todo[1]) if len(todo) > 1 else None
    active: list[Box] = []
    for box in todo:
        active = [other for other in active if other.offset[0] + other.extent[0] > box.offset[0]]
        for other in active:
            if intersect(other, box) is not None:
                return other, box
        active.append(box)
    return None
