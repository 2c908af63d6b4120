"""Records prove their own bytes, and nothing in them is trusted beyond that."""

from __future__ import annotations

import os
import pickle  # noqa: TID251 - put where a record should be
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.boxes import Box, intersect
from ftckpt.errors import CorruptError, RecordCorrupt, UnknownFormat
from ftckpt.manifest import (
    SCALE,
    BoxRecord,
    Commit,
    Fragment,
    LeafRange,
    LeafRecord,
    PackRef,
    Record,
    Ref,
    RunRecord,
    StagedSpan,
    Staging,
    Tombstone,
    decode,
    encode,
    fraction,
    leaf_range,
    may_hold,
)
from tests.core.records import EVERY_KIND, FRAGMENT, PACK, WRITER, chunk, commit, fragment, leaf, seal
from tests.core.strategies import boxes_inside, tilings

every_kind = pytest.mark.parametrize("key, record", EVERY_KIND.items(), ids=lambda v: type(v).__name__)


@every_kind
def test_a_record_comes_back_as_it_was_and_gives_the_same_bytes_again(key: str, record: Record):
    body = encode(record)

    assert decode(type(record), body, key) == record
    assert decode(type(record), memoryview(body), key) == record
    assert encode(decode(type(record), body, key)) == body


@every_kind
def test_every_flipped_byte_and_every_cut_is_refused(key: str, record: Record):
    body = encode(record)
    damaged = [body[:cut] for cut in range(len(body))]
    damaged += [body + b"\n", b"\n" + body, body + body]
    for at in range(len(body)):
        for mask in (0x01, 0x20, 0x80, 0xFF):
            flipped = bytearray(body)
            flipped[at] ^= mask
            damaged.append(bytes(flipped))

    for found in damaged:
        with pytest.raises(RecordCorrupt) as caught:
            decode(type(record), found, key)
        assert caught.value.key == key


@every_kind
def test_a_pickle_in_place_of_a_record_is_refused_and_runs_no_code(key: str, record: Record, tmp_path):
    """N1"""
    trap = tmp_path / "code-ran"

    class Payload:
        def __reduce__(self):
            return os.mkdir, (str(trap),)

    for body in (pickle.dumps(Payload()), seal(pickle.dumps(Payload()))):
        with pytest.raises(RecordCorrupt, match=key):
            decode(type(record), body, key)

    assert not trap.exists()


@every_kind
def test_a_record_of_another_kind_is_refused_or_reads_as_nothing_wrong(key: str, record: Record):
    """An object copied to another key: kinds that share no fields do not pass for each other."""
    for other in EVERY_KIND.values():
        if type(other) is not type(record):
            with pytest.raises((RecordCorrupt, UnknownFormat)):
                decode(type(record), encode(other), key)


def test_leaves_packed_one_by_one_are_the_bytes_of_one_call():
    many = fragment(*(msgspec.structs.replace(leaf(chunk()), name=f"actor.{n}") for n in range(70_000)))

    assert encode(many)[:-43] == msgspec.msgpack.encode(many)
    assert decode(Fragment, encode(many), "some/key") == many
    assert encode(STAGING)[:-43] == msgspec.msgpack.encode(STAGING)


def test_a_leaf_that_does_not_decode_is_named_by_its_place():
    fields = msgspec.msgpack.decode(encode(fragment(leaf(chunk())))[:-43])
    fields["leaves"][0][2] = 7

    with pytest.raises(RecordCorrupt, match=r"leaves\[\.\.\.\]|leaves\[0\]"):
        decode(Fragment, seal(msgspec.msgpack.encode(fields)), "some/key")


@every_kind
def test_fields_of_a_later_version_are_ignored(key: str, record: Record):
    coder = msgspec.msgpack if isinstance(record, Fragment) else msgspec.json
    fields = coder.decode(encode(record)[:-43])
    fields["from_the_future"] = {"nested": [1, 2, {"a": None}]}
    if isinstance(record, Fragment):
        fields["leaves"][0].append("new")
        fields["leaves"][0][5][0][2][0].append([b"new"])

    assert decode(type(record), seal(coder.encode(fields)), key) == record


@pytest.mark.parametrize("version", [0, 2, 1 << 40])
@pytest.mark.parametrize(
    "record", [RunRecord(format=1, run="r"), fragment(), commit()], ids=["run", "fragment", "commit"]
)
def test_another_major_format_is_refused_by_name_even_when_its_fields_differ(record, version):
    newer = msgspec.structs.replace(record, format=version)
    stranger = {"format": version, "writer": [1, 2], "step": "none of your business"}
    coder = msgspec.msgpack if isinstance(record, Fragment) else msgspec.json

    for body in (encode(newer), seal(coder.encode(stranger))):
        with pytest.raises(UnknownFormat, match="newer ftckpt") as caught:
            decode(type(record), body, "some/key")
        assert caught.value.found == version


