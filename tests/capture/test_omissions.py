"""What a save says that it leaves out: facts about this very state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ftckpt
from ftckpt.capture import capture, left_out, left_out_now
from ftckpt.capture.omissions import ALWAYS


class Rotary(nn.Module):
    """A module with a buffer that is computed anew, as rotary embeddings are."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 3)
        self.register_buffer("inv_freq", torch.ones(2), persistent=False)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("none", None, persistent=False)


def test_buffers_that_are_not_persistent_are_named_and_really_not_captured():
    model = nn.Sequential(Rotary(), nn.Linear(3, 1))
    state = {"actor": model, "optim": torch.optim.AdamW(model.parameters())}

    lines = set(left_out(state)) - set(ALWAYS)

    assert lines == {"buffers that are not persistent: actor.0.inv_freq"}
    names = {leaf.holding.leaf.name for leaf in capture(state)}
    assert "actor.0.inv_freq" not in names and "actor.0.kept" in names


def test_trainable_parameters_whose_optimizer_is_elsewhere_are_named():
    model, critic = nn.Linear(3, 1), nn.Linear(3, 1)
    critic.bias.requires_grad_(requires_grad=False)
    state = {"actor": model, "critic": critic, "optim": torch.optim.AdamW(model.parameters())}

    assert set(left_out(state)) - set(ALWAYS) == {
        "optimizer state of parameters that no optimizer of the state owns: critic.weight"
    }


def test_a_frozen_module_needs_no_optimizer():
    assert left_out({"reference": ftckpt.Frozen(nn.Linear(3, 1)), "value": {"a": 1}}) == ALWAYS


def test_many_names_are_counted():
    state = {"actor": nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(9)))}

    (line,) = set(left_out(state)) - set(ALWAYS)

    assert line.endswith(
        "actor.0.weight, actor.1.weight, actor.2.weight, actor.3.weight, actor.4.weight and 4 more"
    )


def test_gradients_are_told_only_while_they_are_there():
    model = nn.Linear(3, 1)
    before = left_out_now({"actor": model})
    model(torch.ones(1, 3)).sum().backward()

    (line,) = set(left_out_now({"actor": model})) - set(before)

    assert line == "gradients: 2 parameters of actor had one, which a resume starts without"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that no device was in use")
def test_generators_of_devices_that_nobody_used_are_told():
    assert "random generators of CUDA devices: none was in use" in left_out_now({})
