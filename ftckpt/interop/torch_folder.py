"""A DCP folder: what ``torch.distributed.checkpoint`` saves and loads.

Out: torch's own writer does it, given a plan whose data is read from the run item by item; so what a torch of
any version reads is what that torch wrote. In: the metadata says which item holds which part of a tensor,
and each item is a small file of ``torch.save``.
"""

from __future__ import annotations

import dataclasses
import io
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import FileSystemBase, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ftckpt.boxes import Box
from ftckpt.capture.tensors import dtype_name
from ftckpt.errors import ForeignDamaged, FtckptError, NotRepresentable
from ftckpt.interop.api import Array, Outline, Reading, parts, walk
from ftckpt.interop.extents import Extent, Windows, read_span
from ftckpt.interop.torch_file import Stored, load_structure, stored
from ftckpt.interop.torch_metadata import read_metadata
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import MAX_NDIM
from ftckpt.plan.assign import covers
from ftckpt.store import Files
from ftckpt.store.api import Buffer

METADATA = ".metadata"
MAX_METADATA_BYTES = 1 << 30
ITEM_BYTES = 16 << 20
FILE_BYTES = 2 << 30
_SUFFIX = ".distcp"


# --- out ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class DcpSink:
    """A folder for ``dcp.load``: components, their tensors and their plain values, under the names that
    ``state_dict()``s have. Tensors are cut into items, so that any layout loads its part of them.
    """

    dest: Files

    @property
    def single(self) -> None:
        return None

    def refuses(self, outline: Outline) -> Sequence[str]:
        try:
            _flattened(outline)
        except ValueError as error:
            return [str(error)]
        return [f"{'.'.join(map(str, path))}: a name that is no text" for path in _odd(outline)]

    def owned(self, names: Collection[str], arrays: Sequence[str]) -> Sequence[str]:
        return [name for name in names if "/" not in name and (name.endswith(_SUFFIX) or name == METADATA)]

    def write(self, outline: Outline, read: Reading) -> Sequence[str]:
        flat, mapping = _flattened(outline)
        tensors = {name: value for name, value in flat.items() if isinstance(value, Array)}
        rest = {name: value for name, value in flat.items() if name not in tensors}
        items = [(name, array, box) for name, array in tensors.items() for box in parts(array, ITEM_BYTES)]
        writer = FileSystemWriter(self.dest.uri, sync_files=False, per_thread_copy_ahead=0)
        writer.fs, writer.path = _Folder(self.dest), self.dest.uri  # type: ignore[assignment]
        values = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in rest]
        plans = writer.prepare_global_plan([SavePlan(values), *map(SavePlan, _files(items))])
        supply: Any = _Supply(rest, read((array, box) for _, array, box in items))
        results = [writer.write_data(plan, supply).wait() for plan in plans if plan.items]
        described: dict[str, Any] = {name: BytesStorageMetadata() for name in rest}
        for name, array in tensors.items():
            chunks = [_chunk(box) for box in parts(array, ITEM_BYTES)]
            described[name] = TensorStorageMetadata(_properties(array), torch.Size(array.shape), chunks)
        writer.finish(Metadata(described, planner_data=mapping), results)
        (first, *_) = [*outline.trees, ""]
        return [f"{path or first} ({what})" for path, what in _changes(_rooted(outline), "")]


def _files(items: Sequence[tuple[str, Array, Box]]) -> list[list[WriteItem]]:
    """The items of each file, of at most ``FILE_BYTES``, an item at least."""
    files: list[list[WriteItem]] = []
    size_bytes = 0
    for name, array, box in items:
        part_bytes = box.numel * array.itemsize_bytes
        if not files or size_bytes + part_bytes > FILE_BYTES:
            files.append([])
            size_bytes = 0
        files[-1].append(_item(name, array, box))
        size_bytes += part_bytes
    return files


def _flattened(outline: Outline) -> tuple[dict[str, Any], dict[str, Any]]:
    """All values by dotted name, as torch flattens them, and the paths that the names stand for."""
    flat, mapping = flatten_state_dict(_replaced(_rooted(outline)))
    return {name: value.array if isinstance(value, _Stand) else value for name, value in flat.items()}, dict(
        mapping
    )


