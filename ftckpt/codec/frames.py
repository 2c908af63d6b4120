"""The numbers of the codecs, and the way back from stored bytes to raw ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ftckpt.codec import planes, zstd
from ftckpt.errors import ChunkCorrupt
from ftckpt.store.api import Buffer

RAW = 0
ZSTD = 1
PLANES = 2
DELTA = 3
CODECS: dict[int, str] = {RAW: "raw", ZSTD: "zstd", PLANES: "planes+zstd", DELTA: "xor+planes+zstd"}


def codec_name(codec: int) -> str:
    """What people call it, also one that is not known here."""
    return CODECS.get(codec, f"codec {codec}")


def decode(stored: Buffer, codec: int, raw_bytes: int, base: Buffer | None = None) -> Buffer:
    """The raw bytes; asks for about twice ``raw_bytes`` of memory at most. Releases the GIL.

    ``base`` is what a delta builds on: the raw bytes of its base chunk.

    Raises:
        ChunkCorrupt: unknown codec, another size than stated, or bytes that do not decode.
    """
    if codec == RAW:
        if len(stored) != raw_bytes:
            raise ChunkCorrupt(f"ChunkCorrupt: a raw chunk has {len(stored)} bytes instead of {raw_bytes}")
        return stored
    if codec == ZSTD:
        return zstd.decompress(stored, raw_bytes)
    if codec == PLANES:
        return planes.decode(stored, raw_bytes)
    if codec == DELTA:
        if base is None or len(base) != raw_bytes:
            found = "none" if base is None else f"one of {len(base)} bytes"
            raise ChunkCorrupt(f"ChunkCorrupt: a delta of {raw_bytes} bytes needs a base and has {found}")
        raw = planes.decode(stored, raw_bytes)
        xor_into(np.frombuffer(raw, np.uint8), base)
        return raw
    raise ChunkCorrupt(f"ChunkCorrupt: codec {codec} is unknown; known are {sorted(CODECS)}")


def decode_chain(links: Sequence[tuple[Buffer, int]], raw_bytes: int) -> Buffer:
    """The raw bytes of a chunk whose bases are at hand: stored bytes and codec of it and of its bases, nearest
    first; the last is whole. Only the result can be proven: what the bases decode to is never there.

    Raises:
        ChunkCorrupt: as ``decode``.
    """
    (body, number), deltas = links[-1], [body for body, _ in links[:-1]]
    if all(codec == DELTA for _, codec in links[:-1]):
        anchor = None if number == PLANES else decode(body, number, raw_bytes)
        raw = planes.decode_sum([*deltas, body] if number == PLANES else deltas, raw_bytes, anchor)
        if raw is not None:
            return raw
    base: Buffer | None = None
    for body, number in reversed(links):
        base = decode(body, number, raw_bytes, base)
    assert base is not None
    return base


def xor_into(into: planes.Bytes, base: Buffer) -> None:
    """Put ``into`` XOR ``base`` into ``into``."""
    np.bitwise_xor(into, np.frombuffer(base, np.uint8), out=into)


def delta(raw: Buffer, base: Buffer) -> memoryview:
    """``raw`` XOR ``base``: mostly zeros when little has changed."""
    return np.bitwise_xor(np.frombuffer(raw, np.uint8), np.frombuffer(base, np.uint8)).data
