"""Kinds E and F through the store: what a save is given comes back with its bits, its names and its structure,
or is refused by name before training has gone far. The same rules without a store: ``tests/capture``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import ftckpt
from ftckpt.errors import StateMismatch, UnsupportedValue
from ftckpt.events import silent
from tests.session.toy import raw


def saved(folder, state, **options) -> None:
    with ftckpt.Session(folder, state, events=silent, **options) as session:
        session.save(1).wait(30)


# --- E: tensors -----------------------------------------------------------------------------------------


def bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    size_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8).view(dtype).reshape(shape)


def views(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    base = bits((6, 4), dtype)
    return {
        "t": base.t(),
        "permuted": base.view(2, 3, 4).permute(2, 0, 1),
        "strided": base[::2, 1:4:2],
        "gaps": base.as_strided((2, 3), (7, 2), 1),
        "offset": base[3:, 2:],
        "expanded": base[0].expand(4, 4),
        "channels last": base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "no dimension": base[1, 1],
        "empty": base[:0],
    }


@pytest.mark.parametrize("codec", ["auto", "raw", "zstd", "planes"])
def test_tensors_of_any_strides_and_any_bits_come_back_from_the_store(tmp_path, codec):
    """E1, E5, E6: NaN payloads, lazy conjugates and negatives, real and imaginary parts of one memory."""
    z = bits((3, 3), torch.complex64)
    state = {
        "complex": {
            "z": z,
            "real": z.real,
            "imag": z.imag,
            "conj": z.conj(),
            "neg": z.conj().imag,
            "mT": z.conj().mT,
        },
        **{
            str(dtype)[6:]: views(dtype)
            for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.complex128)
        },
    }
    saved(tmp_path, state, codec=codec)
    live = {name: {key: torch.zeros_like(one) for key, one in part.items()} for name, part in state.items()}

    ftckpt.restore(tmp_path, live)

    for name, part in state.items():
        for key, tensor in part.items():
            assert raw(live[name][key]) == raw(tensor.resolve_conj().resolve_neg()), (name, key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_another_dtype_than_that_saved_is_refused_by_name_and_nothing_is_changed(tmp_path, dtype):
    """E2"""
    saved(tmp_path, {"actor": nn.Linear(2, 2), "w": torch.ones(3)})
    live = {"actor": nn.Linear(2, 2), "w": torch.zeros(3, dtype=dtype)}
    before = live["actor"].weight.detach().clone()

    with pytest.raises(StateMismatch, match=rf"w\.value: saved float32\[3\], live {str(dtype)[6:]}\[3\]"):
        ftckpt.restore(tmp_path, live)

    assert torch.equal(live["actor"].weight, before) and not live["w"].any()


class LowBits(torch.Tensor):
    """Codes and a scale, as 8-bit optimizers keep their moments."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale)
        raise NotImplementedError(func)


class EightBit(torch.optim.SGD):
    """Makes its moments at the first step, as all optimizers do."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            codes = torch.zeros(parameter.shape, dtype=torch.uint8)
            self.state[parameter] = {"exp_avg": LowBits(codes, torch.tensor(0.5))}


def test_moments_that_cannot_be_saved_are_refused_after_the_first_step_not_at_a_far_first_save(tmp_path):
    """E3: save_every is two hours; the step before stays readable."""
    model = nn.Linear(3, 3)
    optim = EightBit(model.parameters(), lr=0.1)
    trained = []

    with pytest.raises(UnsupportedValue, match="LowBits") as refused:  # noqa: SIM117
        with ftckpt.Session(
            tmp_path, {"actor": model, "optim": optim}, save_every="2h", events=silent
        ) as session:
            for step in session.steps(until=9):
                model(torch.ones(1, 3)).sum().backward()
                optim.step()
                trained.append(step)

    assert trained == [1] and refused.value.leaf == "optim.state.actor.weight.exp_avg"
    with ftckpt.open(tmp_path) as run:
        assert [commit.step for commit in run.commits()] == [0] and run.verify() == []


def test_a_value_of_an_unknown_class_is_refused_before_the_first_step_with_what_to_do(tmp_path):
    """E4"""

    class Float8Recipe:
        pass

    with pytest.raises(UnsupportedValue, match=r"(?s)extra\.recipe.*state_dict\(\)/load_state_dict\(\)"):  # noqa: SIM117
        with ftckpt.Session(tmp_path / "run", {"extra": {"recipe": Float8Recipe()}}, events=silent):
            raise AssertionError("entered")

    assert not (tmp_path / "run").exists()


# --- E: training that goes on ---------------------------------------------------------------------------


class Tied(nn.Module):
    """Three names for one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight
        self.extra = nn.ParameterList([self.embed.weight])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(tokens))


