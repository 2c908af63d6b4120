"""Sampling answers, and the value that holds the answers of one slot.

Every array has one shape, decided by the config: prompts are padded on the left to one width,
answers are always sampled to the end, rows that have ended are padding. So every rank makes the
same number of forward passes (which FSDP2 needs), and a slot's numbers do not depend on which
other slots its owner holds.

Shapes: B rows, P prompt tokens, T answer tokens, L = P + T, C packed columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import signature

import torch
from torch import Tensor, nn

from ftckpt.errors import SettingsError
from ftckpt.integrations.grpo.config import GRPOConfig
from ftckpt.integrations.grpo.model import Policy
from ftckpt.integrations.grpo.seeds import derive, uniforms
from ftckpt.integrations.grpo.tasks import Task


@dataclass(frozen=True, slots=True, eq=False)
class SlotRollouts:
    """The answers of one slot, or of the part of it that one rank made; siblings side by side.

    ``step`` is the one they were generated for and ``weight_version`` the number of finished
    optimizer steps behind the weights that did; both stand in every row. ``width`` counts the
    tokens of a prompt without padding. The log-probabilities and values are those of the weights
    that generated, from the same forward pass that training makes, so the first ratio is exactly 1.
    """

    step_B: Tensor
    weight_version_B: Tensor
    prompt_B: Tensor
    sibling_B: Tensor
    width_B: Tensor
    tokens_BL: Tensor
    mask_BT: Tensor
    logp_BT: Tensor
    ref_logp_BT: Tensor
    value_BT: Tensor
    reward_B: Tensor

    def to(self, device: str | torch.device) -> SlotRollouts:
        return SlotRollouts(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})

    def rows(self, rank: int, world: int) -> SlotRollouts:
        """The equal part of the rows that belongs to one rank of a group."""
        count = len(self.reward_B) // world
        part = slice(rank * count, (rank + 1) * count)
        return SlotRollouts(**{f.name: getattr(self, f.name)[part] for f in fields(self)})


def columns(config: GRPOConfig) -> int:
    """C: the width of a packed row."""
    return 6 + config.prompt_tokens + 5 * config.answer_tokens


def pack(rollouts: SlotRollouts) -> Tensor:
    """Rollouts as one int32 tensor of shape (B, C); float bits are kept as they are."""
    parts = []
    for item in fields(rollouts):
        value = getattr(rollouts, item.name)
        value = value.view(torch.int32) if value.dtype == torch.float32 else value.to(torch.int32)
        parts.append(value if value.dim() == 2 else value[:, None])
    return torch.cat(parts, dim=1).cpu()


def unpack(packed_BC: Tensor, config: GRPOConfig) -> SlotRollouts:
    """The rollouts that ``pack`` was given, bit for bit."""
    T, L = config.answer_tokens, config.prompt_tokens + config.answer_tokens
    assert packed_BC.shape[1] == columns(config), packed_BC.shape
    sizes = [1, 1, 1, 1, 1, L, T, T, T, T, 1]  # in the order of the fields
    step, version, prompt, sibling, width, tokens, mask, logp, ref_logp, value, reward = torch.split(
        packed_BC, sizes, dim=1
    )
    return SlotRollouts(
        step_B=step[:, 0].long(),
        weight_version_B=version[:, 0].long(),
        prompt_B=prompt[:, 0].long(),
        sibling_B=sibling[:, 0].long(),
        width_B=width[:, 0].long(),
        tokens_BL=tokens.long(),
        mask_BT=_floats(mask),
        logp_BT=_floats(logp),
        ref_logp_BT=_floats(ref_logp),
        value_BT=_floats(value),
        reward_B=_floats(reward)[:, 0],
    )


@torch.no_grad()
def roll(
    policy: Policy,
    reference: nn.Module,
    critic: nn.Module | None,
    task: Task,
    config: GRPOConfig,
    prompts: Sequence[int],
    *,
    step: int,
    weight_version: int,
) -> SlotRollouts:
    """Answer each of ``prompts`` ``samples_per_prompt`` times with the policy as it is now.

    Under FSDP2 every rank of the group calls this at the same time, with as many prompts.
    """
    tokenizer, P = policy.tokenizer, config.prompt_tokens
    asked = [
        (prompt, sibling, derive(config.seed, "sample", step, prompt, sibling))
        for prompt in prompts
        for sibling in range(config.samples_per_prompt)
    ]
    prompt_rows = {prompt: _left_padded(policy, task.question(prompt), P) for prompt in prompts}
    prompt_BP = torch.tensor([prompt_rows[prompt][0] for prompt, _, _ in asked], device=config.device)
    width_B = torch.tensor([prompt_rows[prompt][1] for prompt, _, _ in asked], device=config.device)
    uniform_BT = torch.stack([uniforms(seed, config.answer_tokens) for _, _, seed in asked])

    tokens_BL, mask_BT = sample(policy, prompt_BP, width_B, uniform_BT, config.temperature)
    logp_BT = answer_logp(policy.model, tokens_BL, width_B, P, config.temperature)
    ref_logp_BT = answer_logp(reference, tokens_BL, width_B, P, config.temperature)
    if critic is None:
        value_BT = torch.zeros_like(logp_BT)
    else:
        value_BT = answer_values(critic, tokens_BL, width_B, P)

    answers = [
        tokenizer.decode([token for token, real in zip(tokens, mask, strict=True) if real])
        for tokens, mask in zip(tokens_BL[:, P:].tolist(), mask_BT.tolist(), strict=True)
    ]
    rewards = [task.score(prompt, answer) for (prompt, _, _), answer in zip(asked, answers, strict=True)]
    return SlotRollouts(
        step_B=torch.full((len(asked),), step),
        weight_version_B=torch.full((len(asked),), weight_version),
        prompt_B=torch.tensor([prompt for prompt, _, _ in asked]),
        sibling_B=torch.tensor([sibling for _, sibling, _ in asked]),
        width_B=width_B,
        tokens_BL=tokens_BL,
        mask_BT=mask_BT,
        logp_BT=logp_BT,
        ref_logp_BT=ref_logp_BT,
        value_BT=value_BT,
        reward_B=torch.tensor(rewards, dtype=torch.float32),
    ).to("cpu")


def sample(
    policy: Policy, prompt_BP: Tensor, width_B: Tensor, uniform_BT: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Answers drawn token by token with a KV cache: ``tokens_BL`` and ``mask_BT``, which is 1 up to
    and with the end token.

    The draw inverts the cumulative distribution at a given number, in float64 on the CPU: a
    cumulative sum on a GPU need not have the same bits twice.
    """
    from transformers import DynamicCache

    eos, pad = policy.tokenizer.eos_id, policy.tokenizer.pad_id
    B, P = prompt_BP.shape
    T = uniform_BT.shape[1]
    tokens_BL = torch.cat([prompt_BP, prompt_BP.new_full((B, T), pad)], dim=1)
    mask_BT = torch.zeros(B, T, device=prompt_BP.device)
    attend_BL, position_BL = _layout(width_B, P, T)
    running_B = torch.ones(B, dtype=torch.bool, device=prompt_BP.device)
    cache, cache_name = DynamicCache(), _cache_name(policy.model)
    seen = 0
    for t in range(T):
        logits_BV = policy.model(
            input_ids=tokens_BL[:, seen : P + t],
            attention_mask=attend_BL[:, : P + t],
            position_ids=position_BL[:, seen : P + t],
            use_cache=True,
            logits_to_keep=1,
            **{cache_name: cache},
        ).logits[:, -1]
        seen = P + t
        cdf_BV = (logits_BV.double().cpu() / temperature).softmax(dim=-1).cumsum(dim=-1)
        goal_B1 = uniform_BT[:, t : t + 1] * cdf_BV[:, -1:]
        drawn_B = torch.searchsorted(cdf_BV, goal_B1, right=True)[:, 0].clamp(max=cdf_BV.shape[1] - 1)
        drawn_B = drawn_B.to(tokens_BL.device)
        tokens_BL[:, P + t] = torch.where(running_B, drawn_B, pad)
        mask_BT[:, t] = running_B
        running_B = running_B & (drawn_B != eos)
    return tokens_BL, mask_BT


