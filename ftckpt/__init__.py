"""Fault-tolerant checkpoints and elastic restart for RL post-training in PyTorch.

``Session`` is the context around a training loop; ``wrap`` puts one around a trainer; ``open`` reads
a run without a trainer; ``restore`` fetches any part of a commit once.
"""

from ftckpt.adapters import Adapter, wrap
from ftckpt.capture import Frozen, PerRank, reseed
from ftckpt.codec import Codec
from ftckpt.errors import FtckptError
from ftckpt.manifest import Commit
from ftckpt.retention import Keep
from ftckpt.run import Run
from ftckpt.run import open_run as open  # noqa: A001 - reads as ftckpt.open(uri)
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
    "Run",
    "SaveHandle",
    "Session",
    "open",
    "reseed",
    "restore",
    "wrap",
]
