"""One of several processes that create the same keys; prints the keys it won.

``racer.py URI RACES``: settings come from the environment.
"""

from __future__ import annotations

import os
import sys
import time

from ftckpt.errors import AlreadyExists
from ftckpt.store import open_store


def main(uri: str, races: int) -> None:
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    store = open_store(uri)
    store.create(f"ready/{rank}", b"")
    while len(list(store.scan("ready"))) < world:
        time.sleep(0.001)
    for number in range(races):
        key = f"commits/{number}"
        try:
            store.create(key, f"{rank}".encode() * 5000)
        except AlreadyExists:
            continue
        print(f"won {key}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
