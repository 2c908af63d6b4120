"""``StorageReader``: DCP's loads from a step of a run, whoever saved it.

DCP calls, on all ranks: ``read_metadata``, ``set_up_storage_reader``, ``prepare_local_plan``, then on the
coordinator ``prepare_global_plan``, and on all ranks ``read_data``. Every rank looks for itself, since DCP has it
plan for itself; which commit is read the coordinator says, so that a commit that lands meanwhile
cannot set ranks apart.
"""

from __future__ import annotations

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
from ftckpt.commit import read_commit
from ftckpt.errors import ObjectDamaged, RecordCorrupt, RestoreIncomplete, SettingsError, StateMismatch
from ftckpt.events import Events, to_logging
from ftckpt.interop.dcp.forms import as_given, in_dcp_form
from ftckpt.interop.dcp.names import INTERNAL, Contents, Kept, component_of, contents_of, metadata_of
from ftckpt.interop.dcp.steps import SUMMARY, step_of
from ftckpt.layout import commit_key, parse_writer
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import MAX_STEP, Commit, Fragment, FragmentRef, Ref
from ftckpt.plan.restore import Placement, index_chunks, packs_of, plan_restore
from ftckpt.reader import (
    DEFAULT,
    ReadSettings,
    check_packs,
    fetch,
    leaf_specs,
    read_fragment,
    read_fragments,
    read_values,
)
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

    wants: list[tuple[LeafSpec, Box]] = field(default_factory=list)
    memory: list[torch.Tensor] = field(default_factory=list)
    casts: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """Where to copy from, and into what, because it could not be read in place."""
    tensors: list[tuple[ReadItem, torch.Tensor]] = field(default_factory=list)
    kept: list[tuple[ReadItem, Kept, torch.Tensor]] = field(default_factory=list)
    plain: list[ReadItem] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    """Wants that are read straight into what the planner gave."""

    def want(self, spec: LeafSpec, box: Box, memory: torch.Tensor, *, live: bool = False) -> None:
        if live:
            self.live.add(len(self.wants))
        self.wants.append((spec, box))
        self.memory.append(memory)