CANNOT_BE = {
    "chunk before its box": fragment(leaf(chunk(-1, 11))),
    "chunk after its box": fragment(leaf(chunk(0, 13))),
    "empty chunk": fragment(leaf(chunk(4, 4))),
    "backward chunk": fragment(leaf(chunk(8, 4))),
    "offset before the pack": fragment(leaf(chunk(offset=-1))),
    "chunk beyond the pack": fragment(leaf(chunk(offset=1))),
    "size of nothing": fragment(leaf(chunk(size=0))),
    "negative size": fragment(leaf(chunk(size=-48))),
    "huge size": fragment(leaf(chunk(size=1 << 62))),
    "more stored than raw": fragment(leaf(chunk(size=49)), packs=(PackRef(PACK, 49),)),
    "no such step": msgspec.structs.replace(fragment(), step=10**12),
    "step before the first": msgspec.structs.replace(fragment(), step=-1),
    "no such attempt": msgspec.structs.replace(fragment(), attempt=0),
    "more bytes than there are": fragment(
        leaf(shape=(1 << 62, 0, 1 << 62), offset=(0, 0, 0), extent=(0, 0, 0))
    ),
    "value of more bytes than can be packed": fragment(
        leaf(kind="value", dtype="uint8", shape=((1 << 32) + 6,), offset=(0,), extent=(0,))
    ),
    "no such pack": fragment(leaf(chunk(pack=1))),
    "pack from the end": fragment(leaf(chunk(pack=-1))),
    "huge chunk": fragment(leaf(chunk(0, 1 << 40), shape=(1 << 40,), offset=(0,), extent=(1 << 40,))),
    "short digest": fragment(leaf(msgspec.structs.replace(chunk(), raw=b"short"))),
    "box outside": fragment(leaf(chunk(), offset=(1, 0))),
    "box before": fragment(leaf(chunk(), offset=(-1, 0))),
    "negative extent": fragment(leaf(chunk(), extent=(-3, -4))),
    "box of other dimensions": fragment(leaf(chunk(), offset=(0,), extent=(12,))),
    "offset without extent": fragment(leaf(chunk(), offset=(0, 0, 0))),
    "negative shape": fragment(leaf(shape=(-3, 4))),
    "many dimensions": fragment(leaf(shape=(1,) * 65, offset=(0,) * 65, extent=(1,) * 65)),
    "unknown dtype": fragment(leaf(chunk(), dtype="qint8")),
    "values that are no bytes": fragment(leaf(chunk(), kind="value")),
    "values of many dimensions": fragment(leaf(chunk(size=12), kind="value", dtype="uint8")),
    "negative pack": fragment(packs=(PackRef(PACK, -1),)),
}
CANNOT_BE |= {
    f"pack {key!r}": fragment(packs=(PackRef(key, 48),))
    for key in (
        "../x",
        "packs/../../x",
        "/packs/x",
        "packs//x",
        "packs",
        "",
        "commits/x",
        "packs/.hidden",
        "packs/.",
    )
}


@pytest.mark.parametrize("crafted", CANNOT_BE.values(), ids=CANNOT_BE)
def test_a_fragment_that_cannot_be_is_refused_though_its_digest_is_right(crafted):
    with pytest.raises(RecordCorrupt, match=FRAGMENT):
        decode(Fragment, encode(crafted), FRAGMENT)


@pytest.mark.parametrize(
    "key",
    [
        "../x",
        "fragments/../../etc",
        "/fragments/x",
        "packs/x",
        "fragments",
        "",
        "fragments/000002/000000000012/../../../x",
        FRAGMENT.replace("000000000012", "000000000011"),
        FRAGMENT.replace("000002", "000001"),
    ],
)
def test_a_commit_that_names_keys_outside_of_its_run_or_its_step_is_refused(key):
    with pytest.raises(RecordCorrupt, match="cannot be"):
        decode(Commit, encode(commit(key=key)), "commits/x")


STAGING = Staging(
    format=1, partial=fragment(), spans=(StagedSpan(0, 0, 12, 0, bytes(16)),), writers=(WRITER,)
)


@pytest.mark.parametrize(
    "span",
    [
        StagedSpan(1, 0, 12, 0, bytes(16)),
        StagedSpan(-1, 0, 12, 0, bytes(16)),
        StagedSpan(0, -1, 12, 0, bytes(16)),
        StagedSpan(0, 0, 13, 0, bytes(16)),
        StagedSpan(0, 4, 4, 0, bytes(16)),
        StagedSpan(0, 0, 12, -1, bytes(16)),
        StagedSpan(0, 0, 12, 0, bytes(15)),
    ],
)
def test_a_staging_that_cannot_be_is_refused(span):
    key = FRAGMENT.replace("fragments", "staged")
    crafted = msgspec.structs.replace(STAGING, spans=(*STAGING.spans, span))

    assert decode(Staging, encode(STAGING), key) == STAGING
    with pytest.raises(RecordCorrupt, match="cannot be"):
        decode(Staging, encode(crafted), key)


