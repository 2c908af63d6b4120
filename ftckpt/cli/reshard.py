"""``ftckpt show --reshard``: what a restore onto other ranks would read, rank by rank. A dry run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from ftckpt.cli.common import print_json, print_table, size, table
from ftckpt.plan.forecast import RankLoad, forecast
from ftckpt.plan.restore import index_chunks
from ftckpt.reader import DEFAULT, leaf_specs, read_fragments, shared_out

if TYPE_CHECKING:
    from ftckpt.run import Run

MAX_WORLD = 1 << 16
SHOWN = 32


def parse_world(text: str) -> int:
    """``world=N``. Anything else is a usage error."""
    name, _, number = text.partition("=")
    fits = name == "world" and number.isascii() and number.isdecimal() and len(number) <= 6
    if not fits or not 1 <= int(number) <= MAX_WORLD:
        raise typer.BadParameter(f"give world=N, N from 1 to {MAX_WORLD}", param_hint="--reshard")
    return int(number)


def reshard(run: Run, step: int | None, world: int, *, as_json: bool) -> None:
    """Say it. Reads the commit and its fragments, and no chunk."""
    commit = run.commit(step)
    fragments = read_fragments(run.store, commit)
    leaves = leaf_specs(fragments).values()
    loads = forecast(
        commit,
        leaves,
        index_chunks(fragments),
        world,
        lambda fetches: shared_out(fetches, DEFAULT)[0],
    )
    owners = sorted({leaf.owner for leaf in leaves} - {""})
    if as_json:
        answer: dict[str, Any] = {"run": run.uri, "step": commit.step, "world": world}
        print_json({**answer, "per_rank_of": owners, "ranks": loads})
        return
    print(f"{commit.at} of {run.uri}, cut over {world} {'rank' if world == 1 else 'ranks'} by rows")
    numbers = ("needs", "fetches", "requests", "chunks", "fragments", "of them")
    rows = table("rank", *numbers, right=("rank", *numbers))
    for load in loads[:SHOWN]:
        rows.add_row(str(load.rank), *_cells(load))
    print_table(rows)
    if world > SHOWN:
        print(f"… {world - SHOWN} more; --json has all")
    heaviest = max(loads, key=lambda load: load.fetched_bytes)
    fetched, needed = sum(load.fetched_bytes for load in loads), sum(load.needed_bytes for load in loads)
    ratio = f", {fetched / needed:.2f} × what they need" if needed else ""
    print(f"all ranks  {size(fetched)}{ratio}; most at rank {heaviest.rank}, {size(heaviest.fetched_bytes)}")
    if owners:
        print(f"not in it  values of single ranks: {', '.join(owners)}")


def _cells(load: RankLoad) -> tuple[str, ...]:
    return (
        size(load.needed_bytes),
        size(load.fetched_bytes),
        str(load.requests),
        str(load.chunks),
        str(load.fragments),
        size(load.fragment_bytes),
    )
