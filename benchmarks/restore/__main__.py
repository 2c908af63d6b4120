"""``python -m benchmarks.restore``: the whole comparison, in one run and two tables."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.command import Turns, arguments, place, record, server, wide
from benchmarks.restore.figures import figures
from benchmarks.restore.plan import cases
from benchmarks.restore.table import show
from benchmarks.save.plan import Case


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 when every case ran, whatever it measured; 1 when one failed."""
    told = arguments("python -m benchmarks.restore", __doc__, argv)
    planned = [case for case in cases(told.size_bytes, quick=told.quick) if told.asks_for(case.name)]
    saved = list(dict.fromkeys(case.saved for case in planned))
    turns = Turns({case.name: [] for case in planned})
    folder = Path(tempfile.mkdtemp(prefix="ftckpt-bench-", dir=told.folder))
    try:
        with server(folder / "s3", needed=any(one.where == "s3" for one in saved)) as s3:
            places = {one.name: place(one.name, one.where, folder, s3) for one in saved}
            for one in saved:
                turns.take("saving", Case(one.name, one.where, one.work, one.amount), places[one.name])
            os.sync()  # what was saved must not be written to disk while others read
            for number in range(told.rounds):
                for case in planned:
                    if case.saved.name not in turns.errors and not (case.once and number):
                        reading = Case(case.name, case.saved.where, case.work, case.saved.amount)
                        turns.take(f"round {number + 1}", reading, places[case.saved.name])
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    wanted = figures(turns.results)
    show(wide(), turns.results, wanted, turns.errors)
    record(told, turns, wanted)
    return 1 if turns.errors else 0


if __name__ == "__main__":
    sys.exit(main())
