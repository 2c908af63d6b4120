"""The save engine: one background thread that turns snapshots into commits, one after the other.

``submit`` returns at once. The thread encodes chunks, fills packs, puts them, puts the fragment,
settles the step, and looks whether this attempt still owns the run; only then is a save
acknowledged. Two saves never overlap: the next begins when the last is settled. A failed save never
stops training and is never silent.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from types import TracebackType
from typing import Literal, Protocol, Self

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from ftckpt import codec, layout
from ftckpt.attempts import check_fence, look, read_start
from ftckpt.births import let_go
from ftckpt.bounds import DAY_S, SHORTEST_S, require_number
from ftckpt.clock import Clock, SystemClock
from ftckpt.codec import Bases, Candidate, Codec, Rates, always
from ftckpt.colocation import Gate
from ftckpt.commit import Expected, Patience, abort, check_settled, failure, put_fragment, read_commit, settle
from ftckpt.errors import (
    AlreadyExists,
    Diverged,
    Fenced,
    FtckptError,
    ObjectNotFound,
    PacksGone,
    SaveFailed,
    StoreError,
    StoreGone,
    first_line,
    in_another_process,
)
from ftckpt.events import Event, Events, silent
from ftckpt.freshness import Stale, find_stale
from ftckpt.layout import Writer
from ftckpt.leaf import Holding
from ftckpt.lineage import on_lineage
from ftckpt.manifest import (
    FORMAT,
    BoxRecord,
    ChunkRecord,
    Commit,
    Fragment,
    Guarantee,
    LeafRecord,
    PackRef,
    Position,
    Ref,
    digest_of,
    encode,
    let_go_of,
)
from ftckpt.meter import STAGES, Meter, Stage
from ftckpt.plan.assign import ChunkTask
from ftckpt.plan.restore import Link, Saved, index_chunks
from ftckpt.reader import read_fragments
from ftckpt.snapshot import Seen, Snapshot
from ftckpt.store import PulseStore
from ftckpt.store.api import Buffer, ObjectStore
from ftckpt.workers import Workers


@dataclass(frozen=True, slots=True)
class WriteSettings:
    """Bounds of a save. Packs are ``pack_bytes`` each, more for large shares, at most
    ``max_pack_bytes``; memory beyond the snapshot is about ``packs_in_flight`` + 2 packs, and the
    codec's budget for bases. While ``backlog`` saves are under way the next one is waited for, but
    not on a store that was silent for ``stall_s``. Packs of earlier steps that a save refers to are looked
    for in the store, if nobody has for ``look_again_s``.
    """

    codec: Codec = Codec()
    pack_bytes: int = 32 << 20
    max_pack_bytes: int = 128 << 20
    packs_in_flight: int = 3
    encode_threads: int = 2
    patience: Patience = Patience()
    backlog: int = 2
    stall_s: float = 15.0
    look_again_s: float = 600.0

    def __post_init__(self) -> None:
        for name in ("pack_bytes", "max_pack_bytes"):
            require_number(name, getattr(self, name), low=1, high=1 << 40, whole=True)
        for name in ("packs_in_flight", "encode_threads", "backlog"):
            require_number(name, getattr(self, name), low=1, high=1024, whole=True)
        for name in ("stall_s", "look_again_s"):
            require_number(name, getattr(self, name), low=SHORTEST_S, high=DAY_S)


def fitted(settings: WriteSettings, cores: int) -> WriteSettings:
    """The settings for a process that may use so many cores.

    On few, one thread encodes and packs are half as large and never grow: a save leaves a core to the
    trainer and takes 80 MiB beside its bases. With more it takes up to half of them, and at most eight.
    """
    if cores < 4:
        half = max(1, settings.pack_bytes // 2)
        return replace(settings, encode_threads=1, packs_in_flight=3, pack_bytes=half, max_pack_bytes=half)
    return replace(settings, encode_threads=min(8, cores // 2), packs_in_flight=max(3, min(16, cores // 2)))


@dataclass(frozen=True, slots=True)
class SaveJob:
    """All that one save needs, taken on the trainer's thread. The parent is filled in by the
    engine, when the save before it is settled.
    """

    expected: Expected
    snapshot: Snapshot | None
    guarantee: Guarantee = "E4"
    why: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    trouble: str = ""
    meter: Meter = field(default_factory=Meter)
    gate: Gate = field(default_factory=Gate)
    """Passed before every chunk and every PUT."""
    updates: Mapping[str, int] = field(default_factory=dict)
    """By component: how often an optimizer updated it, since the session was entered."""


@dataclass(frozen=True, slots=True)
class Learned:
    """What one save leaves to the next: bases of deltas, how fast things were, the digests of the packs
    that the parent commit names, those of frozen chunks with the memory that was hashed, and which packs
    are known to be there.
    """

    bases: Bases
    rates: Rates
    packs: dict[str, bytes] = field(default_factory=dict)
    frozen: dict[Key, tuple[Seen, bytes]] = field(default_factory=dict)
    seen_s: dict[str, float] = field(default_factory=dict)
    """When a pack was last known to be in the store."""


Where = Literal["far", "local"]
"""Who acknowledges a save: the far store, which is the run; or the nearest tier, where there is one."""

Durable = Callable[[Commit, float | None], Commit]
"""Waits, for at most so many seconds, until the far store has a commit of the tier."""


def at_once(commit: Commit, _timeout_s: float | None) -> Commit:
    """There is no tier: what is committed is in the far store."""
    return commit


class Journal(Protocol):
    """What saves leave in a tier for whoever finishes them when this process is gone."""

    def begin(self, job: SaveJob, expected: Expected) -> None:
        """A save begins: called before its first pack."""
        ...

    def holds(self, parent: Ref) -> bool:
        """Whether chunks of that commit may be reused: a tier may never have had it, or have lost it."""
        ...

    def staged(self, at: Position) -> Collection[str]:
        """Incarnations whose shares of that step come even if they are dead, because they are staged."""
        ...


class NoJournal:
    """Nobody finishes what this process does not."""

    def begin(self, job: SaveJob, expected: Expected) -> None:
        pass

    def holds(self, parent: Ref) -> bool:
        return True

    def staged(self, at: Position) -> Collection[str]:
        return ()


NOWHERE = NoJournal()


class SaveHandle:
    """One save on its way. ``wait`` returns the commit or raises what became of it."""

    def __init__(
        self, step: int, durable: Durable = at_once, look: Callable[[], None] = lambda: None
    ) -> None:
        """``look``: see whether the store has been silent for too long; called while somebody waits."""
        self.step = step
        self.heard = False
        """Whether ``wait`` already told of its failure."""
        self.stale: tuple[Stale, ...] = ()
        """Once it is done: components that were trained and yet are those of the commit before."""
        self._future: Future[Commit] = Future()
        self._durable = durable
        self._look = look
        self._pid = os.getpid()

    @property
    def done(self) -> bool:
        """Whether it ended, well or not."""
        return self._future.done()

    @property
    def error(self) -> BaseException | None:
        """What it failed with, once it is done."""
        return self._future.exception() if self._future.done() else None

    def wait(self, timeout_s: float | None = None, tier: Where = "far") -> Commit:
        """Block until the step is readable and acknowledged, by the far store or by the nearest tier.

        What only the tier has acknowledged survives the trainer, not the machine. Without tiers, and
        where several machines write into tiers of their own, both mean the far store.

        Raises:
            SaveError: the step did not become readable, and why.
            Fenced: a newer attempt owns the run.
            TimeoutError: it has not ended in ``timeout_s``; it goes on.
            NotEntered: this is a fork of the process that saves.
        """
        if os.getpid() != self._pid:
            raise in_another_process(f"the save of step {self.step} was begun", self._pid, os.getpid())
        begun_s = time.monotonic()
        commit = self._wait_here(timeout_s)
        if tier == "local":
            return commit
        left_s = None if timeout_s is None else max(0.0, timeout_s - (time.monotonic() - begun_s))
        return self._durable(commit, left_s)

    def _wait_here(self, timeout_s: float | None) -> Commit:
        end_s = time.monotonic() + (float("inf") if timeout_s is None else timeout_s)
        while not wait([self._future], max(0.0, min(LOOK_EVERY_S, end_s - time.monotonic()))).done:
            if time.monotonic() >= end_s:
                raise TimeoutError(
                    f"the save of step {self.step} has not ended after {timeout_s} s; it goes on in the background"
                )
            self._look()
        self.heard = self._future.exception() is not None
        return self._future.result()


@dataclass(frozen=True, slots=True)
class Failure:
    """A save that did not become readable: where it failed, and with what."""

    step: int
    stage: Stage
    error: BaseException


@dataclass(slots=True)
class Outcome:
    """What the engine knows at a boundary. ``failed_in_row`` counts saves since the last good one."""

    last: Commit | None = None
    failed_in_row: int = 0
    failures: list[Failure] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    """Of saves that became readable: how long after they were asked for."""
    stale: list[Stale] = field(default_factory=list)
    fenced: Fenced | None = None


LOOK_EVERY_S = 1.0

_SMALL_BYTES = 64 << 10
"""Up to here a copy takes less time than giving up the interpreter for it."""

_BATCH_BYTES, _BATCH_CHUNKS = 256 << 10, 256
"""What an encode thread is given at a time: chunks until there are as many bytes, or as many chunks."""


class SaveEngine:
    """Owns the background thread. ``submit`` from one thread; ``outcome`` from any."""

    def __init__(
        self,
        store: ObjectStore,
        me: Writer,
        *,
        parent: Ref | None,
        settings: WriteSettings = WriteSettings(),
        clock: Clock | None = None,
        events: Events = silent,
        on_commit: Callable[[Commit], None] = lambda _commit: None,
        ledger: ObjectStore | None = None,
        journal: Journal = NOWHERE,
        durable: Durable = at_once,
    ) -> None:
        """``ledger`` is where steps are settled, if that is not where shares are written."""
        self._journal = journal
        self._durable = durable
        self._me = me
        self._parent = parent
        self._settings = settings
        self._clock = clock or SystemClock()
        deadline_s = settings.patience.deadline_s
        self._store = PulseStore(store, deadline_s=deadline_s, clock=self._clock)
        self._ledger = self._store
        if ledger is not None and ledger is not store:
            self._ledger = PulseStore(ledger, deadline_s=deadline_s, clock=self._clock)
        self._events = events
        self._on_commit = on_commit
        self._learned = Learned(
            Bases(settings.codec.base_budget_bytes if settings.codec.deltas else 0),
            Rates(settings.encode_threads),
        )
        self._index: dict[str, tuple[Saved, ...]] | None = None
        self._own: tuple[Ref, Fragment] | None = None
        self._updates: dict[str, int] = {}
        self._unsettled: Position | None = None
        self._diverged: Diverged | None = None
        self._await: Position | None = None
        self._gone: frozenset[str] = frozenset()
        self._jobs: deque[tuple[SaveJob, SaveHandle]] = deque()
        self._closing = False
        self._changed = threading.Condition()
        self._outcome = Outcome()
        self._thread: threading.Thread | None = None
        self._current: tuple[SaveJob, SaveHandle] | None = None
        self._suspected_s: float | None = None

    def start(self) -> None:
        """Begin working. The thread is no daemon: the process does not end with a save under way
        unless it is killed.
        """
        self._thread = threading.Thread(target=self._live, name="ftckpt-save", daemon=False)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Saves submitted and not ended."""
        return len(self._jobs)

    def submit(self, job: SaveJob, *, last: bool = False) -> SaveHandle:
        """Hand over a save; returns at once while fewer than ``backlog`` are under way.

        Otherwise the store is slower than the saves come: waits until one has ended, but no longer than
        the deadline, and not on a store that has gone silent: training goes on without it. The new save
        is then given up for all participants; its handle has failed on return. ``last``: no training
        follows that could go on meanwhile, so a silent store is waited for, up to the deadline.
        """
        handle = SaveHandle(job.expected.at.step, self._durable, self._tell_of_silence)
        limit, deadline_s = self._settings.backlog, self._settings.patience.deadline_s
        with self._changed:
            if len(self._jobs) >= limit:
                self._events(Event("save.waiting", {"step": handle.step, "under_way": len(self._jobs)}))
            end_s = time.monotonic() + deadline_s
            patience_s = deadline_s if last else min(deadline_s, self._settings.stall_s)
            while len(self._jobs) >= limit and time.monotonic() < end_s and self._silent_s <= patience_s:
                self._changed.wait(min(deadline_s, LOOK_EVERY_S))
            given_up = len(self._jobs) >= limit
            if given_up:
                job = self._given_up(job)
            self._jobs.append((job, handle))
            self._changed.notify_all()
        if given_up:
            self._failed(job, handle, _failed(job.expected.at, SaveFailed(job.trouble)), ended=False)
        return handle

    def _tell_of_silence(self) -> None:
        """A store that answered nothing for as long as a save may take has failed those that are that old,
        though a call may hang and this engine's thread with it. When it comes back they are given up for all.

        Told at the second look: where this whole process stood still, the first finds the same.
        """
        silent_s, deadline_s, now_s = self._hanging_s, self._settings.patience.deadline_s, time.monotonic()
        if silent_s <= deadline_s:
            self._suspected_s = None
            return
        if self._suspected_s is None:
            self._suspected_s = now_s
        if now_s - self._suspected_s < LOOK_EVERY_S:
            return
        for job, handle in self._under_way():
            if not handle.done and job.meter.age_s > deadline_s:
                gone = StoreGone(
                    f"the store has not answered for {silent_s:.1f} s (deadline {deadline_s:g} s)\n"
                    "  a call to it may hang; it is taken up again when that returns",
                    uri=self._ledger.uri,
                    silent_s=silent_s,
                )
                self._store.give_up()
                self._ledger.give_up()
                self._failed(job, handle, _failed(job.expected.at, gone), ended=False)

    def _under_way(self) -> tuple[tuple[SaveJob, SaveHandle], ...]:
        with self._changed:
            return tuple(self._jobs)

    def _given_up(self, job: SaveJob) -> SaveJob:
        stalled = self._silent_s > self._settings.stall_s
        silent = f"; the store has been silent for {self._silent_s:.0f} s" if stalled else ""
        trouble = f"{len(self._jobs)} earlier saves have not ended{silent}"
        self._events(Event("save.stalled", {"step": job.expected.at.step, "why": trouble}))
        job.meter.fail("queued")
        if job.snapshot is not None:
            job.snapshot.close()
        return replace(job, snapshot=None, trouble=trouble)

    @property
    def stalled(self) -> bool:
        """Whether a save that begins now would be given up, because the store is silent."""
        return len(self._jobs) >= self._settings.backlog and self._silent_s > self._settings.stall_s

    @property
    def _silent_s(self) -> float:
        return max(self._store.silent_s, self._ledger.silent_s)

    @property
    def _hanging_s(self) -> float:
        return max(self._store.hanging_s, self._ledger.hanging_s)

    def lose(self, incarnations: frozenset[str]) -> None:
        """These writers are dead: shares of theirs that are missing will not come."""
        self._gone |= incarnations

    def healed(self, last_save: Position | None) -> None:
        """State came from peers: the parent of the next save is what the store says once
        ``last_save``, the peers' last, is settled.
        """
        self._await = last_save
        self._diverged = None
        self._parent = None
        self._index = None

    def outcome(self) -> Outcome:
        """What became of the saves since the last call; failures and times are handed out once."""
        self._tell_of_silence()
        with self._changed:
            now = replace(self._outcome)
            self._outcome.failures, self._outcome.durable_s, self._outcome.stale = [], [], []
        return now

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was submitted and end the thread.

        Raises:
            TimeoutError: it is still writing after ``timeout_s``.
        """
        if self._thread is None:
            return
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        deadline_s = self._settings.patience.deadline_s
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while (thread := self._thread) is not None:  # a thread that died is followed by another
            left_s = LOOK_EVERY_S if end_s is None else end_s - time.monotonic()
            thread.join(max(0.0, min(LOOK_EVERY_S, left_s)))
            self._tell_of_silence()
            jobs = self._under_way()
            hangs = bool(jobs) and self._hanging_s > deadline_s and all(handle.done for _, handle in jobs)
            if thread.is_alive() and (left_s <= 0 or hangs):
                raise TimeoutError(f"a save is still being written after {timeout_s} s")

    def _live(self) -> None:
        """The thread. If it dies, of whatever, the save it was at fails and another thread goes on."""
        try:
            self._run()
        except BaseException as error:
            item, self._current = self._current, None
            if item is not None:
                self._failed(*item, error)
            self.start()
            self._events(Event("save.thread_died", {"error": first_line(error)[:500]}))
        else:
            self._thread = None

    def _run(self) -> None:
        while (item := self._next()) is not None:
            self._current = job, handle = item
            try:
                if handle.error is not None and job.snapshot is not None:  # it was told to have failed
                    job.snapshot.close()
                    job = replace(job, snapshot=None, trouble=first_line(handle.error))
                try:
                    commit, handle.stale = self._save(job)
                finally:
                    if job.snapshot is not None:
                        job.snapshot.close()
            except BaseException as error:
                self._failed(job, handle, error)
            else:
                self._ended(handle, commit, job.meter.age_s)
            self._current = None

    def _next(self) -> tuple[SaveJob, SaveHandle] | None:
        """The oldest save that has not ended, once there is one; ``None``: no more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closing)
            return self._jobs[0] if self._jobs else None

    def _failed(self, job: SaveJob, handle: SaveHandle, error: BaseException, *, ended: bool = True) -> None:
        failure = Failure(handle.step, job.meter.failed_in or "settle", error)
        if self._ended(handle, failure, ended=ended):
            told = {"step": handle.step, "stage": failure.stage, "total_s": job.meter.age_s}
            self._events(Event("save.failed", {**told, "error": first_line(error)[:500]}))

    def _ended(
        self, handle: SaveHandle, became: Commit | Failure, age_s: float = 0.0, *, ended: bool = True
    ) -> bool:
        """Tell everybody once what became of a save; false when they were told before. ``ended``: it is no
        longer under way either.
        """
        with self._changed:
            if ended and self._jobs and self._jobs[0][1] is handle:
                self._jobs.popleft()
                self._changed.notify_all()
            if handle.done:
                if not isinstance(became, Failure):  # told to have failed, and there it is
                    self._outcome.last = became
                return False
            if isinstance(became, Failure):
                fenced = became.error if isinstance(became.error, Fenced) else None
                self._outcome.failed_in_row += 0 if fenced else 1
                self._outcome.failures.append(became)
                self._outcome.fenced = fenced or self._outcome.fenced
                handle._future.set_exception(became.error)  # noqa: SLF001 - the two are one thing
            else:
                self._outcome.last = became
                self._outcome.durable_s.append(age_s)
                self._outcome.stale.extend(handle.stale)
                self._outcome.failed_in_row = 0
                handle._future.set_result(became)  # noqa: SLF001
            return True

    def _save(self, job: SaveJob) -> tuple[Commit, tuple[Stale, ...]]:
        meter = job.meter
        self._store.begin()
        self._ledger.begin()
        meter.add("queued", meter.age_s - meter.seconds("capture"))
        with meter.spent("prepare"):
            self._prepare(job)
        if self._diverged is not None:
            meter.fail("settle")
            job = replace(job, snapshot=None, trouble=first_line(self._diverged))
        expected = replace(job.expected, parent=self._parent)
        begun_s = self._clock.now_s()
        self._unsettled = expected.at
        fragment, cause = self._write(job, expected)
        try:
            with meter.spent("settle"):
                record, ref = self._settle(expected, fragment, cause)
        except Diverged as error:
            self._diverged = error
            raise
        self._unsettled = None
        if not record.aborted:
            self._parent = ref
            index, self._index = self._index, None
            let_go(index or {})
            whole = fragment is not None and _all_of(record, fragment)
            self._own = (ref, fragment) if fragment is not None and whole else None
        if cause is not None and not _names(record, self._me):
            raise _failed(expected.at, cause) from cause
        with meter.spent("settle"):
            check_fence(self._ledger, expected.at.attempt)
            check_settled(record)
        own = list(record.components.values())
        self._events(
            Event(
                "save.committed",
                {
                    "step": record.step,
                    "attempt": record.attempt,
                    "seconds": round(self._clock.now_s() - begun_s, 3),
                    "raw_bytes": sum(c.raw_bytes for c in own),
                    "stored_bytes": sum(c.stored_bytes for c in own),
                    "reused_bytes": sum(c.reused_bytes for c in own),
                    "fragments": len(record.fragments),
                    "total_s": meter.age_s,
                    **{f"{stage}_s": meter.seconds(stage) for stage in STAGES},
                },
            )
        )
        stale = self._judge(job, fragment, record)
        written = [] if fragment is None else [fragment]
        del fragment
        let_go_of(written)
        self._on_commit(record)
        return record, stale

    def _judge(self, job: SaveJob, fragment: Fragment | None, record: Commit) -> tuple[Stale, ...]:
        """Which trained components are bit for bit those of the commit before; told at once."""
        found: tuple[Stale, ...] = ()
        if fragment is not None and job.snapshot is not None:
            since = {name: count - self._updates.get(name, 0) for name, count in job.updates.items()}
            found = find_stale(fragment, record, job.snapshot.holdings, since)
        self._updates = dict(job.updates)
        for one in found:
            told = {"step": one.step, "component": one.component, "since_step": one.since_step}
            self._events(Event("save.stale", {**told, "updates": one.updates, "why": one.why}))
        return found

    def _write(self, job: SaveJob, expected: Expected) -> tuple[Fragment | None, BaseException | None]:
        """Put packs and fragment; when that fails, a failure fragment so that nobody waits for it.
        ``None``: not even that could be put.
        """
        try:
            if job.snapshot is None:
                raise SaveFailed(f"SaveFailed: {job.trouble}")
            with job.meter.spent("prepare"):
                self._journal.begin(job, expected)
                reusable = self._reusable()
            alone = self._ledger is self._store  # else packs of others are in tiers of theirs
            fragment = write_share(
                self._store,
                job,
                expected,
                self._me,
                self._settings,
                reusable,
                self._learned,
                self._events,
                look=alone,
            )
            with job.meter.spent("put"):
                put_fragment(self._store, fragment, self._me)
            return fragment, None
        except Exception as error:
            if isinstance(error, PacksGone):
                self._index, self._own = {}, None
            fragment = failure(expected, self._me, first_line(error))
            try:
                put_fragment(self._store, fragment, self._me)
            except FtckptError as second:
                error.add_note(f"and the failure could not be told to the others: {second}")
                return None, error
            return fragment, error

    def _settle(
        self, expected: Expected, fragment: Fragment | None, cause: BaseException | None
    ) -> tuple[Commit, Ref]:
        """What became of the step. A writer that could not even put its failure gives it up at once."""
        try:
            if fragment is None:
                assert cause is not None
                return abort(self._ledger, expected.at, f"{self._me}: {first_line(cause)}")
            return settle(
                self._ledger,
                self._clock,
                expected,
                self._me,
                fragment,
                self._settings.patience,
                lambda: self._gone and self._gone.difference(self._journal.staged(expected.at)),
            )
        except StoreError as error:
            raise _failed(expected.at, cause or error) from (cause or error)

    def _prepare(self, job: SaveJob) -> None:
        """Know the parent. A writer that cannot tells the others, so that nobody waits for its share."""
        at = job.expected.at
        try:
            self._settle_earlier()
            mine = self._parent is not None and self._parent.attempt == at.attempt
            if self._parent is not None and mine and not self._journal.holds(self._parent):
                self._events(Event("save.parent_lost", {"step": self._parent.step}))
                self._parent = self._index = None
            if self._await is not None or (self._parent is None and self._index is None):
                self._find_parent(at.attempt, at)
        except StoreError as error:
            with suppress(FtckptError):
                put_fragment(self._store, failure(job.expected, self._me, first_line(error)), self._me)
            raise _failed(at, error) from error

    def _settle_earlier(self) -> None:
        """A save that ended in doubt is settled before the next is planned."""
        if self._unsettled is not None:
            doubtful = self._unsettled
            if read_commit(self._ledger, doubtful) is None:
                abort(self._ledger, doubtful, "its writer could not learn what became of it")
            self._find_parent(doubtful.attempt)
            self._unsettled = None

    def _find_parent(self, attempt: int, before: Position | None = None) -> None:
        """Learn the newest commit of this attempt's own lineage from the store."""
        if self._await is not None:
            end_s = self._clock.now_s() + self._settings.patience.deadline_s
            while layout.commit_key(self._await) not in {i.key for i in self._ledger.scan(layout.COMMITS)}:
                if self._clock.now_s() > end_s:
                    raise SaveFailed(f"SaveFailed: {self._await}, saved by peers, is not settled")
                self._clock.sleep(self._settings.patience.max_poll_s)
            self._await = None
        seen = look(self._ledger)
        lineage = on_lineage(seen.view, newest=attempt)
        own = (o for o in lineage if o.attempt == attempt and (before is None or o < before))
        at = next(own, None)
        if at is not None and at in seen.damaged:
            raise seen.damaged[at]
        self._parent = seen.refs[at] if at is not None else read_start(self._ledger, attempt).parent
        self._index = {} if self._parent is None else None

    def _reusable(self) -> Mapping[str, Sequence[Saved]]:
        """Chunks of the settled parent commit, by leaf."""
        if self._index is None:
            index: dict[str, tuple[Saved, ...]] = {}
            if self._parent is not None and self._journal.holds(self._parent):
                fragments = list(self._fragments_of(self._parent))
                self._own = None  # the index has what is needed of it
                index = index_chunks(fragments)
                self._learned.packs.clear()
                self._learned.packs.update((pack.key, pack.digest) for f in fragments for pack in f.packs)
                let_go_of(fragments)
            self._index = index
        return self._index

    def _fragments_of(self, parent: Ref) -> Sequence[Fragment]:
        """Of a commit that is all this writer's own, from memory; of others, from the store."""
        if self._own is not None and self._own[0] == parent:
            return (self._own[1],)
        return read_fragments(self._ledger, look_commit(self._ledger, parent))


