"""The DCP bridge: ``torch.distributed.checkpoint`` saves into a run and loads from one; shown as ``ftckpt.dcp``.

DCP decides who writes and reads what, and when; this room gives it packs, digests, reuse and the atomic
commit behind DCP's own two interfaces. Whatever it writes is a run like any other.
"""

from __future__ import annotations

from ftckpt.interop.dcp.reader import StorageReader
from ftckpt.interop.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
