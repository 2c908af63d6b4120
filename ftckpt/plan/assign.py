"""Who writes what: a function of names, boxes and topology that every rank computes alone.

A part of a leaf that several ranks hold is cut into chunks and the chunks are shared out over the
holders. All parts with the same holders form one line, in name order; holder i of k writes what
starts in the i-th k-th of the line's bytes. A short line goes to the first of its holders only: thousands
of ranks that wrote a scalar each would have to be asked for them, one by one, by every rank that restores.
Nothing is gathered; a rank's cost is that of its own holdings.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import msgspec

from ftckpt.boxes import Box, overlap
from ftckpt.leaf import Holding

DEFAULT_CHUNK_BYTES = 4 << 20

PARTS, SMALLEST_PART_BYTES = 8, 256 << 10
"""Boxes are cut into multiples of so many equal chunks, unless those would be smaller than this."""

SHORT_LINE_WRITERS = 16
"""So many holders share a line out however short it is; more only if each has as much to write as that."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: group ``index`` among ``participants`` groups, ``rank`` inside it."""

    index: int
    participants: int
    rank: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < self.participants and self.rank >= 0, self


class ChunkTask(msgspec.Struct, frozen=True, gc=False):
    """Write elements ``start`` to ``stop`` of holding number ``holding``. An empty task (start ==
    stop) only records that the leaf, or this part of it, exists.
    """

    holding: int
    start: int
    stop: int


def chunk_spans(numel: int, itemsize_bytes: int, chunk_bytes: int) -> Iterator[tuple[int, int]]:
    """Cut a box of ``numel`` elements into spans of at most ``chunk_bytes``, a whole element at least.

    A large one is cut into a multiple of eight equal spans, so that who wants a half, a quarter or an eighth
    of its rows reads and checks no other bytes, whatever the size of the tensor.
    """
    step = max(1, chunk_bytes // itemsize_bytes)
    if numel * itemsize_bytes < PARTS * SMALLEST_PART_BYTES:
        for start in range(0, numel, step):
            yield start, min(start + step, numel)
        return
    count = -(-numel // (step * PARTS)) * PARTS
    for number in range(count):
        yield number * numel // count, (number + 1) * numel // count


def plan_save(
    holdings: Sequence[Holding], place: Place, chunk_bytes: int = DEFAULT_CHUNK_BYTES
) -> tuple[ChunkTask, ...]:
    """What this rank writes, in the order of ``holdings`` (which every rank sorts by name).

    Over all ranks, every element of every leaf is in exactly one task.
    """
    lines: dict[tuple[tuple[int, ...], bool], list[int]] = {}
    for number, holding in enumerate(holdings):
        lines.setdefault((holding.ranks, holding.every_group), []).append(number)
    tasks = []
    for (ranks, every_group), numbers in lines.items():
        groups = place.participants if every_group else 1
        holders = groups * len(ranks)
        me = (place.index if every_group else 0) * len(ranks) + ranks.index(place.rank)
        total_bytes = sum(holdings[number].size_bytes for number in numbers)
        least_bytes = min(chunk_bytes, SMALLEST_PART_BYTES)
        holders = min(holders, max(SHORT_LINE_WRITERS, -(-total_bytes // least_bytes)))
        done_bytes = 0
        for number in numbers:
            holding = holdings[number]
            itemsize = holding.leaf.itemsize_bytes
            if not holding.box.numel:
                if me == 0 and _is_empty(holding):
                    tasks.append(ChunkTask(number, 0, 0))
                continue
            for start, stop in chunk_spans(holding.box.numel, itemsize, chunk_bytes):
                if (done_bytes + start * itemsize) * holders // total_bytes == me:
                    tasks.append(ChunkTask(number, start, stop))
            done_bytes += holding.size_bytes
    return tuple(sorted(tasks, key=lambda task: (task.holding, task.start)))


def _is_empty(holding: Holding) -> bool:
    """Whether the whole leaf has no elements (not just this rank's part)."""
    return 0 in holding.leaf.shape


def covers(shape: tuple[int, ...], spans: Sequence[tuple[Box, int, int]]) -> bool:
    """Whether spans of boxes hold every element of a tensor of that shape, and none twice.

    Equal spans count once (a slow owner and whoever took over may both have written one).
    """
    distinct = set(spans)
    return sum(stop - start for _, start, stop in distinct) == prod(shape) and not held_twice(distinct)


def held_twice(spans: Iterable[tuple[Box, int, int]]) -> bool:
    """Whether two of these spans of boxes share an element."""
    ordered = sorted(spans, key=lambda span: (span[0].offset, span[0].extent, span[1], span[2]))
    if any(box == other and start < stop for (box, _, stop), (other, start, _) in pairwise(ordered)):
        return True
    return overlap(list({box for box, _, _ in ordered})) is not None
