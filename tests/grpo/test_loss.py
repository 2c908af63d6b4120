from __future__ import annotations

from math import exp, log, sqrt

import pytest
import torch
from torch import tensor

from ftckpt.integrations.grpo import loss


def test_an_advantage_is_the_distance_from_the_siblings_mean_in_their_standard_deviations():
    reward_B = tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    advantage_B = loss.group_advantages(reward_B, samples=4)

    assert advantage_B.tolist() == pytest.approx(
        [0.5 / 0.5001, -0.5 / 0.5001] + [-0.5 / 0.5001, 0.5 / 0.5001] + [0] * 4
    )


def test_advantages_of_one_prompt_do_not_depend_on_the_other_prompts():
    first, second = tensor([1.0, 0.0, 0.5]), tensor([0.0, 0.0, 1.0])

    both = loss.group_advantages(torch.cat([first, second]), samples=3)

    assert both[:3].equal(loss.group_advantages(first, samples=3))
    assert both[3:].equal(loss.group_advantages(second, samples=3))
    assert both[5].item() == pytest.approx((1 - 1 / 3) / (sqrt(2) / 3 + 1e-4))


def test_a_ratio_beyond_the_clip_earns_nothing_more_but_still_costs():
    old_logp_BT = torch.zeros(4, 1)
    logp_BT = tensor([[log(1.5)], [log(1.5)], [log(0.5)], [log(0.5)]])
    advantage_BT = tensor([[2.0], [-2.0], [2.0], [-2.0]])

    got_BT = loss.clipped_ratio(logp_BT, old_logp_BT, advantage_BT, clip=0.2)

    assert got_BT[:, 0].tolist() == pytest.approx([-1.2 * 2, 1.5 * 2, -0.5 * 2, 0.8 * 2])
    assert loss.is_clipped(tensor([[0.0, log(1.3), log(0.7)]]), torch.zeros(1, 3), 0.2).tolist() == [
        [0, 1, 1]
    ]


def test_the_divergence_is_zero_where_nothing_changed_and_never_negative():
    logp_BT, ref_logp_BT = tensor([[-1.0, -2.0, -1.0]]), tensor([[-1.0, -1.0, -2.0]])

    kl_BT = loss.kl_k3(logp_BT, ref_logp_BT)

    assert kl_BT[0].tolist() == pytest.approx([0.0, exp(1) - 2, exp(-1)])


def test_a_long_answer_weighs_as_much_as_a_short_one_and_padding_nothing():
    value_BT = tensor([[4.0, 100.0], [1.0, 2.0]])
    mask_BT = tensor([[1.0, 0.0], [1.0, 1.0]])

    assert loss.mean_over_answers(value_BT, mask_BT).item() == pytest.approx((4 + 1.5) / 2)


def test_the_critic_is_drawn_to_the_reward_of_the_whole_answer():
    value_BT, reward_B = tensor([[0.0, 1.0], [0.5, 0.5]]), tensor([1.0, 0.0])

    assert loss.value_error(value_BT, reward_B).tolist() == [[0.5, 0.0], [0.125, 0.125]]
