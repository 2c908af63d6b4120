"""Restoring a part of a step, under other names, in another dtype, or into a state that does not fit."""

from __future__ import annotations

import copy
import logging
import re

import pytest
import torch
from torch import nn

import ftckpt
from ftckpt.errors import RestoreIncomplete, SettingsError, StateMismatch
from ftckpt.plan.restore import index_chunks
from ftckpt.reader import read_fragments
from tests.session.toy import Heard, raw
from tests.support.procs import ROOT, run_ranks

pytestmark = pytest.mark.timeout(120)


class Named(nn.Module):
    """Puts a part into the names of what it holds, as wrappers do that nobody knows."""

    def __init__(self, inner: nn.Module, name: str) -> None:
        super().__init__()
        self.add_module(name, inner)


class Policy(nn.Module):
    def __init__(self, head: int = 3, name: str = "head") -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6))
        self.add_module(name, nn.Linear(6, head))


def policy(seed: int, head: int = 3, **options) -> Policy:
    torch.manual_seed(seed)
    return Policy(head, **options)


def trained(*modules: nn.Module, optim: torch.optim.Optimizer | None = None) -> torch.optim.Optimizer:
    """An optimizer over these modules, an AdamW if none is given, after a step with made-up gradients."""
    parameters = [p for module in modules for p in module.parameters()]
    optim = optim or torch.optim.AdamW(parameters, lr=0.01)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, 0.5 + number)
    optim.step()
    optim.zero_grad()
    return optim


def save(folder, state: dict) -> None:
    with ftckpt.Session(folder, state, events=Heard()):
        pass


def bits(module: nn.Module) -> list[tuple]:
    return [raw(p.detach()) for p in [*module.parameters(), *module.buffers()]]


def moments(optim: torch.optim.Optimizer) -> list[dict]:
    return [
        {key: raw(value) for key, value in optim.state[p].items()} if p in optim.state else {}
        for group in optim.param_groups
        for p in group["params"]
    ]


def nothing_changed(module: nn.Module, optim: torch.optim.Optimizer | None = None):
    before = bits(module), moments(optim) if optim else None
    return lambda: (bits(module), moments(optim) if optim else None) == before


@pytest.fixture
def saved(tmp_path):
    """A policy, its optimizer, and nested values, in one run."""
    actor = policy(1)
    optim = trained(actor)
    values = {"epoch": 20, "best": {"loss": 0.5, "w": torch.arange(4.0)}, "log": [1, 2], "name": "x"}
    save(tmp_path / "run", {"actor": actor, "optim": optim, "values": values})
    return tmp_path / "run", actor, optim


# --- parts -----------------------------------------------------------------------------------------


def test_single_leaves_are_restored_and_all_else_is_left_as_it_is(saved):
    folder, actor, _ = saved
    live, before = policy(2), policy(2)

    done = ftckpt.restore(folder, {"actor": live}, only=["actor.head", "actor.body.0.bias"])

    assert bits(live.head) == bits(actor.head)
    assert raw(live.body[0].bias.detach()) == raw(actor.body[0].bias.detach())
    assert raw(live.body[0].weight.detach()) == raw(before.body[0].weight.detach())
    assert bits(live.body[1]) == bits(before.body[1])
    assert done.exactly and done.step == 0


def test_what_is_not_asked_for_may_be_anything(saved):
    """Another shape, and names that were not saved, elsewhere in the module."""
    folder, actor, _ = saved
    live = policy(2, head=9)
    live.body.append(nn.Linear(1, 1))

    ftckpt.restore(folder, {"actor": live}, only="actor.body.0")

    assert bits(live.body[0]) == bits(actor.body[0])


def test_state_of_single_parameters_is_restored_without_the_settings(saved):
    folder, _, optim = saved
    live = policy(2)
    fresh = torch.optim.AdamW(live.parameters(), lr=0.5)

    ftckpt.restore(folder, {"actor": live, "optim": fresh}, only="optim.state.actor.head")

    names = [name for name, _ in live.named_parameters()]
    assert [bool(m) for m in moments(fresh)] == [name.startswith("head") for name in names]
    assert moments(fresh)[-2:] == moments(optim)[-2:]
    assert fresh.param_groups[0]["lr"] == 0.5


