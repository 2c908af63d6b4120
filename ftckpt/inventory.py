"""What a commit holds, component by component: bytes by codec, chains of deltas, what is reused.

Pure: computed from fragments that somebody read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftckpt import layout
from ftckpt.codec import codec_name
from ftckpt.commit import component_of
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import Fragment, Position


@dataclass(slots=True)
class Encoded:
    """Chunks of one codec."""

    chunks: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0

    @property
    def ratio(self) -> float:
        """Stored bytes for each raw byte."""
        return self.stored_bytes / self.raw_bytes if self.raw_bytes else 1.0


@dataclass(slots=True)
class Part:
    """One component. ``written`` are chunks of this very step by codec, ``reused_bytes`` raw bytes that
    earlier steps wrote. ``longest_chain``: on how many earlier chunks one of it builds at most.
    ``owners``: ranks that have values of their own here, which other ranks cannot take over.
    """

    leaves: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)
    raw_bytes: int = 0
    reused_bytes: int = 0
    longest_chain: int = 0
    written: dict[str, Encoded] = field(default_factory=dict)

    @property
    def stored_bytes(self) -> int:
        """Of this step's own packs."""
        return sum(encoded.stored_bytes for encoded in self.written.values())


def take_inventory(at: Position, fragments: Iterable[Fragment]) -> Mapping[str, Part]:
    """Every component of a step by name; a chunk that two writers hold counts once."""
    own = layout.pack_prefix(at) + "/"
    parts: dict[str, Part] = {}
    seen: set[tuple[str, tuple[int, ...], int]] = set()
    for fragment in fragments:
        for leaf in fragment.leaves:
            part = parts.setdefault(component_of(leaf), Part())
            part.leaves.add(leaf.name)
            part.owners |= {leaf.owner} - {""}
            for box in leaf.boxes:
                for chunk in box.chunks:
                    if (key := (leaf.name, box.offset, chunk.start)) in seen:
                        continue
                    seen.add(key)
                    raw_bytes = (chunk.stop - chunk.start) * ITEMSIZE_BYTES[leaf.dtype]
                    part.raw_bytes += raw_bytes
                    part.longest_chain = max(part.longest_chain, len(chunk.chain))
                    if not fragment.packs[chunk.pack].key.startswith(own):
                        part.reused_bytes += raw_bytes
                        continue
                    encoded = part.written.setdefault(codec_name(chunk.codec), Encoded())
                    encoded.chunks += 1
                    encoded.raw_bytes += raw_bytes
                    encoded.stored_bytes += chunk.size
    return dict(sorted(parts.items()))
