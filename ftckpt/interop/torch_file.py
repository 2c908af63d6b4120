"""A file of ``torch.save``: its structure by torch's own restricted loader, its bytes by their places.

torch is asked to load the file onto the meta device with ``weights_only``: it reads the structure, makes no
object but tensors, containers and plain values, and says where in the file each tensor's bytes lie.
"""

from __future__ import annotations

import io
import zipfile
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash

from ftckpt.boxes import whole
from ftckpt.capture.tensors import dtype_name
from ftckpt.errors import ForeignDamaged, ForeignUnsafe, FtckptError, NotRepresentable, StoreError
from ftckpt.interop.api import Array, walk
from ftckpt.interop.extents import Extent, Read, Windows, read_span
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.memory import require_memory
from ftckpt.store import Files
from ftckpt.store.api import Buffer

MAX_STRUCTURE_BYTES = 1 << 30


class Slice(io.RawIOBase):
    """Part of a file, for libraries that want to seek and read. ``failed``: what the store said first, which
    they may take for a broken file.
    """

    def __init__(self, read: Read, file: str, start: int, stop: int) -> None:
        super().__init__()
        self._read, self._file, self._start, self._stop = read, file, start, stop
        self._at = start
        self.failed: StoreError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at - self._start

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: self._start, io.SEEK_CUR: self._at, io.SEEK_END: self._stop}[whence]
        self._at = max(self._start, base + offset)
        return self.tell()

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        count = max(0, min(len(view), self._stop - self._at))
        if count:
            try:
                view[:count] = self._read(self._file, self._at, self._at + count)
            except StoreError as error:
                self.failed = self.failed or error
                raise
            self._at += count
        return count


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file: where its storage begins, and which elements of it are the tensor's."""

    array: Array
    file: str
    offset: int
    first: int
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        expected = 1
        for stride, size in zip(reversed(self.strides), reversed(self.array.shape), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def extent(self) -> Extent:
        """Where it lies, if it is contiguous."""
        return Extent(
            whole(self.array.shape), self.file, self.offset + self.first * self.array.itemsize_bytes
        )

    def gather(self, read: Read) -> memoryview:
        """All its elements, row-major, of whatever strides. Takes memory for what they reach over."""
        size, shape = self.array.itemsize_bytes, self.array.shape
        if not self.array.numel:
            return memoryview(b"")
        last = sum((n - 1) * stride for n, stride in zip(shape, self.strides, strict=True))
        begin = self.offset + self.first * size
        raw = np.frombuffer(read(self.file, begin, begin + (last + 1) * size), np.uint8)
        strides = (*(stride * size for stride in self.strides), 1)
        spread = np.lib.stride_tricks.as_strided(raw, (*shape, size), strides, writeable=False)
        return np.ascontiguousarray(spread).reshape(-1).data


def load_structure(read: Read, file: str, start: int, stop: int, where: str) -> Any:
    """What ``torch.save`` put there, with tensors on the meta device that know their places.

    Raises:
        ForeignUnsafe: it holds more than tensors, containers and plain values. Nothing of it was run.
        ForeignDamaged: it is no whole file of torch's, or a tensor is larger than what is stored of it.
        NotRepresentable: its parts are compressed, so that bytes have no place in it.
        StoreError: it could not be read; that says nothing about it.
    """
    raw = Slice(read, file, start, stop)
    try:
        return _structure(raw, where)
    except FtckptError:
        raise
    except Exception as error:
        if raw.failed is not None:
            raise raw.failed from None
        if isinstance(error, zipfile.BadZipFile):
            raise _bad(where, f"{error}: cut off, or written by a torch older than 1.6") from error
        text = str(error)
        if "Unsupported" in text or "WeightsUnpickler" in text or "weights_only" in text.lower():
            raise _unsafe(where, text) from error
        raise _bad(where, text[:300]) from error


def _structure(raw: Slice, where: str) -> Any:
    with zipfile.ZipFile(raw) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        packed = [record.filename for record in records if record.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise NotRepresentable(
                f"NotRepresentable: {packed[0]} of {where} is compressed, and torch.save compresses nothing\n"
                "  nothing was written; torch.load it where you trust it, and torch.save it again",
                file=where,
                member=packed[0],
            )
        named = {record.filename.rpartition("/")[2]: record for record in records}
        order = named.get("byteorder")
        endian = archive.read(order) if order is not None and order.file_size < 16 else b"little"
    structure = [record.file_size for record in records if record.filename.endswith("/data.pkl")]
    if endian != b"little" or len(structure) != 1 or structure[0] > MAX_STRUCTURE_BYTES:
        raise _bad(where, f"byte order {endian!r:.20}, structure of {structure} bytes")
    raw.seek(0)
    tree = torch.load(io.BufferedReader(raw), map_location="meta", weights_only=True)  # noqa: TID251 - restricted
    starts = [record.header_offset for record in records]
    for path, tensor in walk(tree):
        if isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            offset = storage._checkpoint_offset  # noqa: SLF001 - torch's own hook for this
            held = records[bisect_right(starts, int(offset or 0)) - 1].file_size
            if offset is not None and storage.nbytes() > held:
                name = ".".join(map(str, path))
                raise _bad(where, f"{name} needs {storage.nbytes()} bytes, and {held} are stored of it")
    return tree


def _unsafe(where: str, text: str) -> ForeignUnsafe:
    named = text.partition("GLOBAL ")[2].split(" ")[0] or text.splitlines()[0][:200]
    return ForeignUnsafe(
        f"ForeignUnsafe: {where} holds more than tensors, containers and plain values: {named}\n"
        "  reading it would make objects of that class, so nothing was read or written\n"
        "  load it where you trust it, and save its state_dict()s with torch.save",
        named=named,
    )


def _bad(where: str, what: str) -> ForeignDamaged:
    return ForeignDamaged(
        f"ForeignDamaged: {where} does not read as what torch.save writes\n  {what}\n  nothing was written",
        file=where,
    )


def stored(tensor: torch.Tensor, name: str, file: str, base: int, where: str) -> Stored:
    """Where the bytes of a tensor that ``load_structure`` gave are; ``base`` is where its part begins.

    Raises:
        NotRepresentable: a tensor that a run cannot hold.
        NotEnoughMemory: its elements do not lie in order, and there is no room to put all of them in order.
    """
    dtype = dtype_name(tensor.dtype)
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_quantized or dtype not in ITEMSIZE_BYTES:
        raise NotRepresentable(
            f"NotRepresentable: {name} in {where} is a {type(tensor).__name__} of dtype {dtype} and layout "
            f"{tensor.layout}, which a run cannot hold\n  nothing was written",
            leaf=name,
        )
    offset = tensor.untyped_storage()._checkpoint_offset  # noqa: SLF001 - torch's own hook for this
    if offset is None:
        raise _bad(where, f"this torch does not say where the bytes of {name} are")
    array = Array(name, dtype, tuple(tensor.shape))
    found = Stored(array, file, base + int(offset), int(tensor.storage_offset()), tuple(tensor.stride()))
    if not found.contiguous:
        require_memory(array.size_bytes, f"{name} in {where}, whose elements do not lie in order,")
    return found


class TorchSource:
    """One file that ``torch.save`` wrote."""

    def __init__(self, files: Files, name: str) -> None:
        self._windows = Windows(files)
        self._stored: dict[str, Stored] = {}
        self._known: dict[tuple[object, ...], Array] = {}
        self._gathered: tuple[str, memoryview] = ("", memoryview(b""))
        self._name = name
        self._where = f"{name} of {files.uri}"
        size_bytes = files.store.size(name)
        self.tree = self._mapped(load_structure(self._windows.read, name, 0, size_bytes, self._where), "")
        ends = bytes(files.read(name, max(0, size_bytes - (1 << 16)), size_bytes))
        self.identity = repr((name, size_bytes, xxhash.xxh3_128_hexdigest(ends)))

    def read(self, array: Array, start: int, stop: int) -> Buffer:
        place = self._stored[array.name]
        if place.contiguous:
            return read_span(array, [place.extent], start, stop, self._windows.read)
        kept = self._gathered
        if kept[0] != array.name:
            kept = self._gathered = (array.name, place.gather(self._windows.read))
        size = array.itemsize_bytes
        return kept[1][start * size : stop * size]

    def _mapped(self, node: Any, name: str) -> Any:
        if isinstance(node, torch.Tensor):
            return self._array(node, name)
        if isinstance(node, Mapping):
            built: Any = OrderedDict() if type(node) is OrderedDict else {}
            for key, value in node.items():
                built[key] = self._mapped(value, f"{name}.{key}".lstrip("."))
            return built
        if type(node) in (list, tuple):
            items = [self._mapped(item, f"{name}.{i}".lstrip(".")) for i, item in enumerate(node)]
            return items if type(node) is list else tuple(items)
        return node

    def _array(self, tensor: torch.Tensor, name: str) -> Array:
        found = stored(tensor, name or "value", self._name, 0, self._where)
        array = found.array
        what = (found.offset, found.first, found.strides, array.dtype, array.shape)
        if array.numel and what in self._known:
            return self._known[what]
        while array.name in self._stored:  # "a.b" beside a -> b
            array = Array(f"{array.name}'", array.dtype, array.shape)
        self._known[what], self._stored[array.name] = array, found
        return array