class StorageReader(Interface):
    """Loads of ``torch.distributed.checkpoint`` from the run at ``uri``.

    Reads what ``StorageWriter`` saved, under the keys it was saved with, and what a ``ftckpt.Session``
    saved, under its names of leaves. Any layout into any other: each rank fetches only chunks that hold what
    it wants, and each is verified before a byte of it is used.

    Args:
        uri: a folder or bucket address; see ``ftckpt.store.open_store``.
        step: which step; the newest if left out. ``checkpoint_id`` says so as well.
        cast: convert tensors that were saved with another dtype, as DCP does in silence; else refused.
        tiers: folders of this machine that are asked first for packs.
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
        settings: ReadSettings = DEFAULT,
        store_options: Mapping[str, object] | None = None,
        events: Events = to_logging,
    ) -> None:
        super().__init__()
        require_number("step", step, low=0, high=MAX_STEP, whole=True, optional=True)
        self._uri = os.fspath(uri)
        self._step = step
        self._cast = cast
        self._tiers = tuple(os.fspath(tier) for tier in tiers)
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
        """The next load is of that step."""
        self._opened = None
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """What the step holds, by key.

        Raises:
            RunNotFound, NoCommit, StepNotFound: nothing to read.
            CorruptError, StoreError: it could not be read.
        """
        with self._store() as store:
            find_run(store)
            ref = choose(look(store), store.uri, self._step)
            self._opened = opened = _open(store, ref, self._settings)
            where = {"uri": store.uri, "step": ref.step, "attempt": ref.attempt}
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
        """Read what the plan asks for. Tensors first; values when every byte was read.

        Raises:
            StateMismatch: a dtype differs, or the commit lacks what this rank asks for. Nothing was changed.
            ObjectDamaged, RecordCorrupt: something it needs is absent or damaged. Nothing was changed.
            RestoreIncomplete: it failed after it had begun to overwrite tensors, which it names.
        """
        with self._store() as store:
            opened, ref = self._opened, plan.storage_data
            if opened is None or opened.ref != ref:
                opened = self._opened = _open(store, ref, self._settings)
            filling = self._filling(plan.items, planner, opened)
            self._read(store, opened, filling)
        for source, target in filling.casts:
            target.copy_(source)
        for item, target in filling.tensors:
            planner.commit_tensor(item, target)
        for item, kept, memory in filling.kept:
            planner.load_bytes(item, as_given(kept.form, bytes(as_bytes_view(memory)), kept.position))
        for item in filling.plain:
            planner.load_bytes(item, in_dcp_form(opened.contents.plain[item.storage_index.fqn]))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    # --- how ----------------------------------------------------------------------------------------

    @contextmanager
    def _store(self) -> Iterator[ObjectStore]:
        far = open_store(self._uri, options=self._store_options, allow_unconditional=True)
        try:
            near = [LocalStore(tier) for tier in self._tiers if tier != self._uri]
            yield NearestStore([*near, far], self._events)
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
                    memory = fresh_tensor(spec.shape, spec.dtype)
                    filling.want(spec, whole(spec.shape), memory)
                    filling.kept.append((item, contents.kept[key], memory))
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
            if saved and can_fill(target):
                filling.want(spec, box, target, live=True)
            else:
                memory = fresh_tensor(box.extent, spec.dtype)
                filling.want(spec, box, memory)
                filling.casts.append((memory, target))
            filling.tensors.append((item, target))
        if differing:
            shown = "".join(f"  {line}\n" for line in differing[:12])
            raise StateMismatch(
                f"StateMismatch: {len(differing)} tensors of {opened.ref.at} were saved with another dtype\n{shown}"
                "  nothing was changed; load into tensors of that dtype, or convert with StorageReader(uri, cast=True)",
                changed=tuple(differing),
            )
        return filling

    def _read(self, store: ObjectStore, opened: _Opened, filling: _Filling) -> None:
        at, wants = opened.ref.at, filling.wants
        fragments = read_fragments(store, opened.commit, wants)
        _check_specs(fragments, wants)
        names = {leaf.name for leaf, _ in wants}
        fetches = plan_restore(wants, index_chunks(fragments, names))
        check_packs(store, packs_of(fetches), at)
        begun: set[str] = set()
        lock = threading.Lock()

        def put(placement: Placement, raw: memoryview) -> None:
            leaf, box = wants[placement.want]
            if placement.want in filling.live:
                with lock:
                    begun.add(leaf.name)
            piece = raw[placement.first_byte :][: placement.piece.numel * leaf.itemsize_bytes]
            place(filling.memory[placement.want], box, placement.piece, placement.region, piece, leaf.dtype)

        try:
            fetch(store, fetches, put, at, self._settings)
        except Exception as error:
            if not begun:
                raise
            shown = ", ".join(sorted(begun)[:8]) + (" …" if len(begun) > 8 else "")
            raise RestoreIncomplete(
                f"RestoreIncomplete: loading {at} failed after it had begun to overwrite {shown}\n  {error}\n"
                "  no plain value was loaded; what was being loaded must not be used\n"
                "  the store is unchanged: load again, or an older step",
                components=tuple(sorted({component_of(name) for name in begun})),
                step=at.step,
            ) from error


def _open(store: ObjectStore, ref: Ref, settings: ReadSettings) -> _Opened:
    """The commit, and what it holds. A step that DCP saved says that in one fragment; of others all are read."""
    found = read_commit(store, ref.at)
    if found is None or found[1] != ref:
        raise ObjectDamaged(
            f"ObjectDamaged: {commit_key(ref.at)} {'is absent' if found is None else 'is not the record that was chosen'}\n"
            "  nothing was changed; somebody collected it or replaced it: load again",
            key=commit_key(ref.at),
            step=ref.step,
        )
    commit = found[0]
    summaries = [one for one in commit.fragments if _is_summary(one)]
    fragments = [read_fragment(store, one, ref.at) for one in summaries]
    trees = _trees(store, fragments, ref, settings)
    if INTERNAL not in trees:
        fragments = read_fragments(store, commit)
        trees = _trees(store, fragments, ref, settings)
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
