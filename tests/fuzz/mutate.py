"""Damage: bytes and plain structures changed at random, the same for the same seed."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

NUMBERS = (0, 1, -1, 2, 255, 1 << 31, (1 << 32) + 6, 1 << 40, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
TEXTS = (
    "",
    ".",
    "..",
    "../x",
    "/etc/passwd",
    "packs/../../x",
    "a" * 3000,
    "\x00",
    "\ud7ff😀",
    "%2e",
    "cpu:9",
    "nan",
)
TREES: tuple[Any, ...] = (None, True, 0.5, float("nan"), b"", b"\xff" * 40, [], {}, [[]] * 3, {"x": {}})


def bytes_of(seeds: Sequence[bytes], draw: Random) -> bytes:
    """One of the seeds, or two spliced, with some bytes changed, doubled, cut off or put in."""
    body = bytearray(draw.choice(seeds))
    for _ in range(draw.choice((0, 1, 1, 1, 2, 3, 8))):
        at = draw.randrange(len(body) + 1)
        match draw.randrange(7):
            case 0 if body:
                body[at % len(body)] ^= 1 << draw.randrange(8)
            case 1 if body:
                body[at % len(body)] = draw.choice((0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)))
            case 2:
                del body[at : at + draw.choice((1, 2, 8, len(body)))]
            case 3:
                body[at:at] = draw.randbytes(draw.choice((1, 4, 16)))
            case 4:
                body[at : at + 4] = draw.choice(NUMBERS).to_bytes(9, "big", signed=True)[
                    -draw.choice((2, 4, 8)) :
                ]
            case 5:
                other = draw.choice(seeds)
                body[at:] = other[draw.randrange(len(other) + 1) :]
            case _:
                body[at:at] = body[at : at + draw.choice((1, 8, 64))] * draw.choice((1, 2, 50))
    return bytes(body)


def plain(value: Any, draw: Random, times: int | None = None) -> Any:
    """A structure of dicts, lists and plain values with a few places changed. The one given is not."""
    for _ in range(times if times is not None else draw.choice((1, 1, 1, 2, 3))):
        value = _at(value, draw.choice(list(_places(value)) or [()]), draw)
    return value


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _places(item, (*path, number))


def _at(value: Any, path: tuple[Any, ...], draw: Random) -> Any:
    if not path:
        return _other(value, draw)
    key, *rest = path
    if isinstance(value, dict):
        return {k: _at(v, tuple(rest), draw) if k == key else v for k, v in value.items()}
    changed = [_at(item, tuple(rest), draw) if n == key else item for n, item in enumerate(value)]
    return tuple(changed) if isinstance(value, tuple) else changed


def _other(value: Any, draw: Random) -> Any:
    """Something else in place of a value, mostly of its kind."""
    if draw.random() < 0.15:
        return draw.choice((*TREES, *NUMBERS, *TEXTS))
    match value:
        case bool():
            return not value
        case int():
            return draw.choice((value + 1, value - 1, -value, value * 2, *NUMBERS))
        case float():
            return draw.choice((-value, float("inf"), float("nan"), 0.0, 1e308))
        case str():
            cut = draw.randrange(len(value) + 1)
            return draw.choice((value[:cut], value + "x", value.upper(), value.replace("0", "1"), *TEXTS))
        case bytes():
            return bytes_of([value], draw)
        case list() | tuple() if value:
            items = list(value)
            at = draw.randrange(len(items))
            match draw.randrange(5):
                case 0:
                    items.pop(at)
                case 1:
                    items.insert(at, items[at])
                case 2:
                    draw.shuffle(items)
                case 3:
                    items = [items[at]] * draw.choice((2, 30))
                case _:
                    items = [_nest(items, draw.choice((1, 3, 120)))]
            return tuple(items) if isinstance(value, tuple) else items
        case dict() if value:
            keys = list(value)
            key, other = draw.choice(keys), draw.choice(keys)
            match draw.randrange(3):
                case 0:
                    return {k: v for k, v in value.items() if k != key}
                case 1:
                    return {**value, key: value[other], other: value[key]}
                case _:
                    return {**value, draw.choice((*TEXTS, *NUMBERS)): value[key]}
        case _:
            return draw.choice((*TREES, *NUMBERS, *TEXTS))


def _nest(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value
