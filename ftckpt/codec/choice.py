"""Which codec a chunk gets: a cheap probe of a few tens of KiB says what each would save.

Pure but for what the caller hands in: the base's bytes, and ``pays``, which knows how fast this
machine encodes and how fast the store takes bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ftckpt.bounds import require_number
from ftckpt.codec import planes, zstd
from ftckpt.codec.frames import DELTA, PLANES, RAW, ZSTD, delta
from ftckpt.errors import SettingsError
from ftckpt.store.api import Buffer

MAX_CHAIN = 16
"""Readers refuse a chunk that builds on more bases than this."""

Pays = Callable[[int, int, int], bool]
"""(codec, raw bytes, bytes saved): whether to spend the time."""

_NAMES = ("auto", "raw", "zstd", "planes", "delta")
_SAMPLE_BYTES = 16 << 10
_SAMPLES = 3
SMALLEST_BYTES = 64
SMALLEST_PAYING_BYTES = 4 << 10
"""Below it ``"auto"`` stores a chunk as it is: probing takes longer than storing what could be saved."""

_WORTH = 0.97
_WORTH_A_CHAIN = 0.9


@dataclass(frozen=True, slots=True)
class Codec:
    """What a writer may use for its chunks.

    ``"raw"``, ``"zstd"`` and ``"planes"`` are what they say, where they save at least 3 %.
    ``"delta"`` takes whatever is smallest, deltas included. ``"auto"`` takes it only where the bytes
    saved are worth more of the store's time than they cost of this machine's.

    A delta builds on at most ``max_chain`` earlier chunks (0: no deltas). Raw bytes of the last
    save's chunks are kept in ``base_budget_bytes`` of host memory; what has no base is stored whole.
    """

    name: Literal["auto", "raw", "zstd", "planes", "delta"] = "auto"
    level: int = 1
    max_chain: int = 8
    base_budget_bytes: int = 224 << 20

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            raise SettingsError(
                f"SettingsError: codec {self.name!r} is not known; known are {', '.join(_NAMES)}",
                setting="codec",
                found=self.name,
            )
        require_number("codec level", self.level, low=-7, high=22, whole=True)
        require_number("max_chain", self.max_chain, low=0, high=MAX_CHAIN, whole=True)
        require_number("base_budget_bytes", self.base_budget_bytes, low=0, high=1 << 50, whole=True)

    @property
    def deltas(self) -> bool:
        """Whether bases are worth keeping."""
        return self.name in ("auto", "delta") and self.max_chain > 0 and self.base_budget_bytes > 0


@dataclass(frozen=True, slots=True)
class Encoded:
    """Stored bytes and the number of their codec. ``gain`` is what a base saved, or would have, as a
    part of the raw bytes; ``None`` when there was none to try.
    """

    codec: int
    body: Buffer
    gain: float | None = None


def always(_codec: int, _raw_bytes: int, _saved_bytes: int) -> bool:
    """Bytes are all that counts."""
    return True


def encode(
    raw: Buffer, itemsize_bytes: int, codec: Codec, base: Buffer | None = None, pays: Pays = always
) -> Encoded:
    """A chunk's stored bytes by the codec that its probe speaks for; ``raw`` itself for the raw codec.

    ``base`` are the raw bytes that a delta may build on. Releases the GIL while it works.
    """
    size = len(raw)
    if codec.name == "raw" or size < (SMALLEST_PAYING_BYTES if codec.name == "auto" else SMALLEST_BYTES):
        return Encoded(RAW, raw)
    if base is not None and len(base) != size:
        base = None
    parts = _parts(size)
    sizes: dict[int, float] = {}
    bodies: dict[int, Buffer] = {}
    for number in _candidates(itemsize_bytes, codec, base):
        if not pays(number, size, size):
            continue  # whatever it saved: not worth a probe
        total = 0
        for start, stop in parts:
            piece = memoryview(raw)[start:stop]
            other = memoryview(base)[start:stop] if base is not None else None
            bodies[number] = _encode(number, piece, itemsize_bytes, codec.level, other)
            total += len(bodies[number])
        sizes[number] = total / sum(stop - start for start, stop in parts)
    full = min([1.0, *(part for number, part in sizes.items() if number != DELTA)])
    gain = max(0.0, full - sizes[DELTA]) if DELTA in sizes else None
    for number in sorted(sizes, key=sizes.__getitem__):
        if number == DELTA and sizes[number] > _WORTH_A_CHAIN * full:
            continue
        if sizes[number] > _WORTH or not pays(number, size, int((1 - sizes[number]) * size)):
            continue
        whole = parts == [(0, size)]
        body = bodies[number] if whole else _encode(number, raw, itemsize_bytes, codec.level, base)
        if len(body) <= _WORTH * size:
            return Encoded(number, body, gain)
    return Encoded(RAW, raw, gain)


def _candidates(itemsize_bytes: int, codec: Codec, base: Buffer | None) -> list[int]:
    """Two- and four-byte elements are numbers without repetition; for others zstd may do better."""
    if codec.name == "zstd":
        return [ZSTD]
    fulls = [PLANES] if itemsize_bytes in (2, 4) else [ZSTD] if itemsize_bytes == 1 else [PLANES, ZSTD]
    return fulls if base is None or not codec.deltas else [*fulls, DELTA]


def _parts(size: int) -> list[tuple[int, int]]:
    """What to probe: a small chunk whole, of a larger one some parts; bounds are multiples of 16."""
    if size <= 2 * _SAMPLES * _SAMPLE_BYTES:
        return [(0, size)]
    starts = ((2 * n + 1) * size // (2 * _SAMPLES) for n in range(_SAMPLES))
    return [(start - start % 16, start - start % 16 + _SAMPLE_BYTES) for start in starts]


def _encode(number: int, raw: Buffer, itemsize_bytes: int, level: int, base: Buffer | None) -> Buffer:
    if number == ZSTD:
        return zstd.compressor(level).compress(raw)
    if number == PLANES:
        return planes.encode(raw, itemsize_bytes, level)
    assert number == DELTA and base is not None, number
    return planes.encode(delta(raw, base), itemsize_bytes, level)
