"""Trying again: what, how long, and what a repeated create may mean."""

from __future__ import annotations

import random
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from ftckpt.chaos.faults.store import CutRead, Fail, Fault, FaultyStore, Pause, TimeOut
from ftckpt.clock import HandClock
from ftckpt.errors import AccessDenied, AlreadyExists, ObjectNotFound, StoreTimeout, StoreUnavailable
from ftckpt.store import LimitStore, RetryStore
from ftckpt.store.objectstore import memory


class Bench:
    """A memory store that fails by a plan, under retries, on a clock wound by hand."""

    def __init__(self, *plan, deadline_s=60.0):
        self.clock = HandClock()
        self.events = []
        self.faulty = FaultyStore(memory(uuid.uuid4().hex), plan, clock=self.clock)
        self.store = RetryStore(
            self.faulty,
            deadline_s=deadline_s,
            clock=self.clock,
            events=self.events.append,
            rng=random.Random(7),
        )


def test_a_store_that_throttles_a_third_of_the_calls_is_waited_for():
    """Case J9: every call completes, and the retries are counted in events."""
    bench = Bench(Fault(Fail(), chance=0.3, seed=1))

    for number in range(100):
        bench.store.create(f"packs/{number}", b"x")

    assert len(list(bench.store.scan("packs"))) == 100
    assert 20 < len(bench.events) < 80
    first = bench.events[0]
    assert first.name == "store.retry"
    assert first.fields["op"] == "create"
    assert first.fields["error"] == "StoreUnavailable"


def test_waits_grow_and_are_drawn_at_random():
    bench = Bench(Fault(Fail(), nth=1, times=12))

    bench.store.create("a", b"x")

    waits = [event.fields["wait_s"] for event in bench.events]
    assert len(waits) == 12
    assert len(set(waits)) == 12
    assert max(waits[:3]) <= 0.4
    assert 1.0 < max(waits) <= 5.0
    assert sum(waits) == pytest.approx(bench.clock.now_s(), abs=0.1)


def test_one_deadline_holds_for_the_whole_call():
    bench = Bench(Fault(TimeOut("before", after_s=4.0)), deadline_s=20)

    with pytest.raises(StoreTimeout, match="gave up after") as caught:
        bench.store.read("a")

    assert caught.value.tries >= 3
    assert bench.clock.now_s() <= 20 + 4
    assert caught.value.retryable


@pytest.mark.parametrize("error", [AccessDenied("no"), ObjectNotFound("no")])
def test_what_cannot_help_is_not_tried_again(error):
    bench = Bench(Fault(Fail(error=error)))

    with pytest.raises(type(error)):
        bench.store.read("a")

    assert len(bench.faulty.log) == 1
    assert bench.events == []


def test_an_address_that_never_answered_is_given_up_early():
    unreachable = StoreUnavailable("cannot connect", connected=False)
    bench = Bench(Fault(Fail(error=unreachable), nth=1, times=1000))

    with pytest.raises(StoreUnavailable):
        list(bench.store.scan(""))
    early_s = bench.clock.now_s()
    bench.faulty.plan = []
    list(bench.store.scan(""))
    bench.faulty.plan = [Fault(Fail(error=unreachable))]
    with pytest.raises(StoreUnavailable):
        list(bench.store.scan(""))

    assert early_s < 5
    assert 50 < bench.clock.now_s() - early_s <= 60


def test_a_create_whose_answer_was_lost_comes_back_as_exists_and_says_that_it_may_be_ours():
    """The caller reads its nonce back; nothing is hidden from it."""
    bench = Bench(Fault(Fail("after"), op="create", nth=1))

    with pytest.raises(AlreadyExists, match="read it back") as caught:
        bench.store.create("attempts/1", b"nonce")

    assert caught.value.after_unclear is True
    assert bytes(bench.store.read("attempts/1")) == b"nonce"


def test_a_create_that_lost_plainly_says_nothing_of_the_kind():
    bench = Bench()
    bench.store.create("attempts/1", b"theirs")

    with pytest.raises(AlreadyExists) as caught:
        bench.store.create("attempts/1", b"ours")

    assert "after_unclear" not in caught.value.facts


def test_a_body_that_ends_early_is_read_again():
    """Case J12, the loud half: 20 % of the reads are cut, none arrives short."""
    bench = Bench(Fault(CutRead(0.3), op="read", chance=0.2, seed=3))
    body = bytes(range(256))
    bench.store.create("a", body)

    assert all(bytes(bench.store.read("a")) == body for _ in range(100))
    assert len(bench.events) > 10


def test_no_more_calls_at_once_than_the_limit():
    pause = Pause()
    faulty = FaultyStore(memory(uuid.uuid4().hex), [Fault(pause, op="create")])
    store = LimitStore(faulty, max_calls=3)
    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(store.create, f"a/{number}", b"x") for number in range(8)]
        assert pause.arrived.wait(10)
        settled = threading.Event()
        settled.wait(0.2)  # time in which a fourth call would have arrived

        assert len(faulty.log) <= 3
        pause.release()
        for each in done:
            each.result(10)

    assert len(list(store.scan("a"))) == 8
