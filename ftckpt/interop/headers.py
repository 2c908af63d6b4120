"""The safetensors file format: a length, a JSON header, then the bytes of all tensors, one after the other.

Knows the bytes of the header; refuses to know whose tensors they are. A header comes from anywhere, so
everything in it is checked before it is believed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ftckpt.boxes import whole
from ftckpt.errors import ForeignDamaged, NotRepresentable
from ftckpt.interop.api import Array
from ftckpt.interop.extents import Extent
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import MAX_NDIM
from ftckpt.store import Files

MAX_HEADER_BYTES = 100_000_000
"""What the reference implementation takes."""

TORCH_NAMES: dict[str, str] = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "C64": "complex64",
}
NAMES = {torch: name for name, torch in TORCH_NAMES.items()}


def unsaid(arrays: Iterable[Array]) -> list[str]:
    """Arrays that have no form in a safetensors file, with the reason."""
    found = [f"{a.name}: safetensors has no dtype {a.dtype}" for a in arrays if a.dtype not in NAMES]
    return found + [
        f"{a.name}: a name that safetensors keeps for itself" for a in arrays if a.name == METADATA
    ]


METADATA = "__metadata__"


_TIED = "ftckpt.tied"


@dataclass(frozen=True, slots=True)
class Header:
    """The ``tensors`` of a file, in the order of their bytes; and what an export notes of names that were one
    tensor in its run: ``tied`` gives the first of them. Others do not write it, and nobody has to be believed.
    """

    tensors: dict[str, tuple[Array, Extent]]
    tied: dict[str, str]


def header(arrays: Iterable[Array], about: Mapping[str, str], tied: Mapping[str, str]) -> bytes:
    """Everything before the first tensor's bytes. Tensors follow in the order given, without gaps."""
    arrays = list(arrays)
    known = {array.name: tied[array.name] for array in arrays if array.name in tied}
    noted = {_TIED: json.dumps(known)} if known else {}
    record: dict[str, Any] = {METADATA: {"format": "pt", **about, **noted}}
    at = 0
    for array in arrays:
        end = at + array.size_bytes
        record[array.name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise NotRepresentable(
            f"NotRepresentable: the names of so many tensors take {len(text)} bytes, and a safetensors file may "
            f"have {MAX_HEADER_BYTES}\n  nothing is whole there; choose another format"
        )
    return len(text).to_bytes(8, "little") + text


def read_header(files: Files, name: str) -> Header:
    """What the header of a file says.

    Raises:
        ForeignDamaged: it is cut off, or no such file.
        NotRepresentable: a dtype that a run cannot hold.
    """
    size_bytes = files.store.size(name)
    length = int.from_bytes(files.read(name, 0, 8), "little") if size_bytes >= 8 else size_bytes
    if length > min(MAX_HEADER_BYTES, size_bytes - 8):
        raise _bad(
            files, name, f"{size_bytes} bytes, and a header of {length}: cut off, or no safetensors file"
        )
    try:
        record = json.loads(bytes(files.read(name, 8, 8 + length)), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _bad(files, name, f"its header does not read: {error}") from error
    if not isinstance(record, dict):
        raise _bad(files, name, "its header is no JSON object")
    tied = _ties(record.pop(METADATA, None))
    found = {
        tensor: _tensor(files, name, tensor, entry, 8 + length, size_bytes)
        for tensor, entry in record.items()
    }
    ordered = sorted(found.items(), key=lambda item: (item[1][1].offset, item[1][0].size_bytes))
    end = 8 + length
    for tensor, (array, extent) in ordered:
        if extent.offset != end:
            raise _bad(files, name, f"the bytes of {tensor} do not follow those before it")
        end += array.size_bytes
    if end != size_bytes:
        raise _bad(files, name, f"it has {size_bytes} bytes, and its tensors end at {end}")
    return Header(dict(ordered), tied)


def _ties(about: Any) -> dict[str, str]:
    try:
        found = json.loads(about[_TIED])
        return {str(name): str(other) for name, other in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    built = dict(pairs)
    if len(built) != len(pairs):
        raise ValueError("one name twice")
    return built


def _tensor(
    files: Files, name: str, tensor: str, entry: Any, begins: int, size_bytes: int
) -> tuple[Array, Extent]:
    entry = entry if isinstance(entry, dict) else {}
    kind, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    lengths = _naturals(shape) and _naturals(offsets) and len(offsets) == 2 and len(shape) <= MAX_NDIM
    if not lengths or not isinstance(kind, str):
        raise _bad(files, name, f"what it says of {tensor} cannot be: {str(entry)[:100]}")
    if kind not in TORCH_NAMES:
        raise NotRepresentable(
            f"NotRepresentable: {tensor} in {name} of {files.uri} has dtype {kind!r}, which a run cannot hold\n"
            "  nothing was written",
            file=name,
        )
    dtype = TORCH_NAMES[kind]
    start, stop = offsets
    if stop - start != prod(shape) * ITEMSIZE_BYTES[dtype]:
        raise _bad(files, name, f"{tensor}, {kind}{shape}, would not fill bytes {start} to {stop}")
    if begins + stop > size_bytes:
        raise _bad(
            files, name, f"it has {size_bytes} bytes, and {tensor} would end at {begins + stop}: cut off"
        )
    array = Array(tensor, dtype, tuple(shape))
    return array, Extent(whole(array.shape), name, begins + start)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in value)


def _bad(files: Files, name: str, what: str) -> ForeignDamaged:
    return ForeignDamaged(f"ForeignDamaged: {name} of {files.uri}: {what}\n  nothing was written", file=name)