class Masters(torch.optim.Optimizer):
    """Trains fp32 copies of bf16 parameters, which it keeps in its state, with tiny second moments."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, {"lr": 1e-3, "decay": 0.9})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["master"] = parameter.float()
                    state["square"] = torch.zeros_like(state["master"])
                state["square"].lerp_((parameter.grad.float() * 1e-7).square(), 1 - group["decay"])
                state["master"] -= (
                    group["lr"] * parameter.grad.float() / (state["square"].sqrt() * 1e7 + 1e-8)
                )
                parameter.copy_(state["master"])


def tied() -> dict:
    torch.manual_seed(0)
    model = Tied()
    return {"actor": model, "optim": torch.optim.AdamW(model.parameters(), lr=0.1)}


def masters() -> dict:
    torch.manual_seed(0)
    model = Tied().to(torch.bfloat16)
    return {"actor": model, "optim": Masters(model.parameters())}


def advance(state: dict) -> None:
    state["optim"].zero_grad()
    state["actor"](torch.arange(5)).float().square().mean().backward()
    state["optim"].step()


def everything(state: dict) -> dict[str, tuple]:
    found = {name: raw(p.detach()) for name, p in state["actor"].named_parameters()}
    for name, parameter in state["actor"].named_parameters():
        for key, value in state["optim"].state[parameter].items():
            found[f"{name}.{key}"] = raw(value)
    return found


@pytest.mark.parametrize("make", [tied, masters])
@pytest.mark.parametrize("seed", [0, 7])
def test_the_next_five_steps_are_those_of_the_straight_run(tmp_path, make: Callable[[], dict], seed):
    """E7, E9, E10, E11: second moments below 1e-15, tied weights under three names, fp32 masters of bf16."""
    straight = make()
    for _ in range(5):
        advance(straight)
    saved(tmp_path, straight)
    live = make()
    with torch.no_grad():
        live["actor"].embed.weight.fill_(seed)

    ftckpt.restore(tmp_path, live)

    assert live["actor"].head.weight is live["actor"].embed.weight is live["actor"].extra[0]
    for _ in range(6):
        assert everything(live) == everything(straight)
        advance(straight)
        advance(live)
    if make is masters:
        squares = straight["optim"].state[straight["actor"].embed.weight]["square"]
        assert squares[squares > 0].min() < 1e-15 and squares.dtype == torch.float32


@pytest.mark.parametrize(
    "variant",
    [
        lambda model: model,
        lambda model: model.to(torch.float64).to(torch.float32),
        copy.deepcopy,
        lambda model: (model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}), model)[
            1
        ],
    ],
    ids=["built", "moved", "deepcopy", "loaded"],
)
def test_a_tie_is_stored_once_whatever_was_done_to_the_model(tmp_path, variant):
    """E8"""
    saved(tmp_path, {"actor": variant(tied()["actor"])})

    with ftckpt.open(tmp_path) as run:
        assert [n for n, spec in run.leaves().items() if spec.kind == "tensor"] == ["actor.embed.weight"]
        assert run.components()["actor"].leaves == 2


# --- F: names and structure -----------------------------------------------------------------------------


def test_containers_values_and_odd_keys_come_back_from_the_store_as_they_were(tmp_path):
    """F4, F5, F8: lists that grew, a bool that is no int, keys that look like numbers or like paths."""
    keys = ["0", 0, 1.5, True, "a.b", "a/b", "", "%2F", None, "ünïcode", "x" * 300, b"0", (1, "a")]
    state = {
        "log": {"log": [{"a": 1}, {"b": torch.ones(2)}], "d": {}},
        "epoch": {"w": torch.ones(2), "epoch": 20, "name": "y", "flag": True, "none": None, "t": (1, [2])},
        "keys": {key: torch.tensor(number) for number, key in enumerate(keys)}
        | {"a": {"b": torch.tensor(-1)}},
        "array": {"a": np.arange(3), "scalar": np.float32(0.1)},
    }
    saved(tmp_path, state)
    live = {
        "log": {"log": [], "d": {"x": 1}},
        "epoch": {"w": torch.zeros(2), "epoch": 0, "name": "x", "flag": False, "none": 0, "t": ()},
        "keys": {},
        "array": {},
    }

    ftckpt.restore(tmp_path, live)

    assert repr(live) == repr(state)
    assert [type(key) for key in live["keys"]] == [type(key) for key in state["keys"]]


def groups(order: Callable[[list], list] = list, moved: bool = False) -> dict:
    """Three groups, one of them empty, over a model whose last layer is never trained."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model[2].requires_grad_(False)
    norm = [*model[1].parameters()]
    parts = [
        {"params": [*model[0].parameters(), *model[2].parameters(), *(norm if moved else [])], "lr": 0.3},
        {"params": [], "betas": (0.5, 0.6)},
        {"params": [] if moved else norm, "weight_decay": 0.0},
    ]
    return {"actor": model, "optim": torch.optim.AdamW(order(parts), lr=0.1)}


