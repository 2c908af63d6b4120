"""Keys: spelled in one place, parsed back to the same, ordered as numbers are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt import layout
from ftckpt.layout import Writer
from ftckpt.manifest import MAX_ATTEMPT, MAX_STEP, Position

positions = st.builds(Position, st.integers(0, MAX_STEP), st.integers(1, MAX_ATTEMPT))
writers = st.builds(
    Writer,
    st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True),
    st.integers(0, 999_999),
    st.from_regex(r"[0-9a-f]{32}", fullmatch=True),
)


@given(positions, writers, st.integers(0, 999_999))
def test_parsing_undoes_spelling(at, writer, sequence):
    assert layout.parse_commit(layout.commit_key(at)) == at
    assert layout.parse_commit(layout.tombstone_key(at)) == at
    assert layout.parse_position(layout.fragment_key(at, writer)) == at
    assert layout.parse_position(layout.pack_key(at, writer, sequence)) == at
    assert layout.parse_writer(layout.fragment_key(at, writer)) == writer
    assert layout.parse_number(layout.claim_key(at.attempt)) == at.attempt
    assert layout.parse_number(layout.start_key(at.attempt)) == at.attempt


@given(
    st.one_of(
        st.text(max_size=20).map("commits/".__add__),
        st.from_regex(r"(commits|collected)/\d{12}-\d{6}\n?", fullmatch=True),
    )
)
def test_a_commit_key_that_parses_is_one_that_is_spelled(key):
    at = layout.parse_commit(key)

    assert at is None or key in (layout.commit_key(at), layout.tombstone_key(at))


@given(st.from_regex(r"fragments/\d{6}/\d{12}/[a-z]{1,3}\.\d{1,6}\.[0-9a-f]{32}\n?", fullmatch=True))
def test_a_fragment_key_that_parses_is_one_that_is_spelled(key):
    at, writer = layout.parse_position(key), layout.parse_writer(key)

    assert at is None or writer is None or key == layout.fragment_key(at, writer)


@given(st.lists(positions, max_size=8))
def test_key_order_is_number_order(found):
    assert [layout.parse_commit(k) for k in sorted(map(layout.commit_key, found))] == sorted(found)


@pytest.mark.parametrize(
    "key",
    [
        "commits/000000000001-000000",
        "commits/1-1",
        "commits/000000000001-000001.tmp",
        "commits/000000000001-000001/x",
        "attempts/000000",
        "attempts/0000001",
        "attempts/٠٠٠٠٠١",
    ],
)
def test_stray_names_are_nobodys_keys(key):
    assert layout.parse_commit(key) is None
    assert layout.parse_number(key) is None


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "x" * 65, "ä"])
def test_names_that_could_leave_their_place_are_no_names(name):
    assert not layout.is_name(name)
    with pytest.raises(AssertionError):
        layout.pin_key(name)
