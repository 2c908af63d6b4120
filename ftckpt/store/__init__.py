"""Bytes under keys: the contract (``api``), the stores, and the wrappers around them."""

from __future__ import annotations

from ftckpt.store.api import Buffer, ByteRange, ObjectInfo, ObjectStore
from ftckpt.store.files import Files
from ftckpt.store.limit import LimitStore
from ftckpt.store.local import LocalStore
from ftckpt.store.opening import open_files, open_store, server_side
from ftckpt.store.probe import probe
from ftckpt.store.pulse import PulseStore
from ftckpt.store.retry import RetryStore

__all__ = [
    "Buffer",
    "ByteRange",
    "Files",
    "LimitStore",
    "LocalStore",
    "ObjectInfo",
    "ObjectStore",
    "PulseStore",
    "RetryStore",
    "open_files",
    "open_store",
    "probe",
    "server_side",
]
