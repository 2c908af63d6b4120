"""The arithmetic of GRPO: pure functions on tensors, nothing kept.

Shapes: B rows (prompts × samples, siblings side by side), T answer tokens.
Every mean is over the rows at hand and no others, so a slot's loss never depends on another slot.
"""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(reward_B: Tensor, samples: int) -> Tensor:
    """How much better an answer is than its siblings, in their standard deviations."""
    reward_PS = reward_B.view(-1, samples)
    mean = reward_PS.mean(dim=1, keepdim=True)
    spread = reward_PS.std(dim=1, keepdim=True, correction=0)
    return ((reward_PS - mean) / (spread + 1e-4)).view(-1)


def mean_over_answers(value_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """The mean over a row's answer tokens, then over rows: a long answer weighs as much as a short
    one. (A mean over all tokens would need the token count of the other slots.)
    """
    return ((value_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1).clamp(min=1)).mean()


def clipped_ratio(logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic objective as a loss, token by token."""
    ratio_BT = (logp_BT - old_logp_BT).exp()
    return -torch.minimum(ratio_BT * advantage_BT, ratio_BT.clamp(1 - clip, 1 + clip) * advantage_BT)


def is_clipped(logp_BT: Tensor, old_logp_BT: Tensor, clip: float) -> Tensor:
    """1.0 where the ratio has left the interval."""
    ratio_BT = (logp_BT - old_logp_BT).exp()
    return ((ratio_BT < 1 - clip) | (ratio_BT > 1 + clip)).to(ratio_BT.dtype)


def kl_k3(logp_BT: Tensor, ref_logp_BT: Tensor) -> Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference): unbiased, never negative."""
    log_ratio_BT = ref_logp_BT - logp_BT
    return log_ratio_BT.exp() - log_ratio_BT - 1


def value_error(value_BT: Tensor, reward_B: Tensor) -> Tensor:
    """Half the squared distance to the answer's reward, which is the return of each of its tokens
    (no discount, one reward at the end).
    """
    return 0.5 * (value_BT - reward_B[:, None]).square()
