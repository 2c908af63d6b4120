"""What the commands of all benchmarks share: arguments, places, cases taking their turn, the record of a run.

A case runs in a process of its own (``save.child``); one that fails is told and does not end the others.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.save import child
from benchmarks.save.figures import Figure
from benchmarks.save.measure import Numbers
from benchmarks.save.places import Place
from benchmarks.save.plan import MIB, Case
from ftckpt.chaos.s3server import S3Server, start_s3

TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the command was told."""

    quick: bool
    size_bytes: int
    rounds: int
    only: tuple[str, ...]
    json: Path | None
    folder: Path | None

    def asks_for(self, name: str) -> bool:
        """Whether a case of that name is to run."""
        return not self.only or any(text in name for text in self.only)


def arguments(prog: str, about: str | None, argv: Sequence[str] | None) -> Told:
    """The arguments of a benchmark."""
    parser = argparse.ArgumentParser(prog=prog, description=about)
    parser.add_argument("--quick", action="store_true", help="64 MiB and one round: does it run at all?")
    parser.add_argument("--mib", type=int, help="size of the state (1024)")
    parser.add_argument("--rounds", type=int, help="how often each case takes its turn (3)")
    parser.add_argument(
        "--only", action="append", metavar="TEXT", help="cases whose name holds TEXT; may be repeated"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers of all rounds there")
    parser.add_argument("--folder", type=Path, help="where to save to and keep the S3 server's files")
    told = parser.parse_args(argv)
    return Told(
        told.quick,
        (told.mib or (64 if told.quick else 1024)) * MIB,
        told.rounds or (1 if told.quick else 3),
        tuple(told.only or ()),
        told.json,
        told.folder,
    )


@contextmanager
def server(folder: Path, *, needed: bool) -> Iterator[S3Server | None]:
    """A fresh S3 server, if any case needs one."""
    if not needed:
        yield None
        return
    with start_s3(folder, "ftckpt-bench") as started:
        yield started


def place(name: str, where: str, folder: Path, s3: S3Server | None) -> Place:
    """Where the case of that name saves."""
    name = "".join(letter if letter.isalnum() else "-" for letter in name)
    if where == "folder":
        return Place(str(folder / name))
    assert s3 is not None
    return Place(s3.uri(name), s3.env)


@dataclass(frozen=True, slots=True)
class Turns:
    """What was measured, by case, and what failed."""

    results: dict[str, list[Numbers]]
    errors: dict[str, str] = field(default_factory=dict)
    console: Console = field(default_factory=lambda: Console(stderr=True, soft_wrap=True))

    def take(self, what: str, case: Case, at: Place) -> None:
        """Run a case. The numbers of one that is in ``results`` are kept."""
        begun_s = time.monotonic()
        self.console.print(f"{what}: {case.name} …", end=" ")
        try:
            found = child.run(case, at, TIMEOUT_S)
        except child.Failed as error:
            self.errors[case.name] = str(error)
            self.console.print("failed", style="red")
            self.console.print(str(error), markup=False, highlight=False)
            return
        if case.name in self.results:
            self.results[case.name].append(found)
        told = " ".join(f"{key}={value:.6g}" for key, value in found.items())
        self.console.print(f"{time.monotonic() - begun_s:.1f} s: {told}", highlight=False)


def wide() -> Console:
    """A file gets whole lines, a terminal those that it has."""
    console = Console()
    return console if console.is_terminal else Console(width=180)


def record(told: Told, turns: Turns, wanted: Sequence[Figure]) -> None:
    """Everything that was measured, to the file that was asked for."""
    if told.json is None:
        return
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__}
    found: Mapping[str, object] = {
        "size_bytes": told.size_bytes,
        "machine": machine,
        "load": os.getloadavg(),
        "cases": turns.results,
        "errors": turns.errors,
        "figures": [asdict(one) | {"measured": one.measured, "reached": one.reached} for one in wanted],
    }
    told.json.write_text(json.dumps(found, indent=1) + "\n")
