"""How exact a session's job is, and why not better."""

from __future__ import annotations

import torch

from ftckpt.guarantee import Facts, judge
from ftckpt.manifest import Commit, Guarantee
from ftckpt.session.settings import Settings


def exactness(
    settings: Settings, restored: Commit | None, *, rng_restored: bool, groups: int
) -> tuple[Guarantee, tuple[str, ...]]:
    """The guarantee of a save or a resume: never better than that of the commit it went on from."""
    now, why = judge(
        Facts(
            deterministic=torch.are_deterministic_algorithms_enabled(),
            derives_seeds=settings.derives_seeds,
            rng_restored=rng_restored,
            groups=groups,
        )
    )
    if restored is None:
        return now, why
    return max(restored.guarantee, now), tuple(dict.fromkeys((*restored.why, *why)))
