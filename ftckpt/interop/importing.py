"""From a checkpoint of another format to a step of a new run.

Knows the run, names and kinds of components; refuses to know any format. The run comes about as every other
does: a claim, a start, packs, a fragment, a commit; ``run.json`` last, so that nothing is a run before it
is whole. Bytes are read chunk by chunk as the writer asks for them.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import xxhash

from ftckpt import layout, values
from ftckpt.attempts import Look, claim, create_owned, look, read_claim, start
from ftckpt.begin import versions
from ftckpt.boxes import whole
from ftckpt.clock import SystemClock
from ftckpt.commit import Expected, check_settled, put_fragment, settle
from ftckpt.errors import AttemptTaken, NotRepresentable, NotSameRun, ObjectNotFound, UnsupportedValue
from ftckpt.interop.api import Array, Progress, Source, equal
from ftckpt.interop.ties import is_input, is_output
from ftckpt.layout import Writer
from ftckpt.leaf import Holding, LeafSpec
from ftckpt.manifest import (
    FORMAT,
    ChunkRecord,
    Commit,
    PackRef,
    Position,
    ReplicaDigest,
    RunRecord,
    decode,
    encode,
)
from ftckpt.membership import alone
from ftckpt.plan.assign import ChunkTask, Place, plan_save
from ftckpt.plan.restore import index_chunks
from ftckpt.reader import leaf_specs, read_fragments, verify_commit
from ftckpt.store.api import Buffer, ObjectStore
from ftckpt.values import TensorRef
from ftckpt.writer import SaveJob, WriteSettings, fitted, write_share

ALONE = "model"
"""What a component is called whose name nobody gave."""

MAX_PACK_BYTES = 64 << 20
"""Fewer and smaller than a save's: nobody waits for an import, and memory is to be small."""

_RESERVED = ("rng", "ftckpt")
_OPTIMIZER = {"state", "param_groups"}


@dataclass(frozen=True, slots=True)
class Imported:
    """The new run's step, and what it holds: components with their kinds, tensors and their bytes."""

    step: int
    components: Mapping[str, str]
    tensors: int
    tensor_bytes: int


