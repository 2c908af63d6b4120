"""Byte planes: the k-th bytes of all elements side by side, each plane stored as it is smallest.

Exponents and signs of weights compress, low mantissa bytes do not. So a chunk of k-byte elements is
cut into k planes; a plane that zstd makes smaller is one zstd frame, any other is stored raw.

Stored bytes, format 1::

    u8 k                      bytes an element, 1 to 16
    k times:  u8 how (0 raw, 1 zstd, 2 one value throughout), u32 size of the plane's stored bytes
    the planes' stored bytes, in order

Integers are little-endian. A plane has raw_bytes / k bytes; a plane of one value stores that byte.

Memory is made and filled by NumPy: joining buffers or making a ``bytearray`` would hold the GIL for as
long as the pages take.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import zstandard

from ftckpt.codec import zstd
from ftckpt.errors import ChunkCorrupt
from ftckpt.store.api import Buffer

_RAW, _FRAME, _CONSTANT = 0, 1, 2
_HEAD = struct.Struct("<B")
_PLANE = struct.Struct("<BI")
_PROBE_BYTES = 16 << 10
_WORTH = 0.97

Bytes = npt.NDArray[np.uint8]


def encode(raw: Buffer, itemsize_bytes: int, level: int) -> memoryview:
    """The planes of ``raw``, whose size is a multiple of ``itemsize_bytes`` and not 0."""
    elements = np.frombuffer(raw, np.uint8).reshape(-1, itemsize_bytes)
    compressor = zstd.plane_compressor(level)
    heads = [_HEAD.pack(itemsize_bytes)]
    at = _HEAD.size + itemsize_bytes * _PLANE.size
    stored = np.empty(at + elements.size, np.uint8)
    for k in range(itemsize_bytes):
        how, size = _encode_plane(elements[:, k], stored[at : at + len(elements)], compressor)
        heads.append(_PLANE.pack(how, size))
        at += size
    head = b"".join(heads)
    stored[: len(head)] = np.frombuffer(head, np.uint8)
    return stored[:at].data


def _encode_plane(plane: Bytes, into: Bytes, compressor: zstandard.ZstdCompressor) -> tuple[int, int]:
    """Put a plane into the memory, where it has room as it is; how it was stored, and its size there."""
    if plane.size > 4 * _PROBE_BYTES:
        middle = plane.size // 2
        probe = np.ascontiguousarray(plane[middle : middle + _PROBE_BYTES])
        if len(compressor.compress(probe.data)) > _WORTH * _PROBE_BYTES:
            np.copyto(into, plane)
            return _RAW, plane.size
    np.copyto(into, plane)
    if into[0] == into[-1] and np.ptp(into) == 0:
        return _CONSTANT, 1
    frame = np.frombuffer(compressor.compress(into.data), np.uint8)
    if frame.size >= _WORTH * plane.size:
        return _RAW, plane.size
    np.copyto(into[: frame.size], frame)
    return _FRAME, frame.size


def decode(stored: Buffer, raw_bytes: int) -> memoryview:
    """The inverse of ``encode``; asks for about twice ``raw_bytes`` of memory at most.

    Raises:
        ChunkCorrupt: the bytes are no planes of ``raw_bytes`` bytes.
    """
    view, heads, at = _heads(stored, raw_bytes)
    result = np.empty(raw_bytes, np.uint8)
    elements = result.reshape(-1, len(heads))
    for k, (how, size) in enumerate(heads):
        elements[:, k] = _decode_plane(how, view[at : at + size], raw_bytes // len(heads))
        at += size
    return result.data


def decode_sum(stored: Sequence[Buffer], raw_bytes: int, base: Buffer | None = None) -> memoryview | None:
    """The XOR of several chunks of planes, and of raw bytes, in one pass over their planes; ``None`` when they
    have not all the same number of planes. Asks for about three times ``raw_bytes`` of memory at most.

    Raises:
        ChunkCorrupt: as ``decode``.
    """
    parsed = [_heads(body, raw_bytes) for body in stored]
    counts = {len(heads) for _, heads, _ in parsed}
    if len(counts) != 1:
        return None
    count = counts.pop()
    result = np.empty(raw_bytes, np.uint8)
    elements = result.reshape(-1, count)
    raw = np.frombuffer(base, np.uint8).reshape(-1, count) if base is not None else None
    starts = [at for _, _, at in parsed]
    for k in range(count):
        total = np.zeros(raw_bytes // count, np.uint8) if raw is None else np.array(raw[:, k])
        for number, (view, heads, _) in enumerate(parsed):
            how, size = heads[k]
            plane = _decode_plane(how, view[starts[number] : starts[number] + size], total.size)
            starts[number] += size
            if not (isinstance(plane, int) and plane == 0):
                np.bitwise_xor(total, np.uint8(plane) if isinstance(plane, int) else plane, out=total)
        elements[:, k] = total
    return result.data


def _heads(stored: Buffer, raw_bytes: int) -> tuple[memoryview, list[tuple[int, int]], int]:
    """The bytes, how each plane is stored and in how many of them, and where the first begins."""
    view = memoryview(stored)
    if not view or not 1 <= view[0] <= 16 or raw_bytes % view[0]:
        raise ChunkCorrupt("ChunkCorrupt: a chunk of byte planes has no valid head")
    count = view[0]
    at = _HEAD.size + count * _PLANE.size
    if len(view) < at:
        raise ChunkCorrupt("ChunkCorrupt: a chunk of byte planes ends inside its head")
    heads = [_PLANE.unpack_from(view, _HEAD.size + k * _PLANE.size) for k in range(count)]
    if at + sum(size for _, size in heads) != len(view):
        raise ChunkCorrupt(
            f"ChunkCorrupt: byte planes of {sum(size for _, size in heads)} bytes are in {len(view) - at}"
        )
    return view, heads, at


def _decode_plane(how: int, body: memoryview, size: int) -> Bytes | int:
    if how == _CONSTANT and len(body) == 1:
        return body[0]
    if how == _RAW and len(body) == size:
        return np.frombuffer(body, np.uint8)
    if how != _FRAME:
        raise ChunkCorrupt(f"ChunkCorrupt: a byte plane is of kind {how} with {len(body)} bytes for {size}")
    return np.frombuffer(zstd.decompress(body, size), np.uint8)
