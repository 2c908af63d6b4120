"""When to save: the words of ``save_every``, and what follows from what was measured.

Pure: no clock, no store, no ranks. Whoever asks says what time it is and what saves have cost; who of
several ranks asks, and how the others hear of the answer, is the session's business.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

from ftckpt.errors import SettingsError

SaveEvery = int | str | timedelta | None
"""Steps; seconds (``"90s"``, ``"15m"``, ``"1.5h"`` or a ``timedelta``); ``"continuous"``; ``"auto"``."""

UNSEEN_MTBF_S = 24 * 3600.0
"""Taken for granted while a run has not ended unexpectedly yet."""

_SPAN = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|m|h|d)")
_UNIT_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_LONGEST_S = 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Policy:
    """``steps``: after every so many. ``seconds``: at the first boundary so long after the last save
    began. ``continuous``: at the first boundary after the last is durable. ``auto``: ``seconds`` that
    follow from measures. ``never``: only the first, the last, and when asked.
    """

    kind: Literal["never", "steps", "seconds", "continuous", "auto"] = "never"
    steps: int = 0
    seconds: float = 0.0

    @property
    def measures_time(self) -> bool:
        """Whether clocks decide, which no two ranks read alike."""
        return self.kind in ("seconds", "continuous", "auto")


def parse(words: object) -> Policy:
    """What ``save_every`` means. Raises ``SettingsError`` for what means nothing."""
    if words is None:
        return Policy()
    if isinstance(words, str):
        text = words.strip().lower()
        if text == "continuous":
            return Policy("continuous")
        if text == "auto":
            return Policy("auto")
        if text.isdecimal() and int(text) > 0:
            return Policy("steps", steps=int(text))
        span = _SPAN.fullmatch(text)
        seconds = float(span[1]) * _UNIT_S[span[2]] if span else 0.0
    elif isinstance(words, timedelta):
        seconds = words.total_seconds()
    elif isinstance(words, int) and not isinstance(words, bool) and words > 0:
        return Policy("steps", steps=words)
    else:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST_S:
        raise SettingsError(
            f"SettingsError: save_every={words!r} has no meaning\n"
            '  give a whole number of steps from 1, seconds ("90s", "15m", "1.5h", a timedelta), '
            '"continuous", "auto", or None',
            setting="save_every",
            found=words,
        )
    return Policy("seconds", seconds=seconds)


# --- due -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moment:
    """A boundary: the step just finished, the time since the last save began, and whether one is
    still under way.
    """

    step: int
    since_s: float
    under_way: bool


def due(policy: Policy, at: Moment, interval_s: float | None = None) -> bool:
    """Whether a save should begin now. ``interval_s`` is that of ``"auto"``; ``None``: not known yet."""
    if policy.kind == "steps":
        return at.step % policy.steps == 0
    if policy.kind == "seconds":
        return at.since_s >= policy.seconds
    if policy.kind == "continuous":
        return not at.under_way
    if policy.kind == "auto":
        return interval_s is not None and not at.under_way and at.since_s >= interval_s
    return False


# --- auto ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Costs:
    """What was measured. ``stall_s``: training stood still in ``save()``. ``slowed_s``: by so much all
    steps beside one save took longer than steps beside none. ``durable_s``: until it was readable.
    """

    stall_s: float
    slowed_s: float
    durable_s: float
    step_s: float

    @property
    def save_s(self) -> float:
        """The training time that one save costs."""
        return self.stall_s + self.slowed_s


@dataclass(frozen=True, slots=True)
class Ends:
    """How often this job ended. ``steps`` are those that attempts before this one trained, as far as
    their commits tell, and this one since.
    """

    ended: int
    steps: int

    def mtbf_s(self, step_s: float) -> float:
        """The expected time between ends."""
        trained_s = self.steps * step_s
        return max(trained_s, step_s) / self.ended if self.ended else UNSEEN_MTBF_S + trained_s


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval between the beginnings of two saves, and why it is what it is."""

    seconds: float
    why: tuple[str, ...]


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """The time of training between saves of ``cost_s`` each that loses least, when failures come at
    random every ``mtbf_s``: Young's sqrt(2 C M) with Daly's higher-order terms (2006, equation 37).
    """
    assert cost_s >= 0 and mtbf_s > 0, (cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9) - cost_s


def choose_interval(costs: Costs, ends: Ends, mtbf_s: float | None = None) -> Interval:
    """The interval of ``"auto"``. ``mtbf_s``: what the user expects, instead of what the run shows."""
    expected_s = mtbf_s if mtbf_s is not None else ends.mtbf_s(costs.step_s)
    if mtbf_s is not None:
        why = f"a failure every {_span(expected_s)} was given (mtbf_s)"
    elif ends.ended:
        why = (
            f"{ends.ended} earlier attempts ended within {ends.steps} steps of {_span(costs.step_s)}: "
            f"a failure every {_span(expected_s)}"
        )
    else:
        why = f"no attempt of this run has ended yet: a failure every {_span(expected_s)} is assumed"
    cost = (
        f"a save costs {_span(costs.save_s)} of training: {_span(costs.stall_s)} of standing still, "
        f"{_span(costs.slowed_s)} of slower steps"
    )
    best_s = daly_s(costs.save_s, expected_s) + costs.save_s
    if best_s >= costs.durable_s:
        return Interval(best_s, (why, cost))
    bound = f"a save takes {_span(costs.durable_s)} until it is readable, and two never overlap"
    return Interval(costs.durable_s, (why, cost, bound))


def _span(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
