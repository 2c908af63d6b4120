"""The two tables of a run: how the readers did, and what is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.restore.figures import MIB
from benchmarks.save.figures import Figure, Results, medians
from benchmarks.save.table import asked


def show(console: Console, results: Results, wanted: Sequence[Figure], errors: Mapping[str, str]) -> None:
    console.print(_readers(results, errors))
    console.print(asked(wanted))


def _readers(results: Results, errors: Mapping[str, str]) -> Table:
    table = Table(title="Readers in turn: medians")
    for heading in ("case", "rounds", "restore s", "× limit", "CPU s", "extra MiB"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    limits = {
        kind: medians(results.get(name, ())).get("restore_s")
        for kind, name in (("s3", "s3: raw GETs"), ("folder", "folder: raw reads"))
    }
    for name, rounds in results.items():
        found = medians(rounds)
        if "cpu_s" not in found:
            continue
        limit = limits.get(name.partition(":")[0])
        table.add_row(
            name,
            str(len(rounds)),
            f"{found['restore_s']:.2f}",
            f"{found['restore_s'] / limit:.2f}" if limit else "",
            f"{found['cpu_s']:.2f}",
            f"{found['extra_bytes'] / MIB:.0f}",
        )
    for name, error in errors.items():
        table.add_row(name, "failed", error.strip().splitlines()[-1][:60])
    return table
