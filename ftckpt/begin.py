"""Beginning an attempt: claim, look, choose the commit to go on from, pin it, start.

Used by whoever (re)starts a job: the supervisor, ``ftckpt resume``, or a session that nobody
supervises. Deciding which commit is good enough to go on from happens here, once, so that every
group restores the same.
"""

from __future__ import annotations

import os
import platform
import shlex
import socket
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from ftckpt.attempts import (
    Look,
    choose,
    claim,
    explain_damage,
    find_run,
    look,
    older_good,
    open_run,
    pin,
    read_pins,
    read_start,
    start,
    unpin,
)
from ftckpt.commit import abort
from ftckpt.errors import CorruptError, NoCommit, ObjectDamaged, ObjectNotFound, RunNotFound, StepNotFound
from ftckpt.events import Event, Events, silent
from ftckpt.layout import ATTEMPTS, RUN, start_key
from ftckpt.manifest import Claim, Commit, Position, Ref, Start
from ftckpt.reader import check_commit, verify_commit
from ftckpt.store.api import ObjectStore
from ftckpt.store.probe import probe

OnEmpty = Literal["start", "error"]
_CHOICES = 8


@dataclass(frozen=True, slots=True)
class Begun:
    """An attempt that is ours. ``skipped`` says which commits were passed over, and why."""

    claim: Claim
    start: Start
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Caller:
    """Who begins: recorded in the claim, so that ``ftckpt resume`` can do it again."""

    command: tuple[str, ...]
    cwd: str
    host: str
    pid: int
    groups: int = 1
    nproc: int = 1
    settings: Mapping[str, str] | None = None


def this_process(groups: int = 1, nproc: int = 1) -> Caller:
    """The command that this process was started with."""
    return Caller(tuple(sys.orig_argv), str(Path.cwd()), socket.gethostname(), os.getpid(), groups, nproc)


def begin(
    store: ObjectStore,
    caller: Caller,
    *,
    name: str,
    step: int | None = None,
    on_empty: OnEmpty = "error",
    fallback: bool = False,
    nonce: Callable[[], str] = lambda: uuid.uuid4().hex,
    events: Events = silent,
    log_end: int | None = None,
) -> Begun:
    """Begin the next attempt of a run, from its newest good commit or from that of ``step``.

    Checks that the chosen commit's objects exist at their sizes; with ``fallback`` it reads all of
    its bytes, and passes over commits that cannot be read. On return the start exists: every group
    of this attempt restores what it names.

    Raises:
        RunNotFound, NoCommit: nothing to go on from, and ``on_empty`` is ``"error"``.
        StepNotFound: ``step`` is not readable.
        CorruptError: the chosen commit is damaged, and ``fallback`` is off.
        AttemptTaken: somebody else begins this run at the same moment.
    """
    try:
        find_run(store)
    except RunNotFound:
        if on_empty == "error":
            raise
        _check_new(store)
        events(Event("run.new", {"uri": store.uri}))
    else:
        before = look(store)
        _check_starts(store, before)
        if not before.lineage:
            _nothing(before, store.uri, step, on_empty, events)
        else:
            choose_good(store, before, step, fallback)
    if store.conditional_create:  # else whoever opened it answered for there being one writer
        probe(store)
    open_run(store, name)
    mine = claim(
        store,
        nonce=nonce(),
        host=caller.host,
        pid=caller.pid,
        command=caller.command,
        cwd=caller.cwd,
        groups=caller.groups,
        nproc=caller.nproc,
        settings=caller.settings,
    )
    parent, skipped = _pinned_parent(store, mine, step, on_empty, fallback)
    begun = start(store, mine, parent, log_end=log_end, versions=versions())
    release_older_pins(store, mine.attempt)
    events(
        Event(
            "attempt.begun",
            {
                "attempt": mine.attempt,
                "parent_step": parent.step if parent else None,
                "skipped": list(skipped),
            },
        )
    )
    return Begun(mine, begun, skipped)


def _check_new(store: ObjectStore) -> None:
    """Where there is no run, there are no attempts of one either: a copy may have stopped half way."""
    key = next((info.key for info in store.scan(ATTEMPTS)), None)
    if key is not None:
        raise ObjectDamaged(
            f"ObjectDamaged: {store.uri} holds {key}, but no {RUN}: a copy or a fork to it has not ended\n"
            "  nothing was changed; run `ftckpt copy` or `ftckpt fork` again, or give another address",
            key=RUN,
        )


def _check_starts(store: ObjectStore, seen: Look) -> None:
    """Every attempt that committed has begun: without its start its commits would count for nothing."""
    for attempt in sorted({at.attempt for at in seen.view.readable} - set(seen.view.starts)):
        try:
            read_start(store, attempt)
        except ObjectNotFound as error:
            key = start_key(attempt)
            raise ObjectDamaged(
                f"ObjectDamaged: {key} is absent, but attempt {attempt} of {store.uri} has commits\n"
                "  they are on no lineage without it; nothing was changed",
                key=key,
            ) from error


