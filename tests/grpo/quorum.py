"""A quorum of threads: members that exchange and reduce through shared memory, with votes and
heals that a test decides. It shares the tree of ``ftckpt.slots`` and nothing else with the real one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from ftckpt.integrations.grpo.trainer import GRPOTrainer
from ftckpt.slots import Node, Turn, finish, share, subtrees, sum_subtree


class Quorum:
    """``members`` groups that all take part in every step.

    ``failing`` holds steps whose first vote fails; the exchanges of that turn give zeros when
    ``broken`` is set, as they do when a peer died before them.
    """

    def __init__(
        self, slots: int, members: int, failing: frozenset[int] = frozenset(), *, broken: bool = False
    ) -> None:
        self.slots, self.count, self.failing, self.broken = slots, members, failing, broken
        self._table: dict[int, Any] = {}
        self._barrier = threading.Barrier(members, timeout=30)
        self.members = [Member(self, index) for index in range(members)]

    def swap(self, index: int, value: Any) -> list[Any]:
        """Everybody's value, in order, once everybody has given one."""
        self._table[index] = value
        self._barrier.wait()
        everything = [self._table[i] for i in range(self.count)]
        self._barrier.wait()
        return everything

    def abort(self) -> None:
        self._barrier.abort()


class Member:
    """A ``SlotGroup``. ``heal``, if set, is called in the next ``begin`` and gives the finished step."""

    def __init__(self, quorum: Quorum, index: int) -> None:
        self.quorum, self.index = quorum, index
        self.heal: Callable[[], int] | None = None
        self.turns: list[Turn] = []
        self._step = 0
        self._failed: set[int] = set()

    @property
    def total_slots(self) -> int:
        return self.quorum.slots

    @property
    def expected_slots(self) -> range:
        return share(self.quorum.slots, self.quorum.count, self.index)

    def begin(self, step: int) -> Turn:
        healed = self.heal is not None
        if self.heal is not None:
            step, self.heal = self.heal() + 1, None
        assert set(self.quorum.swap(self.index, step)) == {step}
        names = tuple(f"g{i}" for i in range(self.quorum.count))
        self._step = step
        self.turns.append(Turn(step, self.expected_slots, names, self.index, healed))
        return self.turns[-1]

    @property
    def _fails_now(self) -> bool:
        return self._step in self.quorum.failing - self._failed

    def exchange(self, turn: Turn, mine: Mapping[int, Tensor]) -> Tensor:
        everything = {
            slot: t for given in self.quorum.swap(self.index, dict(mine)) for slot, t in given.items()
        }
        whole = torch.stack([everything[slot] for slot in range(self.quorum.slots)])
        return torch.zeros_like(whole) if self._fails_now and self.quorum.broken else whole

    def reduce(self, turn: Turn, gradient: Callable[[int], Tensor], numel: int, dtype: torch.dtype) -> Tensor:
        if self._fails_now and self.quorum.broken:
            return torch.zeros(numel, dtype=dtype)
        partials = {node: sum_subtree(node, gradient) for node in subtrees(turn.slots, self.quorum.slots)}
        everybody: dict[Node, Tensor] = {}
        for given in self.quorum.swap(self.index, partials):
            everybody |= given
        return finish(everybody, self.quorum.slots)

    def vote(self) -> bool:
        passed = not self._fails_now
        self._failed.add(self._step)
        self.quorum.swap(self.index, passed)
        return passed


def train_together(quorum: Quorum, trainers: list[GRPOTrainer]) -> None:
    """Run every trainer in a thread of its own; the first error ends them all and is raised."""

    def train(trainer: GRPOTrainer) -> None:
        torch.set_num_threads(1)
        try:
            trainer.train()
        except BaseException:
            quorum.abort()
            raise

    with ThreadPoolExecutor(quorum.count) as pool:
        ended = [pool.submit(train, trainer) for trainer in trainers]
    errors = [error for one in ended if (error := one.exception()) is not None]
    errors.sort(key=lambda error: isinstance(error, threading.BrokenBarrierError))
    if errors:
        raise errors[0]
