"""What was trained and yet did not change is reported at once, and nothing else is.

The public case: three checkpoints in a row were bit-identical and nobody knew.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import ftckpt
from ftckpt.boxes import Box
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore
from ftckpt.errors import SaveError, StoreFull
from ftckpt.freshness import find_stale
from ftckpt.leaf import Holding, LeafSpec
from ftckpt.manifest import (
    BoxRecord,
    ChunkRecord,
    Commit,
    ComponentSummary,
    Fragment,
    FragmentRef,
    LeafRecord,
    PackRef,
    Ref,
)
from ftckpt.store import open_store
from tests.session.toy import Heard


class Job:
    """An actor with batch norm, so that buffers change with every forward, and AdamW."""

    def __init__(self, lr: float = 0.1, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.actor = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)).to(dtype)
        if dtype is torch.bfloat16:  # a value near zero would change by any update
            for parameter in self.actor.parameters():
                nn.init.ones_(parameter)
        self.optim = torch.optim.AdamW(self.actor.parameters(), lr=lr, weight_decay=0.0)
        self.state: dict[str, object] = {"actor": self.actor, "optim": self.optim}

    def step(self) -> None:
        self.optim.zero_grad()
        x = torch.randn(4, 8, dtype=self.actor[0].weight.dtype)
        self.actor(x).square().mean().backward()
        self.optim.step()


def stale(tmp_path, job: Job, between: Callable[[], None], saves: int = 1, **options) -> list[tuple]:
    """Save, do something, save again, …: what was told as stale, and that all three ways agree."""
    heard, handles = Heard(), []
    with ftckpt.Session(tmp_path / "run", job.state, events=heard, **options) as session:
        session._at.handle.wait(20)
        for step in range(1, saves + 1):
            between()
            handles.append(session.save(step))
            handles[-1].wait(20)
        session._boundary()
    told = [(event["step"], event["component"], event["since_step"]) for event in heard.named("save.stale")]
    assert [(one.step, one.component, one.since_step) for h in handles for one in h.stale] == told
    assert [(e["step"], e["component"]) for e in heard.named("session.stale")] == [one[:2] for one in told]
    return told


def test_a_model_that_learns_is_fresh(tmp_path):
    job = Job()

    assert stale(tmp_path, job, job.step, saves=3) == []


@pytest.mark.parametrize("stage", ["lazy", "eager"])
def test_three_saves_of_weights_that_never_changed_are_told_three_times(tmp_path, stage):
    """The trainer puts old weights back through ``.data`` after every step; buffers change all the while."""
    job = Job()
    first = copy.deepcopy(job.actor)

    def step() -> None:
        job.step()
        for mine, old in zip(job.actor.parameters(), first.parameters(), strict=True):
            mine.data.copy_(old.data)

    told = stale(tmp_path, job, step, saves=3, stage=stage)

    assert told == [(1, "actor", 0), (2, "actor", 1), (3, "actor", 2)]


def test_updates_below_what_the_dtype_can_tell_apart_are_told(tmp_path):
    job = Job(lr=1e-9, dtype=torch.bfloat16)

    assert stale(tmp_path, job, job.step) == [(1, "actor", 0)]


def test_an_optimizer_outside_the_state_counts_too(tmp_path):
    """It steps captured weights by nothing that shows."""
    job = Job(dtype=torch.bfloat16)
    stranger = torch.optim.SGD(job.actor.parameters(), lr=1e-9)
    del job.state["optim"]

    def step() -> None:
        job.actor.eval()
        job.actor(torch.randn(4, 8, dtype=torch.bfloat16)).square().mean().backward()
        stranger.step()

    assert stale(tmp_path, job, step) == [(1, "actor", 0)]


def test_plain_sgd_has_no_state_that_could_be_stale(tmp_path):
    job = Job()
    job.state["optim"] = job.optim = torch.optim.SGD(job.actor.parameters(), lr=0.1)

    assert stale(tmp_path, job, job.step) == []


def test_an_optimizer_whose_closure_computes_the_gradients_is_counted(tmp_path):
    job = Job(lr=1e-9, dtype=torch.bfloat16)

    def closure() -> torch.Tensor:
        job.optim.zero_grad()
        loss = job.actor(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        return loss

    assert stale(tmp_path, job, lambda: job.optim.step(closure)) == [(1, "actor", 0)]


EXPLAINED = {
    "a learning rate of zero": lambda job: (
        [group.update(lr=0.0) for group in job.optim.param_groups],
        job.step(),
    ),
    "no gradient": lambda job: (job.optim.zero_grad(), job.optim.step()),
    "no step": lambda job: None,
    "written by hand": lambda job: job.actor[0].weight.data.add_(1.0),
}


@pytest.mark.parametrize("why", EXPLAINED)
def test_what_is_explained_is_not_told(tmp_path, why):
    job = Job()

    assert stale(tmp_path, job, lambda: EXPLAINED[why](job)) == []


def test_a_frozen_component_may_stay_as_it_is(tmp_path):
    job = Job()
    reference = copy.deepcopy(job.actor)
    stranger = torch.optim.SGD(reference.parameters(), lr=1e-12)
    job.state["reference"] = ftckpt.Frozen(reference)

    def step() -> None:
        job.step()
        for p in reference.parameters():
            p.grad = torch.zeros_like(p)
        stranger.step()

    assert stale(tmp_path, job, step) == []


def test_updates_are_counted_since_the_last_commit_not_the_last_try(tmp_path):
    """Step 1 fails to save. Step 2 holds what step 0 held, although nothing was trained in between."""
    job, heard = Job(lr=1e-9, dtype=torch.bfloat16), Heard()
    full = Fault(Fail(error=StoreFull("injected")), op="create", prefix="packs/000001/000000000001")
    store = FaultyStore(open_store(tmp_path / "run"), [full])
    with ftckpt.Session("ignored", job.state, store=store, events=heard) as session:
        job.step()
        with pytest.raises(SaveError):
            session.save(1).wait(20)
        session.save(2).wait(20)

    (told,) = heard.named("save.stale")
    assert (told["component"], told["since_step"], told["updates"]) == ("actor", 0, 1)
    assert "a copy of it is trained instead" in told["why"]


# --- several writers ------------------------------------------------------------------------------


def share(writer: str, *packs: str) -> Fragment:
    """One writer's chunks of ``actor.w``, one in each of these packs."""
    spec = ("actor.w", "tensor", "float32", (8,), "")
    chunks = tuple(ChunkRecord(n, n + 1, b"", b"", 0, n, 0, 4) for n in range(len(packs)))
    leaf = LeafRecord(*spec, (BoxRecord((0,), (8,), chunks),))
    refs = tuple(PackRef(key, 4) for key in packs)
    return Fragment(
        format=1,
        attempt=1,
        step=2,
        writer=writer,
        quorum=0,
        members="",
        parent=None,
        packs=refs,
        leaves=(leaf,),
    )