def answer_logp(model: nn.Module, tokens_BL: Tensor, width_B: Tensor, P: int, temperature: float) -> Tensor:
    """Log-probabilities of the answer tokens, of shape (B, T), under ``model``."""
    T = tokens_BL.shape[1] - P
    attend_BL, position_BL = _layout(width_B, P, T)
    logits_BTV = model(
        input_ids=tokens_BL,
        attention_mask=attend_BL,
        position_ids=position_BL,
        use_cache=False,
        logits_to_keep=T + 1,
    ).logits[:, :-1]
    logp_BTV = (logits_BTV / temperature).log_softmax(dim=-1)
    answer_BT1 = tokens_BL[:, P:, None]
    logp_BT: Tensor = logp_BTV.gather(-1, answer_BT1).squeeze(-1)
    return logp_BT


def answer_values(critic: nn.Module, tokens_BL: Tensor, width_B: Tensor, P: int) -> Tensor:
    """What the critic expects just before each answer token, of shape (B, T)."""
    attend_BL, position_BL = _layout(width_B, P, tokens_BL.shape[1] - P)
    value_BL: Tensor = critic(tokens_BL, attend_BL, position_BL)
    return value_BL[:, P - 1 : -1]


def _layout(width_B: Tensor, P: int, T: int) -> tuple[Tensor, Tensor]:
    """Attention mask and positions of rows whose prompt ends at column P. What follows the end of
    an answer is attended to by nothing that counts.
    """
    column_L = torch.arange(P + T, device=width_B.device)
    position_BL = column_L[None, :] - (P - width_B)[:, None]
    return (position_BL >= 0).long(), position_BL.clamp(min=0)


def _cache_name(model: nn.Module) -> str:
    """transformers 5 renames this argument on its way, and warns of the old name."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


def _left_padded(policy: Policy, question: str, P: int) -> tuple[list[int], int]:
    tokens = policy.tokenizer.prompt(question)
    if not 0 < len(tokens) <= P:
        raise SettingsError(
            f"the prompt {question!r} has {len(tokens)} tokens; --prompt-tokens is {P}\n"
            "  prompts are never cut: raise --prompt-tokens",
            prompt_tokens=P,
            found=len(tokens),
        )
    return [policy.tokenizer.pad_id] * (P - len(tokens)) + tokens, len(tokens)


def _floats(bits: Tensor) -> Tensor:
    return bits.contiguous().view(torch.float32)
