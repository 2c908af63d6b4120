"""Raw and zstd: one frame a chunk, bounded before it is decoded.

A corrupt frame can declare any size and made the decoder ask for any amount of memory, so the
declared size is compared with the expected one first. A frame's header has bits that do not change
what it decodes to, which is why chunk records carry a digest of the stored bytes too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import zstandard

from ftckpt.errors import ChunkCorrupt
from ftckpt.store.api import Buffer

RAW = 0
ZSTD = 1
CODECS: dict[int, str] = {RAW: "raw", ZSTD: "zstd"}

_PROBE_BYTES = 64 << 10
_WORTH = 0.97


@dataclass(frozen=True, slots=True)
class Codec:
    """What a writer may use. ``"zstd"`` is tried on a part of the chunk first and kept only when it
    saves at least 3 %.
    """

    name: Literal["raw", "zstd"] = "zstd"
    level: int = 1


def encode(raw: Buffer, codec: Codec) -> tuple[int, Buffer]:
    """The number of the codec used, and the stored bytes (``raw`` itself for the raw codec).

    Releases the GIL while it compresses.
    """
    size = len(raw)
    if codec.name == "raw" or size < 64:
        return RAW, raw
    compressor = zstandard.ZstdCompressor(level=codec.level, write_content_size=True, write_checksum=False)
    if size > 4 * _PROBE_BYTES:
        middle = size // 2 - size // 2 % 16
        probe = memoryview(raw)[middle : middle + _PROBE_BYTES]
        if len(compressor.compress(probe)) > _WORTH * _PROBE_BYTES:
            return RAW, raw
    stored = compressor.compress(raw)
    return (ZSTD, stored) if len(stored) <= _WORTH * size else (RAW, raw)


def decode(stored: Buffer, codec: int, raw_bytes: int) -> Buffer:
    """The raw bytes; asks for no more than ``raw_bytes`` of memory.

    Raises:
        ChunkCorrupt: unknown codec, another size than stated, or a frame that does not decode.
    """
    if codec == RAW:
        if len(stored) != raw_bytes:
            raise ChunkCorrupt(f"ChunkCorrupt: a raw chunk has {len(stored)} bytes instead of {raw_bytes}")
        return stored
    if codec != ZSTD:
        raise ChunkCorrupt(f"ChunkCorrupt: codec {codec} is unknown; known are {sorted(CODECS)}")
    try:
        declared = zstandard.frame_content_size(stored)
        if declared != raw_bytes:
            raise ChunkCorrupt(f"ChunkCorrupt: a zstd frame declares {declared} bytes instead of {raw_bytes}")
        raw = zstandard.ZstdDecompressor().decompress(
            stored, max_output_size=raw_bytes, allow_extra_data=False
        )
    except (zstandard.ZstdError, MemoryError) as error:
        raise ChunkCorrupt(f"ChunkCorrupt: a zstd frame does not decode ({error})") from error
    if len(raw) != raw_bytes:
        raise ChunkCorrupt(f"ChunkCorrupt: a zstd frame gave {len(raw)} bytes instead of {raw_bytes}")
    return raw
