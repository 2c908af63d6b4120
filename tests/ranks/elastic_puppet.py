"""A rank without torch, led by files in FOLDER: what a supervisor sees of a trainer.

    elastic_puppet.py FOLDER

It passes a vote every 20 ms (``group.turn`` through FTCKPT_STATUS), from the step in ``start`` on
until the step in ``end``. While ``mute.GROUP`` exists it asks for a quorum and gets none, or, with a
number above 0 in there, is in the middle of a step. With ``exit.GROUP`` it ends at once with the code
in there, with ``once.GROUP`` likewise but only once. A line for every life goes to ``lives``.
SIGTERM: it ends with 0, or ignores it when ``deaf`` exists.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    folder = Path(sys.argv[1])
    group, rank, life = os.environ["FTCKPT_GROUP"], os.environ["RANK"], int(os.environ["FTCKPT_REJOIN"])
    attempt = int(os.environ["FTCKPT_ATTEMPT"])
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
    with (folder / "lives").open("a") as lives:
        lives.write(f"{attempt} {group}.{rank} {life} {os.getpid()}\n")
    print(f"attempt {attempt} life {life} of {group}.{rank}", flush=True)
    step = read(folder / "start", 0)
    while not (stop and not (folder / "deaf").exists()) and step < read(folder / "end", 10**9):
        code = read(folder / f"exit.{group}", -1)
        if code < 0 and (code := read(folder / f"once.{group}", -1)) >= 0 and rank == "0":
            (folder / f"once.{group}").unlink()
        if code >= 0 and rank == "0":
            sys.exit(code)
        step += 1
        mute = read(folder / f"mute.{group}", -1)  # looked at once a step: it never begins after a vote
        tell({"phase": "asked", "step": step})
        if mute:
            tell({"phase": "begun", "step": step, "participants": [group]})
        if mute < 0:
            tell({"phase": "voted", "step": step, "vote": True})
        while mute >= 0 and (folder / f"mute.{group}").exists() and not stop:
            time.sleep(0.01)
        time.sleep(0.02)


def tell(fields: dict[str, object]) -> None:
    with Path(os.environ["FTCKPT_STATUS"]).open("a") as file:
        file.write(json.dumps({"event": "group.turn", "unix_s": time.time(), **fields}) + "\n")


def read(path: Path, default: int) -> int:
    try:
        return int(path.read_text() or 0)
    except FileNotFoundError:
        return default


if __name__ == "__main__":
    main()