def _rooted(outline: Outline) -> dict[str, Any]:
    """All that is exported as one dict, the outermost names first."""
    if not outline.bare:
        return dict(outline.trees)
    (tree,) = outline.trees.values()
    return tree if isinstance(tree, dict) else {"value": tree}


class _Stand(torch.Tensor):
    """Stands for an array where torch looks for tensors."""

    array: Array


def _replaced(node: Any) -> Any:
    if isinstance(node, Array):
        stand = torch.empty(0, device="meta").as_subclass(_Stand)
        stand.array = node
        return stand
    if isinstance(node, dict):
        return {key: _replaced(value) for key, value in node.items()}
    if _is_list_there(node):
        return [_replaced(value) for value in node]
    return node


def _is_list_there(node: Any) -> bool:
    """Torch looks for tensors in lists; tuples without any stay as they are, being values."""
    if type(node) is tuple:
        return any(isinstance(value, Array) for _, value in walk(node))
    return type(node) in (list, deque)


def _changes(node: Any, path: str) -> Iterator[tuple[str, str]]:
    """What is another thing in the folder than it was, by name: the folder has names, lists and leaves only."""
    inner: Iterable[tuple[Any, Any]] = ()
    if isinstance(node, dict):
        inner = node.items()
        if not node:
            yield path, "an empty dict, which DCP does not hold"
        if any(type(key) is not str for key in node):
            yield path, "its keys are numbers; in DCP they are text"
    elif _is_list_there(node):
        inner = enumerate(node)
        if type(node) is not list:
            yield path, f"a {type(node).__name__}; in DCP it is a list"
    for key, value in inner:
        yield from _changes(value, f"{path}.{key}".lstrip("."))


def _odd(outline: Outline) -> list[tuple[object, ...]]:
    """Paths with a key that torch would turn into text."""
    return [
        path
        for tree in outline.trees.values()
        for path, _ in walk(tree)
        if any(not isinstance(key, str | int) for key in path)
    ]


def _item(name: str, array: Array, box: Box) -> WriteItem:
    data = TensorWriteData(_chunk(box), _properties(array), torch.Size(array.shape))
    return WriteItem(MetadataIndex(name, box.offset), WriteItemType.SHARD, tensor_data=data)


def _chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.extent))


def _properties(array: Array) -> TensorProperties:
    return TensorProperties(dtype=getattr(torch, array.dtype))


class _Supply:
    """What torch's writer takes for a planner: gives it the data of each item, in their order."""

    def __init__(self, values: dict[str, Any], tensors: Iterator[torch.Tensor]) -> None:
        self._values, self._tensors = values, tensors

    def resolve_data(self, item: WriteItem) -> torch.Tensor | io.BytesIO:
        if item.type is not WriteItemType.BYTE_IO:
            # torch's writer keeps all of a file's tensors to its end: they are views of memory used again.
            return next(self._tensors)
        body = io.BytesIO()
        torch.save(self._values[item.index.fqn], body)  # noqa: TID251 - how this format holds plain values
        body.seek(0)
        return body


