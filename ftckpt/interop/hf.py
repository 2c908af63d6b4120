"""Safetensors: one file of tensors, or a folder as Hugging Face's libraries read and write it.

The folder holds ``model.safetensors``, or shards and an index that says which tensor is in which; and, for
``from_pretrained``, the model's ``config.json`` and whatever else stands beside it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from ftckpt.capture import as_bytes_view
from ftckpt.errors import ForeignDamaged, NotRepresentable, ObjectNotFound, SettingsError
from ftckpt.interop.api import MARK, Array, Outline, Reading, Want, equal, parts, plain_values
from ftckpt.interop.extents import Extent, Windows, read_span
from ftckpt.interop.headers import header, read_header, unsaid
from ftckpt.interop.ties import made_by_the_model
from ftckpt.store import Files
from ftckpt.store.api import Buffer
from ftckpt.store.keys import problem

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
SHARD_BYTES = 5_000_000_000
"""What transformers cuts models into."""

PART_BYTES = 8 << 20
MAX_INDEX_BYTES = 256 << 20
MAX_CONFIG_BYTES = 64 << 20
_SUFFIX = ".safetensors"
_WEIGHTS = (_SUFFIX, ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx")
_LOADED = (".json", ".txt", ".model", ".tiktoken", ".jinja", ".py")
"""What configs, tokenizers and a model's own code are in: an old one beside new weights would be wrong."""

_SHARD = re.compile(r"model(-[0-9]{5}-of-[0-9]{5})?\.safetensors")


# --- out ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SingleSink:
    """One file with all tensors of the export; tied ones under each of their names."""

    dest: Files
    single: str

    def refuses(self, outline: Outline) -> Sequence[str]:
        return unsaid(outline.arrays)

    def owned(self, names: Collection[str], arrays: Sequence[str]) -> Sequence[str]:
        return [name for name in names if name == self.single]

    def write(self, outline: Outline, read: Reading) -> Sequence[str]:
        _write_file(self.dest, self.single, outline.arrays, outline, read)
        return plain_values(outline)


@dataclass(frozen=True, slots=True)
class FolderSink:
    """A folder for ``from_pretrained``. ``config``: the folder that the model's other files are in.

    Tied tensors are written under each name, but for an output embedding that the config says is tied.
    """

    dest: Files
    config: Files | None = None
    shard_bytes: int = SHARD_BYTES

    @property
    def single(self) -> None:
        return None

    def refuses(self, outline: Outline) -> Sequence[str]:
        found = unsaid(outline.arrays)
        if len(outline.trees) != 1:
            names = ", ".join(outline.trees) or "none"
            found.insert(
                0, f"the folder holds one model, and the step has the components {names}: choose one"
            )
        if self.config is not None:
            if _place(self.config) == _place(self.dest):
                raise SettingsError(
                    f"the folder of the config, {self.config.uri}, is the one to write to\n"
                    "  nothing was changed; give the folder that the model was loaded from, or none: then what "
                    "lies beside the weights stays as it is"
                )
            _read_config(self.config)
        return found

    def owned(self, names: Collection[str], arrays: Sequence[str]) -> Sequence[str]:
        return [name for name in names if name == INDEX or _SHARD.fullmatch(name)]

    def write(self, outline: Outline, read: Reading) -> Sequence[str]:
        """Config and tokenizer first, then the shards, then the index."""
        config, not_copied = self._copy_beside(outline)
        left_out = [*not_copied, *plain_values(outline)]
        made = made_by_the_model((a.name for a in outline.arrays), outline.tied) if _ties(config) else ()
        arrays = [array for array in outline.arrays if array.name not in made]
        shards = _sharded(arrays, self.shard_bytes)
        if len(shards) == 1:
            _write_file(self.dest, WHOLE, shards[0], outline, read)
            return left_out
        names = [f"model-{n:05d}-of-{len(shards):05d}{_SUFFIX}" for n in range(1, len(shards) + 1)]
        for name, shard in zip(names, shards, strict=True):
            _write_file(self.dest, name, shard, outline, read)
        index = {
            "metadata": {"total_size": sum(array.size_bytes for array in arrays)},
            "weight_map": {a.name: name for name, shard in zip(names, shards, strict=True) for a in shard},
        }
        self.dest.put(INDEX, json.dumps(index, indent=2).encode())
        return left_out

    def _copy_beside(self, outline: Outline) -> tuple[Mapping[str, Any], list[str]]:
        """Copy what is no weights; returns the config, and what cannot be copied. A text for people that is
        there already stays.
        """
        if self.config is None:
            return {}, []
        body, config = _read_config(self.config)
        there, left_out = self.dest.sizes(), []
        for name, size_bytes in self.config.sizes().items():
            if "/" in name or name in (CONFIG, MARK) or name.endswith(_WEIGHTS):
                continue
            if (why := problem(name)) is not None:
                left_out.append(f"{name} of {self.config.uri} ({why})")
            elif name not in there or name.endswith(_LOADED):
                self.dest.copy(self.config, name, size_bytes)
        changed, dtype = dict(config), _dtype_of(outline.arrays)
        if dtype is not None:
            changed.update((key, dtype) for key in ("dtype", "torch_dtype") if key in config)
        self.dest.put(CONFIG, body if changed == config else json.dumps(changed, indent=2).encode())
        return changed, left_out


