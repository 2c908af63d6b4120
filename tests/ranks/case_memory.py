"""How much memory saving and restoring takes, seen from outside: run alone, prints MiB.

case_memory.py saves FOLDER STAGE   thirty saves of 64 MiB; after the third and the thirtieth
case_memory.py restore FOLDER       192 MiB in 40 tensors into live tensors; what was needed beside them
case_memory.py saving FOLDER        192 MiB streamed with time to do so; what was needed beside them
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch

import ftckpt
from ftckpt.events import silent

MIB = 1 << 20


def resident(field: str = "VmRSS") -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def model(tensors: int, mib: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Parameters of incompressible bytes that an optimizer owns, so that they are streamed."""
    held = torch.nn.Module()
    for number in range(tensors):
        body = torch.randint(-(2**31), 2**31, (mib * MIB // tensors // 4,), dtype=torch.int32)
        held.register_parameter(
            f"p{number}", torch.nn.Parameter(body.view(torch.float32), requires_grad=False)
        )
    return held, torch.optim.SGD(held.parameters(), lr=0.0)


def saves(folder: str, stage: str) -> None:
    held, optim = model(8, 64)
    options = {"stage": stage, "events": silent, "keep": 2}
    with ftckpt.Session(folder, {"model": held, "optim": optim}, **options) as session:
        for step in range(1, 31):
            for parameter in held.parameters():
                parameter.data.view(torch.int32)[::1024] += 1
            handle = session.save(step)
            session._before_change("the next step")
            handle.wait(60)
            if step in (3, 30):
                gc.collect()
                print(f"after {step}: {resident():.0f}", flush=True)


def restore(folder: str) -> None:
    held, optim = model(40, 192)
    with ftckpt.Session(folder, {"model": held, "optim": optim}, events=silent, codec="raw"):
        pass
    gc.collect()
    before = resident()
    forget_peak()
    ftckpt.restore(folder, {"model": held})
    print(f"beside: {resident('VmHWM') - before:.0f}", flush=True)


def saving(folder: str) -> None:
    held, optim = model(40, 192)
    with ftckpt.Session(folder, {"model": held, "optim": optim}, events=silent, save_every=None) as session:
        session.save(1).wait(60)
        for parameter in held.parameters():
            parameter.data.view(torch.int32).add_(1)
        gc.collect()
        before = resident()
        forget_peak()
        session.save(2).wait(60)
        print(f"beside: {resident('VmHWM') - before:.0f}", flush=True)


if __name__ == "__main__":
    {"saves": saves, "restore": restore, "saving": saving}[sys.argv[1]](*sys.argv[2:])
