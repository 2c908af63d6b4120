"""The session's state as peers exchange it: tensors and packed values by leaf name.

Aliases live memory on the giving side and writes it in place on the taking side. Leaves that
differ by rank stay with their rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import torch

from ftckpt.boxes import Box, intersect
from ftckpt.capture import capture, place, target
from ftckpt.leaf import LeafSpec
from ftckpt.snapshot import host_bytes
from ftckpt.values import unpack


class _Leaf(msgspec.Struct, frozen=True, array_like=True):
    """One tensor of a heal state: what it is and which part of it was sent."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    extent: tuple[int, ...]


_INDEX = "#leaves"


class LiveState:
    """A ``HealState`` over the components of one session."""

    def __init__(
        self,
        state: Mapping[str, object],
        group: str,
        rank: int,
        world: int,
        before_load: Callable[[str], None],
    ) -> None:
        self._state = state
        self._before_load = before_load
        self._group, self._rank, self._world = group, rank, world

    def save(self) -> dict[str, object]:
        """Tensors and packed values by leaf name, aliasing live memory."""
        found = capture(self._state, group=self._group, rank=self._rank, world=self._world)
        leaves = [leaf for leaf in found if not leaf.holding.leaf.owner]
        index = [
            _Leaf(h.leaf.name, h.leaf.dtype, h.leaf.shape, h.box.offset, h.box.extent)
            for h in (leaf.holding for leaf in leaves)
            if h.leaf.kind == "tensor"
        ]
        state: dict[str, object] = {leaf.holding.leaf.name: leaf.data for leaf in leaves}
        state[_INDEX] = msgspec.msgpack.encode(index)
        return state

    def load(self, state: dict[str, object]) -> None:
        """Overwrite the live state with a peer's.

        Raises ``StateMismatch`` when the peer's state does not fit ours; nothing was changed.
        """
        index = msgspec.msgpack.decode(_bytes(state[_INDEX]), type=list[_Leaf])
        saved = {one.name: LeafSpec(one.name, "tensor", one.dtype, one.shape) for one in index}
        boxes = {one.name: Box(one.offset, one.extent) for one in index}
        trees = {
            name: unpack(_bytes(value))
            for name, value in state.items()
            if name not in saved and name != _INDEX
        }
        goal = target(
            {name: self._state[name] for name in trees},
            saved,
            trees,
            group=self._group,
            rank=self._rank,
            world=self._world,
            subset=True,
        )
        self._before_load("heal")
        for want in goal.wants:
            piece, data = boxes[want.leaf.name], state[want.leaf.name]
            region = intersect(piece, want.box)
            assert isinstance(data, torch.Tensor)
            if region is not None and want.box.numel:
                place(want.data, want.box, piece, region, host_bytes(data), want.leaf.dtype)
        goal.finish()


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes), type(value)
    return value
