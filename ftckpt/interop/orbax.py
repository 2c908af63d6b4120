"""A checkpoint of Orbax: arrays in an OCDBT database (or in folders), and ``_METADATA`` that names them.

TensorStore reads the arrays, so it is TensorStore that must know the store: folders, ``s3://`` and ``gs://``.
Orbax itself is not needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from math import prod
from typing import Any, NoReturn

import numpy as np
import tensorstore as ts
import xxhash

from ftckpt.address import split
from ftckpt.boxes import span_boxes, whole
from ftckpt.errors import ForeignDamaged, NotRepresentable
from ftckpt.interop.api import Array
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.memory import require_memory
from ftckpt.store import Files
from ftckpt.store.api import Buffer

METADATA = "_METADATA"
STRINGS = "_strings.json"
MANIFEST = "manifest.ocdbt"
MAX_METADATA_BYTES = 256 << 20
CACHE_BYTES = 64 << 20
"""Of decoded chunks: neighbouring parts of an array often lie in one."""

_SEQUENCE, _DICT = 1, 2
_EMPTY: dict[str, Any] = {"None": None, "Dict": {}, "List": []}


class OrbaxSource:
    """The tree of one checkpoint. Scalars and strings are plain values."""

    def __init__(self, files: Files, environ: Mapping[str, str] | None = None) -> None:
        """``files``: the folder of the tree, or the step's folder with one tree in it.

        Raises:
            ForeignDamaged: no whole checkpoint is there; an array that is named is absent.
            NotRepresentable: a store that TensorStore does not read, or a dtype that a run cannot hold.
            NotEnoughMemory: the machine has no room for one chunk as it is stated.
        """
        self._files = files
        self._context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
        self._arrays: dict[str, Any] = {}
        sizes = files.sizes()
        self._stored_bytes = sum(sizes.values())
        self._below = self._folder(sizes)
        body = files.text(self._below + METADATA, MAX_METADATA_BYTES)
        self.identity = xxhash.xxh3_128_hexdigest(body + repr(sorted(sizes.items())).encode())
        self._base = _kvstore(files.uri, self._below, os.environ if environ is None else environ)
        try:
            found = json.loads(body)
            entries = found["tree_metadata"]
            self._zarr3 = bool(found.get("use_zarr3"))
            ocdbt = found.get("use_ocdbt")
            self._ocdbt = self._below + MANIFEST in sizes if ocdbt is None else bool(ocdbt)
            self._strings = self._read_strings(sizes)
            self._check_whole(sizes)
            self.tree = self._tree([(_path(entry), entry["value_metadata"]) for entry in entries.values()])
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            if isinstance(error, ForeignDamaged | NotRepresentable):
                raise
            self._bad(METADATA, f"it says what cannot be: {type(error).__name__}: {str(error)[:200]}", error)

    def read(self, array: Array, start: int, stop: int) -> Buffer:
        size = array.itemsize_bytes
        into = np.empty((stop - start) * size, np.uint8)
        for begins, box in span_boxes(whole(array.shape), start, stop):
            where = tuple(slice(low, low + n) for low, n in zip(box.offset, box.extent, strict=True))
            part = np.ascontiguousarray(self._elements(array.name, where))
            into[(begins - start) * size :][: box.numel * size] = part.reshape(-1).view(np.uint8)
        return into.data

    def _folder(self, sizes: Mapping[str, int]) -> str:
        """Where the tree is, below the address: ends with a slash, or is empty."""
        if METADATA in sizes:
            return ""
        below = [name for name in sizes if name.count("/") == 1 and name.endswith(f"/{METADATA}")]
        if len(below) == 1:
            return below[0].removesuffix(METADATA)
        if below:
            names = ", ".join(name.partition("/")[0] for name in below)
            self._bad(METADATA, f"several trees are there: {names}; give the address of one of them")
        return self._bad(METADATA, "it is absent: no checkpoint of Orbax, or one that was not finished")

    def _check_whole(self, sizes: Mapping[str, int]) -> None:
        if self._ocdbt and self._below + MANIFEST not in sizes:
            self._bad(
                MANIFEST,
                "it is absent: the parts of processes were not put together, so the save did not end",
            )

    def _read_strings(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        name = self._below + STRINGS
        return dict(json.loads(self._files.text(name, MAX_METADATA_BYTES))) if name in sizes else {}

    def _tree(self, entries: list[tuple[list[tuple[Any, int]], dict[str, Any]]]) -> Any:
        root: dict[Any, Any] = {}
        lists: set[tuple[Any, ...]] = set()
        for path, described in entries:
            at = root
            for depth, (key, kind) in enumerate(path):
                if kind == _SEQUENCE:
                    lists.add(tuple(key for key, _ in path[:depth]))
                if depth + 1 < len(path):
                    at = at.setdefault(key, {})
            at[path[-1][0]] = self._value(".".join(str(key) for key, _ in path), described)
        return _listed(root, lists)

    def _value(self, name: str, described: dict[str, Any]) -> Any:
        kind = described["value_type"]
        if described.get("skip_deserialize"):
            if kind not in _EMPTY:
                raise NotRepresentable(
                    f"NotRepresentable: {name} of {self._files.uri} is a {kind!r} that Orbax did not write\n"
                    "  nothing was written",
                    leaf=name,
                )
            return type(_EMPTY[kind])() if _EMPTY[kind] is not None else None
        if kind == "string":
            return self._strings[name]
        array = self._open(name)
        if kind == "scalar":
            if array.shape != ():
                self._bad(name, f"the metadata says that it is a scalar, and it has the shape {array.shape}")
            return self._elements(name, ()).item()
        return array

    def _elements(self, name: str, where: tuple[slice, ...]) -> Any:
        """Some elements of an array that was opened."""
        opened = self._arrays[name]
        try:
            return (opened[where] if where else opened).read().result()
        except ValueError as error:
            self._bad(name, f"its bytes do not read: {str(error)[:300]}", error)

    def _open(self, name: str) -> Array:
        kvstore: dict[str, Any] = {**self._base, "path": f"{self._base['path']}{name}/"}
        if self._ocdbt:
            kvstore = {"driver": "ocdbt", "base": self._base, "path": f"{name}/"}
        spec = {
            "driver": "zarr3" if self._zarr3 else "zarr",
            "kvstore": kvstore,
            "fill_missing_data_reads": False,
        }
        try:
            opened = ts.open(spec, open=True, read=True, context=self._context).result()
        except ValueError as error:
            self._bad(name, f"the metadata names this array, and it does not open: {str(error)[:300]}", error)
        dtype = opened.dtype.name
        if dtype not in ITEMSIZE_BYTES or prod(opened.shape) >= 1 << 62:
            raise NotRepresentable(
                f"NotRepresentable: {name} of {self._files.uri} has dtype {dtype} and shape {opened.shape}, which a run "
                "cannot hold\n  nothing was written",
                leaf=name,
            )
        array = Array(name, dtype, tuple(opened.shape))
        self._check_size(array, opened)
        self._arrays[name] = opened
        return array

    def _check_size(self, array: Array, opened: Any) -> None:
        """Before anybody goes by a shape: what it states may be far more than what somebody has written."""
        chunk = opened.chunk_layout.read_chunk.shape or ()
        require_memory(prod(chunk) * array.itemsize_bytes, f"one chunk of {array.name}")
        if array.size_bytes <= self._stored_bytes:
            return
        if not opened.storage_statistics(query_fully_stored=True).result().fully_stored:
            self._bad(array.name, f"not all of its shape {array.shape} was written")

    def _bad(self, file: str, what: str, cause: BaseException | None = None) -> NoReturn:
        raise ForeignDamaged(
            f"ForeignDamaged: {file} of {self._files.uri}: {what}\n  nothing of it is readable in the run",
            file=file,
        ) from cause


def _path(entry: dict[str, Any]) -> list[tuple[Any, int]]:
    """The keys of an entry, outermost first, each with what it is a key of."""
    found = []
    for part in entry["key_metadata"]:
        key, kind = part["key"], part["key_type"]
        if kind not in (_SEQUENCE, _DICT):
            raise ValueError(f"key type {kind!r}")
        found.append((int(key) if kind == _SEQUENCE else str(key), kind))
    if not found:
        raise ValueError("an entry without a key")
    return found


def _listed(node: Any, lists: set[tuple[Any, ...]], path: tuple[Any, ...] = ()) -> Any:
    if not isinstance(node, dict) or not node:
        return node
    built = {key: _listed(value, lists, (*path, key)) for key, value in node.items()}
    if path not in lists:
        return built
    if sorted(built) != list(range(len(built))):
        raise ValueError(f"a list with the items {sorted(built)} at {path}")
    return [built[key] for key in range(len(built))]


def _kvstore(uri: str, below: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """The address as TensorStore spells it. Credentials are TensorStore's own affair."""
    scheme, rest = split(uri)
    path = f"{rest.rstrip('/')}/{below}"
    if scheme in ("", "file"):
        return {"driver": "file", "path": path}
    bucket, _, key = path.partition("/")
    if scheme == "gs":
        return {"driver": "gcs", "bucket": bucket, "path": key}
    if scheme == "s3":
        endpoint = environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL")
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        there = {"endpoint": endpoint, "aws_region": region} if endpoint else {}
        return {"driver": "s3", "bucket": bucket, "path": key, **there}
    raise NotRepresentable(
        f"NotRepresentable: TensorStore, which reads this format, does not know {uri}\n"
        "  nothing was written; copy the checkpoint to a folder first",
        uri=uri,
    )
