"""From a step of a run to a checkpoint of another format.

Knows the run, names and dtypes; refuses to know any format. Bytes flow a batch at a time: fetched and
verified as in a restore, changed to the wanted dtype, handed to the sink; the next batch is read meanwhile.
Memory is a few batches, whatever the state's size.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from typing import Any

import numpy as np
import torch
import xxhash

from ftckpt import layout
from ftckpt.attempts import choose, find_run, look
from ftckpt.boxes import Box
from ftckpt.capture import place
from ftckpt.copying import pinned
from ftckpt.errors import AlreadyExists, DestinationTaken, NotRepresentable, StateMismatch
from ftckpt.interop.api import MARK, Array, Outline, Progress, Sink, Want
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.manifest import Commit, Fragment
from ftckpt.memory import require_memory
from ftckpt.plan.restore import Placement, Saved, index_chunks, plan_restore
from ftckpt.reader import ReadSettings, check_packs, fetch, leaf_specs, read_fragments, read_values
from ftckpt.store import Files
from ftckpt.store.api import ObjectStore
from ftckpt.values import TensorRef, unpack

BATCH_BYTES = 32 << 20
MARK_BYTES = 256 << 20
_ALIGNED = 64

DTYPES = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    **{name: name for name in ("bfloat16", "float16", "float32", "float64")},
}
"""What ``--dtype`` takes."""

_FLOATS = frozenset({"float16", "bfloat16", "float32", "float64"})
_ESCAPED = re.compile("%([0-9A-F]{2})")


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote: tensors, and their bytes. ``left_out``: what of the step it does not hold."""

    step: int
    components: tuple[str, ...]
    tensors: int
    tensor_bytes: int
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a run is exported: the newest step, all components and their own dtypes, if not said
    otherwise. ``dtype`` is for floating-point tensors.
    """

    step: int | None = None
    component: str | None = None
    dtype: str | None = None


def export(
    store: ObjectStore,
    dest: Files,
    sink: Sink,
    choice: Choice,
    *,
    kind: str,
    overwrite: bool = False,
    pins: bool = True,
    batch_bytes: int = BATCH_BYTES,
    progress: Progress = lambda _done, _total: None,
) -> Exported:
    """Write a step into ``dest`` in the format of ``sink``. Blocks until all of it is there and proven.

    Of an export that was interrupted nothing looks like a whole checkpoint; the same export again begins
    anew and completes it. ``pins`` keep a collector of the run away meanwhile. ``kind`` names the format.

    Raises:
        DestinationTaken: something is there, and ``overwrite`` is off; or another export began there.
        NotRepresentable, StateMismatch: it cannot be said in that format. Nothing was written.
        CorruptError: the step is damaged. What was written is not whole.
    """
    run = find_run(store)
    seen = look(store)
    ref = choose(seen, store.uri, choice.step)
    commit = seen.commits[ref.at]
    with pinned(store, [ref.at], f"ftckpt export to {dest.uri}", pins=pins):
        saved = _open(store, commit)
        outline, origins, left_out = outlined(saved, choice)
        about = {"run": run.run, "step": str(ref.step), "attempt": str(ref.attempt)}
        outline = replace(outline, about=about)
        _refuse(sink.refuses(outline), kind)
        what = json.dumps([kind, ref.digest, about, choice.component, choice.dtype])
        mark = _Mark(xxhash.xxh3_128_hexdigest(what.encode()), tuple(array.name for array in outline.arrays))
        with _marked(dest, sink, mark, overwrite=overwrite):
            reader = _Reader(saved, origins, batch_bytes, progress, _total_bytes(outline))
            left_out = (*left_out, *sink.write(outline, reader))
    return Exported(
        ref.step,
        tuple(outline.trees),
        len(outline.arrays),
        sum(array.size_bytes for array in outline.arrays),
        left_out,
    )


# --- what is exported -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Step:
    """A step opened: what it holds, and where its chunks are."""

    store: ObjectStore
    commit: Commit
    specs: Mapping[str, LeafSpec]
    trees: Mapping[str, Any]
    chunks: Mapping[str, Sequence[Saved]]


def _open(store: ObjectStore, commit: Commit) -> _Step:
    fragments: list[Fragment] = read_fragments(store, commit)
    packs = {(pack.key, pack.size) for fragment in fragments for pack in fragment.packs}
    check_packs(store, packs, commit.at)
    values = read_values(store, fragments, commit.at)
    trees = {name: unpack(data) for name, data in values.items()}
    return _Step(store, commit, leaf_specs(fragments), trees, index_chunks(fragments))


_OURS = frozenset({"rng", "ftckpt"})
"""Components that mean nothing to others: generators, and the session's own notes."""


