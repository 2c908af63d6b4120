"""A second reader of format 1, written from ``docs/reference/format.md`` alone; numbers in brackets are
its sections. It imports nothing of ftckpt and no torch: where it needed to know something that the
page did not say, the page was mended.

It reads a run in a folder, whole leaves only, everything in memory. That is all it is for.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgpack
import numpy as np
import xxhash
import zstandard

ITEMSIZE = (
    dict.fromkeys(["bool", "uint8", "int8"], 1)
    | dict.fromkeys(["uint16", "int16", "float16", "bfloat16"], 2)
    | dict.fromkeys(["uint32", "int32", "float32", "complex32"], 4)
    | dict.fromkeys(["uint64", "int64", "float64", "complex64"], 8)
    | {"complex128": 16}
    | dict.fromkeys(["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"], 1)
    | dict.fromkeys(["float8_e8m0fnu", "float4_e2m1fn_x2"], 1)
)


class Unreadable(Exception):
    """Something in the run is not as format 1 says."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Unreadable(what)


class At(NamedTuple):
    """A step of an attempt."""

    step: int
    attempt: int


@dataclass
class Leaf:
    """``data``: row-major elements as the raw bytes of the whole leaf."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    owner: str
    data: bytes = b""


@dataclass
class Step:
    """What one commit holds. ``trees``: the packed values of each value leaf, unpacked."""

    leaves: dict[str, Leaf]
    trees: dict[str, Any]
    codecs: Counter[int] = field(default_factory=Counter)
    longest_chain: int = 0
    packs: set[str] = field(default_factory=set)


class Run:
    """A run in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        record(json.loads, self.get("run.json"))

    # --- objects and records [1, 2] ---------------------------------------------------------------

    def get(self, key: str) -> bytes:
        parts = key.split("/")
        require(all(part and not part.startswith(".") for part in parts), f"{key!r} is no key")
        path = self.folder / key
        require(path.is_file(), f"{key} is absent")
        return path.read_bytes()

    def names(self, folder: str, form: str) -> list[tuple[int, ...]]:
        """The numbers in the names below a folder; whatever has another name is not part of the run."""
        if not (self.folder / folder).is_dir():
            return []
        found = (re.fullmatch(form, path.name, re.ASCII) for path in (self.folder / folder).iterdir())
        return sorted(tuple(map(int, match.groups())) for match in found if match)

    # --- which steps are readable [4] -------------------------------------------------------------

    def commit(self, at: At) -> dict[str, Any]:
        body = self.get(f"commits/{at.step:012d}-{at.attempt:06d}")
        found = record(json.loads, body)
        require((found["step"], found["attempt"]) == at, f"the commit of {at} is that of another step")
        return found

    def readable(self) -> list[At]:
        form = r"(\d{12})-(\d{6})"
        collected = {At(*numbers) for numbers in self.names("collected", form)}
        commits = [At(*numbers) for numbers in self.names("commits", form)]
        return [at for at in commits if at not in collected and not self.commit(at).get("aborted")]

    def lineage(self) -> list[At]:
        """Newest first."""
        starts = {}
        for (attempt,) in self.names("starts", r"(\d{6})"):
            start = record(json.loads, self.get(f"starts/{attempt:06d}"))
            require(start["attempt"] == attempt, f"the start of {attempt} is that of another attempt")
            starts[attempt] = start["parent"]
        readable = self.readable()
        chosen: dict[int, At] = {}
        attempt, bound, met = max(starts, default=0), math.inf, set()
        while attempt in starts and attempt not in met:
            met.add(attempt)
            for at in readable:
                if at.attempt == attempt and at.step <= bound:
                    chosen[at.step] = max(at, chosen.get(at.step, at))
            parent = starts[attempt]
            if parent is None:
                break
            attempt, bound = parent["attempt"], min(bound, parent["step"])
        return sorted(chosen.values(), reverse=True)

    # --- a step [8] -------------------------------------------------------------------------------

    def read(self, at: At) -> Step:
        commit = self.commit(at)
        require(not commit.get("aborted"), f"{at} was given up")
        step = Step({}, {})
        pieces: dict[str, dict[tuple[Any, ...], bytes]] = {}
        for key, size, digest, *_ in commit.get("fragments", []):
            folder = f"fragments/{at.attempt:06d}/{at.step:012d}/"
            require(key.startswith(folder) and 0 <= size <= 1 << 30, f"{key} cannot be a fragment of {at}")
            body = self.get(key)
            require(len(body) == size and hexdigest(body) == digest, f"{key} is not what was committed")
            self.read_fragment(record(unpack_record, body), at, step, pieces)
        check_list(commit, step.leaves)
        for name, leaf in step.leaves.items():
            leaf.data = assemble(name, leaf, pieces[name])
            if leaf.kind == "value":
                step.trees[name] = unpack(leaf.data)
        return step

    def read_fragment(
        self, fragment: dict[str, Any], at: At, step: Step, pieces: dict[str, dict[tuple[Any, ...], bytes]]
    ) -> None:
        require((fragment["step"], fragment["attempt"]) == at, "a fragment of another step")
        require(not fragment.get("failure"), "a fragment that tells of a failure")
        packs = [(key, size) for key, size, *_ in fragment.get("packs", [])]
        for key, size in packs:
            require(key.startswith("packs/") and size >= 0, f"{key} cannot be a pack")
        for name, kind, dtype, shape, owner, boxes in (row[:6] for row in fragment.get("leaves", [])):
            leaf = Leaf(kind, dtype, tuple(shape), owner)
            check_leaf(name, leaf)
            require(step.leaves.setdefault(name, leaf) == leaf, f"two fragments differ about {name}")
            spans = pieces.setdefault(name, {})
            for offset, extent, chunks, *_ in boxes:
                box = tuple(offset), tuple(extent)
                check_box(name, leaf, *box)
                for chunk in chunks:
                    raw, chain = self.chunk(chunk, packs, ITEMSIZE[dtype], math.prod(extent), step)
                    spans.setdefault((*box, chunk[0], chunk[1]), raw)
                    step.longest_chain = max(step.longest_chain, chain)

    # --- chunks [5, 9] ----------------------------------------------------------------------------

    def chunk(
        self, chunk: list[Any], packs: list[tuple[str, int]], itemsize: int, numel: int, step: Step
    ) -> tuple[bytes, int]:
        """The raw bytes of a chunk, proven, and how many bases it builds on."""
        start, stop, raw, stored, codec, pack, offset, size, *rest = chunk
        base = rest[0] if rest else None
        require(0 <= start < stop <= numel, "a chunk outside of its box")
        n = (stop - start) * itemsize
        require(n <= 1 << 30 and len(raw) == len(stored) == 16, "a chunk that cannot be")
        require(0 <= pack < len(packs) and offset >= 0 and 0 < size <= n, "a chunk that lies nowhere")
        key, pack_bytes = packs[pack]
        require(offset + size <= pack_bytes, f"a chunk beyond the end of {key}")
        require((codec == 3) == (base is not None), f"codec {codec} and its base")
        body = self.get(key)
        require(len(body) == pack_bytes, f"{key} has another size")
        step.packs.add(key)
        step.codecs[codec] += 1
        body = body[offset : offset + size]
        require(xxhash.xxh3_128_digest(body) == stored, f"stored bytes in {key} are damaged")
        chain = 0
        if codec == 3:
            require(base[:2] == [start, stop], "a base of another span")
            old, chain = self.chunk(base, packs, itemsize, numel, step)
            chain += 1
            require(chain <= 16, "a chain of more than 16 bases")
            new = np.frombuffer(planes(body, n), np.uint8) ^ np.frombuffer(old, np.uint8)
            body = new.tobytes()
        elif codec == 2:
            body = planes(body, n)
        elif codec == 1:
            body = frame(body, n)
        else:
            require(codec == 0 and len(body) == n, f"codec {codec} of {len(body)} bytes for {n}")
        require(xxhash.xxh3_128_digest(body) == raw, f"decoded bytes in {key} are damaged")
        return body, chain


