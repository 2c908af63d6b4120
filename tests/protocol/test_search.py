"""Random searches around the schedules of the protocol: every seed is one interleaving.

Jobs, resumers and collectors run together; creates are delayed, refused, or lose their answers, and
some actors die. Afterwards three things must hold, whatever happened:

* what was acknowledged is on the lineage, or was collected there by the policy, or lies beyond where
  somebody rewound the run on purpose;
* every readable commit, on the lineage or off it, reads back whole, as the state of its own step;
* the run goes on: the next start finds the newest commit, and a collection completes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from ftckpt.attempts import look
from ftckpt.clock import Clock, HandClock
from ftckpt.errors import Fenced, FtckptError, GcStopped, SaveError, StoreError
from ftckpt.gc import collect
from ftckpt.lineage import reach
from ftckpt.manifest import Commit, Position, Ref
from ftckpt.retention import Keep
from ftckpt.store.api import ObjectStore
from tests.protocol.world import Saver, job, read_all, run_of, start_job, state_at
from tests.support.stores import Sim

FATES = {"lose": 0.06, "delay": 0.06, "fail": 0.04}
SEEDS = 24
PARTS = 4
"""Seeds are run in parts, so that two processes share them."""


@dataclass(slots=True)
class Witness:
    """What the actors were told, to compare with what is there in the end."""

    acked: list[Position] = field(default_factory=list)

    def __call__(self, commit: Commit) -> None:
        self.acked.append(commit.at)


def check(sim: Sim, witness: Witness, seed: int, salt_of: Callable[[Position], str] = lambda _at: "") -> None:
    """The three promises, after all actors ended and all delayed creates landed."""
    told = f"seed {seed}\n{sim.story()}"
    seen = look(sim.store)
    bounds = reach(seen.view)
    for at in witness.acked:
        bound = bounds.get(at.attempt, -1)
        assert at in seen.view.commits - seen.view.aborted, f"{at} was acknowledged, {told}"
        assert bound is None or at.step <= bound, f"{at} was acknowledged and is on no lineage, {told}"
    for at in seen.view.readable:
        assert read_all(sim.store, seen.commits[at]) == state_at(at.step, salt_of(at)), f"{at}, {told}"
    newest = seen.lineage[0].step
    assert start_job(sim.store).start.parent.step == newest, told
    collect(sim.store, Keep(last=1), intent_id="last", abandoned=True)
    collect(sim.store, Keep(last=1), intent_id="very-last", abandoned=True)
    after = look(sim.store)
    assert after.lineage[0].step == newest, told
    assert read_all(sim.store, after.commits[after.lineage[0]]) == state_at(
        newest, salt_of(after.lineage[0])
    ), told


def collector(
    name: str, keep: Keep, times: int, *, abandoned: bool = False
) -> Callable[[ObjectStore, Clock], None]:
    def body(store: ObjectStore, clock: Clock) -> None:
        for number in range(times):
            try:
                collect(store, keep, intent_id=f"{name}-{number}", abandoned=abandoned)
            except (GcStopped, StoreError):
                continue

    return body


def going_on(attempt: int, parent: Ref, steps: range, witness: Witness, **who: object) -> Callable[..., None]:
    """A member of an attempt that has begun; it stops when it is fenced."""

    def body(store: ObjectStore, clock: Clock) -> None:
        with Saver(store, clock, attempt, parent, on_ack=witness, **who) as saver:
            for step in steps:
                try:
                    saver.save(step)
                except Fenced:
                    return
                except (SaveError, StoreError):
                    continue

    return body


def resumer(host: str, steps: int, witness: Witness, step: int | None = None) -> Callable[..., None]:
    def body(store: ObjectStore, clock: Clock) -> None:
        try:
            job(store, clock, steps, host=host, step=step, acked=witness)
        except FtckptError:
            return

    return body


@pytest.mark.parametrize("part", range(PARTS))
def test_two_resumes_a_living_job_and_a_collector(part):
    """Schedules 1, 2, 8 and 10."""
    for seed in range(part, SEEDS, PARTS):
        sim, witness = Sim(), Witness()
        _, parent = run_of(sim.store, HandClock(), 0, 1, 2)
        sim.actor("job", going_on(1, parent, range(3, 6), witness))
        sim.actor("a", resumer("a", 2, witness))
        sim.actor("b", resumer("b", 2, witness))
        sim.actor("gc", collector("gc", Keep(last=1), 2, abandoned=seed % 3 == 0))

        sim.explore(seed, fates=FATES, mortal=("a", "b", "gc", "job"))

        check(sim, witness, seed)


@pytest.mark.parametrize("part", range(PARTS))
def test_two_groups_whose_lives_end_and_begin_again(part):
    """Schedules 3, 4, 5, 6 and 16: lost commits, deaths, and a second life of the whole attempt that
    trained otherwise. A step is of one life or of the other, never of both.
    """
    for seed in range(part, SEEDS, PARTS):
        sim, witness = Sim(), Witness()
        _, parent = run_of(sim.store, HandClock(), 0)
        for group in (0, 1):
            sim.actor(f"a{group}", going_on(1, parent, range(1, 4), witness, group=group, groups=2))
        sim.actor("gc", collector("gc", Keep(last=1), 2))
        sim.explore(seed, fates=FATES, mortal=("a0", "a1", "gc"))
        first = look(sim.store)

        newest = first.refs[first.lineage[0]]
        for group in (0, 1):
            second_life = going_on(1, newest, range(4, 6), witness, group=group, groups=2, life="b", salt="b")
            sim.actor(f"b{group}", second_life)
        sim.actor("gc2", collector("gc2", Keep(last=2), 1))
        sim.explore(seed + 1000, fates=FATES)

        check(sim, witness, seed, lambda at: "b" if at.step >= 4 else "")


@pytest.mark.parametrize("part", range(PARTS))
def test_two_lives_of_one_attempt_at_the_same_time(part):
    """Schedule 3: the old life is slow, not dead, and both save the same steps with different bytes."""
    for seed in range(part, SEEDS, PARTS):
        sim, witness = Sim(), Witness()
        _, parent = run_of(sim.store, HandClock(), 0)
        for life in ("a", "b"):
            sim.actor(life, going_on(1, parent, range(1, 4), witness, life=life, salt=life))
        sim.actor("gc", collector("gc", Keep(last=2), 2))

        sim.explore(seed, fates=FATES)

        seen = look(sim.store)
        for at in seen.view.readable - {Position(0, 1)}:
            state = read_all(sim.store, seen.commits[at])
            assert state in (state_at(at.step, "a"), state_at(at.step, "b")), f"seed {seed}\n{sim.story()}"


@pytest.mark.parametrize("part", range(PARTS))
def test_two_collectors_with_different_views_and_a_rewind(part):
    """Schedules 7, 8 and 9."""
    for seed in range(part, SEEDS, PARTS):
        sim, witness = Sim(), Witness()
        _, parent = run_of(sim.store, HandClock(), 0, 1, 2, 3)
        sim.actor("job", going_on(1, parent, range(4, 6), Witness()))
        sim.actor("rewind", resumer("rewind", 3, witness, step=seed % 4))
        sim.actor("c1", collector("c1", Keep(last=1), 2))
        sim.actor("c2", collector("c2", Keep(last=2, every=2), 2, abandoned=seed % 2 == 0))

        sim.explore(seed, fates=FATES, mortal=("c1", "c2", "rewind"))

        check(sim, witness, seed)
