"""Frozen components: no fence stages them for an optimizer step, and no save reads them again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import ftckpt
from tests.session.test_fences import Job, held_save

WIDTH = 256
BASE_BYTES = 4 * WIDTH * (WIDTH + 1)


class Adapted(Job):
    """A frozen base, larger than all else, beside what is trained."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder, **settings)
        self.base = nn.Linear(WIDTH, WIDTH)
        self.state["base"] = ftckpt.Frozen(self.base)
        self.first = self.base.weight.detach().clone()

    def told(self, name: str, key: str) -> dict[int, int]:
        return {e.fields["step"]: e.fields[key] for e in self.events if e.name == name}


def weight_of(job: Job, step: int) -> torch.Tensor:
    return ftckpt.open(str(job.folder)).tensor("base.weight", step=step)


def test_an_optimizer_step_stages_what_it_may_change_and_nothing_frozen(tmp_path: Path) -> None:
    job = Adapted(tmp_path / "run")

    with held_save(job) as handle:
        before = job.remembered()
        job.step()
        job.gate.release()
        handle.wait(30)

    assert 0 < job.told("save.fence", "staged_bytes")[1] < BASE_BYTES
    assert torch.equal(ftckpt.open(str(job.folder)).tensor("actor.0.weight"), before["0.weight"])
    assert torch.equal(weight_of(job, 1), job.first)


CHANGES: dict[str, Callable[[Adapted], object]] = {
    "load_state_dict": lambda job: job.base.load_state_dict(nn.Linear(WIDTH, WIDTH).state_dict()),
    "a foreign optimizer": lambda job: torch.optim.SGD(job.base.parameters(), lr=1.0, fused=True).step(),
}


@pytest.mark.parametrize("how", CHANGES)
def test_what_changes_frozen_memory_all_the_same_is_fenced_and_hashed_again(tmp_path: Path, how: str) -> None:
    """A step of an optimizer that does not own it goes before, so that only frozen memory is still live."""
    job = Adapted(tmp_path / "run")
    with held_save(job) as handle:
        job.step()
        for parameter in job.base.parameters():
            parameter.grad = torch.ones_like(parameter)
        CHANGES[how](job)
        later = job.base.weight.detach().clone()
        job.gate.release()
        handle.wait(30)
        job.session.save(2).wait(30)

    assert torch.equal(weight_of(job, 1), job.first)
    assert not torch.equal(later, job.first)
    assert torch.equal(weight_of(job, 2), later)


def test_a_frozen_component_is_read_and_hashed_once(tmp_path: Path) -> None:
    job = Adapted(tmp_path / "run", keep=None)
    with job.session as ckpt:
        for step in (1, 2, 3):
            job.step()
            ckpt.save(step).wait(30)

    read_bytes = job.told("save.staged", "bytes")
    assert read_bytes[0] > BASE_BYTES
    assert all(read_bytes[step] < BASE_BYTES for step in (1, 2, 3))
    assert all(torch.equal(weight_of(job, step), job.first) for step in (0, 1, 2, 3))
    assert ftckpt.open(str(job.folder)).verify() == []


def moved(job: Adapted) -> None:
    job.base.weight.data = job.base.weight.detach().clone()


def woken(job: Adapted) -> None:
    """As sleep modes do: the memory goes, and comes back elsewhere."""
    storage = job.base.weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    kept = [torch.empty(size, dtype=torch.uint8) for _ in range(8)]
    storage.resize_(size)
    assert kept
    with torch.no_grad():
        job.base.weight.copy_(job.first)


def replaced(job: Adapted) -> None:
    """The old one is freed first, so that the new one may lie where it lay."""
    state = job.base.state_dict()
    again = {name: value.clone() + 1 for name, value in state.items()}
    del state
    job.base.weight = None
    job.base.weight = nn.Parameter(again["weight"])
    job.first = again["weight"].clone()


@pytest.mark.parametrize("change", [moved, woken, replaced])
def test_memory_that_is_not_what_it_was_is_read_again(
    tmp_path: Path, change: Callable[[Adapted], None]
) -> None:
    job = Adapted(tmp_path / "run")
    with job.session as ckpt:
        job.step()
        ckpt.save(1).wait(30)
        change(job)
        ckpt.save(2).wait(30)

    assert job.told("save.staged", "bytes")[2] > BASE_BYTES / 2
    assert torch.equal(weight_of(job, 2), job.first)


@pytest.mark.parametrize("how", ["mutating", "verify_snapshot"])
def test_a_write_that_nothing_shows_is_saved_where_it_was_said_or_is_looked_for(
    tmp_path: Path, how: str
) -> None:
    job = Adapted(tmp_path / "run", verify_snapshot=how == "verify_snapshot")
    with job.session as ckpt:
        job.step()
        ckpt.save(1).wait(30)
        with ckpt.mutating() if how == "mutating" else nullcontext():
            job.base.weight.detach().numpy()[:] = 5
        ckpt.save(2).wait(30)

    assert torch.equal(weight_of(job, 1), job.first)
    assert torch.equal(weight_of(job, 2), torch.full_like(job.first, 5))


def test_what_is_called_frozen_and_lies_in_trained_memory_is_fenced_as_that_is(tmp_path: Path) -> None:
    job = Adapted(tmp_path / "run")
    job.state["copy"] = ftckpt.Frozen({"w": job.model[0].weight.detach()})
    with held_save(job) as handle:
        before = job.remembered()
        job.step()
        job.gate.release()
        handle.wait(30)

    assert torch.equal(ftckpt.open(str(job.folder)).tensor("copy.w"), before["0.weight"])
