"""Fault-tolerant checkpoints and elastic restart for RL post-training in PyTorch.

``Session`` is the context around a training loop; ``wrap`` puts one around a trainer; ``open`` reads
a run without a trainer; ``restore`` fetches any part of a commit once; ``dcp`` is for users of
``torch.distributed.checkpoint``. Names are loaded when they are first used, so that tools which need
no torch start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftckpt.adapters import Adapter, wrap
    from ftckpt.capture import Frozen, PerRank, reseed
    from ftckpt.codec import Codec
    from ftckpt.errors import FtckptError
    from ftckpt.interop import dcp, export_run, import_run
    from ftckpt.manifest import Commit
    from ftckpt.restoring import Restored
    from ftckpt.retention import Keep
    from ftckpt.run import Run
    from ftckpt.run import open_run as open  # noqa: A004 - reads as ftckpt.open(uri)
    from ftckpt.session import Session, restore
    from ftckpt.writer import SaveHandle

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "Codec",
    "Commit",
    "Frozen",
    "FtckptError",
    "Keep",
    "PerRank",
    "Restored",
    "Run",
    "SaveHandle",
    "Session",
    "dcp",
    "export_run",
    "import_run",
    "open",
    "reseed",
    "restore",
    "wrap",
]

_ROOMS = {
    "Adapter": "adapters",
    "wrap": "adapters",
    "Frozen": "capture",
    "PerRank": "capture",
    "reseed": "capture",
    "Codec": "codec",
    "FtckptError": "errors",
    "export_run": "interop",
    "import_run": "interop",
    "Commit": "manifest",
    "Keep": "retention",
    "Restored": "restoring",
    "Run": "run",
    "Session": "session",
    "restore": "session",
    "SaveHandle": "writer",
}


def __getattr__(name: str) -> object:
    if name == "open":
        return import_module("ftckpt.run").open_run
    if name == "dcp":
        return import_module("ftckpt.interop.dcp")
    if name in _ROOMS:
        return getattr(import_module(f"ftckpt.{_ROOMS[name]}"), name)
    raise AttributeError(f"module 'ftckpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
