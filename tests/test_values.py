"""Plain values survive as bytes with their types and bits, and bad bytes never become values."""

from __future__ import annotations

import contextlib
import datetime as dt
import enum
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ftckpt.errors import RecordCorrupt, UnsupportedValue
from ftckpt.values import MAX_DEPTH, TensorRef, check, joined, pack, path_part, unpack

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(2**200), 2**200),
    st.floats(),
    st.complex_numbers(),
    st.text(st.characters(exclude_categories=["Cs"])),
    st.binary(),
)
keys = st.one_of(
    scalars.filter(lambda k: k == k),
    st.tuples(scalars.filter(lambda k: k == k)),  # NaN equals no key
)
arrays = hnp.arrays(
    st.sampled_from(["<f4", ">f8", "|b1", "<i2", "|u1", "<c8", "<f2", "<M8[ns]", "<U3", "|S4", "<m8[s]"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
values = st.recursive(
    scalars | arrays | st.frozensets(keys, max_size=4) | st.builds(TensorRef, st.text("abc.", max_size=5)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
    ),
    max_leaves=12,
)


def same(a: object, b: object) -> bool:
    """Equal in type, order and every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, np.ndarray):
        return a.dtype.str == b.dtype.str and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, np.generic):
        return a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@given(values)
def test_a_value_comes_back_with_its_types_and_bits(value):
    assert same(unpack(pack(value, leaf="v")), value)


@given(values)
def test_the_same_value_gives_the_same_bytes_again(value):
    data = pack(value, leaf="v")

    assert pack(unpack(data), leaf="v") == data


@pytest.mark.parametrize(
    "value",
    [
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
        -(2**63) - 1,
        math.inf,
        -math.inf,
        -0.0,
        struct.unpack("<d", bytes.fromhex("010000000000f87f"))[0],
        complex(-0.0, math.nan),
        "",
        "ü\0𝄞",
        {"0": 1, 0: 2, 1.5: 3, None: 4, (1, "a"): 5, b"x": 6, "a.b": 7},
        Counter({30: 1, 80: 2}),
        {3, 1, 2},
        frozenset({"b", "a", (1,)}),
        range(3, 9, 2),
        slice(None, 4, None),
        np.float32(math.nan),
        np.bool_(True),
        np.str_("a\0"),
        np.bytes_(b""),
        np.datetime64("2024-01-02T03", "h"),
        np.dtype(">f4"),
        np.array(7, dtype=np.int8),
        np.empty((0, 3), dtype=np.complex128),
        np.array(["", "a"]),
        torch.bfloat16,
        torch.Size([2, 3]),
        torch.device("cuda:1"),
        deque([1, 2], maxlen=3),
        [[]],
        ((), [], {}),
    ],
    ids=repr,
)
def test_every_kind_of_the_table_comes_back(value):
    assert same(unpack(pack(value, leaf="v")), value)


@pytest.mark.parametrize(
    "first, second", [(1, True), (1, 1.0), (True, 1.0), ("1", 1), (None, "None"), ((1,), "(1,)")]
)
def test_keys_that_look_alike_keep_their_types(first, second):
    assert type(next(iter(unpack(pack({first: 0}, leaf="v"))))) is type(first)
    assert pack({first: 0}, leaf="v") != pack({second: 0}, leaf="v")


def test_arrays_that_are_views_are_written_row_major_and_read_writable():
    base = np.arange(24, dtype=np.int16).reshape(4, 6)

    back = unpack(pack([base.T, base[::2, ::3]], leaf="v"))

    assert np.array_equal(back[0], base.T)
    assert np.array_equal(back[1], base[::2, ::3])
    back[0][:] = 0


def test_sets_have_one_order():
    assert pack({"a", "b", "c"}, leaf="v") == pack({"c", "b", "a"}, leaf="v")


class Colour(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


Pair = namedtuple("Pair", "a b")  # noqa: PYI024 — an untyped one is what trainers hold
cycle: list = []
cycle.append({"again": cycle})


@pytest.mark.parametrize(
    "value, leaf",
    [
        (object(), "buffer.x.0"),
        (Colour.RED, "buffer.x.0"),
        (Number.ONE, "buffer.x.0"),
        (Pair(1, 2), "buffer.x.0"),
        (defaultdict(int), "buffer.x.0"),
        (dt.datetime(2024, 1, 1, tzinfo=dt.UTC), "buffer.x.0"),
        (np.array([object()]), "buffer.x.0"),
        (np.longdouble(1), "buffer.x.0"),
        (np.zeros(2, dtype=[("a", "i4")]), "buffer.x.0"),
        ({"a.b": lambda: 0}, "buffer.x.0.a%2Eb"),
        ("\ud800", "buffer.x.0"),
        (torch.zeros(1), "buffer.x.0"),
        (cycle, "buffer.x.0.0.again"),
        (int, "buffer.x.0"),
        (bytearray(b"a"), "buffer.x.0"),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_cannot_be_written_faithfully_is_refused_by_its_full_name(value, leaf):
    with pytest.raises(UnsupportedValue) as refused:
        pack({"x": [value]}, leaf="buffer")

    assert refused.value.leaf == leaf
    assert leaf in str(refused.value)
    assert "state_dict" in str(refused.value)
    assert isinstance(refused.value, TypeError)


def test_check_refuses_what_pack_refuses():
    with pytest.raises(UnsupportedValue, match=r"a\.b"):
        check(np.array([object()]), leaf="a.b")
    check(np.zeros(3), leaf="a.b")


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: (v,), lambda v: {"k": v}, lambda v: deque([v])])
def test_nesting_is_bounded_alike_when_written_and_when_read(wrap):
    value: object = range(3)
    levels = 0
    while True:
        try:
            data = pack(value, leaf="v")
        except UnsupportedValue:
            break
        assert same(unpack(data), value)
        value = wrap(value)
        levels += 1
    assert levels in {MAX_DEPTH + 1, MAX_DEPTH // 2 + 1}


def extension(code: int, payload: bytes) -> bytes:
    return struct.pack(">BIb", 0xC9, len(payload), code) + payload


def test_extensions_that_hold_extensions_are_refused_at_the_first():
    """Their depth is not that of containers: a reader that followed them would run out of stack."""
    data = b"\xc0"
    for _ in range(3000):
        data = extension(2, data)

    with pytest.raises(RecordCorrupt, match="holds an extension"):
        unpack(data)


@pytest.mark.parametrize(
    "code, text",
    [
        (16, "a5"),
        (16, "(2,)f4"),
        (16, "f4,f4"),
        (16, "float32"),
        (32, "_inductor"),
        (32, "float"),
        (34, "mkldnn"),
    ],
)
def test_names_that_numpy_or_torch_would_take_but_nobody_writes_are_refused(code, text):
    """Asking about some of them warns, or imports things."""
    with pytest.raises(RecordCorrupt):
        unpack(extension(code, pack(text, leaf="v")))


def test_bytes_that_nest_deeper_than_anything_written_are_refused():
    with pytest.raises(RecordCorrupt, match="deep"):
        unpack(b"\x91" * 5000 + b"\xc0")


@given(st.binary(max_size=80))
def test_random_bytes_become_a_value_or_an_error_and_nothing_else(data):
    try:
        value = unpack(data)
    except RecordCorrupt:
        return
    pack(value, leaf="v")


@given(values, st.data())
def test_damaged_bytes_become_a_value_or_an_error_and_nothing_else(value, data):
    packed = bytearray(pack(value, leaf="v"))
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        packed[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del packed[at:]
    with contextlib.suppress(RecordCorrupt):
        unpack(packed)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xdd\xff\xff\xff\xff\xc0",  # four thousand million items
        b"\xdb\xff\xff\xff\xffa",
        b"\xc6\xff\xff\xff\xffa",
        b"\xc9\xff\xff\xff\xff\x01a",
        b"\x80",  # a map
        b"\xca\0\0\0\0",  # float 32
        b"\xc1",
        b"\xd6\xff\0\0\0\0",  # MessagePack's own timestamp
        b"\xd4\x63\xc0",  # extension 99
        b"\xc0\xc0",  # two values
        b"\xc7\x02\x02\x90\xc0",  # two values in a tuple's payload
        b"\xd5\x03\x91\xc0",  # a dict with a key and no value
        b"\xa1\xff",  # no UTF-8
        pack({1: 1}, leaf="v")
        .replace(b"\x92\x01\x01", b"\x94\x01\x01\x01\x02")
        .replace(b"\xc7\x03", b"\xc7\x05"),
        b"\xc7\x04\x03\x92\x91\x01\x01",  # a list as a key
        b"\xd4\x01\x05",  # a small integer in the long form
    ],
    ids=lambda d: d.hex()[:24] or "empty",
)
def test_bytes_that_are_never_written_are_refused(data):
    with pytest.raises(RecordCorrupt):
        unpack(data)


@pytest.mark.parametrize(
    "name, shape, raw",
    [
        ("<f4", [2], b"1234"),
        ("<f4", [-1], b""),
        ("|O", [1], b"12345678"),
        ("<f4", [2**62, 4], b""),
        ("x", [], b""),
    ],
)
def test_an_array_whose_claims_do_not_match_its_bytes_is_refused(name, shape, raw):
    import msgspec

    payload = msgspec.msgpack.encode([name, shape, raw])

    with pytest.raises(RecordCorrupt):
        unpack(msgspec.msgpack.encode(msgspec.msgpack.Ext(18, payload)))


name_keys = st.one_of(
    st.text(max_size=6),
    st.sampled_from(["0", "%i0", "%n", "a.b", "a/b", "", "%2F", "%e", "@g.0", "x" * 300]),
    st.integers(),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
    st.binary(max_size=3),
    st.tuples(st.integers()),
).filter(lambda k: not (isinstance(k, str) and any("\ud800" <= c <= "\udfff" for c in k)))


@given(st.lists(name_keys, min_size=1, max_size=3), st.lists(name_keys, min_size=1, max_size=3))
def test_two_paths_of_keys_never_give_one_name(first, second):
    def name(keys: list) -> str:
        path = "c"
        for key in keys:
            path = joined(path, key)
        return path

    typed = lambda keys: [(type(k), pack(k, leaf="k")) for k in keys]
    assert (name(first) == name(second)) == (typed(first) == typed(second))


def test_names_stay_readable():
    assert joined("actor", "weight") == "actor.weight"
    assert [path_part(k) for k in ["a.b", "", "0", 0, 1.5, True, None, "ü x"]] == [
        "a%2Eb",
        "%e",
        "0",
        "%i0",
        "%f1%2E5",
        "%bTrue",
        "%n",
        "ü x",
    ]