def outlined(saved: _Step, choice: Choice) -> tuple[Outline, dict[str, str], tuple[str, ...]]:
    """The outline; the leaf behind each array; and what is left out.

    Raises:
        StateMismatch: no such component.
        NotRepresentable: two tensors would have one name, or no float has that dtype.
    """
    dtype = DTYPES.get(choice.dtype) if choice.dtype is not None else None
    if choice.dtype is not None and dtype is None:
        raise NotRepresentable(
            f"NotRepresentable: {choice.dtype!r} is no dtype that floating-point tensors are exported as\n"
            f"  known are {', '.join(DTYPES)}; nothing was written"
        )
    own = {name: tree for name, tree in saved.trees.items() if "@" not in name}
    names = _chosen(saved, own, choice.component)
    arrays: dict[str, Array] = {}
    origins: dict[str, str] = {}
    first: dict[str, str] = {}
    tied: dict[str, str] = {}
    apart: list[str] = []

    def said(ref: TensorRef, name: str) -> Any:
        if ref.name.endswith("@"):
            apart.append(name)
            return None
        spec = saved.specs[ref.name]
        if name in arrays:
            raise NotRepresentable(
                f"NotRepresentable: two tensors of the step would both be called {name}\n"
                "  nothing was written; export one component, or rename one of them",
                leaf=ref.name,
            )
        wanted = dtype if dtype is not None and spec.dtype in _FLOATS else spec.dtype
        arrays[name], origins[name] = Array(name, wanted, spec.shape), ref.name
        if first.setdefault(ref.name, name) != name:
            tied[name] = first[ref.name]
        return arrays[name]

    trees = {}
    for component in names:
        record = own[component]
        prefix = "" if choice.component is not None else unescaped(component)
        tree = record["tree"]
        if record["kind"] == "optimizer":
            tree = _by_parameter(tree)
        trees[unescaped(component)] = _named(tree, prefix, said, flat=record["kind"] == "module")
    left_out = [f"{name} (each rank's own)" for name in apart]
    if choice.component is None:  # whole components that each rank has its own of
        whole = {name.partition("@")[0] for name in saved.trees} - {*names, *_OURS}
        left_out += [f"{unescaped(name)} (each rank's own)" for name in sorted(whole) if "." not in name]
    outline = Outline(
        tuple(arrays.values()), trees, choice.component is not None, tied, apart=frozenset(apart)
    )
    return outline, origins, tuple(left_out)


def _chosen(saved: _Step, own: Mapping[str, Any], component: str | None) -> list[str]:
    if component is None:
        return [name for name in own if name not in _OURS]
    found = [name for name in own if unescaped(name) == component]
    if not found:
        known = ", ".join(unescaped(name) for name in own if name not in _OURS)
        raise StateMismatch(
            f"StateMismatch: step {saved.commit.step} has no component {component!r} that ranks have in common\n"
            f"  it has: {known or 'none'}; nothing was written",
            step=saved.commit.step,
        )
    return found


def _by_parameter(tree: Any) -> Any:
    """An optimizer's tree as torch's own functions give it: names of parameters without the component,
    if all parameters are of one, and no part that is empty.
    """
    groups, state = tree["param_groups"], tree["state"]
    owners = {name.partition(".")[0] for group in groups for name in group["params"]}
    prefix = f"{owners.pop()}." if len(owners) == 1 else ""
    short = {name: unescaped(name.removeprefix(prefix)) for group in groups for name in group["params"]}
    built: dict[str, Any] = {"state": {short.get(name, name): part for name, part in state.items()}}
    if tree["other"]:
        built["other"] = tree["other"]
    built["param_groups"] = [{**group, "params": [short[n] for n in group["params"]]} for group in groups]
    return built


