"""``StorageWriter``: DCP's saves as steps of a run.

DCP calls, on all ranks: ``set_up_storage_writer``, ``prepare_local_plan``, then on the coordinator
``prepare_global_plan``, on all ranks ``write_data``, and on the coordinator ``finish`` when all of them have
written. So there is nothing to wait for: ``prepare_global_plan`` begins or continues the attempt and hands out
the ticket of this save, ``write_data`` puts a rank's packs and its fragment, ``finish`` adds the trees and
commits. A rank that fails gives the step up at once; whoever dies leaves a position that the next save, or
the next attempt, gives up.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as Interface
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ftckpt import values
from ftckpt.attempts import check_fence
from ftckpt.bounds import DAY_S, SHORTEST_S, require_number
from ftckpt.capture.tensors import dtype_name
from ftckpt.clock import SystemClock
from ftckpt.codec import Bases, Codec, Rates
from ftckpt.commit import Patience, abort, build, check_settled, create_commit, gather, put_fragment
from ftckpt.elastic.launch import Launch
from ftckpt.errors import FtckptError, SaveFailed, SettingsDiffer, SettingsError, first_line
from ftckpt.events import Event, Events, to_logging
from ftckpt.gc import collect
from ftckpt.interop.dcp.forms import lower
from ftckpt.interop.dcp.life import Life, begin_life
from ftckpt.interop.dcp.names import DCP_VERSION, Contents, Kept, bytes_spec, leaf_name, packed
from ftckpt.interop.dcp.share import Part, Share, bytes_part, tensor_part
from ftckpt.interop.dcp.steps import Ticket, step_of
from ftckpt.layout import Writer
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import MAX_CHUNK_BYTES, MAX_STEP, Commit
from ftckpt.meter import STAGES, Meter
from ftckpt.plan.assign import DEFAULT_CHUNK_BYTES
from ftckpt.plan.restore import Saved, index_chunks
from ftckpt.reader import read_fragments
from ftckpt.retention import Keep
from ftckpt.store import PulseStore, open_store
from ftckpt.store.api import ObjectStore
from ftckpt.writer import Learned, SaveJob, WriteSettings, fitted, look_commit, write_share

_WHY = ("saved through torch.distributed.checkpoint, which does not say what else the job holds",)


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank tells the coordinator of one item: of a value, how it is kept; a small one is told whole."""

    save: str
    kept: Kept | None = None
    data: bytes = b""


@dataclass(frozen=True, slots=True)
class _Settings:
    codec: Codec
    chunk_bytes: int
    keep: Keep
    step: int | None
    deadline_s: float
    allow_pickle: bool

    def __post_init__(self) -> None:
        require_number("chunk_bytes", self.chunk_bytes, low=1, high=MAX_CHUNK_BYTES, whole=True)
        require_number("step", self.step, low=0, high=MAX_STEP, whole=True, optional=True)
        require_number("deadline_s", self.deadline_s, low=SHORTEST_S, high=DAY_S)


@dataclass(slots=True)
class _Memory:
    """What one process keeps from save to save. ``life`` is the coordinator's alone."""

    store: PulseStore | None = None
    life: Life | None = None
    learned: Learned | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


_MEMORIES: dict[str, _Memory] = {}
"""Of writers that came into this process through a pipe, by their id: DCP's checkpoint process is sent its
writer anew for every save, and an attempt must outlast a save.
"""


