"""``StorageReader``: DCP's loads from a step of a run, whoever saved it.

DCP calls, on all ranks: ``read_metadata``, ``set_up_storage_reader``, ``prepare_local_plan``, then on the
coordinator ``prepare_global_plan``, and on all ranks ``read_data``. Every rank looks for itself, since DCP has it
plan for itself; which commit is read the coordinator says, so that a commit that lands meanwhile
cannot set ranks apart.
"""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as Interface
from torch.futures import Future

from ftckpt.attempts import choose, find_run, look
from ftckpt.bounds import require_number
from ftckpt.boxes import Box, whole
from ftckpt.capture import as_bytes_view, place
from ftckpt.capture.tensors import can_fill, dtype_name, fresh_tensor
from ftckpt.errors import (
    ForeignUnsafe,
    FtckptError,
    RecordCorrupt,
    RestoreIncomplete,
    SettingsError,
    StateMismatch,
)
from ftckpt.events import Events, to_logging
from ftckpt.interop.dcp.forms import as_given, in_dcp_form
from ftckpt.interop.dcp.names import (
    Contents,
    Kept,
    component_of,
    contents_of,
    metadata_of,
    says_itself,
)
from ftckpt.interop.dcp.steps import SUMMARY, step_of
from ftckpt.layout import parse_writer
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import MAX_STEP, Commit, Fragment, FragmentRef, Position, Ref
from ftckpt.memory import require_memory
from ftckpt.plan.restore import Fetch, Placement, index_chunks, packs_of, plan_restore
from ftckpt.reader import (
    DEFAULT,
    Place,
    ReadSettings,
    check_packs,
    fetch,
    leaf_specs,
    read_fragment,
    read_fragments,
    read_values,
)
from ftckpt.restoring import read_ref
from ftckpt.store import LocalStore, open_store
from ftckpt.store.api import ObjectStore
from ftckpt.store.nearest import NearestStore
from ftckpt.values import unpack


@dataclass(frozen=True, slots=True)
class _Opened:
    """A commit, and what it holds for DCP."""

    ref: Ref
    commit: Commit
    contents: Contents


@dataclass(slots=True)
class _Filling:
    """What one load reads: boxes of leaves into memory, and what is done once all of it is there."""

    tensors: list[tuple[ReadItem, torch.Tensor]] = field(default_factory=list)
    """What is asked for, and what the planner gave to be filled."""
    wants: list[tuple[LeafSpec, Box]] = field(default_factory=list)
    """Of each of ``tensors``."""
    memory: list[torch.Tensor] = field(default_factory=list)
    """Where each of ``tensors`` is read to: into what the planner gave, or beside it where that cannot be."""
    kept: list[tuple[ReadItem, Kept, LeafSpec]] = field(default_factory=list)
    plain: list[ReadItem] = field(default_factory=list)

    @property
    def wants_kept(self) -> list[tuple[LeafSpec, Box]]:
        """The whole leaves of what is no tensor."""
        return [(spec, whole(spec.shape)) for _, _, spec in self.kept]

    def is_beside(self, number: int) -> bool:
        """Whether a tensor has yet to be copied to where the planner wants it."""
        return self.memory[number] is not self.tensors[number][1]


