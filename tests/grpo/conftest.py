from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from ftckpt.integrations.grpo import GRPOConfig, GRPOTrainer
from ftckpt.integrations.grpo.metrics import Figures
from ftckpt.slots import SlotGroup

SMALL = GRPOConfig(
    task_size=48,
    steps=6,
    slots=4,
    prompts_per_step=8,
    samples_per_prompt=2,
    num_iterations=2,
    critic=True,
    warmup_sft_steps=10,
)
"""Everything switched on, as small as it gets."""


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


class Remembered:
    """Metrics kept in a list."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, Figures]] = []

    def write(self, step: int, figures: Figures) -> None:
        self.lines.append((step, figures))

    def close(self) -> None:
        pass

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.lines]


Build = Callable[..., GRPOTrainer]


@pytest.fixture
def small() -> GRPOConfig:
    return SMALL


@pytest.fixture
def build() -> Build:
    """``build(group, **changes to SMALL)``; its metrics are ``Remembered``."""

    def build_(group: SlotGroup | None = None, **changes: object) -> GRPOTrainer:
        return GRPOTrainer(replace(SMALL, **changes), group, Remembered())

    return build_