def _nothing(seen: Look, uri: str, step: int | None, on_empty: OnEmpty, events: Events) -> None:
    """A run without a commit may begin anew, if the caller allowed it and nothing was asked for."""
    if step is not None:
        raise StepNotFound(
            f"StepNotFound: step {step} of {uri} has no readable commit; the run has none at all\n"
            "  nothing was changed",
            uri=uri,
            step=step,
        )
    if on_empty == "error":
        raise NoCommit(
            f"NoCommit: the run at {uri} has no readable commit\n"
            f"  attempts claimed: {len(seen.view.claims)}; nothing was changed\n"
            "  start it again with `ftckpt run` to train from the beginning",
            uri=uri,
        )
    events(Event("run.anew", {"uri": uri, "why": "the run has no commit"}))


def choose_good(
    store: ObjectStore, seen: Look, step: int | None, fallback: bool
) -> tuple[Ref, tuple[str, ...]]:
    """The commit to go on from and what was passed over. Without ``fallback``, damage is an error."""
    skipped: list[str] = []
    wanted = step
    while True:
        ref = choose(seen, store.uri, wanted) if not fallback else _next_record(seen, store.uri, wanted)
        try:
            check(store, seen.commits[ref.at], thorough=fallback)
        except CorruptError as error:
            older = older_good(seen, ref.at)
            if not fallback or older is None:
                raise explain_damage(seen, ref.at, error) from error
            skipped.append(f"step {ref.step}: {error.message.splitlines()[0]}")
            wanted = older.step
        else:
            damaged = [f"step {at.step}: {e.message.splitlines()[0]}" for at, e in seen.damaged.items()]
            newer = [line for at, line in zip(seen.damaged, damaged, strict=True) if at > ref.at]
            return ref, tuple(skipped + newer)


def _next_record(seen: Look, uri: str, step: int | None) -> Ref:
    """Like ``choose``, passing over records that do not read."""
    good = [at for at in seen.lineage if at not in seen.damaged]
    if step is None and good:
        return seen.refs[good[0]]
    return choose(seen, uri, step)


def check(store: ObjectStore, commit: Commit, *, thorough: bool) -> None:
    """Everything the commit needs is there; ``thorough``: and every chunk reads well. Raises the
    first thing that is wrong.
    """
    check_commit(store, commit)
    for problem in verify_commit(store, commit) if thorough else ():
        raise problem


def _pinned_parent(
    store: ObjectStore, mine: Claim, step: int | None, on_empty: OnEmpty, fallback: bool
) -> tuple[Ref | None, tuple[str, ...]]:
    """Look again now that the claim exists, choose, and pin the choice (and a tip left behind)."""
    holder = f"attempt {mine.attempt} on {mine.host}"
    for choice in range(_CHOICES):
        seen = look(store)
        if not seen.lineage:
            _nothing(seen, store.uri, step, on_empty, silent)
            return None, ()
        ref, skipped = choose_good(store, seen, step, fallback)
        tip = seen.lineage[0]
        if tip != ref.at:
            pin(store, f"tip-{mine.attempt:06d}-{choice}", tip, "tip", holder, by_attempt=mine.attempt)
        name = f"start-{mine.attempt:06d}-{choice}"  # a pin that was let go of may yet come back
        if pin(store, name, ref.at, "start", holder, by_attempt=mine.attempt):
            return ref, skipped
        if step is not None:
            break
    raise StepNotFound(
        f"StepNotFound: step {ref.step} of {store.uri} is being collected at this moment\n"
        "  nothing was changed; choose another step, or let the collection end and try again: "
        "`ftckpt gc` finishes one that died",
        uri=store.uri,
        step=ref.step,
    )


def release_older_pins(store: ObjectStore, attempt: int) -> None:
    """Starts and agents of older attempts hold nothing any more once a newer one began.

    A slow agent may still be at work: its step is settled before its pin goes, so that it cannot
    commit what nothing protects.
    """
    for found in read_pins(store):
        if found.kind in ("start", "agent") and found.by_attempt < attempt:
            if found.kind == "agent":
                abort(store, Position(found.by_step, found.by_attempt), f"attempt {attempt} goes on")
            unpin(store, found.pin)


def versions() -> dict[str, str]:
    """What this process runs with, for the record."""
    found = {"python": platform.python_version()}
    for package in ("ftckpt", "torch", "torchft", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def recorded(command: Sequence[str]) -> str:
    """A command as a person would type it."""
    return shlex.join(command)
