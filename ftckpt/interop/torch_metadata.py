"""The ``.metadata`` of a DCP folder: a pickle by torch's design, read without running anything.

A pickle is a program. The reader here knows only the classes that torch's own writers put into this file, and
refuses every other name before anything is made of it; then every part is checked to be what it must be.
"""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - an Unpickler that finds nothing but what stands in _ALLOWED
import pickletools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ftckpt.errors import ForeignDamaged, ForeignUnsafe

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED: dict[str, frozenset[str]] = {
    _METADATA: frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset(
        {"TensorProperties", "MEM_FORMAT_ENCODING"}
    ),
    "torch": frozenset({"Size"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
}
"""All that torch's writers name, by module. Dtypes and paths are let through below."""


def read_metadata(body: bytes, where: str) -> Any:
    """The ``Metadata`` in a file's bytes.

    Raises:
        ForeignUnsafe: it names anything else. Nothing was run.
        ForeignDamaged: it does not read, or is no such record.
    """
    try:
        _check_sizes(body)
        found = _Reader(body, where).load()
    except ForeignUnsafe:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ForeignDamaged(
            f"ForeignDamaged: {where} does not read: {type(error).__name__}: {str(error)[:200]}\n"
            "  nothing was written",
            file=where,
        ) from error
    import torch.distributed.checkpoint.metadata as known

    if type(found) is not known.Metadata or not isinstance(vars(found).get("state_dict_metadata"), dict):
        raise ForeignDamaged(
            f"ForeignDamaged: {where} is a {type(found).__name__}, not the metadata of a checkpoint\n"
            "  nothing was written",
            file=where,
        )
    return found


def _check_sizes(body: bytes) -> None:
    """No instruction may ask for more memory than its own bytes account for: neither for what follows, nor
    for a place in the memo, of which the unpickler would make as many as are named. Runs none of them.
    """
    for count, (opcode, argument, _) in enumerate(pickletools.genops(body), 1):
        limit = len(body) if opcode.name == "FRAME" else count
        if opcode.name in _PLACES and not (isinstance(argument, int) and 0 <= argument <= limit):
            raise ValueError(f"{opcode.name} {argument}")


_PLACES = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "GET", "BINGET", "LONG_BINGET", "FRAME"})


class _Reader(pickle.Unpickler):
    def __init__(self, body: bytes, where: str) -> None:
        super().__init__(io.BytesIO(body))
        self._where = where

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return _found(module, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath", "PurePosixPath"):
            return _joined
        return self._refuse(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        self._refuse("a persistent object")

    def _refuse(self, named: str) -> NoReturn:
        raise ForeignUnsafe(
            f"ForeignUnsafe: {self._where} names {named}, which no metadata of torch holds\n"
            "  reading on could run code, so nothing was run, read or written",
            named=named,
        )


def _found(module: str, name: str) -> Callable[..., Any]:
    from importlib import import_module

    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _joined(*parts: str) -> str:
    """Where the checkpoint lay when it was written: of no interest, and no path of this machine."""
    return "/".join(str(part) for part in parts)
