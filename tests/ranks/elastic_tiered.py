"""One rank of one replica group of a job under ``ftckpt run --tier``.

    elastic_tiered.py FOLDER

Trains as ``elastic_train.py`` does and is talked to in the same way: it joins when ``FOLDER/go`` exists, is
held in the first gradient of step N while ``hold.GROUP`` says N, and prints every step that it finished.
Run, tier and all else come from the supervisor; a save every second step, of which that of step N gets no
further than its beginning while ``unsaved.GROUP`` says N; it ends when it is told to stop.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

import ftckpt
from ftckpt.elastic import Launch, ReplicaGroup
from ftckpt.events import Event
from tests.ranks.elastic_state import SLOTS, State, payload

SLOT_S = 0.02
MOST_STEPS = 10_000


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    launch = Launch.from_env()
    state = State(1, fsdp=False)
    group = ReplicaGroup(launch, slots=SLOTS, heal_time_s=10.0)
    print("ready", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)

    def wait_while(word: str, step: int) -> None:
        path = folder / f"{word}.{launch.group}"
        while path.exists() and path.read_text() == str(step):
            time.sleep(0.01)

    def events(event: Event) -> None:
        if event.name == "save.begun":
            wait_while("unsaved", event.fields["step"])
        if event.name in ("session.healed", "save.failed", "save.warning", "session.save_failed"):
            print(event.name, event.fields, flush=True)

    session = ftckpt.Session(
        os.environ["FTCKPT_RUN"],
        state.components(),
        replica_group=group,
        save_every=2,
        keep=None,
        events=events,
    )
    with session as ckpt:
        for step in ckpt.steps(until=MOST_STEPS):
            turn = group.begin(step)
            train(state, group, turn, lambda: wait_while("hold", turn.step))  # noqa: B023


def train(state: State, group: ReplicaGroup, turn, hold) -> None:
    batch = group.exchange(turn, {slot: payload(turn.step, slot) for slot in turn.slots})

    def gradient(slot: int) -> torch.Tensor:
        print(f"slot {slot} of step {turn.step}", flush=True)
        hold()
        time.sleep(SLOT_S)
        return state.slot_gradient(batch[slot])

    total = group.reduce(turn, gradient, state.numel, torch.float32)
    if group.vote():
        state.apply(total / SLOTS)
        parties, members = len(turn.participants), group.membership.digest()
        print(f"step {turn.step} participants {parties} hash {state.digest()} {members}", flush=True)
    else:
        print(f"failed vote on step {turn.step}", flush=True)


if __name__ == "__main__":
    main()
