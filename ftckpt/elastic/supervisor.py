"""The supervisor of one job on one machine: a lighthouse, replica groups, and when to begin anew.

Knows processes and attempts' numbers. Refuses to know stores: whoever needs a new attempt calls
``new_attempt``. Deciding is ``decide``, a pure function over what the groups are; the rest does it.

*Carriers.* An attempt lives as long as some process holds its state. A group carries it from the
attempt's beginning until it dies; once any group has passed a step vote, only those that have do;
a restarted group does from its first passed vote on. When the last carrier is gone, what is left
would come from the store: that is a new attempt (protocol.md §3), never this one.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import FrameType
from typing import Any

from ftckpt.clock import Clock, SystemClock
from ftckpt.elastic.lighthouse import lighthouse_command
from ftckpt.elastic.processes import Process, Tail, describe_exit, free_port
from ftckpt.errors import SettingsError
from ftckpt.events import Event, Events, silent

NEEDS_NEW_ATTEMPT = 75
"""EX_TEMPFAIL: what a rank exits with on ``AttemptWentBack``."""
POLL_S = 0.03
DROPPED = ("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS")
"""Left over from a torchrun around us; ranks would wait for its store."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """One attempt of a job.

    ``groups`` replica groups of ``nproc`` ranks each run ``command``. A group may be restarted
    ``max_restarts`` times within ``restart_window_s``, then it is given up; below ``min_groups``
    the job stops. After ``max_attempts`` attempts in a row that finished no new step it stops too.
    """

    run: str
    attempt: int
    command: tuple[str, ...]
    groups: int = 1
    nproc: int = 1
    min_groups: int = 1
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    max_restarts: int = 5
    restart_window_s: float = 600.0
    max_attempts: int = 3
    backoff_s: float = 0.5
    max_backoff_s: float = 30.0
    grace_s: float = 60.0
    stall_timeout_s: float = 600.0
    heartbeat_timeout_ms: int = 1000
    join_timeout_ms: int = 5000
    log_dir: str | None = None

    def __post_init__(self) -> None:
        if not self.command:
            raise SettingsError("there is no command to run")
        if not 1 <= self.min_groups <= self.groups:
            raise SettingsError(
                f"min_groups {self.min_groups} must lie between 1 and groups {self.groups}",
                min_groups=self.min_groups,
                groups=self.groups,
            )
        if self.nproc < 1 or self.attempt < 1 or self.max_attempts < 1 or self.max_restarts < 0:
            raise SettingsError("nproc, attempt and max_attempts count from 1, max_restarts from 0")


class Phase(Enum):
    """Where a group is in its life."""

    RUNNING = "running"
    WAITING = "waiting to be restarted"
    FINISHED = "finished"
    GIVEN_UP = "given up"


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """One group, for people and for ``decide``. ``voted``: it has passed a step vote in this life."""

    group: str
    phase: Phase
    life: int = 0
    voted: bool = False
    step: int | None = None
    participants: int | None = None
    doing: str = "starting"
    pids: tuple[int, ...] = ()


class Verdict(Enum):
    """What becomes of an attempt."""

    GO_ON = "go on"
    FINISHED = "finished"
    OVER = "over"
    TOO_FEW = "too few groups"


def carriers(groups: Sequence[GroupStatus], *, anyone_voted: bool) -> tuple[str, ...]:
    """The running groups that hold the attempt's state. ``anyone_voted``: in this attempt, dead
    groups included.
    """
    running = [g for g in groups if g.phase is Phase.RUNNING]
    if anyone_voted:
        return tuple(g.group for g in running if g.voted)
    return tuple(g.group for g in running if g.life == 0)


def decide(groups: Sequence[GroupStatus], *, min_groups: int, anyone_voted: bool) -> Verdict:
    """What follows from where the groups are. Pure.

    A group that ended with 0 has seen the job's end committed: nobody is restarted any more, and
    the job has finished when no carrier is left running.
    """
    living = carriers(groups, anyone_voted=anyone_voted)
    if any(g.phase is Phase.FINISHED for g in groups):
        return Verdict.GO_ON if living else Verdict.FINISHED
    if sum(g.phase is not Phase.GIVEN_UP for g in groups) < min_groups:
        return Verdict.TOO_FEW
    return Verdict.GO_ON if living else Verdict.OVER


class Supervisor:
    """Runs a job to its end. ``run`` blocks, on the thread that lives longest (the main one)."""

    def __init__(
        self,
        plan: JobPlan,
        *,
        environ: Mapping[str, str],
        new_attempt: Callable[[], JobPlan],
        events: Events = silent,
        output: Callable[[str, str], None] | None = None,
        clock: Clock | None = None,
        tend: Callable[[], None] = lambda: None,
    ) -> None:
        """``environ`` is what the ranks inherit. ``new_attempt`` claims the next attempt and says
        how to run it; what it raises ends the job. ``output`` gets every line that a rank prints,
        with the rank's name (``g1.0``). ``tend`` is called all the time, and looks after what else the job
        needs.
        """
        self._plan = plan
        self._environ = {name: value for name, value in environ.items() if name not in DROPPED}
        self._new_attempt = new_attempt
        self._events = events
        self._output = output
        self._clock: Clock = SystemClock() if clock is None else clock
        self._tend = tend
        self._attempt: _Attempt | None = None
        self._stops = 0
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why the job stopped, when it did not finish."""
        return self._reason

    def status(self) -> tuple[GroupStatus, ...]:
        """A line for every group, from any thread."""
        attempt = self._attempt
        return () if attempt is None else attempt.status()

    def stop(self) -> None:
        """Ask the ranks to save and end, as SIGTERM does; a second call kills them. From any thread."""
        self._stops += 1

    def run(self) -> int:
        """Run until the job finished (0) or stopped for a reason (1). No process is left behind.

        SIGTERM and SIGINT are ``stop`` while this runs on the main thread.
        """
        plan, in_vain, high_step = self._plan, 0, -1
        with self._signals():
            while True:
                attempt = _Attempt(
                    plan,
                    self._environ,
                    self._events,
                    self._output,
                    self._clock,
                    lambda: self._stops,
                    self._tend,
                )
                self._attempt = attempt
                result = attempt.run()
                if result.finished:
                    self._tell("job.finished", attempt=plan.attempt, step=attempt.high_step)
                    return 0
                if not result.retry:
                    return self._stopped(result.reason, plan)
                if attempt.high_step > high_step:
                    high_step, in_vain = attempt.high_step, 0
                else:
                    in_vain += 1
                self._tell("attempt.over", attempt=plan.attempt, reason=result.reason, step=attempt.high_step)
                if in_vain >= plan.max_attempts:
                    return self._stopped(
                        f"{in_vain} attempts in a row finished no new step; the last: {result.reason}", plan
                    )
                if not self._pause(min(plan.backoff_s * 2**in_vain, plan.max_backoff_s)):
                    return self._stopped("asked to stop between two attempts", plan)
                plan = self._new_attempt()

    def _pause(self, seconds: float) -> bool:
        """Let time pass; False when asked to stop meanwhile."""
        until_s = self._clock.now_s() + seconds
        while self._clock.now_s() < until_s and not self._stops:
            self._tend()
            self._clock.sleep(POLL_S)
        return not self._stops

    def _stopped(self, reason: str, plan: JobPlan) -> int:
        self._reason = reason
        self._tell("job.failed", attempt=plan.attempt, reason=reason)
        return 1

    def _tell(self, name: str, **fields: object) -> None:
        self._events(Event(name, fields))

    @contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def on_signal(_number: int, _frame: FrameType | None) -> None:
            self._stops += 1

        before = {n: signal.signal(n, on_signal) for n in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(frozen=True, slots=True)
class _Result:
    finished: bool = False
    retry: bool = False
    reason: str = ""


@dataclass(slots=True)
class _Group:
    """One group's processes and what is known of them."""

    name: str
    life: int = 0
    phase: Phase = Phase.WAITING
    start_at_s: float = 0.0
    ranks: list[Process] = field(default_factory=list)
    outputs: list[Tail] = field(default_factory=list)
    reports: Tail | None = None
    voted: bool = False
    step: int | None = None
    participants: int | None = None
    doing: str = "starting"
    reported: bool = False
    progress_at_s: float = 0.0
    first_exit_s: float | None = None
    deaths_s: list[float] = field(default_factory=list)
    last_code: int | None = None

    def status(self) -> GroupStatus:
        pids = tuple(rank.pid for rank in self.ranks) if self.phase is Phase.RUNNING else ()
        doing = self.doing if self.phase is Phase.RUNNING else self.phase.value
        return GroupStatus(
            self.name, self.phase, self.life, self.voted, self.step, self.participants, doing, pids
        )


class _Attempt:
    """The processes of one attempt, from start to end. ``run`` leaves none behind."""

    def __init__(
        self,
        plan: JobPlan,
        environ: Mapping[str, str],
        events: Events,
        output: Callable[[str, str], None] | None,
        clock: Clock,
        stops: Callable[[], int],
        tend: Callable[[], None],
    ) -> None:
        self._plan = plan
        self._environ = environ
        self._events = events
        self._output = output
        self._clock = clock
        self._stops = stops
        self._tend = tend
        self._groups = [_Group(f"g{index}") for index in range(plan.groups)]
        self._lighthouse: Process | None = None
        self._lighthouse_deaths_s: list[float] = []
        self._lighthouse_at_s = 0.0
        self._port = 0
        self._anyone_voted = False
        self._folder = Path()
        self.high_step = -1
        """The highest step that any group reported as finished."""

    def status(self) -> tuple[GroupStatus, ...]:
        return tuple(group.status() for group in self._groups)

    def run(self) -> _Result:
        with tempfile.TemporaryDirectory(prefix="ftckpt-job-") as scratch:
            self._folder = Path(scratch)
            if self._plan.log_dir is not None:
                Path(self._plan.log_dir).mkdir(parents=True, exist_ok=True)
            self._port = free_port(self._plan.host)
            self._tell("attempt.started", groups=self._plan.groups, nproc=self._plan.nproc)
            try:
                return self._watch()
            finally:
                self._kill_all()

    # --- the loop ------------------------------------------------------------------------------

    def _watch(self) -> _Result:
        while not self._stops():
            if (reason := self._keep_lighthouse()) is not None:
                return _Result(reason=reason)
            self._read_all()
            self._reap()
            verdict = self._verdict()
            if verdict is Verdict.FINISHED:
                return _Result(finished=True)
            if verdict is Verdict.TOO_FEW:
                up = sum(g.phase is not Phase.GIVEN_UP for g in self._groups)
                return _Result(
                    reason=f"{up} groups are left, {self._plan.min_groups} are needed; {self._ends()}"
                )
            if verdict is Verdict.OVER:
                return _Result(retry=True, reason=f"no process holds its state any more; {self._ends()}")
            self._start_waiting()
            self._kill_stalled()
            self._tend()
            self._clock.sleep(POLL_S)
        return self._wind_down()

    def _verdict(self) -> Verdict:
        pending = any(g.phase is Phase.WAITING and g.life == 0 for g in self._groups)
        if pending and not any(g.phase is Phase.FINISHED for g in self._groups):
            return Verdict.GO_ON  # the attempt's first processes are about to start
        return decide(self.status(), min_groups=self._plan.min_groups, anyone_voted=self._anyone_voted)

    def _wind_down(self) -> _Result:
        """Let the ranks save and end."""
        running = [g for g in self._groups if g.phase is Phase.RUNNING]
        wanted = set(carriers(self.status(), anyone_voted=self._anyone_voted))
        self._tell("job.stopping", groups=[g.name for g in running], grace_s=self._plan.grace_s)
        for group in running:
            for rank in group.ranks:
                rank.signal(signal.SIGTERM)
        until_s = self._clock.now_s() + self._plan.grace_s
        while any(g.phase is Phase.RUNNING for g in running):
            self._keep_lighthouse()
            self._tend()
            self._read_all()
            self._reap(restart=False)
            late = self._clock.now_s() >= until_s
            if late or self._stops() > 1:
                left = [g.name for g in running if g.phase is Phase.RUNNING]
                why = f"after {self._plan.grace_s:g} s" if late else "asked to stop twice"
                return _Result(reason=f"{', '.join(left)} had not ended {why}: killed")
            self._clock.sleep(POLL_S)
        bad = [g.name for g in running if g.name in wanted and g.phase is not Phase.FINISHED]
        if bad or not any(g.phase is Phase.FINISHED for g in running):
            return _Result(reason=f"stopped, but not cleanly: {self._ends()}")
        return _Result(finished=True)

    # --- groups --------------------------------------------------------------------------------

    def _start_waiting(self) -> None:
        if any(g.phase is Phase.FINISHED for g in self._groups):
            return
        for group in self._groups:
            if group.phase is Phase.WAITING and self._clock.now_s() >= group.start_at_s:
                self._start(group)

    def _start(self, group: _Group) -> None:
        plan = self._plan
        status = self._folder / f"{group.name}.{group.life}.status"
        common = {
            "RUST_LOG": "warn",  # torchft logs every quorum otherwise
            "OMP_NUM_THREADS": "1",  # the same for any number of groups, or the bits would differ
            **self._environ,
            **plan.env,
            "FTCKPT_RUN": plan.run,
            "FTCKPT_ATTEMPT": str(plan.attempt),
            "FTCKPT_GROUP": group.name,
            "FTCKPT_REJOIN": str(group.life),
            "FTCKPT_HOST": plan.host,
            "FTCKPT_STATUS": str(status),
            "TORCHFT_LIGHTHOUSE": f"http://{plan.host}:{self._port}",
            "WORLD_SIZE": str(plan.nproc),
            "LOCAL_WORLD_SIZE": str(plan.nproc),
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": plan.host,
            "MASTER_PORT": str(free_port(plan.host)),
            "TORCHELASTIC_RUN_ID": f"{plan.attempt}.{group.name}.{group.life}",
        }
        logs = Path(plan.log_dir) if plan.log_dir is not None else self._folder
        group.ranks, group.outputs = [], []
        for rank in range(plan.nproc):
            log = logs / f"{group.name}.{rank}.log"
            group.outputs.append(Tail(log, from_end=True))
            env = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            try:
                group.ranks.append(Process(plan.command, env, plan.cwd, log))
            except OSError as e:
                raise SettingsError(
                    f"cannot start {plan.command[0]!r}: {e.strerror}\n  nothing of the run was changed",
                    command=plan.command,
                ) from e
        group.phase, group.reports = Phase.RUNNING, Tail(status)
        group.voted = group.reported = False
        group.first_exit_s, group.doing = None, "starting"
        group.progress_at_s = self._clock.now_s()
        self._tell("group.started", group=group.name, life=group.life, pids=[r.pid for r in group.ranks])

    def _reap(self, *, restart: bool = True) -> None:
        """Notice groups that ended; a dead rank takes its group with it."""
        now_s = self._clock.now_s()
        for group in self._groups:
            if group.phase is not Phase.RUNNING:
                continue
            codes = [rank.exit_code() for rank in group.ranks]
            bad = next((code for code in codes if code not in (None, 0)), None)
            if bad is not None:
                self._died(group, bad, restart=restart)
            elif all(code == 0 for code in codes):
                self._read(group)
                group.phase, group.last_code = Phase.FINISHED, 0
                self._tell("group.finished", group=group.name, step=group.step)
            elif 0 in codes:
                group.first_exit_s = now_s if group.first_exit_s is None else group.first_exit_s
                if now_s - group.first_exit_s > self._plan.grace_s:
                    self._died(group, 0, restart=restart, why="some of its ranks ended, the others did not")

    def _died(self, group: _Group, code: int, *, restart: bool, why: str = "") -> None:
        for rank in group.ranks:
            rank.kill()
        self._read(group)
        now_s = self._clock.now_s()
        group.last_code = code
        self._tell(
            "group.died",
            group=group.name,
            life=group.life,
            code=code,
            how=why or describe_exit(code),
            step=group.step,
            carried=group.name in carriers(self.status(), anyone_voted=self._anyone_voted),
        )
        group.voted = False
        window_s = self._plan.restart_window_s
        group.deaths_s = [*(s for s in group.deaths_s if now_s - s < window_s), now_s]
        group.life += 1
        if not restart or len(group.deaths_s) > self._plan.max_restarts:
            group.phase = Phase.GIVEN_UP
            if restart:
                self._tell("group.aborted", group=group.name, deaths=len(group.deaths_s), window_s=window_s)
            return
        pause_s = min(self._plan.backoff_s * 2 ** (len(group.deaths_s) - 1), self._plan.max_backoff_s)
        group.phase, group.start_at_s = Phase.WAITING, now_s + pause_s

    def _kill_stalled(self) -> None:
        """Restart the group that holds the others up, when nobody has made progress for too long.

        A group that waits for the quorum is not the one: it has asked. Jobs that never reported
        anything are not judged.
        """
        now_s = self._clock.now_s()
        running = [g for g in self._groups if g.phase is Phase.RUNNING]
        if not any(g.reported for g in running):
            return
        if any(now_s - g.progress_at_s < self._plan.stall_timeout_s for g in running):
            return
        group = min(running, key=lambda g: (g.doing == "waiting for peers", g.progress_at_s))
        self._died(
            group,
            -int(signal.SIGKILL),
            restart=True,
            why=f"no progress for {self._plan.stall_timeout_s:g} s ({group.doing})",
        )

    def _kill_all(self) -> None:
        for group in self._groups:
            for rank in group.ranks:
                rank.kill()
            self._read(group)
        if self._lighthouse is not None:
            self._lighthouse.kill()

    def _ends(self) -> str:
        ends = [
            f"{g.name} last ended with {describe_exit(g.last_code)}"
            for g in self._groups
            if g.last_code is not None
        ]
        return ", ".join(ends) or "no group ended by itself"

    # --- the lighthouse ------------------------------------------------------------------------

    def _keep_lighthouse(self) -> str | None:
        """Have one running on the job's address. Returns why that is hopeless, if it is."""
        now_s = self._clock.now_s()
        if self._lighthouse is not None:
            code = self._lighthouse.exit_code()
            if code is None:
                return None
            self._lighthouse = None
            window_s = self._plan.restart_window_s
            self._lighthouse_deaths_s = [
                *(s for s in self._lighthouse_deaths_s if now_s - s < window_s),
                now_s,
            ]
            self._lighthouse_at_s = now_s + min(0.1 * 2 ** len(self._lighthouse_deaths_s), 5.0) - 0.2
            self._tell("lighthouse.died", how=describe_exit(code), deaths=len(self._lighthouse_deaths_s))
            if len(self._lighthouse_deaths_s) > 2 * self._plan.max_restarts + 2:
                return f"the lighthouse died {len(self._lighthouse_deaths_s)} times; {describe_exit(code)}"
        if now_s >= self._lighthouse_at_s:
            logs = Path(self._plan.log_dir) if self._plan.log_dir is not None else self._folder
            command = lighthouse_command(
                sys.executable,
                self._port,
                min_replicas=self._plan.min_groups,
                join_timeout_ms=self._plan.join_timeout_ms,
                heartbeat_timeout_ms=self._plan.heartbeat_timeout_ms,
            )
            self._lighthouse = Process(command, self._environ, None, logs / "lighthouse.log")
            self._tell("lighthouse.started", port=self._port, pid=self._lighthouse.pid)
        return None

    # --- what ranks say ------------------------------------------------------------------------

    def _read_all(self) -> None:
        for group in self._groups:
            if group.phase is Phase.RUNNING:
                self._read(group)

    def _read(self, group: _Group) -> None:
        for rank, tail in enumerate(group.outputs):
            for line in tail.lines():
                if self._output is not None:
                    self._output(f"{group.name}.{rank}", line)
        for line in group.reports.lines() if group.reports is not None else ():
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a rank died while it wrote
            if isinstance(said, dict):
                self._heard(group, said)

    def _heard(self, group: _Group, said: dict[str, Any]) -> None:
        name = str(said.pop("event", ""))
        unix_s = said.pop("unix_s", 0.0)
        group.reported |= name in ("group.turn", "session.step")
        if name == "group.turn":
            phase, step = said.get("phase"), said.get("step")
            if phase == "asked":
                group.doing = "waiting for peers"
            elif phase == "begun":
                group.doing = f"training step {step}"
                group.participants = len(said.get("participants", ()))
            elif phase == "voted" and said.get("vote") and isinstance(step, int):
                group.doing = f"finished step {step}"
                group.voted = self._anyone_voted = True
                self._finished_step(group, step)
        elif name == "session.step" and isinstance(said.get("step"), int):
            group.doing = f"finished step {said['step']}"
            self._finished_step(group, said["step"])
        self._events(Event(name, {**said, "group": group.name}, float(unix_s)))

    def _finished_step(self, group: _Group, step: int) -> None:
        group.step, group.progress_at_s = step, self._clock.now_s()
        self.high_step = max(self.high_step, step)

    def _tell(self, name: str, **fields: object) -> None:
        self._events(Event(name, {"attempt": self._plan.attempt, **fields}))
