from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from ftckpt.errors import SettingsError
from ftckpt.integrations.grpo.model import load_policy
from ftckpt.integrations.grpo.rollouts import answer_logp, columns, pack, roll, unpack
from ftckpt.integrations.grpo.seeds import derive, uniforms
from tests.grpo.conftest import SMALL


@pytest.fixture(scope="module")
def policy():
    return load_policy("tiny", seed=0)


@pytest.fixture(scope="module")
def task():
    from ftckpt.integrations.grpo.tasks import Task

    return Task(SMALL.task, SMALL.task_options, SMALL.task_size, SMALL.seed, short=True)


def rolled(policy, task, prompts, config=SMALL, step=1):
    return roll(policy, policy.model, None, task, config, prompts, step=step, weight_version=step - 1)


def test_the_same_prompts_get_the_same_answers_whatever_was_drawn_before(policy, task):
    first = pack(rolled(policy, task, (3, 5)))
    torch.rand(7)
    rolled(policy, task, (8, 9))

    again = pack(rolled(policy, task, (3, 5)))

    assert again.equal(first)


def test_another_step_or_sibling_gets_other_draws(policy, task):
    one, later = rolled(policy, task, (3, 3)), rolled(policy, task, (3, 3), step=2)

    assert not one.tokens_BL.equal(later.tokens_BL)
    assert derive(0, "sample", 1, 3, 0) != derive(0, "sample", 1, 3, 1) != derive(0, "sample", 1, 30, 1)
    u = uniforms(derive(0, "x"), 1000)
    assert u.min() >= 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.05


def test_rollouts_survive_packing_bit_for_bit(policy, task):
    rollouts = rolled(policy, task, (3, 5))
    rollouts.value_BT[0, 0] = float("nan")

    packed = pack(rollouts)
    back = unpack(packed, SMALL)

    assert packed.dtype == torch.int32 and packed.shape == (4, columns(SMALL))
    for item in fields(rollouts):
        one, other = getattr(rollouts, item.name), getattr(back, item.name)
        assert (one.dtype == other.dtype and one.equal(other)) or item.name == "value_BT", item.name
    assert pack(back).equal(packed)


def test_an_answer_ends_with_its_end_token_and_padding_follows(policy, task):
    rollouts = rolled(policy, task, tuple(range(16)))
    eos, pad = policy.tokenizer.eos_id, policy.tokenizer.pad_id

    for tokens, mask in zip(
        rollouts.tokens_BL[:, SMALL.prompt_tokens :].tolist(), rollouts.mask_BT.tolist(), strict=True
    ):
        length = int(sum(mask))
        assert mask == [1.0] * length + [0.0] * (len(mask) - length)
        assert eos not in tokens[: length - 1]
        assert tokens[length:] == [pad] * (len(tokens) - length)
        assert length == len(tokens) or tokens[length - 1] == eos


def test_padding_on_the_left_does_not_change_what_the_policy_says(policy, task):
    """A short prompt in a wide row, against the same prompt without padding."""
    prompt = torch.tensor([policy.tokenizer.prompt("4-1=")])
    answer = torch.tensor([policy.tokenizer.encode("3")])
    bare = torch.cat([prompt, answer], dim=1)
    wide = torch.cat([torch.zeros(1, 3, dtype=torch.long), bare], dim=1)

    alone = answer_logp(policy.model, bare, torch.tensor([4]), 4, 1.0)
    padded = answer_logp(policy.model, wide, torch.tensor([4]), 7, 1.0)

    assert torch.allclose(alone, padded, atol=1e-5)


def test_draws_follow_the_policys_own_distribution(policy, task):
    """At a low temperature nearly every draw is the likeliest token."""
    from dataclasses import replace

    cold = replace(SMALL, temperature=1e-4)
    rollouts = rolled(policy, task, (1, 2), cold)

    first = rollouts.tokens_BL[:, SMALL.prompt_tokens]
    logits = policy.model(input_ids=rollouts.tokens_BL[:, : SMALL.prompt_tokens], use_cache=False).logits[
        :, -1
    ]
    assert first.equal(logits.argmax(dim=-1))


def test_a_prompt_that_does_not_fit_is_refused_not_cut(policy, task):
    from dataclasses import replace

    with pytest.raises(SettingsError, match="--prompt-tokens is 3"):
        rolled(policy, task, (0,), replace(SMALL, prompt_tokens=3))
