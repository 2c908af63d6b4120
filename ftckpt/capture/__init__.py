"""Capture: a trainer's live state as leaves, and saved leaves as live state again.

The only room that touches torch modules, optimizers and DTensors. It knows what state *is*; it
refuses to know stores, chunks, threads and time. ``capture`` gives leaves; ``target`` gives wants
and, once a reader has filled them with ``place``, ``Target.finish`` does the rest.
"""

from __future__ import annotations

from ftckpt.capture.components import has_shards, module_leaves
from ftckpt.capture.fences import Fences
from ftckpt.capture.marks import Frozen, OnResize, PerRank
from ftckpt.capture.omissions import left_out, left_out_now
from ftckpt.capture.restoring import Target, target
from ftckpt.capture.rng import reseed
from ftckpt.capture.saving import capture
from ftckpt.capture.tensors import Carried, as_bytes_view, carry_over, copy_bytes, place
from ftckpt.capture.tree import UNREAD, LiveLeaf, Passed, Want

__all__ = [
    "Fences",
    "Frozen",
    "PerRank",
    "OnResize",
    "LiveLeaf",
    "capture",
    "has_shards",
    "module_leaves",
    "left_out",
    "left_out_now",
    "Want",
    "Passed",
    "Target",
    "target",
    "UNREAD",
    "as_bytes_view",
    "copy_bytes",
    "place",
    "carry_over",
    "Carried",
    "reseed",
]
