"""Many small leaves: what a leaf costs, whatever its bytes."""

from __future__ import annotations

import time

import torch

import ftckpt
from benchmarks.save.measure import Numbers
from benchmarks.save.ours import WAIT_S, Heard
from benchmarks.save.places import Place
from ftckpt.store import open_store


def many_leaves(place: Place, count: int) -> Numbers:
    """Save and restore of so many tensors of 16 elements. The second save finds every chunk
    unchanged.
    """
    heard = Heard()
    with ftckpt.Session(place.uri, {"many": _tensors(count)}, events=heard) as ckpt:
        first_s = heard.first_save_s()
        begun_s = time.monotonic()
        handle = ckpt.save(1)
        stall_s = time.monotonic() - begun_s
        handle.wait(WAIT_S)
        second_s = time.monotonic() - begun_s
    fresh = {"many": {name: torch.zeros_like(tensor) for name, tensor in _tensors(count).items()}}
    begun_s = time.monotonic()
    ftckpt.restore(place.uri, fresh)
    restore_s = time.monotonic() - begun_s
    assert all(torch.equal(fresh["many"][name], tensor) for name, tensor in _tensors(count).items())
    return {
        "leaves": count,
        "save_s": first_s,
        "stall_s": stall_s,
        "second_save_s": second_s,
        "restore_s": restore_s,
        "objects": sum(1 for _ in open_store(place.uri).scan("")),
    }


def _tensors(count: int) -> dict[str, torch.Tensor]:
    table = torch.arange(count * 16, dtype=torch.float32).view(count, 16)
    return {f"t{number}": table[number].clone() for number in range(count)}
