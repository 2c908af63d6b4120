"""Must hold 1: whatever call of a save the process dies at, the old step or the new one is there.

The work is all that a job does around a step: begin an attempt, save the next step (reusing what did
not change), collect. It runs through the retrying store over a store that counts calls; at the n-th
one the process dies before it, dies after it, or loses the answer. Then a new life looks, reads, and
does the work to its end.

In memory every call is visited (of the probe's, which race, some). On disk and on S3 the calls that change something are: a death at
any other call leaves the objects of the change before it.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from ftckpt.attempts import choose, claim, find_run, look, pin, start
from ftckpt.begin import release_older_pins
from ftckpt.chaos.faults.store import Call, Crash, Fault, FaultyStore, Proceed
from ftckpt.clock import Clock, HandClock
from ftckpt.errors import StoreTimeout
from ftckpt.events import silent
from ftckpt.gc import collect
from ftckpt.lineage import orphans
from ftckpt.manifest import Start
from ftckpt.retention import Keep
from ftckpt.store import objectstore
from ftckpt.store.api import ObjectStore
from ftckpt.store.local import LocalStore
from ftckpt.store.opening import open_store
from ftckpt.store.retry import RetryStore
from tests.protocol.world import Saver, read_all, run_of, start_job, state_at
from tests.support.stores import Sim

How = Literal["before", "after", "lost"]
LIVES = 6
each_way = pytest.mark.parametrize("how", ["before", "after", "lost"])


class Meet:
    """What happens at the ``nth`` call that counts. Once the process died, it calls nothing more."""

    def __init__(self, nth: int, how: How, counts: Callable[[Call], bool]) -> None:
        self._nth, self._how, self._counts = nth, how, counts
        self._lock = threading.Lock()
        self._seen = 0
        self.met: Call | None = None

    def around(self, call: Call, proceed: Proceed, clock: Clock) -> Any:
        with self._lock:
            if self.met is not None and self._how != "lost":
                raise Crash("the process is dead")
            self._seen += self._counts(call)
            if not self._counts(call) or self._seen != self._nth:
                here = False
            else:
                here, self.met = True, call
        if here and self._how == "before":
            raise Crash(f"died before {call}")
        result = proceed(call)
        if here and self._how == "after":
            raise Crash(f"died after {call}")
        if here:
            raise StoreTimeout(f"{call.op} {call.key}: the answer was lost", op=call.op, key=call.key)
        return result


def every_call(call: Call) -> bool:
    return not call.key.startswith("probes")


def every_probe(call: Call) -> bool:
    return call.key.startswith("probes")


def every_change(call: Call) -> bool:
    return call.op in ("create", "delete") and every_call(call)


def work(store: ObjectStore, begin: Callable[[ObjectStore], Start] = lambda s: start_job(s).start) -> int:
    """Begin, save the next step, collect. The step."""
    start = begin(store)
    parent, attempt = start.parent, start.attempt
    with Saver(store, HandClock(), attempt, parent, life=f"{attempt:x}") as saver:
        saver.save(parent.step + 1)
    collect(store, Keep(last=1), intent_id=f"gc-{attempt}")
    return parent.step + 1


def begin_unprobed(store: ObjectStore) -> Start:
    """What ``begin`` does, without the racing probe: some S3 servers hold racing creators up for a
    second. The probe's own calls are visited in memory.
    """
    find_run(store)
    taken = look(store).view.newest_claim
    mine = claim(store, nonce=f"n{taken}", host="h", pid=1, command=("train",), cwd="/", groups=1, nproc=1)
    seen = look(store)
    parent = choose(seen, store.uri)
    assert pin(store, f"start-{mine.attempt}", parent.at, "start", "h", by_attempt=mine.attempt)
    begun = start(store, mine, parent)
    release_older_pins(store, mine.attempt)
    return begun


def work_until(inner: ObjectStore, meet: Meet, *begin: Callable[[ObjectStore], Start]) -> int | None:
    """The work with that fault in its way; ``None`` when it died of it."""
    faulty = FaultyStore(inner, [Fault(meet)])
    try:
        return work(RetryStore(faulty, deadline_s=30.0, clock=HandClock(), events=silent), *begin)
    except Crash:
        return None


def check(store: ObjectStore, allowed: set[int], told: str) -> int:
    """The newest readable step is one of ``allowed``, whatever is offered is whole, nothing is left over."""
    seen = look(store)
    newest = seen.lineage[0].step
    assert newest in allowed, told
    assert not orphans(seen.view), told
    for at in seen.lineage:
        assert read_all(store, seen.commits[at]) == state_at(at.step), f"{at}, {told}"
    return newest


@pytest.fixture(scope="module")
def base() -> dict[str, bytes]:
    """A run whose first attempt saved steps 0 to 2."""
    sim = Sim()
    run_of(sim.store, HandClock(), 0, 1, 2)
    return sim.objects


@each_way
def test_in_memory_at_every_call(how, base):
    points = 0
    for nth in itertools.count(1):
        store = objectstore.memory(f"crash-{how}-{nth}")
        for key, body in base.items():
            store.create(key, body)
        meet = Meet(nth, how, every_call)

        done = work_until(store, meet)
        told = f"call {nth}, {how}: {meet.met}"
        newest = check(store, {2, 3}, told)
        if done is not None:
            assert done == newest == 3, told
        assert work(store, begin_unprobed) == newest + 1, told
        assert check(store, {newest + 1}, told) == newest + 1
        if meet.met is None:
            break
        points += 1

    assert points > 60


@pytest.mark.parametrize("nth", [1, 9, 24, 28, 33])
@each_way
def test_in_memory_within_the_probe(how, nth, base):
    """Its objects mean nothing to anybody: a death among them costs nothing."""
    store = objectstore.memory(f"probe-{how}-{nth}")
    for key, body in base.items():
        store.create(key, body)
    meet = Meet(nth, how, every_probe)

    done = work_until(store, meet)

    assert meet.met is not None
    assert check(store, {3 if how == "lost" else 2}, str(meet.met)) == (done or 2)
    assert work(store) == (done or 2) + 1


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one: thousands of syncs to a disk are no part of these tests."""
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir=shm, prefix="ftckpt-test-") as name:
        yield Path(name)


