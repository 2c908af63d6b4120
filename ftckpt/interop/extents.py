"""Arrays that lie in files as row-major boxes: which bytes a span of elements is.

Knows offsets and boxes; refuses to know what wrote the files. Reads go through a few windows, so that
neighbouring spans and small arrays cost one request for many.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ftckpt.boxes import Box, intersect, rows_touched, span_boxes, whole
from ftckpt.errors import ForeignDamaged
from ftckpt.interop.api import Array
from ftckpt.store import Files

WINDOW_BYTES = 4 << 20
WINDOWS = 6


@dataclass(frozen=True, slots=True)
class Extent:
    """The elements of ``box``, row-major, in a file from byte ``offset`` on."""

    box: Box
    file: str
    offset: int


class Windows:
    """Reads files through a few windows that are kept. From any thread."""

    def __init__(self, files: Files, window_bytes: int = WINDOW_BYTES, windows: int = WINDOWS) -> None:
        self._files = files
        self._window_bytes = window_bytes
        self._keep = windows
        self._sizes: dict[str, int] = {}
        self._kept: OrderedDict[tuple[str, int], Future[memoryview]] = OrderedDict()
        self._lock = threading.Lock()

    def size(self, file: str) -> int:
        """The bytes of a file."""
        with self._lock:
            if file not in self._sizes:
                self._sizes[file] = self._files.store.size(file)
            return self._sizes[file]

    def read(self, file: str, start: int, stop: int) -> memoryview:
        """Bytes ``start`` to ``stop``.

        Raises:
            ForeignDamaged: the file has fewer.
        """
        size_bytes = self.size(file)
        if not 0 <= start <= stop <= size_bytes:
            raise ForeignDamaged(
                f"ForeignDamaged: {file} of {self._files.uri} has {size_bytes} bytes, and {start} to {stop} "
                "are needed: cut off\n  nothing of the run is readable",
                file=file,
            )
        if stop - start >= self._window_bytes:
            return self._files.read(file, start, stop)
        first, last = start // self._window_bytes, max(start, stop - 1) // self._window_bytes
        found = [self._window(file, number, size_bytes) for number in range(first, last + 1)]
        base = first * self._window_bytes
        if len(found) == 1:
            return found[0][start - base : stop - base]
        return memoryview(b"".join(found))[start - base : stop - base]

    def _window(self, file: str, number: int, size_bytes: int) -> memoryview:
        with self._lock:
            kept = self._kept.get((file, number))
            if kept is None:
                mine: Future[memoryview] = Future()
                self._kept[file, number] = mine
                if len(self._kept) > self._keep:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end((file, number))
        if kept is not None:
            return kept.result()
        begin = number * self._window_bytes
        try:
            mine.set_result(self._files.read(file, begin, min(begin + self._window_bytes, size_bytes)))
        except BaseException as error:
            mine.set_exception(error)
            with self._lock:
                self._kept.pop((file, number), None)
        return mine.result()


Bytes = npt.NDArray[np.uint8]
Read = Callable[[str, int, int], memoryview]


def read_span(array: Array, extents: Sequence[Extent], start: int, stop: int, read: Read) -> memoryview:
    """Elements ``start`` to ``stop`` of an array, row-major, out of the extents that tile it.

    Raises:
        ForeignDamaged: the extents do not hold all of them.
    """
    size = array.itemsize_bytes
    if len(extents) == 1 and extents[0].box == whole(array.shape):
        at = extents[0].offset
        return read(extents[0].file, at + start * size, at + stop * size)
    into = np.empty((stop - start) * size, np.uint8)
    filled = 0
    for begins, piece in span_boxes(whole(array.shape), start, stop):
        target = into[(begins - start) * size :][: piece.numel * size].reshape((*piece.extent, size))
        for extent in extents:
            region = intersect(extent.box, piece)
            if region is not None:
                _copy(target, piece, extent, region, size, read)
                filled += region.numel
    if filled != stop - start:
        raise ForeignDamaged(
            f"ForeignDamaged: of elements {start} to {stop} of {array.name} the checkpoint has {filled}\n"
            "  its parts do not tile this tensor; nothing of the run is readable",
            file=extents[0].file if extents else "",
        )
    return into.data


def _copy(target: Bytes, piece: Box, extent: Extent, region: Box, size: int, read: Read) -> None:
    """Copy ``region`` out of a file into ``target``, which holds ``piece``."""
    first, last = rows_touched(extent.box, region)
    raw = np.frombuffer(
        read(extent.file, extent.offset + first * size, extent.offset + last * size), np.uint8
    )
    for begins, part in span_boxes(extent.box, first, last):
        inner = intersect(part, region)
        if inner is None:
            continue
        body = raw[(begins - first) * size :][: part.numel * size].reshape((*part.extent, size))
        target[_slices(inner, piece)] = body[_slices(inner, part)]


def _slices(region: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - origin, low - origin + n)
        for low, n, origin in zip(region.offset, region.extent, outer.offset, strict=True)
    )
