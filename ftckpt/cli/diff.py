"""``ftckpt diff``: two steps side by side."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ftckpt.address import options_for
from ftckpt.cli.common import (
    AsJson,
    StoreOptions,
    bar,
    locate,
    opening,
    parse_options,
    print_json,
    print_table,
    reporting,
    size,
    split_step,
    table,
)

if TYPE_CHECKING:
    from ftckpt.compare import Comparison, LeafDiff

TROUBLE = 2


def diff(
    a: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]", help="A step of a run; the newest if left out.", show_default=False
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="[RUN]@STEP", help="The other; only @STEP means the same run.", show_default=False
        ),
    ],
    leaves: Annotated[bool, typer.Option("--leaves", help="Also every leaf that differs, by name.")] = False,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
) -> None:
    """Compare two steps, of one run or of two: equal, changed, by how much at most, missing.

    Digests are compared first; only what differs is read. Exits with 0 when everything is equal, with 1
    when anything differs, and with 2 when it could not compare. --store-option is for every address that is no folder.

    Example: ftckpt diff s3://bucket/runs/grpo-1@400 @420 --leaves
    """
    with reporting(as_json=as_json, code=TROUBLE), ExitStack() as stack:
        from ftckpt.compare import compare
        from ftckpt.run import Run

        address_a, step_a = split_step(a)
        address_b, step_b = split_step(b)
        options = parse_options(store_option)
        runs = []
        for address in (address_a, address_b or address_a):
            given = options_for(address, options)
            runs.append(Run(stack.enter_context(opening(locate(address), given, one_writer=True))))
        sides = [(run.store, run.commit(step)) for run, step in zip(runs, (step_a, step_b), strict=True)]
        with bar(1) as shown:
            found = compare(*sides, progress=shown.hear)
        if as_json:
            print_json(_json(found, [run.uri for run in runs]))
        else:
            _show(found, [run.uri for run in runs], leaves=leaves)
    raise typer.Exit(0 if found.equal else 1)


def _json(found: Comparison, uris: list[str]) -> dict[str, Any]:
    sides = zip("ab", uris, (found.a, found.b), strict=True)
    return {
        "equal": found.equal,
        **{side: {"run": uri, "step": at.step, "attempt": at.attempt} for side, uri, at in sides},
        "components": found.components,
        "leaves": found.leaves,
        "read_bytes": found.read_bytes,
    }


def _show(found: Comparison, uris: list[str], *, leaves: bool) -> None:
    for side, uri, at in zip("ab", uris, (found.a, found.b), strict=True):
        print(f"{side}  {at} of {uri}")
    print()
    numbers = ("equal", "changed", "only in a", "only in b", "max |a-b|")
    rows = table("component", *numbers, right=numbers)
    for part in found.components:
        counts = map(str, (part.equal, part.changed, part.only_a, part.only_b))
        rows.add_row(part.name, *counts, _number(part.max_abs))
    print_table(rows)
    if leaves and found.leaves:
        print()
        named = table("leaf", "is", "elements", "max |a-b|", "what", right=("elements", "max |a-b|"))
        for leaf in found.leaves:
            named.add_row(leaf.name, *_leaf(leaf))
            for change in leaf.values:
                named.add_row(f"  {change.path}", "", "", "", f"{change.a} → {change.b}")
        print_table(named)
    print()
    verdict = "equal" if found.equal else f"{len(found.leaves)} leaves differ"
    print(f"{verdict}; {size(found.read_bytes)} were read")


def _leaf(leaf: LeafDiff) -> tuple[str, str, str, str]:
    what = {"only_a": "only in a", "only_b": "only in b"}.get(leaf.verdict, leaf.verdict)
    elements = str(leaf.changed_elems) if leaf.verdict == "changed" else ""
    told = ""
    if leaf.verdict == "reshaped" and leaf.a is not None and leaf.b is not None:
        told = " → ".join(f"{spec.dtype}{list(spec.shape)}" for spec in (leaf.a, leaf.b))
    return what, elements, _number(leaf.max_abs), told


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
