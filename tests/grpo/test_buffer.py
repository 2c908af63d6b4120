from __future__ import annotations

import pytest
import torch

from ftckpt.errors import StateMismatch
from ftckpt.integrations.grpo.buffer import RolloutBuffer


def buffer(num_iterations=3, slots=2):
    return RolloutBuffer(slots=slots, rows=2, columns=4, num_iterations=num_iterations)


def batch(fill=7):
    return torch.full((2, 2, 4), fill, dtype=torch.int32)


def test_a_batch_is_held_until_its_last_use():
    one = buffer()
    assert one.batch_for(1) is None

    held = []
    for step in (1, 2, 3):
        one.used(batch(), step, weight_version=step - 1)
        held.append((one.generation_step, one.weight_version, one.next_use))

    assert held == [(1, 0, 1), (1, 0, 2), (0, 0, 0)]
    assert one.batch_for(4) is None
    assert not one.state_dict()["batch"].any()


def test_a_batch_used_once_is_never_held():
    one = buffer(num_iterations=1)

    one.used(batch(), 1, weight_version=0)

    assert one.batch_for(2) is None


def test_a_restored_buffer_goes_on_with_the_next_use_of_the_same_batch():
    one, other = buffer(), buffer()
    one.used(batch(), 4, weight_version=3)

    other.load_state_dict(one.state_dict())

    assert other.batch_for(5).equal(batch())
    assert (other.generation_step, other.weight_version, other.next_use) == (4, 3, 1)


def test_the_state_has_one_shape_full_or_empty():
    full, empty = buffer(), buffer()
    full.used(batch(), 1, weight_version=0)

    shapes = [{k: getattr(v, "shape", type(v)) for k, v in b.state_dict().items()} for b in (full, empty)]

    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("other", [buffer(slots=4), buffer(num_iterations=2)])
def test_rollouts_of_another_shape_or_reuse_are_refused(other):
    one = buffer()
    one.used(batch(), 1, weight_version=0)

    with pytest.raises(StateMismatch, match="nothing was loaded"):
        other.load_state_dict(one.state_dict())

    assert other.generation_step == 0


def test_what_was_handed_out_does_not_change_when_the_next_batch_comes():
    """A save may still be reading it."""
    one = buffer(num_iterations=2)
    one.used(batch(1), 1, weight_version=0)
    seen = one.state_dict()["batch"]

    one.used(batch(1), 2, weight_version=0)
    one.used(batch(2), 3, weight_version=2)

    assert seen.equal(batch(1))
