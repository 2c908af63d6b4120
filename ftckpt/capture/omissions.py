"""What a checkpoint of a state leaves out, as far as the state shows it: said at save, never guessed.

Each line is a fact about this save. What cannot be known from here (a gradient scaler that nobody put
into the state, an engine in another process) is covered by the lines that are always true.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.optim import Optimizer

from ftckpt.capture.marks import is_frozen, unmarked

ALWAYS = (
    "code, environment and data files: of these the command and the versions are recorded",
    "random generators of other processes (data loader workers, rollout engines), and own torch.Generator objects",
    "rollouts that are not in the state: those after this step are generated anew",
)
_NAMED = 5


def left_out(state: Mapping[str, object]) -> tuple[str, ...]:
    """What stays the same from save to save. Runs nothing of the modules but walks over them."""
    lines = list(ALWAYS)
    owned = {
        id(parameter)
        for value in state.values()
        if isinstance(optimizer := unmarked(value), Optimizer)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for component, module in _modules(state):
        buffers = [f"{component}.{name}" for name in _not_persistent(module)]
        if buffers:
            lines.append(f"buffers that are not persistent: {_few(buffers)}")
        orphans = [
            f"{component}.{name}"
            for name, p in module.named_parameters()
            if p.requires_grad and id(p) not in owned
        ]
        if orphans and not is_frozen(state[component]):
            lines.append(
                f"optimizer state of parameters that no optimizer of the state owns: {_few(orphans)}"
            )
    return tuple(lines)


def left_out_now(state: Mapping[str, object]) -> tuple[str, ...]:
    """What depends on the moment."""
    lines = []
    if not torch.cuda.is_initialized():
        lines.append("random generators of CUDA devices: none was in use")
    for component, module in _modules(state):
        holders = sum(p.grad is not None for p in module.parameters())
        if holders:
            lines.append(
                f"gradients: {holders} parameters of {component} had one, which a resume starts without"
            )
    return tuple(lines)


def _modules(state: Mapping[str, object]) -> Iterator[tuple[str, nn.Module]]:
    for component, value in state.items():
        module = unmarked(value)
        if isinstance(module, nn.Module):
            yield component, module


def _not_persistent(module: nn.Module) -> Iterator[str]:
    for prefix, inner in module.named_modules():
        for name in sorted(inner._non_persistent_buffers_set):  # noqa: SLF001 - torch has no other way to ask
            if inner._buffers.get(name) is not None:  # noqa: SLF001
                yield f"{prefix}.{name}" if prefix else name


def _few(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more
