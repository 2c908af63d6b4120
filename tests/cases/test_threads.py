"""Kind C: a thread of the saver that dies is noticed, its save fails by name, and the next one is good."""

from __future__ import annotations

import threading

import pytest
import torch

import ftckpt
from ftckpt import codec
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore, Pause
from ftckpt.chaos.faults.threads import kill_threads, threads_named
from ftckpt.errors import SaveError, SaveFailed
from ftckpt.store import open_store
from ftckpt.workers import LOOK_EVERY_S, Workers
from ftckpt.writer import WriteSettings
from tests.session.toy import Heard
from tests.support.procs import wait_until

CHUNK = 1 << 17


def state() -> dict:
    return {"t": torch.arange(64 * CHUNK // 8)}


def in_packs(step: int, do, **options) -> Fault:
    return Fault(do, op="create", prefix=f"packs/000001/{step:012d}", **options)


def session(tmp_path, values, plan=(), heard=None, **options):
    """Chunks and packs are small, so that many threads have much to do."""
    store = FaultyStore(open_store(tmp_path / "run"), plan)
    events = Heard() if heard is None else heard
    return ftckpt.Session(
        "ignored", values, store=store, codec="raw", chunk_bytes=CHUNK, events=events, **options
    )


def next_save_is_good(tmp_path, running, values, step=2):
    values["t"] += 1
    assert running.save(step).wait(20).step == step
    found = {"t": torch.zeros_like(values["t"])}
    ftckpt.restore(tmp_path / "run", found)
    assert torch.equal(found["t"], values["t"])


@pytest.mark.parametrize(
    "error", [MemoryError("injected"), SystemExit(3), KeyboardInterrupt(), RuntimeError("injected")]
)
def test_whatever_an_encode_thread_raises_fails_that_save_only(tmp_path, error, monkeypatch):
    """C: MemoryError, an exit and an interrupt are no reason to hang, and no reason to end the job."""
    values, heard, encode = state(), Heard(), codec.encode
    faults = iter([error])

    def encode_badly(*args):
        for fault in faults:
            raise fault
        return encode(*args)

    with session(tmp_path, values, heard=heard) as running:
        wait_until(lambda: heard.named("save.committed"), 20)
        monkeypatch.setattr(codec, "encode", encode_badly)
        values["t"] += 1
        with pytest.raises((SaveError, type(error))):
            running.save(1).wait(20)
        next_save_is_good(tmp_path, running, values)
    assert [event["step"] for event in heard.named("save.failed")] == [1]


def test_threads_are_looked_at_more_often_than_every_five_seconds():
    assert LOOK_EVERY_S <= 5 / 2


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)  # that is what is done here
@pytest.mark.parametrize("name", ["ftckpt-encode", "ftckpt-put"])
def test_threads_that_die_between_two_calls_are_noticed_told_at_the_boundary_and_replaced(tmp_path, name):
    """C: they wait for work when they are hit, so that the work they are given next is lost."""
    values, heard, pause = state(), Heard(), Pause()
    with session(tmp_path, values, [in_packs(1, pause, nth=1)], heard) as running:
        wait_until(lambda: running._entered.engine.pending == 0, 20)
        running._entered.engine._settings = WriteSettings(
            codec=running.settings.codec, pack_bytes=CHUNK, max_pack_bytes=CHUNK, packs_in_flight=2
        )
        values["t"] += 1
        handle = running.save(1)
        assert pause.arrived.wait(20)
        wait_until(lambda: len(threads_named(name)) == 2, 20)
        hit = kill_threads(name)
        pause.release()
        with pytest.raises((SaveFailed, SystemExit)):
            handle.wait(20)
        wait_until(lambda: not any(thread.is_alive() for thread in hit), 20)
        running._boundary()
        assert [told["step"] for told in heard.named("session.save_failed")] == [1]
        next_save_is_good(tmp_path, running, values)


def test_the_save_thread_that_dies_while_it_waits_loses_no_save(tmp_path):
    """C: the next save begins on a thread of its own, and nobody waits for the dead one."""
    values, heard = state(), Heard()
    with session(tmp_path, values, heard=heard) as running:
        wait_until(lambda: running._entered.engine.pending == 0, 20)
        (first,) = kill_threads("ftckpt-save")
        next_save_is_good(tmp_path, running, values, step=1)
        wait_until(lambda: not first.is_alive(), 20)
        assert len(threads_named("ftckpt-save")) == 1
    assert not threads_named("ftckpt-save")
    assert heard.named("save.thread_died") and not heard.named("save.failed")


def test_the_save_thread_that_dies_in_a_save_is_replaced_and_the_boundary_tells_of_it(tmp_path):
    """C: the listener of events raises where nothing may; the handle, the boundary and close go on."""
    values, heard = state(), Heard()

    def bad_listener(event):
        heard(event)
        if event.name == "save.failed":
            raise ZeroDivisionError("a listener that breaks its promise")

    full = Fail(error=OSError("injected: nothing of ours"))
    store = FaultyStore(open_store(tmp_path / "run"), [in_packs(1, full)])
    with ftckpt.Session("ignored", values, store=store, save_every=1, events=bad_listener) as running:
        wait_until(lambda: heard.named("save.committed"), 20)
        for step in running.steps(until=3):
            values["t"] += 1
            if step == 2:
                wait_until(lambda: heard.named("save.thread_died"), 20)
    assert "injected" in heard.named("session.save_failed")[0]["error"]
    assert heard.named("save.committed")[-1]["step"] == 3


def test_leaving_after_the_save_thread_died_says_what_was_lost(tmp_path):
    """C7: close neither hangs nor takes a save for good that nobody made."""
    values, heard, pause = state(), Heard(), Pause()

    with pytest.raises((SaveError, SystemExit)):  # noqa: SIM117
        with session(tmp_path, values, [in_packs(1, pause, nth=1)], heard) as running:
            wait_until(lambda: running._entered.engine.pending == 0, 20)
            values["t"] += 1
            running.save(1)
            assert pause.arrived.wait(20)
            kill_threads("ftckpt-save")
            threading.Timer(0.3, pause.release).start()
    assert not threads_named("ftckpt-save")
    with ftckpt.open(tmp_path / "run") as found:
        assert found.verify() == []


def test_no_thread_is_left_behind_by_failed_saves(tmp_path):
    """L3: twenty saves that fail, and one that does not: as many threads as before."""
    values, heard = state(), Heard()
    store = FaultyStore(open_store(tmp_path / "run"))
    with ftckpt.Session(
        "ignored", values, store=store, events=heard, chunk_bytes=CHUNK, keep=None
    ) as running:
        wait_until(lambda: heard.named("save.committed"), 20)
        before = len(threading.enumerate())
        for step in range(1, 21):
            store.plan = [in_packs(step, Fail(error=OSError("injected")))]
            values["t"] += 1
            with pytest.raises(SaveError):
                running.save(step).wait(20)
        next_save_is_good(tmp_path, running, values, step=21)
        assert len(threading.enumerate()) <= before


def test_results_of_calls_come_as_they_are():
    """A time-out of the call's own is not taken for a thread that is late."""

    def late():
        raise TimeoutError("the call's own")

    with Workers(2, "some") as workers:
        assert workers.result(workers.submit(pow, 2, 5)) == 32
        with pytest.raises(TimeoutError, match="the call's own"):
            workers.result(workers.submit(late))