def test_a_part_of_a_dict_is_restored_into_it(saved):
    folder, _, _ = saved
    w = torch.zeros(4)
    live = {"epoch": 1, "best": {"loss": 9.0, "w": w, "own": 7}, "log": [9]}

    ftckpt.restore(folder, {"values": live}, only=["values.best.w", "values.epoch", "values.name"])

    assert live == {"epoch": 20, "best": {"loss": 9.0, "w": w, "own": 7}, "log": [9], "name": "x"}
    assert torch.equal(w, torch.arange(4.0))


@pytest.mark.parametrize(
    ("only", "words"),
    [("actor.nose", "only= names 'actor.nose'"), ("values.log.0", "values.log: only dicts")],
)
def test_a_part_that_is_none_is_refused_by_name(saved, only, words):
    folder, _, _ = saved
    live, values = policy(2), {"epoch": 1, "log": [9]}
    unchanged = nothing_changed(live)

    with pytest.raises(StateMismatch, match=words):
        ftckpt.restore(folder, {"actor": live, "values": values}, only=[only, "actor.body"])

    assert unchanged() and values == {"epoch": 1, "log": [9]}


@pytest.mark.parametrize(
    ("only", "missing"),
    [
        ("values.fresh", "values.fresh"),
        ("values.deep.w", "values.deep.w"),
        ("critic.w", "critic (a whole component)"),
    ],
)
def test_a_part_that_is_here_but_was_not_saved_is_told_as_that(tmp_path, only, missing):
    save(tmp_path / "run", {"values": {"epoch": 3}})
    state = {"values": {"epoch": 1, "fresh": 2, "deep": {"w": 5, "v": 6}}, "critic": {"w": 7}}

    with pytest.raises(StateMismatch, match="live, not saved: " + re.escape(missing)) as refused:
        ftckpt.restore(tmp_path / "run", state, only=[only])

    assert "which nothing here" not in str(refused.value) and refused.value.missing == (missing,)
    done = ftckpt.restore(tmp_path / "run", state, only=[only, "values.epoch"], strict=False)
    assert done.missing == (missing,)
    assert state == {"values": {"epoch": 3, "fresh": 2, "deep": {"w": 5, "v": 6}}, "critic": {"w": 7}}


def test_a_part_of_a_component_that_the_state_given_lacks_is_told_as_that(tmp_path):
    save(tmp_path / "run", {"values": {"epoch": 3}, "critic": {"w": 7}})
    state = {"values": {"epoch": 1}}

    with pytest.raises(StateMismatch, match=r"'critic\.w', and the state given has no such component"):
        ftckpt.restore(tmp_path / "run", state, only=["critic.w"])
    with pytest.raises(StateMismatch, match="which nothing here or in the checkpoint is"):
        ftckpt.restore(tmp_path / "run", state, only=["values.epcoh"])

    assert state == {"values": {"epoch": 1}}


class Counting:
    def __init__(self, n: int = 0) -> None:
        self.n = n

    def state_dict(self) -> dict:
        return {"n": self.n, "w": torch.full((2,), self.n)}

    def load_state_dict(self, state: dict) -> None:
        self.n = state["n"]


def test_an_object_is_restored_whole_and_never_in_part(tmp_path):
    save(tmp_path / "run", {"epoch": {"n": 5}, "counting": Counting(4)})
    live = {"epoch": {"n": 1}, "counting": Counting()}

    with pytest.raises(StateMismatch, match="counting: takes its state in one call"):
        ftckpt.restore(tmp_path / "run", live, only=["counting.n"])
    assert live["counting"].n == 0
    ftckpt.restore(tmp_path / "run", live, only=["counting"])

    assert (live["counting"].n, live["epoch"]) == (4, {"n": 1})


def test_a_negative_index_of_an_array_does_not_count_from_the_end(saved):
    with ftckpt.open(saved[0]) as run, pytest.raises(IndexError, match="OUT_OF_RANGE"):
        run.array("actor.head.weight")[-1].read().result()


# --- names -----------------------------------------------------------------------------------------


