"""What to fetch: wanted boxes intersected with saved ones. Pure arithmetic on records.

Every wanted element comes from exactly one chunk, and only chunks that hold a wanted element are
fetched, with the bases that they build on.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.boxes import Box, intersect, rows_touched, span_boxes
from ftckpt.errors import RecordCorrupt
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.manifest import ChunkRecord, Fragment
from ftckpt.plan.assign import held_twice


@dataclass(frozen=True, slots=True)
class Link:
    """A base that a chunk builds on, with its pack's key and size made explicit."""

    chunk: ChunkRecord
    pack: str
    pack_bytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """One chunk of one leaf, with its pack's key and size made explicit, and its bases nearest first."""

    leaf: str
    box: Box
    chunk: ChunkRecord
    pack: str
    pack_bytes: int
    bases: tuple[Link, ...] = ()


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
        return self.chunk.size + sum(link.chunk.size for link in self.bases)

    @property
    def memory_bytes(self) -> int:
        """What decoding it takes beside the stored bytes: planes need twice the raw bytes, and a
        delta its base too.
        """
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
) -> dict[str, list[Saved]]:
    """Chunks by leaf name, of all leaves or of those in ``names``. A span of a box that two fragments
    hold is listed once.
    """
    found: dict[str, dict[tuple[tuple[int, ...], tuple[int, ...], int, int], Saved]] = {}
    for fragment in fragments:
        packs = [(pack.key, pack.size) for pack in fragment.packs]
        for leaf in fragment.leaves:
            if names is not None and leaf.name not in names:
                continue
            spans = found.setdefault(leaf.name, {})
            for record in leaf.boxes:
                box = record.box
                for chunk in record.chunks:
                    key = (record.offset, record.extent, chunk.start, chunk.stop)
                    if key not in spans:
                        bases = bases_of(fragment, chunk) if chunk.base is not None else ()
                        spans[key] = Saved(leaf.name, box, chunk, *packs[chunk.pack], bases)
    return {name: list(spans.values()) for name, spans in found.items()}


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
    placements: dict[int, tuple[Saved, list[Placement]]] = {}
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
                    lands = Placement(number, piece, part, (begins - chunk.start) * itemsize)
                    placements.setdefault(id(saved), (saved, []))[1].append(lands)
        twice = len(used) > 1 and held_twice(used)
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
            bases=saved.bases,
        )
        for saved, parts in placements.values()
    ]
    return tuple(sorted(fetches, key=lambda f: (f.pack, f.chunk.offset)))


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
        first, last = fetch.chunk.offset, fetch.chunk.offset + fetch.chunk.size
        more_bytes = fetch.stored_bytes - fetch.chunk.size
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
