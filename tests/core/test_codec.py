"""Chunks through the codecs and back; stored bytes that lie, are cut or are flipped; which codec a
chunk gets; what is kept as a base.
"""

from __future__ import annotations

import resource
import struct
from random import Random

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ftckpt import codec
from ftckpt.codec import DELTA, MAX_CHAIN, PLANES, RAW, ZSTD, Bases, Candidate, Codec, Rates, planes
from ftckpt.errors import ChunkCorrupt, SettingsError
from ftckpt.leaf import ITEMSIZE_BYTES

NAMES = ["auto", "raw", "zstd", "planes", "delta"]
ITEMSIZES = sorted(set(ITEMSIZE_BYTES.values()))
compressible = st.binary(max_size=64).flatmap(lambda unit: st.integers(0, 40).map(unit.__mul__))


def weights(count: int, seed: int = 0) -> np.ndarray:
    """Gaussian float32, as weights are."""
    return np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)


def bf16(values: np.ndarray) -> bytes:
    return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()


# --- there and back ------------------------------------------------------------------------------


@given(
    compressible | st.binary(max_size=4096),
    st.sampled_from(NAMES),
    st.sampled_from(ITEMSIZES),
    st.integers(1, 5),
    st.binary(min_size=1, max_size=8) | st.none(),
)
def test_what_comes_back_is_what_went_in(raw, name, itemsize, level, change):
    """Every codec, element size and level, with and without a base that differs a little."""
    raw = raw[: len(raw) // itemsize * itemsize]
    base = None
    if change is not None:
        base = bytearray(raw)
        base[: len(change)] = change[: len(raw)]

    done = codec.encode(raw, itemsize, Codec(name, level), base)

    again = codec.decode(done.body, done.codec, len(raw), base if done.codec == DELTA else None)
    assert bytes(again) == raw
    assert len(done.body) <= len(raw)
    assert done.codec in {"raw": [RAW], "zstd": [RAW, ZSTD], "planes": [RAW, ZSTD, PLANES]}.get(
        name, [RAW, ZSTD, PLANES, DELTA]
    )
    assert done.codec != DELTA or base is not None


@pytest.mark.parametrize("dtype", sorted(ITEMSIZE_BYTES))
def test_large_chunks_of_every_dtype_come_back(dtype):
    itemsize = ITEMSIZE_BYTES[dtype]
    raw = weights(1 << 17).tobytes()[: (400_000 // itemsize) * itemsize]
    base = bytearray(raw)
    base[::101] = bytes(len(base[::101]))

    for name, old in (("zstd", None), ("planes", None), ("delta", base)):
        done = codec.encode(raw, itemsize, Codec(name), old)
        assert bytes(codec.decode(done.body, done.codec, len(raw), old)) == raw
    assert done.codec == DELTA and len(done.body) < len(raw) / 4


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_planes_of_one_value_and_of_noise_come_back(itemsize):
    for raw in (bytes(16 * 999), b"\x07" * 16 * 5000, Random(7).randbytes(16 * 20_000)):
        stored = planes.encode(raw, itemsize, 1)

        assert planes.decode(stored, len(raw)) == raw
        assert len(stored) <= len(raw) + 1 + 5 * itemsize


# --- which codec ---------------------------------------------------------------------------------


def test_what_a_chain_builds_on_is_not_written_to():
    """One element: its planes are of one byte each, and a view of the base where nothing copies them."""
    base = bytearray(b"abcd")

    summed = planes.decode_sum([planes.encode(b"\1\2\3\4", 4, 1)], 4, base)

    assert bytes(summed or b"") == bytes(a ^ b for a, b in zip(b"abcd", b"\1\2\3\4", strict=True))
    assert base == b"abcd"


def test_weights_are_cut_into_planes_and_change_little_in_a_step():
    """The figures that the choice rests on, loosely."""
    values = weights(1 << 20)
    stepped = values - np.float32(1e-6) * np.sign(weights(1 << 20, seed=1))
    done = {
        "fp32": codec.encode(values.tobytes(), 4, Codec("planes")),
        "bf16": codec.encode(bf16(values), 2, Codec("planes")),
        "fp32 step": codec.encode(stepped.tobytes(), 4, Codec("delta"), values.tobytes()),
        "bf16 step": codec.encode(bf16(stepped), 2, Codec("delta"), bf16(values)),
    }

    parts = {name: len(one.body) / (2 if "bf16" in name else 4) / (1 << 20) for name, one in done.items()}

    assert [one.codec for one in done.values()] == [PLANES, PLANES, DELTA, DELTA]
    assert parts["fp32"] < 0.86 and parts["bf16"] < 0.70
    assert parts["fp32 step"] < 0.50 and parts["bf16 step"] < 0.06


def test_bytes_that_do_not_shrink_are_stored_as_they_are():
    noise = Random(7).randbytes(400_000)

    for itemsize in ITEMSIZES:
        for name in NAMES:
            done = codec.encode(noise, itemsize, Codec(name), Random(8).randbytes(400_000))
            assert (done.codec, done.body) == (RAW, noise)
    assert codec.encode(memoryview(noise)[:1000], 4, Codec()).codec == RAW
    assert codec.encode(bytes(48), 4, Codec()).codec == RAW  # too few to be worth a head


def test_a_large_chunk_is_probed_in_three_places():
    noise = Random(7).randbytes(1 << 20)

    assert codec.encode(noise[:300_000] + bytes(1000) + noise[:300_000], 1, Codec()).codec == RAW
    assert codec.encode(noise[:100_000] + bytes(400_000) + noise[:100_000], 1, Codec()).codec == ZSTD


def test_a_delta_that_hardly_gains_is_not_worth_a_chain():
    values, unlike = bf16(weights(1 << 18)), bf16(weights(1 << 18, seed=1))

    done = codec.encode(values, 2, Codec("delta"), unlike)

    assert done.codec == PLANES
    assert done.gain == 0


def test_a_base_of_another_size_is_no_base():
    values = bf16(weights(1 << 12))

    assert codec.encode(values, 2, Codec("delta"), values[:-2]).codec == PLANES


def test_elements_that_repeat_get_what_is_smaller():
    """Token ids of eight bytes: a repeated row is for zstd, small numbers are for planes."""
    rng = np.random.default_rng(0)
    rows = np.tile(rng.integers(0, 1 << 62, 500), 100)
    ids = rng.integers(0, 50_000, 50_000)

    assert codec.encode(rows.tobytes(), 8, Codec("planes")).codec == ZSTD
    assert codec.encode(ids.tobytes(), 8, Codec("planes")).codec == PLANES


@pytest.mark.parametrize(
    "wrong", [{"name": "lz4"}, {"max_chain": MAX_CHAIN + 1}, {"max_chain": -1}, {"base_budget_bytes": -1}]
)
def test_settings_that_no_reader_follows_are_refused(wrong):
    with pytest.raises(SettingsError):
        Codec(**wrong)


# --- bytes that lie ------------------------------------------------------------------------------


def lying_planes(how: int, size: int, body: bytes, count: int = 1) -> bytes:
    return bytes([count]) + struct.pack("<BI", how, size) * count + body


def test_a_bomb_is_refused_before_memory_is_asked_for():
    """A frame of some bytes that declares 8 GiB, and one that unpacks to more than it declares."""
    header = b"\x28\xb5\x2f\xfd" + bytes([0b1110_0000]) + (8 << 30).to_bytes(8, "little")
    million = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    for frame in (header + bytes(20), million):
        with pytest.raises(ChunkCorrupt, match="declares"):
            codec.decode(frame, ZSTD, 100)
        for number in (PLANES, DELTA):
            with pytest.raises(ChunkCorrupt, match="declares"):
                codec.decode(lying_planes(1, len(frame), frame), number, 100, bytes(100))
    with pytest.raises(ChunkCorrupt, match="are in"):
        codec.decode(lying_planes(0, (1 << 32) - 1, b"", count=16), PLANES, 160)

    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 64 << 10


@pytest.mark.parametrize(
    "stored, number, raw_bytes",
    [
        (b"abc", RAW, 4),
        (b"abcd", RAW, 3),
        (b"abcd", 4, 4),
        (b"abcd", -1, 4),
        (b"", ZSTD, 0),
        (b"not a frame at all", ZSTD, 18),
        (zstandard.compress(b"a" * 100) + b"x", ZSTD, 100),
        (zstandard.compress(b"a" * 100) * 2, ZSTD, 100),
        (zstandard.compress(b"a" * 100) * 2, ZSTD, 200),
        (zstandard.ZstdCompressor(write_content_size=False).compress(b"a" * 100), ZSTD, 100),
        (b"", PLANES, 0),
        (b"\0", PLANES, 8),
        (b"\x11" + bytes(200), PLANES, 17),
        (b"\x02\0\0", PLANES, 8),
        (lying_planes(0, 4, b"abcd"), PLANES, 5),
        (lying_planes(0, 4, b"abcde"), PLANES, 4),
        (lying_planes(0, 5, b"abcd"), PLANES, 5),
        (lying_planes(2, 2, b"ab"), PLANES, 4),
        (lying_planes(3, 4, b"abcd"), PLANES, 4),
        (lying_planes(0, 4, b"abcd" * 3, count=3), PLANES, 16),
        (lying_planes(2, 1, b"a"), DELTA, 4),
    ],
)
def test_stored_bytes_that_cannot_be_are_refused(stored, number, raw_bytes):
    with pytest.raises(ChunkCorrupt):
        codec.decode(stored, number, raw_bytes)


def test_a_delta_without_its_base_is_refused():
    stored = codec.encode(bytes(100), 4, Codec("delta"), b"a" * 100)
    assert stored.codec == PLANES  # equal bytes need no base
    values = bf16(weights(4096))
    delta = codec.encode(values, 2, Codec("delta"), bytes([values[0] ^ 1]) + values[1:])
    assert delta.codec == DELTA

    for base in (None, b"", values[:-1]):
        with pytest.raises(ChunkCorrupt, match="needs a base"):
            codec.decode(delta.body, DELTA, len(values), base)


@settings(max_examples=300)
@given(st.data(), st.sampled_from(["zstd", "planes", "delta"]))
def test_damaged_bytes_are_refused_or_give_as_many_as_stated(data, name):
    """Whether they are the right ones is for the digests: some bits of a frame say nothing."""
    raw = bytes(range(64)) * data.draw(st.integers(2, 20))
    base = bytes(len(raw)) if name == "delta" else None
    done = codec.encode(raw, 4, Codec(name), base)
    damaged = bytearray(done.body)
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    damaged = damaged[: data.draw(st.integers(0, len(damaged)))]

    try:
        found = codec.decode(bytes(damaged), done.codec, len(raw), base)
    except ChunkCorrupt:
        return

    assert len(found) == len(raw)


# --- what pays -----------------------------------------------------------------------------------


class Wound:
    """A clock for ``Rates``."""

    def __init__(self) -> None:
        self.s = 0.0

    def __call__(self) -> float:
        return self.s


def measured(put_bytes_s: float, encode_bytes_s: float, threads: int = 1) -> Rates:
    clock = Wound()
    rates = Rates(threads, clock, clock)
    with rates.putting(1000):
        clock.s += 1000 / put_bytes_s
    rates.encoded(PLANES, 1000, 1000 / encode_bytes_s)
    return rates


def test_before_the_first_put_bytes_go_out_as_they_are():
    assert not Rates(1, Wound(), Wound()).pays(PLANES, 1000, 999)


def test_a_first_put_that_takes_long_says_so_before_it_has_ended():
    """A third of the bytes is saved, at 400 MB/s until that was measured."""
    clock = Wound()
    rates = Rates(1, clock, clock)

    with rates.putting(32 << 20):
        clock.s += 0.01
        assert not rates.pays(PLANES, 3 << 20, 1 << 20)
        clock.s += 1
        assert rates.pays(PLANES, 3 << 20, 1 << 20)


@pytest.mark.parametrize(
    "put_bytes_s, encode_bytes_s, threads, pays",
    [(100, 500, 1, True), (2000, 500, 1, False), (1000, 500, 1, False), (1000, 500, 8, True)],
)
def test_compressing_pays_when_the_store_is_the_limit(put_bytes_s, encode_bytes_s, threads, pays):
    """A third of the bytes is saved; threads share the work out."""
    rates = measured(put_bytes_s, encode_bytes_s, threads)

    assert rates.pays(PLANES, 3000, 1000) is pays


def test_less_than_a_tenth_is_not_worth_the_computing():
    rates = measured(1, 1e6)

    assert rates.pays(PLANES, 1000, 100) and not rates.pays(PLANES, 1000, 99)


def test_auto_stores_raw_what_is_not_worth_the_time():
    values = bf16(weights(1 << 12))

    assert codec.encode(values, 2, Codec(), pays=measured(10, 1e6).pays).codec == PLANES
    assert codec.encode(values, 2, Codec(), pays=measured(1e6, 10).pays).codec == RAW


def test_seconds_in_which_several_puts_are_under_way_count_once_and_idle_ones_do_not():
    clock = Wound()
    rates = Rates(1, clock, clock)

    for _ in range(20):
        with rates.putting(500), rates.putting(500):
            clock.s += 1
        clock.s += 100

    assert 900 < rates.put_bytes_s < 1200


def test_a_put_that_fails_brings_no_bytes():
    clock = Wound()
    rates = Rates(1, clock, clock)

    with pytest.raises(OSError, match="down"), rates.putting(10_000):
        clock.s += 1
        raise OSError("down")

    assert rates.put_bytes_s is None


def test_a_store_that_slows_down_is_noticed():
    clock = Wound()
    rates = Rates(1, clock, clock)
    for seconds in [0.1] * 30 + [10.0] * 10:
        with rates.putting(1000):
            clock.s += seconds

    assert 80 < rates.put_bytes_s < 400


# --- bases ---------------------------------------------------------------------------------------


def digest(raw: bytes) -> bytes:
    return xxhash.xxh3_128_digest(raw)


def keep(bases: Bases, key: str, raw: bytes, gain: float | None = None) -> bool:
    return bases.keep(key, digest(raw), raw, gain)


def test_a_base_is_found_by_its_digest_alone():
    old, new = bytes(8192), b"a" * 8192
    bases = Bases(10_000)
    bases.aim([Candidate("w", 8192, 0.5)])
    assert keep(bases, "w", old)

    assert bytes(bases.get("w", digest(old))) == old
    assert bases.get("w", digest(new)) is None and bases.get("v", digest(old)) is None
    assert keep(bases, "w", new)  # of a save that may come to nothing: then nothing is found
    assert bases.get("w", digest(old)) is None


def test_memory_that_went_bad_is_no_base():
    raw = bytearray(8192)
    bases = Bases(10_000)
    bases.aim([Candidate("w", 8192, 0.5)])
    bases.keep("w", digest(raw), raw, None)
    memoryview(bases.get("w", digest(raw)))[7:8] = b"\1"

    assert bases.get("w", digest(raw)) is None


def test_the_copy_is_its_own():
    raw = bytearray(8192)
    bases = Bases(10_000)
    bases.aim([Candidate("w", 8192, 0.5)])
    bases.keep("w", digest(raw), raw, None)
    before = digest(raw)
    raw[:] = b"z" * 8192

    assert bytes(bases.get("w", before)) == bytes(8192)


@given(
    st.integers(0, 100_000),
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(1, 30_000), st.floats(0, 1)), max_size=7),
        max_size=5,
    ),
)
def test_the_budget_is_never_exceeded(budget_bytes, saves):
    bases = Bases(budget_bytes)

    for number, save in enumerate(saves):
        chunks = {f"c{key}": (size, worth) for key, size, worth in save}
        bases.aim(Candidate(key, size, worth) for key, (size, worth) in chunks.items())
        for key, (size, worth) in chunks.items():
            raw = bytes([number]) * size
            taken = keep(bases, key, raw, worth)
            assert bases.used_bytes <= budget_bytes
            assert (bases.get(key, digest(raw)) is not None) == taken


