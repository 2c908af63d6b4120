"""``python -m benchmarks.restore``: the whole comparison, in one run and two tables."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.restore.figures import figures
from benchmarks.restore.plan import MIB, Case, Saved, cases
from benchmarks.restore.table import show
from benchmarks.save import child
from benchmarks.save.figures import Figure, Results
from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place
from benchmarks.save.plan import Case as Task
from ftckpt.chaos.s3server import S3Server, start_s3

TIMEOUT_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every case ran, whatever it measured; 1 when one failed."""
    told = _arguments(argv)
    size_bytes = (told.mib or (64 if told.quick else 1024)) * MIB
    rounds = told.rounds or (1 if told.quick else 3)
    planned = [
        c for c in cases(size_bytes, quick=told.quick) if not told.only or any(o in c.name for o in told.only)
    ]
    turns = _Turns(Console(stderr=True, soft_wrap=True), {case.name: [] for case in planned}, {})
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-bench-", dir=told.folder))
    try:
        with _server(folder / "s3", planned) as server:
            places = {case.saved.name: _place(case.saved, folder, server) for case in planned}
            for saved in dict.fromkeys(case.saved for case in planned):
                turns.take(
                    "saving", Task(saved.name, saved.where, saved.work, saved.amount), places[saved.name]
                )
            os.sync()  # what was saved must not be written to disk while others read
            for number in range(rounds):
                for case in planned:
                    if case.saved.name not in turns.errors and not (case.once and number):
                        work = Task(case.name, case.saved.where, case.work, case.saved.amount)
                        turns.take(f"round {number + 1}", work, places[case.saved.name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = figures(turns.results)
    show(_wide(), turns.results, wanted, turns.errors)
    if told.json:
        told.json.write_text(json.dumps(_record(size_bytes, turns, wanted), indent=1) + "\n")
    return 1 if turns.errors else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.restore", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 MiB and one round: does it run at all?")
    parser.add_argument("--mib", type=int, help="size of the state (1024)")
    parser.add_argument("--rounds", type=int, help="how often each case takes its turn (3)")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose name holds TEXT; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers of all rounds there")
    parser.add_argument("--folder", type=Path, help="where to save to and keep the S3 server's files")
    return parser.parse_args(argv)


@contextmanager
def _server(folder: Path, planned: Sequence[Case]) -> Iterator[S3Server | None]:
    """An S3 server for the whole run, if any case needs one."""
    if not any(case.saved.where == "s3" for case in planned):
        yield None
        return
    with start_s3(folder, "ftckpt-bench") as server:
        yield server


def _place(saved: Saved, folder: Path, server: S3Server | None) -> Place:
    name = "".join(letter if letter.isalnum() else "-" for letter in saved.name)
    if saved.where == "folder":
        return Place(str(folder / name))
    assert server is not None
    return Place(server.uri(name), server.env)


class _Turns:
    """What was measured, and what failed."""

    def __init__(self, console: Console, results: dict[str, list[Numbers]], errors: dict[str, str]) -> None:
        self._console = console
        self.results = results
        self.errors = errors

    def take(self, what: str, task: Task, place: Place) -> None:
        begun_s = time.monotonic()
        self._console.print(f"{what}: {task.name} …", end=" ")
        try:
            found = child.run(task, place, TIMEOUT_S)
        except child.Failed as error:
            self.errors[task.name] = str(error)
            self._console.print("failed", style="red")
            self._console.print(str(error), markup=False, highlight=False)
            return
        if task.name in self.results:
            self.results[task.name].append(found)
        told = " ".join(f"{key}={value:.6g}" for key, value in found.items())
        self._console.print(f"{time.monotonic() - begun_s:.1f} s: {told}", highlight=False)


def _wide() -> Console:
    """A file gets whole lines, a terminal those that it has."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _record(size_bytes: int, turns: _Turns, wanted: Sequence[Figure]) -> dict[str, object]:
    results: Results = turns.results
    return {
        "size_bytes": size_bytes,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "load": os.getloadavg(),
        "cases": results,
        "errors": turns.errors,
        "figures": [asdict(one) | {"measured": one.measured, "reached": one.reached} for one in wanted],
    }


if __name__ == "__main__":
    sys.exit(main())
