"""One rank of one replica group that trains a tiny model by slots and prints what it does.

    elastic_train.py plain|fsdp FOLDER

``FOLDER`` is how the test talks to it: it joins when ``go`` exists, is held in the first gradient of
step N while ``hold.GROUP`` says N, and ends after the step that ``last`` says. A finished step
prints ``step N participants P hash H``: H covers parameters, both AdamW moments, the scheduler and
a buffer that counts finished steps.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ftckpt.elastic import Launch, ReplicaGroup
from tests.ranks.elastic_state import SLOTS, State, payload
from tests.support.told import number

SLOT_S = 0.02


def main() -> None:
    fsdp, folder = sys.argv[1] == "fsdp", Path(sys.argv[2])
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # a test that waits in vain asks where we are
    launch = Launch.from_env()
    if fsdp:
        dist.init_process_group("gloo")
    state = State(launch.world, fsdp=fsdp)
    rows = slice(launch.rank * 4 // launch.world, (launch.rank + 1) * 4 // launch.world)
    print("ready", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)

    group = ReplicaGroup(launch, slots=SLOTS, heal_time_s=10.0)
    group.open(step=0, heal=state)
    step = 1
    while step <= number(folder / "last", default=step):
        turn = group.begin(step)
        step = turn.step
        if turn.healed:
            print(f"healed to {step - 1} carries {group.carries}", flush=True)
        batch = group.exchange(turn, {slot: payload(step, slot) for slot in turn.slots})

        def gradient(slot: int) -> torch.Tensor:
            print(f"slot {slot} of step {step}", flush=True)  # noqa: B023
            while number(folder / f"hold.{launch.group}", default=0) == step:  # noqa: B023
                time.sleep(0.01)
            time.sleep(SLOT_S)
            return state.slot_gradient(batch[slot][rows])  # noqa: B023

        total = group.reduce(turn, gradient, state.numel, torch.float32)
        if group.vote():
            state.apply(total / SLOTS)
            members = group.membership.digest()
            print(
                f"step {step} participants {len(turn.participants)} hash {state.digest()} {members}",
                flush=True,
            )
            step += 1
        else:
            print(f"failed vote on step {step}", flush=True)
    group.close()
    print("done", flush=True)


if __name__ == "__main__":
    main()