def test_a_compiled_module_and_a_plain_one_restore_each_other_without_a_rule(tmp_path):
    """F6: compile inside and outside; stored names have no wrapper in them."""
    plain, other = policy(1), policy(2)
    other.body = torch.compile(other.body, backend="eager")
    compiled = torch.compile(other, backend="eager")
    save(tmp_path / "plain", {"actor": plain})
    save(tmp_path / "compiled", {"actor": compiled})
    back = policy(3)

    ftckpt.restore(tmp_path / "compiled", {"actor": back})
    assert bits(back) == bits(policy(2))
    ftckpt.restore(tmp_path / "plain", {"actor": compiled})
    assert bits(other) == bits(plain)
    with ftckpt.open(tmp_path / "compiled") as run:
        assert not [name for name in run.leaves() if "_orig_mod" in name]


@pytest.mark.parametrize("part", ["_orig_mod", "module", "_fsdp_wrapped_module"])
def test_names_with_a_wrapper_in_them_lose_it_and_get_it_back(tmp_path, part):
    """F6, F7: as files of others have them. Weights and moments, both ways."""
    plain = policy(1)
    optim = trained(plain)
    wrapped = Named(policy(2), part)
    wrapped_optim = trained(wrapped)
    save(tmp_path / "plain", {"actor": plain, "optim": optim})
    save(tmp_path / "wrapped", {"actor": wrapped, "optim": wrapped_optim})
    live, live_wrapped = policy(3), Named(policy(4), part)
    fresh, fresh_wrapped = (torch.optim.AdamW(m.parameters(), lr=0.9) for m in (live, live_wrapped))

    out = ftckpt.restore(tmp_path / "wrapped", {"actor": live, "optim": fresh}, rename={f"{part}.": ""})
    back = ftckpt.restore(
        tmp_path / "plain",
        {"actor": live_wrapped, "optim": fresh_wrapped},
        rename=[("actor", f"actor.{part}")],
    )

    assert (bits(live), moments(fresh)) == (bits(wrapped), moments(wrapped_optim))
    assert (bits(live_wrapped), moments(fresh_wrapped)) == (bits(plain), moments(optim))
    assert fresh.param_groups[0]["lr"] == 0.01
    assert (f"actor.{part}.head.bias", "actor.head.bias") in out.renamed
    assert ("actor.head.bias", f"actor.{part}.head.bias") in back.renamed


def test_a_state_dict_that_was_saved_as_a_dict_is_read_under_other_keys(tmp_path):
    """F8: dots in keys are dots."""
    saved = {f"module.{key}": value for key, value in policy(1).state_dict().items()}
    save(tmp_path / "run", {"weights": saved})
    live = {key: torch.zeros_like(value) for key, value in saved.items()}
    plain = {key.removeprefix("module."): value for key, value in live.items()}

    ftckpt.restore(tmp_path / "run", {"weights": plain}, rename={"module.": ""})

    assert {k: raw(v) for k, v in plain.items()} == {k: raw(v) for k, v in policy(1).state_dict().items()}
    assert plain["head.bias"] is live["module.head.bias"]


def test_components_and_leaves_go_where_they_are_called(tmp_path):
    """A component by another name, a leaf by another name, and one that moves to another module."""
    both = nn.ModuleDict({"policy": policy(1), "value": nn.Linear(6, 1)})
    optim = trained(both)
    save(tmp_path / "run", {"agent": both, "adam": optim})
    actor, critic = policy(2, name="top"), nn.Linear(6, 1)
    fresh = torch.optim.AdamW([*actor.parameters(), *critic.parameters()])

    ftckpt.restore(
        tmp_path / "run",
        {"actor": actor, "critic": critic, "optim": fresh},
        rename={
            "agent.policy": "actor",
            "agent.policy.head": "actor.top",
            "agent.value": "critic",
            "adam": "optim",
        },
    )

    assert bits(actor) + bits(critic) == bits(both)
    assert moments(fresh) == moments(optim)