class StorageReader(Interface):
    """Loads of ``torch.distributed.checkpoint`` from the run at ``uri``.

    Reads what ``StorageWriter`` saved, under the keys it was saved with, and what a ``ftckpt.Session``
    saved, under its names of leaves. Any layout into any other: each rank fetches only chunks that hold what
    it wants, and each is verified before a byte of it is used.

    Args:
        uri: a folder or bucket address; see ``ftckpt.store.open_store``.
        step: which step; the newest if left out. ``checkpoint_id`` says so as well.
        cast: convert tensors that were saved with another dtype, as DCP does in silence; else refused.
        tiers: folders of this machine that are asked first for fragments and packs; what is to be read, the run
            says.
        allow_pickle: give the planner what was kept as a pickle (``StorageWriter(allow_pickle=True)``), which torch
            then unpickles: that runs whatever lies in the store. Else such a load is refused.
        store_options: settings of the store; ``AWS_*`` variables otherwise.

    Errors reach all ranks as DCP's ``CheckpointException``, whose ``failures`` hold the error itself.
    """

    def __init__(
        self,
        uri: str | os.PathLike[str],
        step: int | None = None,
        *,
        cast: bool = False,
        tiers: Sequence[str | os.PathLike[str]] = (),
        allow_pickle: bool = False,
        settings: ReadSettings = DEFAULT,
        store_options: Mapping[str, object] | None = None,
        events: Events = to_logging,
    ) -> None:
        super().__init__()
        require_number("step", step, low=0, high=MAX_STEP, whole=True, optional=True)
        self._uri = os.fspath(uri)
        self._step = step
        self._asked: int | None = None
        self._cast = cast
        self._tiers = tuple(os.fspath(tier) for tier in tiers)
        self._allow_pickle = allow_pickle
        self._settings = settings
        self._store_options = dict(store_options or {})
        self._events = events
        self._opened: _Opened | None = None

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
        """The next load is of that step; those after it are of the reader's own again."""
        self._opened = None
        self._asked = None if checkpoint_id is None else step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """What the step holds, by key.

        Raises:
            RunNotFound, NoCommit, StepNotFound: nothing to read.
            CorruptError, StoreError: it could not be read.
        """
        step = self._step if self._asked is None else self._asked
        self._asked = None  # DCP resets nothing before a load that names no step
        with self._stores() as (far, nearest):
            find_run(far)
            ref = choose(look(far), far.uri, step)
            self._opened = opened = _open(far, nearest, ref, self._settings)
            where = {"uri": far.uri, "step": ref.step, "attempt": ref.attempt}
            return metadata_of(opened.contents, where)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing is set up: what ``read_metadata`` found is remembered."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is: it asks for parts of whole tensors, whatever commit they come from."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: all ranks read the commit that it found."""
        assert self._opened is not None, "DCP asks for the metadata first"
        return [replace(plan, storage_data=self._opened.ref) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan asks for. Values first, so that they are known to be whole when the first tensor is
        overwritten; they are given to the planner last.

        Raises:
            StateMismatch: a dtype differs, or the commit lacks what this rank asks for. Nothing was changed.
            ForeignUnsafe: it asks for what is kept as a pickle, and that was not allowed. Nothing was changed.
            NotEnoughMemory: its values take more than there is. Nothing was changed.
            ObjectDamaged, RecordCorrupt: something it needs is absent or damaged. Nothing was changed.
            RestoreIncomplete: it failed after it had begun to overwrite what it names.
        """
        with self._stores() as (far, nearest):
            opened, ref = self._opened, plan.storage_data
            if opened is None or opened.ref != ref:
                opened = self._opened = _open(far, nearest, ref, self._settings)
            filling = self._filling(plan.items, planner, opened)
            of_tensors, of_kept = _fetches(nearest, opened, filling)
            given = self._given(nearest, opened, filling, of_kept)
            with _overwriting(ref.at) as begun:
                self._fill(nearest, ref.at, filling, of_tensors, begun)
                for number, (item, target) in enumerate(filling.tensors):
                    begun.add(item.storage_index.fqn)
                    if filling.is_beside(number):
                        target.copy_(filling.memory[number])
                    planner.commit_tensor(item, target)
                for item, stream in given:
                    begun.add(item.storage_index.fqn)
                    planner.load_bytes(item, stream)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # --- how ----------------------------------------------------------------------------------------

    @contextmanager
    def _stores(self) -> Iterator[tuple[ObjectStore, ObjectStore]]:
        """The run, which says what is to be read; and it with its tiers, for what the reader can prove."""
        far = open_store(self._uri, options=self._store_options, allow_unconditional=True)
        try:
            near = [LocalStore(tier) for tier in self._tiers if tier != self._uri]
            yield far, NearestStore([*near, far], self._events)
        finally:
            far.close()

    def _filling(self, items: Sequence[ReadItem], planner: LoadPlanner, opened: _Opened) -> _Filling:
        filling, contents = _Filling(), opened.contents
        differing: list[str] = []
        for item in items:
            key = item.storage_index.fqn
            spec = contents.spec(key)
            if item.type == LoadItemType.BYTE_IO:
                if key in contents.kept:
                    assert spec is not None
                    if contents.kept[key].form == "given" and not self._allow_pickle:
                        raise _pickled(key, opened.ref)
                    filling.kept.append((item, contents.kept[key], spec))
                elif key in contents.plain:
                    filling.plain.append(item)
                else:
                    raise _misfit(key, "no plain value was saved", opened.ref)
                continue
            if spec is None or key not in contents.tensors:
                raise _misfit(key, "no tensor was saved", opened.ref)
            target = planner.resolve_tensor(item).detach()
            box = _box(item, spec, opened.ref)
            if tuple(target.shape) != box.extent:
                what = f"the planner gave {list(target.shape)} for {list(box.extent)}"
                raise _misfit(key, what, opened.ref)
            saved = dtype_name(target.dtype) == spec.dtype
            if not saved and not self._cast:
                differing.append(f"{key}: saved {spec.dtype}, asked for as {dtype_name(target.dtype)}")
                continue
            in_place = saved and can_fill(target)
            filling.tensors.append((item, target))
            filling.wants.append((spec, box))
            filling.memory.append(target if in_place else fresh_tensor(box.extent, spec.dtype))
        if differing:
            shown = "".join(f"  {line}\n" for line in differing[:12])
            raise StateMismatch(
                f"StateMismatch: {len(differing)} tensors of {opened.ref.at} were saved with another dtype\n{shown}"
                "  nothing was changed; load into tensors of that dtype, or convert with StorageReader(uri, cast=True)",
                changed=tuple(differing),
            )
        return filling

    def _given(
        self, store: ObjectStore, opened: _Opened, filling: _Filling, fetches: Sequence[Fetch]
    ) -> list[tuple[ReadItem, io.BytesIO]]:
        """What the planner gets of everything that is no tensor."""
        wants = filling.wants_kept
        require_memory(sum(kept.size_bytes for _, kept, _ in filling.kept), "what is no tensor of the step")
        memory = [fresh_tensor(spec.shape, spec.dtype) for spec, _ in wants]
        fetch(store, fetches, _placing(wants, memory), opened.ref.at, self._settings)
        given = [
            (item, as_given(kept.form, bytes(as_bytes_view(body)), kept.position))
            for (item, kept, _), body in zip(filling.kept, memory, strict=True)
        ]
        plain = opened.contents.plain
        return given + [(item, in_dcp_form(plain[item.storage_index.fqn])) for item in filling.plain]

    def _fill(
        self, store: ObjectStore, at: Position, filling: _Filling, fetches: Sequence[Fetch], begun: set[str]
    ) -> None:
        """Read tensors; ``begun`` gets the key of each before a byte of it changes."""
        lock = threading.Lock()
        put = _placing(filling.wants, filling.memory)

        def begin(placement: Placement, raw: memoryview) -> None:
            if not filling.is_beside(placement.want):
                with lock:
                    begun.add(filling.tensors[placement.want][0].storage_index.fqn)
            put(placement, raw)

        fetch(store, fetches, begin, at, self._settings)


