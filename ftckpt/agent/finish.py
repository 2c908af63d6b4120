"""A dead writer's share, from what it staged: the rest of its packs, and the fragment it would have put.

The one room of the agent that loads torch; imported when there is something to finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import xxhash

from ftckpt import layout
from ftckpt.boxes import Box
from ftckpt.commit import Expected, read_commit
from ftckpt.errors import ObjectDamaged, ObjectNotFound
from ftckpt.layout import Writer
from ftckpt.leaf import Holding
from ftckpt.manifest import BoxRecord, ChunkRecord, Fragment, PackRef, Position, Ref, Staging
from ftckpt.plan.assign import ChunkTask
from ftckpt.plan.restore import Saved, index_chunks
from ftckpt.reader import read_fragments
from ftckpt.snapshot import Staged
from ftckpt.store.api import ObjectStore
from ftckpt.writer import SaveJob, WriteSettings, write_share


def finish_share(
    near: ObjectStore, staging: Staging, staged: memoryview, parent: Ref | None, packer: Writer
) -> Fragment:
    """Write what is left of a share as packs of ``packer``, whose life nobody ever used. On return all
    packs of the fragment are durable in the tier; the fragment is not put.

    Raises:
        ObjectDamaged: the staging file does not hold what the note says.
    """
    snapshot = _snapshot(staging, staged)
    partial = staging.partial
    at = Position(partial.step, partial.attempt)
    expected = Expected(at, parent, partial.quorum, partial.members, ())
    job = SaveJob(expected, snapshot)
    rest = write_share(near, job, expected, packer, WriteSettings(), _reusable(near, parent))
    return merge(staging, rest, parent)


def _snapshot(staging: Staging, staged: memoryview) -> Staged:
    """The staged chunks, proven, as a snapshot."""
    holdings = []
    for leaf in staging.partial.leaves:
        box = leaf.boxes[0]
        holdings.append(Holding(leaf.spec, Box(box.offset, box.extent), (0,)))
    tasks, chunks = [], []
    for span in staging.spans:
        size = (span.stop - span.start) * holdings[span.leaf].leaf.itemsize_bytes
        part = staged[span.at : span.at + size]
        if len(part) != size or xxhash.xxh3_128_digest(part) != span.raw:
            raise ObjectDamaged(
                f"ObjectDamaged: the staging file of {staging.partial.writer} does not hold elements {span.start} "
                f"to {span.stop} of {holdings[span.leaf].leaf.name} any more",
                leaf=holdings[span.leaf].leaf.name,
            )
        tasks.append(ChunkTask(span.leaf, span.start, span.stop))
        chunks.append(part)
    return Staged(tuple(holdings), tuple(tasks), list(chunks))


def _reusable(near: ObjectStore, parent: Ref | None) -> Mapping[str, Sequence[Saved]]:
    """Chunks of the parent, if the tier has it."""
    if parent is None:
        return {}
    found = read_commit(near, parent.at)
    if found is None or found[1] != parent or _is_collected(near, parent):
        return {}
    return index_chunks(read_fragments(near, found[0]))


def _is_collected(near: ObjectStore, parent: Ref) -> bool:
    try:
        near.size(layout.tombstone_key(parent.at))
    except ObjectNotFound:
        return False
    return True


def merge(staging: Staging, rest: Fragment, parent: Ref | None) -> Fragment:
    """The whole share: chunks that were durable when it was staged, and the ``rest``. Pure."""
    partial = staging.partial
    packs = list(partial.packs)
    places: dict[int, int] = {}
    for number, pack in enumerate(rest.packs):
        known = next((n for n, other in enumerate(packs) if other.key == pack.key), None)
        places[number] = len(packs) if known is None else known
        if known is None:
            packs.append(pack)
    added: dict[tuple[str, tuple[int, ...]], list[ChunkRecord]] = {}
    for leaf in rest.leaves:
        for record in leaf.boxes:
            found = added.setdefault((leaf.name, record.offset), [])
            found.extend(_moved(chunk, places) for chunk in record.chunks)
    leaves = []
    for leaf in partial.leaves:
        boxes = []
        for record in leaf.boxes:
            chunks = (*record.chunks, *added.get((leaf.name, record.offset), ()))
            ordered = tuple(sorted(chunks, key=lambda chunk: chunk.start))
            boxes.append(BoxRecord(record.offset, record.extent, ordered))
        leaves.append(msgspec.structs.replace(leaf, boxes=tuple(boxes)))
    return msgspec.structs.replace(
        partial, parent=parent, packs=tuple[PackRef, ...](packs), leaves=tuple(leaves)
    )


def _moved(chunk: ChunkRecord, places: Mapping[int, int]) -> ChunkRecord:
    base = _moved(chunk.base, places) if chunk.base is not None else None
    return msgspec.structs.replace(chunk, pack=places[chunk.pack], base=base)
