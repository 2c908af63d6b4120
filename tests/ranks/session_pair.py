"""Two ranks of one job, of which one fails, hangs back or was told something else.

session_pair.py together FOLDER   cases that both ranks survive; prints ``ok <case>`` on each rank
session_pair.py killed FOLDER     rank 1 is killed when its pack of step 2 is there
session_pair.py all-killed FOLDER both are, before any fragment is
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist

from ftckpt.chaos.faults.store import Fail, Fault, FaultyStore, Kill
from ftckpt.errors import (
    AccessDenied,
    Diverged,
    FtckptError,
    SaveAborted,
    SaveError,
    SaveFailed,
    SettingsDiffer,
    SettingsError,
    StoreFull,
    UnsupportedValue,
)
from ftckpt.events import silent
from ftckpt.session import Session
from ftckpt.store import open_store

FOLDER = Path(sys.argv[2])
LIMIT_S = 25.0


def state(fill: float = 1.0) -> dict:
    return {"t": torch.full((64,), fill), "n": {"value": 1}}


def session(name: str, values: dict, plan: Sequence[Fault] = (), **options) -> Session:
    store = FaultyStore(open_store(FOLDER / name), plan)
    return Session(FOLDER / name, values, store=store, **{"events": silent, "deadline_s": 5} | options)


@contextmanager
def case(name: str) -> Iterator[None]:
    begun_s = time.monotonic()
    yield
    took_s = time.monotonic() - begun_s
    assert took_s < LIMIT_S, (name, took_s)
    dist.barrier()
    print("ok", name, flush=True)


def failure(kind: type[BaseException] | tuple[type[BaseException], ...], act: Callable[[], object]) -> str:
    """What ``act`` raises, printed with its notes."""
    try:
        act()
    except kind as error:
        return "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    raise AssertionError(f"{kind} was not raised")


def entering(name: str, values: dict, plan: Sequence[Fault] = (), **options) -> Callable[[], object]:
    def act() -> None:
        with session(name, values, plan, **options):
            raise AssertionError("entered")

    return act


def different_arguments(rank: int) -> None:
    """A11: refused on both ranks, naming what differs, before anything is written."""
    for argument, given in {
        "uri": ({}, {}),
        "keep": ({"keep": 1}, {"keep": 2}),
        "step": ({"step": 5}, {"step": 6}),
        "save_every": ({"save_every": 5}, {}),
        "codec": ({"codec": "raw"}, {}),
        "components": ({}, {}),
    }.items():
        with case(f"A11 {argument}"):
            values = state() | ({"more": {"n": 1}} if argument == "components" and rank else {})
            name = f"differs-{rank}" if argument == "uri" else "differs"
            text = failure(SettingsDiffer, entering(name, values, **given[rank]))
            assert f"  {argument}: rank 0 has " in text, text
            assert "rank 1 has" in text and "nothing was written" in text, text
            assert not (FOLDER / name).exists()


def different_steps(rank: int) -> None:
    """A11: one rank saves step 5, the other step 6: neither becomes readable, and both hear of it."""
    with case("A11 saved steps"), suppress(SaveError), session("steps", state(), deadline_s=1) as running:
        text = failure(SaveError, lambda: running.save(5 + rank).wait(20))
        assert f"step {5 + rank}" in text and f"g0.{1 - rank}" in text, text


def failing_to_enter(rank: int) -> None:
    """C2: the state, the begin, and the restore."""
    with case("C2 state"):
        values = state() | ({"bad": {"x": object()}} if rank else {"bad": {"x": 1}})
        text = failure(UnsupportedValue, entering("state", values))
        assert "rank 1 of 2" in text and "bad.x" in text, text
        assert not (FOLDER / "state").exists()
    with case("C2 begin"):
        plan = [Fault(Fail(error=AccessDenied("injected: no entry")), op="create")] if rank == 0 else []
        text = failure(AccessDenied, entering("begin", state(), plan))
        assert "rank 0 of 2" in text and "no entry" in text, text
    with session("read", state(3.0)) as running:
        running.save(1).wait(20)
    dist.barrier()
    for prefix in ("starts", "commits", "fragments", "packs"):
        with case(f"C2 read {prefix}"):
            fault = Fault(Fail(error=AccessDenied(f"injected: {prefix}")), op="read", prefix=prefix)
            values = state()
            text = failure(FtckptError, entering("read", values, [fault] if rank else []))
            assert "rank 1 of 2" in text and f"injected: {prefix}" in text, text
    with case("C2 entered afterwards"):
        values = state()
        with session("read", values) as running:
            assert running.restored is not None and running.restored.step == 1
            assert float(values["t"][0]) == 3.0
            running.save(2).wait(20)


def failing_to_save(rank: int) -> None:
    """C2: capture, packs, fragment and commit of one rank: both hear of it, the next save works."""
    full = Fail(error=StoreFull("injected: no space"))
    with case("C2 capture"), suppress(UnsupportedValue), session("capture", values := state()) as running:
        if rank:
            values["n"]["value"] = object()
            assert "n.value" in failure(UnsupportedValue, lambda: running.save(1))
            values["n"]["value"] = 1
        else:
            text = failure(SaveAborted, lambda: running.save(1).wait(20))
            assert "g0.1" in text and "n.value" in text, text
        running.save(2).wait(20)
    for prefix in ("packs", "fragments"):
        with case(f"C2 write {prefix}"):
            plan = [Fault(full, op="create", prefix=f"{prefix}/000001/000000000001")] if rank else []
            with session(f"write-{prefix}", state(), plan) as running:
                torch.rand(1)  # so that every rank has something new to write
                text = failure(SaveError, lambda: running.save(1).wait(20))
                assert ("SaveFailed" if rank else "SaveAborted") in text, text
                assert "no space" in text, text
                assert rank or "g0.1" in text, text
                running.save(2).wait(20)
    with case("C2 write commits"):
        plan = [] if rank else [Fault(full, op="create", prefix="commits/000000000001")]
        with session("write-commits", state(), plan) as running:
            torch.rand(1)
            handle = running.save(1)
            if rank:  # takes over, and commits the step
                assert handle.wait(20).step == 1
            else:
                assert "no space" in failure(SaveFailed, lambda: handle.wait(20))
            dist.barrier()
            running.save(2).wait(20)


def diverging(rank: int) -> None:
    """G8: replicas that hold other bytes never commit together, and the leaf is named."""
    with case("diverged"), suppress(SaveError), session("diverged", values := state()) as running:
        values["t"][7] += rank
        assert "t.value" in failure(Diverged, lambda: running.save(1).wait(20))


def own_disks(rank: int) -> None:
    """G9: one address, and under it another folder for each rank."""
    with session("shared", state()) as running:
        running.save(1).wait(20)
    dist.barrier()
    for disks in ("empty", "with an older copy of the run"):
        own = FOLDER / f"{disks} {rank}"
        if rank and disks != "empty":
            shutil.copytree(FOLDER / "shared", own)
        with case(f"G9 {disks}"):
            values = state(7.0)
            entering_own = Session("/mnt/run", values, store=open_store(own), events=silent, deadline_s=5)
            text = failure(SettingsError, entering_own.__enter__)
            assert "rank 1 does not find" in text and "Every rank needs the same store" in text, text
            assert float(values["t"][0]) == 7.0


def die(rank: int) -> None:
    plan = [Fault(Kill("after"), op="create", prefix="packs/000001/000000000002")] if rank else []
    with session("run", values := state(), plan, deadline_s=3) as running:
        values["t"] += 1
        running.save(1).wait(20)
        values["t"] += 1
        torch.rand(1)
        print(failure(SaveAborted, lambda: running.save(2).wait(20)), flush=True)
        sys.exit(0)


def main() -> None:
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if sys.argv[1] == "killed":
        die(rank)
    for part in (
        different_arguments,
        different_steps,
        failing_to_enter,
        failing_to_save,
        diverging,
        own_disks,
    ):
        part(rank)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
