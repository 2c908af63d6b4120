from __future__ import annotations

import argparse
from dataclasses import fields, replace

import pytest

from ftckpt.errors import FtckptError, SettingsError
from ftckpt.integrations.grpo.config import GRPOConfig, add_flags, from_flags, parse_task_options, to_flags


def parse(*argv: str) -> GRPOConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return from_flags(vars(parser.parse_args(argv)))


def test_no_flags_give_the_defaults():
    assert parse() == GRPOConfig()


def test_a_config_survives_its_own_flags():
    config = replace(
        GRPOConfig(), critic=True, lr=1e-3, task_options=(("a", [1, 2]), ("b", "x"), ("c", True))
    )

    assert parse(*to_flags(config)) == config


def test_every_field_has_a_flag_that_help_explains():
    parser = argparse.ArgumentParser()
    add_flags(parser)

    text = " ".join(parser.format_help().split())

    for item in fields(GRPOConfig):
        assert "--" + item.name.replace("_", "-") in text
        assert item.metadata["help"].split()[0] in text


def test_a_model_brings_its_own_defaults_and_flags_win_over_them():
    assert parse("--model", "smollm2").answer_tokens == 6
    assert parse("--model", "smollm2", "--answer-tokens", "9").answer_tokens == 9
    assert parse("--model", "/some/folder").warmup_sft_steps == 0


def test_another_task_does_not_get_the_options_of_chain_sum():
    assert parse("--task", "basic_arithmetic").task_options == ()
    assert parse("--task", "x", "--task-options", "n=3").task_options == (("n", 3),)


def test_task_options_are_json_or_words_and_may_hold_commas():
    assert parse_task_options("a=1,b=[2,3],c=word,d=true") == (
        ("a", 1),
        ("b", [2, 3]),
        ("c", "word"),
        ("d", True),
    )
    assert parse_task_options("") == ()


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"slots": 3, "prompts_per_step": 9}, "power of two"),
        ({"slots": 8, "prompts_per_step": 12}, "equal parts"),
        ({"samples_per_prompt": 1}, "every advantage zero"),
        ({"task_size": 8}, "hold a prompt twice"),
        ({"num_iterations": 0}, "--num-iterations is 0"),
        ({"lr": -1.0}, "--lr is -1.0"),
        ({"steps": -1}, "--steps is -1"),
        ({"lr": float("nan")}, "--lr is nan"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(changes, says):
    with pytest.raises(SettingsError, match=says) as caught:
        GRPOConfig(**changes)

    assert isinstance(caught.value, FtckptError)


def test_ranks_over_which_the_prompts_of_a_slot_cannot_be_shared_are_refused():
    config = GRPOConfig(slots=4, prompts_per_step=12)

    config.check_world(3)
    with pytest.raises(SettingsError, match="3 prompts a slot cannot be shared out over 2 ranks"):
        config.check_world(2)


@pytest.mark.parametrize(
    "given, meant", [("7", 7), ("90s", "90s"), ("continuous", "continuous"), ("auto", "auto")]
)
def test_every_policy_of_saves_is_a_flag(given, meant):
    config = parse("--save-every", given)

    assert config.save_every == meant
    assert parse(*to_flags(config)) == config


@pytest.mark.parametrize("given", ["0", "-3", "often", "0s"])
def test_a_policy_without_a_meaning_is_refused_before_anything_is_built(given):
    with pytest.raises(SettingsError, match="save_every"):
        parse(f"--save-every={given}")
