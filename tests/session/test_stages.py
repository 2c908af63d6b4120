"""Where the seconds and bytes of a save went, and in which stage a failed one failed."""

from __future__ import annotations

import pytest
import torch

import ftckpt
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore
from ftckpt.clock import HandClock
from ftckpt.errors import SaveError, StoreFull, TooManyFailedSaves
from ftckpt.meter import STAGES, Meter
from ftckpt.store import open_store
from tests.session.test_fences import Job, held_save
from tests.session.toy import Heard, Toy
from tests.support.procs import wait_until

FULL = Fail(error=StoreFull("injected: no space"))


def test_a_save_is_told_of_stage_by_stage_and_the_bytes_add_up(tmp_path):
    toy, heard = Toy(), Heard()
    with ftckpt.Session(tmp_path / "run", toy.state, codec="raw", events=heard) as session:
        toy.train(1)
        commit = session.save(1).wait(20)

    of_step = [event for event in heard if event.fields.get("step") == 1 and event.name.startswith("save.")]
    assert [event.name for event in of_step] == ["save.begun", "save.staged", "save.put", "save.committed"]
    begun, staged, put, committed = (event.fields for event in of_step)
    whole = sum(part.raw_bytes for part in commit.components.values())
    own = sum(part.stored_bytes for part in commit.components.values())
    assert begun["bytes"] == staged["bytes"] == whole == committed["raw_bytes"]
    assert put["bytes"] == own == committed["stored_bytes"] and put["packs"] >= 1
    assert set(STAGES) == {name[:-2] for name in committed if name[:-2] in STAGES}
    assert committed["total_s"] >= put["seconds"] >= staged["seconds"] >= begun["seconds"] > 0
    assert committed["capture_s"] == begun["capture_s"]


def test_what_a_fence_cost_the_trainer_is_told_with_its_step_and_in_the_sum(tmp_path):
    job = Job(tmp_path / "run")
    with held_save(job) as handle:
        job.step()
        job.gate.release()
        handle.wait(20)

    (fence,) = [event.fields for event in job.events if event.name == "save.fence"]
    (done,) = [e.fields for e in job.events if e.name == "save.committed" and e.fields["step"] == 1]
    assert fence["step"] == 1 and fence["staged_bytes"] > 0
    assert done["fence_s"] == pytest.approx(fence["seconds"], abs=1e-4)


FAILING = {
    "packs/000001/000000000001": "put",
    "fragments/000001/000000000001": "put",
    "commits/000000000001": "settle",
}


@pytest.mark.parametrize("prefix", FAILING)
def test_a_boundary_says_in_which_stage_the_store_failed_a_save(tmp_path, prefix):
    store, heard, toy = FaultyStore(open_store(tmp_path / "run")), Heard(), Toy()
    store.plan = [Fault(FULL, op="create", prefix=prefix, nth=1)]
    with ftckpt.Session("ignored", toy.state, store=store, save_every=1, events=heard) as session:
        for step in session.steps(until=3):
            toy.train(step)
            if step == 2:
                wait_until(lambda: heard.named("save.failed"), 20, "the save of step 1 to fail")

    (failed,), (told,) = heard.named("save.failed"), heard.named("session.save_failed")
    assert (failed["step"], failed["stage"]) == (told["step"], told["stage"]) == (1, FAILING[prefix])


def test_a_save_that_cannot_learn_its_parent_failed_while_preparing(tmp_path):
    store, heard, toy = FaultyStore(open_store(tmp_path / "run")), Heard(), Toy()
    with ftckpt.Session("ignored", toy.state, store=store, keep=None):
        pass
    with ftckpt.Session("ignored", toy.state, store=store, keep=None, events=heard) as session:
        store.plan = [Fault(FULL, op="read", prefix="commits/000000000000", nth=1)]
        with pytest.raises(SaveError):
            session.save(1).wait(20)

    assert [event["stage"] for event in heard.named("save.failed")] == ["prepare"]


def test_what_does_not_fit_into_the_staging_budget_failed_while_capturing(tmp_path):
    heard, state = Heard(), {"big": torch.zeros(4096)}
    with ftckpt.Session(tmp_path / "run", state, stage="eager", events=heard) as session:
        session._at.handle.wait(20)
        object.__setattr__(session.settings, "staging_bytes", 64)
        with pytest.raises(SaveError, match="staging budget"):
            session.save(1).wait(20)

    assert [event["stage"] for event in heard.named("save.failed")] == ["capture"]


def test_a_fence_that_gave_a_save_up_is_the_stage_that_failed(tmp_path):
    job = Job(tmp_path / "run", staging_bytes=1024, chunk_bytes=512, fence_deadline_s=0.2)
    with held_save(job) as handle:
        job.step()
        job.gate.release()
        with pytest.raises(SaveError, match="staging budget"):
            handle.wait(20)
        job.session._at.saved = 1

    assert [e.fields["stage"] for e in job.events if e.name == "save.failed"] == ["fence"]


def test_too_many_failed_saves_name_the_stage(tmp_path):
    store, heard, toy = FaultyStore(open_store(tmp_path / "run")), Heard(), Toy()
    with (
        pytest.raises(TooManyFailedSaves, match=r"no space.*'put'"),
        ftckpt.Session(
            "ignored", toy.state, store=store, save_every=1, max_failed_saves=1, events=heard
        ) as session,
    ):
        wait_until(lambda: heard.named("save.committed"), 20, "step 0")
        store.plan = [Fault(FULL, op="create", prefix="packs")]
        for step in session.steps(until=5):
            toy.train(step)
            if step == 2:
                wait_until(lambda: heard.named("save.failed"), 20, "the save of step 1 to fail")


def test_a_meter_adds_up_what_several_parts_of_a_stage_took_and_remembers_the_first_failure():
    clock = HandClock()
    meter = Meter(clock.now_s)
    for seconds in (1.0, 2.0):
        with meter.spent("read", size_bytes=10):
            clock.sleep(seconds)
    with pytest.raises(ValueError, match="broken"), meter.spent("put"), meter.spent("encode"):
        clock.sleep(0.5)
        raise ValueError("broken")

    assert (meter.seconds("read"), meter.bytes("read")) == (3.0, 20)
    assert meter.seconds("encode") == meter.seconds("put") == 0.5
    assert meter.failed_in == "encode" and meter.age_s == 3.5
    assert meter.seconds("settle") == 0.0
