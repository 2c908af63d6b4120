"""Lazy snapshots: what is committed is the state of the call, whatever changes it afterwards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ftckpt
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.errors import SaveAborted, SaveError, SaveFailed
from ftckpt.events import Event
from ftckpt.session import core
from ftckpt.store import open_store
from tests.support.procs import run_ranks, wait_until

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw-single": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "adam-amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad-fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=3),
    "muon": lambda p: torch.optim.Muon([one for one in p if one.ndim == 2], lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
}


class Gate:
    """Holds the save engine back before it reads the first chunk: asked by ``yield_to``."""

    def __init__(self) -> None:
        self.is_held = False

    def hold(self) -> None:
        self.is_held = True

    def release(self) -> None:
        self.is_held = False


class Job:
    """A model, its optimizer and things no optimizer owns, with a store that holds saves back."""

    def __init__(self, folder: Path, kind: str = "adamw-fused", device: str = "cpu", **settings: Any) -> None:
        torch.manual_seed(0)
        self.device = device
        self.model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 4)).to(device)
        self.optim = OPTIMIZERS[kind](self.model.parameters())
        self.ema = torch.zeros(64, device=device)
        self.plain: dict[str, Any] = {"epoch": 0, "seen": [1, 2, 3]}
        self.state: dict[str, object] = {
            "actor": self.model,
            "optim": self.optim,
            "ema": self.ema,
            "plain": self.plain,
        }
        self.gate = Gate()
        self.folder = folder
        self.events: list[Event] = []
        self.store = FaultyStore(open_store(folder))
        self.session = ftckpt.Session(
            folder,
            self.state,
            store=self.store,
            events=self.events.append,
            **({"yield_to": lambda: self.gate.is_held} | settings),
        )

    def step(self, optim: torch.optim.Optimizer | None = None) -> None:
        optim = optim or self.optim
        x = torch.randn(8, 16, device=self.device)

        def closure() -> torch.Tensor:
            optim.zero_grad()
            loss: torch.Tensor = self.model(x).square().mean()
            loss.backward()
            return loss

        optim.step(closure)  # some ask for the gradients more than once

    def fences(self) -> list[str]:
        return [event.fields["what"] for event in self.events if event.name == "save.fence"]

    def remembered(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone().cpu() for name, value in self.model.state_dict().items()}


@contextmanager
def held_save(job: Job) -> Iterator[ftckpt.SaveHandle]:
    """A save of step 1 that has been registered but whose packs the store does not take yet."""
    with job.session as ckpt:
        ckpt_handle = job.session._at.handle
        assert ckpt_handle is not None
        ckpt_handle.wait(30)
        job.step()
        job.gate.hold()
        yield ckpt.save(1)
        job.gate.release()


def committed(job: Job, step: int = 1) -> ftckpt.Run:
    run = ftckpt.open(str(job.folder))
    assert run.latest().step == step
    return run


def test_no_optimizer_of_torch_is_left_out() -> None:
    """But the one that steps sparse gradients alone, and the base class."""
    tried = {type(make(nn.Linear(2, 2).parameters())) for make in OPTIMIZERS.values()}
    there = {one for one in vars(torch.optim).values() if isinstance(one, type)}

    left_out = {one for one in there if issubclass(one, torch.optim.Optimizer)} - tried
    assert left_out == {torch.optim.Optimizer, torch.optim.SparseAdam}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_an_optimizer_changes_after_save_is_committed_as_it_was(tmp_path: Path, kind: str) -> None:
    """Case B1: parameters, moments, buffers, plain values and foreign tensors, all at once."""
    job = Job(tmp_path / "run", kind)

    with held_save(job) as handle:
        before = job.remembered()
        moments = {
            i: {k: v.clone() for k, v in s.items() if isinstance(v, torch.Tensor)}
            for i, s in enumerate(job.optim.state.values())
        }
        job.plain["epoch"] = 99
        job.plain["seen"].append(4)
        job.ema.fill_(7)
        for _ in range(3):
            job.step()
        job.gate.release()
        handle.wait(30)

    run = committed(job)
    trained = {id(p) for group in job.optim.param_groups for p in group["params"]}
    for name, tensor in before.items():
        assert torch.equal(run.tensor(f"actor.{name}"), tensor), name
        if name.endswith("weight") and id(job.model.get_parameter(name)) in trained:
            assert not torch.equal(job.model.state_dict()[name], tensor), f"{name} never changed"
    assert torch.equal(run.tensor("ema.value"), torch.zeros(64))
    assert run.value("plain")["tree"] == {"epoch": 0, "seen": [1, 2, 3]}  # type: ignore[index]
    fresh = Job(tmp_path / "unused", kind)
    ftckpt.restore(job.folder, {"actor": fresh.model, "optim": fresh.optim}, step=1)
    for i, state in enumerate(fresh.optim.state.values()):
        for key, value in moments[i].items():
            assert torch.equal(state[key], value), (i, key)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_without_fences_the_same_test_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """The test above can fail: with the fence switched off the commit holds later values."""
    monkeypatch.setattr(core.Session, "_before_change", lambda _self, _what, **_: None)
    job = Job(tmp_path / "run", kind)

    with held_save(job) as handle:
        before = job.remembered()
        for _ in range(3):
            job.step()
        job.gate.release()
        try:
            handle.wait(30)
        except SaveError:
            return  # the version check noticed a write: also not the values of the call

    weights = committed(job).tensor("actor.0.weight")
    assert not torch.equal(weights, before["0.weight"])


def test_an_optimizer_outside_the_state_is_fenced_and_told_of(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")
    stranger = torch.optim.SGD(job.model.parameters(), lr=0.5, fused=True)

    with held_save(job) as handle:
        before = job.remembered()
        job.step(stranger)
        job.gate.release()
        handle.wait(30)

    assert torch.equal(committed(job).tensor("actor.0.weight"), before["0.weight"])
    assert any(e.name == "save.warning" and "SGD" in e.fields["what"] for e in job.events)


def test_a_parameter_that_two_components_reach_is_committed_as_it_was_under_both_names(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "run")
    critic = nn.Sequential(job.model[0], nn.Linear(64, 1))
    job.state["critic"] = critic

    with held_save(job) as handle:
        before, head = job.remembered(), critic[1].weight.detach().clone()
        critic.load_state_dict({name: torch.zeros_like(value) for name, value in critic.state_dict().items()})
        job.step()
        job.gate.release()
        handle.wait(30)

    run = committed(job)
    for name in ("actor.0.weight", "critic.0.weight"):
        assert torch.equal(run.tensor(name), before["0.weight"]), name
    assert torch.equal(run.tensor("critic.1.weight"), head)


def test_a_parameter_that_two_components_reach_is_restored_where_only_one_is_asked_for(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "run")
    job.state["critic"] = nn.Sequential(job.model[0], nn.Linear(64, 1))
    with job.session as ckpt:
        job.step()
        ckpt.save(1).wait(30)

    for name, shape in {"actor": job.model, "critic": job.state["critic"]}.items():
        found = copy.deepcopy(shape)
        assert isinstance(found, nn.Module)
        for parameter in found.parameters():
            nn.init.zeros_(parameter)
        ftckpt.restore(job.folder, {name: found})
        assert torch.equal(found.get_parameter("0.weight"), job.model[0].weight), name


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fences", ["fenced", "unfenced"])
def test_sharded_parameters_are_committed_as_they_were_whatever_optimizer_steps_them(
    tmp_path: Path, fences: str
) -> None:
    """FSDP2 on two ranks. Without fences the same comparison fails, for each kind of optimizer."""
    done = run_ranks("tests/ranks/session_fences.py", 2, tmp_path, fences, timeout_s=100).check()

    assert all(
        "as it was: single foreach fused sgd" in text if fences == "fenced" else "as it was: none" in text
        for text in done.outputs
    ), done.outputs


def test_an_optimizer_stepped_on_another_thread_is_fenced(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")

    with held_save(job) as handle:
        before = job.remembered()
        thread = threading.Thread(target=job.step)
        thread.start()
        thread.join()
        job.gate.release()
        handle.wait(30)

    assert torch.equal(committed(job).tensor("actor.0.weight"), before["0.weight"])


def test_loading_a_state_dict_is_fenced(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")

    with held_save(job) as handle:
        before = job.remembered()
        job.model[0].load_state_dict({k: torch.full_like(v, 3) for k, v in job.model[0].state_dict().items()})
        job.gate.release()
        handle.wait(30)

    assert torch.equal(committed(job).tensor("actor.0.weight"), before["0.weight"])
    assert "actor.load_state_dict" in job.fences()


def test_mutating_stages_what_is_written_by_hand(tmp_path: Path) -> None:
    job = Job(tmp_path / "run")

    with held_save(job) as handle:
        before = job.remembered()
        with job.session.mutating(), torch.no_grad():
            job.model[0].weight.zero_()
        job.gate.release()
        handle.wait(30)

    assert torch.equal(committed(job).tensor("actor.0.weight"), before["0.weight"])


def test_memory_that_is_emptied_without_a_fence_fails_the_save_by_name(tmp_path: Path) -> None:
    """Offloading a parameter between save and fence must never write garbage."""
    job = Job(tmp_path / "run", chunk_bytes=256)

    with held_save(job) as handle:
        job.model[2].weight.untyped_storage().resize_(0)
        job.gate.release()
        with pytest.raises((SaveFailed, SaveAborted), match="resized"):
            handle.wait(30)

    assert [c.step for c in ftckpt.open(str(job.folder)).commits()] == [0]


def test_a_fence_beyond_the_staging_budget_waits_and_then_gives_the_save_up(tmp_path: Path) -> None:
    """Training goes on after the deadline; the step is settled as aborted."""
    job = Job(tmp_path / "run", staging_bytes=1024, chunk_bytes=512, fence_deadline_s=0.2)

    with held_save(job) as handle:
        job.step()
        job.gate.release()
        with pytest.raises((SaveFailed, SaveAborted), match="staging budget"):
            handle.wait(30)
        job.session._at.saved = 1
        job.step()

    run = ftckpt.open(str(job.folder))
    assert [e.status for e in run.entries() if e.at.step == 1] == ["aborted"]


def test_a_fence_beyond_the_staging_budget_goes_on_as_the_store_takes_chunks_off(tmp_path: Path) -> None:
    """Long before its deadline; the commit has the values of the call."""
    job = Job(tmp_path / "run", staging_bytes=2048, chunk_bytes=512, fence_deadline_s=60)

    with held_save(job) as handle:
        before = job.remembered()
        pool = job.session._entered.pool
        full = threading.Thread(
            target=lambda: (wait_until(lambda: pool.used_bytes > 1536, 30, "a full pool"), job.gate.release())
        )
        full.start()
        job.step()
        handle.wait(30)
        full.join()

    assert all(torch.equal(committed(job).tensor(f"actor.{name}"), value) for name, value in before.items())
    (fence,) = [event.fields for event in job.events if event.name == "save.fence"]
    assert fence["staged_bytes"] > 1536


def test_verify_snapshot_notices_a_write_that_no_hook_sees(tmp_path: Path) -> None:
    job = Job(tmp_path / "run", verify_snapshot=True, chunk_bytes=256)

    with held_save(job) as handle:
        job.model[2].weight.detach().numpy()[:] = 5
        job.gate.release()
        with pytest.raises((SaveFailed, SaveAborted), match=r"actor\.2\.weight"):
            handle.wait(30)
