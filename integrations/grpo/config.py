"""The settings of a GRPO run: one frozen value, and its command-line flags.

Every field is a flag of the same name and says in ``--help`` what it does; a model may bring other
defaults (``PRESETS``). What contradicts itself is refused here, before anything is built.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from ftckpt.errors import SettingsError
from ftckpt.policy import parse as parse_save_every

TaskOptions = tuple[tuple[str, Any], ...]


def _flag(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True)
class GRPOConfig:
    """What is trained, on what, and how. Defaults are those with which ``tiny`` learns in seconds."""

    model: str = _flag("tiny", "tiny, smollm2, or the folder of a Hugging Face causal language model")
    task: str = _flag("chain_sum", "name of a reasoning-gym data set")
    task_options: TaskOptions = _flag(
        (("min_terms", 2), ("max_terms", 2), ("min_digits", 1), ("max_digits", 1)),
        "options of the data set: name=value,name=value (values are JSON)",
    )
    task_size: int = _flag(4000, "items in the data set; each is used once an epoch")
    seed: int = _flag(0, "the run seed; every random number is derived from it")
    steps: int = _flag(120, "optimizer steps of the whole run")
    slots: int = _flag(
        4, "equal parts of a step's batch (a power of two); the share of a group is some of them"
    )
    prompts_per_step: int = _flag(16, "prompts of one generation batch, over all slots")
    samples_per_prompt: int = _flag(8, "answers sampled for each prompt")
    chat: bool = _flag(
        False, "ask through the model's chat template; otherwise the question is text to go on from"
    )
    prompt_tokens: int = _flag(4, "width to which prompts are padded; a longer prompt is an error")
    answer_tokens: int = _flag(4, "tokens sampled for each answer")
    temperature: float = _flag(1.0, "sampling temperature")
    lr: float = _flag(5e-4, "learning rate of the actor after its warm-up")
    critic_lr: float = _flag(1e-3, "learning rate of the critic after its warm-up")
    warmup_steps: int = _flag(10, "steps over which the learning rates rise to their full value")
    weight_decay: float = _flag(0.01, "AdamW's weight decay")
    clip: float = _flag(0.2, "the probability ratio counts between 1 - clip and 1 + clip")
    kl_coef: float = _flag(0.01, "weight of the KL divergence to the frozen reference")
    grad_clip: float = _flag(1.0, "largest norm of a gradient, for actor and critic each")
    num_iterations: int = _flag(2, "optimizer steps made on one generation batch")
    critic: bool = _flag(
        False, "train a critic and use its values as the baseline (PPO with whole-answer returns)"
    )
    warmup_sft_steps: int = _flag(150, "supervised steps before the run, from which the reference is taken")
    device: str = _flag("cpu", "torch device of the models")
    out: str = _flag("", "folder for metrics.jsonl; empty: no file")
    save_every: int | str = _flag(
        20, "steps between checkpoints; or a time (90s, 15m, 1.5h), continuous, or auto"
    )
    mtbf_s: float = _flag(
        0.0, "expected seconds between failures, for --save-every auto; 0: what the run's attempts show"
    )
    keep: int = _flag(3, "checkpoints to retain")

    def __post_init__(self) -> None:
        self._positive(
            "task_size", "slots", "prompts_per_step", "prompt_tokens", "answer_tokens", "num_iterations"
        )
        self._positive("temperature", "lr", "critic_lr", "clip", "grad_clip", "keep")
        self._not_negative("steps", "warmup_steps", "weight_decay", "kl_coef", "warmup_sft_steps", "mtbf_s")
        parse_save_every(self.save_every)
        if self.slots & (self.slots - 1):
            raise SettingsError(
                f"--slots {self.slots} is not a power of two\n"
                "  gradients are summed along a binary tree over the slots; use 1, 2, 4, 8, …",
                slots=self.slots,
            )
        if self.prompts_per_step % self.slots:
            raise SettingsError(
                f"--prompts-per-step {self.prompts_per_step} cannot be cut into --slots {self.slots} equal parts\n"
                "  make the prompts a multiple of the slots",
                prompts_per_step=self.prompts_per_step,
                slots=self.slots,
            )
        if self.samples_per_prompt < 2 and not self.critic:
            raise SettingsError(
                f"--samples-per-prompt {self.samples_per_prompt} leaves every advantage zero\n"
                "  an answer is compared with its siblings: use at least 2, or --critic",
                samples_per_prompt=self.samples_per_prompt,
            )
        if self.prompts_per_step > self.task_size:
            raise SettingsError(
                f"--prompts-per-step {self.prompts_per_step} is more than --task-size {self.task_size}\n"
                "  one batch would hold a prompt twice; make the data set larger",
                prompts_per_step=self.prompts_per_step,
                task_size=self.task_size,
            )

    @property
    def prompts_per_slot(self) -> int:
        return self.prompts_per_step // self.slots

    @property
    def rows_per_slot(self) -> int:
        """Answers in one slot."""
        return self.prompts_per_slot * self.samples_per_prompt

    def check_world(self, world: int) -> None:
        """Refuse a number of ranks in a group over which a slot's prompts cannot be shared out."""
        if self.prompts_per_slot % world:
            raise SettingsError(
                f"{self.prompts_per_slot} prompts a slot cannot be shared out over {world} ranks of a group\n"
                f"  --prompts-per-step {self.prompts_per_step} / --slots {self.slots} must be a multiple of"
                f" {world}: every rank takes whole prompts, and as many as the others",
                prompts_per_slot=self.prompts_per_slot,
                world=world,
            )

    def _positive(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) > 0:
                raise SettingsError(
                    f"{_option(name)} is {getattr(self, name)}; it must be above 0", setting=name
                )

    def _not_negative(self, *names: str) -> None:
        for name in names:
            if not getattr(self, name) >= 0:
                raise SettingsError(
                    f"{_option(name)} is {getattr(self, name)}; it must be 0 or more", setting=name
                )