def _failed(at: Position, cause: BaseException) -> SaveFailed:
    return SaveFailed(
        f"SaveFailed: {at} was not saved: {cause}\n"
        "  earlier commits are intact; training may go on and the next save may succeed",
        step=at.step,
    )


def _all_of(record: Commit, fragment: Fragment) -> bool:
    """Whether a commit consists of this very fragment, so that nothing need be read to know it."""
    return len(record.fragments) == 1 and record.fragments[0].digest == digest_of(encode(fragment))


def _names(record: Commit, writer: Writer) -> bool:
    """Whether the writer's fragment is part of the commit: its create got through after all."""
    return any(ref.key == layout.fragment_key(record.at, writer) for ref in record.fragments)


def look_commit(store: ObjectStore, ref: Ref) -> Commit:
    """The commit behind a ref, proven by its digest."""
    found = read_commit(store, ref.at)
    if found is None or found[1] != ref:
        raise SaveFailed(
            f"SaveFailed: the commit of {ref.at} is not the one this save builds on\n"
            "  nothing was written; earlier commits are intact",
            step=ref.step,
        )
    return found[0]


def write_share(
    store: ObjectStore,
    job: SaveJob,
    expected: Expected,
    me: Writer,
    settings: WriteSettings,
    reusable: Mapping[str, Sequence[Saved]],
    learned: Learned | None = None,
    events: Events = silent,
    *,
    look: bool = False,
) -> Fragment:
    """Stream a snapshot into packs; returns the fragment that names them. On return every pack is
    durable, and nothing is readable yet. Without ``learned`` nothing is left to a next save. ``look``: see
    that packs of earlier steps that it refers to are in this store.
    """
    learned = learned or Learned(Bases(0), Rates(settings.encode_threads))
    snapshot = job.snapshot
    assert snapshot is not None
    holdings = snapshot.holdings
    replicas = snapshot.replicas()
    keys = _keys(snapshot)
    known = _known(keys, reusable)
    share_bytes = sum(
        (task.stop - task.start) * holdings[task.holding].leaf.itemsize_bytes for task in snapshot.tasks
    )
    began = _told(job.meter, "read", "capture", "queued", "prepare")
    share = {"bytes": share_bytes, "chunks": len(snapshot.tasks)}
    events(Event("save.begun", {"step": expected.at.step, **began, **share}))
    pack_bytes = max(settings.pack_bytes, min(settings.max_pack_bytes, share_bytes // 64))
    packs = _Packs(store, expected.at, me, pack_bytes, settings, learned, job, snapshot)
    chunks: dict[int, ChunkRecord] = {}
    with Workers(settings.encode_threads, "ftckpt-encode") as pool, packs:
        for number, saved in _unchanged(snapshot, keys, known, learned.frozen).items():
            chunks[number] = _refer(saved, packs)
            snapshot.written(number, chunks[number])
            snapshot.release(number)
        todo = [number for number in range(len(snapshot.tasks)) if number not in chunks]
        for item in _encode_all(pool, snapshot, todo, keys, known, settings, learned, job.meter, job.gate):
            task = snapshot.tasks[item.number]
            if isinstance(item, _Known):
                chunks[item.number] = _refer(item.saved, packs)
            else:
                pack, offset = packs.add(item.body, item.kept or item.base is not None)
                base = _refer(item.base, packs) if item.base is not None else None
                chunks[item.number] = ChunkRecord(
                    task.start,
                    task.stop,
                    item.raw,
                    item.stored,
                    item.codec,
                    pack,
                    offset,
                    len(item.body),
                    base,
                )
            snapshot.written(item.number, chunks[item.number])
            snapshot.release(item.number)
        events(
            Event(
                "save.staged",
                {"step": expected.at.step, **_told(job.meter, "encode", "fence", "read", "encode")},
            )
        )
        refs = packs.finish()
        if look:
            packs.look_for_earlier(settings.look_again_s)
    puts = {"packs": len(refs) - packs.referred, **_told(job.meter, "put", "put", "put_wait")}
    events(Event("save.put", {"step": expected.at.step, **puts}))
    return Fragment(
        format=FORMAT,
        attempt=expected.at.attempt,
        step=expected.at.step,
        writer=str(me),
        quorum=expected.quorum,
        members=expected.members,
        parent=expected.parent,
        packs=refs,
        leaves=_leaf_records(snapshot, chunks),
        replicas=replicas,
        guarantee=job.guarantee,
        why=job.why,
        left_out=job.left_out,
    )


def _told(meter: Meter, through: Stage, *stages: Stage) -> dict[str, float]:
    """Since the save was asked for, the bytes that went through a stage, and what stages took."""
    took = {f"{stage}_s": meter.seconds(stage) for stage in stages}
    return {"bytes": meter.bytes(through), "seconds": meter.age_s, **took}


Key = tuple[str | int, ...]
"""A span of a box of a leaf: name, offset, extent, start, stop. Flat, so that the collector of cycles forgets
it at its first look.
"""


@dataclass(slots=True)
class _Known:
    """A chunk that the parent commit has already."""

    number: int
    saved: Saved


@dataclass(slots=True)
class _Encoded:
    """A chunk to write. ``base`` is what a delta builds on; ``kept`` says that later ones may build on
    this one.
    """

    number: int
    raw: bytes
    stored: bytes
    codec: int
    body: Buffer
    base: Saved | None
    kept: bool


def _keys(snapshot: Snapshot) -> list[Key]:
    """What each task is, from save to save."""
    keys: list[Key] = []
    for task in snapshot.tasks:
        holding = snapshot.holdings[task.holding]
        keys.append((holding.leaf.name, *holding.box.offset, *holding.box.extent, task.start, task.stop))
    return keys


def _known(keys: Sequence[Key], reusable: Mapping[str, Sequence[Saved]]) -> dict[int, Saved]:
    """For each task, the parent's chunk of the same span of the same box, if there is one."""
    spans = {_key(saved): saved for name in {str(key[0]) for key in keys} for saved in reusable.get(name, ())}
    return {number: spans[key] for number, key in enumerate(keys) if key in spans}


def _unchanged(
    snapshot: Snapshot,
    keys: Sequence[Key],
    known: Mapping[int, Saved],
    frozen: Mapping[Key, tuple[Seen, bytes]],
) -> dict[int, Saved]:
    """The parent's chunks of frozen leaves that an earlier save hashed, in memory that is what it was."""
    found = {number: saved for number, saved in known.items() if keys[number] in frozen}
    return {n: saved for n, saved in found.items() if frozen[keys[n]] == (snapshot.seen(n), saved.chunk.raw)}


def _key(saved: Saved) -> Key:
    box, chunk = saved.box, saved.chunk
    return saved.leaf, *box.offset, *box.extent, chunk.start, chunk.stop


_OF_MOMENTS = {"exp_avg": 0.1, "momentum_buffer": 0.1, "exp_avg_sq": 0.5, "max_exp_avg_sq": 0.5}
"""What moments keep of the bits that weights of their size would: a step changes a tenth of the first, a
thousandth of the second.
"""


def _candidate(key: Key, task: ChunkTask, holding: Holding) -> Candidate:
    """What a base of this chunk may be worth, before it was measured: a small step leaves most bits of
    16-bit weights as they are, fewer of 32-bit ones (masters too), and fewest of an optimizer's moments.
    """
    itemsize = holding.leaf.itemsize_bytes
    prior = {2: 0.6, 4: 0.3}.get(itemsize, 0.1)
    if holding.frozen or holding.leaf.kind == "value":
        prior = 0.0
    elif ".state." in holding.leaf.name:
        prior *= _OF_MOMENTS.get(holding.leaf.name.rsplit(".", 1)[-1].partition("@")[0], 1.0)
    return Candidate(key, (task.stop - task.start) * itemsize, prior)


def may_extend(chunk: ChunkRecord, max_chain: int) -> bool:
    """Whether a delta may build on this chunk. Chains end at lengths from half of ``max_chain`` up to
    it, by the digest of what they began with, so that not all chunks are written whole in one save. They end
    earlier where the deltas, one more of the last one's size included, would be larger than what they
    began with: so a restore never reads more than about twice the bytes of one without deltas.
    """
    *deltas, anchor = (chunk, *chunk.chain)
    limit = max_chain - anchor.raw[0] % (max_chain // 2 + 1)
    delta_bytes = sum(link.size for link in deltas) + (chunk.size if deltas else 0)
    return len(deltas) < limit and delta_bytes <= anchor.size


def _encode_all(
    pool: Workers,
    snapshot: Snapshot,
    todo: Sequence[int],
    keys: Sequence[Key],
    known: Mapping[int, Saved],
    settings: WriteSettings,
    learned: Learned,
    meter: Meter,
    gate: Gate,
) -> Iterator[_Encoded | _Known]:
    """Hash and encode the chunks of these tasks, in their order; with several threads a few ahead of whoever consumes them."""
    chosen, bases, rates = settings.codec, learned.bases, learned.rates
    pays = rates.pays if chosen.name == "auto" else always
    bases.aim(
        _candidate(key, task, snapshot.holdings[task.holding])
        for key, task in zip(keys, snapshot.tasks, strict=True)
        if chosen.deltas
    )

    def work(numbers: Sequence[int]) -> list[_Encoded | _Known]:
        with meter.spent("yielded"):
            gate.wait()
        with meter.spent("read"):
            bodies = [snapshot.read(number) for number in numbers]
        with meter.spent("encode", sum(map(len, bodies))):
            return list(map(encoded, numbers, bodies))

    def encoded(number: int, body: Buffer) -> _Encoded | _Known:
        raw = xxhash.xxh3_128_digest(body)
        key, saved = keys[number], known.get(number)
        if (seen := snapshot.seen(number)) is not None:
            learned.frozen[key] = (seen, raw)
        if saved is not None and saved.chunk.raw == raw:
            bases.unchanged(key, raw, body)
            return _Known(number, saved)
        base = None
        if saved is not None and may_extend(saved.chunk, chosen.max_chain):
            base = bases.get(key, saved.chunk.raw)
        itemsize = snapshot.holdings[snapshot.tasks[number].holding].leaf.itemsize_bytes
        begun_s = rates.cpu_s() if len(body) >= codec.SMALLEST_PAYING_BYTES else 0.0
        done = codec.encode(body, itemsize, chosen, base, pays)
        if len(body) >= codec.SMALLEST_PAYING_BYTES:  # others are not worth a look at the clock
            rates.encoded(done.codec, len(body), rates.cpu_s() - begun_s)
        stored = raw if done.codec == codec.RAW else xxhash.xxh3_128_digest(done.body)
        kept = bases.keep(key, raw, body, done.gain)
        built_on = saved if done.codec == codec.DELTA else None
        return _Encoded(number, raw, stored, done.codec, done.body, built_on, kept)

    if settings.encode_threads == 1:  # on this thread: a chunk stays in one core's cache until it is packed
        for numbers in _batches(snapshot, todo):
            yield from work(numbers)
        return
    ahead: deque[Future[list[_Encoded | _Known]]] = deque()
    for numbers in _batches(snapshot, todo):
        ahead.append(pool.submit(work, numbers))
        if len(ahead) > 2 * settings.encode_threads:
            yield from pool.result(ahead.popleft())
    for future in ahead:
        yield from pool.result(future)


def _batches(snapshot: Snapshot, todo: Sequence[int]) -> Iterator[list[int]]:
    """Those of the tasks that have bytes, in order; small ones by the hundred, because handing one over to a
    thread takes longer than encoding it.
    """
    batch: list[int] = []
    size_bytes = 0
    for number in todo:
        task = snapshot.tasks[number]
        if task.start == task.stop:
            continue
        batch.append(number)
        size_bytes += (task.stop - task.start) * snapshot.holdings[task.holding].leaf.itemsize_bytes
        if size_bytes >= _BATCH_BYTES or len(batch) == _BATCH_CHUNKS:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _refer(saved: Saved, packs: _Packs) -> ChunkRecord:
    """The record of a chunk that earlier steps wrote, and of its bases, in terms of these packs."""
    base: ChunkRecord | None = None
    for link in reversed((Link(saved.chunk, saved.pack, saved.pack_bytes), *saved.bases)):
        base = msgspec.structs.replace(link.chunk, pack=packs.refer(link.pack, link.pack_bytes), base=base)
    assert base is not None
    return base


def _leaf_records(snapshot: Snapshot, chunks: Mapping[int, ChunkRecord]) -> tuple[LeafRecord, ...]:
    records = []
    tasks = enumerate(snapshot.tasks)  # in the order of holdings
    for number, group in groupby(tasks, key=lambda item: item[1].holding):
        parts = [chunks[task] for task, _ in group if task in chunks]
        holding = snapshot.holdings[number]
        leaf = holding.leaf
        box = BoxRecord(holding.box.offset, holding.box.extent, tuple(parts))
        records.append(LeafRecord(leaf.name, leaf.kind, leaf.dtype, leaf.shape, leaf.owner, (box,)))
    return tuple(sorted(records, key=lambda record: record.name))


@dataclass(slots=True)
class _Open:
    """A pack that is being filled."""

    number: int
    memory: npt.NDArray[np.uint8]
    view: memoryview
    size: int = 0
    digest: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)


class _Packs:
    """Fills packs in memory and puts each as one object, a bounded number at a time.

    Chunks that later steps may build on go into packs of their own: a base is kept for as long as
    anything builds on it, and must not keep everything else of its step.
    """

    def __init__(
        self,
        store: ObjectStore,
        at: Position,
        me: Writer,
        pack_bytes: int,
        settings: WriteSettings,
        learned: Learned,
        job: SaveJob,
        snapshot: Snapshot,
    ) -> None:
        self._store, self._at, self._me = store, at, me
        self._meter, self._gate = job.meter, job.gate
        self._snapshot = snapshot
        self._rates, self._digests, self._seen_s = learned.rates, learned.packs, learned.seen_s
        self._pack_bytes = pack_bytes
        self._pool = Workers(settings.packs_in_flight, "ftckpt-put")
        self._slots = threading.BoundedSemaphore(settings.packs_in_flight)
        self.referred = 0
        """Packs of earlier steps that were referred to."""
        self._refs: list[PackRef] = []
        self._numbers: dict[str, int] = {}
        self._puts: list[Future[None]] = []
        self._open: dict[bool, _Open] = {}
        self._free: list[npt.NDArray[np.uint8]] = []
        self._sequence = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.__exit__(kind, error, trace)

    def refer(self, key: str, size: int) -> int:
        """The number of a pack that an earlier step wrote."""
        if key not in self._numbers:
            self.referred += 1
            self._numbers[key] = len(self._refs)
            self._refs.append(PackRef(key, size, self._digests.get(key, b"")))
            self._snapshot.durable(self._numbers[key], self._refs[-1])
        return self._numbers[key]

    def add(self, body: Buffer, base: bool = False) -> tuple[int, int]:
        """Copy a chunk into an open pack: the pack's number and the chunk's offset. ``base``: later
        steps may build on it.
        """
        pack = self._open.get(base)
        if pack is not None and pack.size + len(body) > pack.memory.size:
            self._flush(base)
            pack = None
        if pack is None:
            memory = self._memory(len(body))
            pack = self._open[base] = _Open(len(self._refs), memory, memory.data)
            self._refs.append(PackRef(layout.pack_key(self._at, self._me, self._sequence), 0))
            self._sequence += 1
        offset = pack.size
        pack.size += len(body)
        if len(body) <= _SMALL_BYTES:
            pack.view[offset : pack.size] = body
        else:
            np.copyto(pack.memory[offset : pack.size], np.frombuffer(body, np.uint8))
        pack.digest.update(pack.view[offset : pack.size])  # what is put, whatever becomes of live memory
        return pack.number, offset

    def _memory(self, need_bytes: int) -> npt.NDArray[np.uint8]:
        """Of a pack that has been put, if there is one: its pages are touched."""
        if need_bytes <= self._pack_bytes and self._free:
            return self._free.pop()
        return np.empty(max(need_bytes, self._pack_bytes), np.uint8)

    def finish(self) -> tuple[PackRef, ...]:
        """Put the last packs and wait for all of them; raises the first failure."""
        for base in sorted(self._open):
            self._flush(base)
        for put in self._puts:
            self._pool.result(put)
        return tuple(self._refs)

    def look_for_earlier(self, again_s: float) -> None:
        """Packs of earlier steps are there, as far as nobody asked lately: somebody may have deleted them."""
        now_s = time.monotonic()
        asked = [ref for ref in self._refs if now_s - self._seen_s.get(ref.key, -again_s) >= again_s]
        looks = [self._pool.submit(self._is_there, ref) for ref in asked]
        gone = [ref.key for ref, look_ in zip(asked, looks, strict=True) if not self._pool.result(look_)]
        if gone:
            raise PacksGone(
                f"PacksGone: {len(gone)} packs of earlier steps, {gone[0]} first, are no longer in {self._store.uri}, "
                "or not whole\n"
                "  nothing was committed; the next save refers to nothing and writes everything\n"
                "  earlier steps may be damaged: `ftckpt verify` says which; look for what deletes objects there",
                packs=tuple(gone),
            )
        self._seen_s.update((ref.key, now_s) for ref in asked)

    def _is_there(self, ref: PackRef) -> bool:
        try:
            return self._store.size(ref.key) == ref.size
        except ObjectNotFound:
            return False

    def _flush(self, base: bool) -> None:
        pack = self._open.pop(base)
        key = self._refs[pack.number].key
        self._digests[key] = pack.digest.digest()
        self._refs[pack.number] = PackRef(key, pack.size, self._digests[key])
        for put in self._puts:
            if put.done():
                put.result()
        with self._meter.spent("put_wait"):
            self._pool.acquire(self._slots)
        self._puts.append(self._pool.submit(self._put, key, pack))

    def _put(self, key: str, pack: _Open) -> None:
        try:
            with self._meter.spent("yielded"):
                self._gate.wait()
            with self._meter.spent("put", pack.size), self._rates.putting(pack.size):
                put_pack(self._store, key, pack.memory[: pack.size].data)
            self._seen_s[key] = time.monotonic()
            self._snapshot.durable(pack.number, self._refs[pack.number])
            if pack.memory.size == self._pack_bytes:
                self._free.append(pack.memory)
        finally:
            self._slots.release()


def put_pack(store: ObjectStore, key: str, body: Buffer) -> None:
    """Create a pack, and have the store confirm that all of it is there.

    Its key holds this life's incarnation, so only this process can have written it: one that is
    there already was created by an earlier try of this very call.
    """
    with suppress(AlreadyExists):
        store.create(key, body)
    found = store.size(key)
    if found != len(body):
        raise SaveFailed(
            f"SaveFailed: the store holds {found} bytes of {key}, of {len(body)} that it was given\n"
            "  nothing refers to it; earlier commits are intact",
            key=key,
        )
