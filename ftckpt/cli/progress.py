"""How a running job is told: JSON lines, plain lines, or a table that stays in place on a terminal."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

from rich.live import Live
from rich.table import Table

from ftckpt.begin import recorded
from ftckpt.cli.common import console, table
from ftckpt.clock import Clock, SystemClock
from ftckpt.elastic.supervisor import GroupStatus
from ftckpt.events import Event, JsonLines

Status = Callable[[], Sequence[GroupStatus]]


class Teller(Protocol):
    """Who tells the person, or the program, what a job does."""

    def hear(self, event: Event) -> None:
        """Something happened. From any thread."""
        ...

    def output(self, rank: str, line: str) -> None:
        """A rank printed a line."""
        ...

    def showing(self, status: Status) -> AbstractContextManager[None]:
        """While this is entered, the groups may be shown."""
        ...


class JsonTeller:
    """Every event and every line of a rank as one JSON line on stdout."""

    def __init__(self) -> None:
        self._lines = JsonLines(sys.stdout)

    def hear(self, event: Event) -> None:
        self._lines(event)

    def output(self, rank: str, line: str) -> None:
        self._lines(Event("rank.output", {"rank": rank, "line": line}))

    def showing(self, status: Status) -> AbstractContextManager[None]:
        return nullcontext()


class PlainTeller:
    """Lines on stdout; of finished steps at most one line per group every ``every_s``."""

    def __init__(self, clock: Clock | None = None, every_s: float = 10.0) -> None:
        self._clock: Clock = SystemClock() if clock is None else clock
        self._every_s = every_s
        self._told_s: dict[str, float] = {}

    def hear(self, event: Event) -> None:
        step = finished_step(event)
        group, now_s = str(event.fields.get("group", "")), self._clock.now_s()
        if step is not None and now_s - self._told_s.get(group, -self._every_s) >= self._every_s:
            self._told_s[group] = now_s
            print(f"{group} finished step {step}", flush=True)
        if (text := describe(event)) is not None:
            print(text, flush=True)

    def output(self, rank: str, line: str) -> None:
        print(f"[{rank}] {line}", flush=True)

    def showing(self, status: Status) -> AbstractContextManager[None]:
        return nullcontext()


class LiveTeller:
    """Lines that scroll above a table of the groups."""

    def __init__(self) -> None:
        self._console = console()
        self._lock = threading.Lock()

    def hear(self, event: Event) -> None:
        if (text := describe(event)) is not None:
            self._print(text)

    def output(self, rank: str, line: str) -> None:
        self._print(f"[{rank}] {line}")

    def _print(self, text: str) -> None:
        with self._lock:
            self._console.print(text)

    @contextmanager
    def showing(self, status: Status) -> Iterator[None]:
        with Live(console=self._console, get_renderable=lambda: groups_table(status()), refresh_per_second=4):
            yield


def teller(*, as_json: bool) -> Teller:
    """The one that suits stdout."""
    if as_json:
        return JsonTeller()
    return LiveTeller() if sys.stdout.isatty() else PlainTeller()


def groups_table(groups: Sequence[GroupStatus]) -> Table:
    """A line for every group."""
    rows = table("group", "step", "with", "doing", "lives", "processes", right=("step",))
    for group in groups:
        rows.add_row(
            group.group,
            "-" if group.step is None else str(group.step),
            "-" if group.participants is None else f"{group.participants} groups",
            group.doing,
            str(group.life + 1),
            " ".join(map(str, group.pids)) or "-",
        )
    return rows


def finished_step(event: Event) -> int | None:
    """The step that a group says it finished."""
    said = event.fields
    voted = event.name == "group.turn" and said.get("phase") == "voted" and said.get("vote")
    step = said.get("step") if voted or event.name == "session.step" else None
    return step if isinstance(step, int) else None


def describe(event: Event) -> str | None:
    """An event in words; ``None`` for what only programs want to know."""
    said: dict[str, Any] = event.fields
    match event.name:
        case "run.new":
            return f"there is no run at {said['uri']} yet: starting one, from nothing"
        case "run.anew":
            return f"{said['uri']}: {said['why']}: starting from nothing"
        case "attempt.goes_on":
            return _goes_on(said)
        case "attempt.started":
            return f"attempt {said['attempt']}: {said['groups']} groups of {said['nproc']} ranks"
        case "attempt.over":
            return f"attempt {said['attempt']} is over: {said['reason']}"
        case "group.started":
            return f"{said['group']} {'started again' if said['life'] else 'started'}"
        case "group.died":
            last = "no step" if said["step"] is None else f"step {said['step']}"
            return f"{said['group']} died: {said['how']}; it had finished {last}"
        case "group.finished":
            return f"{said['group']} finished"
        case "group.aborted":
            return f"{said['group']} died {said['deaths']} times within {said['window_s']:g} s: given up"
        case "lighthouse.died":
            return f"the lighthouse died: {said['how']}; it comes back on the same address"
        case "agent.died":
            return f"the agent of {said['tier']} died: {said['how']}; another one is started"
        case "agent.drained":
            return f"step {said['step']} of attempt {said['attempt']} was brought from the tier"
        case "agent.aborted":
            return f"step {said['step']} of attempt {said['attempt']} stays in no store: {said['why']}"
        case "job.stopping":
            return f"asked to stop: {', '.join(said['groups']) or 'no group'} may save and end"
        case "job.finished":
            return f"finished in attempt {said['attempt']}"
        case "job.failed":
            return f"stopped in attempt {said['attempt']}: {said['reason']}"
    return None


def _goes_on(said: dict[str, Any]) -> str:
    lines = [f"attempt {said['attempt']} of {said['run']}: {recorded(said['command'])}"]
    if said["step"] is None:
        lines.append("  begins from nothing")
    else:
        lines.append(
            f"  goes on from step {said['step']} of attempt {said['from_attempt']}, guarantee {said['guarantee']}"
        )
    lines += [f"  not better: {reason}" for reason in said["why"]]
    lines += [f"  passed over {what}" for what in said["skipped"]]
    return "\n".join(lines)