def step(state: dict) -> None:
    state["optim"].zero_grad()
    state["actor"](torch.ones(1, 3)).square().sum().backward()
    state["optim"].step()


def test_empty_groups_and_parameters_without_state_go_on_as_they_were(tmp_path):
    """F1, F3: settings of the empty group, moments of what was frozen after training, none where none was."""
    straight = groups()
    step(straight)
    straight["actor"][0].requires_grad_(False)
    saved(tmp_path, straight)
    live = groups()
    for group in live["optim"].param_groups:
        group.update(lr=9.0, betas=(0.0, 0.0))

    ftckpt.restore(tmp_path, live)

    assert (
        live["optim"].param_groups[1]["betas"] == (0.5, 0.6) and live["optim"].param_groups[1]["params"] == []
    )
    assert live["optim"].param_groups[0]["lr"] == 0.3
    assert live["actor"][0].weight in live["optim"].state
    assert live["actor"][2].weight not in live["optim"].state
    for state in (straight, live):
        state["actor"].requires_grad_(True)
        step(state)
    assert everything(live) == everything(straight)


def test_groups_in_another_order_are_refused_with_the_order_that_was_saved(tmp_path):
    """F: settings and schedules go by the number of a group, so they would change places."""
    straight, live = groups(), groups(order=lambda parts: [parts[2], parts[0], parts[1]])
    step(straight)
    saved(tmp_path, straight)

    for strict in (True, False):
        with pytest.raises(StateMismatch, match="in another order: here they are 2, 0, an empty one"):
            ftckpt.restore(tmp_path, live, strict=strict)

    assert not live["optim"].state


def test_a_parameter_that_moved_to_another_group_is_named_and_keeps_its_moments_when_that_is_allowed(
    tmp_path,
):
    """F2, F3: state goes by name."""
    straight, live = groups(), groups(moved=True)
    step(straight)
    saved(tmp_path, straight)

    with pytest.raises(
        StateMismatch, match=r"actor\.1\.weight was in group 2 when saved and is in group 0 here"
    ):
        ftckpt.restore(tmp_path, live)
    ftckpt.restore(tmp_path, live, strict=False)

    for name in ("weight", "bias"):
        old, new = (s["optim"].state[getattr(s["actor"][1], name)] for s in (straight, live))
        assert {key: raw(value) for key, value in old.items()} == {
            key: raw(value) for key, value in new.items()
        }
    assert live["optim"].param_groups[0]["lr"] == 0.3


def test_a_parameter_that_was_not_saved_is_named_and_begins_anew_only_when_that_is_allowed(tmp_path):
    """F2"""
    model = nn.Linear(2, 2)
    part = {"actor": model, "optim": torch.optim.AdamW([model.weight])}
    model(torch.ones(1, 2)).sum().backward()
    part["optim"].step()
    saved(tmp_path, part)
    fresh = nn.Linear(2, 2)
    live = {"actor": fresh, "optim": torch.optim.AdamW(fresh.parameters())}

    with pytest.raises(StateMismatch, match=r"live, not saved: optim\.param_groups\.0: actor\.bias"):
        ftckpt.restore(tmp_path, live)
    ftckpt.restore(tmp_path, live, strict=False)

    assert fresh.weight in live["optim"].state and fresh.bias not in live["optim"].state


