"""Two ranks that save by the clock: rank 1's runs five times as fast. Prints the committed steps."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

from ftckpt.clock import HandClock
from ftckpt.session import Session
from tests.session.toy import Heard


def main() -> None:
    dist.init_process_group("gloo")
    rank, clock, heard = dist.get_rank(), HandClock(), Heard()
    state = {"t": torch.zeros(64)}
    with Session(sys.argv[1], state, save_every="25s", keep=None, clock=clock, events=heard) as session:
        for _ in session.steps(until=13):
            state["t"] += 1
            dist.all_reduce(torch.zeros(1))
            clock.sleep(10 if rank == 0 else 50)
    print(*sorted(event["step"] for event in heard.named("save.committed")))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
