"""Zarr 3: a group with one array a tensor, which TensorStore, zarr-python and others open.

TensorStore encodes every chunk in memory, with a checksum in it; ftckpt's stores carry the chunks, so any
address will do. Metadata comes after all chunks: that of arrays, then the group's own.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import tensorstore as ts

from ftckpt.boxes import Box
from ftckpt.capture import as_bytes_view
from ftckpt.errors import DestinationTaken, ObjectDamaged
from ftckpt.interop.api import Array, Outline, Reading, plain_values
from ftckpt.store import Files

CHUNK_BYTES = 8 << 20
GROUP = "zarr.json"
MAX_NAME_BYTES = 180
MAX_GROUP_BYTES = 256 << 20
_NAMES = frozenset(
    {
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    }
)


@dataclass(frozen=True, slots=True)
class ZarrSink:
    """A folder with a group; tied tensors are arrays of their own."""

    dest: Files

    @property
    def single(self) -> None:
        return None

    def refuses(self, outline: Outline) -> Sequence[str]:
        found = [f"{a.name}: Zarr has no dtype {a.dtype}" for a in outline.arrays if a.dtype not in _NAMES]
        long = [a.name for a in outline.arrays if len(folder(a.name).encode()) > MAX_NAME_BYTES]
        return found + [f"{name[:60]}…: too long for a folder's name" for name in long]

    def owned(self, names: Collection[str], arrays: Sequence[str]) -> Sequence[str]:
        folders = {folder(array) for array in arrays} | self._named(names)
        own = [name for name in names if _is_part(name, folders)]
        return [GROUP, *own] if GROUP in names else own

    def _named(self, names: Collection[str]) -> set[str]:
        """The folders that the group that is there says are arrays of ours."""
        if GROUP not in names:
            return set()
        try:
            return set(json.loads(self.dest.text(GROUP, MAX_GROUP_BYTES))["attributes"]["ftckpt"]["names"])
        except (ValueError, KeyError, TypeError, RecursionError, ObjectDamaged) as error:
            raise DestinationTaken(
                f"DestinationTaken: {GROUP} of {self.dest.uri} is not of an export, so nothing says which arrays "
                "are of it\n  nothing was changed; give another address, or remove what is there",
                uri=self.dest.uri,
            ) from error

    def write(self, outline: Outline, read: Reading) -> Sequence[str]:
        context = ts.Context()
        grids = {array.name: _opened(array, context) for array in outline.arrays}
        cells = [(array, box) for array in outline.arrays for box in _cells(array)]
        for (array, box), tensor in zip(cells, read(cells), strict=True):
            if box.numel:
                self._put_chunk(array, grids[array.name], box, as_bytes_view(tensor))
        for array in outline.arrays:
            metadata = grids[array.name].spec().to_json()["metadata"]
            self.dest.put(f"{folder(array.name)}/{GROUP}", json.dumps(metadata, indent=2).encode())
        about = {**outline.about, "names": {folder(a.name): a.name for a in outline.arrays}}
        group = {"zarr_format": 3, "node_type": "group", "attributes": {"ftckpt": about}}
        self.dest.put(GROUP, json.dumps(group, indent=2).encode())
        return plain_values(outline)

    def _put_chunk(self, array: Array, grid: Any, box: Box, raw: memoryview) -> None:
        """Have one chunk encoded, and carry it over."""
        part = np.frombuffer(raw, grid.dtype.numpy_dtype).reshape(box.extent)
        where = tuple(slice(low, low + n) for low, n in zip(box.offset, box.extent, strict=True))
        (grid[where] if where else grid).write(part).result()
        chunk = chunk_shape(array)
        indices = [low // n for low, n in zip(box.offset, chunk, strict=True)]
        key = "/".join(["c", *map(str, indices)])
        self.dest.put(f"{folder(array.name)}/{key}", grid.kvstore.read(key).result().value)
        grid.kvstore.write(key, None).result()


def folder(name: str) -> str:
    """A tensor's name as the name of a folder."""
    text = "".join(c if c.isprintable() and c not in "/\\\\%" else f"%{ord(c):02X}" for c in name)
    return f"%2E{text[1:]}" if text.startswith(".") else text if text not in ("", GROUP) else f"%{text}"


def _is_part(name: str, folders: AbstractSet[str]) -> bool:
    """Whether a file is the metadata or a chunk of an array in one of the folders."""
    first, *rest = name.split("/")
    return first in folders and (rest == [GROUP] or rest[:1] == ["c"])


def chunk_shape(array: Array) -> tuple[int, ...]:
    """The last dimensions whole, as many rows of them as there is room for."""
    limit = max(1, CHUNK_BYTES // array.itemsize_bytes)
    shape: list[int] = []
    for axis, n in enumerate(array.shape):
        row = prod(array.shape[axis + 1 :])
        shape.append(max(1, min(n, limit // row if row else n)))
    return tuple(shape)


def _cells(array: Array) -> Iterator[Box]:
    """The chunks of an array, in order of their indices."""
    chunk = chunk_shape(array)
    counts = [-(-n // size) for n, size in zip(array.shape, chunk, strict=True)]
    for index in np.ndindex(*counts):
        offset = tuple(int(i) * size for i, size in zip(index, chunk, strict=True))
        extent = tuple(min(size, n - low) for low, size, n in zip(offset, chunk, array.shape, strict=True))
        yield Box(offset, extent)


def _opened(array: Array, context: Any) -> Any:
    """The array in memory of its own, which holds one chunk at a time."""
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "memory", "path": f"{folder(array.name)}/"},
        "metadata": {
            "shape": list(array.shape),
            "data_type": array.dtype,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape(array))}},
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        },
        "store_data_equal_to_fill_value": True,
    }
    return ts.open(spec, create=True, context=context).result()
