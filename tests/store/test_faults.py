"""The breaking wrapper itself: a test tool that lies is worse than none."""

from __future__ import annotations

import subprocess
import sys
import threading
import uuid

import pytest

from ftckpt.chaos.faults.store import (
    Call,
    Corrupt,
    Crash,
    CutCreate,
    CutRead,
    Delay,
    Die,
    Fail,
    Fault,
    FaultyStore,
    Lose,
    Pause,
    Run,
    TimeOut,
)
from ftckpt.clock import HandClock
from ftckpt.errors import ObjectNotFound, StoreTimeout, StoreUnavailable, UnsafeStore
from ftckpt.store import probe
from ftckpt.store.objectstore import memory
from tests.support.procs import ROOT


def faulty(*plan, clock=None):
    return FaultyStore(memory(uuid.uuid4().hex), plan, clock=clock)


def work(store):
    store.create("packs/1", b"pack")
    store.create("commits/1", b"commit")
    list(store.scan("commits"))
    store.read("packs/1")
    store.delete(["packs/1", "commits/1"])


def test_the_log_holds_every_call_in_order():
    store = faulty()

    work(store)

    assert store.log == (
        Call(1, "create", "packs/1"),
        Call(2, "create", "commits/1"),
        Call(3, "scan", "commits"),
        Call(4, "read", "packs/1"),
        Call(5, "delete", "packs/1"),
        Call(6, "delete", "commits/1"),
    )
    assert all(call.body is None for call in store.log)


@pytest.mark.parametrize("when", ["before", "after"])
def test_dying_at_every_call_leaves_exactly_the_effects_before_it(when):
    counted = faulty()
    work(counted)
    effects = []

    for nth in range(1, len(counted.log) + 1):
        store = faulty(Fault(Die(when), nth=nth))
        with pytest.raises(Crash):
            work(store)
        assert len(store.log) == nth
        effects.append([info.key for info in store.inner.scan("")])

    both = ["commits/1", "packs/1"]
    if when == "before":
        assert effects == [[], ["packs/1"], both, both, both, ["commits/1"]]
    else:
        assert effects == [["packs/1"], both, both, both, ["commits/1"], []]


def test_a_crash_is_not_an_exception_that_error_handling_swallows():
    assert not issubclass(Crash, Exception)


def test_a_fault_meets_only_the_calls_it_names():
    store = faulty(Fault(Fail(), op="create", prefix="commits/", nth=2, times=2))

    outcomes = []
    for key in ("packs/1", "commits/1", "commits/2", "packs/2", "commits/3", "commits/4"):
        try:
            store.create(key, b"x")
            outcomes.append("ok")
        except StoreUnavailable:
            outcomes.append("failed")

    assert outcomes == ["ok", "ok", "failed", "ok", "failed", "ok"]


def test_a_chance_is_the_same_each_time_and_about_as_often_as_said():
    def pattern(seed):
        store = faulty(Fault(Fail(), chance=0.2, seed=seed))
        outcome = []
        for number in range(400):
            try:
                store.create(f"a/{number}", b"")
                outcome.append(True)
            except StoreUnavailable:
                outcome.append(False)
        return outcome

    assert pattern(1) == pattern(1) != pattern(2)
    assert 50 < pattern(1).count(False) < 110


def test_a_lost_answer_has_taken_effect_and_a_failed_call_has_not():
    store = faulty(Fault(Fail("before"), nth=1), Fault(Fail("after"), nth=2), Fault(TimeOut(), nth=3))

    for key, error in (("a", StoreUnavailable), ("b", StoreUnavailable), ("c", StoreTimeout)):
        with pytest.raises(error):
            store.create(key, b"x")

    assert [info.key for info in store.scan("")] == ["b", "c"]


def test_a_store_that_lies_loses_cuts_and_corrupts():
    """Case J7: a create that returned proves nothing until the object is confirmed."""
    body = b"0123456789"
    store = faulty(
        Fault(Lose(), prefix="lost"),
        Fault(CutCreate(0.6), prefix="cut"),
        Fault(Corrupt(at=-1), op="create", prefix="wrong"),
    )

    for key in ("lost", "cut", "wrong", "good"):
        store.create(key, body)

    with pytest.raises(ObjectNotFound):
        store.size("lost")
    assert store.size("cut") == 6
    assert store.read("wrong") == b"0123456788"
    assert store.read("good") == body


