"""A supervised job: begin an attempt, run it, begin the next one when its state is lost.

``run`` and ``resume`` differ only in where the command comes from and in what an empty run means.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Annotated

import typer

from ftckpt.attempts import check_fence
from ftckpt.begin import Begun, Caller, OnEmpty, begin
from ftckpt.cli.common import opening
from ftckpt.cli.progress import Teller
from ftckpt.commit import read_commit
from ftckpt.elastic.supervisor import JobPlan, Supervisor
from ftckpt.errors import SettingsError
from ftckpt.events import Event
from ftckpt.store.api import ObjectStore

Groups = Annotated[int, typer.Option("--groups", min=1, metavar="N", help="Replica groups.")]
Nproc = Annotated[int, typer.Option("--nproc", min=1, metavar="M", help="Ranks in each group.")]
MinGroups = Annotated[
    int, typer.Option("--min-groups", min=1, metavar="K", help="Stop when fewer groups are left.")
]
LogDir = Annotated[
    str | None, typer.Option("--log-dir", metavar="FOLDER", help="Keep what the ranks print here.")
]

_AWS = (
    "endpoint_url",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "region",
    "allow_http",
    "virtual_hosted_style_request",
)
"""Store options that the ranks can be told through their AWS_* variables."""


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
            settings={"min_groups": str(self.min_groups), "run": self.uri},
        )


def opened(job: Job) -> AbstractContextManager[ObjectStore]:
    """The job's store."""
    return opening(job.uri, job.options, one_writer=job.allow_unconditional)


def rank_environ(job: Job, environ: Mapping[str, str]) -> dict[str, str]:
    """What the ranks get besides this process's environment. Raises ``SettingsError`` for an option
    that they cannot be told.
    """
    told = {} if "PYTHONUNBUFFERED" in environ else {"PYTHONUNBUFFERED": "1"}
    for key, value in job.options.items():
        name = key.lower().removeprefix("aws_")
        if name not in _AWS:
            raise SettingsError(
                f"SettingsError: store option {key!r} cannot be handed on to the ranks\n"
                f"  they are told through their environment, which has a place for: {', '.join(_AWS)}\n"
                "  nothing was started; give it as store_options where the trainer makes its Session",
                option=key,
            )
        told[f"AWS_{name.upper()}"] = str(value)
    return told


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

    attempt(step, None)
    supervisor = Supervisor(
        plan,
        environ=environ,
        new_attempt=lambda: attempt(None, plan.attempt),
        events=tell.hear,
        output=tell.output,
    )
    with tell.showing(supervisor.status):
        return supervisor.run()


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
