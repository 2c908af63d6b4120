"""Several machines: every tier has only its own machine's shares, and the far store settles the step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest

from ftckpt import layout
from ftckpt.attempts import look
from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore
from ftckpt.clock import HandClock, SystemClock
from ftckpt.commit import Patience, read_commit
from ftckpt.errors import SaveError
from ftckpt.gc import owed
from ftckpt.manifest import FORMAT, Position, Saving, encode
from ftckpt.retention import Keep
from ftckpt.session.tiered import TierJournal
from ftckpt.tiers import mirror
from ftckpt.writer import SaveEngine, SaveHandle, SaveJob
from tests.protocol.world import SETTINGS, expected, staged, start_job, state_at, writer
from tests.support.procs import wait_until
from tests.support.stores import Sim
from tests.tiers.world import Near, agent, check_far, packs_of

PATIENT = replace(SETTINGS, patience=Patience(deadline_s=30.0, takeover_s=5.0, poll_s=0.01, max_poll_s=0.05))
WRITERS = [writer(0), writer(1)]


class Machines:
    """Two machines with a tier and an agent each, and a saver of one group on each."""

    def __init__(self) -> None:
        self.far = Sim().store
        self.begun = start_job(self.far)
        self.nears = [Near(Sim().store), Near(Sim().store)]
        self.agents = [agent(near, self.far) for near in self.nears]
        for near, me in zip(self.nears, WRITERS, strict=True):
            mirror(self.far, near.store)
            near.alive.add(str(me))
        self.engines = [
            SaveEngine(
                near.store,
                me,
                parent=self.begun.start.parent,
                settings=PATIENT,
                clock=SystemClock(),
                ledger=self.far,
                journal=TierJournal(near.store, me, shared=False, keep=Keep(last=None)),
            )
            for near, me in zip(self.nears, WRITERS, strict=True)
        ]

    def submit(self, step: int) -> list[SaveHandle]:
        save = expected(Position(step, 1), None, WRITERS)
        return [
            engine.submit(SaveJob(save, staged(state_at(step), group, 2)))
            for group, engine in enumerate(self.engines)
        ]

    def drain_until(self, handles: list[SaveHandle]) -> None:
        def ended() -> bool:
            for one in self.agents:
                one.drain()
            return all(handle.done for handle in handles)

        wait_until(ended, 30.0, "the save to be settled in the far store")


@pytest.fixture
def machines() -> Iterator[Machines]:
    with running() as made:
        yield made


@contextmanager
def running() -> Iterator[Machines]:
    made = Machines()
    with ExitStack() as stack:
        for engine in made.engines:
            engine.start()
            stack.callback(engine.close, 30)
        yield made


def test_shares_of_two_tiers_become_one_commit_in_the_far_store(machines):
    for step in (0, 1, 2):
        handles = machines.submit(step)
        machines.drain_until(handles)
        assert [handle.wait(1).step for handle in handles] == [step, step]

    for one in machines.agents:
        one.drain()

    assert check_far(machines.far) == [0, 1, 2]
    newest = look(machines.far).commits[Position(2, 1)]
    assert newest.parent.at == Position(1, 1)
    assert newest.components["frozen"].reused_bytes == 32
    assert [owed(near.store) for near in machines.nears] == [[], []]


def test_a_tier_keeps_its_newest_share_and_no_older_one(machines):
    for step in (0, 1, 2):
        machines.drain_until(machines.submit(step))
    for one in machines.agents:
        one.drain()

    for near in machines.nears:
        fragments = [layout.parse_position(info.key).step for info in near.store.scan(layout.FRAGMENTS)]
        assert fragments == [2]
        assert packs_of(near.store, Position(1, 1)) == []
        assert packs_of(near.store, Position(0, 1)) != []  # the frozen leaf's


def test_when_the_trainers_die_before_it_is_settled_the_agents_settle_it(machines):
    """Both shares are whole, in two tiers; nobody has put them together yet."""
    handles = machines.submit(0)
    for near in machines.nears:
        wait_until(lambda near=near: any(near.store.scan(layout.FRAGMENTS)), 30.0, "the share")
        near.alive.clear()

    machines.agents[0].drain()
    alone = read_commit(machines.far, Position(0, 1))
    machines.drain_until(handles)

    assert alone is None
    assert check_far(machines.far) == [0]


def test_a_share_that_died_with_its_writer_gives_the_step_up_for_all():
    far, near, other = Sim().store, Near(Sim().store), Near(Sim().store)
    start_job(far)
    for here, me in ((near, WRITERS[0]), (other, WRITERS[1])):
        mirror(far, here.store)
        note = Saving(
            format=FORMAT,
            attempt=1,
            step=0,
            writer=str(me),
            quorum=1,
            members="m",
            writers=tuple(map(str, WRITERS)),
            parent=None,
            shared=False,
        )
        here.store.create(layout.save_key(Position(0, 1), me), encode(note))
    near.alive.add(str(WRITERS[0]))

    waits = agent(near, far).drain()
    gives_up = agent(other, far).drain()
    hears = agent(near, far).drain()

    assert waits.waiting == gives_up.given_up == hears.given_up == (Position(0, 1),)
    assert "died before its share was safe" in read_commit(far, Position(0, 1))[0].aborted


def test_a_share_that_never_comes_is_not_waited_for_for_ever():
    """The other machine is gone, with its tier and its agent."""
    far, near = Sim().store, Near(Sim().store)
    begun = start_job(far)
    mirror(far, near.store)
    journal = TierJournal(near.store, WRITERS[0], shared=False, keep=Keep())
    save = expected(Position(0, 1), begun.start.parent, WRITERS)
    journal.begin(SaveJob(save, None), save)
    near.alive.add(str(WRITERS[0]))
    clock = HandClock()
    one = agent(near, far, clock=clock)

    before = one.drain()
    clock.sleep(1000)
    after = one.drain()

    assert before.waiting == after.given_up == (Position(0, 1),)
    assert "not all shares came" in read_commit(far, Position(0, 1))[0].aborted


def test_a_far_store_that_is_away_fails_the_save_by_its_deadline_and_the_next_one_is_good(machines):
    hurry = replace(PATIENT, patience=replace(PATIENT.patience, deadline_s=0.3))
    down = FaultyStore(machines.far, [Fault(Fail())])
    near, me = machines.nears[0], WRITERS[0]
    engine = SaveEngine(
        near.store,
        me,
        parent=None,
        settings=hurry,
        ledger=down,
        journal=TierJournal(near.store, me, shared=False, keep=Keep()),
    )
    engine.start()
    alone = expected(Position(0, 1), None, [me])

    with pytest.raises(SaveError):
        engine.submit(SaveJob(alone, staged(state_at(0)))).wait(30)
    down.plan = []
    handle = engine.submit(SaveJob(expected(Position(1, 1), None, [me]), staged(state_at(1))))
    with suppress(SaveError):
        machines.drain_until([handle])
    engine.close(30)

    assert handle.wait(1).step == 1
    assert check_far(machines.far) == [1]
