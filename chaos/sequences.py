"""Random sequences of kills, drawn from a seed and played on a job.

``draw`` is pure: a seed and a number of groups give a plan, the same one always. ``play`` does what
the plan says and proves that each kill fired. Every sequence ends with the death of everything and
``ftckpt resume``; what the job's state must then be is for the caller to compare.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from ftckpt.chaos.killing import Heard, Job, Killed, KillingFailed, finished_step, last_act, where_it_died

EVERYTHING = "everything"


class Moment(Enum):
    """What the first victim, or for a heal the group that comes back, is doing when the kill comes."""

    STEP = "in a step"
    SAVE = "in a save"
    HEAL = "in a heal"


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill. ``victims`` are groups, ``supervisor``, or ``everything``.

    It comes ``delay_s`` after its moment, no earlier than ``after_steps`` steps after the kill before.
    ``whole``: it also waits for all groups to be back.
    """

    victims: tuple[str, ...]
    moment: Moment
    after_steps: int
    delay_s: float
    whole: bool = False

    def __str__(self) -> str:
        return f"{' and '.join(self.victims)} {self.moment.value}"


@dataclass(frozen=True, slots=True)
class Plan:
    """A job's fate. ``resume_groups`` is how many groups it comes back with at the end."""

    groups: int
    kills: tuple[Kill, ...]
    resume_groups: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"g{number}" for number in range(self.groups))

    def __str__(self) -> str:
        kills = ", then ".join(map(str, self.kills))
        return f"{self.groups} groups: kill {kills}; resume with {self.resume_groups}"


@dataclass(frozen=True, slots=True)
class Fired:
    """A kill that was done, and what its victims had last said of themselves."""

    kill: Kill
    killed: Killed
    hit: tuple[str, ...]

    def __str__(self) -> str:
        pids = ", ".join(f"{name} ({pid})" for name, pid in self.killed.pids.items())
        return f"SIGKILL to {pids}; {'; '.join(self.hit)}"


def draw(seed: int, groups: int) -> Plan:
    """The plan that a seed means. Pure."""
    dice = random.Random(f"{seed} {groups}")
    names = [f"g{number}" for number in range(groups)]
    kills = [_of_groups(dice, names)]
    if groups > 1 and dice.random() < 0.4:
        # In the next heal: either the one that heals, or one that it may heal from.
        kills.append(Kill((dice.choice(names),), Moment.HEAL, 0, dice.uniform(0.0, 0.3)))
    last = dice.choice([("supervisor",), (EVERYTHING,)])
    moment = dice.choice([Moment.STEP, Moment.SAVE])
    kills.append(Kill(last, moment, dice.randrange(1, 6), _delay_s(dice, moment), whole=True))
    return Plan(groups, tuple(kills), dice.choice([groups, groups, max(1, groups - 1)]))


def _of_groups(dice: random.Random, names: Sequence[str]) -> Kill:
    """One group, seldom all of them at once."""
    victims = tuple(names) if len(names) > 1 and dice.random() < 0.2 else (dice.choice(names),)
    moment = dice.choice([Moment.STEP, Moment.STEP, Moment.SAVE])
    return Kill(victims, moment, dice.randrange(1, 9), _delay_s(dice, moment))


def _delay_s(dice: random.Random, moment: Moment) -> float:
    return dice.uniform(0.0, 0.2) if moment is Moment.STEP else dice.uniform(0.0, 0.06)


def play(
    plan: Plan,
    job: Job,
    run: str,
    command: Sequence[str],
    *,
    save_every: int,
    patience_step: int,
    limit_s: float,
    tell: Callable[[str], None] = lambda _text: None,
) -> list[Fired]:
    """Start the job, kill what the plan says, resume, and wait for the job's end.

    From ``patience_step`` on a kill waits for nothing any more but a step: a machine that starts
    groups slowly never makes a kill miss the job. ``limit_s`` is for each wait.

    Raises ``KillingFailed`` when a kill did not fire or the job did not end well.
    """
    fired: list[Fired] = []
    tell(str(plan))
    job.start("run", run, "--json", f"--groups={plan.groups}", "--", *command)
    for kill in plan.kills:
        fired.append(_kill(plan, kill, job, save_every, patience_step, limit_s))
        tell(str(fired[-1]))
    since = len(job.heard)
    job.start("resume", run, "--json", f"--groups={plan.resume_groups}")
    on = job.wait("a new attempt", lambda e: e.name == "attempt.goes_on", limit_s, since).fields
    job.finish(limit_s)
    tell(f"attempt {on['attempt']} went on from step {on['step']}, finished step {finished_step(job.heard)}")
    _check_lives(fired, job.heard)
    return fired


def _kill(plan: Plan, kill: Kill, job: Job, save_every: int, patience_step: int, limit_s: float) -> Fired:
    job.look()
    since, target = len(job.heard), finished_step(job.heard) + kill.after_steps
    groups = set(kill.victims) & set(plan.names) or set(plan.names)
    joined = {"all": not kill.whole}

    def due(event: Heard) -> bool:
        step = event.begun()
        if step is not None and event.participants() == plan.groups:
            joined["all"] = True
        if step is not None and step >= patience_step:
            return True
        if kill.moment is Moment.HEAL:
            return _joins(event)
        if event.source not in groups or not joined["all"]:
            return False
        if kill.moment is Moment.SAVE:
            done = event.voted()
            return done is not None and done >= target and done % save_every == 0
        return step is not None and step >= target

    job.wait(f"the moment to kill {kill}", due, limit_s, since)
    time.sleep(kill.delay_s)
    job.look()
    alive = job.pids()
    names = tuple(alive) if EVERYTHING in kill.victims else kill.victims
    for name in names:
        if name not in alive:  # between two lives: it is killed as soon as it lives again
            job.wait(f"{name} to be started", _started(name), limit_s, len(job.heard))
    killed = job.kill(*names)
    struck = plan.names if "supervisor" in names else names
    hit = tuple(f"{name} died {where_it_died(*last_act(job.heard, name))}" for name in struck)
    return Fired(kill, killed, hit)


def _joins(event: Heard) -> bool:
    """A group that was restarted has its state built and asks for a quorum: it is healed next."""
    said = event.fields
    first = event.name == "group.turn" and said.get("phase") == "asked" and not said.get("participants")
    return event.source != "job" and first and int(said.get("life", 0)) > 0


def _started(name: str) -> Callable[[Heard], bool]:
    return lambda e: e.name == "group.started" and e.fields["group"] == name


def _check_lives(fired: Sequence[Fired], heard: Sequence[Heard]) -> None:
    """Every kill left its mark in what the supervisors said: a death by SIGKILL, or a new attempt."""
    for one in fired:
        after = [e for e in heard if e.source == "job" and e.unix_s >= one.killed.unix_s]
        if "supervisor" in one.killed.pids:
            if not any(e.name == "attempt.started" for e in after):
                raise KillingFailed(f"no attempt was started after: {one}")
            continue
        for group in one.killed.pids:
            died = [e for e in after if e.name == "group.died" and e.fields["group"] == group]
            if not died or died[0].fields["how"] != "killed by SIGKILL":
                raise KillingFailed(f"the supervisor did not see {group} die by SIGKILL after: {one}")
            life = int(died[0].fields["life"])
            lives = [e for e in after if e.name == "group.started" and e.fields["group"] == group]
            anew = any(e.name == "attempt.started" for e in after)
            if not anew and not any(int(e.fields["life"]) > life for e in lives):
                raise KillingFailed(f"{group} did not come to life again after: {one}")
