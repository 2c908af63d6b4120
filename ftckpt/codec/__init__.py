"""The closed list of codecs: how a chunk's raw bytes become stored bytes and back.

A codec is a number in the chunk record. Storing raw is always right; a codec is kept for a chunk
only when it makes that chunk smaller. Numbers are never reused; readers refuse unknown ones.

===  ======  =====================================================================
 0   raw     the bytes themselves
 1   zstd    one zstd frame that declares its content size
===  ======  =====================================================================
"""

from __future__ import annotations

from ftckpt.codec.frames import CODECS, RAW, ZSTD, Codec, decode, encode

__all__ = ["CODECS", "RAW", "ZSTD", "Codec", "decode", "encode"]
