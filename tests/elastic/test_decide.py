"""What becomes of an attempt, decided from where its groups are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.elastic.supervisor import GroupStatus, JobPlan, Phase, Verdict, carriers, decide
from ftckpt.errors import SettingsError

RUNNING, WAITING, FINISHED, GIVEN_UP = Phase.RUNNING, Phase.WAITING, Phase.FINISHED, Phase.GIVEN_UP


def group(phase: Phase, life: int = 0, voted: bool = False) -> GroupStatus:
    return GroupStatus("g", phase, life, voted)


groups = st.lists(
    st.builds(group, st.sampled_from(Phase), st.integers(0, 3), st.booleans()), min_size=1, max_size=4
)


@pytest.mark.parametrize(
    ("why", "groups", "anyone_voted", "verdict"),
    [
        ("all have just begun", [group(RUNNING), group(RUNNING)], False, Verdict.GO_ON),
        ("one died before anybody trained", [group(RUNNING), group(WAITING, 1)], False, Verdict.GO_ON),
        ("both died before anybody trained", [group(WAITING, 1), group(RUNNING, 1)], False, Verdict.OVER),
        ("one trains, one is back", [group(RUNNING, 0, True), group(RUNNING, 1)], True, Verdict.GO_ON),
        ("the one that trained died", [group(WAITING, 1), group(RUNNING, 0)], True, Verdict.OVER),
        (
            "the one that is back has trained",
            [group(WAITING, 1), group(RUNNING, 1, True)],
            True,
            Verdict.GO_ON,
        ),
        ("the last carrier died", [group(WAITING, 1), group(RUNNING, 1)], True, Verdict.OVER),
        (
            "one has finished, one trains",
            [group(FINISHED, 0, True), group(RUNNING, 0, True)],
            True,
            Verdict.GO_ON,
        ),
        (
            "one has finished, one is down",
            [group(FINISHED, 0, True), group(WAITING, 1)],
            True,
            Verdict.FINISHED,
        ),
        (
            "one has finished, one rejoins",
            [group(FINISHED, 0, True), group(RUNNING, 1)],
            True,
            Verdict.FINISHED,
        ),
        ("nothing was left to do", [group(FINISHED), group(RUNNING)], False, Verdict.GO_ON),
        ("all have finished", [group(FINISHED), group(FINISHED)], False, Verdict.FINISHED),
        ("one was given up", [group(RUNNING, 0, True), group(GIVEN_UP, 6)], True, Verdict.GO_ON),
        ("all were given up", [group(GIVEN_UP, 6), group(GIVEN_UP, 6)], True, Verdict.TOO_FEW),
    ],
)
def test_what_becomes_of_an_attempt(why, groups, anyone_voted, verdict):
    assert decide(groups, min_groups=1, anyone_voted=anyone_voted) is verdict, why


def test_below_the_smallest_number_of_groups_the_job_stops():
    assert decide([group(RUNNING), group(GIVEN_UP, 6)], min_groups=2, anyone_voted=False) is Verdict.TOO_FEW


@given(groups, st.booleans())
def test_an_attempt_goes_on_only_while_somebody_carries_it(groups, anyone_voted):
    verdict = decide(groups, min_groups=1, anyone_voted=anyone_voted)

    assert (verdict is Verdict.GO_ON) <= bool(carriers(groups, anyone_voted=anyone_voted))


@given(groups, st.booleans())
def test_nobody_is_a_carrier_who_does_not_run(groups, anyone_voted):
    running = sum(g.phase is RUNNING for g in groups)

    assert len(carriers(groups, anyone_voted=anyone_voted)) <= running


@pytest.mark.parametrize(
    "wrong",
    [
        {"command": ()},
        {"min_groups": 3},
        {"min_groups": 0},
        {"nproc": 0},
        {"attempt": 0},
        {"max_attempts": 0},
    ],
)
def test_a_plan_without_a_meaning_is_refused(wrong):
    with pytest.raises(SettingsError):
        JobPlan(**{"run": "r", "attempt": 1, "command": ("x",), "groups": 2} | wrong)
