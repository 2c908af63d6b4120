"""Replica groups that save by their clocks: whoever's is due wishes, and all save the same step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.clock import HandClock
from ftckpt.elastic import Launch, ReplicaGroup
from tests.elastic.test_turns import lighthouse  # noqa: F401 - a fixture
from tests.session.toy import Heard

# torchft calls a deprecated method of logging while it forms a process group
pytestmark = pytest.mark.filterwarnings("ignore:The 'warn' method is deprecated:DeprecationWarning")


def train(folder: Path, address: str, name: str, step_s: float) -> list[int]:
    """One group, whose steps take ``step_s`` by its own clock: the steps that it saved."""
    launch = Launch(group=name, lighthouse=address)
    group = ReplicaGroup(launch, slots=2, heal_time_s=5, join_timeout_s=2)
    heard, clock, state = Heard(), HandClock(), {"t": torch.zeros(64)}
    options = {"save_every": "25s", "keep": None, "events": heard, "clock": clock}
    with ftckpt.Session(folder, state, replica_group=group, **options) as session:
        for step in session.steps(until=12):
            turn = group.begin(step)
            group.reduce(turn, lambda _slot: torch.ones(1), 1, torch.float32)
            if group.vote():
                state["t"] += 1
            clock.sleep(step_s)
    return sorted(event["step"] for event in heard.named("save.committed"))


def test_groups_whose_clocks_differ_save_the_same_steps(tmp_path, lighthouse):  # noqa: F811
    """By the clock of group a a save is due at step 3, 7 and 11; group b's hardly moves."""
    with ThreadPoolExecutor(2) as pool:
        groups = [pool.submit(train, tmp_path, lighthouse, name, s) for name, s in (("a", 10.0), ("b", 0.1))]
        a, b = (group.result() for group in groups)

    assert a == b == [0, 4, 8, 12]
