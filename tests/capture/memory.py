"""A checkpoint held in memory: what capture gives, copied, and read back through ``target`` and ``place``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ftckpt.boxes import Box, intersect, overlap, whole
from ftckpt.capture import Target, as_bytes_view, capture, place, target
from ftckpt.leaf import Holding, LeafSpec
from ftckpt.values import pack, unpack


@dataclass(frozen=True)
class Piece:
    leaf: LeafSpec
    box: Box
    ranks: tuple[int, ...]
    raw: bytes
    lazy: bool
    holding: Holding | None = None


Saved = list[Piece]


def save(state: Mapping[str, object], **where) -> Saved:
    return [
        Piece(
            leaf.holding.leaf,
            leaf.holding.box,
            leaf.holding.ranks,
            leaf.data if isinstance(leaf.data, bytes) else bytes(as_bytes_view(leaf.data.contiguous())),
            leaf.lazy,
            leaf.holding,
        )
        for leaf in capture(state, **where)
    ]


def specs(saved: Saved) -> dict[str, LeafSpec]:
    return {piece.leaf.name: piece.leaf for piece in saved if piece.leaf.kind == "tensor"}


def trees(saved: Saved) -> dict[str, object]:
    return {piece.leaf.name: unpack(piece.raw) for piece in saved if piece.leaf.kind == "value"}


def plan(saved: Saved, state: Mapping[str, object], **options) -> Target:
    return target(state, specs(saved), trees(saved), **options)


def read(saved: Saved, aim: Target) -> None:
    """Fill every want from the pieces, as a reader does, and check that no element is left out."""
    for want in aim.wants:
        done = set()
        for piece in saved:
            if piece.leaf.name == want.leaf.name and piece.box not in done:
                done.add(piece.box)
                region = intersect(piece.box, want.box)
                if region is not None:
                    place(want.data, want.box, piece.box, region, piece.raw, want.leaf.dtype)
        held = sum((intersect(box, want.box) or Box((0,), (0,))).numel for box in done)
        assert held == want.box.numel, (want.leaf, want.box, done)


def restore(saved: Saved, state: Mapping[str, object], **options) -> Target:
    aim = plan(saved, state, **options)
    read(saved, aim)
    aim.finish()
    return aim


def contents(saved: Saved) -> dict[str, tuple]:
    """Everything a checkpoint says, for comparing two of them bit for bit."""
    return {piece.leaf.name: (piece.leaf, piece.box, piece.raw) for piece in saved}


def write(saved: Saved, path: Path) -> None:
    rows = [
        [
            p.leaf.name,
            p.leaf.kind,
            p.leaf.dtype,
            p.leaf.shape,
            p.leaf.owner,
            p.box.offset,
            p.box.extent,
            p.ranks,
            p.raw,
            p.lazy,
        ]
        for p in saved
    ]
    path.write_bytes(pack(rows, leaf="rows"))


def load(paths: Sequence[Path]) -> Saved:
    pieces = []
    for path in paths:
        for name, kind, dtype, shape, owner, offset, extent, ranks, raw, lazy in unpack(path.read_bytes()):
            pieces.append(
                Piece(LeafSpec(name, kind, dtype, shape, owner), Box(offset, extent), ranks, raw, lazy)
            )
    return pieces


def whole_tensors(saved: Saved) -> dict[str, torch.Tensor]:
    """Every tensor leaf put together from the pieces of all ranks, which must tile it exactly once."""
    found = {}
    for name, spec in specs(saved).items():
        boxes = {p.box: p for p in saved if p.leaf.name == name and p.box.numel}
        assert overlap(list(boxes)) is None, (name, boxes)
        assert sum(box.numel for box in boxes) == whole(spec.shape).numel, (name, boxes)
        full = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for box, piece in boxes.items():
            place(full, whole(spec.shape), box, box, piece.raw, spec.dtype)
        found[name] = full
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and as_bytes_view(a.detach().resolve_conj().resolve_neg().contiguous())
        == as_bytes_view(b.detach().resolve_conj().resolve_neg().contiguous())
    )