def test_training_goes_on_under_new_names_and_the_rule_may_stay(tmp_path):
    """A session with ``rename=``: the old names at the first start, the new ones at the next."""
    rules = {"actor.head": "actor.top"}
    old = policy(1)
    save(tmp_path / "run", {"actor": old, "optim": trained(old)})
    told = Heard()
    seen = []
    for seed in (2, 3):
        live = policy(seed, name="top")
        optim = torch.optim.AdamW(live.parameters(), lr=0.5)
        with ftckpt.Session(
            tmp_path / "run", {"actor": live, "optim": optim}, rename=rules, events=told
        ) as session:
            seen.append((bits(live), moments(optim)))
            for _ in session.steps(until=session.restored.step + 1):
                live.top.bias.data += 1
        seen.append((bits(live), moments(optim)))

    assert seen[0][0] == bits(old)
    assert all(seen[0][1])
    assert seen[2] == seen[1]
    assert len(told.named("restore.differs")) == 1


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        ({"actor.body.0": "actor.head"}, r"two things would be actor\.head\.weight here"),
        ({"actor.nose": "actor.head"}, "could apply 'actor.nose' to"),
        ({"optim.state": "optim.old"}, "could apply 'optim.state' to"),
    ],
)
def test_rules_that_collide_or_fit_nothing_are_refused_by_name(saved, rename, words):
    folder, _, _ = saved
    live = policy(2)
    unchanged = nothing_changed(live)

    with pytest.raises(StateMismatch, match=words):
        ftckpt.restore(folder, {"actor": live}, rename=rename)

    assert unchanged()


def test_a_restore_that_fails_names_the_component_as_it_is_called_here(tmp_path):
    save(tmp_path / "run", {"old": policy(1)})
    with ftckpt.open(tmp_path / "run") as run:
        chunk = index_chunks(read_fragments(run.store, run.latest()))["old.head.weight"][0]
        pack = tmp_path / "run" / chunk.pack
        body = bytearray(pack.read_bytes())
        body[chunk.chunk.offset] ^= 1
        pack.write_bytes(body)

        with pytest.raises(RestoreIncomplete, match="overwrite new") as raised:
            run.restore({"new": policy(2)}, rename={"old": "new"})

    assert raised.value.components == ("new",)


# --- dtypes ----------------------------------------------------------------------------------------


def test_another_dtype_is_refused_by_name_until_it_is_asked_for(saved):
    """E2"""
    folder, actor, _ = saved
    live = policy(2).to(torch.bfloat16)
    unchanged = nothing_changed(live)

    with pytest.raises(
        StateMismatch, match=r"actor\.head\.weight: saved float32\[3, 6\], live bfloat16"
    ) as raised:
        ftckpt.restore(folder, {"actor": live}, strict=False)
    assert unchanged() and "dtype=" in str(raised.value)
    done = ftckpt.restore(folder, {"actor": live}, dtype={"actor": torch.bfloat16})

    assert bits(live) == bits(copy.deepcopy(actor).to(torch.bfloat16))
    assert {cast.leaf for cast in done.casts} == {f"actor.{name}" for name, _ in actor.named_parameters()}
    assert all((c.exact, c.infinite, c.zero) == (False, 0, 0) for c in done.casts)
    assert "actor.head.bias: float32 to bfloat16, rounded to the nearest" in [str(c) for c in done.casts]


def test_a_dtype_is_for_what_it_names_only(saved):
    folder, _, _ = saved
    live = policy(2).to(torch.bfloat16)

    with pytest.raises(StateMismatch, match=r"actor\.body\.0\.weight: saved float32") as raised:
        ftckpt.restore(folder, {"actor": live}, dtype={"actor.head": "bfloat16"})
    assert not any("head" in line for line in raised.value.changed)
    with pytest.raises(StateMismatch, match=r"actor\.head\.weight: saved float32.*live bfloat16"):
        ftckpt.restore(folder, {"actor": live}, dtype="float16")


def test_what_leaves_the_range_of_a_dtype_is_counted_and_said(tmp_path):
    values = torch.tensor([1.0, 1e6, -1e9, float("inf"), float("nan"), 1e-30, 0.0, 2.0**-24, 65519.0])
    save(tmp_path / "run", {"w": values, "c": torch.tensor([1e300 + 1j, 1e-300j], dtype=torch.complex128)})
    live = {"w": torch.zeros(9, dtype=torch.float16), "c": torch.zeros(2, dtype=torch.complex64)}

    done = ftckpt.restore(tmp_path / "run", live, dtype={"w": "float16", "c": "complex64"})

    assert raw(live["w"]) == raw(values.half())
    told = {cast.leaf: (cast.infinite, cast.zero) for cast in done.casts}
    assert told == {"w.value": (2, 1), "c.value": (1, 1)}
    assert "2 beyond its range are infinite now; 1 too small for it are zero now" in str(done.casts[1])


