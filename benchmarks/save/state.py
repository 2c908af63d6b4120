"""The state that is saved: that of a policy trained in bf16, with fp32 masters and two moments.

Values are those of a model after some steps: Gaussian weights, moments a thousand times smaller and
smaller squares. They are cut out of one pool of random numbers, which makes a GiB in a second;
no chunk holds the same stretch twice. The incompressible variant has random bits everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ftckpt.capture import as_bytes_view

_POOL = 1 << 22
_LAYERS = 5
_BYTES_AN_ELEMENT = 2 + 4 + 4 + 4


class Policy(nn.Module):
    """The parameters of a decoder: an embedding and blocks of attention and MLP. It is never run."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        shapes: dict[str, tuple[int, ...]] = {"embed": (12 * hidden, hidden)}
        for layer in range(_LAYERS):
            shapes |= {f"layer{layer}_{part}": (hidden, hidden) for part in ("q", "k", "v", "o")}
            shapes |= {f"layer{layer}_{part}": (11 * hidden // 4, hidden) for part in ("gate", "up", "down")}
            shapes |= {f"layer{layer}_{part}": (hidden,) for part in ("norm_in", "norm_out")}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=torch.bfloat16)))


class MasterAdamW(torch.optim.Optimizer):
    """AdamW over bf16 parameters, with torch's own defaults; its state holds fp32 masters beside the moments."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.float()
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 1 - beta1)
                state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
                scale = (state["exp_avg_sq"] / (1 - beta2 ** state["step"])).sqrt_().add_(group["eps"])
                lr = group["lr"] / (1 - beta1 ** state["step"])
                state["master"].addcdiv_(state["exp_avg"], scale, value=-lr)
                parameter.copy_(state["master"])


@dataclass(frozen=True, slots=True)
class State:
    """A policy and its optimizer, and a way to train one step."""

    policy: Policy
    optim: MasterAdamW
    gradients: torch.Tensor

    @property
    def components(self) -> dict[str, object]:
        """As a session takes them."""
        return {"actor": self.policy, "optim": self.optim}

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, by name, as other savers take them."""
        named = {f"actor.{name}": p.detach() for name, p in self.policy.named_parameters()}
        for name, parameter in self.policy.named_parameters():
            for key in ("master", "exp_avg", "exp_avg_sq"):
                named[f"optim.{name}.{key}"] = self.optim.state[parameter][key]
        return named

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def parts(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The memory of every tensor."""
        for tensor in self.tensors.values():
            yield np.frombuffer(as_bytes_view(tensor), np.uint8)

    def train(self) -> None:
        """One optimizer step at the learning rate of RL, gradients and all."""
        for number, parameter in enumerate(self.policy.parameters()):
            parameter.grad = torch.empty_like(parameter)
            _fill(
                parameter.grad, self.gradients, number * 7919 + self.optim.state[parameter]["step"] * 104729
            )
        self.optim.step()
        self.optim.zero_grad(set_to_none=True)


def hidden_for(size_bytes: int) -> int:
    """The width of the policy whose state has about that size; the count of its leaves is always the same."""
    elements = size_bytes / _BYTES_AN_ELEMENT
    return max(64, round(sqrt(elements / (12 + _LAYERS * (4 + 3 * 11 / 4))) / 64) * 64)


def make_state(size_bytes: int, *, incompressible: bool = False) -> State:
    """About that many bytes, the same each time. 1 GiB is 1.0 GiB."""
    seed = torch.Generator().manual_seed(20)
    normal = torch.randn(_POOL, generator=seed)
    policy = Policy(hidden_for(size_bytes))
    optim = MasterAdamW(policy.parameters(), lr=1e-6)
    for number, parameter in enumerate(policy.parameters()):
        master = torch.empty(parameter.shape, dtype=torch.float32)
        first, second = torch.empty_like(master), torch.empty_like(master)
        _fill(master, normal * 0.02, number * 15485863)
        _fill(first, normal * 1e-4, number * 32452843)
        _fill(second, (normal.square() + normal.roll(12345).square()) * 5e-9, number * 49979687)
        optim.state[parameter] = {"step": 1000, "master": master, "exp_avg": first, "exp_avg_sq": second}
        parameter.data.copy_(master)
    state = State(policy, optim, normal * 1e-4)
    if incompressible:
        bits = np.random.default_rng(20).integers(0, 256, 8 << 20, dtype=np.uint8)
        for number, tensor in enumerate(state.tensors.values()):
            _fill(tensor.view(torch.uint8), torch.from_numpy(bits), number * 86028121)
    return state


def _fill(tensor: torch.Tensor, pool: torch.Tensor, start: int) -> None:
    """Fill with what stands in the pool from ``start`` on, round and round."""
    flat = tensor.view(-1)
    at, start = 0, start % pool.numel()
    while at < flat.numel():
        size = min(flat.numel() - at, pool.numel() - start)
        flat[at : at + size].copy_(pool[start : start + size])
        at, start = at + size, 0
