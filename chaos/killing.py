"""Jobs that are started, watched and killed from outside: what the demo and the stress tests share.

Knows the command line, the JSON lines of ``ftckpt run --json``, the trainer's ``--events`` and
``--digest`` files, and process ids. Refuses to know the library's insides: whatever is claimed here
is something that any user can find out with the same means.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftckpt.elastic.processes import Process, Tail, describe_exit
from ftckpt.errors import FtckptError

LOOK_EVERY_S = 0.002
"""Steps of the tiny model take tens of milliseconds, and kills are aimed into them."""
GONE_WITHIN_S = 10.0
TRAINER = (sys.executable, "-m", "ftckpt.integrations.grpo")
FTCKPT = (sys.executable, "-m", "ftckpt.cli")


class KillingFailed(FtckptError):
    """What was to be shown did not happen: a kill missed, a job hung or ended badly, runs differ."""


@dataclass(frozen=True, slots=True)
class Training:
    """What is trained; everything else is the shipped trainer's default for the model."""

    steps: int
    save_every: int
    model: str = "tiny"
    seed: int = 0
    more: tuple[str, ...] = ()

    def command(self) -> tuple[str, ...]:
        """The trainer's command line. What it writes goes to the folder in which it is started."""
        return (
            *TRAINER,
            f"--model={self.model}",
            f"--seed={self.seed}",
            f"--steps={self.steps}",
            f"--save-every={self.save_every}",
            *self.more,
            "--out=.",
            "--digest=digest.{group}.json",
            "--events=events.{group}.jsonl",
        )


@dataclass(frozen=True, slots=True)
class Heard:
    """One event. ``source`` is ``job`` for what the supervisor said, else the group's name."""

    source: str
    name: str
    unix_s: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    def voted(self) -> int | None:
        """The step that this group finished with this event."""
        said = self.fields
        passed = self.name == "group.turn" and said.get("phase") == "voted" and said.get("vote")
        return int(said["step"]) if passed and self.source != "job" else None

    def begun(self) -> int | None:
        """The step whose members met with this event."""
        here = self.name == "group.turn" and self.fields.get("phase") == "begun" and self.source != "job"
        return int(self.fields["step"]) if here else None

    def participants(self) -> int:
        return len(self.fields.get("participants", ()))


@dataclass(frozen=True, slots=True)
class Killed:
    """SIGKILLs that fired: every process was alive when its signal was sent, and is gone."""

    pids: Mapping[str, int]
    unix_s: float
    gone_s: float
    """Seconds from the first signal until the last process was gone."""


