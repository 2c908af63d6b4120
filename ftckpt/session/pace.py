"""The pace of a session's saves: measures steps and saves, and asks the policy at every boundary.

Only one process of a job asks; how the others hear that a save is due is the session's business.
"""

from __future__ import annotations

from ftckpt.clock import Clock
from ftckpt.events import Event, Events
from ftckpt.policy import Costs, Ends, Interval, Moment, Policy, choose_interval, due

_FADE = 0.9
_TOLD_AGAIN = 1.25


class _Mean:
    """A mean in which older values fade."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        self._sum = _FADE * self._sum + value
        self._weight = _FADE * self._weight + 1.0

    @property
    def value(self) -> float | None:
        return self._sum / self._weight if self._weight else None


class Pace:
    """Called by the trainer's thread: ``step_begins``, ``step_ended`` around every step, ``saved``
    after every ``save()``, ``durable`` once a save is readable.
    """

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        events: Events,
        mtbf_s: float | None = None,
        ends: Ends | None = None,
    ) -> None:
        self._policy, self._clock, self._events = policy, clock, events
        self._mtbf_s, self._ends = mtbf_s, ends or Ends(0, 0)
        self._save_began_s = clock.now_s()
        self._step_began_s = clock.now_s()
        self._beside_save = False
        self._steps = self._steps_beside = self._saves = 0
        self._quiet, self._busy = _Mean(), _Mean()
        self._stall, self._durable = _Mean(), _Mean()
        self._told_s: float | None = None

    def step_begins(self, *, under_way: bool) -> None:
        """The trainer goes on; ``under_way``: a save is."""
        self._step_began_s, self._beside_save = self._clock.now_s(), under_way

    def step_ended(self) -> None:
        """The trainer is back."""
        took_s = self._clock.now_s() - self._step_began_s
        self._steps += 1
        self._steps_beside += self._beside_save
        (self._busy if self._beside_save else self._quiet).add(took_s)

    def saved(self, stall_s: float) -> None:
        """A save has begun, and training stood still for so long."""
        self._save_began_s = self._clock.now_s() - stall_s
        self._saves += 1
        self._stall.add(stall_s)

    def durable(self, seconds: float) -> None:
        """A save became readable so long after it was asked for."""
        self._durable.add(seconds)

    def due(self, step: int, *, under_way: bool) -> bool:
        """Whether a save should begin at this boundary."""
        if self._policy.kind == "auto" and not self._saves:
            return True  # what a save costs is known from saves alone
        at = Moment(step, self._clock.now_s() - self._save_began_s, under_way)
        return due(self._policy, at, self._interval_s() if self._policy.kind == "auto" else None)

    def _interval_s(self) -> float | None:
        """Of ``"auto"``, from the measures so far; told when it has changed by a quarter."""
        costs = self._costs()
        if costs is None:
            return None
        ends = Ends(self._ends.ended, self._ends.steps + self._steps)
        interval = choose_interval(costs, ends, self._mtbf_s)
        last_s = self._told_s
        if last_s is None or not last_s / _TOLD_AGAIN <= interval.seconds <= last_s * _TOLD_AGAIN:
            self._told_s = interval.seconds
            self._events(_told(interval, costs))
        return interval.seconds

    def _costs(self) -> Costs | None:
        """``None`` until a save was readable and a step was trained."""
        stall_s, durable_s = self._stall.value, self._durable.value
        quiet_s, busy_s = self._quiet.value, self._busy.value
        step_s = quiet_s if quiet_s is not None else busy_s
        if stall_s is None or durable_s is None or step_s is None:
            return None
        slower_s = max(0.0, busy_s - step_s) if busy_s is not None else 0.0
        return Costs(stall_s, slower_s * self._steps_beside / self._saves, durable_s, step_s)


def _told(interval: Interval, costs: Costs) -> Event:
    return Event(
        "save.interval",
        {
            "seconds": round(interval.seconds, 3),
            "save_s": round(costs.save_s, 4),
            "durable_s": round(costs.durable_s, 3),
            "why": list(interval.why),
        },
    )