def test_what_saves_most_is_kept_first_by_guess_and_then_by_measure():
    bases = Bases(16_384)
    chunks = [Candidate("bf16", 8192, 0.6), Candidate("fp32", 8192, 0.3), Candidate("moment", 8192, 0.1)]
    bases.aim(chunks)
    assert [keep(bases, c.key, bytes(8192)) for c in chunks] == [True, True, False]

    bases.aim(chunks)
    gains = [0.6, 0.05, None]
    for one, gain in zip(chunks, gains, strict=True):
        keep(bases, one.key, b"a" * 8192, gain)
    bases.aim(chunks)

    assert [keep(bases, c.key, b"b" * 8192) for c in chunks] == [True, False, True]


def test_a_chunk_that_never_changes_comes_last():
    bases = Bases(8192)
    chunks = [Candidate("reference", 8192, 0.6), Candidate("policy", 8192, 0.6)]
    bases.aim(chunks)
    assert [keep(bases, c.key, bytes(8192)) for c in chunks] == [True, False]

    bases.aim(chunks)
    bases.unchanged("reference", digest(bytes(8192)), bytes(8192))
    keep(bases, "policy", bytes(8192))
    bases.aim(chunks)

    assert [keep(bases, c.key, b"a" * 8192) for c in chunks] == [False, True]


def test_tiny_chunks_and_worthless_ones_are_not_kept():
    bases = Bases(1 << 20)
    chunks = [Candidate("tiny", 100, 0.9), Candidate("frozen", 8192, 0.0)]
    bases.aim(chunks)

    assert not any(keep(bases, c.key, bytes(c.size_bytes)) for c in chunks)
    assert bases.used_bytes == 0
