"""Which commits count: computed from names and starts alone.

From the newest start downwards: the commits of an attempt whose step is at most the smallest parent
step of its descendants. The parent that a commit names is a check, not a link, so collecting old
commits breaks nothing. Readable: the commit exists, is no ``aborted`` record, and has no tombstone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from ftckpt.manifest import Position


@dataclass(frozen=True, slots=True)
class View:
    """What one look at a run showed.

    ``starts`` maps an attempt to its parent (``None``: it began from nothing). ``commits`` are
    occupied commit keys; ``aborted`` those of them known to be aborted records.
    """

    claims: frozenset[int] = frozenset()
    starts: Mapping[int, Position | None] = field(default_factory=dict)
    commits: frozenset[Position] = frozenset()
    aborted: frozenset[Position] = frozenset()
    collected: frozenset[Position] = frozenset()

    @property
    def readable(self) -> frozenset[Position]:
        """Commits that can be read, on the lineage or off it."""
        return self.commits - self.aborted - self.collected

    @property
    def newest_claim(self) -> int:
        """The highest attempt anybody claimed; 0 when there is none."""
        return max(self.claims, default=0)

    @property
    def newest_start(self) -> int:
        """The highest attempt that began; 0 when there is none."""
        return max(self.starts, default=0)


def reach(view: View, newest: int | None = None) -> dict[int, int | None]:
    """For every attempt on the lineage of start ``newest`` (default: the newest), the highest step
    that counts; ``None`` for the newest attempt itself, which has no bound.
    """
    attempt = view.newest_start if newest is None else newest
    bounds: dict[int, int | None] = {}
    bound: int | None = None
    while attempt in view.starts and attempt not in bounds:
        bounds[attempt] = bound
        parent = view.starts[attempt]
        if parent is None:
            break
        bound = parent.step if bound is None else min(bound, parent.step)
        attempt = parent.attempt
    return bounds


def trained(view: View, before: int) -> tuple[int, int]:
    """How many attempts before attempt ``before`` began, and how many steps they trained as far as their
    commits tell, collected ones included.
    """
    began = {
        attempt: parent.step if parent else 0 for attempt, parent in view.starts.items() if attempt < before
    }
    newest = dict(began)
    for at in view.commits | view.collected:
        if at.attempt in newest:
            newest[at.attempt] = max(newest[at.attempt], at.step)
    return len(began), sum(newest[attempt] - began[attempt] for attempt in began)


def on_lineage(
    view: View, among: Collection[Position] | None = None, newest: int | None = None
) -> list[Position]:
    """Positions (default: readable commits) on the lineage, newest first.

    Where two attempts committed the same step, the descendant's counts and the ancestor's does not.
    """
    bounds = reach(view, newest)
    chosen: dict[int, Position] = {}
    for at in sorted(view.readable if among is None else among):
        if at.attempt in bounds and ((bound := bounds[at.attempt]) is None or at.step <= bound):
            chosen[at.step] = at
    return sorted(chosen.values(), reverse=True)


def orphans(view: View) -> list[Position]:
    """Readable commits that are on no lineage of the newest start, newest first."""
    kept = set(on_lineage(view))
    return sorted(view.readable - kept, reverse=True)