@contextmanager
def _overwriting(at: Position) -> Iterator[set[str]]:
    """A place for the keys that are begun to be overwritten. Whatever fails from then on leaves them in parts,
    and says so.
    """
    begun: set[str] = set()
    try:
        yield begun
    except Exception as error:
        if not begun:
            raise
        shown = ", ".join(sorted(begun)[:8]) + (" …" if len(begun) > 8 else "")
        why = str(error) if isinstance(error, FtckptError) else f"{type(error).__name__}: {error}"
        raise RestoreIncomplete(
            f"RestoreIncomplete: loading {at} failed after it had begun to overwrite {shown}\n  {why}\n"
            "  what was being loaded must not be used\n"
            "  the store is unchanged: load again, or an older step",
            components=tuple(sorted(set(map(component_of, begun)))),
            step=at.step,
        ) from error


def _fetches(
    store: ObjectStore, opened: _Opened, filling: _Filling
) -> tuple[Sequence[Fetch], Sequence[Fetch]]:
    """What to fetch for tensors, and for everything else. All of it is there, at its size."""
    wants, kept = filling.wants, filling.wants_kept
    fragments = read_fragments(store, opened.commit, [*wants, *kept])
    _check_specs(fragments, [*wants, *kept])
    index = index_chunks(fragments, {leaf.name for leaf, _ in (*wants, *kept)})
    plans = plan_restore(wants, index), plan_restore(kept, index)
    check_packs(store, packs_of([*plans[0], *plans[1]]), opened.ref.at)
    return plans


