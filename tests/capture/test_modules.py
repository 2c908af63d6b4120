"""Modules are saved under names that no wrapper changes, tied weights once, and restored in place."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from ftckpt.capture import Frozen, capture
from ftckpt.errors import StateMismatch, UnsupportedValue
from ftckpt.plan.asked import Asked
from tests.capture.memory import contents, restore, same_bits, save, specs


class Net(nn.Module):
    """A user's module with everything in its state: a submodule called ``module``, a tie, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.module = nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.module(self.embed(tokens))))


NAMES = {
    "net.embed.weight",
    "net.layers.0.bias",
    "net.layers.0.weight",
    "net.layers.1.bias",
    "net.layers.1.weight",
    "net.module.bias",
    "net.module.weight",
    "net.seen",
}


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            tensor.copy_(torch.randint(-9, 9, tensor.shape))
    return module


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")


def wrapped_inside(wrap) -> nn.Module:
    net = Net()
    net.layers[0] = wrap(net.layers[0])
    net.module = wrap(net.module)
    return net


WRAPPED = {
    "bare": Net,
    "compile": lambda: compiled(Net()),
    "ckpt": lambda: checkpoint_wrapper(Net()),
    "compile(ckpt)": lambda: compiled(checkpoint_wrapper(Net())),
    "ckpt(compile)": lambda: checkpoint_wrapper(compiled(Net())),
    "ddp(compile)": lambda: DistributedDataParallel(compiled(Net())),
    "ddp": lambda: DistributedDataParallel(Net()),
    "dp(compile)": lambda: nn.DataParallel(compiled(Net())),
    "inner compile(ckpt)": lambda: wrapped_inside(lambda m: compiled(checkpoint_wrapper(m))),
    "inner ckpt(compile)": lambda: wrapped_inside(lambda m: checkpoint_wrapper(compiled(m))),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wrap", WRAPPED)
def test_names_are_free_of_wrappers_and_load_both_ways(wrap):
    """F6"""
    original = randomised(WRAPPED[wrap]())
    bare = Net()

    saved = save({"net": original}, rng=False)
    restore(saved, {"net": bare}, rng=False)
    back = WRAPPED[wrap]()
    restore(save({"net": bare}, rng=False), {"net": back}, rng=False)

    assert set(specs(saved)) == NAMES
    assert contents(save({"net": bare}, rng=False)) == contents(saved)
    assert contents(save({"net": back}, rng=False)) == contents(saved)


@pytest.mark.parametrize(
    "variant",
    [
        lambda net: net,
        lambda net: net.to(torch.float64).to(torch.float32),
        copy.deepcopy,
        lambda net: (net.load_state_dict({k: v.clone() for k, v in net.state_dict().items()}), net)[1],
    ],
    ids=["built", "to", "deepcopy", "loaded"],
)
def test_a_tied_weight_is_saved_once_and_stays_tied(variant):
    """E8"""
    saved = save({"net": variant(randomised(Net()))}, rng=False)
    live = Net()

    restore(saved, {"net": live}, rng=False)

    assert set(specs(saved)) == NAMES
    assert live.head.weight is live.embed.weight


def test_three_names_for_one_parameter_load_strictly():
    """E10"""

    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(2))
            self.b = self.a
            self.inner = nn.ParameterList([self.a])

    original, live = Three(), Three()

    restore(save({"m": original}), {"m": live})

    assert same_bits(live.a, original.a) and live.b is live.a


def test_a_tie_that_was_not_saved_is_refused():
    """E8, E10"""

    class Two(nn.Module):
        def __init__(self, tie):
            super().__init__()
            self.a = nn.Parameter(torch.randn(2))
            self.b = self.a if tie else nn.Parameter(torch.randn(2))

    with pytest.raises(StateMismatch, match=r"m\.b: tied to m\.a here"):
        restore(save({"m": Two(False)}), {"m": Two(True)})
    untied = Two(False)
    restore(save({"m": Two(True)}), {"m": untied})
    assert same_bits(untied.a, untied.b)


def test_parameters_and_buffers_keep_their_identity_and_memory():
    original, live = randomised(Net()), Net()
    before = {name: (id(t), t.data_ptr()) for name, t in [*live.named_parameters(), *live.named_buffers()]}

    restore(save({"net": original}), {"net": live})

    assert {
        name: (id(t), t.data_ptr()) for name, t in [*live.named_parameters(), *live.named_buffers()]
    } == before
    assert all(p.requires_grad and p.grad is None for p in live.parameters())
    assert not live.scratch.any()


def test_buffers_that_are_expanded_get_memory_that_can_hold_what_was_saved():
    class Expanded(nn.Module):
        def __init__(self, values):
            super().__init__()
            self.register_buffer("mask", values)

    live = Expanded(torch.zeros(1).expand(3))

    restore(save({"m": Expanded(torch.arange(3.0))}), {"m": live})

    assert live.mask.tolist() == [0, 1, 2]