OLD, NEW = "packs/000001/000000000001/a", "packs/000001/000000000002/a"


@pytest.mark.parametrize(
    "packs, reused_bytes, writers, told",
    [
        ((OLD, OLD), 8, 1, True),
        ((OLD, NEW), 4, 1, False),
        ((OLD, OLD), 32, 2, True),  # nobody wrote a new byte
        ((OLD, OLD), 16, 2, False),  # this writer's part stayed, another's changed
        ((), 32, 2, False),  # this writer has no part of it
    ],
)
def test_a_writer_calls_a_component_stale_only_where_no_other_changed_it(packs, reused_bytes, writers, told):
    spec = LeafSpec("actor.w", "tensor", "float32", (8,))
    holding = Holding(spec, Box((0,), (8,)), (0,), owned=True)
    commit = Commit(
        format=1,
        attempt=1,
        step=2,
        parent=Ref(1, 1, ""),
        fragments=tuple(FragmentRef(f"f{n}", 0, "", ()) for n in range(writers)),
        components={"actor": ComponentSummary(1, 8 if writers == 1 else 32, 0, reused_bytes)},
    )

    found = find_stale(share("a", *packs), commit, [holding], {"actor": 5})

    assert [(one.component, one.updates) for one in found] == ([("actor", 5)] if told else [])
    assert find_stale(share("a", *packs), commit, [holding], {}) == ()