def hexdigest(body: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(body)


def record(decode: Any, data: bytes) -> dict[str, Any]:
    """The record in an object, its seal checked [2]."""
    require(len(data) <= 1 << 30, "a record of more than 2^30 bytes")
    body, seal = data[:-43], data[-43:]
    require(seal == b"\nxxh3-128:" + hexdigest(body).encode() + b"\n", "a record without its seal")
    try:
        found: dict[str, Any] = decode(body)
    except ValueError as error:
        raise Unreadable(str(error)) from error
    require(isinstance(found, dict), "a record is a map")
    require(found.get("format", 1) == 1, f"a newer format: {found.get('format')}")
    return found


def unpack_record(body: bytes) -> dict[str, Any]:
    found: dict[str, Any] = msgpack.unpackb(body)
    return found


def check_leaf(name: str, leaf: Leaf) -> None:
    """[6, 9]"""
    require(leaf.dtype in ITEMSIZE and len(leaf.shape) <= 64, f"{name} of dtype {leaf.dtype}")
    require(all(n >= 0 for n in leaf.shape), f"{name} of shape {leaf.shape}")
    size = math.prod(max(n, 1) for n in leaf.shape) * ITEMSIZE[leaf.dtype]
    require(size < 1 << 63, f"{name} is larger than can be")
    require(leaf.kind in ("tensor", "value"), f"{name} is a {leaf.kind}")
    if leaf.kind == "value":
        require(leaf.dtype == "uint8" and len(leaf.shape) == 1, f"{name} is no packed value")
        require(leaf.shape[0] <= (1 << 32) + 5, f"{name} is larger than can be")


def check_list(commit: dict[str, Any], found: dict[str, Leaf]) -> None:
    """A commit that lists its leaves lists these [3]."""
    groups, own = commit.get("leaves", []), commit.get("own", [])
    if not groups and not own:
        return
    listed: dict[str, Leaf] = {}
    for kind, dtype, shape, _cut, names, *_ in groups:
        listed |= {name: Leaf(kind, dtype, tuple(shape), "") for name in names}
    require(
        listed == {name: leaf for name, leaf in found.items() if not leaf.owner}, "another list of leaves"
    )
    values = {f"{path}@{owner}" for owner, paths, *_ in own for path in paths}
    owned = {name: leaf for name, leaf in found.items() if leaf.owner}
    require(values == {n for n, leaf in owned.items() if leaf.kind == "value"}, "another list of own values")
    require({row[0] for row in own} == {leaf.owner for leaf in owned.values()}, "another list of owners")
    numbers = {number for row in own for number in row[2]}
    require(numbers <= set(range(len(commit.get("fragments", [])))), "a fragment that there is not")


def check_box(name: str, leaf: Leaf, offset: tuple[int, ...], extent: tuple[int, ...]) -> None:
    require(len(offset) == len(extent) == len(leaf.shape), f"a box of {name} has other dimensions")
    inside = all(o >= 0 and e >= 0 and o + e <= n for o, e, n in zip(offset, extent, leaf.shape, strict=True))
    require(inside, f"a box outside of {name}")


def frame(stored: bytes, n: int) -> bytes:
    """One zstd frame of n bytes: its declared size is looked at before memory is asked for [5, 9]."""
    try:
        require(zstandard.frame_content_size(stored) == n, "a zstd frame of another size")
        raw = zstandard.ZstdDecompressor().decompress(stored, max_output_size=n, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Unreadable(str(error)) from error
    require(len(raw) == n, "a zstd frame gave another size")
    return raw


def planes(stored: bytes, n: int) -> bytes:
    """Byte planes put together [5]."""
    k = stored[0]
    require(1 <= k <= 16 and n % k == 0 and len(stored) >= 1 + 5 * k, "no head of byte planes")
    at = 1 + 5 * k
    elements = np.empty((n // k, k), np.uint8)
    for i in range(k):
        how, size = struct.unpack_from("<BI", stored, 1 + 5 * i)
        body = stored[at : at + size]
        require(len(body) == size, "a plane beyond the end")
        at += size
        if how == 0:
            require(size == n // k, "a plane of another size")
            elements[:, i] = np.frombuffer(body, np.uint8)
        elif how == 1:
            elements[:, i] = np.frombuffer(frame(body, n // k), np.uint8)
        else:
            require(how == 2 and size == 1, f"a plane of kind {how}")
            elements[:, i] = body[0]
    require(at == len(stored), "bytes after the last plane")
    return elements.tobytes()


def assemble(name: str, leaf: Leaf, pieces: dict[tuple[Any, ...], bytes]) -> bytes:
    """The whole leaf, row-major, from spans of boxes that hold every element once [6]."""
    size = ITEMSIZE[leaf.dtype]
    require(
        sum(len(raw) for raw in pieces.values()) == math.prod(leaf.shape) * size,
        f"{name} is not held once by its chunks",
    )
    whole = np.zeros((*leaf.shape, size), np.uint8)
    held = np.zeros(leaf.shape, bool)
    for (offset, extent, start, stop), raw in pieces.items():
        where = tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True))
        marks = np.zeros(math.prod(extent), bool)
        marks[start:stop] = True
        marks = marks.reshape(extent)
        require(not held[where][marks].any(), f"{name} is held twice")
        held[where] |= marks
        part = whole[where]
        part[marks] = np.frombuffer(raw, np.uint8).reshape(-1, size)
    return whole.tobytes()


# --- packed values [7] ----------------------------------------------------------------------------


class TensorRef(NamedTuple):
    """A tensor stands here: the leaf of that name."""

    name: str


class TorchDtype(NamedTuple):
    name: str


class TorchSize(NamedTuple):
    extents: tuple[int, ...]


class TorchDevice(NamedTuple):
    name: str


def unpack(data: bytes) -> Any:
    """A packed value. (msgpack takes float 32 for float; nobody writes it.)"""
    try:
        return _unpack(data, 0)
    except Unreadable:
        raise
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise Unreadable(f"a packed value: {error}") from error


def _unpack(data: bytes, depth: int) -> Any:
    require(depth <= 102, "a packed value nests too deep")

    def no_map(_pairs: object) -> None:
        raise Unreadable("a packed value holds a map")

    found = msgpack.unpackb(
        data,
        ext_hook=lambda code, payload: _extension(code, payload, depth + 1),
        object_pairs_hook=no_map,
        strict_map_key=False,
    )
    require(not isinstance(found, msgpack.Timestamp), "a packed value holds a timestamp")
    return found


def _extension(code: int, payload: bytes, depth: int) -> Any:
    if code == 1:
        number = int.from_bytes(payload, "little", signed=True)
        require(not -(1 << 63) <= number < 1 << 64, "a small integer in the long form")
        return number
    if code == 9:
        return complex(*struct.unpack("<dd", payload))
    inner = _unpack(payload, depth)
    require(isinstance(inner, str if code in (16, 32, 34, 35) else list), f"extension {code}")
    if code == 2:
        return tuple(inner)
    if code in (3, 4, 5):
        return _dict({3: dict, 4: OrderedDict, 5: Counter}[code], inner)
    if code in (6, 7):
        members = set(inner) if code == 6 else frozenset(inner)
        require(len(members) == len(inner), "a member twice")
        return members
    if code == 8:
        longest, items = inner
        return deque(items, longest)
    if code in (10, 11):
        return (range if code == 10 else slice)(*inner)
    if code == 16:
        return dtype(inner)
    if code == 17:
        return _scalar(*inner)
    if code == 18:
        name, shape, raw = inner
        return np.frombuffer(raw, dtype(name)).reshape(shape) if raw else np.zeros(shape, dtype(name))
    if code == 33:
        return TorchSize(tuple(inner))
    texts = {32: TorchDtype, 34: TorchDevice, 35: TensorRef}
    require(code in texts, f"extension type {code}")
    return texts[code](inner)


def _dict(kind: type, flat: list[Any]) -> Any:
    require(len(flat) % 2 == 0, "a key without a value")
    built = kind()
    for key, value in zip(flat[::2], flat[1::2], strict=True):
        require(key not in built, "a key twice")
        built[key] = value
    return built


def _scalar(name: str, raw: bytes) -> Any:
    if name == "<U":
        return np.str_(raw.decode("utf-32-le", "surrogatepass"))
    if name == "|S":
        return np.bytes_(raw)
    return np.frombuffer(raw, dtype(name)).reshape(())[()]


def dtype(name: str) -> np.dtype[Any]:
    require(re.fullmatch(r"[<>|][biufcmMSU]\d+(\[\d*[A-Za-z]+\])?", name, re.ASCII), f"dtype {name}")
    found = np.dtype(name)
    require(found.char not in "gG", f"dtype {name}")
    return found