def import_checkpoint(
    source: Source,
    store: ObjectStore,
    *,
    origin: str,
    kind: str,
    component: str | None = None,
    step: int = 0,
    settings: WriteSettings | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Imported:
    """Make ``store`` a run whose step ``step`` is what ``source`` holds. Blocks until that is readable, and
    every byte of it was read back and proven.

    All of it becomes one component, if one is named; else each of the source's outermost names does, or, if
    tensors stand there, all of it is ``model``. The same import again completes one that was interrupted, or
    reads the source once more and finds that every byte of it is there.

    Raises:
        NotSameRun: there is another run, or what an import of other bytes left. It was left alone.
        ForeignError: the checkpoint cannot be read, or not be held by a run. Nothing is readable.
    """
    nonce = xxhash.xxh3_128_hexdigest(f"import {kind} {source.identity} {component} {step}".encode())
    done = _is_complete(store, nonce)
    laid = lay_out(source.tree, component, partial(equal, source))
    job_tensors = [leaf for leaf in laid.leaves if leaf.array is not None]
    result = Imported(
        step,
        laid.kinds,
        len(job_tensors),
        sum(leaf.holding.size_bytes for leaf in job_tensors),
    )
    if done:
        _check_same(store, source, laid, look(store), Position(step, 1), progress)
        return result
    mine = _claim(store, nonce, f"{kind} {origin}")
    start(store, mine, None, versions=versions())
    commit = _save(store, source, laid, Position(step, 1), origin, kind, settings, progress)
    for problem in verify_commit(store, commit):
        raise problem
    body = encode(RunRecord(format=FORMAT, run=nonce))
    if create_owned(store, layout.RUN, body) != body:
        raise _another(store, layout.RUN)
    return result


# --- the run --------------------------------------------------------------------------------------


def _is_complete(store: ObjectStore, nonce: str) -> bool:
    """Whether this very import ended here before. Otherwise nothing is there but what it left.

    Raises:
        NotSameRun: something else is there.
    """
    try:
        body = bytes(store.read(layout.RUN))
    except ObjectNotFound:
        pass
    else:
        if decode(RunRecord, body, layout.RUN).run != nonce:
            raise _another(store, layout.RUN)
        return True
    taken = [info.key for info in store.scan(layout.ATTEMPTS)]
    if taken and (taken != [layout.claim_key(1)] or read_claim(store, 1).nonce != nonce):
        raise _another(store, taken[0])
    if not taken and (other := next(store.scan(""), None)) is not None:
        raise _another(store, other.key)
    return False


def _another(store: ObjectStore, key: str) -> NotSameRun:
    return NotSameRun(
        f"NotSameRun: {store.uri} holds {key}, which is not of this import\n"
        "  it is another run, what another import left, or something else; it was left alone\n"
        "  give an address that holds nothing",
        uri=store.uri,
        key=key,
    )


def _claim(store: ObjectStore, nonce: str, origin: str) -> Any:
    try:
        return claim(
            store,
            attempt=1,
            nonce=nonce,
            host=socket.gethostname(),
            pid=os.getpid(),
            command=(),
            cwd="",
            groups=1,
            nproc=1,
            settings={"imported_from": origin},
        )
    except AttemptTaken as error:
        raise _another(store, layout.claim_key(1)) from error


def _save(
    store: ObjectStore,
    source: Source,
    laid: Laid,
    at: Position,
    origin: str,
    kind: str,
    settings: WriteSettings | None,
    progress: Progress,
) -> Commit:
    seen = look(store)
    if at in seen.commits and not seen.commits[at].aborted:  # an earlier try got that far
        return _check_same(store, source, laid, seen, at, progress)
    me = Writer("import", 0, uuid.uuid4().hex)
    membership = alone(me.group, me.incarnation)
    expected = Expected(at, None, membership.quorum_id, membership.digest(), (me,))
    content = _Content(source, laid.leaves, progress)
    why = (f"it was imported from {kind} at {origin}",)
    job = SaveJob(expected, content, guarantee="E4", why=why, left_out=("random number generators",))
    settings = settings or replace(
        fitted(WriteSettings(), os.cpu_count() or 1), packs_in_flight=3, max_pack_bytes=MAX_PACK_BYTES
    )
    fragment = write_share(store, job, expected, me, settings, {})
    put_fragment(store, fragment, me)
    record, _ = settle(store, SystemClock(), expected, me, fragment, settings.patience)
    check_settled(record)
    if layout.fragment_key(at, me) not in {ref.key for ref in record.fragments}:  # another was quicker
        return _check_same(store, source, laid, look(store), at, progress)
    return record


def _check_same(
    store: ObjectStore, source: Source, laid: Laid, seen: Look, at: Position, progress: Progress
) -> Commit:
    """The commit of an earlier try, once the source was read against it: no name, size or first bytes of a
    checkpoint say that it is the one that was read then.

    Raises:
        NotSameRun: it holds other bytes, or is no longer there.
    """
    if at in seen.damaged:
        raise seen.damaged[at]
    if at not in seen.commits or seen.commits[at].aborted:
        raise NotSameRun(
            f"NotSameRun: {store.uri} was imported from a checkpoint of that name and size, but its step "
            f"{at.step} is gone, so nothing says whether from this one\n  it was left alone; give an address "
            "that holds nothing",
            uri=store.uri,
            key=layout.commit_key(at),
        )
    fragments = read_fragments(store, seen.commits[at])
    specs, chunks = leaf_specs(fragments), index_chunks(fragments)
    names = [leaf.holding.leaf.name for leaf in laid.leaves]
    other = sorted(specs.keys() ^ set(names))
    total_bytes, done_bytes = sum(leaf.holding.size_bytes for leaf in laid.leaves), 0
    for name, leaf in zip(names, laid.leaves, strict=True) if not other else ():
        same = specs[name] == leaf.holding.leaf
        for saved in chunks[name] if same else ():
            raw = leaf.read(source, saved.chunk.start, saved.chunk.stop)
            same = same and xxhash.xxh3_128_digest(raw) == saved.chunk.raw
        if not same:
            other.append(name)
            break
        done_bytes += leaf.holding.size_bytes
        progress(done_bytes, total_bytes)
    if other:
        raise NotSameRun(
            f"NotSameRun: {store.uri} was imported from a checkpoint that differs from this one in {other[0]}\n"
            "  it was left alone; give an address that holds nothing",
            uri=store.uri,
            key=layout.commit_key(at),
            leaf=other[0],
        )
    return seen.commits[at]


class _Content:
    """The content of a source as the writer reads it: a snapshot that was never staged."""

    def __init__(self, source: Source, leaves: Sequence[Leaf], progress: Progress) -> None:
        self.holdings: Sequence[Holding] = tuple(leaf.holding for leaf in leaves)
        self.tasks: Sequence[ChunkTask] = plan_save(self.holdings, Place(0, 1, 0))
        self._source, self._leaves, self._progress = source, leaves, progress
        self._total_bytes = sum(holding.size_bytes for holding in self.holdings)
        self._done_bytes = 0

    def read(self, number: int) -> Buffer:
        task = self.tasks[number]
        return self._leaves[task.holding].read(self._source, task.start, task.stop)

    def release(self, number: int) -> None:
        task = self.tasks[number]
        itemsize = self.holdings[task.holding].leaf.itemsize_bytes
        self._done_bytes += (task.stop - task.start) * itemsize
        self._progress(self._done_bytes, self._total_bytes)

    def seen(self, number: int) -> None:
        """Nothing is known of its memory."""

    def written(self, number: int, chunk: ChunkRecord) -> None:
        pass

    def durable(self, pack: int, ref: PackRef) -> None:
        pass

    def replicas(self) -> tuple[ReplicaDigest, ...]:
        return ()

    def close(self) -> None:
        pass


# --- what stands where ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf of the new step: an array of the source, or packed values."""

    holding: Holding
    array: Array | None
    packed: bytes = b""

    def read(self, source: Source, start: int, stop: int) -> Buffer:
        """Its elements ``start`` to ``stop``."""
        if self.array is None:
            return memoryview(self.packed)[start:stop]
        return source.read(self.array, start, stop)


@dataclass(frozen=True, slots=True)
class Laid:
    """Everything that the step will hold, in the order in which the source is best read."""

    leaves: tuple[Leaf, ...]
    kinds: Mapping[str, str]


Same = Callable[[Array, Array], bool]


def never(_a: Array, _b: Array) -> bool:
    """No two arrays are one."""
    return False


def lay_out(tree: Any, component: str | None, same: Same = never) -> Laid:
    """Components, kinds and leaves for a source's tree. ``same`` says whether two arrays of a module that
    are called like word embeddings hold the same bytes; they become one leaf.

    Raises:
        NotRepresentable: a value, or a name, that a run cannot hold.
    """
    trees = _components(tree, component)
    modules = {name: part for name, part in trees.items() if _is_module(part)}
    leaves: list[Leaf] = []
    kinds: dict[str, str] = {}
    for name, part in trees.items():
        escaped = values.path_part(name)
        if name in modules:
            kinds[name], laid = "module", _module(escaped, part, leaves, _untwinned(part, same))
        elif (owner := _owner(part, modules)) is not None:
            kinds[name], laid = "optimizer", _optimizer(escaped, part, owner, leaves)
        else:
            kinds[name], laid = "tree", _nested(part, escaped, escaped, leaves)
        try:
            packed = values.pack({"kind": kinds[name], "tree": laid}, leaf=escaped)
        except UnsupportedValue as error:
            raise NotRepresentable(
                f"NotRepresentable: {error.message.splitlines()[0]}\n"
                "  nothing was written; a run holds tensors, numbers, text, bytes, lists and dicts",
                leaf=error.facts.get("leaf"),
            ) from error
        spec = LeafSpec(escaped, "value", "uint8", (len(packed),))
        leaves.append(Leaf(Holding(spec, whole(spec.shape), (0,)), None, packed))
    names = [leaf.holding.leaf.name for leaf in leaves]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise NotRepresentable(
            f"NotRepresentable: two things of the checkpoint would be the leaf {twice[0]}\n"
            "  nothing was written; rename one of them in the checkpoint",
            leaf=twice[0],
        )
    return Laid(tuple(leaves), kinds)


def _components(tree: Any, component: str | None) -> dict[str, Any]:
    if component is not None:
        found = {component: tree}
    elif isinstance(tree, Mapping) and _names_components(tree):
        found = dict(tree)
    else:
        found = {ALONE: tree}
    for name in found:
        if type(name) is not str or not name or name in _RESERVED:
            raise NotRepresentable(
                f"NotRepresentable: the checkpoint has {name!r} where components are named; that is no name of one\n"
                "  nothing was written; give all of it one name with --component",
            )
    return found


def _names_components(tree: Mapping[Any, Any]) -> bool:
    bare = any(isinstance(value, Array) for value in tree.values()) or set(tree) == _OPTIMIZER
    return bool(tree) and not bare


def _is_module(part: Any) -> bool:
    """Names and tensors, as a module's ``state_dict()``; and what modules add to it."""
    return (
        isinstance(part, Mapping)
        and any(isinstance(value, Array) for value in part.values())
        and all(
            type(key) is str and key and (isinstance(value, Array) or key.endswith("_extra_state"))
            for key, value in part.items()
        )
    )


def _untwinned(part: Mapping[str, Any], same: Same) -> dict[str, Array]:
    """The arrays of a module, word embeddings that are tied as one. Formats that do not know ties write such a
    tensor under each of its names. Other arrays that are equal are just that.
    """
    arrays = {key: value for key, value in part.items() if isinstance(value, Array)}
    found: dict[tuple[str, tuple[int, ...]], list[Array]] = {}
    for key, array in arrays.items():
        if not is_input(key) and not is_output(key):
            continue
        alike = found.setdefault((array.dtype, array.shape), [])
        twin = next((other for other in alike if other is array or same(other, array)), None)
        if twin is None:
            alike.append(array)
        else:
            arrays[key] = twin
    return arrays


def _module(
    component: str, part: Mapping[str, Any], leaves: list[Leaf], arrays: Mapping[str, Array]
) -> dict[str, Any]:
    known: dict[int, TensorRef] = {}
    tree: dict[str, Any] = {}
    for key, found in part.items():
        path = ".".join(values.path_part(one) for one in key.split("."))
        value = arrays.get(key, found)
        if isinstance(value, Array):
            if id(value) not in known:
                known[id(value)] = _tensor(f"{component}.{path}", value, leaves)
            tree[path] = known[id(value)]
        else:
            tree[path] = _nested(value, f"{component}.{path}", component, leaves)
    return tree


def _owner(part: Any, modules: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The component whose parameters an optimizer's state is of, if it is one by names and there is one."""
    if not isinstance(part, Mapping) or set(part) != _OPTIMIZER:
        return None
    groups, state = part["param_groups"], part["state"]
    if not isinstance(groups, list) or not isinstance(state, Mapping) or not groups:
        return None
    if not all(isinstance(group, Mapping) and isinstance(group.get("params"), list) for group in groups):
        return None
    names = {name for group in groups for name in group["params"]}
    if not names or not all(type(name) is str for name in names) or not set(state) <= names:
        return None
    owners = [name for name, module in modules.items() if names <= set(module)]
    return owners[0] if len(owners) == 1 else None


def _optimizer(component: str, part: Mapping[str, Any], owner: str, leaves: list[Leaf]) -> dict[str, Any]:
    """As ``capture`` lays out an optimizer: by ``component.parameter``."""

    def full(name: str) -> str:
        return ".".join(values.path_part(one) for one in (owner, *name.split(".")))

    state = {
        full(name): _nested(entry, f"{component}.state.{full(name)}", component, leaves)
        for name, entry in part["state"].items()
    }
    groups = []
    for index, group in enumerate(part["param_groups"]):
        rest = {key: value for key, value in group.items() if key != "params"}
        laid = _nested(rest, f"{component}.param_groups.{index}", component, leaves)
        groups.append({**laid, "params": [full(name) for name in group["params"]]})
    return {"state": state, "other": {}, "param_groups": groups}


def _nested(part: Any, path: str, component: str, leaves: list[Leaf]) -> Any:
    """The same tree with a reference for every array."""
    known: dict[int, TensorRef] = {}

    def walked(node: Any, path: str) -> Any:
        if isinstance(node, Array):
            if id(node) not in known:
                name = f"{path}.value" if path == component else path
                known[id(node)] = _tensor(name, node, leaves)
            return known[id(node)]
        if isinstance(node, Mapping):
            built: Any = OrderedDict() if type(node) is OrderedDict else {}
            for key, value in node.items():
                built[key] = walked(value, values.joined(path, key))
            return built
        if type(node) in (list, tuple):
            items = [walked(item, f"{path}.{i}") for i, item in enumerate(node)]
            return items if type(node) is list else tuple(items)
        return node

    return walked(part, path)


def _tensor(name: str, array: Array, leaves: list[Leaf]) -> TensorRef:
    spec = LeafSpec(name, "tensor", array.dtype, array.shape)
    leaves.append(Leaf(Holding(spec, whole(array.shape), (0,)), array))
    return TensorRef(name)
