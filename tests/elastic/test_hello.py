"""What members tell each other, and who has to leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.elastic.hello import SIZE_BYTES, WISHES, Hello, judge, pack, unpack
from ftckpt.errors import MembershipError
from ftckpt.membership import Member, Membership, alone

numbers = st.integers(0, 2**62)
hellos = st.builds(
    Hello,
    st.builds(
        Member,
        st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}", fullmatch=True),
        st.uuids().map(lambda u: u.hex),
    ),
    st.none() | numbers,
    st.integers(0, 2**31 - 1),
    numbers,
    st.none() | numbers,
    st.booleans(),
    st.booleans(),
    st.frozensets(st.sampled_from(WISHES)),
)


def hello(group: str, **changes) -> Hello:
    life = changes.get("life", 0)
    incarnation = f"{int(group[1:]):02x}{life:02x}" * 8
    return replace(Hello(Member(group, incarnation), 1, 0, 10, None, True, True), **changes)


@given(hellos)
def test_a_hello_survives_the_wire(said):
    record = pack(said)

    assert unpack(record) == said
    assert len(record) == SIZE_BYTES


def test_another_protocol_is_refused():
    with pytest.raises(MembershipError, match="another protocol"):
        unpack(b"x" * SIZE_BYTES)


def test_members_that_agree_train():
    assert judge([hello("g0"), hello("g1"), hello("g2", attempt=None)], 1) is None


def test_the_member_of_the_older_attempt_leaves_and_the_others_repeat_the_turn():
    said = [hello("g0"), hello("g1", attempt=2), hello("g2", attempt=2)]

    with pytest.raises(MembershipError) as refused:
        judge(said, 0)

    assert (refused.value.attempt, refused.value.newest) == (1, 2)
    assert "older attempt" in judge(said, 1)
    assert "older attempt" in judge(said, 2)


def test_of_two_lives_of_one_group_the_newer_stays():
    said = [hello("g0"), hello("g1", life=0), hello("g1", life=1)]

    with pytest.raises(MembershipError, match="newer life"):
        judge(said, 1)

    assert "same name" in judge(said, 0)
    assert "same name" in judge(said, 2)


def test_a_member_that_could_not_be_healed_makes_all_repeat_the_turn():
    said = [hello("g0"), hello("g1", ready=False)]

    assert [judge(said, 0), judge(said, 1)] == ["not ready: g1"] * 2


def test_members_at_different_steps_do_not_train_together():
    assert "different steps" in judge([hello("g0"), hello("g1", step=11)], 0)


def test_the_digest_of_a_membership_does_not_depend_on_order_and_changes_with_a_life():
    a, b, c = Member("g0", "aa" * 16), Member("g1", "bb" * 16), Member("g1", "cc" * 16)

    assert Membership(1, (a, b), 0).digest() == Membership(9, (b, a), 1).digest()
    assert Membership(1, (a, b), 0).digest() != Membership(1, (a, c), 0).digest()
    assert Membership(1, (a, b), 1).me == b and Membership(1, (a, b), 0).groups == ("g0", "g1")
    assert alone("g0", "aa" * 16).digest() == Membership(5, (a,), 0).digest()
