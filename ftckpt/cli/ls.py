"""``ftckpt ls``: what a run holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.cli.common import (
    Address,
    AsJson,
    StoreOptions,
    print_json,
    print_table,
    reading,
    reporting,
    size,
    table,
)
from ftckpt.cli.records import attempts_json, attempts_table, bytes_of, groups_of

if TYPE_CHECKING:
    from ftckpt.run import Entry, Run


def ls(
    run: Address,
    everything: Annotated[bool, typer.Option("--all", help="Also commits that were collected.")] = False,
    attempts: Annotated[
        bool, typer.Option("--attempts", help="Also every attempt and what it went on from.")
    ] = False,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
) -> None:
    """List the commits of a run, newest first.

    readable: on the lineage, can be restored. orphan: written by an attempt that was left behind.
    aborted: given up, never readable. damaged: its record does not read. collected: deleted.

    Example: ftckpt ls s3://bucket/runs/grpo-1 --attempts
    """
    with reporting(as_json=as_json), reading(run, store_option) as opened:
        entries = [entry for entry in opened.entries() if everything or entry.status != "collected"]
        if as_json:
            answer: dict[str, Any] = {"run": opened.uri, "commits": [_json(entry) for entry in entries]}
            if attempts:
                answer["attempts"] = attempts_json(opened)
            print_json(answer)
        else:
            _show(opened, entries, attempts=attempts)


def _json(entry: Entry) -> dict[str, Any]:
    line: dict[str, Any] = {"step": entry.at.step, "attempt": entry.at.attempt, "status": entry.status}
    if entry.commit is not None and not entry.commit.aborted:
        line |= bytes_of(entry.commit)
        line["groups"] = groups_of(entry.commit)
        line["quorums"] = list(entry.commit.quorums)
        line["guarantee"] = entry.commit.guarantee
        line["why"] = list(entry.commit.why)
    return {**line, "reason": entry.why}


def _show(run: Run, entries: list[Entry], *, attempts: bool) -> None:
    print(run.uri)
    if entries:
        numbers = ("step", "attempt", "raw", "stored", "reused")
        rows = table(
            "step", "attempt", "status", *numbers[2:], "groups", "guarantee", "reason", right=numbers
        )
        for entry in entries:
            commit = entry.commit if entry.commit is not None and not entry.commit.aborted else None
            sums = [size(n) for n in bytes_of(commit).values()] if commit else ["-"] * 3
            groups = ",".join(groups_of(commit)) if commit else "-"
            rows.add_row(
                str(entry.at.step),
                str(entry.at.attempt),
                entry.status,
                *sums,
                groups,
                commit.guarantee if commit else "-",
                entry.why,
            )
        print_table(rows)
    else:
        print("no commits")
    if attempts:
        print()
        print_table(attempts_table(run))
