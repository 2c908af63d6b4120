"""The tree of slots: the same bits for any number of participants and any split."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.slots import Alone, Node, finish, share, subtrees, sum_subtree, walk

SLOTS = 8


def gradients(seed: int, slots: int = SLOTS, numel: int = 64) -> list[torch.Tensor]:
    """Real floats of very different sizes, so that the order of a sum shows in its bits."""
    generator = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.randint(-6, 6, (slots, 1), generator=generator)
    return list(torch.randn(slots, numel, generator=generator) * scales)


def total_of_split(grads: list[torch.Tensor], shares: list[range]) -> torch.Tensor:
    slots = len(grads)
    partials = {
        node: sum_subtree(node, lambda slot: grads[slot].clone())
        for part in shares
        for node in subtrees(part, slots)
    }
    return finish(partials, slots)


def all_splits(slots: int, participants: int):
    """Every way to cut the slots into contiguous shares, empty ones included."""
    for cuts in itertools.combinations_with_replacement(range(slots + 1), participants - 1):
        edges = [0, *cuts, slots]
        yield [range(low, high) for low, high in itertools.pairwise(edges)]


@pytest.mark.parametrize("participants", range(1, 9))
def test_every_split_of_eight_slots_gives_the_bits_of_one_participant(participants):
    grads = gradients(participants)
    alone = total_of_split(grads, [range(SLOTS)])
    cases = all_splits(SLOTS, participants)
    if participants > 4:  # thousands; a fixed sample of them
        cases = itertools.islice(cases, participants - 5, None, 37)

    differing = [split for split in cases if not torch.equal(total_of_split(grads, split), alone)]

    assert differing == []


@given(
    seed=st.integers(0, 2**31),
    log_slots=st.integers(0, 5),
    participants=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_share_rule_gives_the_bits_of_one_participant(seed, log_slots, participants, dtype):
    slots = 1 << log_slots
    grads = [g.to(dtype) for g in gradients(seed, slots, numel=16)]

    found = total_of_split(grads, [share(slots, participants, i) for i in range(participants)])

    assert torch.equal(found, total_of_split(grads, [range(slots)]))


def test_plain_sums_per_participant_do_differ():
    """Because if they did not, the tests above would prove nothing."""
    grads = gradients(1)

    plain = torch.stack(grads[:3]).sum(0) + torch.stack(grads[3:]).sum(0)

    assert not torch.equal(plain, total_of_split(grads, [range(SLOTS)]))


@given(log_slots=st.integers(0, 6), participants=st.integers(1, 80))
def test_shares_tile_the_slots_and_differ_by_one_at_most(log_slots, participants):
    slots = 1 << log_slots

    shares = [share(slots, participants, index) for index in range(participants)]

    assert [slot for part in shares for slot in part] == list(range(slots))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(low=st.integers(0, 64), high=st.integers(0, 64))
def test_subtrees_tile_a_share_with_aligned_powers_of_two(low, high):
    low, high = sorted((low, high))

    nodes = subtrees(range(low, high), 64)

    assert [slot for n in nodes for slot in range(n.first, n.first + n.size)] == list(range(low, high))
    assert all(n.size & (n.size - 1) == 0 and n.first % n.size == 0 for n in nodes)
    assert len(nodes) <= 12  # at most two of each size


def test_a_share_of_three_slots_by_hand():
    assert subtrees(range(5, 8), 8) == [Node(5, 1), Node(6, 2)]
    assert list(walk(4, 3)) == [(0, Node(0, 1)), (1, Node(1, 1)), (2, Node(2, 2))]


def test_a_slot_that_nobody_summed_is_named():
    partials = {Node(0, 2): torch.zeros(1), Node(2, 1): torch.zeros(1)}

    with pytest.raises(KeyError, match="slot 3"):
        finish(partials, 4)


def test_leaves_are_asked_for_once_and_in_order():
    asked = []

    def leaf(slot: int) -> torch.Tensor:
        asked.append(slot)
        return torch.ones(1)

    total = sum_subtree(Node(8, 8), leaf)

    assert asked == list(range(8, 16)) and total.item() == 8


def test_alone_holds_every_slot_and_its_vote_passes():
    group = Alone(4)
    turn = group.begin(7)

    total = group.reduce(turn, lambda slot: torch.full((2,), float(slot)), 2, torch.float32)
    everything = group.exchange(turn, {slot: torch.tensor([slot]) for slot in turn.slots})

    assert (turn.step, turn.participants, group.expected_slots) == (7, ("g0",), range(4))
    assert total.tolist() == [6.0, 6.0] and everything.tolist() == [[0], [1], [2], [3]]
    assert group.vote()
