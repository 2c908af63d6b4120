"""Chunks through the codecs and back; frames that lie, are cut or are flipped."""

from __future__ import annotations

import resource
from random import Random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt import codec
from ftckpt.codec import RAW, ZSTD, Codec
from ftckpt.errors import ChunkCorrupt

compressible = st.binary(max_size=64).flatmap(lambda unit: st.integers(0, 40).map(unit.__mul__))


@given(compressible | st.binary(max_size=4096), st.sampled_from(["raw", "zstd"]), st.integers(1, 5))
def test_what_comes_back_is_what_went_in(raw, name, level):
    used, stored = codec.encode(raw, Codec(name, level))

    assert bytes(codec.decode(stored, used, len(raw))) == raw
    assert len(stored) <= len(raw)
    assert used == RAW or name == "zstd"


def test_bytes_that_do_not_shrink_are_stored_as_they_are():
    noise = Random(7).randbytes(300_000)

    assert codec.encode(noise, Codec()) == (RAW, noise)
    assert codec.encode(memoryview(noise)[:1000], Codec())[0] == RAW
    assert codec.encode(bytes(50), Codec())[0] == RAW  # too few to be worth a frame


def test_a_large_chunk_is_probed_in_its_middle():
    noise = Random(7).randbytes(300_000)

    assert codec.encode(bytes(100_000) + noise + bytes(100_000), Codec())[0] == RAW
    assert codec.encode(noise[:100_000] + bytes(300_000) + noise[:100_000], Codec())[0] == ZSTD


def test_a_bomb_is_refused_before_memory_is_asked_for():
    """A frame of some bytes that declares 8 GiB, and one that unpacks to more than it declares."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0000]) + (8 << 30).to_bytes(8, "little")
    million = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for frame in (header + bytes(20), million):
        with pytest.raises(ChunkCorrupt, match="declares"):
            codec.decode(frame, ZSTD, 100)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


@pytest.mark.parametrize(
    "stored, number, raw_bytes",
    [
        (b"abc", RAW, 4),
        (b"abcd", RAW, 3),
        (b"abcd", 2, 4),
        (b"abcd", -1, 4),
        (b"", ZSTD, 0),
        (b"not a frame at all", ZSTD, 18),
        (zstandard.compress(b"a" * 100) + b"x", ZSTD, 100),
        (zstandard.compress(b"a" * 100) * 2, ZSTD, 100),
        (zstandard.compress(b"a" * 100) * 2, ZSTD, 200),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 100), ZSTD, 100),
    ],
)
def test_stored_bytes_that_cannot_be_are_refused(stored, number, raw_bytes):
    with pytest.raises(ChunkCorrupt):
        codec.decode(stored, number, raw_bytes)


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_frame_is_refused_or_gives_as_many_bytes_as_stated(data):
    """Whether they are the right ones is for the digests: some bits of a frame say nothing."""
    raw = bytes(range(64)) * data.draw(st.integers(2, 20))
    used, stored = codec.encode(raw, Codec())
    damaged = bytearray(stored)
    damaged[data.draw(st.integers(0, len(stored) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = damaged[: data.draw(st.integers(0, len(stored)))]

    try:
        found = codec.decode(bytes(damaged), used, len(raw))
    except ChunkCorrupt:
        return

    assert len(found) == len(raw)