def test_a_component_that_is_a_tensor_goes_by_both_of_its_names(tmp_path):
    """``w`` and, as its leaf is called, ``w.value``."""
    save(tmp_path / "run", {"w": torch.ones(3), "v": torch.ones(3)})

    for name in ("w", "w.value"):
        live = {"w": torch.zeros(3, dtype=torch.float16), "v": torch.zeros(2)}
        with pytest.raises(StateMismatch, match=r"differs: w\.value: saved float32\[3\], live float16\[3\]"):
            ftckpt.restore(tmp_path / "run", live, only=name)
        ftckpt.restore(tmp_path / "run", live, only=name, dtype={name: "float16"})
        assert live["w"].tolist() == [1, 1, 1] and live["v"].tolist() == [0, 0]


def test_a_wider_dtype_holds_everything(tmp_path):
    values = torch.randn(50).to(torch.bfloat16)
    save(tmp_path / "run", {"w": values})
    live = {"w": torch.zeros(50, dtype=torch.float64)}

    done = ftckpt.restore(tmp_path / "run", live, dtype="float64")

    assert torch.equal(live["w"], values.double())
    assert done.casts[0].exact


def test_moments_keep_their_dtype_until_another_is_asked_for_and_counters_always(saved):
    """Of an optimizer that has no state yet."""
    folder, _, optim = saved
    found = {}
    for wish in (None, "bfloat16"):
        live = policy(2).to(torch.bfloat16)
        fresh = torch.optim.AdamW(live.parameters())
        dtypes = {"actor": "bfloat16"} | ({"optim.state": wish} if wish else {})
        ftckpt.restore(folder, {"actor": live, "optim": fresh}, dtype=dtypes)
        found[wish] = [fresh.state[p] for p in live.parameters()]

    assert [{k: raw(v) for k, v in state.items()} for state in found[None]] == moments(optim)
    for state, exact in zip(found["bfloat16"], found[None], strict=True):
        assert raw(state["step"]) == raw(exact["step"])
        assert raw(state["exp_avg"]) == raw(exact["exp_avg"].to(torch.bfloat16))


@pytest.mark.parametrize("live", [torch.int64, torch.float8_e4m3fn, torch.complex64])
def test_values_that_mean_nothing_in_the_other_dtype_are_not_carried_over(tmp_path, live):
    save(tmp_path / "run", {"w": torch.ones(3)})

    with pytest.raises((StateMismatch, SettingsError)):
        ftckpt.restore(tmp_path / "run", {"w": torch.zeros(3, dtype=live)}, dtype=live)


@pytest.mark.timeout(180)
def test_shards_take_other_names_and_another_dtype_like_whole_tensors(tmp_path):
    """F7: what one process saved, with a wrapper's part in its names, into FSDP2 on two ranks."""
    torch.manual_seed(1)
    actor = Named(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), "module")
    save(tmp_path / "run", {"actor": actor, "optim": trained(actor)})

    outputs = run_ranks("tests/ranks/renamed_shards.py", 2, tmp_path / "run", timeout_s=150).check().outputs

    assert all("ok" in output.splitlines() for output in outputs)


# --- not strict ------------------------------------------------------------------------------------


