"""When a save is due, and what the interval of ``auto`` follows from."""

from __future__ import annotations

import math
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import SettingsError
from ftckpt.lineage import View, trained
from ftckpt.manifest import Position
from ftckpt.policy import Costs, Ends, Moment, Policy, choose_interval, daly_s, due, parse

spans = st.floats(1e-4, 1e7)


@pytest.mark.parametrize(
    "words, policy",
    [
        (None, Policy()),
        (20, Policy("steps", steps=20)),
        ("20", Policy("steps", steps=20)),
        ("90s", Policy("seconds", seconds=90)),
        (" 15 m", Policy("seconds", seconds=900)),
        ("1.5h", Policy("seconds", seconds=5400)),
        (".5s", Policy("seconds", seconds=0.5)),
        (timedelta(minutes=2), Policy("seconds", seconds=120)),
        ("continuous", Policy("continuous")),
        ("Auto", Policy("auto")),
    ],
)
def test_each_word_of_save_every_has_one_meaning(words, policy):
    assert parse(words) == policy


@pytest.mark.parametrize(
    "words",
    [0, -1, True, 2.5, float("nan"), "", "0", "-3", "0s", "90", "often", "1e3s", "9999d", timedelta(0)],
)
def test_words_without_a_meaning_are_refused_by_name(words):
    if words == "90":
        assert parse(words).steps == 90  # a number alone is steps, on a command line too
        return
    with pytest.raises(SettingsError, match="save_every=") as refused:
        parse(words)
    assert refused.value.found is words


@given(st.integers(1, 50), st.lists(st.integers(0, 200), max_size=30))
def test_a_step_policy_is_due_at_its_multiples_whatever_the_clock_says(every, steps):
    policy = Policy("steps", steps=every)

    found = [
        due(policy, Moment(step, since_s, under_way=busy))
        for step in steps
        for since_s in (0, 1e9)
        for busy in (False, True)
    ]

    assert found == [step % every == 0 for step in steps for _ in range(4)]


@given(st.lists(spans, min_size=1, max_size=60), spans)
def test_seconds_pass_between_saves_and_none_is_later_than_a_step(steps_s, every_s):
    """Whatever the steps take: two saves are at least the interval apart, and less than a step more."""
    policy, since_s, last_s = Policy("seconds", seconds=every_s), 0.0, 0.0
    for step, took_s in enumerate(steps_s, 1):
        before_s = since_s
        since_s += took_s
        if due(policy, Moment(step, since_s, under_way=False)):
            assert since_s >= every_s > before_s
            since_s, last_s = 0.0, 0.0
        else:
            assert since_s < every_s
    assert last_s == 0.0


@given(st.integers(0, 9), spans, st.booleans())
def test_continuous_is_due_exactly_when_nothing_is_under_way(step, since_s, under_way):
    assert due(Policy("continuous"), Moment(step, since_s, under_way)) is not under_way


def test_auto_is_not_due_before_anything_was_measured_nor_beside_another_save():
    policy, late = Policy("auto"), Moment(3, 100.0, under_way=False)

    assert not due(policy, late)
    assert due(policy, late, 99.0) and not due(policy, late, 101.0)
    assert not due(policy, Moment(3, 100.0, under_way=True), 99.0)


def test_no_policy_at_all_is_never_due():
    assert not any(due(Policy(), Moment(step, 1e9, under_way=False)) for step in range(100))


def test_dalys_interval_by_hand():
    """C = 5 min, M = 24 h: Young gives 120 min; the higher orders and C take 1.67 min of it away."""
    assert math.sqrt(2 * 300 * 86400) / 60 == pytest.approx(120.0)
    assert daly_s(300, 86400) / 60 == pytest.approx(
        120 * (1 + math.sqrt(300 / 172800) / 3 + 300 / 172800 / 9) - 5
    )
    assert daly_s(300, 86400) / 60 == pytest.approx(116.69, abs=0.01)


def lost(interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Daly's exact model without restart time: how much longer a run takes than its training."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) / interval_s


@given(st.floats(1.0, 1e6), st.floats(1e-6, 1.0), st.floats(0.2, 5.0))
def test_no_other_interval_loses_much_less(mtbf_s, part, other):
    """Against the exact model: whatever else is chosen gains less than half a per cent."""
    cost_s = part * mtbf_s
    best_s = daly_s(cost_s, mtbf_s)

    assert lost(best_s, cost_s, mtbf_s) <= 1.005 * lost(best_s * other, cost_s, mtbf_s)


@given(spans, spans)
def test_the_interval_grows_with_the_cost_and_never_exceeds_the_time_between_failures(cost_s, mtbf_s):
    assert 0 < daly_s(cost_s, mtbf_s) <= mtbf_s * 1.0001 or cost_s >= 2 * mtbf_s
    if cost_s * 1.1 < mtbf_s / 2:
        assert daly_s(cost_s, mtbf_s) <= daly_s(cost_s * 1.1, mtbf_s)


@given(spans, spans, spans, spans, st.integers(0, 5), st.integers(0, 10**6), st.none() | spans)
def test_auto_never_asks_for_overlapping_saves_and_gives_its_reasons(
    stall_s, slowed_s, durable_s, step_s, ended, steps, mtbf_s
):
    costs = Costs(stall_s, slowed_s, durable_s, step_s)

    interval = choose_interval(costs, Ends(ended, steps), mtbf_s)

    assert interval.seconds >= durable_s
    assert len(interval.why) == (3 if interval.seconds == durable_s else 2)
    assert ("was given" in interval.why[0]) == (mtbf_s is not None)


def test_a_run_that_failed_often_saves_more_often_than_one_that_never_did():
    costs = Costs(stall_s=0.1, slowed_s=0.9, durable_s=2.0, step_s=10.0)

    never, often = choose_interval(costs, Ends(0, 360)), choose_interval(costs, Ends(4, 360))

    assert never.seconds == pytest.approx(math.sqrt(2 * (86400 + 3600)), rel=0.01)
    assert often.seconds == pytest.approx(math.sqrt(2 * 900), rel=0.01)
    assert "no attempt of this run has ended yet" in never.why[0]
    assert "4 earlier attempts ended within 360 steps of 10 s: a failure every 15 min" in often.why[0]


def test_what_earlier_attempts_trained_is_counted_from_names_alone():
    """Attempt 1 went from 0 to 30, attempt 2 from 20 to 25, attempt 3 never committed, 4 is ours."""
    at = Position
    view = View(
        claims=frozenset({1, 2, 3, 4}),
        starts={1: None, 2: at(20, 1), 3: at(25, 2), 4: at(25, 2)},
        commits=frozenset({at(0, 1), at(20, 1), at(25, 2), at(40, 4)}),
        collected=frozenset({at(30, 1)}),
    )

    assert trained(view, before=4) == (3, 30 + 5 + 0)
    assert trained(view, before=1) == (0, 0)
