"""A trainer that is killed with SIGKILL in its third optimizer step, right after the fence.

``trainer.py FAR TIER HOLD GO``: step 1 is committed in the tier; then the file GO is waited for; the save
of step 2 is held on the saver's thread at the event HOLD ("" for not at all) while the third step begins.
What step 2 holds is printed before.

``trainer.py job FOLDER``: as a supervisor starts it, with run and tier from the environment, a step a save.
The first attempt is killed in step 3, right after the fence, while its save of step 2 has no pack; the
second waits for FOLDER/go after step 3. FOLDER/digest has what step 5 holds.

``trainer.py points FOLDER``: the same, many times, without a hold: the process dies before and after
every change it makes in its tier from the save of step 2 on, each time in folders of its own,
FOLDER/<n>-<when>. ``digest`` there has what step 2 holds, ``fenced`` says that the fence had returned.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch
import xxhash
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import ftckpt
from ftckpt.chaos.faults.store import Call, Fault, FaultyStore, Kill
from ftckpt.events import Event, silent
from ftckpt.session import core
from ftckpt.tiers import Tier, open_tier

CHUNK_BYTES = 4096


class Job:
    """A model with a buffer, its optimizer, a frozen model and plain values: what is streamed, referred to,
    copied and packed.
    """

    def __init__(self, seed: int = 0, width: int = 64) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.Linear(width, width))
        self.optim = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.reference = nn.Linear(width, width)
        self.plain = {"seen": [0]}
        self.state: dict[str, object] = {
            "actor": self.model,
            "optim": self.optim,
            "reference": ftckpt.Frozen(self.reference),
            "plain": self.plain,
        }

    def train(self) -> None:
        self.optim.zero_grad()
        self.model(torch.randn(8, 16)).square().mean().backward()
        self.optim.step()
        self.plain["seen"].append(self.plain["seen"][-1] + 1)

    def digest(self) -> str:
        found = xxhash.xxh3_128()
        for model in (self.model, self.reference):
            for name, value in sorted(model.state_dict().items()):
                found.update(name.encode() + value.numpy().tobytes())
        for parameter in self.model.parameters():
            for name, value in sorted(self.optim.state[parameter].items()):
                found.update(name.encode() + value.numpy().tobytes())
        found.update(json.dumps(self.plain["seen"]).encode())
        return found.hexdigest()


def restored(far: str | Path) -> tuple[int, str]:
    """The newest step of a run, and the digest of what it holds."""
    job = Job(seed=99)
    job.train()
    commit = ftckpt.restore(far, job.state)
    return commit.step, job.digest()


def kill(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def held(far: str, tier: str, hold: str, go: str) -> None:
    job = Job(width=int(os.environ.get("WIDTH", "64")))
    reached = threading.Event()

    def events(event: Event) -> None:
        if event.name == hold and event.fields.get("step") == 2:
            reached.set()
            threading.Event().wait()

    session = ftckpt.Session(
        far, job.state, tiers=[tier], start_agent=False, events=events, chunk_bytes=CHUNK_BYTES, codec="raw"
    )
    with session as ckpt:
        job.train()
        print(job.digest())
        ckpt.save(1).wait(60, tier="local")
        print("one is saved", flush=True)
        while not Path(go).exists():
            time.sleep(0.02)
        job.train()
        print(job.digest(), flush=True)
        ckpt.save(2)
        if hold:
            assert reached.wait(60)
        register_optimizer_step_pre_hook(kill)  # after the session's own
        job.train()


def job(folder: Path) -> None:
    mine = Job()
    reached = threading.Event()

    def events(event: Event) -> None:
        if event.name == "save.begun" and event.fields.get("step") == 2 and session.attempt == 1:
            reached.set()
            threading.Event().wait()

    session = ftckpt.Session(
        os.environ["FTCKPT_RUN"], mine.state, events=events, save_every=1, keep=None, chunk_bytes=CHUNK_BYTES
    )
    with session as ckpt:
        for step in ckpt.steps(until=5):
            if step == 3 and ckpt.attempt == 1:
                assert reached.wait(60)
                register_optimizer_step_pre_hook(kill)
            mine.train()
            print("trained step", step, "in attempt", ckpt.attempt, flush=True)
            while step == 3 and not (folder / "go").exists():
                time.sleep(0.02)
    (folder / "digest").write_text(mine.digest())


class Dying:
    """Kills the process before or after its ``nth`` change; tells whether there was one."""

    def __init__(self, nth: int, when: str, armed: threading.Event) -> None:
        self.nth, self.when, self.armed = nth, when, armed
        self.seen = 0

    def around(self, call: Call, proceed, clock):
        mine = self.armed.is_set() and call.op in ("create", "delete")
        self.seen += mine
        if mine and self.seen == self.nth:
            return Kill(self.when).around(call, proceed, clock)
        return proceed(call)


def point(folder: Path, nth: int, when: str) -> None:
    job, armed = Job(), threading.Event()

    def opened(address: str, events) -> Tier:
        real = open_tier(address, events)
        return replace(real, store=FaultyStore(real.store, [Fault(Dying(nth, when, armed))]))

    core.open_tier = opened
    session = ftckpt.Session(
        folder / "far",
        job.state,
        tiers=[folder / "tier"],
        start_agent=False,
        events=silent,
        chunk_bytes=CHUNK_BYTES,
        keep=None,
    )
    with session as ckpt:
        job.train()
        (folder / "digest1").write_text(job.digest())
        ckpt.save(1).wait(60, tier="local")
        job.train()
        (folder / "digest2").write_text(job.digest())
        armed.set()
        handle = ckpt.save(2)
        register_optimizer_step_pre_hook(lambda *_: (folder / "fenced").touch())
        job.train()
        handle.wait(60, tier="local")
        os._exit(0)


def points(folder: Path) -> None:
    """A child for each point, forked from this process, which has loaded torch and no more."""
    for when in ("before", "after"):
        for nth in range(1, 100):
            here = folder / f"{nth:02d}-{when}"
            here.mkdir()
            pid = os.fork()
            if pid == 0:
                point(here, nth, when)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            print(json.dumps({"folder": here.name, "code": code}), flush=True)
            if code == 0:
                break


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    if sys.argv[1] == "points":
        points(Path(sys.argv[2]))
    elif sys.argv[1] == "job":
        job(Path(sys.argv[2]))
    else:
        held(*sys.argv[1:5])
