"""The cells in which a lazy view of a saved tensor is read.

A view is read cell by cell, and a cell from every saved chunk that it meets. So cells are small, and
where it can be had their edges lie on those of chunks: then a slice brings the chunks that it overlaps
and no other. Arithmetic on integers only.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd, prod

from ftckpt.boxes import Box, intersect, rows_touched, span_boxes
from ftckpt.plan.restore import Saved

CELL_BYTES = 256 << 10
LEAST_BYTES = 16 << 10
"""A cell is not made smaller than this to meet the edges of chunks: each costs a call."""


def cell_shape(
    shape: Sequence[int],
    itemsize_bytes: int,
    spans: Iterable[tuple[Box, int, int]],
    *,
    cell_bytes: int = CELL_BYTES,
    least_bytes: int = LEAST_BYTES,
) -> tuple[int, ...]:
    """The shape of cells for a tensor of which these spans of boxes were saved.

    Row-major: as many whole trailing dimensions as ``cell_bytes`` allow, a part of the one before, and one
    of each before that. The part divides the places where chunks begin and end, unless it would be so
    small that a cell had less than ``least_bytes``; then a cell may meet two chunks.
    """
    edges = _edges(shape, spans)
    cell = [1] * len(shape)
    room = max(1, cell_bytes // itemsize_bytes)
    for axis in reversed(range(len(shape))):
        inner = prod(cell[axis + 1 :])
        size = max(1, shape[axis])
        most = max(1, room // inner)
        if size <= most:
            cell[axis] = size
            continue
        least = min(most, max(1, least_bytes // itemsize_bytes // inner))
        fitting = max(n for n in range(1, most + 1) if edges[axis] % n == 0)
        cell[axis] = fitting if fitting >= least else most
        break
    return tuple(cell)


def _edges(shape: Sequence[int], spans: Iterable[tuple[Box, int, int]]) -> list[int]:
    """For each dimension, what divides every place inside the tensor where a saved piece begins or ends."""
    common = [0] * len(shape)
    for box, start, stop in spans:
        for _, piece in span_boxes(box, start, stop):
            for axis, (low, size) in enumerate(zip(piece.offset, piece.extent, strict=True)):
                for edge in (low, low + size):
                    if 0 < edge < shape[axis]:
                        common[axis] = gcd(common[axis], edge)
    return common


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The saved chunks of one tensor, ordered so that those of a region are found without a search of all."""

    parts: tuple[tuple[Box, tuple[Saved, ...]], ...]

    def meeting(self, region: Box) -> Iterator[Saved]:
        """The chunks that can hold an element of ``region``."""
        for box, chunks in self.parts:
            inside = intersect(box, region)
            if inside is not None:
                first, last = rows_touched(box, inside)
                low = bisect_right(chunks, first, key=_stop)
                yield from chunks[low : bisect_left(chunks, last, key=_start)]


def arranged(saved: Iterable[Saved]) -> SavedTensor:
    """The same chunks, by box and in order."""
    parts: dict[Box, list[Saved]] = {}
    for one in saved:
        parts.setdefault(one.box, []).append(one)
    return SavedTensor(tuple((box, tuple(sorted(chunks, key=_start))) for box, chunks in parts.items()))


def _start(saved: Saved) -> int:
    return saved.chunk.start


def _stop(saved: Saved) -> int:
    return saved.chunk.stop
