"""``ftckpt verify``: read and check every byte."""

from __future__ import annotations

from typing import Annotated

import typer

from ftckpt.cli.common import Address, AsJson, StoreOptions, bar, print_json, reading, reporting


def verify(
    run: Address,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Only this step; all of the run if left out.")
    ] = None,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
) -> None:
    """Read every record and every chunk that a readable commit needs, and name all that is wrong.

    Exits with 1 if anything is. Nothing is changed.

    Example: ftckpt verify s3://bucket/runs/grpo-1 --step 400
    """
    with reporting(as_json=as_json), reading(run, store_option) as opened:
        steps = [step] if step is not None else sorted(at.step for at in opened.look().view.readable)
        with bar(len(steps)) as shown:
            problems = opened.verify(step, shown.hear)
        if as_json:
            print_json(
                {
                    "run": opened.uri,
                    "ok": not problems,
                    "steps": steps,
                    "problems": [
                        {
                            "key": problem.key,
                            "step": problem.step,
                            "error": type(problem.error).__name__,
                            "message": problem.error.message,
                        }
                        for problem in problems
                    ],
                }
            )
        else:
            for problem in problems:
                print(problem.error.message)
            what = f"{len(steps)} {'commit' if len(steps) == 1 else 'commits'}"
            found = f"{len(problems)} problems" if len(problems) != 1 else "1 problem"
            print(f"{opened.uri}: {what} checked, {found if problems else 'all good'}")
        if problems:
            raise typer.Exit(1)