def _place(files: Files) -> str:
    """An address that two names of one folder share."""
    folder = files.uri.removeprefix("file://")
    return files.uri if folder == files.uri else os.path.realpath(folder)


def _read_config(files: Files) -> tuple[bytes, dict[str, Any]]:
    body = files.maybe(CONFIG, MAX_CONFIG_BYTES)
    if body is None:
        raise ForeignDamaged(
            f"ForeignDamaged: {files.uri} has no {CONFIG}, so it is no folder of a model's config\n"
            "  nothing was changed; give the folder that the model was loaded from",
            file=CONFIG,
        )
    try:
        config = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ForeignDamaged(
            f"ForeignDamaged: {CONFIG} of {files.uri} does not read: {error}\n  nothing was changed",
            file=CONFIG,
        ) from error
    return body, config if isinstance(config, dict) else {}


def _ties(config: Mapping[str, Any]) -> bool:
    """Whether the model ties its word embeddings itself when it is loaded."""
    inner = config.get("text_config")
    said = config.get("tie_word_embeddings")
    return bool(said if said is not None or not isinstance(inner, dict) else inner.get("tie_word_embeddings"))


def _dtype_of(arrays: Sequence[Array]) -> str | None:
    """The one floating-point dtype of the model; ``None`` if there are several."""
    found = {a.dtype for a in arrays if a.dtype in ("float16", "bfloat16", "float32", "float64")}
    return found.pop() if len(found) == 1 else None


def _sharded(arrays: Sequence[Array], shard_bytes: int) -> list[list[Array]]:
    """Cut into runs of at most ``shard_bytes``, a tensor at least."""
    shards: list[list[Array]] = [[]]
    size_bytes = 0
    for array in arrays:
        if shards[-1] and size_bytes + array.size_bytes > shard_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(array)
        size_bytes += array.size_bytes
    return shards


def _write_file(dest: Files, name: str, arrays: Sequence[Array], outline: Outline, read: Reading) -> None:
    ordered = sorted(arrays, key=lambda array: -array.itemsize_bytes)  # so that each stays aligned
    about = {f"ftckpt.{key}": value for key, value in outline.about.items()}
    with dest.writing(name) as out:
        out.write(header(ordered, about, outline.tied))
        for tensor in read(_wants(ordered)):
            out.write(as_bytes_view(tensor))


def _wants(arrays: Sequence[Array]) -> Iterator[Want]:
    for array in arrays:
        for box in parts(array, PART_BYTES):
            yield array, box


# --- in -------------------------------------------------------------------------------------------


