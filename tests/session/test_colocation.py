"""Manners beside a rollout engine in the same process: bandwidth, host memory, tensors that move."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

from ftckpt.colocation import Gate, SharedBudget
from ftckpt.errors import SaveError, SettingsError
from ftckpt.session import Session
from tests.session.test_fences import Job, committed, held_save
from tests.support.procs import wait_until


def packs_of_step_1(job: Job) -> list[str]:
    return [
        call.key
        for call in job.store.log
        if call.op == "create" and call.key.startswith("packs/000001/000000000001")
    ]


def told(job: Job, name: str) -> list[dict]:
    return [event.fields for event in job.events if event.name == name]


def saved(job: Job, step: int) -> None:
    job.session.save(step).wait(20)


# --- bandwidth -----------------------------------------------------------------------------------


def test_while_an_engine_needs_the_machine_nothing_is_read_and_nothing_put(tmp_path):
    job = Job(tmp_path / "run")
    with job.session as session:
        session._at.handle.wait(20)
        with session.yielding():
            handle = session.save(1)
            wait_until(lambda: session._inside().gate.waiting, 20, "the saver to come to the gate")
            assert not handle.done and not told(job, "save.staged")[1:] and not packs_of_step_1(job)
        handle.wait(20)
        assert packs_of_step_1(job)

    (yielded,) = told(job, "save.yielded")
    assert not yielded["overran"]
    assert told(job, "save.committed")[-1]["yielded_s"] > 0


def test_an_optimizer_step_inside_is_fenced_and_the_save_holds_what_it_was_called_with(tmp_path):
    job = Job(tmp_path / "run")
    with job.session as session:
        session._at.handle.wait(20)
        with session.yielding():
            handle = session.save(1)
            before = job.remembered()
            job.step()
        handle.wait(20)

    assert torch.equal(committed(job).tensor("actor.0.weight"), before["0.weight"])
    assert told(job, "save.fence")[0]["staged_bytes"] > 0


def test_an_engine_that_hangs_costs_no_checkpoint(tmp_path):
    """Holding back ends by its deadline, though the context is still open."""
    job = Job(tmp_path / "run")
    with job.session as session:
        session._at.handle.wait(20)
        with session.yielding(deadline_s=0.05):
            assert session.save(1).wait(20).step == 1

    assert told(job, "save.yielded")[0]["overran"]


def test_a_callable_that_says_so_holds_saves_back(tmp_path):
    busy = threading.Event()
    job = Job(tmp_path / "run", yield_to=busy.is_set)
    with job.session as session:
        session._at.handle.wait(20)
        busy.set()
        handle = session.save(1)
        wait_until(lambda: session._inside().gate.waiting, 20, "the saver to come to the gate")
        assert not handle.done
        busy.clear()
        assert handle.wait(20).step == 1


def test_leaving_waits_for_no_engine(tmp_path):
    busy = threading.Event()
    job = Job(tmp_path / "run", yield_to=busy.is_set)
    with job.session as session:
        session._at.handle.wait(20)
        busy.set()
        session.save(1)

    assert committed(job).latest().step == 1


def test_a_callable_that_fails_fails_the_save_and_not_in_silence(tmp_path):
    failing = threading.Event()

    def ask() -> bool:
        if failing.is_set():
            raise RuntimeError("the engine is gone")
        return False

    job = Job(tmp_path / "run", yield_to=ask)
    with job.session as session:
        session._at.handle.wait(20)
        failing.set()
        with pytest.raises(SaveError, match="the engine is gone"):
            session.save(1).wait(20)
        failing.clear()
        saved(job, 2)

    assert told(job, "save.failed")[0]["stage"] == "yielded"


def test_a_gate_opens_at_the_last_deadline_of_those_who_hold_it_and_never_later():
    clock = itertools.count()
    gate = Gate(now_s=lambda: next(clock) / 100)
    with gate.closed(0.2), gate.closed(0.5):
        waited_s = gate.wait()
    assert 0.4 < waited_s < 0.7
    assert gate.wait() < 0.1


def test_a_callable_that_always_holds_is_passed_after_its_limit_and_again_at_once():
    clock = itertools.count()
    gate = Gate(ask=lambda: True, now_s=lambda: next(clock) / 10, asked_limit_s=3)

    first_s, second_s = gate.wait(), gate.wait()

    assert 2 < first_s < 6 and second_s < 1


# --- host memory ---------------------------------------------------------------------------------


def fenced(job: Job) -> None:
    """A save of step 1 that a fence staged whole."""
    with held_save(job) as handle:
        job.step()
        job.gate.release()
        handle.wait(20)
        job.after_save()


def test_staging_memory_counts_against_the_shared_budget_and_is_let_go_of_on_request(tmp_path):
    budget, seen = SharedBudget(1 << 20), {}
    job = Job(tmp_path / "run", budget=budget)

    def look() -> None:
        seen["kept"] = budget.used_bytes
        with job.session.yielding():
            seen["yielding"] = budget.used_bytes

    job.after_save = look
    fenced(job)

    assert seen["kept"] > 0 and seen["yielding"] == 0 == budget.used_bytes
    assert told(job, "save.yielded")[0]["released_bytes"] == seen["kept"]


def test_leaving_gives_all_memory_back(tmp_path):
    budget = SharedBudget(1 << 20)
    job = Job(tmp_path / "run", budget=budget, staging_bytes=1 << 16, chunk_bytes=1 << 10)
    with job.session:
        assert budget.used_bytes == 1 << 16, "touched beforehand"

    assert budget.used_bytes == 0


def test_a_fence_waits_for_memory_that_the_engine_gives_back(tmp_path):
    """The budget is used up at first; the fence asks again until there is room."""

    class Grudging(SharedBudget):
        refusals = 0

        def take(self, size_bytes: int) -> bool:
            if self.refusals < 3:
                self.refusals += 1
                return False
            return super().take(size_bytes)

    job = Job(tmp_path / "run", budget=Grudging(1 << 20))
    with held_save(job) as handle:
        before = job.remembered()
        job.step()
        job.gate.release()
        handle.wait(20)

    assert torch.equal(committed(job).tensor("actor.0.weight"), before["0.weight"])


def test_memory_that_never_comes_gives_the_save_up_and_training_goes_on(tmp_path):
    job = Job(tmp_path / "run", budget=SharedBudget(0), fence_deadline_s=0.2)
    with held_save(job) as handle:
        job.step()
        job.gate.release()
        with pytest.raises(SaveError, match="no more host memory"):
            handle.wait(20)
        job.session._at.saved = 1

    assert told(job, "save.failed")[0]["stage"] == "fence"


class Broken(SharedBudget):
    """Somebody's budget with a mistake in it."""

    def take(self, size_bytes: int) -> bool:
        raise RuntimeError("the budget is broken")


