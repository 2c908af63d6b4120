"""The two tables of a run: what every case measured, and what is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.save.figures import MIB, Figure, Results, medians


def show(console: Console, results: Results, wanted: Sequence[Figure], errors: Mapping[str, str]) -> None:
    console.print(_cases(results, errors))
    console.print(asked(wanted))


def _cases(results: Results, errors: Mapping[str, str]) -> Table:
    table = Table(title="Savers in turn: medians")
    for heading in ("case", "rounds", "commit s", "stall s", "× limit", "CPU s", "extra MiB", "stored MiB"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    limits = {
        kind: medians(results.get(name, ())).get("commit_s")
        for kind, name in (("s3", "s3: raw PUTs"), ("folder", "folder: raw writes"))
    }
    for name, rounds in results.items():
        found = medians(rounds)
        if "commit_s" not in found:
            continue
        limit = limits.get(name.partition(":")[0])
        stored = found.get("stored_bytes")
        table.add_row(
            name,
            str(len(rounds)),
            f"{found['commit_s']:.2f}",
            f"{found['stall_s']:.4f}" if "stall_s" in found else "",
            f"{found['commit_s'] / limit:.2f}" if limit else "",
            f"{found['cpu_s']:.2f}",
            f"{found['extra_bytes'] / MIB:.0f}",
            f"{stored / MIB:.0f}" if stored is not None else "",
        )
    for name, error in errors.items():
        table.add_row(name, "failed", error.strip().splitlines()[-1][:60])
    return table


def asked(wanted: Sequence[Figure]) -> Table:
    """What was asked, what was measured, and whether that is enough."""
    table = Table(title="What is asked")
    for heading in ("figure", "asked", "measured", "rounds", "reached", "note"):
        table.add_column(heading, justify="left" if heading in ("figure", "note") else "right")
    for figure in wanted:
        measured = figure.measured
        table.add_row(
            figure.name,
            f"{'≤' if figure.asked == 'at most' else '≥'} {figure.limit:g} {figure.unit}",
            f"{measured:.3g} {figure.unit}" if measured is not None else "not measured",
            " ".join(f"{value:.3g}" for value in figure.rounds),
            {True: "yes", False: "NO", None: ""}[figure.reached],
            figure.note,
        )
    return table