class Extra(nn.Module):
    def __init__(self, extra):
        super().__init__()
        self.lin = nn.Linear(1, 1)
        self.extra = extra
        self.calls = 0

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.calls += 1
        self.extra = state


def test_extra_state_comes_back_through_the_module_that_owns_it():
    original = nn.Sequential(Extra({"scale": torch.tensor([1.0, 2.0]), "n": 3}), Extra(torch.ones(2)))
    live = nn.Sequential(Extra({}), Extra(None))

    restore(save({"m": original}), {"m": live})

    assert live[0].extra["n"] == 3 and live[0].extra["scale"].tolist() == [1, 2]
    assert live[1].extra.tolist() == [1, 1]
    assert live[0].calls == 1
    assert live[0].extra["scale"] is not original[0].extra["scale"]


class Quirky(nn.Module):
    """Saves a value that is nowhere in memory, by its own state_dict and load_state_dict."""

    def __init__(self, value):
        super().__init__()
        self.lin = nn.Linear(1, 1)
        self.value = value

    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {
            "made_up": torch.tensor(self.value),
            "plain": [self.value],
        }

    def load_state_dict(self, state, strict=True, assign=False):
        state = dict(state)
        self.value = state.pop("made_up").item()
        assert state.pop("plain") == [self.value]
        return super().load_state_dict(state, strict, assign)


def test_what_a_module_makes_up_goes_back_through_load_state_dict():
    original, live = Quirky(5), Quirky(0)

    restore(save({"m": original}), {"m": live})

    assert live.value == 5
    assert same_bits(live.lin.weight, original.lin.weight)


def test_missing_extra_and_reshaped_leaves_are_all_named_at_once():
    """F, F10"""

    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 3)
            self.c = nn.Linear(1, 1)

    class Saved(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.Linear(1, 1)

    live = Other()
    before = contents(save({"m": live}, rng=False))

    with pytest.raises(StateMismatch) as refused:
        restore(save({"m": Saved()}), {"m": live})

    assert refused.value.missing == ("m.c.weight", "m.c.bias")
    assert refused.value.extra == ("m.b.weight", "m.b.bias")
    assert len(refused.value.changed) == 2
    assert contents(save({"m": live}, rng=False)) == before


def test_not_strict_keeps_what_is_missing_and_says_so():
    saved_module = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    live = nn.ModuleDict({"a": nn.Linear(1, 1), "c": nn.Linear(1, 1)})
    kept = live["c"].weight.item()

    aim = restore(save({"m": saved_module}), {"m": live}, asked=Asked(strict=False))

    assert same_bits(live["a"].weight, saved_module["a"].weight)
    assert live["c"].weight.item() == kept
    assert any("m.c.weight" in note for note in aim.notes) and any("m.b.weight" in note for note in aim.notes)


def test_parts_of_names_are_escaped_so_that_none_collide():
    odd = nn.ParameterDict({"a@b": torch.ones(1), "a%40b": torch.zeros(1), "a/b": torch.ones(1) * 2})

    assert set(specs(save({"m.x": odd}))) == {"m%2Ex.a%40b", "m%2Ex.a%2540b", "m%2Ex.a%2Fb"}


def test_a_parameter_whose_storage_is_gone_is_refused_by_name():
    net = Net()
    net.module.weight.untyped_storage().resize_(0)

    with pytest.raises(UnsupportedValue, match=r"net\.module\.weight"):
        capture({"net": net})


def test_only_what_an_optimizer_owns_is_lazy():
    net = Net()
    net.layers[0].weight.requires_grad_(False)
    optim = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], momentum=0.9)

    lazy = {leaf.holding.leaf.name for leaf in capture({"net": net, "optim": optim}) if leaf.lazy}

    assert lazy == NAMES - {"net.seen", "net.layers.0.weight"}


def test_a_frozen_module_is_marked_and_may_not_be_trained():
    net = Net()

    leaves = capture({"ref": Frozen(net)}, rng=False)

    assert all(leaf.holding.frozen for leaf in leaves)
    with pytest.raises(UnsupportedValue, match="Frozen"):
        capture({"ref": Frozen(net), "optim": torch.optim.SGD(net.parameters())})


def test_capture_changes_no_live_state():
    net = randomised(Net())
    optim = torch.optim.AdamW(net.parameters())
    state = {"net": net, "optim": optim, "t": {"x": [torch.ones(1)]}}
    tensors = [*net.state_dict().values()]
    before = [(t.data_ptr(), t._version, t.clone()) for t in tensors]

    capture(state)

    assert [(t.data_ptr(), t._version) for t in tensors] == [(p, v) for p, v, _ in before]
    assert all(same_bits(t, copy) for t, (_, _, copy) in zip(tensors, before, strict=True))
    assert not optim.state and state["t"]["x"][0].item() == 1
    assert all(p.grad is None for p in net.parameters())
