"""Sees to it that an agent is at work in a tier: starts one, notices when it dies, starts another.

The agent outlives whoever started it, on purpose: it is a process of its own session, without the
parent-death signal that the ranks have.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress

from ftckpt.clock import Clock, SystemClock
from ftckpt.elastic.processes import describe_exit
from ftckpt.events import Event, Events
from ftckpt.tiers import Tier

STARTING_S = 30.0
"""How long a new agent may take until it gives its sign of life."""
LONGEST_PAUSE_S = 4.0


class AgentKeeper:
    """One per tier and keeper; several keepers of one tier start one agent between them, or two for a
    moment, which is harmless.
    """

    def __init__(
        self,
        tier: Tier,
        run: str,
        environ: Mapping[str, str],
        events: Events,
        *,
        one_writer: bool = False,
        clock: Clock | None = None,
    ) -> None:
        """``environ`` tells the agent how to reach the far store; ``one_writer`` allows a store whose creates
        are not exclusive.
        """
        self._tier = tier
        command = (sys.executable, "-m", "ftckpt.cli", "agent", run, "--tier", str(tier.folder), "--json")
        self._command = (*command, "--allow-unconditional") if one_writer else command
        self._environ = dict(environ)
        self._events = events
        self._clock: Clock = SystemClock() if clock is None else clock
        self._pid: int | None = None
        self._seen = False
        self._starts = 0
        self._not_before_s = 0.0
        self._until_s = 0.0

    def look(self) -> None:
        """Start an agent if none lives. Call it at least every second; returns at once."""
        now_s = self._clock.now_s()
        ended = self._reap()
        if self._tier.agent_lives:
            self._seen, self._starts = True, 0
            return
        if self._seen and self._pid is not None:
            return  # ours: the lock has gone, and in a moment it can be asked how it ended
        if self._seen or ended is not None:
            self._seen = False
            how = "it does not live any more" if ended is None else describe_exit(ended)
            self._events(Event("agent.died", {"tier": str(self._tier.folder), "how": how}))
        elif self._pid is not None and now_s < self._until_s:
            return
        if now_s >= self._not_before_s:
            self._start(now_s)

    def _start(self, now_s: float) -> None:
        log = str(self._tier.folder / ".ftckpt-agent.log")
        opened = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._pid = os.posix_spawn(
            self._command[0],
            self._command,
            self._environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, log, opened, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
        )
        self._starts += 1
        self._until_s = now_s + STARTING_S
        self._not_before_s = now_s + min(0.1 * 2**self._starts, LONGEST_PAUSE_S)
        self._events(Event("agent.started", {"tier": str(self._tier.folder), "pid": self._pid}))

    def _reap(self) -> int | None:
        """How our agent ended, once."""
        if self._pid is None:
            return None
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid == 0:
                return None
            self._pid = None
            return os.waitstatus_to_exitcode(status)
        self._pid = None
        return None
