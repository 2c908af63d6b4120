"""What to fetch: wanted boxes intersected with saved ones. Pure arithmetic on records.

Every wanted element comes from exactly one chunk, and only chunks that hold a wanted element are
fetched, with the bases that they build on.

Values of which every chunk makes one are msgspec structs here: they are made five times as fast as dataclasses.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter, itemgetter

import msgspec

from ftckpt.boxes import Box, intersect, rows_touched, span_boxes
from ftckpt.codec import RAW
from ftckpt.errors import RecordCorrupt
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.manifest import ChunkRecord, Fragment
from ftckpt.plan.assign import held_twice


class Link(msgspec.Struct, frozen=True, gc=False):
    """A base that a chunk builds on, with its pack's key and size made explicit."""

    chunk: ChunkRecord
    pack: str
    pack_bytes: int


class Saved(msgspec.Struct, frozen=True, gc=False):
    """One chunk of one leaf, with its pack's key and size made explicit, and its bases nearest first."""

    leaf: str
    box: Box
    chunk: ChunkRecord
    pack: str
    pack_bytes: int
    bases: tuple[Link, ...] = ()


class Placement(msgspec.Struct, frozen=True, gc=False):
    """Part of a decoded chunk that lands in want number ``want``: the elements of ``region``, which
    lies inside ``piece``, whose elements start at byte ``first_byte`` of the raw chunk.
    """

    want: int
    piece: Box
    region: Box
    first_byte: int


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """One chunk to fetch, verify, decode to ``raw_bytes`` and place; ``bases`` nearest first."""

    leaf: str
    pack: str
    pack_bytes: int
    chunk: ChunkRecord
    raw_bytes: int
    placements: tuple[Placement, ...]
    bases: tuple[Link, ...] = ()

    @property
    def links(self) -> tuple[Link, ...]:
        """The chunk itself, then its bases."""
        return (Link(self.chunk, self.pack, self.pack_bytes), *self.bases)

    @property
    def stored_bytes(self) -> int:
        """What is fetched for it, bases included."""
        if not self.bases:
            return self.chunk.size
        return self.chunk.size + sum(link.chunk.size for link in self.bases)

    @property
    def memory_bytes(self) -> int:
        """What decoding it takes beside the stored bytes: planes need twice the raw bytes, and a
        delta its base too.
        """
        if self.chunk.codec == RAW:
            return 0
        return self.raw_bytes * (3 if self.bases else 2)


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes ``start`` to ``end`` of a pack, read by one request."""

    pack: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring chunks of one pack that are read by one request, ``start`` to ``end`` in bytes, and
    what is read beside it for the bases they build on.
    """

    pack: str
    start: int
    end: int
    fetches: tuple[Fetch, ...]
    bases: tuple[Span, ...] = ()

    @property
    def spans(self) -> tuple[Span, ...]:
        """All its requests."""
        return (Span(self.pack, self.start, self.end), *self.bases)

    @property
    def read_bytes(self) -> int:
        """What its requests bring in all."""
        return sum(span.end - span.start for span in self.spans)


def index_chunks(
    fragments: Iterable[Fragment], names: Container[str] | None = None
) -> dict[str, tuple[Saved, ...]]:
    """Chunks by leaf name, of all leaves or of those in ``names``. A span of a box that two fragments
    hold is listed once.

    Tuples, and one leaf at a time: Python's collector looks at every list and dict again and again, and
    where there is one for each of many leaves it holds all threads meanwhile.
    """
    parts = [
        (leaf.name, leaf, fragment)
        for fragment in fragments
        for leaf in fragment.leaves
        if names is None or leaf.name in names
    ]
    found: dict[str, tuple[Saved, ...]] = dict.fromkeys((name for name, _, _ in parts), ())
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], Box] = {}  # most tensors of a model have few shapes
    parts.sort(key=itemgetter(0))
    for name, group in groupby(parts, key=itemgetter(0)):
        spans: dict[tuple[int, int, int], Saved] = {}
        for _, leaf, fragment in group:
            for record in leaf.boxes:
                offset, extent = record.offset, record.extent
                box = boxes.get((offset, extent))
                if box is None:
                    box = boxes[offset, extent] = record.box
                which = id(box)
                for chunk in record.chunks:
                    key = (which, chunk.start, chunk.stop)
                    if key not in spans:
                        pack = fragment.packs[chunk.pack]
                        bases = bases_of(fragment, chunk) if chunk.base is not None else ()
                        spans[key] = Saved(name, box, chunk, pack.key, pack.size, bases)
        found[name] = tuple(spans.values())
    return found


def bases_of(fragment: Fragment, chunk: ChunkRecord) -> tuple[Link, ...]:
    """What a chunk of a fragment builds on, nearest first."""
    return tuple(
        Link(base, fragment.packs[base.pack].key, fragment.packs[base.pack].size) for base in chunk.chain
    )


def packs_of(fetches: Iterable[Fetch]) -> set[tuple[str, int]]:
    """Key and stated size of every pack that must be there, those of bases included."""
    return {(part.pack, part.pack_bytes) for item in fetches for part in item.links}


