"""Optimizers come back by the names of parameters, with every bit of state, and go on as if nothing was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, NAdam, RMSprop
from torch.optim import lr_scheduler as lrs

from ftckpt.errors import StateMismatch, UnsupportedValue
from ftckpt.plan.asked import Asked
from tests.capture.memory import contents, plan, read, restore, same_bits, save, specs, trees


def build(make, dtype=torch.float32):
    """A small model, its optimizer, and a step that is the same function of the step's number."""
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)).to(dtype)
    optim = make(model)
    return {"actor": model, "optim": optim}


def step(state, number: int) -> None:
    model, optim = state["actor"], state["optim"]
    generator = torch.Generator().manual_seed(number)
    dtype = next(model.parameters()).dtype
    x = torch.randn(5, 4, generator=generator).to(dtype)

    def closure():
        optim.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        return loss

    optim.step(closure)


OPTIMIZERS = {
    "adamw": lambda m: AdamW(m.parameters(), lr=0.1),
    "fused": lambda m: AdamW(m.parameters(), lr=0.1, fused=True),
    "foreach": lambda m: Adam(m.parameters(), lr=0.1, foreach=True, amsgrad=True),
    "tensor lr": lambda m: AdamW(m.parameters(), lr=torch.tensor(0.1)),
    "sgd": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "plain sgd": lambda m: SGD(m.parameters(), lr=0.1),
    "adafactor": lambda m: Adafactor(m.parameters(), lr=0.1),
    "lbfgs": lambda m: LBFGS(m.parameters(), lr=0.1, max_iter=3, history_size=3),
    "rmsprop": lambda m: RMSprop(m.parameters(), momentum=0.5, centered=True),
    "adagrad": lambda m: Adagrad(m.parameters()),
    "nadam": lambda m: NAdam(m.parameters()),
    "muon": lambda m: Muon([p for p in m.parameters() if p.ndim == 2]),
    "groups": lambda m: AdamW(
        [
            {"params": m[0].parameters(), "lr": 0.3},
            {"params": [], "betas": (0.5, 0.6)},
            {"params": m[2].parameters()},
        ]
    ),
}


