"""What all commands share: the address, the store's options, how answers and errors are told.

stdout carries the answer and nothing else; bars and errors go to stderr. Knows terminals and JSON;
refuses to know what a run is made of.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import msgspec
import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from ftckpt.address import from_anywhere
from ftckpt.errors import FtckptError, RunNotFound, in_words
from ftckpt.events import Event

if TYPE_CHECKING:
    from ftckpt.run import Run
    from ftckpt.store.api import ObjectStore

PIPE_WIDTH = 200
"""Columns of a table that no terminal shows; what is longer is folded, never cut off."""

_STEP_DIGITS = 18
"""More is no step but a part of an address. Keys have 12."""

Address = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Where the run is kept: a folder, s3://bucket/prefix, …", show_default=False
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON on stdout, and with nothing else.")]
StoreOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--store-option",
        metavar="KEY=VALUE",
        help="A setting of the store; wins over the AWS_* variables. May be repeated. Other users of the "
        "machine can read command lines: give secrets in the environment.",
        show_default=False,
    ),
]
ToOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--to-option",
        metavar="KEY=VALUE",
        help="A setting only of the store that is written; wins over --store-option. May be repeated.",
        show_default=False,
    ),
]
OneWriter = Annotated[
    bool,
    typer.Option(
        "--allow-unconditional",
        help="Also write to a store where creates are not exclusive. You make sure of one writer.",
    ),
]


def locate(address: str) -> str:
    """The address as it is from any folder. Raises ``RunNotFound`` for an empty one."""
    if not address.strip():
        raise RunNotFound(
            "RunNotFound: the address of the run is empty\n"
            "  nothing was created or changed; give a folder, s3://bucket/prefix, or any other address of a store\n"
            "  a variable in your shell may be unset",
            uri=address,
        )
    return from_anywhere(address)


def split_step(text: str) -> tuple[str, int | None]:
    """``RUN@STEP`` in its two parts; ``RUN`` and ``RUN@latest`` mean the newest step."""
    address, at, step = text.rpartition("@")
    if at and step.isascii() and step.isdecimal() and len(step) <= _STEP_DIGITS:
        return address, int(step)
    return (address, None) if at and step == "latest" else (text, None)


def parse_options(given: Sequence[str] | None) -> dict[str, object]:
    """``KEY=VALUE`` strings as a mapping. A wrong one is a usage error that does not repeat it."""
    options: dict[str, object] = {}
    for number, text in enumerate(given or (), 1):
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise typer.BadParameter(
                f"number {number} is not of the form KEY=VALUE", param_hint="--store-option"
            )
        options[key.strip()] = value
    return options


def tell_retry(event: Event) -> None:
    """Say on stderr that a store does not answer, once per call that has to wait."""
    if event.name == "store.retry" and event.fields["tries"] == 1:
        print(f"trying again: {event.fields['why']}", file=sys.stderr, flush=True)


@contextmanager
def opening(uri: str, options: Mapping[str, object], *, one_writer: bool) -> Iterator[ObjectStore]:
    """The store at an address; ``one_writer`` allows creates that are not exclusive."""
    from ftckpt.store import open_store

    store = open_store(uri, options=options, allow_unconditional=one_writer, events=tell_retry)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def reading(address: str, given: Sequence[str] | None) -> Iterator[Run]:
    """The run at an address, for reading."""
    from ftckpt.run import Run

    with opening(locate(address), parse_options(given), one_writer=True) as store:
        yield Run(store)


@contextmanager
def reporting(*, as_json: bool, code: int = 1) -> Iterator[None]:
    """Turn what ftckpt raises on purpose into a message and an exit code. Others keep their traceback."""
    try:
        yield
    except FtckptError as error:
        tell_error(error, as_json=as_json)
        raise typer.Exit(code) from None


def tell_error(error: FtckptError, *, as_json: bool) -> None:
    """The message on stderr; with JSON also the facts as one line on stdout."""
    message = in_words(error)
    print(message, file=sys.stderr)
    if as_json:
        print_json({**error.facts, "error": type(error).__name__, "message": message})


def print_json(value: object) -> None:
    """One JSON document on one line."""
    print(json.dumps(to_json(value), allow_nan=False), flush=True)


def to_json(value: object) -> Any:
    """A value as JSON can say it: bytes in hex, numbers that are none and everything unknown in words."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else str(value)
        case bytes() | bytearray() | memoryview():
            return bytes(value).hex()
        case msgspec.Struct():
            return {name: to_json(getattr(value, name)) for name in value.__struct_fields__}
        case Mapping():
            return {str(key): to_json(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [to_json(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if isinstance(value, FtckptError):
        return value.message
    return str(value)


def console(stream: TextIO | None = None) -> Console:
    """A console that prints what it is given: no markup, no guessing, no cutting off in pipes."""
    stream = sys.stdout if stream is None else stream
    width = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False, soft_wrap=True)


def table(*columns: str, right: Sequence[str] = ()) -> Table:
    """An empty table; columns named in ``right`` are numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in columns:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    return made


def print_table(rows: Table) -> None:
    """The table on stdout, without blanks at the ends of lines."""
    made = console()
    with made.capture() as text:
        made.print(rows, soft_wrap=False)
    for line in text.get().splitlines():
        print(line.rstrip())


def size(n_bytes: int) -> str:
    """Bytes for people: ``1.5 MiB``."""
    value = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


class Bar:
    """A bar over the bytes of commits that are read one after the other; ``hear`` is a ``Progress``."""

    def __init__(self, shown: Progress, task: TaskID, commits: int) -> None:
        self._shown = shown
        self._task = task
        self._commits = commits
        self._commit = 0
        self._done = 0
        self._total = 0

    def hear(self, done_bytes: int, total_bytes: int) -> None:
        """A commit begins when less is done, or another total is stated, than before."""
        if self._commit == 0 or done_bytes <= self._done or total_bytes != self._total:
            self._commit += 1
        self._done, self._total = done_bytes, total_bytes
        text = (
            f"commit {min(self._commit, self._commits)} of {self._commits}" if self._commits > 1 else "bytes"
        )
        self._shown.update(self._task, description=text, completed=done_bytes, total=total_bytes)


@contextmanager
def bar(commits: int) -> Iterator[Bar]:
    """A bar and a rate on stderr, if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console(sys.stderr), transient=True, disable=not sys.stderr.isatty()
    ) as shown:
        yield Bar(shown, shown.add_task("reading", total=None), commits)


@contextmanager
def busy(text: str) -> Iterator[None]:
    """A sign on stderr that something goes on, if that is a terminal."""
    if sys.stderr.isatty():
        with console(sys.stderr).status(text):
            yield
    else:
        yield