class _Folder(FileSystemBase):
    """The destination as torch's writer sees it. A name that ends in ``.tmp`` is held until it is renamed."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._held: dict[str, bytes] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        name = PurePosixPath(path).name
        assert mode == "wb", mode
        if not name.endswith(".tmp"):
            with self._files.writing(name) as out:
                yield out
            return
        body = io.BytesIO()
        yield body
        self._held[name] = body.getvalue()

    def concat_path(self, path: Any, suffix: str) -> Any:
        return PurePosixPath(path) / suffix

    def rename(self, path: Any, new_path: Any) -> None:
        self._files.put(PurePosixPath(new_path).name, self._held.pop(PurePosixPath(path).name))

    def init_path(self, path: Any) -> Any:
        return path

    def mkdir(self, path: Any) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:  # noqa: ARG003 - torch's own name
        return True

    def exists(self, path: Any) -> bool:
        return PurePosixPath(path).name in self._files.sizes()

    def rm_file(self, path: Any) -> None:
        self._files.delete([PurePosixPath(path).name])


# --- in -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Item:
    """Part of a tensor: its box, and the bytes of a file that hold it."""

    box: Box
    file: str
    offset: int
    length: int


class DcpSource:
    """A DCP folder. What the metadata says is checked against the files once it is opened."""

    def __init__(self, files: Files) -> None:
        """Raises:
        ForeignUnsafe: the metadata, or a plain value, names a class that is not on torch's list.
        ForeignDamaged: it does not read; a file is absent or cut off; parts do not tile a tensor.
        """
        self._files = files
        self._windows = Windows(files)
        self._items: dict[str, list[_Item]] = {}
        self._opened: dict[_Item, Stored] = {}
        self._gathered: tuple[Stored, memoryview] | None = None
        self._lock = threading.Lock()
        body = files.maybe(METADATA, MAX_METADATA_BYTES)
        if body is None:
            raise self._bad(METADATA, "it is absent: no folder of DCP, or a save that did not end")
        found = read_metadata(body, f"{METADATA} of {files.uri}")
        try:
            self.tree = self._tree(found, files.sizes())
        except FtckptError:
            raise
        except (AttributeError, TypeError, KeyError, ValueError, AssertionError) as error:
            raise self._bad(METADATA, f"it says what cannot be ({type(error).__name__})") from error
        self.identity = xxhash.xxh3_128_hexdigest(body)

    def read(self, array: Array, start: int, stop: int) -> Buffer:
        extents, gathered = [], dict[str, Stored]()
        for number, item in enumerate(self._items[array.name]):
            place = self._place(array, item)
            if place.contiguous:
                extents.append(Extent(item.box, item.file, place.extent.offset))
            else:
                gathered[f"{item.file}, gathered {number}"] = place
                extents.append(Extent(item.box, f"{item.file}, gathered {number}", 0))

        def read(file: str, first: int, last: int) -> memoryview:
            if file in gathered:
                return self._gather(gathered[file])[first:last]
            return self._windows.read(file, first, last)

        return read_span(array, extents, start, stop, read)

    def _gather(self, place: Stored) -> memoryview:
        """All of a part that is not contiguous; the last one is kept."""
        kept = self._gathered
        if kept is None or kept[0] != place:
            kept = self._gathered = (place, place.gather(self._windows.read))
        return kept[1]

    def _place(self, array: Array, item: _Item) -> Stored:
        with self._lock:
            kept = self._opened.get(item)
        if kept is None:
            where = f"an item of {array.name} in {item.file}"
            stop = item.offset + item.length
            tensor = load_structure(self._windows.read, item.file, item.offset, stop, where)
            if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != item.box.extent:
                raise self._bad(
                    item.file, f"an item of {array.name} is not the {item.box.extent} that it should be"
                )
            kept = stored(tensor, array.name, item.file, item.offset, where)
            if kept.array.dtype != array.dtype:
                raise self._bad(
                    item.file, f"an item of {array.name} is {kept.array.dtype}, not {array.dtype}"
                )
            with self._lock:
                self._opened[item] = kept
        return kept

    def _tree(self, found: Metadata, sizes: dict[str, int]) -> Any:
        flat: dict[str, Any] = {}
        infos = {
            (index.fqn, tuple(index.offset) if index.offset is not None else None): info
            for index, info in found.storage_data.items()
        }
        for name, described in found.state_dict_metadata.items():
            assert isinstance(name, str)
            if isinstance(described, BytesStorageMetadata):
                flat[name] = self._value(name, self._item(infos[name, None], Box((), ()), sizes))
                continue
            flat[name] = self._array(name, described, infos, sizes)
        return _unflattened(flat, found.planner_data)

    def _array(self, name: str, described: Any, infos: dict[Any, Any], sizes: dict[str, int]) -> Array:
        assert isinstance(described.properties.dtype, torch.dtype)
        dtype, shape = dtype_name(described.properties.dtype), _extents(described.size)
        if dtype not in ITEMSIZE_BYTES:
            raise NotRepresentable(
                f"NotRepresentable: {name} of {self._files.uri} has dtype {dtype}, which a run cannot hold\n"
                "  nothing was written",
                leaf=name,
            )
        items = []
        for chunk in described.chunks:
            box = Box(_extents(chunk.offsets), _extents(chunk.sizes))
            if not box.inside(shape):
                raise self._bad(METADATA, f"a part of {name} of shape {shape} lies outside of it: {box}")
            info = infos.get((name, box.offset)) or (
                infos.get((name, None)) if len(described.chunks) == 1 else None
            )
            if info is None and box.numel:
                raise self._bad(METADATA, f"it does not say where the part {box} of {name} is")
            if box.numel:
                items.append(self._item(info, box, sizes))
        items = list(dict.fromkeys(items))  # the same part told twice is one
        if not covers(shape, [(item.box, 0, item.box.numel) for item in items]):
            raise self._bad(METADATA, f"the parts of {name} do not tile its shape {shape}")
        array = Array(name, dtype, shape)
        short = [item for item in items if item.length < item.box.numel * array.itemsize_bytes]
        if short:
            raise self._bad(
                short[0].file, f"{short[0].length} bytes of it cannot hold {short[0].box} of {name}"
            )
        self._items[name] = items
        return array

    def _item(self, info: Any, box: Box, sizes: dict[str, int]) -> _Item:
        file, offset, length = info.relative_path, info.offset, info.length
        if getattr(info, "transform_descriptors", None):
            raise NotRepresentable(
                f"NotRepresentable: {file} of {self._files.uri} went through a transformation, which only the "
                "program that wrote it undoes\n  nothing was written",
                file=str(file),
            )
        assert isinstance(file, str) and all(type(n) is int and n >= 0 for n in (offset, length))
        if file not in sizes:
            raise self._bad(file, "the metadata names this file, and it is absent")
        if offset + length > sizes[file]:
            raise self._bad(
                file, f"it has {sizes[file]} bytes, and an item ends at {offset + length}: cut off"
            )
        return _Item(box, file, offset, length)

    def _value(self, name: str, item: _Item) -> Any:
        where = f"{name} in {item.file}"
        found = load_structure(self._windows.read, item.file, item.offset, item.offset + item.length, where)
        if any(isinstance(value, torch.Tensor) for _, value in walk(found)):
            raise NotRepresentable(
                f"NotRepresentable: {where} of {self._files.uri} holds tensors inside of a plain value\n"
                "  nothing was written; save them as tensors of the state dict",
                leaf=name,
            )
        return found

    def _bad(self, file: str, what: str) -> ForeignDamaged:
        return ForeignDamaged(
            f"ForeignDamaged: {file} of {self._files.uri}: {what}\n  nothing was written", file=file
        )


def _extents(value: Any) -> tuple[int, ...]:
    """A shape or offset, as it must be."""
    assert isinstance(value, tuple | list) and len(value) <= MAX_NDIM
    assert all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    return tuple(value)


def _unflattened(flat: dict[str, Any], mapping: Any) -> Any:
    """The tree that was flattened: by the paths that the planner noted, if it did."""
    if not isinstance(mapping, dict) or not mapping:
        return flat
    root: dict[Any, Any] = {}
    for name, value in flat.items():
        path = mapping.get(name, (name,))
        assert isinstance(path, tuple) and path and all(isinstance(key, str | int) for key in path)
        at: Any = root
        for key, following in zip(path, (*path[1:], None), strict=True):
            if following is None:
                at[key] = value
            else:
                at = at.setdefault(key, {})
        assert isinstance(root, dict)
    return _listed(
        root, {path[: i + 1] for path in mapping.values() for i, key in enumerate(path) if type(key) is int}
    )


def _listed(node: Any, indexed: set[tuple[Any, ...]], path: tuple[Any, ...] = ()) -> Any:
    """Dicts whose keys are all indices of a list become lists."""
    if not isinstance(node, dict):
        return node
    built = {key: _listed(value, indexed, (*path, key)) for key, value in node.items()}
    if built and all(type(key) is int and (*path, key) in indexed for key in built):
        assert sorted(built) == list(range(len(built)))
        return [built[key] for key in range(len(built))]
    return built