@pytest.mark.parametrize("wrong", [{"step": -1}, {"step": 10**12}, {"attempt": 0}, {"attempt": 10**6}])
def test_steps_and_attempts_that_no_key_spells_are_refused(wrong):
    tombstone = msgspec.structs.replace(Tombstone(step=1, attempt=1, intent="i"), **wrong)
    parent = msgspec.structs.replace(commit(), parent=msgspec.structs.replace(Ref(1, 1, "x"), **wrong))

    for record in (tombstone, parent, msgspec.structs.replace(commit(), **wrong)):
        with pytest.raises(RecordCorrupt):
            decode(type(record), encode(record), "key")


@pytest.mark.parametrize("size", [-1, 1 << 60])
def test_a_commit_that_states_a_fragment_size_which_cannot_be_is_refused(size):
    with pytest.raises(RecordCorrupt, match="cannot be"):
        decode(Commit, encode(commit(size=size)), "commits/x")


@pytest.mark.parametrize(
    "body",
    [
        b"\xdd\xff\xff\xff\xff" + b"\xc0" * 8,
        b"\xdf\xff\xff\xff\xff" + b"\xa1a" * 8,
        b"\x81\xa6leaves\xdd\xff\xff\xff\xff" + b"\x90" * 8,
        b"\x81\xa6writer\xdb\xff\xff\xff\xffabc",
        b"\x91" * 200_000,
        b"\x81\xa1x" * 100_000,
        b"",
        b"\xc1",
    ],
    ids=["array", "map", "leaves", "string", "deep arrays", "deep maps", "nothing", "no byte of msgpack"],
)
def test_lengths_that_lie_are_refused_without_the_memory_they_ask_for(body):
    tracemalloc.start()
    try:
        with pytest.raises(RecordCorrupt):
            decode(Fragment, seal(body), FRAGMENT)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert peak_bytes < 16 << 20


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, b'{"a":' * 100_000, b'{"format": 1e999}', b'{"step": NaN}', b"\xff\xfe"],
    ids=["deep arrays", "deep maps", "infinite", "nan", "no utf-8"],
)  # fmt: skip
def test_json_that_cannot_be_is_refused(body):
    with pytest.raises(RecordCorrupt):
        decode(Commit, seal(body), "commits/x")


@given(st.binary(max_size=200))
def test_no_bytes_at_all_give_anything_but_a_record_or_a_named_error(noise):
    for record in EVERY_KIND.values():
        try:
            decode(type(record), seal(noise), "key")
        except (CorruptError, UnknownFormat):
            continue
        raise AssertionError(noise)


@st.composite
def sharded_leaves(draw: st.DrawFn) -> list[tuple[LeafRecord, ...]]:
    """Leaves as the fragments of two writers hold them, in name order."""
    fragments: tuple[list[LeafRecord], list[LeafRecord]] = ([], [])
    for number in range(draw(st.integers(0, 6))):
        shape = (draw(st.integers(0, 9)), draw(st.integers(1, 2)))[: draw(st.integers(0, 2))]
        for index, box in enumerate(draw(tilings(shape, max_cuts=1))):
            record = BoxRecord(box.offset, box.extent, ())
            name = f"l{number:03d}"
            fragments[index % 2].append(LeafRecord(name, "tensor", "uint8", shape, "", (record,)))
    return [tuple(leaves) for leaves in fragments]


@given(sharded_leaves(), st.data())
def test_ranges_never_hide_a_fragment_that_holds_what_is_wanted(fragments, data):
    for leaves in fragments:
        ranges = leaf_range(leaves)

        for held in leaves:
            wanted = data.draw(boxes_inside(held.shape))
            if intersect(wanted, held.boxes[0].box) is not None:
                assert may_hold(ranges, held.name, *fraction(wanted, held.shape))


def test_a_fragment_of_many_unlike_leaves_is_described_by_one_range():
    leaves = tuple(
        LeafRecord(f"l{n:03d}", "tensor", "uint8", (8,), "", (BoxRecord((n % 2 * 4,), (4,), ()),))
        for n in range(70)
    )

    assert len(leaf_range(leaves[:60])) == 60
    assert leaf_range(leaves) == (LeafRange("l000", "l069", 0, SCALE),)


def test_a_leaf_that_is_not_there_and_rows_of_others_are_skipped():
    first = LeafRecord("b", "tensor", "uint8", (8, 2), "", (BoxRecord((0, 0), (4, 2), ()),))
    ranges = leaf_range((first,))

    assert may_hold(ranges, "b", *fraction(Box((0, 0), (8, 2)), (8, 2)))
    assert not may_hold(ranges, "b", *fraction(Box((4, 0), (4, 2)), (8, 2)))
    assert not may_hold(ranges, "a")
    assert fraction(Box((), ()), ()) == (0, SCALE)