class Job:
    """A job of replica groups under the supervisor that ``ftckpt run`` or ``ftckpt resume`` is.

    One thread uses it, and starts it: the kernel kills the supervisor when that thread ends.
    """

    def __init__(self, folder: Path, groups: Sequence[str], environ: Mapping[str, str]) -> None:
        """The job is started in ``folder``, and keeps there what it prints."""
        self.folder = folder
        self.heard: list[Heard] = []
        self.on_look: Callable[[], None] = lambda: None
        self._environ = environ
        self._supervisor: Process | None = None
        self._output = Tail(folder / "job.1.jsonl")
        self._events = {name: Tail(folder / f"events.{name}.jsonl") for name in groups}
        self._words: list[str] = []
        self._pids: dict[str, int] = {}
        self._starts = 0
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *arguments: str) -> None:
        """``ftckpt ARGUMENTS``, with its events as JSON lines into a file."""
        assert self._supervisor is None, "it runs already"
        self._starts += 1
        path = self.folder / f"job.{self._starts}.jsonl"
        self._output, self._pids, self._words = Tail(path), {}, []
        self._supervisor = Process([*FTCKPT, *arguments], self._environ, str(self.folder), path)

    # --- watching -------------------------------------------------------------------------------

    def look(self) -> None:
        """Take in what was said since the last look."""
        for line in self._output.lines():
            self._take("job", line)
        for name, tail in self._events.items():
            for line in tail.lines():
                self._take(name, line)
        self.on_look()

    def wait(self, what: str, find: Callable[[Heard], bool], limit_s: float, since: int = 0) -> Heard:
        """The first event from position ``since`` of ``heard`` on that ``find`` likes.

        Raises ``KillingFailed`` when the job ends, or ``limit_s`` pass, without one.
        """
        until_s = time.monotonic() + limit_s
        at = since
        while True:
            code = None if self._supervisor is None else self._supervisor.exit_code()
            self.look()
            while at < len(self.heard):
                if find(self.heard[at]):
                    return self.heard[at]
                at += 1
            if code is not None:
                raise KillingFailed(
                    f"the job ended with {describe_exit(code)} at step {finished_step(self.heard)}, "
                    f"while waiting for {what}\n"
                    f"  what it last printed (all of it is in {self.folder}):\n{self.last_words()}",
                    code=code,
                )
            if time.monotonic() > until_s:
                raise KillingFailed(
                    f"waited {limit_s:g} s in vain for {what}\n"
                    f"  what the job last printed (all of it is in {self.folder}):\n{self.last_words()}"
                )
            time.sleep(LOOK_EVERY_S)

    def finish(self, limit_s: float) -> None:
        """Wait for the job to end by itself. Raises ``KillingFailed`` unless it ends with 0."""
        assert self._supervisor is not None, "it does not run"
        until_s = time.monotonic() + limit_s
        while (code := self._supervisor.exit_code()) is None:
            self.look()
            if time.monotonic() > until_s:
                raise KillingFailed(f"the job had not ended after {limit_s:g} s\n{self.last_words()}")
            time.sleep(10 * LOOK_EVERY_S)
        self.look()
        self._supervisor = None
        if code != 0:
            raise KillingFailed(f"the job ended with {describe_exit(code)}\n{self.last_words()}", code=code)

    def last_words(self, lines: int = 30) -> str:
        """The end of what the supervisor and the ranks printed, events left out."""
        return "\n".join(f"  | {line}" for line in self._words[-lines:]) or "  | (nothing was printed)"

    def _take(self, source: str, line: str) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            said = None  # not an event, or one that a death cut in half
        if not isinstance(said, dict):
            self._words.append(f"[{source}] {line}")
            return
        event = Heard(source, str(said.pop("event", "")), float(said.pop("unix_s", 0.0)), said)
        self.heard.append(event)
        if source == "job":
            self._follow(event)

    def _follow(self, event: Heard) -> None:
        said = event.fields
        match event.name:
            case "rank.output":
                self._words.append(f"[{said['rank']}] {said['line']}")
            case "lighthouse.started":
                self._pids["lighthouse"] = int(said["pid"])
            case "group.started":
                self._pids[str(said["group"])] = int(said["pids"][0])
            case "group.died" | "group.finished":
                self._pids.pop(str(said["group"]), None)
            case "attempt.started":
                self._pids = {k: v for k, v in self._pids.items() if k == "lighthouse"}
            case "job.failed" | "attempt.over":
                self._words.append(f"[job] {event.name}: {said.get('reason')}")

    # --- killing --------------------------------------------------------------------------------

    def pids(self) -> dict[str, int]:
        """The processes that should be alive: ``supervisor``, ``lighthouse`` and the groups."""
        assert self._supervisor is not None, "it does not run"
        return {"supervisor": self._supervisor.pid, **self._pids}

    def kill(self, *names: str) -> Killed:
        """SIGKILL processes by name, in that order, at once, and wait until they are gone.

        When the supervisor is among them, everything it started is awaited too, and the job can be
        started again. Raises ``KillingFailed`` when one of the named was not alive to be killed.
        """
        alive = self.pids()
        targets = {name: alive[name] for name in names if name in alive}
        if missing := [name for name in names if name not in alive]:
            raise KillingFailed(f"{', '.join(missing)} did not run when it was to be killed")
        begun_s, unix_s = time.monotonic(), time.time()
        missed = [name for name, pid in targets.items() if not is_alive(pid) or not _sigkill(pid)]
        waited = alive if "supervisor" in targets else targets
        while left := [name for name, pid in waited.items() if is_alive(pid)]:
            if self._supervisor is not None:
                self._supervisor.exit_code()  # reaps it
            if time.monotonic() - begun_s > GONE_WITHIN_S:
                raise KillingFailed(f"{', '.join(left)} still ran {GONE_WITHIN_S:g} s after SIGKILL")
            time.sleep(LOOK_EVERY_S)
        if missed:
            raise KillingFailed(f"{', '.join(missed)} had ended by itself before it could be killed")
        if "supervisor" in targets:
            assert self._supervisor is not None
            code = self._supervisor.exit_code()
            if code != -signal.SIGKILL:
                raise KillingFailed(f"the supervisor ended with {code}, not by our SIGKILL")
            self._supervisor = None
        self.look()
        return Killed(targets, unix_s, time.monotonic() - begun_s)

    def close(self) -> None:
        """Leave no process behind, whatever happened. Harmless when nothing runs."""
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.kill()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in {"Z", "X"}
    except OSError:
        return not Path("/proc/self/stat").exists()  # gone meanwhile, or no /proc here