def test_a_read_is_cut_with_an_error_or_in_silence_or_has_a_wrong_byte():
    """Case J12: the silent half must be caught by whoever knows length and digest."""
    store = faulty()
    store.create("a", b"0123456789")
    store.plan = [
        Fault(CutRead(0.5), op="read", nth=1),
        Fault(CutRead(0.3, silent=True), op="read", nth=2),
        Fault(Corrupt(at=2, mask=0xFF), op="read", nth=3),
    ]

    with pytest.raises(StoreUnavailable, match="5 of 10"):
        store.read("a")
    assert store.read("a") == b"012"
    assert store.read("a") == b"01\xcd3456789"
    assert store.read("a") == b"0123456789"


def test_faults_that_meet_one_call_are_nested_in_the_order_of_the_plan():
    seen = []
    clock = HandClock()
    store = faulty(
        Fault(Run(lambda call: seen.append(("first", clock.now_s())))),
        Fault(Delay(3.0)),
        Fault(Run(lambda call: seen.append(("third", clock.now_s())))),
        clock=clock,
    )

    store.create("a", b"x")

    assert seen == [("first", 0.0), ("third", 3.0)]


def test_a_paused_call_waits_until_it_is_released():
    pause = Pause("before")
    store = faulty(Fault(pause, op="create", prefix="slow"))
    writer = threading.Thread(target=store.create, args=("slow", b"x"))
    writer.start()
    assert pause.arrived.wait(10)

    store.create("quick", b"x")
    assert [info.key for info in store.scan("")] == ["quick"]
    pause.release()
    writer.join(10)

    assert [info.key for info in store.scan("")] == ["quick", "slow"]


KILLED = """
import sys
from ftckpt.chaos.faults.store import Fault, FaultyStore, Kill
from ftckpt.store import LocalStore
store = FaultyStore(LocalStore(sys.argv[1]), [Fault(Kill(sys.argv[2]), nth=2)])
store.create("a", b"x")
store.create("b", b"x")
print("survived")
"""


@pytest.mark.parametrize("when, left", [("before", ["a"]), ("after", ["a", "b"])])
def test_a_kill_is_a_real_one(when, left, tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), when], capture_output=True, cwd=ROOT, check=False
    )

    assert (run.returncode, run.stdout) == (-9, b"")
    assert sorted(path.name for path in tmp_path.iterdir()) == left


class CheckThenPut:
    """What fsspec's local file system does: a look, a moment, a write. Schedule 17 of the protocol."""

    conditional_create = True

    def __init__(self):
        self._inner = {}
        self.uri = "check-then-put://"
        self._moment = threading.Barrier(8)

    def create(self, key, body):
        present = key in self._inner
        self._moment.wait(10)
        if not present:
            self._inner[key] = bytes(body)

    def read(self, key, at=None):
        return self._inner[key]

    def delete(self, keys):
        for key in keys:
            self._inner.pop(key, None)


def test_the_probe_sees_a_store_that_looks_and_then_writes():
    store = CheckThenPut()

    with pytest.raises(UnsafeStore, match="8 of 8 creators"):
        probe(store)

    assert store._inner == {}


def test_the_probe_sees_a_store_that_lies_about_a_create():
    with pytest.raises((UnsafeStore, ObjectNotFound)):
        probe(faulty(Fault(Lose(), op="create")))


def test_the_probe_sees_a_listing_that_is_behind():
    store = faulty()
    stale = store.inner.scan
    store.inner.scan = lambda prefix: iter([])

    with pytest.raises(UnsafeStore, match="listed"):
        probe(store)

    store.inner.scan = stale
    assert list(store.scan("")) == []


def test_the_probe_is_not_misled_by_an_answer_that_got_lost():
    """A winner whose answer was lost is told "exists" when it tries again; that is no second winner."""
    for seed in range(5):
        probe(faulty(Fault(Fail("after"), op="create", chance=0.3, seed=seed)), rounds=2)
