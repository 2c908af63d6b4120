"""Raw bytes of the last save's chunks, kept in host memory as bases of deltas, within a budget.

Knows bytes and digests, no records. Whoever asks for a base names the digest it must have, that of
the chunk in the settled parent commit; so bytes of a save that came to nothing are never built on,
and memory that went bad is noticed. What is not there is no base: the chunk is stored whole.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from ftckpt.codec.planes import Bytes
from ftckpt.store.api import Buffer

_UNCHANGED = 0.01
_SMALLEST_BYTES = 4 << 10


@dataclass(frozen=True, slots=True)
class Candidate:
    """A chunk of the save that begins. ``prior`` guesses what a base saves of its next version, as a
    part of its bytes, until that was measured.
    """

    key: Hashable
    size_bytes: int
    prior: float


@dataclass(slots=True)
class _Base:
    digest: bytes
    data: Bytes


class Bases:
    """Used by all encode threads of one writer; two never ask for the same key at once."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._used_bytes = 0
        self._kept: dict[Hashable, _Base] = {}
        self._gains: dict[Hashable, float] = {}
        self._wanted: frozenset[Hashable] = frozenset()
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes held now; never more than the budget."""
        return self._used_bytes

    def aim(self, candidates: Iterable[Candidate]) -> None:
        """Choose which chunks of this save to keep: those whose bases save most, by what was
        measured, as many as the budget holds. Bases of chunks that are none of this save go at once.
        """
        worth = {c.key: (self._gains.get(c.key, c.prior), c.size_bytes) for c in candidates}
        with self._lock:
            for key in [key for key in self._kept if key not in worth]:
                self._drop(key)
        self._gains = {key: gain for key, gain in self._gains.items() if key in worth}
        wanted, left_bytes = set(), self._budget_bytes
        for key, (gain, size_bytes) in sorted(worth.items(), key=lambda item: -item[1][0]):
            if gain > 0 and _SMALLEST_BYTES <= size_bytes <= left_bytes:
                wanted.add(key)
                left_bytes -= size_bytes
        self._wanted = frozenset(wanted)

    def get(self, key: Hashable, digest: bytes) -> Buffer | None:
        """The bytes under ``key`` if they are those of ``digest``; valid until ``keep``."""
        base = self._kept.get(key)
        if base is None or base.digest != digest or xxhash.xxh3_128_digest(base.data.data) != digest:
            return None
        return base.data.data

    def keep(self, key: Hashable, digest: bytes, raw: Buffer, gain: float | None) -> bool:
        """Take a copy of a chunk, in the place of its last version; whether it was taken.

        ``gain`` is what the last version saved of this one, ``None`` if that is not known.
        """
        base = self._kept.get(key)
        if gain is not None:
            self._gains[key] = gain
        elif self._gains.get(key) == _UNCHANGED:
            del self._gains[key]
        if key not in self._wanted or (base is not None and base.data.size != len(raw)):
            with self._lock:
                self._drop(key)
            base = None
        if key not in self._wanted:
            return False
        if base is None:
            with self._lock:
                if self._used_bytes + len(raw) > self._budget_bytes:
                    return False
                self._used_bytes += len(raw)
                base = self._kept[key] = _Base(b"", np.empty(len(raw), np.uint8))
        if base.digest != digest:
            base.digest = b""
            np.copyto(base.data, np.frombuffer(raw, np.uint8))
            base.digest = digest
        return True

    def unchanged(self, key: Hashable, digest: bytes, raw: Buffer) -> None:
        """The chunk is that of the last save; from now on others come before it."""
        self.keep(key, digest, raw, _UNCHANGED)

    def _drop(self, key: Hashable) -> None:
        base = self._kept.pop(key, None)
        if base is not None:
            self._used_bytes -= base.data.size
