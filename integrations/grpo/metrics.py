"""Figures of finished steps: a JSON line each in a file, and something to look at.

Knows files and terminals; knows no trainer. Each member may hold one of these, but only the first
participant of a step writes it.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, TextIO

Figures = Mapping[str, float]


class Metrics(Protocol):
    """Where figures go. ``write`` is called once for a step that counted, in step order, by the
    process that is first in the quorum at that step.
    """

    def write(self, step: int, figures: Figures) -> None: ...

    def close(self) -> None: ...


class Nowhere:
    """Figures nobody wants."""

    def write(self, step: int, figures: Figures) -> None:
        pass

    def close(self) -> None:
        pass


class JsonlMetrics:
    """One line a step in ``metrics.jsonl``, in order, no step twice.

    Whoever did not write the step before (a resumed run, or a group that has just become first)
    drops the lines from its first step on, and a line that a death cut in half. So the file
    always tells one history, the one that the weights come from.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "metrics.jsonl"
        self._last_step: int | None = None
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, step: int, figures: Figures) -> None:
        if self._last_step != step - 1:
            self._drop_from(step)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        self._last_step = step

    def close(self) -> None:
        pass

    def _drop_from(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = [
            line for line in self._path.read_text(encoding="utf-8").splitlines() if _is_before(line, step)
        ]
        spare = self._path.with_suffix(f".{os.getpid()}.tmp")
        spare.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
        spare.replace(self._path)


class PlainMetrics:
    """A short line a step, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, step: int, figures: Figures) -> None:
        shown = "  ".join(f"{name} {_short(name, value)}" for name, value in figures.items())
        print(f"step {step}  {shown}", file=self._stream, flush=True)

    def close(self) -> None:
        pass


class TableMetrics:
    """The last steps in a table that stays in place on a terminal."""

    def __init__(self, rows: int = 12) -> None:
        from rich.live import Live

        self._rows: deque[tuple[int, Figures]] = deque(maxlen=rows)
        self._live = Live(auto_refresh=False)
        self._live.start()

    def write(self, step: int, figures: Figures) -> None:
        from rich.table import Table

        self._rows.append((step, figures))
        table = Table("step", *figures)
        for row_step, row in self._rows:
            table.add_row(str(row_step), *(_short(name, value) for name, value in row.items()))
        self._live.update(table, refresh=True)

    def close(self) -> None:
        self._live.stop()


class Several:
    """Tell each of them."""

    def __init__(self, *metrics: Metrics) -> None:
        self._metrics = metrics

    def write(self, step: int, figures: Figures) -> None:
        for each in self._metrics:
            each.write(step, figures)

    def close(self) -> None:
        for each in self._metrics:
            each.close()


def open_metrics(out: str, stream: TextIO) -> Metrics:
    """A table on a terminal, lines elsewhere; and the file if ``out`` names a folder."""
    seen: Metrics = TableMetrics() if stream.isatty() else PlainMetrics(stream)
    return Several(JsonlMetrics(Path(out)), seen) if out else seen


def _is_before(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) < step
    except (ValueError, KeyError, TypeError):
        return False


def _short(name: str, value: float) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.2e}" if name == "lr" else f"{value:.3f}"
