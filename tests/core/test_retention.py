"""Which commits are kept: by number, never by time or text, and never none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import SettingsError
from ftckpt.manifest import Position
from ftckpt.retention import Keep, retained


def positions(*steps: int, attempt: int = 1) -> list[Position]:
    return [Position(step, attempt) for step in steps]


def test_order_is_by_number_and_not_by_text():
    """K3, K4: 10 comes after 2, and 10000 after 9000."""
    assert retained(positions(*range(1, 13)), Keep(last=3)) == set(positions(10, 11, 12))
    assert retained(positions(9000, 10000), Keep(last=1)) == set(positions(10000))


@given(st.permutations(range(1, 8)))
def test_order_is_by_step_whatever_order_they_come_in(steps):
    """K2: no time and no listing order has a say."""
    assert retained(positions(*steps), Keep(last=2)) == set(positions(6, 7))


@pytest.mark.parametrize("field", ["last", "every"])
@pytest.mark.parametrize("value", [0, -1, True, False, 1.5, "3"])
def test_values_that_mean_nothing_are_refused(field, value):
    """K4: keep=0 and keep=-1 once removed everything."""
    with pytest.raises(SettingsError, match=rf"keep {field}=.* has no meaning") as caught:
        Keep(**{field: value})

    assert caught.value.found == value


def test_none_keeps_everything():
    assert retained(positions(1, 2, 3), Keep(last=None)) == set(positions(1, 2, 3))


def test_every_kth_step_is_kept_besides_the_newest():
    assert retained(positions(*range(1, 14)), Keep(last=2, every=4)) == set(positions(4, 8, 12, 13))


@given(st.sets(st.integers(0, 50)), st.one_of(st.none(), st.integers(1, 5)), st.integers(1, 9) | st.none())
def test_the_newest_is_always_kept(steps, last, every):
    lineage = positions(*steps)

    kept = retained(lineage, Keep(last=last, every=every))

    assert kept <= set(lineage)
    assert not lineage or max(lineage) in kept
    assert len(kept) >= min(len(lineage), last or len(lineage))