class StorageWriter(Interface):
    """Saves of ``torch.distributed.checkpoint`` as steps of the run at ``uri``.

    Make one for the life of a job, alike on all ranks, and give it to every save: its first save claims an
    attempt of the run, which fences jobs that began earlier; the others continue it. ``checkpoint_id`` is the
    step, a number or a name that ends in one; without it steps count on from the last.

    Args:
        uri: a folder or bucket address; see ``ftckpt.store.open_store``.
        step: go on from this step instead of the newest, leaving the newer ones behind. Under a supervisor,
            which says where an attempt goes on from, it has to be the same step.
        keep: how many commits to keep (an int or a ``Keep``); ``None``: all.
        codec: how chunks are stored; see ``ftckpt.Session``.
        deadline_s: how long the store may be silent before a save is given up.
        allow_pickle: keep what has no form of ours as the planner gives it, which is a pickle; else refused.
            A reader has to be told likewise.
        store_options: settings of the store; ``AWS_*`` variables otherwise.
        events: who hears what happens; the standard logger ``ftckpt`` otherwise.

    What goes wrong on any rank reaches all of them as DCP's ``CheckpointException``, whose ``failures`` hold
    the error itself; the step is then given up, and earlier ones are intact.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        *,
        step: int | None = None,
        keep: int | Keep | None = None,
        codec: Literal["auto", "raw", "zstd", "planes", "delta"] | Codec = "auto",
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        deadline_s: float = 300.0,
        allow_pickle: bool = False,
        store_options: Mapping[str, object] | None = None,
        allow_unconditional: bool = False,
        events: Events = to_logging,
        store: ObjectStore | None = None,
    ) -> None:
        super().__init__()
        self._uri = os.fspath(uri)
        self._settings = _Settings(
            codec=codec if isinstance(codec, Codec) else Codec(codec),
            chunk_bytes=chunk_bytes,
            keep=keep if isinstance(keep, Keep) else Keep(last=keep),
            step=step,
            deadline_s=deadline_s,
            allow_pickle=allow_pickle,
        )
        self._store_options = dict(store_options or {})
        self._allow_unconditional = allow_unconditional
        self._events = events
        self._given_store = store
        self._id = uuid.uuid4().hex
        self._memory = _Memory()
        self._asked: int | None = None
        self._step: int | None = None
        self._rank = 0
        self._ticket: Ticket | None = None
        self._meter = Meter()

    def __getstate__(self) -> dict[str, object]:
        own = ("_memory", "_ticket", "_meter")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        self._memory = _MEMORIES.setdefault(self._id, _Memory())
        self._ticket, self._meter = None, Meter()

    def close(self) -> None:
        """Let go of the store. The next save would claim another attempt."""
        memory, self._memory = self._memory, _Memory()
        if memory.store is not None:
            memory.store.close()

    @property
    def attempt(self) -> int | None:
        """The attempt that this writer's saves belong to; known to the coordinator once it began."""
        life = self._memory.life
        return None if life is None else life.attempt

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it names a step."""
        try:
            step_of(checkpoint_id)
        except SettingsError:
            return False
        return True

    # --- what DCP calls, in this order --------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | int | None = None) -> None:
        """The next save is of that step."""
        self._asked = None if checkpoint_id is None else step_of(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """A save begins, on this rank of those that take part."""
        if not kwargs.get("use_collectives", True):
            raise SettingsError(
                "SettingsError: use_collectives=False leaves every rank with a checkpoint of its own\n"
                "  a step of a run is one commit over all ranks; nothing was written",
                setting="use_collectives",
            )
        self._rank = int(kwargs.get("rank") or 0)
        self._step, self._asked = self._asked, None
        self._ticket, self._meter = None, Meter()
        self._store().begin()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        if not plan.usable:
            raise _caching()
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin this save, on the coordinator: every plan carries its ticket."""
        store, memory = self._store(), self._memory
        if memory.life is None:
            memory.life = begin_life(
                store,
                self._address(),
                step=self._settings.step,
                world=len(plans),
                launch=Launch.from_env(),
                options=self._store_options,
                events=self._events,
            )
        self._ticket = ticket = memory.life.next(store, self._step, len(plans))
        return [replace(plan, storage_data=ticket) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Put this rank's packs and its fragment. On return they are durable, and nothing is readable."""
        ticket = plan.storage_data
        if not isinstance(ticket, Ticket):
            raise _caching()
        self._same("uri", self._store().uri, ticket.uri)  # what is not the same run must not be written to
        with self._giving_up(ticket, ticket.writer(self._rank)):
            if getattr(planner, "_enable_plan_caching", False):
                raise _caching()
            if self._step is not None:
                self._same("step", self._step, ticket.at.step)
            parts, results = self._parts(plan.items, planner, ticket)
            self._write(ticket, ticket.writer(self._rank), parts)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the step readable, on the coordinator, when all ranks have written. Acknowledged means: the
        commit exists, and after that no newer attempt was claimed.
        """
        ticket, life = self._ticket, self._memory.life
        assert ticket is not None and life is not None
        with self._giving_up(ticket, ticket.summary):
            contents = _contents(metadata, (one for ours in results for one in ours))
            parts = [
                bytes_part(LeafSpec(name, "value", "uint8", (len(data),)), data)
                for name, data in packed(contents).items()
            ]
            self._write(ticket, ticket.summary, parts)
            with self._meter.spent("settle"):
                commit = self._commit(ticket, life)
        metadata.version = DCP_VERSION
        metadata.storage_data = {"uri": ticket.uri, "step": commit.step, "attempt": commit.attempt}
        self._tell(commit)
        self._collect_soon()

    # --- how ----------------------------------------------------------------------------------------

    def _store(self) -> PulseStore:
        memory = self._memory
        with memory.lock:
            if memory.store is None:
                store = self._given_store or open_store(
                    self._uri,
                    options=self._store_options,
                    allow_unconditional=self._allow_unconditional,
                    events=self._events,
                )
                memory.store = PulseStore(store, deadline_s=self._settings.deadline_s, clock=SystemClock())
            return memory.store

    def _address(self) -> str:
        """The run's address as it is from any folder, for the record."""
        return self._uri if "://" in self._uri else str(Path(self._uri).absolute())

    def _same(self, setting: str, mine: object, theirs: object) -> None:
        """This rank was told what the coordinator was told."""
        if mine != theirs:
            raise SettingsDiffer(
                "SettingsDiffer: the ranks of this save were given different settings\n"
                f"  {setting}: rank {self._rank} has {mine!r}, the coordinator {theirs!r}\n"
                "  this step will not be readable; earlier commits are intact",
                settings=(setting,),
            )

    def _parts(
        self, items: Sequence[WriteItem], planner: SavePlanner, ticket: Ticket
    ) -> tuple[list[Part], list[WriteResult]]:
        """What this rank is to write, and what it tells the coordinator of it."""
        parts: list[Part] = []
        results: list[WriteResult] = []
        for item in items:
            key, told = item.index.fqn, Written(ticket.save)
            if item.type != WriteItemType.BYTE_IO:
                part = tensor_part(item, planner, leaf_name(key))
                parts.append(part)
                size_bytes = part.box.numel * part.leaf.itemsize_bytes
            else:
                lowered = lower(item, planner, allow_pickle=self._settings.allow_pickle)
                size_bytes = len(lowered.data)
                kept = Kept(lowered.form, size_bytes, lowered.position)
                if lowered.form == "plain":
                    told = Written(ticket.save, kept, lowered.data)
                else:
                    told = Written(ticket.save, kept)
                    parts.append(bytes_part(bytes_spec(key, size_bytes), lowered.data))
            results.append(WriteResult(item.index, size_bytes, told))
        return parts, results

    def _write(self, ticket: Ticket, me: Writer, parts: Sequence[Part]) -> None:
        """Put packs, then the fragment."""
        store, settings, memory = self._store(), self._write_settings(), self._memory
        if memory.learned is None:
            budget_bytes = settings.codec.base_budget_bytes if settings.codec.deltas else 0
            memory.learned = Learned(Bases(budget_bytes), Rates(settings.encode_threads))
        learned = memory.learned
        if me == ticket.summary:  # bases are of one writer's chunks
            learned = Learned(Bases(0), learned.rates)
        share = Share(parts, self._settings.chunk_bytes)
        job = SaveJob(ticket.expected, share, why=_WHY, meter=self._meter)
        with self._meter.spent("prepare"):
            reusable = self._reusable(ticket, parts, learned)
        try:
            fragment = write_share(store, job, ticket.expected, me, settings, reusable, learned, self._events)
        finally:
            share.close()
        put_fragment(store, fragment, me)

    def _write_settings(self) -> WriteSettings:
        patience = Patience(deadline_s=self._settings.deadline_s)
        settings = WriteSettings(codec=self._settings.codec, patience=patience)
        return fitted(settings, len(os.sched_getaffinity(0)))

    def _reusable(
        self, ticket: Ticket, parts: Sequence[Part], learned: Learned
    ) -> Mapping[str, Sequence[Saved]]:
        """Chunks of the parent commit that this rank may refer to."""
        learned.packs.clear()
        if ticket.parent is None:
            return {}
        commit = look_commit(self._store(), ticket.parent)
        wants = [(part.leaf, part.box) for part in parts]
        fragments = read_fragments(self._store(), commit, wants)
        learned.packs.update((pack.key, pack.digest) for one in fragments for pack in one.packs)
        return index_chunks(fragments, {part.leaf.name for part in parts})

    def _commit(self, ticket: Ticket, life: Life) -> Commit:
        store, expected = self._store(), ticket.expected
        found = gather(store, expected)
        missing = [str(writer) for writer in expected.writers if writer not in found]
        if missing:
            raise SaveFailed(
                f"SaveFailed: {ticket.at} of {store.uri} was not saved: the shares of {', '.join(missing[:8])} are "
                "not there, although these ranks have written them\n"
                "  is the address a folder that every machine has to itself? give one that all of them share\n"
                "  earlier commits are intact",
                step=ticket.at.step,
            )
        record, ref = create_commit(store, build(expected, found))
        life.settled(record, ref)
        check_fence(store, ticket.at.attempt)
        check_settled(record)
        return record

    @contextmanager
    def _giving_up(self, ticket: Ticket, me: Writer) -> Iterator[None]:
        """Whoever fails inside gives the step up for all: nobody else will be asked to."""
        try:
            yield
        except BaseException as error:
            told = {"step": ticket.at.step, "stage": self._meter.failed_in or "capture"}
            why = {"total_s": self._meter.age_s, "error": first_line(error)[:500]}
            self._events(Event("save.failed", {**told, **why}))
            try:
                abort(self._store(), ticket.at, f"{me}: {first_line(error)}")
            except FtckptError as second:
                error.add_note(f"and that the step is given up could not be written down: {second}")
            raise

    def _tell(self, commit: Commit) -> None:
        own, meter = list(commit.components.values()), self._meter
        self._events(
            Event(
                "save.committed",
                {
                    "step": commit.step,
                    "attempt": commit.attempt,
                    "seconds": round(meter.age_s, 3),
                    "raw_bytes": sum(c.raw_bytes for c in own),
                    "stored_bytes": sum(c.stored_bytes for c in own),
                    "reused_bytes": sum(c.reused_bytes for c in own),
                    "fragments": len(commit.fragments),
                    "total_s": meter.age_s,
                    **{f"{stage}_s": meter.seconds(stage) for stage in STAGES},
                },
            )
        )

    def _collect_soon(self) -> None:
        """Collect on a thread of its own: a slow delete never holds up a save."""
        keep, store = self._settings.keep, self._store()
        if keep.last is None:
            return

        def work() -> None:
            try:
                done = collect(store, keep, intent_id=uuid.uuid4().hex)
            except FtckptError as error:
                self._events(Event("gc.failed", {"error": str(error)}))
            else:
                steps = [at.step for at in done.victims]
                self._events(Event("gc.collected", {"steps": steps, "freed_bytes": done.freed_bytes}))

        threading.Thread(target=work, name="ftckpt-gc", daemon=True).start()


def _contents(metadata: Metadata, results: Iterable[WriteResult]) -> Contents:
    """What the step holds, by what the planner and the ranks say."""
    tensors = {
        key: LeafSpec(leaf_name(key), "tensor", dtype_name(found.properties.dtype), tuple(found.size))
        for key, found in metadata.state_dict_metadata.items()
        if isinstance(found, TensorStorageMetadata)
    }
    kept: dict[str, Kept] = {}
    plain: dict[str, object] = {}
    for one in results:
        told: Written = one.storage_data
        if told.kept is None:
            continue
        if told.kept.form == "plain":
            plain[one.index.fqn] = values.unpack(told.data)
        else:
            kept[one.index.fqn] = told.kept
    return Contents(tensors, kept, plain, metadata.planner_data)


def _caching() -> SettingsError:
    return SettingsError(
        "SettingsError: the planner caches plans (enable_plan_caching=True)\n"
        "  a rank would be given the plan of an earlier save, and with it the position of an earlier step\n"
        "  this step will not be readable, earlier commits are intact; make the planner without it",
        setting="enable_plan_caching",
    )