def plan_restore(
    wants: Sequence[tuple[LeafSpec, Box]], index: Mapping[str, Sequence[Saved]]
) -> tuple[Fetch, ...]:
    """The chunks that fill every wanted box, each wanted element once.

    Raises:
        RecordCorrupt: the saved chunks do not hold all wanted elements, or hold one twice.
    """
    fetched: dict[int, tuple[Saved, LeafSpec, list[Placement]]] = {}
    boxes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}  # of few shapes, in most models
    shares: dict[tuple[int, int], _Share | None] = {}  # by what is wanted, and the identity of the saved box
    doubles: dict[tuple[tuple[int, int, int], ...], bool] = {}
    for number, (leaf, wanted) in enumerate(wants):
        itemsize, numel, filled = ITEMSIZE_BYTES[leaf.dtype], wanted.numel, 0
        asked = boxes.setdefault((wanted.offset, wanted.extent), len(boxes))
        used: list[Saved] = []
        for saved in index.get(leaf.name, ()) if numel else ():
            box, chunk = saved.box, saved.chunk
            key = (asked, id(box))
            if key in shares:
                share = shares[key]
            else:
                share = shares[key] = _share(box, wanted)
            start, stop = chunk.start, chunk.stop
            if share is None or stop <= share.first or share.last <= start:
                continue
            used.append(saved)
            if start <= share.first and share.last <= stop:
                pieces, held = share.pieces, share.numel
            else:
                pieces, held = share.within(start, stop)
            if not held:
                continue
            filled += held
            found = fetched.get(id(saved))
            if found is None:
                found = fetched[id(saved)] = (saved, leaf, [])
            for begins, piece, part in pieces:
                found[2].append(Placement(number, piece, part, (begins - start) * itemsize))
        twice = False
        if len(used) > 1:
            spans = tuple([(id(one.box), one.chunk.start, one.chunk.stop) for one in used])
            if spans not in doubles:
                doubles[spans] = held_twice([(one.box, one.chunk.start, one.chunk.stop) for one in used])
            twice = doubles[spans]
        if filled != numel or twice:
            raise RecordCorrupt(
                f"RecordCorrupt: the saved chunks give {filled} of the {numel} elements wanted of "
                f"{leaf.name}{', some of them twice' if twice else ''}\n"
                f"  wanted {wanted}; the commit's fragments do not tile this leaf",
                leaf=leaf.name,
            )
    fetches = [
        Fetch(
            saved.leaf,
            saved.pack,
            saved.pack_bytes,
            saved.chunk,
            (saved.chunk.stop - saved.chunk.start) * ITEMSIZE_BYTES[leaf.dtype],
            tuple(placements),
            saved.bases,
        )
        for saved, leaf, placements in fetched.values()
    ]
    return tuple(sorted(fetches, key=attrgetter("pack", "chunk.offset")))


def coalesce(fetches: Sequence[Fetch], gap_bytes: int, run_bytes: int) -> list[Run]:
    """Join chunks of one pack that lie at most ``gap_bytes`` apart, up to ``run_bytes`` a run, bases
    included. Bases of neighbours mostly are neighbours too, and are joined alike.
    """
    runs: list[Run] = []
    joined: list[Fetch] = []
    start = end = base_bytes = 0

    def close() -> None:
        if joined:
            bases = _base_spans(joined, gap_bytes)
            runs.append(Run(joined[0].pack, start, end, tuple(joined), bases))
            joined.clear()

    for fetch in fetches:
        chunk = fetch.chunk
        first, last = chunk.offset, chunk.offset + chunk.size
        more_bytes = fetch.stored_bytes - chunk.size if fetch.bases else 0
        if not (
            joined
            and joined[0].pack == fetch.pack
            and first - end <= gap_bytes
            and last - start + base_bytes + more_bytes <= run_bytes
        ):
            close()
            start, end, base_bytes = first, last, 0
        joined.append(fetch)
        end, base_bytes = max(end, last), base_bytes + more_bytes
    close()
    return runs


def _base_spans(fetches: Iterable[Fetch], gap_bytes: int) -> tuple[Span, ...]:
    links = {
        (link.pack, link.chunk.offset, link.chunk.offset + link.chunk.size)
        for fetch in fetches
        for link in fetch.bases
    }
    spans: list[Span] = []
    for pack, start, end in sorted(links):
        last = spans[-1] if spans else None
        if last is not None and last.pack == pack and start - last.end <= gap_bytes:
            spans[-1] = Span(pack, last.start, max(last.end, end))
        else:
            spans.append(Span(pack, start, end))
    return tuple(spans)


_Pieces = tuple[tuple[int, Box, Box], ...]
"""Where in a saved box each piece begins, its box, and the part of it that is wanted."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What a saved box and a wanted one have in common: ``region``, of ``numel`` elements, all of them
    within ``first`` to ``last`` of the saved box, in ``pieces`` that cover that span.
    """

    box: Box
    region: Box
    first: int
    last: int
    numel: int
    pieces: _Pieces

    def within(self, start: int, stop: int) -> tuple[_Pieces, int]:
        """The pieces of so much of the span as lies between ``start`` and ``stop``, and their elements."""
        pieces = _pieces(self.box, self.region, max(self.first, start), min(self.last, stop))
        return pieces, sum(part.numel for _, _, part in pieces)


def _share(saved: Box, wanted: Box) -> _Share | None:
    region = intersect(saved, wanted)
    if region is None:
        return None
    first, last = rows_touched(saved, region)
    return _Share(saved, region, first, last, region.numel, _pieces(saved, region, first, last))


def _pieces(box: Box, region: Box, start: int, stop: int) -> _Pieces:
    found = ((begins, piece, intersect(piece, region)) for begins, piece in span_boxes(box, start, stop))
    return tuple((begins, piece, part) for begins, piece, part in found if part is not None)
