"""``ftckpt resume``: go on with a run, knowing nothing but its address."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ftckpt.attempts import find_run, look, read_claim
from ftckpt.cli.common import Address, AsJson, OneWriter, StoreOptions, locate, parse_options, reporting
from ftckpt.cli.job import Job, LogDir, TierFolder, opened, supervise
from ftckpt.cli.programs import check_command
from ftckpt.cli.progress import teller
from ftckpt.errors import CommandNotFound
from ftckpt.manifest import Claim
from ftckpt.store.api import ObjectStore


def resume(
    run: Address,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Go on from this step; the newest if left out.")
    ] = None,
    groups: Annotated[
        int | None,
        typer.Option("--groups", min=1, metavar="N", help="Replica groups; as before if left out."),
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option("--nproc", min=1, metavar="M", help="Ranks in each group; as before if left out."),
    ] = None,
    min_groups: Annotated[
        int | None,
        typer.Option(
            "--min-groups",
            min=1,
            metavar="K",
            help="Stop when fewer groups are left; as before if left out, but never more than --groups.",
        ),
    ] = None,
    fallback: Annotated[
        bool,
        typer.Option(
            "--fallback", help="Read everything first, and pass over commits that cannot be read, saying so."
        ),
    ] = False,
    log_dir: LogDir = None,
    tier: TierFolder = None,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Start the recorded command of a run again, from its newest commit or from another step.

    The command and the counts of groups and ranks are those of the newest attempt, also where it
    came to nothing, whether `ftckpt run` started it or a plain `python train.py`. A job that still runs
    elsewhere is fenced off and stops. A run without a readable commit is an error: nothing is ever
    begun anew here.

    Example: ftckpt resume s3://bucket/runs/grpo-1 --groups 3
    """
    with reporting(as_json=as_json):
        job = Job(
            uri=locate(run),
            command=(),
            cwd="",
            groups=1,
            nproc=1,
            min_groups=1,
            log_dir=log_dir,
            allow_unconditional=allow_unconditional,
            options=parse_options(store_option),
        )
        with opened(job) as store:
            claim = newest_claim(store)
            job = replace(_as_recorded(job, claim, groups, nproc, min_groups), tier=_tier(tier, claim))
        code = supervise(
            job, os.environ, teller(as_json=as_json), on_empty="error", step=step, fallback=fallback
        )
    raise typer.Exit(code)


def newest_claim(store: ObjectStore) -> Claim:
    """How the run was last started.

    Raises:
        RunNotFound: there is no run. CommandNotFound: nobody ever began an attempt.
    """
    find_run(store)
    newest = look(store).view.newest_claim
    if not newest:
        raise CommandNotFound(
            f"CommandNotFound: no attempt of {store.uri} was ever claimed, so no command is recorded\n"
            "  nothing was changed; start the job with `ftckpt run RUN -- python train.py`",
            uri=store.uri,
        )
    return read_claim(store, newest)


def _tier(given: str | None, claim: Claim) -> str | None:
    """The tier as asked for, else the recorded one, wherever it is reached from: on another machine it
    is a new one, and what the old one still owes stays there.
    """
    if given is not None:
        return locate(given)
    return claim.settings.get("tier")


def _as_recorded(
    job: Job, claim: Claim, groups: int | None, nproc: int | None, min_groups: int | None
) -> Job:
    """The job as it was last started, with what was asked for now; its command exists here."""
    before_uri = claim.settings.get("run", "")
    named = (before_uri in word or str(Path(claim.cwd) / word) == before_uri for word in claim.command)
    if before_uri and before_uri != job.uri and any(named):
        raise CommandNotFound(
            f"CommandNotFound: the recorded command of attempt {claim.attempt} names another address\n"
            f"  it was started for {before_uri}, and this run is at {job.uri}: copied or moved\n"
            "  nothing was changed; start it with `ftckpt run NEW -- COMMAND`, with the new address in the command",
            uri=job.uri,
            recorded=before_uri,
        )
    check_command(
        claim.command,
        claim.cwd,
        os.environ,
        whose=f"the command of attempt {claim.attempt}",
        advice="bring it back, or start the run with another one: `ftckpt run RUN -- COMMAND`",
    )
    count = claim.groups if groups is None else groups
    before = claim.settings.get("min_groups", "1")
    least = min(int(before) if before.isdecimal() else 1, count) if min_groups is None else min_groups
    return replace(
        job,
        command=claim.command,
        cwd=claim.cwd,
        groups=count,
        nproc=claim.nproc if nproc is None else nproc,
        min_groups=max(least, 1),
    )
