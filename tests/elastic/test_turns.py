"""Turns of several groups in one real quorum; the groups are threads, so that this is quick.

Nobody is killed here (``test_replica_group`` does that with processes): this is about who gets
which slots, what everybody learns of everybody, and what is refused.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from ftckpt.elastic import Launch, ReplicaGroup
from ftckpt.elastic.lighthouse import _extension
from ftckpt.errors import MembershipError, SettingsError
from ftckpt.events import Event
from ftckpt.slots import Alone, Turn

# torchft calls a deprecated method of logging while it forms a process group
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")

SLOTS = 8
DIM = 50


class Weights:
    """One tensor and some bytes: the smallest state that can be healed."""

    def __init__(self, value: float) -> None:
        self.tensor = torch.full((DIM,), value)
        self.note = str(value).encode()

    def save(self) -> dict[str, object]:
        return {"w": self.tensor, "note": self.note}

    def load(self, state: dict[str, object]) -> None:
        self.tensor.copy_(state["w"])
        self.note = bytes(state["note"])


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = _extension().LighthouseServer(
        bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=2000
    )
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


class Party:
    """Groups that take their turns together."""

    def __init__(self, lighthouse: str) -> None:
        self.lighthouse = lighthouse
        self.groups: list[ReplicaGroup] = []
        self.states: list[Weights] = []
        self.events: list[Event] = []
        self.pool = ThreadPoolExecutor(12)

    def join(self, name: str, *, step: int = 0, slots: int = SLOTS, life: int = 0, **options) -> ReplicaGroup:
        attempt = options.pop("attempt", 1)
        on_turn = options.pop("on_turn", None)
        launch = Launch(attempt=attempt, group=name, lighthouse=self.lighthouse, life=life, rejoin=life > 0)
        group = ReplicaGroup(
            launch, slots=slots, heal_time_s=5, join_timeout_s=2, events=self.events.append, **options
        )
        state = Weights(len(self.groups) + 1.0)
        group.open(step=step, heal=state, on_turn=on_turn)
        self.groups.append(group)
        self.states.append(state)
        return group

    def together(self, do: Callable[[ReplicaGroup], object]) -> list:
        """Let every group do the same at the same time; the exceptions are results."""

        def attempt(group: ReplicaGroup) -> object:
            try:
                return do(group)
            except Exception as e:
                return e

        return list(self.pool.map(attempt, self.groups))

    def begin_until(self, count: int, step: int) -> list[Turn]:
        """Turns begun together by that many participants: newcomers may miss the first quorum."""

        def begin(group: ReplicaGroup) -> Turn:
            for _ in range(20):
                turn = group.begin(group.finished_step + 1)
                if len(turn.participants) == count:
                    return turn
                group._fail("the test wants more participants")
                group.vote()
            raise AssertionError(f"never {count} participants: {turn}")

        turns = self.together(begin)
        assert not [t for t in turns if isinstance(t, Exception)], turns
        assert {t.step for t in turns} == {step}
        return turns


@contextmanager
def party(lighthouse: str) -> Iterator[Party]:
    there = Party(lighthouse)
    try:
        yield there
    finally:
        there.together(lambda g: g.close())
        there.pool.shutdown()


def gradient(slot: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(slot)
    return torch.randn(DIM, generator=generator) * 10.0 ** (slot % 5 - 2)


def undisturbed(slots: int = SLOTS) -> torch.Tensor:
    alone = Alone(slots)
    return alone.reduce(alone.begin(1), gradient, DIM, torch.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_sum_and_the_exchange_are_the_same_for_any_number_of_groups(lighthouse, count):
    with party(lighthouse) as there:
        for index in range(count):
            there.join(f"g{index}")
        turns = dict(zip(there.groups, there.begin_until(count, 1), strict=True))

        def turn(group: ReplicaGroup) -> tuple[torch.Tensor, torch.Tensor, bool]:
            mine = {slot: torch.tensor([[slot, -slot]], dtype=torch.int16) for slot in turns[group].slots}
            everything = group.exchange(turns[group], mine)
            return everything, group.reduce(turns[group], gradient, DIM, torch.float32), group.vote()

        for everything, total, passed in there.together(turn):
            assert passed
            assert torch.equal(total, undisturbed())
            assert everything.tolist() == [[[slot, -slot]] for slot in range(SLOTS)]
        assert [slot for t in sorted(turns.values(), key=lambda t: t.index) for slot in t.slots] == list(
            range(8)
        )
        assert [g.finished_step for g in there.groups] == [1] * count


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64])
def test_with_more_groups_than_slots_some_have_none_and_still_get_everything(lighthouse, dtype):
    with party(lighthouse) as there:
        for index in range(3):
            there.join(f"g{index}", slots=2)
        turns = dict(zip(there.groups, there.begin_until(3, 1), strict=True))
        payload = {slot: torch.tensor([slot, 1]).to(dtype) for slot in range(2)}

        def turn(group: ReplicaGroup) -> tuple[torch.Tensor, torch.Tensor, bool]:
            everything = group.exchange(turns[group], {slot: payload[slot] for slot in turns[group].slots})
            return everything, group.reduce(turns[group], gradient, DIM, torch.float32), group.vote()

        results = there.together(turn)
        assert sorted(len(t.slots) for t in turns.values()) == [0, 1, 1]
        for everything, total, passed in results:
            assert passed and torch.equal(total, undisturbed(2))
            assert torch.equal(everything, torch.stack([payload[0], payload[1]]))


def test_the_groups_know_each_other_and_agree_on_the_digest(lighthouse):
    with party(lighthouse) as there:
        incarnations = {name: uuid.uuid4().hex for name in ("g0", "g1")}
        for name, incarnation in incarnations.items():
            there.join(name, incarnation=incarnation)
        there.groups[1].register_save(0)
        there.groups[0].wish("stop")

        there.begin_until(2, 1)

        members = [g.membership for g in there.groups]
        assert {m.group: m.incarnation for m in members[0].members} == incarnations
        assert members[0].digest() == members[1].digest() and members[0].members == members[1].members
        assert [m.me.group for m in members] == ["g0", "g1"]
        assert [g.agreed for g in there.groups] == [frozenset({"stop"})] * 2
        assert [g.peers_saved for g in there.groups] == [0, 0]
        assert [len(g.expected_slots) for g in there.groups] == [4, 4]


def test_a_wish_is_forgotten_once_its_turn_has_passed(lighthouse):
    with party(lighthouse) as there:
        group = there.join("g0")
        group.wish("save")

        group.begin(1)
        group._fail("the first try fails")
        first = group.agreed
        group.vote()
        group.begin(1)
        second = group.agreed
        group.vote()
        group.begin(2)

        assert (first, second, group.agreed) == (frozenset({"save"}), frozenset({"save"}), frozenset())


def test_a_group_that_is_behind_is_healed_in_begin_and_trains_the_same_step(lighthouse):
    seen = []
    with party(lighthouse) as there:
        ahead = there.join("g0", step=7)
        assert ahead.begin(8).step == 8
        assert ahead.vote()
        there.join("g1", step=3, life=1, on_turn=seen.append)
        assert not there.groups[1].carries

        turns = there.begin_until(2, 9)

        assert there.states[1].tensor.tolist() == [1.0] * DIM and there.states[1].note == b"1.0"
        assert turns[1].healed and there.groups[1].was_healed and there.groups[1].carries
        assert not turns[0].healed and not ahead.was_healed
        assert seen[-1] == turns[1]
        assert there.groups[1].state_dict() == ahead.state_dict()


def test_groups_that_were_all_restarted_carry_nothing(lighthouse):
    with party(lighthouse) as there:
        there.join("g0", step=5, life=1)
        there.join("g1", step=5, life=2)

        there.begin_until(2, 6)

        assert [g.carries for g in there.groups] == [False, False]


def test_after_an_error_nothing_is_computed_and_everybody_gets_zeros_and_repeats(lighthouse):
    with party(lighthouse) as there:
        there.join("g0")
        there.join("g1")
        turns = dict(zip(there.groups, there.begin_until(2, 1), strict=True))
        asked = []

        def turn(group: ReplicaGroup) -> tuple[torch.Tensor, torch.Tensor, bool]:
            if group is there.groups[0]:
                group._fail("injected")
            zeros = group.exchange(turns[group], {slot: torch.ones(3) for slot in turns[group].slots})
            total = group.reduce(turns[group], lambda s: asked.append(s) or gradient(s), DIM, torch.float32)
            return zeros, total, group.vote()

        for everything, total, passed in there.together(turn):
            assert not passed
            assert not everything.any() and everything.shape == (SLOTS, 3)
            assert not total.any() and total.shape == (DIM,)
        assert asked == []
        assert [g.failed_votes_in_a_row for g in there.groups] == [1, 1]
        assert [g.finished_step for g in there.groups] == [0, 0]
        again = there.begin_until(2, 1)
        assert {t.step for t in again} == {1}


def test_too_many_failed_votes_in_a_row_are_an_error_that_says_why(lighthouse):
    with party(lighthouse) as there:
        group = there.join("g0", max_failed_votes=2)
        group.begin(1)
        group._fail("injected")
        assert not group.vote()
        group.begin(1)
        group._fail("injected again")

        with pytest.raises(MembershipError, match="failed 2 times in a row, last: injected again"):
            group.vote()


def test_two_groups_of_one_name_cannot_train_together(lighthouse):
    with party(lighthouse) as there:
        old = there.join("g0", life=0)
        there.join("g0", life=1)
        refused: list[Exception] = []

        def turn(group: ReplicaGroup) -> None:
            for _ in range(5):
                group.begin(group.finished_step + 1)
                group.vote()

        results = there.together(lambda g: turn(g) if g is not old else take_turns_until_refused(g, refused))

        assert results[1] is None
        assert "called g0" in str(refused[0])


def take_turns_until_refused(group: ReplicaGroup, refused: list[Exception]) -> None:
    try:
        for _ in range(20):
            group.begin(group.finished_step + 1)
            group.vote()
    except MembershipError as e:
        refused.append(e)
        group.close()


def test_events_tell_of_every_phase_of_a_turn(lighthouse):
    with party(lighthouse) as there:
        group = there.join("g0")

        group.begin(1)
        group.vote()

        phases = [(e.name, e.fields["phase"], e.fields["step"]) for e in there.events]
        assert phases == [("group.turn", phase, 1) for phase in ("asked", "begun", "voted")]
        assert there.events[-1].fields["vote"] is True


def test_a_commit_can_hold_the_managers_state(lighthouse):
    with party(lighthouse) as there:
        launch = Launch(attempt=1, group="g0", lighthouse=lighthouse)
        group = ReplicaGroup(launch, slots=4, heal_time_s=5)
        group.load_state_dict({"step": 3, "batches_committed": 11})
        group.open(step=4, heal=Weights(1.0))
        there.groups.append(group)

        group.begin(5)
        group.vote()

        assert group.state_dict() == {"step": 5, "batches_committed": 12}


def test_closing_takes_no_longer_than_allowed_and_may_be_repeated(lighthouse):
    with party(lighthouse) as there:
        group = there.join("g0")
        group.begin(1)
        closing = threading.Thread(target=lambda: (group.close(2), group.close(2)))

        closing.start()
        closing.join(timeout=8)

        assert not closing.is_alive()


def test_a_group_without_a_lighthouse_is_refused():
    with pytest.raises(SettingsError, match="TORCHFT_LIGHTHOUSE"):
        ReplicaGroup(Launch(), slots=8)


def test_a_lighthouse_that_is_not_there_is_one_clear_error():
    launch = Launch(group="g0", lighthouse="http://127.0.0.1:9")
    group = ReplicaGroup(launch, slots=8, heal_time_s=1, connect_timeout_s=0.5)

    with pytest.raises(MembershipError, match=r"cannot join the lighthouse at http://127.0.0.1:9"):
        group.open(step=0, heal=Weights(0.0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"heal_time_s": 30, "pg_timeout_s": 59},
        {"heal_time_s": 30, "quorum_timeout_s": 60},
        {"join_timeout_s": 100, "quorum_timeout_s": 120},
        {"heal_time_s": 0},
        {"heal_time_s": -1},
    ],
)
def test_timeouts_that_contradict_each_other_are_refused(wrong):
    with pytest.raises(SettingsError):
        ReplicaGroup(Launch(lighthouse="http://h:1"), slots=8, **wrong)
