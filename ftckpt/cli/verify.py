"""``ftckpt verify``: read and check every byte; with ``--repair`` bring back what is damaged."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.address import options_for
from ftckpt.cli.common import (
    Address,
    AsJson,
    StoreOptions,
    bar,
    locate,
    opening,
    parse_options,
    print_json,
    reading,
    reporting,
)

if TYPE_CHECKING:
    from ftckpt.repair import Left, Repaired
    from ftckpt.run import Problem


def verify(
    run: Address,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only this step; all of the run if left out.")
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair", help="Bring damaged and lost objects back from where --tier and --from say."
        ),
    ] = False,
    tier: Annotated[
        list[str] | None,
        typer.Option(
            "--tier", metavar="DIR", help="A tier of this run. May be repeated.", show_default=False
        ),
    ] = None,
    copies: Annotated[
        list[str] | None,
        typer.Option(
            "--from", metavar="RUN", help="A copy of this run. May be repeated.", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
) -> None:
    """Read every record and every chunk that a readable commit needs, and name all that is wrong.

    Exits with 1 if anything is, or stays so. Without --repair nothing is changed. With it, an object that is
    damaged or lost is put again, but only with bytes that the records prove to be those it was made with;
    then everything is read once more. --store-option is for all addresses that are no folders.

    Example: ftckpt verify s3://bucket/runs/grpo-1 --step 400
    Example: ftckpt verify s3://bucket/runs/grpo-1 --repair --from /backup/grpo-1
    """
    sources = [*(tier or ()), *(copies or ())]
    if repair and not sources:
        raise typer.BadParameter("needs a place to repair from: --tier or --from", param_hint="--repair")
    if sources and not repair:
        raise typer.BadParameter("only --repair reads from another place", param_hint="--tier, --from")
    if repair:
        _repair(run, sources, step, as_json=as_json, given=store_option)
        return
    with reporting(as_json=as_json), reading(run, store_option) as opened:
        steps = [step] if step is not None else sorted(at.step for at in opened.look().view.readable)
        with bar(len(steps)) as shown:
            problems = opened.verify(step, shown.hear)
        if as_json:
            told = [_problem(problem) for problem in problems]
            print_json({"run": opened.uri, "ok": not problems, "steps": steps, "problems": told})
        else:
            for problem in problems:
                print(problem.error.message)
            what = f"{len(steps)} {'commit' if len(steps) == 1 else 'commits'}"
            print(f"{opened.uri}: {what} checked, {_count(problems)}")
        if problems:
            raise typer.Exit(1)


def _problem(problem: Problem) -> dict[str, Any]:
    return {
        "key": problem.key,
        "step": problem.step,
        "error": type(problem.error).__name__,
        "message": problem.error.message,
    }


def _count(problems: Sequence[Problem | Left]) -> str:
    if not problems:
        return "all good"
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"


def _repair(
    run: str, addresses: Sequence[str], step: int | None, *, as_json: bool, given: Sequence[str] | None
) -> None:
    from ftckpt.repair import repair

    options, here = parse_options(given), locate(run)
    with reporting(as_json=as_json), ExitStack() as open_ones:
        stores = [
            open_ones.enter_context(opening(uri, options_for(uri, options), one_writer=True))
            for uri in (here, *map(locate, addresses))
        ]
        with bar(1) as shown:
            done = repair(stores[0], stores[1:], step=step, progress=shown.hear)
        _tell(stores[0].uri, step, done, as_json=as_json)
        if done.left:
            raise typer.Exit(1)


def _tell(uri: str, step: int | None, done: Repaired, *, as_json: bool) -> None:
    if as_json:
        left = [{**_problem(one.problem), "why": one.why} for one in done.left]
        repaired = [{"key": one.key, "from": one.source} for one in done.mended]
        print_json({"run": uri, "step": step, "ok": not left, "repaired": repaired, "problems": left})
        return
    for one in done.mended:
        print(f"repaired {one.key} from {one.source}")
    for left_one in done.left:
        print(f"{left_one.problem.error.message}\n  not repaired: {left_one.why}")
    objects = f"{len(done.mended)} {'object' if len(done.mended) == 1 else 'objects'}"
    print(f"{uri}: {objects} repaired, {_count(done.left)}")