@each_way
def test_on_disk_at_every_change(how, base, folder):
    template = LocalStore(folder / "template")
    for key, body in base.items():
        template.create(key, body)
    points = 0
    for nth in itertools.count(1):
        shutil.copytree(folder / "template", folder / f"run-{nth}")
        store = LocalStore(folder / f"run-{nth}")
        meet = Meet(nth, how, every_change)

        done = work_until(store, meet)
        told = f"change {nth}, {how}: {meet.met}"
        newest = check(store, {2, 3}, told)
        if done is not None:
            assert done == newest == 3, told
        fresh = LocalStore(folder / f"run-{nth}")
        assert work(fresh) == newest + 1, told
        assert check(fresh, {newest + 1}, told) == newest + 1
        if meet.met is None:
            break
        points += 1

    assert points > 12


@each_way
def test_on_s3_at_every_change(how, s3, base):
    """A run lives through several of its crashes: each next life begins where the last one died."""
    points = 0
    for nth in itertools.count(1):
        if nth % LIVES == 1:
            store = open_store(s3.uri(f"crash-{how}-{nth}"))
            for key, body in base.items():
                store.create(key, body)
            newest = 2
        meet = Meet(nth, how, every_change)

        done = work_until(store, meet, begin_unprobed)

        told = f"change {nth}, {how}: {meet.met}"
        before, newest = newest, check(store, {newest, newest + 1}, told)
        if done is not None:
            assert done == newest == before + 1, told
        if meet.met is None:
            break
        points += 1

    assert points > 12
    assert work(store, begin_unprobed) == newest + 1
