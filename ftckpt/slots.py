"""Slots: the fixed parts of a global batch, and the one order in which their gradients are summed.

A step's batch is cut into ``slots`` equal parts (a power of two). Whoever takes part shares them
out; gradients are summed along one fixed binary tree over the slots. A participant sums the
aligned subtrees that lie inside its share, the participants exchange these partial sums, and
everybody finishes the same tree. So the sum has the same bits for any number of participants and
any split. Anchors: EasyScale (SC'23), tree-based invariant kernels.

``SlotGroup`` is what a trainer talks to. ``Alone`` is the member that is nobody's peer;
``ftckpt.elastic.ReplicaGroup`` is the one that lives in a torchft quorum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Node:
    """A subtree: slots ``first`` up to, not including, ``first + size``; size is a power of two
    and divides ``first``.
    """

    first: int
    size: int


def check_slots(slots: int) -> int:
    """The number itself, if it is a power of two; asserts otherwise."""
    assert slots > 0 and slots & (slots - 1) == 0, f"slots must be a power of two, not {slots}"
    return slots


def share(slots: int, participants: int, index: int) -> range:
    """The slots of participant ``index``: contiguous, as equal as can be, none for some if there
    are more participants than slots.
    """
    assert 0 <= index < participants, (index, participants)
    return range(slots * index // participants, slots * (index + 1) // participants)


def subtrees(share_: range, slots: int) -> list[Node]:
    """The largest aligned subtrees that tile a share, from left to right."""
    found = []
    low, high = share_.start, share_.stop
    while low < high:
        size = low & -low if low else slots
        while low + size > high:
            size //= 2
        found.append(Node(low, size))
        low += size
    return found


def sum_subtree(node: Node, leaf: Callable[[int], Tensor]) -> Tensor:
    """Sum the slots below ``node`` in tree order. ``leaf(slot)`` is called once a slot, in slot
    order; its result may be overwritten. At most log2(size) + 1 partial sums are alive.
    """
    if node.size == 1:
        return leaf(node.first)
    half = node.size // 2
    left = sum_subtree(Node(node.first, half), leaf)
    return left.add_(sum_subtree(Node(node.first + half, half), leaf))


def finish(partials: Mapping[Node, Tensor], slots: int) -> Tensor:
    """The sum over all slots from the partial sums of everybody's subtrees.

    Raises ``KeyError`` naming the slot that nobody summed.
    """

    def total(node: Node) -> Tensor:
        if node in partials:
            return partials[node].clone()
        if node.size == 1:
            raise KeyError(f"no partial sum holds slot {node.first}")
        half = node.size // 2
        return total(Node(node.first, half)).add_(total(Node(node.first + half, half)))

    return total(Node(0, check_slots(slots)))


@dataclass(frozen=True, slots=True)
class Turn:
    """One attempt at one step, as the quorum sees it.

    ``step`` is the step to be trained now; it is above the one asked for when this group has just
    been healed by peers that were further. ``slots`` are this group's; ``participants`` are group
    names in quorum order, ``index`` is this group's place among them.
    """

    step: int
    slots: range
    participants: tuple[str, ...]
    index: int
    healed: bool = False


class SlotGroup(Protocol):
    """What a trainer asks of its membership. One thread, in this order, once a step:
    ``begin``, any number of ``exchange`` and ``reduce``, ``vote``.

    When a peer dies in between, the calls that follow return zeros at once and ``vote`` returns
    False: the trainer then changes nothing and does the same step again, with the same rollouts.
    """

    @property
    def total_slots(self) -> int:
        """Slots of a global batch, whoever takes part."""
        ...

    @property
    def expected_slots(self) -> range:
        """The slots this group would get if the last quorum met again: good for generating
        rollouts before ``begin``, never binding.
        """
        ...

    def begin(self, step: int) -> Turn:
        """Meet the quorum for ``step``. Blocks until it is known and, if this group is behind,
        until it has been healed: parameters, optimizers and everything in the captured state may
        then differ from before, and ``Turn.step`` says where we are.
        """
        ...

    def exchange(self, turn: Turn, mine: Mapping[int, Tensor]) -> Tensor:
        """Give every participant every slot's payload.

        ``mine`` holds one tensor a slot of ``turn.slots``, all of one shape and dtype on all
        groups (at least one slot a group). Returns a tensor of shape ``(total_slots, *shape)``,
        equal everywhere.
        """
        ...

    def reduce(self, turn: Turn, gradient: Callable[[int], Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        """The sum over all slots of ``gradient(slot)``, a 1-D tensor of ``numel`` elements on the
        CPU or one device, along the fixed tree; the same bits on every group. ``gradient`` is
        called for this group's slots only, in order, and never after a failure.
        """
        ...

    def vote(self) -> bool:
        """Whether the step counts. False: change nothing and do it again. After True the caller
        applies its optimizer step; a finished ``vote`` ends the turn.
        """
        ...


class Alone:
    """The only participant: every slot is mine and every vote passes."""

    def __init__(self, slots: int, name: str = "g0") -> None:
        self._slots = check_slots(slots)
        self._name = name

    @property
    def total_slots(self) -> int:
        return self._slots

    @property
    def expected_slots(self) -> range:
        return range(self._slots)

    def begin(self, step: int) -> Turn:
        return Turn(step, range(self._slots), (self._name,), 0)

    def exchange(self, turn: Turn, mine: Mapping[int, Tensor]) -> Tensor:
        return torch.stack([mine[slot] for slot in turn.slots])

    def reduce(self, turn: Turn, gradient: Callable[[int], Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        total = sum_subtree(Node(0, self._slots), gradient)
        assert total.shape == (numel,) and total.dtype == dtype, (total.shape, total.dtype)
        return total

    def vote(self) -> bool:
        return True


def walk(slots: int, participants: int) -> Iterator[tuple[int, Node]]:
    """Every participant's subtrees, in quorum order: ``(participant, node)``."""
    for index in range(participants):
        for node in subtrees(share(slots, participants, index), slots):
            yield index, node
