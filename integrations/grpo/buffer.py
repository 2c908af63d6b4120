"""The generation batch that training is in the middle of.

Rollouts cost most of a step, so a batch is trained on ``num_iterations`` times. Until its last use
it is part of the state: a resume that generated it anew would sample from other weights. Its
state has the same shape always, full or empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ftckpt.errors import StateMismatch


class RolloutBuffer:
    """Holds the packed rollouts of all slots from the step they were made for to their last use.

    ``generation_step`` is that step, 0 when empty; ``weight_version`` the number of finished steps
    behind the weights that generated; ``next_use`` counts from 0. Changed only after a vote passed.
    """

    def __init__(self, *, slots: int, rows: int, columns: int, num_iterations: int) -> None:
        self._batch = torch.zeros(slots, rows, columns, dtype=torch.int32)
        self._num_iterations = num_iterations
        self.generation_step = 0
        self.weight_version = 0
        self.next_use = 0

    def batch_for(self, step: int) -> Tensor | None:
        """The batch of shape (slots, rows, columns) that ``step`` is to be trained on, if it is
        held. Not to be changed.
        """
        if self.generation_step == 0:
            return None
        assert step == self.generation_step + self.next_use, (step, self.generation_step, self.next_use)
        return self._batch

    def used(self, batch: Tensor, step: int, weight_version: int) -> None:
        """``step`` was trained on ``batch`` and counted: keep it for its next use, or drop it after
        the last. A batch not held yet was generated for this step, by ``weight_version``.
        """
        if self.generation_step == 0 and self._num_iterations > 1:
            self._batch = batch.clone()
            self.generation_step, self.weight_version = step, weight_version
        if self.generation_step:
            self.next_use += 1
        if self.next_use == self._num_iterations:
            self._batch = torch.zeros_like(self._batch)
            self.generation_step = self.weight_version = self.next_use = 0

    def state_dict(self) -> dict[str, Any]:
        return {
            "batch": self._batch,
            "generation_step": self.generation_step,
            "weight_version": self.weight_version,
            "next_use": self.next_use,
            "num_iterations": self._num_iterations,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        batch: Tensor = state["batch"]
        if batch.shape != self._batch.shape or batch.dtype != self._batch.dtype:
            raise StateMismatch(
                f"the rollouts of the checkpoint have shape {tuple(batch.shape)}, this run makes"
                f" {tuple(self._batch.shape)} (slots, rows, columns)\n"
                "  nothing was loaded into the buffer; resume with the run's --slots, --prompts-per-step,"
                " --samples-per-prompt, --prompt-tokens and --answer-tokens",
                leaf="buffer.batch",
                expected=tuple(self._batch.shape),
                found=tuple(batch.shape),
            )
        if state["num_iterations"] != self._num_iterations:
            raise StateMismatch(
                f"the run uses each generation batch {state['num_iterations']} times, not"
                f" {self._num_iterations}\n  nothing was loaded; resume with --num-iterations"
                f" {state['num_iterations']}",
                leaf="buffer.num_iterations",
                expected=self._num_iterations,
                found=state["num_iterations"],
            )
        self._batch = batch.detach().clone()
        self.generation_step = int(state["generation_step"])
        self.weight_version = int(state["weight_version"])
        self.next_use = int(state["next_use"])
