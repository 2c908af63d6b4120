"""What to fetch: wanted boxes intersected with saved ones. Pure arithmetic on records.

Every wanted element comes from exactly one chunk, and only chunks that hold a wanted element are
fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.boxes import Box, intersect, rows_touched, span_boxes
from ftckpt.errors import RecordCorrupt
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.manifest import ChunkRecord, Fragment
from ftckpt.plan.assign import held_twice


@dataclass(frozen=True, slots=True)
class Saved:
    """One chunk of one leaf, with its pack's key and size made explicit."""

    leaf: str
    box: Box
    chunk: ChunkRecord
    pack: str
    pack_bytes: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Part of a decoded chunk that lands in want number ``want``: the elements of ``region``, which
    lies inside ``piece``, whose elements start at byte ``first_byte`` of the raw chunk.
    """

    want: int
    piece: Box
    region: Box
    first_byte: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """One chunk to fetch, verify, decode to ``raw_bytes`` and place."""

    leaf: str
    pack: str
    pack_bytes: int
    chunk: ChunkRecord
    raw_bytes: int
    placements: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks of one pack that are read by one request: ``start`` to ``end`` in bytes."""

    pack: str
    start: int
    end: int
    fetches: tuple[Fetch, ...]


def index_chunks(fragments: Iterable[Fragment]) -> dict[str, list[Saved]]:
    """Chunks by leaf name. A span of a box that two fragments hold is listed once."""
    found: dict[str, dict[tuple[Box, int, int], Saved]] = {}
    for fragment in fragments:
        for leaf in fragment.leaves:
            spans = found.setdefault(leaf.name, {})
            for record in leaf.boxes:
                box = record.box
                for chunk in record.chunks:
                    pack = fragment.packs[chunk.pack]
                    spans.setdefault(
                        (box, chunk.start, chunk.stop), Saved(leaf.name, box, chunk, pack.key, pack.size)
                    )
    return {name: list(spans.values()) for name, spans in found.items()}


def plan_restore(
    wants: Sequence[tuple[LeafSpec, Box]], index: Mapping[str, Sequence[Saved]]
) -> tuple[Fetch, ...]:
    """The chunks that fill every wanted box, each wanted element once.

    Raises:
        RecordCorrupt: the saved chunks do not hold all wanted elements, or hold one twice.
    """
    placements: dict[tuple[str, str, int, int, Box], tuple[Saved, list[Placement]]] = {}
    for number, (leaf, wanted) in enumerate(wants):
        itemsize = ITEMSIZE_BYTES[leaf.dtype]
        filled, used = 0, []
        for saved in index.get(leaf.name, ()) if wanted.numel else ():
            region = intersect(saved.box, wanted)
            if region is None:
                continue
            chunk = saved.chunk
            first, last = rows_touched(saved.box, region)
            start, stop = max(first, chunk.start), min(last, chunk.stop)
            if start >= stop:
                continue
            used.append((saved.box, chunk.start, chunk.stop))
            for begins, piece in span_boxes(saved.box, start, stop):
                part = intersect(piece, region)
                if part is not None:
                    filled += part.numel
                    key = (saved.leaf, saved.pack, chunk.offset, chunk.start, saved.box)
                    placements.setdefault(key, (saved, []))[1].append(
                        Placement(number, piece, part, (begins - chunk.start) * itemsize)
                    )
        twice = held_twice(used)
        if filled != wanted.numel or twice:
            raise RecordCorrupt(
                f"RecordCorrupt: the saved chunks give {filled} of the {wanted.numel} elements wanted of "
                f"{leaf.name}{', some of them twice' if twice else ''}\n"
                f"  wanted {wanted}; the commit's fragments do not tile this leaf",
                leaf=leaf.name,
            )
    specs = {leaf.name: leaf for leaf, _ in wants}
    fetches = [
        Fetch(
            leaf=saved.leaf,
            pack=saved.pack,
            pack_bytes=saved.pack_bytes,
            chunk=saved.chunk,
            raw_bytes=(saved.chunk.stop - saved.chunk.start) * specs[saved.leaf].itemsize_bytes,
            placements=tuple(parts),
        )
        for saved, parts in placements.values()
    ]
    return tuple(sorted(fetches, key=lambda f: (f.pack, f.chunk.offset)))


def coalesce(fetches: Sequence[Fetch], gap_bytes: int, run_bytes: int) -> list[Run]:
    """Join chunks of one pack that lie at most ``gap_bytes`` apart, up to ``run_bytes`` a request."""
    runs: list[Run] = []
    for fetch in fetches:
        start, end = fetch.chunk.offset, fetch.chunk.offset + fetch.chunk.size
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.pack == fetch.pack
            and start - last.end <= gap_bytes
            and end - last.start <= run_bytes
        ):
            runs[-1] = Run(last.pack, last.start, max(last.end, end), (*last.fetches, fetch))
        else:
            runs.append(Run(fetch.pack, start, end, (fetch,)))
    return runs