# --- F: a model that is built another way ---------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 3))
        self.up = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.down.t() @ self.up.t()


def adapted() -> dict:
    model = nn.Sequential(Adapted(nn.Linear(3, 3)))
    return {"actor": model, "optim": torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])}


def train_adapted(folder, state: dict, until: int, wrap_again: bool = False) -> list[dict]:
    """What the weights were just before each step."""
    seen = []
    with ftckpt.Session(folder, state, events=silent) as session:
        if wrap_again:
            state["actor"][0] = Adapted(state["actor"][0].inner)
        for _ in session.steps(until=until):
            seen.append({name: raw(p.detach()) for name, p in state["actor"].named_parameters()})
            state["actor"](torch.ones(1, 3)).square().sum().backward()
            state["optim"].step()
    return seen


def test_adapters_are_those_that_were_saved_just_before_the_first_step(tmp_path):
    """F9"""
    first = adapted()
    train_adapted(tmp_path, first, 3)
    wanted = {name: raw(p.detach()) for name, p in first["actor"].named_parameters()}

    (seen, *_) = train_adapted(tmp_path, adapted(), 5)

    assert seen == wanted


@pytest.mark.parametrize("again", ["other names", "same names"])
def test_a_model_that_is_wrapped_again_after_it_was_restored_is_not_trained(tmp_path, again):
    """F9: new adapters around restored ones, or in their place, are told of before the first step."""
    train_adapted(tmp_path, adapted(), 3)
    live = adapted()

    if again == "same names":
        with pytest.raises(UnsupportedValue, match="belongs to no captured module"):
            train_adapted(tmp_path, live, 5, wrap_again=True)
    else:
        with (
            pytest.raises(
                StateMismatch, match=r"(?s)new since: actor\.0\.inner\.down.*before the session is entered"
            ),
            ftckpt.Session(tmp_path, live, events=silent) as session,
        ):
            live["actor"][0] = Adapted(live["actor"][0])
            for _ in session.steps(until=5):
                raise AssertionError("trained")

    with ftckpt.open(tmp_path) as run:
        assert run.latest().step == 3


def test_what_training_itself_registers_does_not_keep_a_second_loop_from_going_on(tmp_path):
    """F9: a buffer that the first forward makes, and then ``steps`` once more in the same session."""

    class Caching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "cache"):
                self.register_buffer("cache", torch.zeros(2))
            return super().forward(x)

    model = Caching(2, 2)
    with ftckpt.Session(tmp_path / "run", {"model": model}, events=silent) as session:
        for until in (2, 4):
            for _ in session.steps(until=until):
                model(torch.ones(1, 2))

    with ftckpt.open(tmp_path / "run") as run:
        assert run.latest().step == 4 and "model.cache" in run.leaves()


def test_a_resume_that_leaves_out_a_part_of_the_set_up_is_refused_with_the_difference(tmp_path):
    """F10: the first start installs fp32 masters and a scaler; the resume forgets them."""
    saved(tmp_path, {**masters(), "scaler": {"scale": 2.0**16}})
    model = masters()["actor"]
    forgot = {"actor": model, "optim": torch.optim.AdamW(model.parameters())}

    with pytest.raises(StateMismatch, match="saved, not live: scaler"):  # noqa: SIM117
        with ftckpt.Session(tmp_path, forgot, events=silent):
            raise AssertionError("entered")


def test_an_optimizer_of_another_class_is_refused(tmp_path):
    """F10: its state would be taken, and the first step fail or, worse, not."""
    straight = masters()
    advance(straight)
    saved(tmp_path, straight)
    model = masters()["actor"]

    with pytest.raises(
        StateMismatch, match="saved by another kind of optimizer: with decay, without amsgrad"
    ):
        ftckpt.restore(tmp_path, {"actor": model, "optim": torch.optim.AdamW(model.parameters())})