def _named(tree: Any, path: str, said: Any, *, flat: bool = False) -> Any:
    """The tree with what ``said`` makes of each tensor's reference and name."""
    if isinstance(tree, TensorRef):
        return said(tree, path or "value")
    if isinstance(tree, Mapping):
        spelled = unescaped if flat else str
        return {
            (spelled(key) if flat else key): _named(item, f"{path}.{spelled(key)}".lstrip("."), said)
            for key, item in tree.items()
        }
    if type(tree) in (list, tuple, deque):
        items = [_named(item, f"{path}.{i}".lstrip("."), said) for i, item in enumerate(tree)]
        return items if type(tree) is list else type(tree)(items)
    return tree


def unescaped(path: str) -> str:
    """A path of ours as people and other tools write it; undoes ``values.path_part``."""
    return _ESCAPED.sub(lambda m: chr(int(m[1], 16)), path.replace("%e", ""))


def _refuse(reasons: Any, kind: str) -> None:
    if reasons:
        shown = "".join(f"  {reason}\n" for reason in reasons[:8])
        more = f"  … and {len(reasons) - 8} more\n" if len(reasons) > 8 else ""
        raise NotRepresentable(
            f"NotRepresentable: the step cannot be exported as {kind}\n{shown}{more}"
            "  nothing was written; choose another format, another --component, or a --dtype",
            reasons=tuple(reasons),
        )


# --- where it goes --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mark:
    """What is being exported, by digest; the arrays that it, or what was interrupted before it, writes; and
    the files of what was there that have to go.
    """

    export: str
    arrays: tuple[str, ...] = ()
    going: tuple[str, ...] = ()

    def body(self) -> bytes:
        return json.dumps({"export": self.export, "arrays": self.arrays, "going": self.going}).encode()


@contextmanager
def _marked(dest: Files, sink: Sink, mark: _Mark, *, overwrite: bool) -> Iterator[None]:
    """The destination made ready; it carries a mark until everything is there. Of several exports that begin
    where none is, one is let in: files of two would be a checkpoint that nobody saved.
    """
    if sink.single is not None:
        if sink.single in dest.sizes() and not overwrite:
            raise _taken(f"{dest.uri}/{sink.single}", "is there already")
        yield
        return
    names = dest.sizes()
    if layout.RUN in names:
        raise DestinationTaken(
            f"DestinationTaken: {dest.uri} is a run; nothing is exported into one\n"
            "  nothing was changed; give another address",
            uri=dest.uri,
        )
    found = _read_mark(dest) if MARK in names else None
    if names and not overwrite and (found is None or found.export != mark.export):
        left = "what another export left half way" if found is not None else min(names)
        raise _taken(dest.uri, f"is not empty: it holds {left}")
    own = _own(sink, names, found)
    if found is None:
        _begin(dest, mark)
        names = dest.sizes()
        if len(names) > 1 and not overwrite:  # another export ended between the look and the mark
            dest.delete([MARK])
            raise _taken(dest.uri, f"is not empty: it holds {min(names.keys() - {MARK})}")
        own = _own(sink, names, found)
    if own or found is not None:
        arrays = (*mark.arrays, *(found.arrays if found is not None else ()))
        dest.put(MARK, replace(mark, arrays=tuple(dict.fromkeys(arrays)), going=tuple(own)).body())
    # First what makes a checkpoint whole, then the rest of it: a reader never takes a part for all.
    heads = [name for name in own if "/" not in name and name.endswith((".json", ".metadata"))]
    for name in heads:
        dest.delete([name])
    dest.delete([name for name in own if name not in heads])
    yield
    dest.delete([MARK])


def _own(sink: Sink, names: Mapping[str, int], found: _Mark | None) -> list[str]:
    """The files that have to go."""
    if found is None:
        return sorted(sink.owned(names, ()))
    going = names.keys() & set(found.going)
    return sorted({*sink.owned(names, found.arrays), *going} - {MARK})


def _begin(dest: Files, mark: _Mark) -> None:
    try:
        dest.store.create(MARK, mark.body())
    except AlreadyExists as error:
        ours = error.facts.get("after_unclear") and dest.maybe(MARK, MARK_BYTES) == mark.body()
        if not ours:
            raise _taken(dest.uri, "is where another export has just begun") from error


def _read_mark(dest: Files) -> _Mark:
    """The mark that is there. One that does not read is of some other export."""
    try:
        found = json.loads(dest.text(MARK, MARK_BYTES))
        return _Mark(str(found["export"]), tuple(map(str, found["arrays"])), tuple(map(str, found["going"])))
    except (ValueError, KeyError, TypeError, RecursionError):
        return _Mark("")