def test_a_budget_that_fails_fails_the_save_and_not_the_training(tmp_path):
    job = Job(tmp_path / "run", budget=Broken(1 << 30), fence_deadline_s=60)
    with held_save(job) as handle:
        job.step()
        job.gate.release()
        with pytest.raises(SaveError, match=r"budget .* raised RuntimeError .*the budget is broken"):
            handle.wait(20)
        job.session._at.saved = 1

    assert told(job, "save.failed")[0]["stage"] == "fence"


def test_a_block_of_another_size_makes_room_for_one_that_is_needed(tmp_path):
    """Blocks that are kept for reuse must not use up the budget of those that are not there."""
    budget = SharedBudget(4096)
    job = Job(tmp_path / "run", budget=budget)
    with job.session as session:
        pool = session._inside().pool
        small = [pool.take(1024) for _ in range(4)]
        for block in small:
            pool.put(block)
        assert budget.used_bytes == 4096

        large = pool.take(4096)

        assert large is not None and budget.used_bytes == 4096
        pool.put(large)


def test_a_budget_for_eager_staging_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="bounds what fences stage"):
        Session(tmp_path, {}, stage="eager", budget=SharedBudget(1))


# --- tensors that an engine moves ----------------------------------------------------------------


def test_memory_that_was_freed_and_came_back_elsewhere_is_never_written_as_garbage(tmp_path):
    """As sharding wrappers and sleep modes do: resize_(0), and back to the old size before the read."""
    job = Job(tmp_path / "run")
    storage = job.model[2].weight.untyped_storage()
    with held_save(job) as handle:
        address, size = storage.data_ptr(), storage.nbytes()
        storage.resize_(0)
        taken = [torch.empty(size, dtype=torch.uint8) for _ in range(64)]
        storage.resize_(size)
        assert storage.data_ptr() != address and taken
        job.gate.release()
        with pytest.raises(SaveError, match=r"actor\.2\.weight was moved to other memory"):
            handle.wait(20)
        job.session._at.saved = 1


def test_what_is_offloaded_inside_mutating_is_saved_as_it_was(tmp_path):
    job = Job(tmp_path / "run")
    with held_save(job) as handle:
        before = job.remembered()
        with job.session.mutating():
            job.model[2].weight.untyped_storage().resize_(0)
        job.gate.release()
        handle.wait(20)

    assert torch.equal(committed(job).tensor("actor.2.weight"), before["2.weight"])