def test_what_is_missing_extra_or_reshaped_is_listed_and_left_as_it_is(saved, caplog, capfd):
    """F2: state of a parameter that was not saved, or that had another shape, begins anew."""
    folder, actor, optim = saved
    live = policy(2, head=9)
    live.body.append(nn.Linear(6, 2))
    del live.body[1]
    fresh = trained(live)  # what begins anew loses the state that it has here
    other = {"epoch": 0}
    head, told = bits(live.head), Heard()
    state = {"actor": live, "optim": fresh, "extra": other}
    with pytest.raises(StateMismatch) as raised:
        ftckpt.restore(folder, state)

    with caplog.at_level(logging.WARNING):
        done = ftckpt.restore(folder, state, strict=False, events=told)

    assert bits(live.body[0]) == bits(actor.body[0])
    assert bits(live.head) == head
    assert moments(fresh)[:2] == moments(optim)[:2]
    assert not any(moments(fresh)[2:])
    names = {line.partition(":")[0] for line in done.reshaped}
    assert names == {f"actor.{at}.{kind}" for at in ("head", "body.1") for kind in ("weight", "bias")}
    assert set(done.missing) == set(raised.value.missing)
    assert set(done.missing) == {"extra (a whole component)"}
    (event,) = told.named("restore.differs")
    assert event["reshaped"] == list(done.reshaped)
    assert (event["missing_in_all"], event["reshaped_in_all"]) == (1, 4)
    assert capfd.readouterr() == ("", "") and not caplog.records


def test_a_parameter_that_was_not_saved_is_listed_with_its_state(saved):
    folder, _, optim = saved
    live = policy(2)
    live.nose = nn.Linear(2, 2)
    fresh = trained(live)

    done = ftckpt.restore(folder, {"actor": live, "optim": fresh}, strict=False)

    assert set(done.missing) == {
        "actor.nose.weight",
        "actor.nose.bias",
        "optim.param_groups.0: actor.nose.weight",
        "optim.param_groups.0: actor.nose.bias",
    }
    assert any(note.startswith("begins anew") and "nose.bias" in note for note in done.notes)
    assert moments(fresh)[: len(moments(optim))] == moments(optim)
    assert live.nose.weight not in fresh.state and live.nose.bias not in fresh.state


def test_settings_of_single_groups_are_refused_where_groups_changed_places_and_state_goes_by_name(tmp_path):
    def grouped(module: nn.Linear, order: int) -> torch.optim.Optimizer:
        groups = [{"params": [module.weight], "lr": 0.1}, {"params": [module.bias], "lr": 0.7}]
        return torch.optim.AdamW(groups[::order])

    module = nn.Linear(2, 2)
    optim = grouped(module, 1)
    trained(module, optim=optim)
    save(tmp_path / "run", {"m": module, "o": optim})
    live = nn.Linear(2, 2)
    turned, single = grouped(live, -1), torch.optim.AdamW(live.parameters())

    with pytest.raises(StateMismatch, match="another order"):
        ftckpt.restore(
            tmp_path / "run", {"m": live, "o": turned}, only=["o.param_groups.0", "o.param_groups.1"]
        )
    for other in (turned, single):
        rates = [group["lr"] for group in other.param_groups]
        done = ftckpt.restore(tmp_path / "run", {"m": live, "o": other}, only=["o.state"])
        assert done.exactly and [group["lr"] for group in other.param_groups] == rates
        for name in ("weight", "bias"):
            saved, found = optim.state[getattr(module, name)], other.state[getattr(live, name)]
            assert torch.equal(found["exp_avg"], saved["exp_avg"]), name


def test_a_restore_that_fits_says_nothing(saved):
    folder, _, _ = saved
    told, live = Heard(), policy(2)

    done = ftckpt.restore(
        folder, {"actor": live, "optim": torch.optim.AdamW(live.parameters())}, strict=False, events=told
    )

    assert done.exactly and not told
    assert not (done.missing or done.extra or done.reshaped or done.renamed or done.casts)


# --- the page --------------------------------------------------------------------------------------


def test_the_programs_of_the_page_do_what_they_say(tmp_path):
    """docs/howto/load-parts.md, block by block."""
    page = (ROOT / "docs/howto/load-parts.md").read_text()
    actor = policy(1)
    optim = trained(actor)
    save(tmp_path / "run", {"actor": actor, "optim": optim})
    scope = {
        "ftckpt": ftckpt,
        "torch": torch,
        "uri": tmp_path / "run",
        "policy": policy,
        "print": lambda *_: None,
    }

    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for block in blocks:
        fresh = policy(2)
        scope |= {"actor": fresh, "optim": torch.optim.AdamW(fresh.parameters()), "low": policy(2).bfloat16()}
        scope["renamed"] = policy(3, name="top")
        exec(block, scope)

    assert len(blocks) >= 5
