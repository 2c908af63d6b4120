"""Kind B: what is stored is the state at the instant of the call, whatever happens afterwards."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

import ftckpt
from ftckpt.chaos.faults.store import Fault, FaultyStore, Pause
from ftckpt.store import open_store
from tests.session.toy import Heard, Toy, raw

quiet = partial(ftckpt.Session, "ignored", events=Heard())


def slow(uri, pause) -> FaultyStore:
    """A store on which the first pack of step 1 waits for ``pause.release()``."""
    return FaultyStore(
        open_store(uri), [Fault(pause, op="create", prefix="packs/000001/000000000001", nth=1)]
    )


def test_nothing_that_the_trainer_does_after_the_call_changes_what_is_stored(tmp_path):
    """B1: parameters, moments, plain numbers, a list, an array and a buffer are overwritten in place
    while the store has not taken a byte yet."""
    toy, pause = Toy(), Pause()
    toy.train(1)
    with quiet(toy.state, store=slow(tmp_path / "run", pause)) as session:
        handle = session.save(1)
        at_the_call = {k: v for k, v in toy.bits().items() if k != "rng"}
        assert pause.arrived.wait(20)
        for number in range(2, 5):
            toy.train(number)
        with torch.no_grad():
            for tensor in toy.tensors().values():
                tensor.fill_(7)
        toy.state["buffer"]["marks"][:] = np.nan
        toy.state["buffer"]["log"].clear()
        toy.cursor.order.reverse()
        toy.optim.param_groups[0]["lr"] = 99.0
        pause.release()
        handle.wait(20)

    found = Toy(seed=5)
    ftckpt.restore(tmp_path / "run", found.state, step=1)

    assert {k: v for k, v in found.bits().items() if k != "rng"} == at_the_call


def test_memory_of_one_save_is_not_used_again_before_it_is_written(tmp_path):
    """B2: A is all ones, and B, begun while A waits for the store, is all twos."""
    pause, state = Pause(), {"t": torch.ones(4096), "n": {"number": 1}}
    with quiet(state, store=slow(tmp_path / "run", pause)) as session:
        first = session.save(1)
        assert pause.arrived.wait(20)
        state["t"] = torch.full((4096,), 2.0)
        state["n"] = {"number": 2}
        others = [torch.full((4096,), 3.0) for _ in range(50)]
        second = session.save(2)
        pause.release()
        first.wait(20)
        second.wait(20)

    for step in (1, 2):
        found = {"t": torch.zeros(4096), "n": {"number": 0}}
        ftckpt.restore(tmp_path / "run", found, step=step)
        assert raw(found["t"]) == raw(torch.full((4096,), float(step)))
        assert found["n"] == {"number": step}
    assert len(others) == 50


def test_a_step_that_is_still_being_written_is_not_there_yet(tmp_path):
    """B3: a reader sees the step before it, or a clear refusal; never half of it."""
    toy, pause = Toy(), Pause()
    with quiet(toy.state, store=slow(tmp_path / "run", pause)) as session:
        session.save(1)
        assert pause.arrived.wait(20)
        with ftckpt.open(tmp_path / "run") as run:
            assert run.latest().step == 0
            with pytest.raises(LookupError, match="step 1 of"):
                run.commit(1)
        second = session.save(2)
        pause.release()
        assert second.wait(20).step == 2


def test_a_save_returns_while_the_store_has_not_taken_a_byte(tmp_path):
    """B: ``save`` never waits for the store, and its handle says that it is under way."""
    toy, pause = Toy(), Pause()
    with quiet(toy.state, store=slow(tmp_path / "run", pause)) as session:
        handle = session.save(1)
        assert pause.arrived.wait(20) and not handle.done
        with pytest.raises(TimeoutError, match="goes on in the background"):
            handle.wait(0.01)
        pause.release()
        assert handle.wait(20).step == 1 and handle.done and handle.error is None


def test_what_was_restored_shares_no_memory_with_the_run_or_another_restore(tmp_path):
    toy = Toy()
    with quiet(toy.state, store=open_store(tmp_path / "run")):
        pass
    one, two = Toy(seed=1), Toy(seed=2)
    ftckpt.restore(tmp_path / "run", one.state)
    ftckpt.restore(tmp_path / "run", two.state)
    wanted = two.bits()

    with torch.no_grad():
        for tensor in one.tensors().values():
            tensor.zero_()
    for path in (tmp_path / "run").rglob("packs/*/*/*"):
        path.write_bytes(b"\0" * path.stat().st_size)

    assert two.bits() == wanted
