from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.errors import SettingsError, StateMismatch
from ftckpt.integrations.grpo.config import GRPOConfig
from ftckpt.integrations.grpo.tasks import PromptSampler, Task

OPTIONS = GRPOConfig().task_options


def sampler(**changes):
    settings = {"seed": 1, "size": 24, "prompts_per_step": 4, "num_iterations": 1, "fingerprint": "f"}
    return PromptSampler(**{**settings, **changes})


@given(
    size=st.integers(1, 40),
    prompts=st.integers(1, 9),
    iterations=st.integers(1, 3),
    epochs=st.integers(1, 3),
)
def test_every_prompt_is_used_once_an_epoch(size, prompts, iterations, epochs):
    one = sampler(size=size, prompts_per_step=prompts, num_iterations=iterations)

    generations = -(-size * epochs // prompts)
    used = list(chain.from_iterable(one.ids(1 + n * iterations) for n in range(generations)))

    for epoch in range(epochs):
        assert sorted(used[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_the_prompts_of_a_step_do_not_depend_on_what_was_asked_before():
    straight, jumping = sampler(), sampler()

    in_order = {step: straight.ids(step) for step in range(1, 20)}
    any_order = {step: jumping.ids(step) for step in (17, 3, 9, 3, 1, 12)}

    assert all(in_order[step] == ids for step, ids in any_order.items())
    assert in_order[1] != sampler(seed=2).ids(1)
    assert in_order[1] != in_order[7]  # the first step of the second epoch


def test_steps_that_reuse_a_batch_have_the_same_prompts():
    one = sampler(num_iterations=3)

    assert one.ids(1) == one.ids(2) == one.ids(3) != one.ids(4)


def test_the_position_moves_when_a_step_counts_and_is_restored():
    one, other = sampler(num_iterations=2), sampler(num_iterations=2)
    assert one.position == 0

    one.advance(13)  # the first step on the seventh batch of four, in a data set of 24
    other.load_state_dict(one.state_dict())

    assert (other.position, other.epoch) == (28, 1)


@pytest.mark.parametrize(
    "changes", [{"fingerprint": "g"}, {"seed": 2}, {"prompts_per_step": 8}, {"num_iterations": 2}]
)
def test_a_position_in_other_prompts_is_refused(changes):
    """The same number would mean other prompts: some skipped, others used twice."""
    one, other = sampler(), sampler(**changes)
    one.advance(3)

    with pytest.raises(StateMismatch, match=next(iter(changes))):
        other.load_state_dict(one.state_dict())

    assert other.position == 0


def test_a_data_set_is_the_same_for_the_same_settings_and_says_so():
    same = [Task("chain_sum", OPTIONS, 48, 7, short=True) for _ in range(2)]
    others = [
        Task("chain_sum", OPTIONS, 48, 8, short=True),
        Task("chain_sum", OPTIONS, 49, 7, short=True),
        Task("chain_sum", (*OPTIONS, ("allow_negation", True)), 48, 7, short=True),
    ]

    assert same[0].fingerprint == same[1].fingerprint
    assert len({task.fingerprint for task in (same[0], *others)}) == 4


def test_a_short_question_is_its_expression_and_the_data_set_scores_it():
    task = Task("chain_sum", OPTIONS, 48, 7, short=True)

    question, answer = task.question(0), task.answer(0)

    assert str(eval(question.rstrip("="))) == answer
    assert task.score(0, answer) == 1.0
    assert task.score(0, "") == 0.0


@pytest.mark.parametrize("name, options", [("no_such_task", ()), ("chain_sum", (("no_such_option", 1),))])
def test_a_data_set_that_does_not_exist_is_refused(name, options):
    with pytest.raises(SettingsError, match=name):
        Task(name, options, 8, 0, short=True)
