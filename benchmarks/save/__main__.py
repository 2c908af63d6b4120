"""``python -m benchmarks.save``: the whole comparison, in one run and one table."""

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

from benchmarks.save import child
from benchmarks.save.figures import Figure, Results, figures
from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place
from benchmarks.save.plan import MIB, Case, cases
from benchmarks.save.table import show
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
    console = Console(stderr=True, soft_wrap=True)
    results: dict[str, list[Numbers]] = {case.name: [] for case in planned}
    errors: dict[str, str] = {}
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-bench-", dir=told.folder))
    try:
        for number in range(rounds):
            with _server(folder / "s3", planned) as server:
                for case in planned:
                    if case.once and number:
                        continue
                    os.sync()  # what earlier cases left to be written must not be written during this one
                    _run(case, _place(case, folder, server), number, results, errors, console)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = figures(results)
    show(_wide(), results, wanted, errors)
    if told.json:
        told.json.write_text(json.dumps(_record(size_bytes, results, wanted, errors), indent=1) + "\n")
    return 1 if errors else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.save", description=__doc__)
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
    """A fresh S3 server, if any case needs one."""
    if not any(case.where == "s3" for case in planned):
        yield None
        return
    with start_s3(folder, "ftckpt-bench") as server:
        yield server


def _place(case: Case, folder: Path, server: S3Server | None) -> Place:
    name = "".join(letter if letter.isalnum() else "-" for letter in case.name)
    if case.where == "folder":
        return Place(str(folder / name))
    assert server is not None
    return Place(server.uri(name), server.env)


def _run(
    case: Case,
    place: Place,
    number: int,
    results: dict[str, list[Numbers]],
    errors: dict[str, str],
    console: Console,
) -> None:
    begun_s = time.monotonic()
    console.print(f"round {number + 1}: {case.name} …", end=" ")
    try:
        results[case.name].append(child.run(case, place, TIMEOUT_S))
    except child.Failed as error:
        errors[case.name] = str(error)
        console.print("failed", style="red")
        console.print(str(error), markup=False, highlight=False)
    else:
        told = " ".join(f"{key}={value:.6g}" for key, value in results[case.name][-1].items())
        console.print(f"{time.monotonic() - begun_s:.1f} s: {told}", highlight=False)
    finally:
        if not place.is_s3:
            shutil.rmtree(place.uri, ignore_errors=True)


def _wide() -> Console:
    """A file gets whole lines, a terminal those that it has."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def _record(
    size_bytes: int, results: Results, wanted: Sequence[Figure], errors: dict[str, str]
) -> dict[str, object]:
    return {
        "size_bytes": size_bytes,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "load": os.getloadavg(),
        "cases": results,
        "errors": errors,
        "figures": [asdict(one) | {"measured": one.measured, "reached": one.reached} for one in wanted],
    }


if __name__ == "__main__":
    sys.exit(main())
