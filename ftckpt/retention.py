"""Which commits to keep: a pure choice among those on the lineage. Order is by step, never by time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ftckpt.bounds import require_number
from ftckpt.manifest import Position


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the newest ``last`` commits, and every commit whose step is a multiple of ``every``.

    ``last=None`` keeps all. The newest commit is always kept, so ``last`` is at least 1.
    """

    last: int | None = 3
    every: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("last", self.last), ("every", self.every)):
            require_number(f"keep {name}", value, low=1, high=10**12, whole=True, optional=True)


def retained(lineage: Sequence[Position], keep: Keep) -> frozenset[Position]:
    """Those of ``lineage`` (any order) that the policy keeps."""
    newest_first = sorted(lineage, reverse=True)
    if keep.last is None:
        return frozenset(newest_first)
    kept = set(newest_first[: keep.last])
    if keep.every is not None:
        kept.update(at for at in newest_first if at.step % keep.every == 0)
    return frozenset(kept)