def _placing(wants: Sequence[tuple[LeafSpec, Box]], memory: Sequence[torch.Tensor]) -> Place:
    """Puts verified bytes to where they are wanted."""

    def put(placement: Placement, raw: memoryview) -> None:
        leaf, box = wants[placement.want]
        piece = raw[placement.first_byte :][: placement.piece.numel * leaf.itemsize_bytes]
        place(memory[placement.want], box, placement.piece, placement.region, piece, leaf.dtype)

    return put


def _open(far: ObjectStore, nearest: ObjectStore, ref: Ref, settings: ReadSettings) -> _Opened:
    """The commit, as the run has it, and what it holds. A step that DCP saved says that in one fragment; of
    others all are read.
    """
    commit = read_ref(far, ref)
    summaries = [one for one in commit.fragments if _is_summary(one)]
    fragments = [read_fragment(nearest, one, ref.at) for one in summaries]
    trees = _trees(nearest, fragments, ref, settings)
    if not says_itself(trees):
        fragments = read_fragments(nearest, commit)
        trees = _trees(nearest, fragments, ref, settings)
    return _Opened(ref, commit, contents_of(trees, leaf_specs(fragments)))


def _is_summary(ref: FragmentRef) -> bool:
    writer = parse_writer(ref.key)
    return writer is not None and writer.group == SUMMARY


def _trees(
    store: ObjectStore, fragments: Sequence[Fragment], ref: Ref, settings: ReadSettings
) -> dict[str, Any]:
    return {name: unpack(data) for name, data in read_values(store, fragments, ref.at, settings).items()}


def _check_specs(fragments: Sequence[Fragment], wants: Sequence[tuple[LeafSpec, Box]]) -> None:
    """The fragments say the same of the wanted leaves as the step's own list of them."""
    found = leaf_specs(fragments)
    for leaf, _ in wants:
        if found.get(leaf.name, leaf) != leaf:
            raise RecordCorrupt(
                f"RecordCorrupt: the fragments have {found[leaf.name]}, the step lists {leaf}\n"
                "  nothing was changed; another step may be intact",
                leaf=leaf.name,
            )


def _box(item: ReadItem, spec: LeafSpec, ref: Ref) -> Box:
    """The part of the whole tensor that an item asks for."""
    begin = item.storage_index.offset or (0,) * len(item.storage_offsets)
    offset = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
    box = Box(offset, tuple(item.lengths))
    if not box.inside(spec.shape):
        raise _misfit(item.storage_index.fqn, f"{list(spec.shape)} saved, {box} asked for", ref)
    return box


def _misfit(key: str, what: str, ref: Ref) -> StateMismatch:
    return StateMismatch(
        f"StateMismatch: {key} of {ref.at}: {what}\n"
        "  nothing was changed; if the run is being written, give a step so that all ranks look at the same one",
        leaf=key,
        step=ref.step,
    )


def _pickled(key: str, ref: Ref) -> ForeignUnsafe:
    return ForeignUnsafe(
        f"ForeignUnsafe: {key} of {ref.at} was kept as DCP's planner gave it, a pickle: to load it is to run it\n"
        "  nothing was run and nothing was changed; load without that key, or, if all who may write to the store "
        "are trusted, with StorageReader(uri, allow_pickle=True)",
        named=key,
        step=ref.step,
    )
