"""What a session owns between entering and leaving: its engine, its staging pool, its fences, and the
thread that collects.

Here a snapshot is taken and fenced. When to save, and what becomes of it, is the session's business.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ftckpt.capture import Fences, LiveLeaf
from ftckpt.clock import SystemClock
from ftckpt.colocation import Gate
from ftckpt.errors import FtckptError, in_another_process
from ftckpt.events import Event, Events
from ftckpt.gc import collect
from ftckpt.layout import Writer
from ftckpt.meter import Meter
from ftckpt.plan.assign import ChunkTask
from ftckpt.ranks import Ranks
from ftckpt.retention import Keep
from ftckpt.session.pace import Pace
from ftckpt.session.settings import Settings
from ftckpt.session.tiered import Tiered
from ftckpt.snapshot import Live, Snapshot, StagingPool, stage
from ftckpt.sources import Rings
from ftckpt.staging import Kept
from ftckpt.store.api import ObjectStore
from ftckpt.writer import SaveEngine, SaveJob


@dataclass(frozen=True, slots=True)
class _Streaming:
    """A save that may still read live memory."""

    step: int
    snapshot: Live | Kept
    meter: Meter


@dataclass(slots=True)
class Inside:
    """One session that was entered, in one process. ``store`` is where its steps are settled.
    ``fence`` and ``collect_soon`` from any thread.
    """

    store: ObjectStore
    ranks: Ranks
    attempt: int
    me: Writer
    engine: SaveEngine
    settings: Settings
    events: Events
    pool: StagingPool
    pace: Pace
    tiered: Tiered | None = None
    rings: Rings = field(default_factory=Rings)
    live: list[_Streaming] = field(default_factory=list)
    era: int = 0
    """How often frozen memory may have changed."""
    saving: threading.Lock = field(default_factory=threading.Lock)
    fences: Fences | None = None
    gate: Gate = field(default_factory=Gate)
    left_out: tuple[str, ...] = ()
    """What no save of this session holds."""
    _janitor: threading.Thread | None = field(default=None)
    _pid: int = field(default_factory=os.getpid)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a fork of the process that entered, where no thread of it lives."""
        return os.getpid() != self._pid

    def require_here(self) -> None:
        """Raises ``NotEntered`` in a fork of the process that entered: nothing would ever end there."""
        if self.is_elsewhere:
            raise in_another_process("this session was entered", self._pid, os.getpid())

    def watch(self, fences: Fences) -> None:
        """Hear of changes from now on; have the pool's memory ready for a first fence."""
        if self.settings.stage == "lazy" and self.settings.staging_bytes is not None:
            self.pool.touch(self.settings.chunk_bytes)
        self.fences = fences

    def snapshot(
        self, job: SaveJob, leaves: Sequence[LiveLeaf], tasks: Sequence[ChunkTask], participants: int
    ) -> Snapshot:
        """The bytes of these chunks as they are now; raises ``SaveFailed`` beyond the staging budget."""
        settings = self.settings
        holders = participants if settings.check_replicas else 0
        if settings.stage == "eager" and self.tiered is None:
            return stage(leaves, tasks, settings.staging_bytes, holders=holders)
        live = Live(
            leaves,
            tasks,
            self.pool,
            SystemClock(),
            holders=holders,
            verify=settings.verify_snapshot,
            rings=self.rings,
            era=self.era,
        )
        kept = live if self.tiered is None else self.tiered.keep(live, job, self.pool)
        if settings.stage == "eager":
            kept.fence(settings.fence_deadline_s)
        streaming = [one for one in self.live if one.snapshot.is_live or one.snapshot.reads_frozen]
        self.live = [*streaming, _Streaming(job.expected.at.step, kept, job.meter)]
        return kept

    @contextmanager
    def yielding(self, deadline_s: float) -> Iterator[None]:
        """Nothing more is read or put for at most so long; staging memory that is free is let go of."""
        clock = SystemClock()
        begun_s = clock.now_s()
        try:
            with self.gate.closed(deadline_s):
                self.pool.lean = True
                freed_bytes = self.pool.clear()
                yield
        finally:
            self.pool.lean = self.gate.is_held
            took_s = clock.now_s() - begun_s
            told = {
                "seconds": round(took_s, 4),
                "released_bytes": freed_bytes,
                "overran": took_s > deadline_s,
            }
            self.events(Event("save.yielded", told))

    def updates(self) -> dict[str, int]:
        """How often optimizers updated each component so far."""
        return dict(self.fences.updates) if self.fences is not None else {}

    def fence(self, what: str, *, frozen_too: bool) -> None:
        """On the thread that is about to change captured memory: stage what is still to be read of it."""
        self.era += frozen_too
        for save in self.live:
            if save.snapshot.is_live or (frozen_too and save.snapshot.reads_frozen):
                done = save.snapshot.fence(self.settings.fence_deadline_s, frozen_too=frozen_too)
                save.meter.add("fence", done.seconds, done.staged_bytes)
                took = {"staged_bytes": done.staged_bytes, "seconds": round(done.seconds, 4)}
                self.events(Event("save.fence", {"step": save.step, "what": what, **took}))

    def foreign(self, what: str) -> None:
        """An optimizer that is not in the state steps a captured parameter."""
        if self.settings.stage == "eager":
            return  # what was copied is safe from it
        why = "an optimizer outside the state steps a captured parameter; it is fenced"
        self.events(Event("save.warning", {"what": what, "why": why}))

    def collect_soon(self, keep: Keep) -> None:
        """Collect on a thread of its own, one at a time: a slow delete never holds up a save."""
        if keep.last is None or (self._janitor is not None and self._janitor.is_alive()):
            return

        def work() -> None:
            try:
                done = collect(self.store, keep, intent_id=uuid.uuid4().hex)
            except FtckptError as error:
                self.events(Event("gc.failed", {"error": str(error)}))
            else:
                steps = [at.step for at in done.victims]
                self.events(Event("gc.collected", {"steps": steps, "freed_bytes": done.freed_bytes}))

        self._janitor = threading.Thread(target=work, name="ftckpt-gc", daemon=True)
        self._janitor.start()

    def janitor_done(self, timeout_s: float = 60.0) -> None:
        """Let a collection under way finish; it may be cut off, and a later one completes it."""
        if self._janitor is not None:
            self._janitor.join(timeout_s)