def _taken(where: str, how: str) -> DestinationTaken:
    return DestinationTaken(
        f"DestinationTaken: {where} {how}\n"
        "  nothing was changed; give another address, or --overwrite to replace a checkpoint of this format",
        uri=where,
    )


# --- the bytes ------------------------------------------------------------------------------------


def _total_bytes(outline: Outline) -> int:
    return sum(array.size_bytes for array in outline.arrays)


@dataclass(slots=True)
class _Reader:
    """The parts of arrays, in the order asked for; the next batch is read while one is used, in two memories."""

    saved: _Step
    origins: Mapping[str, str]
    batch_bytes: int
    progress: Progress
    total_bytes: int
    done_bytes: int = field(default=0)

    def __call__(self, wants: Iterable[Want]) -> Iterator[torch.Tensor]:
        batches = _batches(wants, self.batch_bytes)
        memories = cycle((_Memory(), _Memory()))
        with ThreadPoolExecutor(1, "ftckpt-export") as pool:
            ahead: Future[list[torch.Tensor]] | None = None
            while True:
                batch = next(batches, None)
                coming = pool.submit(self._load, batch, next(memories)) if batch is not None else None
                for tensor in ahead.result() if ahead is not None else ():
                    yield tensor
                    self.done_bytes += tensor.numel() * tensor.itemsize
                    self.progress(self.done_bytes, self.total_bytes)
                if coming is None:
                    return
                ahead = coming

    def _load(self, batch: list[Want], memory: _Memory) -> list[torch.Tensor]:
        specs = [self.saved.specs[self.origins[array.name]] for array, _ in batch]
        wants: list[tuple[LeafSpec, Box]] = [(spec, box) for spec, (_, box) in zip(specs, batch, strict=True)]
        casts = [(array.dtype, box) for spec, (array, box) in zip(specs, batch, strict=True)]
        changed = [n for n, spec in enumerate(specs) if spec.dtype != casts[n][0]]
        room = memory.tensors([(spec.dtype, box) for spec, box in wants] + [casts[n] for n in changed])
        filled, cast = room[: len(wants)], room[len(wants) :]
        fetches = plan_restore(wants, self.saved.chunks)
        at = self.saved.commit.at

        def put(landing: Placement, raw: memoryview) -> None:
            spec, box = wants[landing.want]
            piece = raw[landing.first_byte :][: landing.piece.numel * spec.itemsize_bytes]
            place(filled[landing.want], box, landing.piece, landing.region, piece, spec.dtype)

        settings = ReadSettings(budget_bytes=2 * self.batch_bytes, run_bytes=max(1, self.batch_bytes // 4))
        fetch(self.saved.store, fetches, put, at, settings)
        for number, result in zip(changed, cast, strict=True):
            filled[number] = result.copy_(filled[number])
        return filled


class _Memory:
    """Memory that one batch after another is read into: an allocator asked for each anew, between small things
    that stay, finds no room for one where another was, and takes more from the system for every tensor.
    """

    def __init__(self) -> None:
        self._held = np.empty(0, np.uint8)

    def tensors(self, sizes: Sequence[tuple[str, Box]]) -> list[torch.Tensor]:
        """A tensor for each dtype and box, not filled. Those of the call before are no longer valid."""
        starts, need_bytes = [], 0
        for dtype, box in sizes:
            starts.append(need_bytes)
            need_bytes += -(-box.numel * ITEMSIZE_BYTES[dtype] // _ALIGNED) * _ALIGNED
        if need_bytes > self._held.size:
            require_memory(need_bytes, "what of the step is read at a time")
            self._held = np.empty(need_bytes, np.uint8)
        return [
            torch.from_numpy(self._held[start : start + box.numel * ITEMSIZE_BYTES[dtype]])
            .view(getattr(torch, dtype))
            .view(box.extent)
            for start, (dtype, box) in zip(starts, sizes, strict=True)
        ]


def _batches(wants: Iterable[Want], limit_bytes: int) -> Iterator[list[Want]]:
    batch: list[Want] = []
    size_bytes = 0
    for array, box in wants:
        part_bytes = box.numel * array.itemsize_bytes
        if batch and size_bytes + part_bytes > limit_bytes:
            yield batch
            batch, size_bytes = [], 0
        batch.append((array, box))
        size_bytes += part_bytes
    if batch:
        yield batch
