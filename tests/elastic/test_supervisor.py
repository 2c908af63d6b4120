"""The supervisor with real processes. Its ranks are puppets without torch, so that this is quick."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ftckpt.elastic.supervisor import JobPlan, Supervisor
from ftckpt.errors import AttemptTaken, SettingsError
from ftckpt.events import Event
from tests.support.procs import ROOT, kill_tree, spawn, wait_until

WAIT_S = 30.0
PUPPET = (sys.executable, str(ROOT / "tests/ranks/elastic_puppet.py"))


class Watched:
    """A supervisor on a thread of its own, and everything it said."""

    def __init__(self, folder: Path, **changes) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.lines: list[tuple[str, str]] = []
        self.attempts_asked = 0
        plan = JobPlan(
            run="memory://r", attempt=1, command=(*PUPPET, str(folder)), backoff_s=0.05, grace_s=10
        )
        self.plan = replace(plan, **changes)
        self.supervisor = Supervisor(
            self.plan,
            environ=os.environ,
            new_attempt=self.new_attempt,
            events=self.events.append,
            output=lambda who, line: self.lines.append((who, line)),
        )
        self.code: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def new_attempt(self) -> JobPlan:
        self.attempts_asked += 1
        self.plan = replace(self.plan, attempt=self.plan.attempt + 1)
        return self.plan

    def _run(self) -> None:
        try:
            self.code = self.supervisor.run()
        except BaseException as e:  # the test looks at it
            self.error = e

    def join(self) -> int | None:
        self._thread.join(timeout=WAIT_S)
        assert not self._thread.is_alive(), self.events[-5:]
        return self.code

    def say(self, name: str, text: object = "") -> None:
        part = self.folder / f"{name}.part"
        part.write_text(str(text))
        part.rename(self.folder / name)

    def take_back(self, name: str) -> None:
        (self.folder / name).unlink()

    def lives(self) -> list[tuple[int, str, int, int]]:
        """``(attempt, rank, life, pid)`` of every process there ever was."""
        path = self.folder / "lives"
        rows = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
        return [(int(a), rank, int(life), int(pid)) for a, rank, life, pid in rows]

    def named(self, name: str) -> list[Event]:
        return [event for event in list(self.events) if event.name == name]

    def wait_for_vote(self, group: str, life: int = 0) -> None:
        def seen() -> bool:
            return any(s.group == group and s.life == life and s.voted for s in self.supervisor.status())

        wait_until(seen, WAIT_S, lambda: f"a vote of {group} in life {life}; {self.events[-5:]}")

    def kill9(self, rank: str) -> None:
        """SIGKILL a rank in its newest life."""

        def pids() -> list[int]:
            return [pid for *_, name, _, pid in self.lives() if name == rank]

        wait_until(lambda: bool(pids()), WAIT_S, rank)
        os.kill(pids()[-1], signal.SIGKILL)


@contextmanager
def supervised(folder: Path, **changes) -> Iterator[Watched]:
    watched = Watched(folder, **changes)
    watched._thread.start()
    try:
        yield watched
    finally:
        watched.supervisor.stop()
        watched.supervisor.stop()
        watched._thread.join(timeout=WAIT_S)
    assert not [pid for *_, pid in watched.lives() if alive(pid)]


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_killed_group_is_restarted_inside_the_attempt_and_told_to_rejoin(tmp_path):
    with supervised(tmp_path, groups=2, nproc=2) as job:
        job.wait_for_vote("g0")
        job.wait_for_vote("g1")
        wait_until(lambda: len(job.lives()) == 4, WAIT_S, "all ranks")

        job.kill9("g1.1")
        job.wait_for_vote("g1", life=1)
        wait_until(lambda: len(job.lives()) == 6, WAIT_S, "both ranks of g1")
        job.say("end", 1)

        assert job.join() == 0
        (died,) = job.named("group.died")
        assert died.fields["group"] == "g1" and died.fields["how"] == "killed by SIGKILL"
        ranks = [(attempt, rank, life) for attempt, rank, life, _ in job.lives()]
        assert sorted(ranks) == [
            (1, "g0.0", 0),
            (1, "g0.1", 0),
            (1, "g1.0", 0),
            (1, "g1.0", 1),
            (1, "g1.1", 0),
            (1, "g1.1", 1),
        ]
        assert job.attempts_asked == 0


def test_when_the_last_carrier_dies_a_new_attempt_is_asked_for_and_all_groups_start_again(tmp_path):
    with supervised(tmp_path, groups=2) as job:
        job.wait_for_vote("g0")
        job.wait_for_vote("g1")

        job.say("mute.g1")
        job.kill9("g1.0")
        wait_until(lambda: (1, "g1.0", 1) in [life[:3] for life in job.lives()], WAIT_S, "g1 to be back")
        job.kill9("g0.0")
        wait_until(lambda: job.attempts_asked == 1, WAIT_S, "a new attempt")
        job.take_back("mute.g1")
        job.wait_for_vote("g1")
        job.say("end", 1)

        assert job.join() == 0
        (over,) = job.named("attempt.over")
        assert over.fields["attempt"] == 1 and "no process holds its state" in over.fields["reason"]
        assert sorted(life[:3] for life in job.lives() if life[0] == 2) == [(2, "g0.0", 0), (2, "g1.0", 0)]


def test_a_group_that_asks_for_a_new_attempt_gets_one_when_nobody_else_carries_the_old(tmp_path):
    with supervised(tmp_path) as job:
        job.wait_for_vote("g0")

        job.say("once.g0", 75)
        wait_until(lambda: job.attempts_asked == 1, WAIT_S, "a new attempt")
        job.say("end", 1)

        assert job.join() == 0


def test_a_command_that_dies_at_once_again_and_again_stops_with_a_reason(tmp_path):
    with supervised(tmp_path, max_attempts=3) as job:
        job.say("exit.g0", 3)

        assert job.join() == 1
        assert "3 attempts in a row finished no new step" in job.supervisor.reason
        assert "exit code 3" in job.supervisor.reason
        assert job.attempts_asked == 2
        assert job.named("job.failed")[0].fields["reason"] == job.supervisor.reason


def test_attempts_that_get_further_are_not_counted(tmp_path):
    with supervised(tmp_path, max_attempts=1) as job:
        for attempt in range(1, 4):
            wait_until(lambda: job.plan.attempt == attempt, WAIT_S, "the attempt")  # noqa: B023
            wait_until(lambda: len(job.lives()) == attempt, WAIT_S, "its process")  # noqa: B023
            job.wait_for_vote("g0")
            job.say("start", 1000 * attempt)
            job.kill9("g0.0")

        wait_until(lambda: job.attempts_asked == 3, WAIT_S, "the fourth attempt")


def test_a_group_that_dies_too_often_is_given_up_and_the_others_go_on(tmp_path):
    with supervised(tmp_path, groups=2, max_restarts=2) as job:
        job.wait_for_vote("g0")
        job.say("exit.g1", 9)

        wait_until(lambda: job.named("group.aborted"), WAIT_S, "g1 to be given up")
        lives = len(job.lives())
        job.say("end", 1)

        assert job.join() == 0
        assert lives == 1 + 3 and len(job.lives()) == lives


def test_below_min_groups_the_job_stops_with_a_reason(tmp_path):
    with supervised(tmp_path, groups=2, min_groups=2, max_restarts=1) as job:
        job.wait_for_vote("g0")
        job.say("exit.g1", 9)

        assert job.join() == 1
        assert "1 groups are left, 2 are needed" in job.supervisor.reason
        assert "g1 last ended with exit code 9" in job.supervisor.reason


def test_a_group_is_not_restarted_when_another_has_finished_the_job(tmp_path):
    with supervised(tmp_path, groups=2, backoff_s=60) as job:
        job.wait_for_vote("g0")
        job.wait_for_vote("g1")
        job.kill9("g1.0")
        wait_until(lambda: job.named("group.died"), WAIT_S, "g1 to die")

        job.say("end", 1)

        assert job.join() == 0
        assert len(job.lives()) == 2


def test_stop_lets_the_ranks_save_and_end(tmp_path):
    with supervised(tmp_path, groups=2) as job:
        job.wait_for_vote("g0")
        job.wait_for_vote("g1")

        job.supervisor.stop()

        assert job.join() == 0
        assert {e.fields["group"] for e in job.named("group.finished")} == {"g0", "g1"}


def test_ranks_that_do_not_end_in_time_are_killed_and_it_is_said(tmp_path):
    with supervised(tmp_path, grace_s=0.3) as job:
        job.say("deaf")
        job.wait_for_vote("g0")

        job.supervisor.stop()

        assert job.join() == 1
        assert "had not ended after 0.3 s: killed" in job.supervisor.reason


def test_the_lighthouse_comes_back_on_the_same_address(tmp_path):
    with supervised(tmp_path) as job:
        job.wait_for_vote("g0")
        first = job.named("lighthouse.started")[0].fields

        os.kill(first["pid"], signal.SIGKILL)
        wait_until(lambda: len(job.named("lighthouse.started")) == 2, WAIT_S, "the lighthouse to be back")

        second = job.named("lighthouse.started")[1].fields
        assert second["port"] == first["port"] and second["pid"] != first["pid"]
        assert job.named("lighthouse.died")[0].fields["how"] == "killed by SIGKILL"
        assert not job.named("group.died")


def test_the_group_that_holds_the_others_up_is_restarted_not_the_one_that_waits_for_it(tmp_path):
    with supervised(tmp_path, groups=2, stall_timeout_s=1.0) as job:
        job.wait_for_vote("g0")
        job.wait_for_vote("g1")

        job.say("mute.g0")  # asks for the quorum and waits
        job.say("mute.g1", 1)  # is in the middle of a step
        wait_until(lambda: job.named("group.died"), WAIT_S, "the stall to be noticed")
        job.take_back("mute.g1")

        died = job.named("group.died")[0].fields
        assert died["group"] == "g1" and "no progress for 1 s (training step" in died["how"]


def test_what_ranks_print_arrives_line_by_line_and_in_their_logs(tmp_path):
    with supervised(tmp_path, nproc=2, log_dir=str(tmp_path / "logs")) as job:
        job.say("end", 3)

        assert job.join() == 0
        assert sorted(job.lines) == [
            ("g0.0", "attempt 1 life 0 of g0.0"),
            ("g0.1", "attempt 1 life 0 of g0.1"),
        ]
        assert (tmp_path / "logs" / "g0.1.log").read_text() == "attempt 1 life 0 of g0.1\n"


def test_a_command_that_does_not_exist_is_one_clear_error(tmp_path):
    with supervised(tmp_path, command=("/nowhere/python",)) as job:
        job.join()

        assert isinstance(job.error, SettingsError) and "'/nowhere/python'" in str(job.error)


def test_an_attempt_that_somebody_else_claimed_ends_the_job(tmp_path):
    with supervised(tmp_path) as job:

        def taken() -> JobPlan:
            raise AttemptTaken("somebody else was first", attempt=2)

        job.supervisor._new_attempt = taken
        job.wait_for_vote("g0")
        job.kill9("g0.0")

        job.join()
        assert isinstance(job.error, AttemptTaken)


SCRIPT = """
import os, sys
from ftckpt.elastic import JobPlan, Supervisor
plan = JobPlan(run="memory://r", attempt=1, command=tuple(sys.argv[1:]), groups=2, nproc=2)
supervisor = Supervisor(plan, environ=os.environ, new_attempt=lambda: plan)
sys.exit(supervisor.run())
"""


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, -9)])
def test_nothing_is_left_behind_when_the_supervisor_is(tmp_path, signum, code):
    process = spawn((sys.executable, "-c", SCRIPT, *PUPPET, str(tmp_path)), tmp_path / "supervisor.log", {})
    try:
        lives = Watched(tmp_path).lives
        wait_until(lambda: len(lives()) == 4, WAIT_S, (tmp_path / "supervisor.log").read_text)
        pids = [pid for *_, pid in lives()]
        lighthouses = children_of(process.pid, "lighthouse")
        assert lighthouses and all(alive(pid) for pid in pids)

        process.send_signal(signum)

        assert process.wait(timeout=WAIT_S) == code
        wait_until(
            lambda: not any(alive(pid) for pid in [*pids, *lighthouses]),
            5,
            "the supervisor's children to be gone",
        )
    finally:
        kill_tree(process)


def children_of(parent: int, word: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            ppid = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            command = (entry / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if ppid == parent and word in command:
            found.append(int(entry.name))
    return found
