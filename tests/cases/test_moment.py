"""Kind B and D5: what is stored is the state at the call, of every kind of item, whatever its structure was
before; what is loaded shares memory with nothing.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

import ftckpt
from ftckpt.chaos.faults.store import Fault, FaultyStore, Pause
from ftckpt.errors import StateMismatch, UnsupportedValue
from ftckpt.events import silent
from ftckpt.store import open_store
from tests.session.toy import objects, raw

# --- B1, B2 over stages and optimizers -----------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
}


class Everything:
    """A model with a buffer, its optimizer, an average of its weights, arrays, containers and numbers."""

    def __init__(self, optimizer: str = "adamw") -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
        self.optim = OPTIMIZERS[optimizer](self.model.parameters())
        self.plain = {
            "ema": self.model[0].weight.detach().clone(),
            "view": torch.arange(100.0).view(10, 10).t()[2:5],
            "array": np.arange(6.0),
            "list": [1, [2, 3]],
            "deep": {"a": {"b": (4, {"c": torch.ones(3)})}},
            "number": 7,
        }
        self.state = {"model": self.model, "optim": self.optim, "plain": self.plain}
        self.step()

    def step(self) -> None:
        self.optim.zero_grad()
        self.model(torch.ones(4, 8) * torch.arange(1, 5)[:, None]).square().sum().backward()
        self.optim.step()

    def bits(self) -> dict[str, object]:
        tensors = dict(self.model.state_dict(keep_vars=False))
        for number, values in enumerate(self.optim.state.values()):
            tensors.update({f"{number}.{key}": v for key, v in values.items() if isinstance(v, torch.Tensor)})
        tensors |= {
            "ema": self.plain["ema"],
            "view": self.plain["view"],
            "deep": self.plain["deep"]["a"]["b"][1]["c"],
        }
        lrs = [group["lr"] for group in self.optim.param_groups]
        rest = repr((self.plain["array"].tolist(), self.plain["list"], self.plain["number"], lrs))
        return {name: raw(tensor.detach()) for name, tensor in tensors.items()} | {"rest": rest}

    def ruin(self) -> None:
        """Change every item in place."""
        self.step()
        with torch.no_grad():
            for tensor in (self.plain["ema"], self.plain["view"], self.plain["deep"]["a"]["b"][1]["c"]):
                tensor.fill_(-1)
            for buffer in self.model.buffers():
                buffer.fill_(9)
        self.plain["array"][:] = np.nan
        self.plain["list"][1].append(5)
        self.plain["number"] = 8
        self.optim.param_groups[0]["lr"] = 77.0


@pytest.mark.parametrize("stage", ["lazy", "eager"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_kind_of_item_has_its_value_of_the_call(tmp_path, optimizer, stage):
    """B1: a store that takes nothing meanwhile, each optimizer, both ways of staging."""
    pause, live = Pause(), Everything(optimizer)
    store = FaultyStore(
        open_store(tmp_path / "run"), [Fault(pause, op="create", prefix="packs/000001/000000000001", nth=1)]
    )
    with ftckpt.Session("ignored", live.state, store=store, events=silent, stage=stage) as session:
        wanted = live.bits()
        handle = session.save(1)
        live.ruin()
        assert pause.arrived.wait(20)
        live.ruin()
        pause.release()
        handle.wait(30)

    found = Everything(optimizer)
    ftckpt.restore(tmp_path / "run", found.state, step=1)
    assert found.bits() == wanted


@pytest.mark.parametrize("stage", ["lazy", "eager"])
def test_memory_that_was_let_go_and_used_again_changes_nothing_that_is_being_saved(tmp_path, stage):
    """B2: three saves under way one after the other, each of tensors that no longer exist."""
    pause = Pause()
    store = FaultyStore(
        open_store(tmp_path / "run"), [Fault(pause, op="create", prefix="packs/000001/000000000001", nth=1)]
    )
    state = {"t": torch.zeros(100_000), "n": {"k": 0}}
    with ftckpt.Session("ignored", state, store=store, events=silent, keep=None, stage=stage) as session:
        handles = []
        for step in (1, 2):
            state["t"], state["n"] = torch.full((100_000,), float(step)), {"k": step}
            handles.append(session.save(step))
            state["t"] = None
            junk = [torch.full((100_000,), -1.0) for _ in range(8)]
            state["t"] = junk[0]
        assert pause.arrived.wait(20)
        pause.release()
        for handle in handles:
            handle.wait(30)

    for step in (1, 2):
        found = {"t": torch.zeros(100_000), "n": {"k": 0}}
        ftckpt.restore(tmp_path / "run", found, step=step)
        assert found["t"].eq(step).all() and found["n"] == {"k": step}


# --- B3 ------------------------------------------------------------------------------------------


def test_whoever_reads_while_a_save_is_under_way_gets_the_last_whole_step(tmp_path):
    """B3: open, list, restore of the latest and of that very step, and another save, without waiting."""
    pause, live = Pause(), Everything()
    store = FaultyStore(
        open_store(tmp_path / "run"),
        [Fault(pause, op="create", prefix="fragments/000001/000000000010", nth=1)],
    )
    with ftckpt.Session("ignored", live.state, store=store, events=silent) as session:
        first = live.bits()
        handle = session.save(10)
        live.step()
        assert pause.arrived.wait(20)
        second = session.save(20)
        with ftckpt.open(tmp_path / "run") as run:
            assert [commit.step for commit in run.commits()] == [0]
        found = Everything()
        assert ftckpt.restore(tmp_path / "run", found.state).step == 0
        assert found.bits() == first
        with pytest.raises(LookupError, match="step 10"):
            ftckpt.restore(tmp_path / "run", found.state, step=10)
        pause.release()
        assert (handle.wait(30).step, second.wait(30).step) == (10, 20)
        assert ftckpt.restore(tmp_path / "run", found.state).step == 20


# --- B4 ------------------------------------------------------------------------------------------


class Scaled(torch.Tensor):
    """A wrapper with no memory of its own: bytes and a scale inside."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, device=data.device)

    def __init__(self, data, scale):
        self.inner, self.scale = data, scale

    def __tensor_flatten__(self):
        return ["inner", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, _meta, _size, _stride):
        return cls(inner["inner"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            (self,) = args
            return return_and_correct_aliasing(func, args, kwargs or {}, cls(self.inner, self.scale))
        raise NotImplementedError(func)


class Plain(torch.Tensor):
    """A subclass with ordinary memory."""


@pytest.mark.parametrize("stage", ["lazy", "eager"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Scaled(torch.ones(4, 4, dtype=torch.int8), torch.tensor(0.5)),
        lambda: torch.ones(3).as_subclass(Plain),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["wrapper", "subclass", "sparse", "meta", "nested"],
)
def test_a_tensor_without_bytes_of_its_own_is_refused_by_name_and_nothing_is_written(tmp_path, make, stage):
    """B4: never NaN, never whatever lay in memory."""
    state = {"good": {"t": torch.ones(2)}, "model": {"layer": {"odd": make()}}}
    with pytest.raises(UnsupportedValue, match=r"model\.layer\.odd") as caught:  # noqa: SIM117
        with ftckpt.Session(tmp_path / "run", state, events=silent, stage=stage):
            raise AssertionError("entered")

    assert caught.value.leaf == "model.layer.odd"
    assert not (tmp_path / "run").exists()


def test_a_tensor_that_becomes_odd_later_fails_that_save_by_name_and_the_next_is_good(tmp_path):
    """B4, a sibling: it was plain when the session began."""
    state = {"model": {"t": torch.ones(4)}}
    with ftckpt.Session(tmp_path / "run", state, events=silent) as session:
        state["model"]["t"] = Scaled(torch.ones(4, dtype=torch.int8), torch.tensor(0.5))
        with pytest.raises(UnsupportedValue, match=r"model\.t"):
            session.save(1)
        state["model"]["t"] = torch.full((4,), 2.0)
        assert session.save(2).wait(30).step == 2


# --- B6 ------------------------------------------------------------------------------------------


class Buffer:
    """A replay buffer that keeps what it is given."""

    def __init__(self) -> None:
        self.held: dict[str, object] = {"obs": torch.zeros(10, 3), "count": 0, "extra": np.zeros(4)}

    def state_dict(self) -> dict[str, object]:
        return self.held

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.held = state


def maps_of(folder: Path) -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]


def test_what_was_loaded_shares_memory_with_no_file_and_no_other_load(tmp_path):
    """B6: objects that keep what they are given; files overwritten and deleted; two loads of one step."""
    buffer, model = Buffer(), torch.nn.Linear(3, 3)
    buffer.held = {"obs": torch.arange(30.0).view(10, 3), "count": 10, "extra": np.arange(4.0)}
    with ftckpt.Session(tmp_path / "run", {"buffer": buffer, "model": model}, events=silent):
        pass
    one, two = Buffer(), Buffer()
    models = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    ftckpt.restore(tmp_path / "run", {"buffer": one, "model": models[0]})
    ftckpt.restore(tmp_path / "run", {"buffer": two, "model": models[1]})
    assert not maps_of(tmp_path)

    one.held["obs"].zero_()
    one.held["extra"][:] = 0
    with torch.no_grad():
        models[0].weight.zero_()
    for key in objects(tmp_path / "run"):
        path = tmp_path / "run" / key
        path.write_bytes(b"\0" * path.stat().st_size)
        path.unlink()

    assert torch.equal(two.held["obs"], torch.arange(30.0).view(10, 3))
    assert two.held["extra"].tolist() == [0, 1, 2, 3] and two.held["count"] == 10
    assert torch.equal(models[1].weight, model.weight)
    assert torch.equal(buffer.held["obs"], torch.arange(30.0).view(10, 3)), "nor with what was saved"


# --- D5 ------------------------------------------------------------------------------------------


def test_a_changed_structure_is_saved_as_it_is_now(tmp_path):
    """D5: a shape, a dtype, a key more, a key less, another kind of thing under one name; the same again."""
    shapes: list[dict[str, object]] = [
        {"a": torch.ones(4), "b": torch.zeros(2, 2)},
        {"a": torch.ones(4), "b": torch.zeros(2, 2)},
        {"a": torch.ones(5), "b": torch.zeros(2, 2)},
        {"a": torch.ones(5), "b": torch.zeros(2, 2), "c": torch.arange(3)},
        {"a": torch.ones(5, dtype=torch.float64), "c": torch.arange(3)},
        {"a": 3, "c": [torch.arange(3), torch.ones(1)]},
        {"a": torch.ones(4), "b": torch.zeros(2, 2)},
    ]
    state = {"held": shapes[0]}
    with ftckpt.Session(tmp_path / "run", state, events=silent, keep=None) as session:
        for step, held in enumerate(shapes, 1):
            state["held"] = held
            session.save(step).wait(30)

    for step, held in enumerate(shapes, 1):
        found = {"held": {key: blank(value) for key, value in held.items()}}
        ftckpt.restore(tmp_path / "run", found, step=step)
        assert repr(found["held"]) == repr(held)
    with pytest.raises(StateMismatch, match="a"):
        ftckpt.restore(tmp_path / "run", {"held": {"a": torch.zeros(9), "b": torch.zeros(2, 2)}}, step=1)


def blank(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    return [blank(item) for item in value] if isinstance(value, list) else 0
