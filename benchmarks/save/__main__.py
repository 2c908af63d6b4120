"""``python -m benchmarks.save``: the whole comparison, in one run and one table."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import Turns, arguments, place, record, server, wide
from benchmarks.save.figures import figures
from benchmarks.save.plan import cases
from benchmarks.save.table import show


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every case ran, whatever it measured; 1 when one failed."""
    told = arguments("python -m benchmarks.save", __doc__, argv)
    planned = [case for case in cases(told.size_bytes, quick=told.quick) if told.asks_for(case.name)]
    turns = Turns({case.name: [] for case in planned})
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-bench-", dir=told.folder))
    try:
        for number in range(told.rounds):
            with server(folder / "s3", needed=any(case.where == "s3" for case in planned)) as s3:
                for case in planned:
                    if case.once and number:
                        continue
                    os.sync()  # what earlier cases left to be written must not be written during this one
                    at = place(case.name, case.where, folder, s3)
                    turns.take(f"round {number + 1}", case, at)
                    if not at.is_s3:
                        shutil.rmtree(at.uri, ignore_errors=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = figures(turns.results)
    show(wide(), turns.results, wanted, turns.errors)
    record(told, turns, wanted)
    return 1 if turns.errors else 0


if __name__ == "__main__":
    sys.exit(main())