def _sigkill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


# --- what follows from what was heard: pure -------------------------------------------------------


def votes(heard: Sequence[Heard], source: str | None = None) -> Iterator[Heard]:
    """The passed votes, of one group or of all."""
    return (e for e in heard if e.voted() is not None and source in (None, e.source))


def finished_step(heard: Sequence[Heard]) -> int:
    """The highest step that any group finished; 0 when none."""
    return max((e.voted() or 0 for e in heard), default=0)


def last_act(heard: Sequence[Heard], group: str) -> tuple[str, int]:
    """What a group last said of itself, to tell where a kill hit it: the phase and the step."""
    turns = [e for e in heard if e.source == group and e.name == "group.turn"]
    if not turns:
        return "starting", 0
    return str(turns[-1].fields["phase"]), int(turns[-1].fields["step"])


def where_it_died(phase: str, step: int) -> str:
    """``last_act`` in words."""
    match phase:
        case "begun":
            return f"in the middle of step {step}: it had begun it and never voted"
        case "voted":
            return f"between step {step}, which it had finished, and the meeting for step {step + 1}"
        case "asked":
            return f"while it waited for its peers, to train step {step}"
    return "before its first step"


# --- comparing runs -------------------------------------------------------------------------------


def read_digest(path: Path) -> dict[str, Any]:
    """A file that the trainer's ``--digest`` wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise KillingFailed(f"{path} is no digest of a finished run: {error}") from error
    assert isinstance(found, dict), found
    return found


def differences(one: Mapping[str, Any], other: Mapping[str, Any], at: str = "") -> list[str]:
    """The names under which two digests differ; empty when the runs ended in the same bits."""
    found = []
    for name in sorted(one.keys() | other.keys()):
        here, there = one.get(name), other.get(name)
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            found += differences(here, there, f"{at}{name}.")
        elif here != there:
            found.append(f"{at}{name}")
    return found


def shown(argv: Sequence[str]) -> str:
    """A command line as a person would type it."""
    words = list(argv)
    if tuple(words[:3]) == FTCKPT:
        words[:3] = ["ftckpt"]
    head, dashes, command = _cut(["python" if word == sys.executable else word for word in words])
    return shlex.join([*head, *dashes]) + (f" \\\n    {shlex.join(command)}" if command else "")


def _cut(words: list[str]) -> tuple[list[str], list[str], list[str]]:
    at = words.index("--") if "--" in words else len(words)
    return words[:at], words[at : at + 1], words[at + 1 :]