class SafetensorsSource:
    """A folder or a file of safetensors. Every tensor's place is known and checked once it is opened."""

    def __init__(self, files: Files, name: str | None = None) -> None:
        """``name``: the one file to read, instead of what the folder's index says.

        Raises:
            ForeignDamaged: cut off; a shard is absent; the index names what no shard has, or lacks it.
            NotRepresentable: a dtype that a run cannot hold.
        """
        self._windows = Windows(files)
        self._found: dict[str, tuple[Array, Extent]] = {}
        sizes = files.sizes()
        index = None if name is not None else _read_index(files, sizes)
        shards = [name] if name is not None else _shards(files, sizes, index)
        tied: dict[str, str] = {}
        for shard in shards:
            if shard not in sizes:
                raise _bad(
                    files, shard, "the index names this shard, and it is absent" if index else "it is absent"
                )
            head = read_header(files, shard)
            tied |= head.tied
            for tensor, found in head.tensors.items():
                if index is not None and index.get(tensor) != shard:
                    raise _bad(files, shard, f"it holds {tensor}, which the index does not say")
                self._found[tensor] = found
        for tensor, shard in (index or {}).items():
            if tensor not in self._found:
                raise _bad(files, INDEX, f"it names {tensor}, which is not in {shard}")
        self.tree: dict[str, Array] = {tensor: array for tensor, (array, _) in self._found.items()}
        for tensor, other in tied.items():
            if {tensor, other} <= self.tree.keys() and equal(self, self.tree[tensor], self.tree[other]):
                self.tree[tensor] = self.tree[other]
        facts = [(shard, sizes[shard], xxhash.xxh3_128_hexdigest(_head(files, shard))) for shard in shards]
        self.identity = repr(facts)

    def read(self, array: Array, start: int, stop: int) -> Buffer:
        return read_span(array, [self._found[array.name][1]], start, stop, self._windows.read)


def _head(files: Files, shard: str) -> bytes:
    return bytes(files.read(shard, 0, min(1 << 16, files.store.size(shard))))


def _read_index(files: Files, sizes: Mapping[str, int]) -> dict[str, str] | None:
    if INDEX not in sizes:
        return None
    body = files.text(INDEX, MAX_INDEX_BYTES)
    try:
        found = json.loads(body)["weight_map"]
        assert isinstance(found, dict)
        index = {str(tensor): str(shard) for tensor, shard in found.items()}
    except (ValueError, KeyError, TypeError, AssertionError, RecursionError) as error:
        raise _bad(files, INDEX, f"it does not say which tensor is in which shard ({error!r:.80})") from error
    for shard in set(index.values()):
        if "/" in shard or not shard.endswith(_SUFFIX):
            raise _bad(files, INDEX, f"it names a shard that cannot be: {shard!r:.80}")
    return index


def _shards(files: Files, sizes: Mapping[str, int], index: Mapping[str, str] | None) -> list[str]:
    if index is not None:
        return sorted(set(index.values()))
    found = sorted(name for name in sizes if "/" not in name and name.endswith(_SUFFIX))
    if WHOLE in found:
        return [WHOLE]
    if len(found) == 1 and "-of-" not in found[0]:
        return found
    if found:
        raise _bad(
            files,
            INDEX,
            f"it is absent, and there are {', '.join(found[:4])}: nobody knows whether that is all",
        )
    weights = sorted(name for name in sizes if name.endswith(_WEIGHTS))
    if weights:
        raise NotRepresentable(
            f"NotRepresentable: {files.uri} has no safetensors, but {weights[0]}\n"
            "  nothing was written; for a file of torch.save: --format torch, and the file as the source",
            file=weights[0],
        )
    raise ObjectNotFound(f"{files.uri} holds no safetensors files\n  nothing was written", uri=files.uri)


def _bad(files: Files, name: str, what: str) -> ForeignDamaged:
    return ForeignDamaged(f"ForeignDamaged: {name} of {files.uri}: {what}\n  nothing was written", file=name)
