"""Chunks are proven before a byte of them goes anywhere, and sizes before memory is asked for."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
import xxhash
import zstandard

from ftckpt import codec
from ftckpt.errors import ChunkCorrupt, CorruptError, ObjectDamaged, RecordCorrupt
from ftckpt.manifest import ChunkRecord, FragmentRef, PackRef, Position, digest_of, encode
from ftckpt.plan.restore import Fetch, Placement
from ftckpt.reader import ReadSettings, check_packs, fetch, leaf_specs, read_fragment, read_values, verify
from tests.core.records import FRAGMENT, PACK, chunk, fragment, leaf
from tests.support.stores import Sim

AT = Position(12, 2)


def fetch_of(raw: bytes, stored: bytes, number: int, *, offset: int = 0, placed: bool = False) -> Fetch:
    record = ChunkRecord(
        0,
        len(raw),
        xxhash.xxh3_128_digest(raw),
        xxhash.xxh3_128_digest(stored),
        number,
        0,
        offset,
        len(stored),
    )
    placements = (Placement(0, None, None, 0),) if placed else ()
    return Fetch("actor.w", PACK, 10_000, record, len(raw), placements)


def test_a_frame_that_decodes_to_other_bytes_than_were_saved_is_refused():
    """Its stored bytes are as the record says; what they decode to is not."""
    right, wrong = b"right" * 40, b"wrong" * 40
    item = fetch_of(right, zstandard.compress(wrong), codec.ZSTD)

    with pytest.raises(ChunkCorrupt, match=r"decoded bytes: expected xxh3-128 .*\n.* of packs/") as caught:
        verify(item, zstandard.compress(wrong), AT)

    good = zstandard.compress(right)
    assert verify(fetch_of(right, good, codec.ZSTD), good, AT) == right
    assert (caught.value.leaf, caught.value.pack, caught.value.step) == ("actor.w", PACK, 12)


def test_bytes_that_are_all_zero_are_called_a_torn_write():
    with pytest.raises(ChunkCorrupt, match="torn write"):
        verify(fetch_of(b"abc", b"abc", codec.RAW), bytes(3), AT)


def test_nothing_of_a_bad_chunk_is_placed():
    good, bad = bytes(range(100)), bytes(100)
    sim = Sim()
    sim.objects[PACK] = good + bad
    placed: list[bytes] = []
    items = [
        fetch_of(good, good, codec.RAW, placed=True),
        fetch_of(good, good, codec.RAW, offset=100, placed=True),
    ]

    with pytest.raises(ChunkCorrupt):
        fetch(sim.store, items, lambda _, raw: placed.append(bytes(raw)), AT, ReadSettings(threads=2))

    assert placed == [good]


def test_progress_reaches_the_end():
    body = bytes(range(100))
    sim = Sim()
    sim.objects[PACK] = body * 5
    seen: list[tuple[int, int]] = []
    items = [fetch_of(body, body, codec.RAW, offset=100 * n) for n in range(5)]

    fetch(
        sim.store,
        items,
        lambda _placement, _raw: None,
        AT,
        ReadSettings(run_bytes=100),
        lambda *p: seen.append(p),
    )

    assert seen[-1] == (500, 500)


@pytest.mark.parametrize(
    "found, said", [(None, "is absent"), (b"x" * 47, "has 47 bytes"), (b"x" * 49, "has 49 bytes")]
)
def test_packs_are_there_at_their_stated_sizes_or_are_named(found, said):
    sim = Sim()
    if found is not None:
        sim.objects[PACK] = found

    with pytest.raises(ObjectDamaged, match=f"{said}; the record states 48 bytes") as caught:
        check_packs(sim.store, {(PACK, 48)}, AT)

    assert caught.value.key == PACK


@pytest.mark.parametrize("extent", [12, 1 << 50], ids=["no chunks", "more than there are chunks for"])
def test_a_value_of_any_stated_size_is_refused_before_memory_is_asked_for(extent):
    huge = leaf(
        chunk(0, 12, size=12),
        name="meta",
        kind="value",
        dtype="uint8",
        shape=(1 << 50,),
        offset=(0,),
        extent=(extent,),
    )
    sim = Sim()
    sim.objects[PACK] = bytes(48)
    tracemalloc.start()

    try:
        with pytest.raises(RecordCorrupt, match=f"12 of the {1 << 50} elements"):
            read_values(sim.store, [fragment(huge, packs=(PackRef(PACK, 48),))], AT)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 1 << 20


def test_a_value_is_read_whole_from_its_chunks():
    body = bytes(range(12))
    halves = [
        msgspec.structs.replace(
            chunk(a, a + 6, offset=a, size=6),
            raw=xxhash.xxh3_128_digest(body[a : a + 6]),
            stored=xxhash.xxh3_128_digest(body[a : a + 6]),
        )
        for a in (0, 6)
    ]
    sim = Sim()
    sim.objects[PACK] = body
    whole = leaf(*halves, name="meta", kind="value", dtype="uint8", shape=(12,), offset=(0,), extent=(12,))

    found = read_values(sim.store, [fragment(whole, packs=(PackRef(PACK, 12),))], AT)
    sim.objects[PACK] = body[:6] + b"other!"

    assert found == {"meta": body}
    with pytest.raises(CorruptError):
        read_values(sim.store, [fragment(whole, packs=(PackRef(PACK, 12),))], AT)


@pytest.mark.parametrize("wrong", [{"step": 11}, {"attempt": 1}, {"failure": "disk full", "leaves": ()}])
def test_a_fragment_of_another_step_or_of_a_failure_is_refused_though_the_commit_names_it(wrong):
    body = encode(msgspec.structs.replace(fragment(), **wrong))
    sim = Sim()
    sim.objects[FRAGMENT] = body

    with pytest.raises(RecordCorrupt, match="names it as its own"):
        read_fragment(sim.store, FragmentRef(FRAGMENT, len(body), digest_of(body), ()), AT)


def test_fragments_that_differ_about_a_leaf_are_refused_by_its_name():
    flat = leaf(chunk(), shape=(12,), offset=(0,), extent=(12,))

    with pytest.raises(RecordCorrupt, match=r"differ about actor\.weight"):
        leaf_specs([fragment(), fragment(flat)])


def test_a_whole_fragment_that_is_not_the_committed_one_is_refused():
    """Its own digest is right: somebody put another record under its key."""
    committed, other = encode(fragment()), encode(fragment(leaf(chunk(), name="critic.weight")))
    ref = FragmentRef(FRAGMENT, len(committed), digest_of(committed), ())
    sim = Sim()

    sim.objects[FRAGMENT] = committed
    assert read_fragment(sim.store, ref, AT) == fragment()
    sim.objects[FRAGMENT] = other
    with pytest.raises(ObjectDamaged, match="not the one that was committed"):
        read_fragment(sim.store, ref, AT)
    del sim.objects[FRAGMENT]
    with pytest.raises(ObjectDamaged, match="is absent"):
        read_fragment(sim.store, ref, AT)
