"""A supervised job: begin an attempt, run it, begin the next one when its state is lost.

``run`` and ``resume`` differ only in where the command comes from and in what an empty run means.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from ftckpt.agent import drain_first
from ftckpt.attempts import check_fence
from ftckpt.begin import Begun, Caller, OnEmpty, begin
from ftckpt.cli.common import opening
from ftckpt.cli.progress import Teller
from ftckpt.commit import read_commit
from ftckpt.elastic.keeper import AgentKeeper
from ftckpt.elastic.launch import store_environ
from ftckpt.elastic.supervisor import JobPlan, Supervisor
from ftckpt.events import Event
from ftckpt.store.api import ObjectStore
from ftckpt.tiers import Tier, open_tier

Groups = Annotated[int, typer.Option("--groups", min=1, metavar="N", help="Replica groups.")]
Nproc = Annotated[int, typer.Option("--nproc", min=1, metavar="M", help="Ranks in each group.")]
MinGroups = Annotated[
    int, typer.Option("--min-groups", min=1, metavar="K", help="Stop when fewer groups are left.")
]
LogDir = Annotated[
    str | None, typer.Option("--log-dir", metavar="FOLDER", help="Keep what the ranks print here.")
]

TierFolder = Annotated[
    str | None,
    typer.Option(
        "--tier",
        metavar="DIR",
        help="Save into this folder of the machine first; an agent brings it to the run. "
        "The ranks find it in FTCKPT_TIER.",
    ),
]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run, and where. ``options`` may hold credentials: never printed, never recorded."""

    uri: str
    command: tuple[str, ...]
    cwd: str
    groups: int
    nproc: int
    min_groups: int
    log_dir: str | None
    allow_unconditional: bool
    tier: str | None = None
    options: Mapping[str, object] = field(default_factory=dict, repr=False)

    def caller(self) -> Caller:
        """What the claim records, so that ``ftckpt resume`` can do it again."""
        return Caller(
            command=self.command,
            cwd=self.cwd,
            host=socket.gethostname(),
            pid=os.getpid(),
            groups=self.groups,
            nproc=self.nproc,
            settings={
                "min_groups": str(self.min_groups),
                "run": self.uri,
                **({} if self.tier is None else {"tier": self.tier}),
            },
        )


def opened(job: Job) -> AbstractContextManager[ObjectStore]:
    """The job's store."""
    return opening(job.uri, job.options, one_writer=job.allow_unconditional)


def rank_environ(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks get besides this process's environment. Raises ``SettingsError`` for an option
    that they cannot be told.
    """
    told = {} if "PYTHONUNBUFFERED" in environ else {"PYTHONUNBUFFERED": "1"}
    told |= {} if job.tier is None else {"FTCKPT_TIER": job.tier}
    return told | store_environ(job.options)


def supervise(
    job: Job, environ: Mapping[str, str], tell: Teller, *, on_empty: OnEmpty, step: int | None, fallback: bool
) -> int:
    """Begin an attempt and keep the job running until it ends. Returns the exit code.

    What can be refused is refused before anything is claimed. If a newer attempt than ours was
    claimed by somebody else, the job ends with ``Fenced``: two supervisors never take turns.
    """
    plan = JobPlan(
        run=job.uri,
        attempt=1,
        command=job.command,
        groups=job.groups,
        nproc=job.nproc,
        min_groups=job.min_groups,
        cwd=job.cwd,
        env=rank_environ(job, environ),
        log_dir=job.log_dir,
    )

    def attempt(step: int | None, after: int | None) -> JobPlan:
        nonlocal plan
        with opened(job) as store:
            if after is not None:
                check_fence(store, after)
            if tier is not None:
                drain_first(tier, store, tell.hear)
            begun = begin(
                store,
                job.caller(),
                name=uuid.uuid4().hex,
                step=step,
                on_empty=on_empty,
                fallback=fallback,
                events=tell.hear,
            )
            _say(store, begun, tell)
        plan = replace(plan, attempt=begun.claim.attempt)
        return plan

    tier = None if job.tier is None else open_tier(job.tier, tell.hear)
    with nullcontext() if tier is None else tier.life(f"supervisor-{uuid.uuid4().hex}"):
        attempt(step, None)
        supervisor = Supervisor(
            plan,
            environ=environ,
            new_attempt=lambda: attempt(None, plan.attempt),
            events=tell.hear,
            output=tell.output,
            tend=_nothing if tier is None else _keeper(job, tier, environ, tell).look,
        )
        with tell.showing(supervisor.status):
            return supervisor.run()


def _nothing() -> None:
    """There is no tier, so no agent to be kept running."""


def _keeper(job: Job, tier: Tier, environ: Mapping[str, str], tell: Teller) -> AgentKeeper:
    told = {**environ, **store_environ(job.options)}
    return AgentKeeper(tier, job.uri, told, tell.hear, one_writer=job.allow_unconditional)


def _say(store: ObjectStore, begun: Begun, tell: Teller) -> None:
    parent = begun.start.parent
    found = read_commit(store, parent.at) if parent else None
    tell.hear(
        Event(
            "attempt.goes_on",
            {
                "run": store.uri,
                "attempt": begun.claim.attempt,
                "step": parent.step if parent else None,
                "from_attempt": parent.attempt if parent else None,
                "guarantee": found[0].guarantee if found else None,
                "why": list(found[0].why) if found else [],
                "skipped": list(begun.skipped),
                "command": list(begun.claim.command),
                "cwd": begun.claim.cwd,
            },
        )
    )
