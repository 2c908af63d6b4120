"""``ftckpt copy``: a run, or one step of it, at another address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.address import options_for
from ftckpt.cli.common import (
    AsJson,
    OneWriter,
    StoreOptions,
    ToOptions,
    bar,
    locate,
    opening,
    parse_options,
    print_json,
    reporting,
    size,
)

if TYPE_CHECKING:
    from ftckpt.copying import Copied, Means
    from ftckpt.store.api import ObjectStore

COPIES = 4

Source = Annotated[
    str, typer.Argument(metavar="RUN", help="The run: a folder, s3://bucket/prefix, …", show_default=False)
]
Dest = Annotated[
    str, typer.Argument(metavar="DEST", help="Where to: an address that holds nothing.", show_default=False)
]
AtRest = Annotated[
    bool,
    typer.Option(
        "--at-rest",
        help="Nobody writes or collects the run: pin nothing. For runs that may only be read.",
    ),
]
Stream = Annotated[
    bool,
    typer.Option("--stream", help="Read and prove every byte, also where the store could copy it itself."),
]


def copy(
    run: Source,
    dest: Dest,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only this step; all readable ones if left out.")
    ] = None,
    at_rest: AtRest = False,
    stream: Stream = False,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
    to_option: ToOptions = None,
    allow_unconditional: OneWriter = False,
) -> None:
    """Copy a run to another address, also while it is written; run it again to add what came since.

    The copy is the same run: `ftckpt verify`, `resume` and everything else work on it. Steps become
    readable there whole or not at all, and it is no run before the first copy has ended. Every record and
    every pack is proven on the way. Where both addresses are in one bucket the server copies packs
    itself, and only their sizes are proven. --store-option is for both, where they are no folders.

    Example: ftckpt copy s3://bucket/runs/grpo-1 /data/backup/grpo-1 --step 400
    """
    with (
        reporting(as_json=as_json),
        moving(run, dest, store_option, to_option, allow_unconditional, at_rest=at_rest, stream=stream) as (
            source,
            target,
            means,
        ),
    ):
        from ftckpt.copying import copy as copy_run

        done = copy_run(source, target, step=step, means=means)
        tell(done, source.uri, target.uri, as_json=as_json)


@contextmanager
def moving(
    run: str,
    dest: str,
    given: Sequence[str] | None,
    given_to: Sequence[str] | None,
    one_writer: bool,
    *,
    at_rest: bool,
    stream: bool,
) -> Iterator[tuple[ObjectStore, ObjectStore, Means]]:
    """Both stores, and how bytes get from one to the other."""
    from ftckpt.copying import Means
    from ftckpt.store import server_side

    common, own = parse_options(given), parse_options(given_to)
    here, there = locate(run), locate(dest)
    to = {**options_for(there, common), **own}
    with (
        opening(here, options_for(here, common), one_writer=True) as source,
        opening(there, to, one_writer=one_writer) as target,
        ThreadPoolExecutor(COPIES, "ftckpt-copy") as pool,
        bar(1) as shown,
    ):

        def together(copies: Sequence[Callable[[], int]]) -> list[int]:
            futures = [pool.submit(copy) for copy in copies]
            try:
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

        within = None if stream or own else server_side(here, there, options=common)
        yield source, target, Means(together, within, not at_rest, progress=shown.hear)


def tell(done: Copied, source: str, dest: str, *, as_json: bool) -> None:
    """What was done, for people or for programs."""
    steps = [at.step for at in done.steps]
    if as_json:
        answer: dict[str, Any] = {"run": source, "dest": dest, "steps": steps}
        answer |= {"left_out": [at.step for at in done.left_out]}
        print_json({**answer, "copied_bytes": done.copied_bytes, "found_bytes": done.found_bytes})
        return
    found = f", {size(done.found_bytes)} were there" if done.found_bytes else ""
    named = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps up to {steps[-1]}"
    print(f"{dest}: {named}; {size(done.copied_bytes)} copied{found}")
    for at in done.left_out:
        print(f"  left out: {at}, which was collected")
