"""Two ranks that save while something hangs, is slow, or goes on at the same time.

case_hangs.py together FOLDER   cases that both ranks end; prints ``ok <case>`` on each rank
case_hangs.py stopped FOLDER    rank 1 is stopped by the test in its share of step 1, and let go on later
case_hangs.py sharded FOLDER    FSDP2: a save at every step, and the same training without any
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from ftckpt.chaos.faults.store import Delay, Fault, FaultyStore, Run
from ftckpt.errors import SaveAborted
from ftckpt.events import Event, silent
from ftckpt.session import Session
from ftckpt.store import open_store

FOLDER = Path(sys.argv[2])
LIMIT_S = 60.0


def state(fill: float = 1.0) -> dict:
    return {"t": torch.full((4096,), fill), "n": {"value": 1}}


def session(name: str, values: dict, plan: Sequence[Fault] = (), **options) -> Session:
    store = FaultyStore(open_store(FOLDER / name), plan)
    return Session(FOLDER / name, values, store=store, **{"events": silent, "deadline_s": 20} | options)


@contextmanager
def case(name: str) -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    took_s = time.monotonic() - begun_s
    assert took_s < LIMIT_S, (name, took_s)
    dist.barrier()
    print("ok", name, flush=True)


def shared_group(rank: int) -> None:
    """C1: a slow save at every step while the trainer's collectives never pause."""
    with case("C1"):
        slow = [Fault(Delay(0.02), op="create")]
        with session("C1", values := state(), slow, save_every=1) as running:
            for step in running.steps(until=40):
                values["t"] += 1
                total = torch.tensor([float(step)])
                for _ in range(10):
                    dist.all_reduce(total)
                    dist.barrier()
            running._at.handle.wait(30)


def first_use(rank: int) -> None:
    """C4: two sessions and two saves at once as the very first calls, begun in another order."""
    with case("C4"):
        for number in range(5):
            time.sleep(0.05 * ((number + rank) % 3))
            with session(f"C4-{number}", values := state()) as running:
                first = running.save(1)
                values["t"] += 1
                second = running.save(2)
                for handle in (first, second) if rank else (second, first):
                    handle.wait(30)


def one_sided(rank: int) -> None:
    """C5: only rank 0 listens, waits and looks; nothing of it needs the other."""
    with case("C5"):
        told: list[Event] = []
        options = {"events": told.append} if rank == 0 else {}
        with session("C5", values := state(), **options) as running:
            for step in range(1, 4):
                values["t"] += 1
                handle = running.save(step)
                if rank == 0:
                    assert handle.wait(30).step == step
        assert rank or any(event.name == "save.committed" for event in told)


def slow_rank(rank: int) -> None:
    """C6: rank 0's store takes longer than the training group waits for anybody."""
    with case("C6"):
        quick = dist.new_group(timeout=timedelta(seconds=3), backend="gloo")
        slow = [Fault(Delay(5.0), op="create", prefix="packs/000001/000000000001")] if rank == 0 else []
        with session("C6", values := state(), slow, chunk_bytes=1 << 10) as running:
            values["t"] += 1
            handle = running.save(1)
            begun_s = time.monotonic()
            all_done = False
            while not all_done:
                assert time.monotonic() - begun_s < 40, "the save did not end"
                done = torch.tensor([float(handle.done)])
                dist.all_reduce(done, group=quick, op=dist.ReduceOp.MIN)
                all_done = bool(done)
                time.sleep(0.05)
            handle.wait(30)


def locked_threads(rank: int) -> None:
    """C8: other threads hold locks, and a loader has forked workers; no writer of ours forks."""
    with case("C8"):
        lock, stop = threading.Lock(), threading.Event()

        def hold() -> None:
            while not stop.is_set():
                with lock:
                    logging.getLogger("noise").debug("held")
                    time.sleep(0.001)

        threads = [threading.Thread(target=hold) for _ in range(4)]
        for thread in threads:
            thread.start()
        loader = DataLoader(list(range(64)), batch_size=4, num_workers=2, persistent_workers=True)
        try:
            for stage in ("lazy", "eager"):
                with session(f"C8-{stage}", values := state(), stage=stage) as running:
                    for step, batch in enumerate(loader, 1):
                        values["t"] += float(batch.sum())
                        running.save(step)
                    running._at.handle.wait(30)
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def stopped(rank: int) -> None:
    """C2: rank 1 stands still in its share of step 1; rank 0 is told in time, by name, and goes on."""
    if rank == 1:
        told = Fault(
            Run(lambda _call: (print("in the share", flush=True), time.sleep(1.0))),
            op="create",
            prefix="packs/000001/000000000001",
        )
    with session(
        "stopped", values := state(), [told] if rank else [], deadline_s=4, chunk_bytes=1 << 10
    ) as running:
        values["t"] += 1
        begun_s = time.monotonic()
        handle = running.save(1)
        try:
            handle.wait(60)
        except SaveAborted as error:
            print("told:", error.message.splitlines()[1], flush=True)
        took_s = time.monotonic() - begun_s
        if rank == 0:
            assert took_s < 15, took_s
            print("went on", flush=True)
        dist.barrier()  # rank 1 was let go on
        values["t"] += 1
        assert running.save(2).wait(30).step == 2
        print("next is good", flush=True)


def train(folder: str | None, steps: int) -> list[float]:
    """Losses of a sharded toy; with ``folder``, a save at every step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def one(step: int) -> float:
        torch.manual_seed(step)
        loss = model(torch.randn(8, 16)).square().mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
        return float(loss)

    if folder is None:
        return [one(step) for step in range(1, steps + 1)]
    values = {"model": model, "optim": optim}
    with session(folder, values, [Fault(Delay(0.01), op="create")], save_every=1) as running:
        return [one(step) for step in running.steps(until=steps)]


def sharded(rank: int) -> None:
    """B5: state is captured at safe points only, on the trainer's thread."""
    with case("B5"):
        straight = train(None, 60)
        dist.barrier()
        saved = train("B5", 60)
        assert saved == straight, [(a, b) for a, b in zip(saved, straight, strict=True) if a != b][:3]


def main() -> None:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    parts = {
        "together": (shared_group, first_use, one_sided, slow_rank, locked_threads),
        "stopped": (stopped,),
        "sharded": (sharded,),
    }
    for part in parts[sys.argv[1]]:
        part(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
