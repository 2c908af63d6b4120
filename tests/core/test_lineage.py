"""Which commits count: hand-worked histories, and what must hold for all of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.lineage import View, on_lineage, orphans, reach
from ftckpt.manifest import Position


def at(step: int, attempt: int) -> Position:
    return Position(step, attempt)


def test_a_rewound_run_counts_up_to_where_it_was_rewound():
    view = View(
        starts={1: None, 2: at(5, 1), 3: at(3, 1)},
        commits=frozenset({at(s, 1) for s in range(1, 9)} | {at(6, 2), at(7, 2), at(4, 3)}),
    )

    assert reach(view) == {3: None, 1: 3}
    assert on_lineage(view) == [at(4, 3), at(3, 1), at(2, 1), at(1, 1)]
    assert orphans(view)[:2] == [at(8, 1), at(7, 2)]


def test_a_resume_of_a_resume_is_bounded_by_both_parents():
    view = View(
        starts={1: None, 2: at(5, 1), 3: at(7, 2)},
        commits=frozenset({at(s, 1) for s in range(4, 9)} | {at(s, 2) for s in range(6, 10)} | {at(8, 3)}),
    )

    assert reach(view) == {3: None, 2: 7, 1: 5}
    assert on_lineage(view) == [at(8, 3), at(7, 2), at(6, 2), at(5, 1), at(4, 1)]


def test_an_attempt_is_bounded_by_the_smallest_parent_of_all_its_descendants():
    """No job makes such starts; copies and forks that were cut together may."""
    view = View(
        starts={1: None, 2: at(9, 1), 3: at(7, 2)},
        commits=frozenset({at(s, 1) for s in range(6, 10)}),
    )

    assert reach(view) == {3: None, 2: 7, 1: 7}
    assert on_lineage(view) == [at(7, 1), at(6, 1)]


def test_of_two_resumes_from_one_commit_the_newer_counts():
    view = View(
        claims=frozenset({1, 2, 3}),
        starts={1: None, 2: at(10, 1), 3: at(10, 1)},
        commits=frozenset({at(10, 1), at(11, 2), at(11, 3)}),
    )

    assert on_lineage(view) == [at(11, 3), at(10, 1)]
    assert orphans(view) == [at(11, 2)]


def test_a_claim_without_a_start_is_on_no_lineage():
    view = View(claims=frozenset({1, 2}), starts={1: None}, commits=frozenset({at(3, 1)}))

    assert on_lineage(view) == [at(3, 1)]
    assert view.newest_claim == 2
    assert view.newest_start == 1


def test_a_lineage_goes_on_across_collected_parents():
    """Every fourth step was kept; the commits that the starts name are gone."""
    view = View(
        starts={1: None, 2: at(6, 1), 3: at(11, 2)},
        commits=frozenset({at(s, 1) for s in range(1, 8)} | {at(s, 2) for s in range(7, 14)} | {at(12, 3)}),
        collected=frozenset(
            {at(s, 1) for s in (1, 2, 3, 5, 6, 7)} | {at(s, 2) for s in (7, 9, 10, 11, 12, 13)}
        ),
    )

    assert on_lineage(view) == [at(12, 3), at(8, 2), at(4, 1)]
    assert orphans(view) == []


def test_aborted_and_collected_steps_are_not_readable():
    view = View(
        starts={1: None},
        commits=frozenset({at(1, 1), at(2, 1), at(3, 1)}),
        aborted=frozenset({at(3, 1)}),
        collected=frozenset({at(1, 1)}),
    )

    assert on_lineage(view) == [at(2, 1)]


def test_a_step_that_parent_and_child_committed_counts_once_and_is_the_childs():
    view = View(starts={1: None, 2: at(5, 1)}, commits=frozenset({at(5, 1), at(4, 1), at(5, 2)}))

    assert on_lineage(view) == [at(5, 2), at(4, 1)]


def test_commits_of_an_attempt_whose_start_is_not_there_do_not_count():
    view = View(starts={1: None}, commits=frozenset({at(1, 1), at(2, 2)}))

    assert on_lineage(view) == [at(1, 1)]


@st.composite
def histories(draw: st.DrawFn) -> View:
    """Runs as the protocol makes them: a parent is of an earlier attempt and was on its lineage."""
    starts: dict[int, Position | None] = {}
    commits: set[Position] = set()
    for attempt in range(1, draw(st.integers(1, 5)) + 1):
        if draw(st.booleans()) or attempt == 1:
            choices = on_lineage(View(starts=starts, commits=frozenset(commits)))
            parent = draw(st.sampled_from(choices)) if choices else None
            starts[attempt] = parent
            first = parent.step + 1 if parent else 0
            commits |= {at(first + n, attempt) for n in range(draw(st.integers(0, 5)))}
        for older in list(starts)[:-1]:
            if draw(st.booleans()):  # a zombie goes on
                commits.add(at(max((c.step for c in commits if c.attempt == older), default=0) + 1, older))
    collected = draw(st.sets(st.sampled_from(sorted(commits)))) if commits else set()
    return View(starts=starts, commits=frozenset(commits), collected=frozenset(collected))


@given(histories())
def test_a_lineage_has_one_commit_a_step_and_attempts_only_fall(view):
    lineage = on_lineage(view)

    steps = [c.step for c in lineage]
    assert steps == sorted(set(steps), reverse=True)
    attempts = [c.attempt for c in lineage]
    assert attempts == sorted(attempts, reverse=True)
    assert set(lineage) <= view.readable
    assert set(lineage) | set(orphans(view)) == view.readable


@given(histories())
def test_the_parent_of_the_newest_start_is_on_its_lineage_unless_collected(view):
    parent = view.starts[view.newest_start]

    assert parent is None or parent in view.collected or parent in on_lineage(view)


@given(histories())
def test_collecting_a_commit_changes_nothing_for_the_others(view):
    before = on_lineage(View(starts=view.starts, commits=view.commits))

    assert on_lineage(view) == [c for c in before if c not in view.collected]
