"""``ftckpt run``: start a job, or go on with it, under a supervisor."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ftckpt.cli.common import Address, AsJson, OneWriter, StoreOptions, locate, parse_options, reporting
from ftckpt.cli.job import Groups, Job, LogDir, MinGroups, Nproc, TierFolder, supervise
from ftckpt.cli.programs import check_command
from ftckpt.cli.progress import teller


def run(
    run: Address,
    command: Annotated[
        list[str], typer.Argument(metavar="-- COMMAND…", help="What each rank runs.", show_default=False)
    ],
    groups: Groups = 1,
    nproc: Nproc = 1,
    min_groups: MinGroups = 1,
    log_dir: LogDir = None,
    tier: TierFolder = None,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Run a training command in replica groups, restart groups that die, and record how it was started.

    A run that has commits goes on from its newest. The ranks find the address in FTCKPT_RUN and
    their place in FTCKPT_GROUP, RANK and WORLD_SIZE; a Session reads them by itself. More than
    one group needs a trainer that uses a ReplicaGroup.

    Example: ftckpt run s3://bucket/runs/grpo-1 --groups 2 -- python train.py --lr 1e-5
    """
    with reporting(as_json=as_json):
        cwd = os.getcwd()  # noqa: PTH109 - recorded as text
        check_command(
            command,
            cwd,
            os.environ,
            whose="this command",
            advice="give one that exists in this folder, or by its full path",
        )
        job = Job(
            uri=locate(run),
            command=tuple(command),
            cwd=cwd,
            groups=groups,
            nproc=nproc,
            min_groups=min_groups,
            log_dir=log_dir,
            allow_unconditional=allow_unconditional,
            tier=None if tier is None else locate(tier),
            options=parse_options(store_option),
        )
        code = supervise(
            job, os.environ, teller(as_json=as_json), on_empty="start", step=None, fallback=False
        )
    raise typer.Exit(code)
