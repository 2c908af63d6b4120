"""The closed list of codecs: how a chunk's raw bytes become stored bytes and back.

A codec is a number in the chunk record. Storing raw is always right; any other is kept for a chunk
only when it makes that chunk smaller. Numbers are never reused; readers refuse unknown ones.

===  ======  ====================================================================================
 0   raw     the bytes themselves
 1   zstd    one zstd frame that declares its content size
 2   planes  byte planes, each raw or a zstd frame or one value (``planes``)
 3   delta   byte planes of the bytes XOR those of the same chunk of an earlier commit, its base
===  ======  ====================================================================================
"""

from __future__ import annotations

from ftckpt.codec.bases import Bases, Candidate
from ftckpt.codec.choice import MAX_CHAIN, SMALLEST_PAYING_BYTES, Codec, Encoded, always, encode
from ftckpt.codec.frames import CODECS, DELTA, PLANES, RAW, ZSTD, codec_name, decode, decode_chain
from ftckpt.codec.rates import Rates

__all__ = [
    "CODECS",
    "DELTA",
    "MAX_CHAIN",
    "PLANES",
    "RAW",
    "SMALLEST_PAYING_BYTES",
    "ZSTD",
    "Bases",
    "Candidate",
    "Codec",
    "Encoded",
    "Rates",
    "always",
    "codec_name",
    "decode",
    "decode_chain",
    "encode",
]