PRESETS: Mapping[str, Mapping[str, Any]] = {
    "tiny": {},
    "smollm2": {
        "prompts_per_step": 4,
        "samples_per_prompt": 4,
        # Asked plainly it answers half the sums; through its chat template it talks about them.
        "prompt_tokens": 20,
        "answer_tokens": 6,
        "steps": 10,
        "lr": 1e-5,
        "critic_lr": 1e-4,
        "warmup_steps": 2,
        "warmup_sft_steps": 0,
        "num_iterations": 1,
        "save_every": 2,
    },
}
"""Defaults that belong to a model. A folder takes those of ``smollm2``."""


def preset(model: str) -> Mapping[str, Any]:
    return PRESETS.get(model, PRESETS["smollm2"])


def add_flags(parser: argparse.ArgumentParser) -> None:
    """One flag for each field; an absent flag leaves no trace, so that a preset can fill it."""
    kinds = get_type_hints(GRPOConfig)
    for item in fields(GRPOConfig):
        text = f"{item.metadata['help']} [{_shown(item.default)}]".replace("%", "%%")
        if kinds[item.name] is bool:
            parser.add_argument(
                _option(item.name),
                action=argparse.BooleanOptionalAction,
                default=argparse.SUPPRESS,
                help=text,
            )
        else:
            kind = {"task_options": parse_task_options, "save_every": steps_or_words}.get(
                item.name, kinds[item.name]
            )
            parser.add_argument(_option(item.name), type=kind, default=argparse.SUPPRESS, help=text)


def from_flags(given: Mapping[str, Any]) -> GRPOConfig:
    """The config from parsed flags; others among them are ignored."""
    names = {item.name for item in fields(GRPOConfig)}
    chosen = {name: value for name, value in given.items() if name in names}
    model = chosen.get("model", "tiny")
    config = {**preset(model), **chosen}
    # The default options fit the default task; another task has its own names for them.
    if chosen.get("task", "chain_sum") != "chain_sum" and "task_options" not in chosen:
        config["task_options"] = ()
    return GRPOConfig(**config)


def to_flags(config: GRPOConfig) -> Sequence[str]:
    """The flags that give this config again, all of them spelled out."""
    flags = []
    for item in fields(config):
        value = getattr(config, item.name)
        if isinstance(value, bool):
            flags.append(_option(item.name) if value else _option(item.name).replace("--", "--no-", 1))
        else:
            flags.append(f"{_option(item.name)}={_shown(value)}")
    return flags


def parse_task_options(text: str) -> TaskOptions:
    """``a=1,b=[2,3],c=word`` as pairs; a value that is no JSON is a word."""
    pairs: list[str] = []
    for part in text.split(",") if text else []:
        if "=" in part:
            pairs.append(part)
        elif pairs:
            pairs[-1] += "," + part  # a comma inside a value
        else:
            raise argparse.ArgumentTypeError(f"{part!r} is not name=value")
    return tuple((name, _value(value)) for name, _, value in (pair.partition("=") for pair in pairs))


def steps_or_words(text: str) -> int | str:
    """A number of steps, or the words of another policy."""
    return int(text) if text.lstrip("-").isdecimal() else text


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{name}={json.dumps(item, separators=(',', ':'))}" for name, item in value)
    return str(value)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
