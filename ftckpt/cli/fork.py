"""``ftckpt fork``: a new run that goes on from a step of another."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli.common import AsJson, OneWriter, StoreOptions, ToOptions, reporting
from ftckpt.cli.copy import AtRest, Dest, Source, Stream, moving, tell


def fork(
    run: Source,
    dest: Dest,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="From this step; the newest if left out.")
    ] = None,
    at_rest: AtRest = False,
    stream: Stream = False,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    to_option: ToOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Make DEST a new run whose attempt 1 goes on from a step of RUN, also while RUN is written.

    RUN is not changed, and the two know nothing of each other afterwards. Start the new one with
    `ftckpt run DEST -- COMMAND`, or with `ftckpt resume DEST` if the recorded command takes its address
    from FTCKPT_RUN. Doing the same fork again completes one that was interrupted.

    Example: ftckpt fork s3://bucket/runs/grpo-1 s3://bucket/runs/grpo-1-hot --step 400
    """
    with (
        reporting(as_json=as_json),
        moving(run, dest, store_option, to_option, allow_unconditional, at_rest=at_rest, stream=stream) as (
            source,
            target,
            means,
        ),
    ):
        from ftckpt.copying import fork as fork_run

        done = fork_run(source, target, step=step, means=means)
        tell(done, source.uri, target.uri, as_json=as_json)
