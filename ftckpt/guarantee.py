"""How exact a resume from a commit is, and why it is not better. A pure judgement of facts.

E1: the same bits as the uninterrupted run. E2: the same, given the recorded rollouts. E3: nothing
lost or used twice. E4: the curve within tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

from ftckpt.manifest import Guarantee


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides. ``derives_seeds``: the trainer makes every random draw a function of (run seed,
    step, slot). ``rng_restored``: the global generators go on where they were saved.
    """

    deterministic: bool
    derives_seeds: bool
    rng_restored: bool
    groups: int


def judge(facts: Facts) -> tuple[Guarantee, tuple[str, ...]]:
    """The class, and every reason why it is not a better one."""
    reasons = []
    if not facts.deterministic:
        reasons.append("torch.use_deterministic_algorithms is off: kernels may sum in another order")
    if not facts.derives_seeds:
        if not facts.rng_restored:
            reasons.append(
                "the random generators were reseeded at a resume: the trainer does not derive its seeds"
            )
        if facts.groups > 1:
            reasons.append("several replica groups share the work, and the trainer does not derive its seeds")
    return ("E3" if reasons else "E1"), tuple(reasons)
