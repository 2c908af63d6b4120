"""What a small leaf costs, stage by stage: ``python -m benchmarks.leaves [LEAVES …]``.

A model of so many parameters of 64 bytes with an AdamW over it, saved twice and restored, at each number
of leaves. Seconds are of this process's CPU, all threads together, so that other work on the machine
says little; the last column is the growth of the cost a leaf from the first number to the last, 1.0
for a stage that is linear.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from rich.console import Console
from rich.table import Table

import ftckpt
from ftckpt.capture import capture
from ftckpt.events import silent

PER_MODULE = 100
LEAVES_PER_PARAMETER = 4
"""The parameter, two moments and a step."""


def trained(leaves: int) -> dict[str, object]:
    """A model and its optimizer after one step; so many leaves in all."""
    model = torch.nn.Module()
    for number in range(leaves // LEAVES_PER_PARAMETER // PER_MODULE):
        layer = torch.nn.Module()
        for name in range(PER_MODULE):
            layer.register_parameter(f"p{name}", torch.nn.Parameter(torch.randn(16)))
        model.add_module(f"layer{number}", layer)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    step(model, optim)
    return {"model": model, "optim": optim}


def step(model: torch.nn.Module, optim: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optim.step()


def measure(leaves: int) -> dict[str, float]:
    """CPU seconds of each stage."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(stage: str) -> Iterator[None]:
        begun_s = time.process_time()
        yield
        seconds[stage] = time.process_time() - begun_s

    state = trained(leaves)
    with tempfile.TemporaryDirectory() as folder:
        with timed("capture alone"):
            capture(state)
        with ftckpt.Session(folder, state, events=silent) as session:
            session.save(1).wait()
            step(state["model"], state["optim"])  # type: ignore[arg-type]
            with timed("save(): the stall"):
                handle = session.save(2)
            with timed("fence at once"):
                session._before_change("the benchmark")  # noqa: SLF001
            with timed("the save in the background"):
                handle.wait()
            with timed("a save of nothing new"):
                session.save(3).wait()
        fresh = trained(leaves)
        with timed("restore"):
            ftckpt.restore(folder, fresh)
    return seconds


def table(numbers: list[int], run: Callable[[int], dict[str, float]] = measure) -> Table:
    found = [run(leaves) for leaves in numbers]
    shown = Table(title="CPU a leaf, µs", title_justify="left")
    shown.add_column("stage")
    for leaves in numbers:
        shown.add_column(f"{leaves:,} leaves", justify="right")
    shown.add_column("growth", justify="right")
    for stage in found[0]:
        costs = [1e6 * seconds[stage] / leaves for seconds, leaves in zip(found, numbers, strict=True)]
        growth = costs[-1] / costs[0] if costs[0] else 0.0
        shown.add_row(stage, *(f"{cost:.1f}" for cost in costs), f"{growth:.2f}")
    return shown


def main() -> None:
    numbers = [int(word.replace("_", "")) for word in sys.argv[1:]] or [10_000, 100_000]
    Console().print(table(numbers))


if __name__ == "__main__":
    main()
