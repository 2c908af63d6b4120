"""``ftckpt show``: one commit, from the outside in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.pretty import pretty_repr

from ftckpt.begin import recorded
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
from ftckpt.cli.records import attempt_json, attempts_json, attempts_table, bytes_of, groups_of
from ftckpt.cli.reshard import parse_world
from ftckpt.cli.reshard import reshard as show_reshard
from ftckpt.errors import ObjectNotFound
from ftckpt.inventory import Part
from ftckpt.manifest import Claim, Commit, Start

if TYPE_CHECKING:
    from ftckpt.run import Run


def show(
    run: Address,
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Which step; the newest if left out.")
    ] = None,
    leaves: Annotated[bool, typer.Option("--leaves", help="Also every tensor and value by name.")] = False,
    attempts: Annotated[bool, typer.Option("--attempts", help="Also every attempt of the run.")] = False,
    value: Annotated[
        str | None,
        typer.Option("--value", metavar="COMPONENT", help="Only the plain values of this component."),
    ] = None,
    reshard: Annotated[
        str | None,
        typer.Option(
            "--reshard",
            metavar="world=N",
            help="Only what each of N ranks would read, were every tensor cut over them by rows (FSDP2).",
        ),
    ] = None,
    as_json: AsJson = False,
    store_option: StoreOptions = None,
) -> None:
    """Show what a commit holds and what it leaves out, who wrote it, and how exact a resume from it is.

    Example: ftckpt show /data/runs/grpo-1 --step 400 --leaves
    """
    if value is not None and (leaves or attempts):
        raise typer.BadParameter("stands alone, without --leaves and --attempts", param_hint="--value")
    if reshard is not None and (leaves or attempts or value is not None):
        raise typer.BadParameter("stands alone, without other things to show", param_hint="--reshard")
    world = None if reshard is None else parse_world(reshard)
    with reporting(as_json=as_json), reading(run, store_option) as opened:
        if world is not None:
            show_reshard(opened, step, world, as_json=as_json)
        elif value is not None:
            _value(opened, step, value, as_json=as_json)
        elif as_json:
            print_json(_json(opened, opened.commit(step), leaves=leaves, attempts=attempts))
        else:
            _show(opened, opened.commit(step), leaves=leaves, attempts=attempts)


def _value(run: Run, step: int | None, component: str, *, as_json: bool) -> None:
    found = run.value(component, step)
    plain = found["tree"] if isinstance(found, dict) and "tree" in found else found
    if as_json:
        print_json({"component": component, "value": plain})
    else:
        print(pretty_repr(plain))


def _origin(run: Run, commit: Commit) -> tuple[Claim, Start | None] | None:
    from ftckpt.attempts import read_claim, read_start

    try:
        return read_claim(run.store, commit.attempt), read_start(run.store, commit.attempt)
    except ObjectNotFound:
        return None


def _json(run: Run, commit: Commit, *, leaves: bool, attempts: bool) -> dict[str, Any]:
    origin = _origin(run, commit)
    answer: dict[str, Any] = {
        "run": run.uri,
        "step": commit.step,
        "attempt": commit.attempt,
        "format": commit.format,
        "state": commit.state,
        "guarantee": commit.guarantee,
        "why": commit.why,
        "parent": commit.parent,
        **bytes_of(commit),
        "groups": groups_of(commit),
        "quorums": commit.quorums,
        "writers": [
            {"fragment": ref.key, "size_bytes": ref.size, "digest": ref.digest} for ref in commit.fragments
        ],
        "components": commit.components,
        "inventory": {name: _part_json(part) for name, part in run.inventory(commit.step).items()},
        "left_out": commit.left_out,
        "written_by": attempt_json(*origin) if origin else None,
    }
    if leaves:
        answer["leaves"] = list(run.leaves(commit.step).values())
    if attempts:
        answer["attempts"] = attempts_json(run)
    return answer


def _show(run: Run, commit: Commit, *, leaves: bool, attempts: bool) -> None:
    from ftckpt.reader import fragment_owner

    sums, origin = bytes_of(commit), _origin(run, commit)
    print(f"{commit.at} of {run.uri}")
    reused = f", {size(sums['reused_bytes'])} of it reused" if sums["reused_bytes"] else ""
    print(f"holds      {size(sums['raw_bytes'])}, stored in {size(sums['stored_bytes'])}{reused}")
    print(f"guarantee  {commit.guarantee}")
    for reason in commit.why:
        print(f"           not better: {reason}")
    print(f"parent     {commit.parent.at if commit.parent else 'none'}")
    for number, ref in enumerate(commit.fragments):
        print(f"{'written by' if number == 0 else '':10} {fragment_owner(ref)}")
    if origin is not None:
        claim, start = origin
        print(f"command    {recorded(claim.command)}")
        print(f"           in {claim.cwd} on {claim.host}, {claim.groups} × {claim.nproc} ranks")
        if start is not None and start.versions:
            print(f"           {', '.join(f'{name} {text}' for name, text in start.versions.items())}")
    print()
    _show_parts(run.inventory(commit.step))
    print()
    _show_left_out(commit)
    if leaves:
        print()
        named = table("leaf", "kind", "dtype", "shape", "rank's own")
        for leaf in run.leaves(commit.step).values():
            named.add_row(
                leaf.name, leaf.kind, leaf.dtype, "×".join(map(str, leaf.shape)) or "()", leaf.owner
            )
        print_table(named)
    if attempts:
        print()
        print_table(attempts_table(run))


def _show_parts(parts: Mapping[str, Part]) -> None:
    numbers = ("leaves", "raw", "stored", "reused", "chain")
    rows = table("component", *numbers, "codecs", right=numbers)
    for name, part in parts.items():
        codecs = (
            f"{codec} {one.chunks} × {one.ratio:.2f}"
            for codec, one in sorted(part.written.items(), key=lambda item: -item[1].raw_bytes)
        )
        sizes = (size(part.raw_bytes), size(part.stored_bytes), size(part.reused_bytes))
        own = f", own of {_count(len(part.owners), 'rank')}" if part.owners else ""
        rows.add_row(
            name, str(len(part.leaves)), *sizes, str(part.longest_chain), (", ".join(codecs) or "-") + own
        )
    print_table(rows)


def _show_left_out(commit: Commit) -> None:
    if not commit.left_out:
        print("not in it  (its writer did not say)")
    for number, line in enumerate(commit.left_out):
        print(f"{'not in it' if number == 0 else '':10} {line}")


def _part_json(part: Part) -> dict[str, Any]:
    return {
        "leaves": len(part.leaves),
        "raw_bytes": part.raw_bytes,
        "stored_bytes": part.stored_bytes,
        "reused_bytes": part.reused_bytes,
        "longest_chain": part.longest_chain,
        "owners": sorted(part.owners),
        "codecs": {
            codec: {
                "chunks": one.chunks,
                "raw_bytes": one.raw_bytes,
                "stored_bytes": one.stored_bytes,
                "ratio": round(one.ratio, 4),
            }
            for codec, one in sorted(part.written.items())
        },
    }


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
