"""Stored bytes of chunks, alone and with the bases that they build on."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import zstandard

from ftckpt import codec
from ftckpt.codec import planes
from ftckpt.codec.frames import decode_chain, delta
from ftckpt.errors import CorruptError
from ftckpt.store.api import Buffer
from tests.fuzz import mutate
from tests.fuzz.target import Target

RAWS = (bytes(512), bytes(range(256)) * 2, b"abcd" * 100)
Links = list[tuple[Buffer, int]]


def frames() -> Target:
    """One byte of codec, two of raw size, then stored bytes; a delta builds on bytes made of the size."""

    def check(data: bytes) -> bool:
        if len(data) < 3:
            return False
        raw_bytes = int.from_bytes(data[1:3], "little")
        try:
            raw = codec.decode(data[3:], data[0], raw_bytes, _base(raw_bytes))
        except CorruptError:
            return False
        assert len(raw) == raw_bytes
        return True

    seeds = [
        bytes([number]) + len(raw).to_bytes(2, "little") + _stored(raw, number, itemsize)
        for itemsize in (1, 2, 4)
        for raw in RAWS
        for number in codec.CODECS
    ]
    return Target("codec frames", check, seeds, lambda draw: mutate.bytes_of(seeds, draw))


def chains() -> Target:
    """Two bytes of raw size, then for each link one of codec, two of size, and its stored bytes. What is decoded in
    one pass is what is decoded link by link.
    """

    def check(data: bytes) -> bool:
        raw_bytes, links = _parsed(data)
        if not links or not raw_bytes:
            return False
        found = _outcome(lambda: decode_chain(links, raw_bytes))
        assert found == _outcome(lambda: _link_by_link(links, raw_bytes))
        return found is not None

    wholes = [
        (_stored(raw, number, itemsize), number)
        for raw in RAWS
        for itemsize in (1, 4)
        for number in (codec.RAW, codec.ZSTD, codec.PLANES)
    ]
    deltas = [(_stored(raw, codec.PLANES, itemsize), codec.DELTA) for raw in RAWS for itemsize in (1, 2, 4)]

    def made(draw: Random, damage: float) -> bytes:
        links = [draw.choice(deltas) for _ in range(draw.randrange(4))] + [draw.choice(wholes)]
        harmed = [
            (mutate.bytes_of([body], draw) if draw.random() < damage else body, number)
            for body, number in links
        ]
        return _framed(draw.choice((512, 512, 512, 400, 256)), harmed)

    seeds = [_framed(512, [*deltas[:n], whole]) for n in range(4) for whole in wholes[: len(wholes) * 2 // 3]]

    def craft(draw: Random) -> bytes:
        return mutate.bytes_of(seeds, draw) if draw.random() < 0.3 else made(draw, 0.2)

    return Target("chains of deltas", check, seeds, craft)


def _outcome(call: Callable[[], Buffer]) -> bytes | None:
    try:
        return bytes(call())
    except CorruptError:
        return None


def _link_by_link(links: Links, raw_bytes: int) -> Buffer:
    base: Buffer | None = None
    for body, number in reversed(links):
        base = codec.decode(body, number, raw_bytes, base)
    assert base is not None
    return base


def _framed(raw_bytes: int, links: Links) -> bytes:
    return raw_bytes.to_bytes(2, "little") + b"".join(
        bytes([number]) + len(body).to_bytes(2, "little") + body for body, number in links
    )


def _parsed(data: bytes) -> tuple[int, Links]:
    raw_bytes, at = int.from_bytes(data[:2], "little"), 2
    links: Links = []
    while at + 3 <= len(data) and len(links) <= codec.MAX_CHAIN:
        size = int.from_bytes(data[at + 1 : at + 3], "little")
        links.append((data[at + 3 : at + 3 + size], data[at]))
        at += 3 + size
    return raw_bytes, links


def _base(raw_bytes: int) -> bytes:
    return (bytes(range(256)) * 256)[:raw_bytes]


def _stored(raw: bytes, number: int, itemsize: int) -> bytes:
    match number:
        case codec.RAW:
            return raw
        case codec.ZSTD:
            return zstandard.compress(raw)
        case codec.PLANES:
            return bytes(planes.encode(raw, itemsize, 1))
        case _:
            return bytes(planes.encode(delta(raw, _base(len(raw))), itemsize, 1))
