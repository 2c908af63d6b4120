"""A run opened for reading: no process group, no trainer, nothing is ever written.

``commits`` and ``latest`` follow the lineage; ``verify`` reads every byte; ``tensor``, ``tensors``, ``array``
and ``value`` fetch only what they need. torch is loaded when a tensor is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import xxhash

from ftckpt import layout
from ftckpt.attempts import Look, choose, find_run, look, read_claim, read_start
from ftckpt.bounds import require_address, require_flag, require_options
from ftckpt.boxes import Box, whole
from ftckpt.contents import Contents, contents
from ftckpt.errors import CorruptError, ObjectDamaged, ObjectNotFound, StateMismatch, StoreError
from ftckpt.events import Events, to_logging
from ftckpt.inventory import Part, take_inventory
from ftckpt.leaf import LeafSpec, is_in
from ftckpt.lineage import orphans
from ftckpt.manifest import (
    Claim,
    Commit,
    ComponentSummary,
    Fragment,
    Intent,
    OwnRecord,
    PackRef,
    Pin,
    Position,
    RunRecord,
    Saving,
    Staging,
    Start,
    Tombstone,
    decode,
)
from ftckpt.plan.asked import Rename, asked
from ftckpt.plan.restore import Placement, index_chunks, packs_of, plan_restore
from ftckpt.reader import (
    DEFAULT,
    Progress,
    ReadSettings,
    check_packs,
    fetch,
    leaf_specs,
    read_fragments,
    verify_commit,
)
from ftckpt.store import open_store
from ftckpt.store.api import ByteRange, ObjectStore
from ftckpt.values import unpack

if TYPE_CHECKING:
    import tensorstore
    import torch

    from ftckpt.restoring import Restored

Status = Literal["readable", "damaged", "aborted", "orphan", "collected"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of ``ls``: a position, what became of it, and the record if it reads."""

    at: Position
    status: Status
    commit: Commit | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something ``verify`` found wrong: which object, which step needs it, and what it is."""

    key: str
    step: int | None
    error: CorruptError | StoreError


class Run:
    """A run at an address. Use as a context, or ``close`` it."""

    def __init__(self, store: ObjectStore, settings: ReadSettings = DEFAULT) -> None:
        self._store = store
        self._settings = settings
        find_run(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the store."""
        self._store.close()

    @property
    def uri(self) -> str:
        """The run's address, without credentials."""
        return self._store.uri

    @property
    def store(self) -> ObjectStore:
        """The store it is read from."""
        return self._store

    def look(self) -> Look:
        """One fresh look at claims, starts and commits."""
        return look(self._store)

    def commits(self) -> list[Commit]:
        """Readable commits on the lineage, newest first. A damaged one raises ``CorruptError``."""
        seen = self.look()
        for at in seen.lineage:
            if at in seen.damaged:
                raise seen.damaged[at]
        return [seen.commits[at] for at in seen.lineage]

    def latest(self) -> Commit:
        """The newest commit of the lineage. Raises ``NoCommit``."""
        return self.commit(None)

    def commit(self, step: int | None) -> Commit:
        """The commit of a step, or the newest. Raises ``NoCommit``, ``StepNotFound``, ``CorruptError``."""
        seen = self.look()
        return seen.commits[choose(seen, self.uri, step).at]

    def entries(self) -> list[Entry]:
        """Everything that was ever committed, given up or collected, newest first."""
        seen = self.look()
        off = set(orphans(seen.view))
        lines = []
        for at in sorted(seen.view.commits, reverse=True):
            commit = seen.commits.get(at)
            if at in seen.view.collected:
                lines.append(Entry(at, "collected", None))
            elif at in seen.damaged:
                lines.append(Entry(at, "damaged", None, seen.damaged[at].message.splitlines()[0]))
            elif commit is not None and commit.aborted:
                lines.append(Entry(at, "aborted", commit, commit.aborted))
            else:
                lines.append(Entry(at, "orphan" if at in off else "readable", commit))
        return lines

    def attempts(self) -> list[tuple[Claim, Start | None]]:
        """Every claimed attempt and, if it began, its start; oldest first."""
        seen = self.look()
        return [
            (read_claim(self._store, n), read_start(self._store, n) if n in seen.view.starts else None)
            for n in sorted(seen.view.claims)
        ]

    def leaves(self, step: int | None = None) -> dict[str, LeafSpec]:
        """Every leaf of a step by name."""
        return leaf_specs(read_fragments(self._store, self.commit(step)))

    def components(self, step: int | None = None) -> Mapping[str, ComponentSummary]:
        """Components of a step with their leaves and bytes."""
        return self.commit(step).components

    def inventory(self, step: int | None = None) -> Mapping[str, Part]:
        """Components of a step with their bytes by codec, their chains, and what they reuse."""
        commit = self.commit(step)
        return take_inventory(commit.at, read_fragments(self._store, commit))

    def value(self, component: str, step: int | None = None) -> object:
        """The plain values of a component: its structure, with ``TensorRef`` where tensors are.

        Raises ``StateMismatch`` naming what there is when there is no such component.
        """
        commit = self.commit(step)
        saved = contents(self._store, commit, self._settings)
        if component not in saved.values:
            raise StateMismatch(
                f"StateMismatch: step {commit.step} has no component {component!r}\n"
                f"  it has: {', '.join(sorted(saved.values))}",
                step=commit.step,
            )
        return unpack(saved.packed([component])[component])

    def tensor(self, leaf: str, step: int | None = None, box: Box | None = None) -> torch.Tensor:
        """One tensor, or the part of it in ``box``, verified; fetches only chunks that overlap."""
        from ftckpt.capture import place
        from ftckpt.capture.tensors import fresh_tensor

        commit = self.commit(step)
        saved = contents(self._store, commit, self._settings)
        spec = _tensor_spec(saved, leaf)
        box = box or whole(spec.shape)
        wants = [(spec, box)]
        fetches = plan_restore(wants, index_chunks(saved.fragments(wants), {leaf}))
        check_packs(self._store, packs_of(fetches), commit.at)
        result = fresh_tensor(box.extent, spec.dtype)

        def put(placement: Placement, raw: memoryview) -> None:
            piece = raw[placement.first_byte :][: placement.piece.numel * spec.itemsize_bytes]
            place(result, box, placement.piece, placement.region, piece, spec.dtype)

        fetch(self._store, fetches, put, commit.at, self._settings)
        return result

    def array(self, leaf: str, step: int | None = None) -> tensorstore.TensorStore:
        """A tensor as a lazy array: slice it with any step, then ``read().result()`` or ``numpy.asarray``.

        Nothing but records is read before; then only chunks that a slice overlaps, each verified, with a
        bounded number of them in memory beside the slice. The step is chosen now, and stays.

        Raises ``ExtraMissing`` without TensorStore, ``UnsupportedValue`` for a dtype that it does not know.
        What fails while a slice is read is raised by TensorStore as its own error, with our text in it.
        """
        from ftckpt.arrays import open_array

        commit = self.commit(step)
        saved = contents(self._store, commit, self._settings)
        spec = _tensor_spec(saved, leaf)
        fragments = saved.fragments([(spec, whole(spec.shape))])
        return open_array(self._store, commit.at, fragments, spec, self._settings)

    def tensors(
        self, names: str | Iterable[str] | None = None, step: int | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors, read and verified as they are asked for: a bounded number ahead, so that a
        step may be larger than memory. ``dict(run.tensors("actor"))`` keeps them all.

        ``names``: of tensors, or of what they are in (``actor``, ``actor.layers.0``); ``None``: all. Raises
        ``StateMismatch`` at once when one of them names no tensor of the step.
        """
        from ftckpt.arrays import stream

        commit = self.commit(step)
        saved = contents(self._store, commit, self._settings)
        asked = None if names is None else [names] if isinstance(names, str) else list(names)
        saved.know({own.owner for own in commit.own if _may_own(own, asked)})
        specs = [spec for spec in saved.specs.values() if spec.kind == "tensor"]
        if asked is not None:
            chosen: dict[str, LeafSpec] = {}
            for name in asked:
                found = {spec.name: spec for spec in specs if is_in(spec.name, name)}
                if not found:
                    raise _no_tensor(commit, name, [spec.name for spec in specs])
                chosen |= found
            specs = list(chosen.values())
        fragments = saved.fragments([(spec, whole(spec.shape)) for spec in specs])
        return stream(self._store, commit.at, fragments, specs, self._settings)

    def verify(self, step: int | None = None, progress: Progress | None = None) -> list[Problem]:
        """Read and check every record and every byte that a readable commit needs; of one step, or
        of all. Returns what is wrong; empty: nothing.
        """
        problems = list(self._verify_records()) if step is None else []
        try:
            seen = self.look()
        except CorruptError as error:
            if any(problem.key == error.facts.get("key") for problem in problems):
                return problems  # a damaged start: without it nobody knows which commits count
            raise
        chosen = seen.view.readable if step is None else {choose(seen, self.uri, step).at}
        for at in sorted(chosen):
            commit = seen.commits.get(at)
            if commit is not None:
                problems.extend(
                    Problem(str(error.facts.get("pack") or error.facts.get("key", "")), at.step, error)
                    for error in verify_commit(self._store, commit, self._settings, progress)
                )
        if step is None:
            problems += self._verify_rest(seen, {problem.key for problem in problems})
        return problems

    def _verify_rest(self, seen: Look, known: set[str]) -> Iterator[Problem]:
        """What no chunk of a readable commit needs: starts and claims that are gone, and bytes of
        packs that only collected steps used.
        """
        for attempt in sorted({at.attempt for at in seen.view.readable} - set(seen.view.starts)):
            yield _damaged(
                layout.start_key(attempt), f"attempt {attempt} has commits, and its start is absent"
            )
        for attempt in sorted(set(seen.view.starts) - seen.view.claims):
            yield _damaged(layout.claim_key(attempt), f"attempt {attempt} began, and its claim is absent")
        for commit in (seen.commits[at] for at in sorted(seen.view.readable) if at in seen.commits):
            found = seen.refs.get(commit.parent.at) if commit.parent is not None else None
            if found is not None and found != commit.parent:
                key = layout.commit_key(commit.at)
                yield _damaged(key, f"{key} goes on from another {found.at} than that which is here")
        packs: dict[str, PackRef] = {}
        needed: dict[str, set[tuple[int, int]]] = {}
        for commit in (seen.commits[at] for at in seen.view.readable if at in seen.commits):
            try:
                fragments = read_fragments(self._store, commit)
            except (CorruptError, StoreError):
                continue  # told of already
            packs.update((pack.key, pack) for fragment in fragments for pack in fragment.packs)
            for spans in index_chunks(fragments).values():
                for saved in spans:
                    for key, chunk in ((saved.pack, saved.chunk), *((b.pack, b.chunk) for b in saved.bases)):
                        needed.setdefault(key, set()).add((chunk.offset, chunk.size))
        for key, pack in sorted(packs.items()):
            whole_pack = sum(size for _, size in needed.get(key, ())) >= pack.size
            if whole_pack or key in known or not pack.digest:
                continue
            problem = self._verify_pack(pack)
            if problem is not None:
                yield problem

    def _verify_pack(self, pack: PackRef) -> Problem | None:
        digest = xxhash.xxh3_128()
        try:
            for start in range(0, pack.size, self._settings.run_bytes):
                stop = min(start + self._settings.run_bytes, pack.size)
                digest.update(self._store.read(pack.key, ByteRange(start, stop)))
        except StoreError as error:
            return Problem(pack.key, None, error)
        if digest.digest() == pack.digest:
            return None
        return _damaged(pack.key, f"{pack.key} has changed where no readable step needs it")

    def _verify_records(self) -> Iterator[Problem]:
        kinds: tuple[tuple[str, Any], ...] = (
            (layout.ATTEMPTS, Claim),
            (layout.STARTS, Start),
            (layout.COMMITS, Commit),
            (layout.COLLECTED, Tombstone),
            (layout.FRAGMENTS, Fragment),
            (layout.PINS, Pin),
            (layout.GC, Intent),
            (layout.SAVES, Saving),
            (layout.STAGED, Staging),
        )
        keys: list[tuple[str, Any]] = [(layout.RUN, RunRecord)]
        keys += [(info.key, kind) for prefix, kind in kinds for info in self._store.scan(prefix)]
        for key, kind in keys:
            try:
                decode(kind, bytes(self._store.read(key)), key)
            except ObjectNotFound:
                continue
            except CorruptError as error:
                where = layout.parse_commit(key) or layout.parse_position(key)
                yield Problem(key, where.step if where else None, error)

    def restore(
        self,
        state: Mapping[str, object],
        step: int | None = None,
        *,
        only: str | Iterable[str] | None = None,
        rename: Rename | None = None,
        dtype: object = None,
        strict: bool = True,
        events: Events = to_logging,
    ) -> Restored:
        """Overwrite the components given in ``state``; see ``ftckpt.restore``."""
        from ftckpt.jointly import restore_chosen

        wish = asked(only=only, rename=rename, dtype=dtype, strict=strict)
        return restore_chosen(
            self._store,
            lambda: self.commit(step),
            state,
            asked=wish,
            settings=self._settings,
            events=events,
        )


def _tensor_spec(saved: Contents, leaf: str) -> LeafSpec:
    owner = leaf.rpartition("@")[2]
    if owner != leaf:
        saved.know({owner})
    spec = saved.specs.get(leaf)
    if spec is None or spec.kind != "tensor":
        raise _no_tensor(saved.commit, leaf, list(saved.specs))
    return spec


def _may_own(own: OwnRecord, names: Sequence[str] | None) -> bool:
    """Whether one of these names may be, or have in it, a tensor that is this owner's own."""
    if names is None:
        return True
    for name in names:
        path, _, owner = name.partition("@")
        if owner in ("", own.owner) and any(is_in(path, one) or is_in(one, path) for one in own.values):
            return True
    return False


def _no_tensor(commit: Commit, leaf: str, names: Sequence[str]) -> StateMismatch:
    near = [name for name in names if leaf.rpartition(".")[2] in name][:8]
    return StateMismatch(
        f"StateMismatch: step {commit.step} has no tensor {leaf!r}\n"
        f"  similar names: {', '.join(near) or 'none'}; `ftckpt show RUN --leaves` lists all",
        step=commit.step,
        leaf=leaf,
    )


def _damaged(key: str, what: str) -> Problem:
    return Problem(key, None, ObjectDamaged(f"ObjectDamaged: {what}", key=key))


def open_run(
    uri: str, *, store_options: Mapping[str, object] | None = None, allow_unconditional: bool = True
) -> Run:
    """Open a run for reading.

    Raises:
        RunNotFound: the address holds none.
        SettingsError: an argument that has no meaning. Nothing was read.
    """
    require_address("uri", uri)
    require_options(store_options)
    require_flag("allow_unconditional", allow_unconditional)
    return Run(open_store(uri, options=store_options, allow_unconditional=allow_unconditional))
