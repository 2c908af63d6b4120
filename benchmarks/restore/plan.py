"""What is run: what is saved once, and the cases that read it, in the order in which they take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from benchmarks.restore import limits, ours, peers, simulated
from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place

MIB = 1 << 20

Work = Callable[[Place, int], Numbers]


@dataclass(frozen=True, slots=True)
class Saved:
    """Something to read: ``work(place, amount)`` saves it, before the first round."""

    name: str
    where: Literal["s3", "folder"]
    work: Work
    amount: int


@dataclass(frozen=True, slots=True)
class Case:
    """``work(place, amount)`` reads what was saved, in a process of its own. ``once``: one round is
    enough, it counts and is no race.
    """

    name: str
    saved: Saved
    work: Work
    once: bool = False


def cases(size_bytes: int, *, quick: bool) -> Sequence[Case]:
    """All cases for a state of that size."""
    wide = 256 if quick else 16_384
    planned: list[Case] = []
    for where in ("s3", "folder"):
        raw = Saved(f"{where} raw", where, partial(ours.save, codec="raw"), size_bytes)
        auto = Saved(f"{where} auto", where, ours.save, size_bytes)
        dcp = Saved(f"{where} dcp", where, peers.save_dcp, size_bytes)
        arrays = Saved(f"{where} tensorstore", where, peers.save_tensorstore, size_bytes)
        limit = ("raw GETs", limits.raw_gets) if where == "s3" else ("raw reads", limits.raw_reads)
        planned += [
            Case(f"{where}: {limit[0]}", raw, limit[1]),
            Case(f"{where}: ftckpt, stored raw", raw, ours.restore),
            Case(f"{where}: ftckpt", auto, ours.restore),
            Case(f"{where}: DCP", dcp, peers.dcp),
        ]
        if where == "s3":
            theirs = Saved("s3 s3torchconnector", "s3", peers.save_s3torchconnector, size_bytes)
            planned.append(Case("s3: s3torchconnector", theirs, peers.s3torchconnector))
        planned.append(Case(f"{where}: tensorstore zarr3", arrays, peers.tensorstore))
    chain = Saved("s3 chain", "s3", ours.save_chain, size_bytes)
    long = Saved("folder chain, all of it deltas", "folder", ours.save_long_chain, size_bytes // 4)
    large = Saved("s3 four times", "s3", ours.save, 4 * size_bytes)
    sliced = next(case.saved for case in planned if case.name == "folder: ftckpt, stored raw")
    usual = next(case.saved for case in planned if case.name == "s3: ftckpt")
    nothing = Saved("nothing", "folder", simulated.nothing, wide)
    return [
        *planned,
        Case("chain", chain, ours.chain),
        Case("chain, all of it deltas", long, ours.chain),
        Case("an eighth along dim 0", sliced, partial(ours.eighths, dim=0), once=True),
        Case("an eighth along dim 1", sliced, partial(ours.eighths, dim=1), once=True),
        Case("memory", usual, ours.restore, once=True),
        Case("memory, four times the bytes", large, ours.restore, once=True),
        Case("plan", nothing, simulated.plan),
    ]