@pytest.mark.parametrize("warm", [0, 2], ids=["fresh", "stepped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_next_steps_are_those_of_the_uninterrupted_run(name, warm):
    straight, live = build(OPTIMIZERS[name]), build(OPTIMIZERS[name])
    for number in range(3):
        step(straight, number)
    for number in range(warm):
        step(live, 100 + number)
    saved = save(straight)

    restore(saved, live)
    assert contents(save(live)) == contents(saved)
    for number in range(3, 6):
        step(straight, number)
        step(live, number)

    assert contents(save(live)) == contents(save(straight))


def test_state_that_exists_is_filled_in_place():
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    step(straight, 0)
    step(live, 1)
    weight = live["actor"][0].weight
    moment, groups = live["optim"].state[weight]["exp_avg"], live["optim"].param_groups

    restore(save(straight), live)

    assert live["optim"].state[weight]["exp_avg"] is moment
    assert live["optim"].param_groups is groups


def test_names_are_those_of_parameters_and_never_positions():
    state = build(OPTIMIZERS["adamw"])
    step(state, 0)

    saved = save(state)

    assert "optim.state.actor.0.weight.exp_avg_sq" in specs(saved)
    tree = trees(saved)["optim"]["tree"]
    assert tree["param_groups"][0]["params"] == ["actor.0.weight", "actor.0.bias", "actor.2.weight"]


def test_parameters_in_another_order_find_their_own_state():
    """F: items follow names, not positions."""
    straight = build(OPTIMIZERS["adamw"])
    live = build(lambda m: AdamW(list(m.parameters())[::-1], lr=0.1))
    for number in range(2):
        step(straight, number)

    restore(save(straight), live)
    step(straight, 2)
    step(live, 2)

    assert all(map(same_bits, straight["actor"].parameters(), live["actor"].parameters()))


def test_one_optimizer_over_two_modules_comes_back():
    def make():
        actor, critic = nn.Linear(2, 2), nn.Linear(2, 1)
        optim = AdamW([*actor.parameters(), *critic.parameters()])
        return {"actor": actor, "critic": critic, "optim": optim}

    straight, live = make(), make()
    straight["critic"](straight["actor"](torch.ones(1, 2))).sum().backward()
    straight["optim"].step()

    restore(save(straight), live)

    assert "optim.state.critic.bias.step" in specs(save(live))
    assert contents(save(live)) == contents(save(straight))


def test_a_parameter_of_no_captured_module_is_refused_by_group_index_and_shape():
    state = build(OPTIMIZERS["adamw"])
    stray = nn.Parameter(torch.zeros(7, 2))
    state["optim"].add_param_group({"params": [stray]})

    with pytest.raises(UnsupportedValue, match=r"optim\.param_groups\.1\.params\.0.*\(7, 2\)") as refused:
        save(state)

    assert refused.value.shape == (7, 2)


def test_an_empty_group_keeps_all_its_settings():
    """F1"""
    make = lambda m: AdamW([{"params": m.parameters()}, {"params": [], "lr": 0.5, "betas": (0.1, 0.2)}])
    straight = build(make)
    live = build(lambda m: AdamW([{"params": m.parameters()}, {"params": []}], lr=7.0))

    restore(save(straight), live)
    step(live, 0)

    group = live["optim"].param_groups[1]
    assert group["lr"] == 0.5 and group["betas"] == (0.1, 0.2) and group["params"] == []
    assert live["optim"].param_groups[0]["lr"] == 0.001


def test_another_number_of_groups_is_refused():
    """F10"""
    straight = build(OPTIMIZERS["groups"])
    live = build(OPTIMIZERS["adamw"])

    with pytest.raises(StateMismatch, match="3 saved, 1 live"):
        restore(save(straight), live)


def test_moments_of_frozen_parameters_are_kept_and_never_trained_ones_stay_absent():
    """F3"""
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    straight["actor"][2].requires_grad_(False)
    step(straight, 0)
    straight["actor"][2].requires_grad_(True)
    straight["actor"][0].requires_grad_(False)

    restore(save(straight), live)

    params = dict(live["actor"].named_parameters())
    assert params["0.weight"] in live["optim"].state
    assert params["2.weight"] not in live["optim"].state
    for run in (straight, live):
        run["actor"].requires_grad_(True)
        step(run, 1)
    assert contents(save(live)) == contents(save(straight))


def test_stale_live_state_goes_when_the_save_has_none():
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    step(live, 0)
    aim = plan(save(straight), live)
    assert live["optim"].state

    read(save(straight), aim)
    aim.finish()

    assert not live["optim"].state


def test_moments_keep_their_dtype_whatever_the_dtype_of_the_parameters():
    """E7, E11"""

    def make(model):
        optim = AdamW(model.parameters(), lr=0.1)
        for parameter in model.parameters():
            optim.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full(parameter.shape, 1e-12, dtype=torch.float32),
                "exp_avg_sq": torch.full(parameter.shape, 1e-24, dtype=torch.float32),
            }
        return optim

    straight = build(make, torch.bfloat16)
    live = build(OPTIMIZERS["adamw"], torch.bfloat16)

    restore(save(straight), live)

    state = live["optim"].state[live["actor"][0].weight]
    assert state["exp_avg_sq"].dtype == torch.float32
    assert state["exp_avg_sq"].unique().tolist() == [torch.tensor(1e-24).item()]
    assert contents(save(live)) == contents(save(straight))


def test_live_moments_of_another_dtype_are_refused():
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    step(straight, 0)
    step(live, 0)
    state = live["optim"].state[live["actor"][0].weight]
    state["exp_avg"] = state["exp_avg"].half()

    with pytest.raises(StateMismatch, match=r"optim\.state\.actor\.0\.weight\.exp_avg: saved float32"):
        restore(save(straight), live)


def test_a_moment_that_is_not_in_the_checkpoint_is_named():
    """F2"""
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    step(straight, 0)
    saved = [p for p in save(straight) if p.leaf.name != "optim.state.actor.0.bias.exp_avg"]

    with pytest.raises(StateMismatch) as refused:
        restore(saved, live)

    assert "optim.state.actor.0.bias.exp_avg" in refused.value.missing[0]


def test_a_parameter_that_is_new_begins_anew_only_when_asked():
    """F2"""
    straight = build(lambda m: AdamW(list(m.parameters())[:2]))
    live = build(OPTIMIZERS["adamw"])
    step(straight, 0)

    with pytest.raises(StateMismatch) as refused:
        restore(save(straight), live)
    aim = restore(save(straight), live, asked=Asked(strict=False))

    assert refused.value.missing == ("optim.param_groups.0: actor.2.weight",)
    assert any("begins anew" in note and "actor.2.weight" in note for note in aim.notes)
    assert live["actor"][2].weight not in live["optim"].state


def test_a_setting_that_only_the_live_group_has_stays():
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    live["optim"].param_groups[0]["newer"] = 1

    aim = restore(save(straight), live)

    assert live["optim"].param_groups[0]["newer"] == 1
    assert any("param_groups.0.newer" in note for note in aim.notes)


def test_tied_weights_and_their_optimizer_go_on_as_the_uninterrupted_run():
    """E9"""

    def make():
        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(5, 4)
                self.head = nn.Linear(4, 5, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, tokens):
                return self.head(self.embed(tokens))

        model = Tied()
        return {"actor": model, "optim": AdamW(model.parameters(), lr=0.1)}

    def advance(run):
        run["optim"].zero_grad()
        run["actor"](torch.arange(5)).square().mean().backward()
        run["optim"].step()

    straight, live = make(), make()
    for _ in range(2):
        advance(straight)

    restore(save(straight), live)
    for _ in range(2):
        advance(straight)
        advance(live)

    assert contents(save(live)) == contents(save(straight))


def test_state_under_keys_that_are_no_parameters_comes_back():
    straight, live = build(OPTIMIZERS["adamw"]), build(OPTIMIZERS["adamw"])
    straight["optim"].state["global"] = {"count": 3, "ema": torch.ones(2)}
    live["optim"].state["stale"] = 1

    restore(save(straight), live)

    assert live["optim"].state["global"]["count"] == 3
    assert "stale" not in live["optim"].state


class Masters(SGD):
    """Keeps fp32 copies outside ``state``, and so has its own state_dict."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.masters = [p.detach().float().clone() for p in self.param_groups[0]["params"]]

    def state_dict(self):
        return {"masters": self.masters, "inner": super().state_dict()}

    def load_state_dict(self, state):
        self.masters = state["masters"]
        super().load_state_dict(state["inner"])


def test_an_optimizer_with_its_own_state_dict_is_asked_for_it():
    """E11"""
    straight = build(lambda m: Masters(m.parameters()), torch.bfloat16)
    live = build(lambda m: Masters(m.parameters()), torch.bfloat16)
    straight["optim"].masters[0].add_(1e-7)

    restore(save(straight), live)

    assert all(map(same_bits, live["optim"].masters, straight["optim"].masters))


def schedulers(optim):
    warm = lrs.LinearLR(optim, 0.1, 1.0, 3)
    return {
        "multistep": lambda: lrs.MultiStepLR(optim, [2, 8]),
        "cosine": lambda: lrs.CosineAnnealingLR(optim, 9),
        "onecycle": lambda: lrs.OneCycleLR(optim, 0.5, total_steps=20),
        "cyclic": lambda: lrs.CyclicLR(optim, 0.01, 0.1, cycle_momentum=False),
        "sequential": lambda: lrs.SequentialLR(optim, [warm, lrs.CosineAnnealingLR(optim, 9)], [3]),
        "lambda": lambda: lrs.LambdaLR(optim, lambda n: 1 / (n + 1)),
        "exponential": lambda: lrs.ExponentialLR(optim, 0.9),
        "restarts": lambda: lrs.CosineAnnealingWarmRestarts(optim, 3),
        "plateau": lambda: lrs.ReduceLROnPlateau(optim, patience=1),
        "swa": lambda: torch.optim.swa_utils.SWALR(optim, 0.5),
    }


@pytest.mark.parametrize("make_optim", ["adamw", "tensor lr"])
@pytest.mark.parametrize(
    "name",
    [
        "multistep",
        "cosine",
        "onecycle",
        "cyclic",
        "sequential",
        "lambda",
        "exponential",
        "restarts",
        "plateau",
        "swa",
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_the_learning_rate_goes_on_along_the_straight_curve(name, make_optim):
    def make():
        state = build(OPTIMIZERS[make_optim])
        return state | {"schedule": schedulers(state["optim"])[name]()}

    def advance(run, number):
        step(run, number)
        run["schedule"].step(*([1.0] if name == "plateau" else []))
        return [float(group["lr"]) for group in run["optim"].param_groups]

    straight = make()
    for number in range(5):
        advance(straight, number)
    live = make()
    saved = save(straight)

    restore(saved, live)
    curves = [[advance(run, number) for number in range(5, 12)] for run in (straight, live)]

    assert curves[0] == curves[1]
    assert len({str(lr) for lr in curves[0]}) > 1 or name == "swa"
    assert live["schedule"].optimizer.param_groups is live["optim"].param_groups


def test_a_parameter_of_two_modules_has_one_name_in_whatever_order_they_are_listed():
    trunk = nn.Linear(2, 2)
    modules = {"critic": nn.Sequential(trunk, nn.Linear(2, 1)), "actor": nn.Sequential(trunk)}
    optim = SGD({p for m in modules.values() for p in m.parameters()}, momentum=0.9)
    modules["critic"](torch.ones(1, 2)).sum().backward()
    optim.step()

    one = save({**modules, "optim": optim}, rng=False)
    other = save({"optim": optim, "actor": modules["actor"], "critic": modules["critic"]}, rng=False)

    assert "optim.state.actor.0.weight.momentum_buffer" in specs(one)
    assert contents(one) == contents(other)


def test_an_optimizer_listed_before_its_modules_is_the_same():
    state = build(OPTIMIZERS["adamw"])
    step(state, 0)
    reverse = {"optim": state["optim"], "actor": state["actor"]}

    assert contents(save(reverse, rng=False)) == contents(save(state, rng=False))
