"""Reading a commit: fragments, then chunks, each verified before a byte of it goes anywhere.

Knows records, packs and codecs; knows nothing of tensors. Whoever reads hands in a ``place``
function that receives verified raw bytes. Several threads fetch and decode; memory is bounded by
the settings, not by the state.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Event as Flag

import xxhash

from ftckpt import codec, layout
from ftckpt.bounds import require_number
from ftckpt.boxes import Box, whole
from ftckpt.errors import (
    ChunkCorrupt,
    CorruptError,
    ObjectDamaged,
    ObjectNotFound,
    RecordCorrupt,
    StoreError,
    StoreUnavailable,
)
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.manifest import Commit, Fragment, FragmentRef, Position, decode, digest_of
from ftckpt.memory import require_memory
from ftckpt.plan.listing import mislisted, relevant
from ftckpt.plan.restore import (
    Fetch,
    Link,
    Placement,
    Run,
    Span,
    bases_of,
    coalesce,
    index_chunks,
    packs_of,
    plan_restore,
)
from ftckpt.store.api import Buffer, ByteRange, ObjectStore
from ftckpt.store.nearest import sources, tell_passed_over

Place = Callable[[Placement, memoryview], None]
Progress = Callable[[int, int], None]


def _threads() -> int:
    """Requests wait more than they compute; beyond that, cores decode."""
    return min(16, max(8, 2 * len(os.sched_getaffinity(0))))


@dataclass(frozen=True, slots=True)
class ReadSettings:
    """``budget_bytes`` bounds what is fetched and decoded but not yet placed; requests of at most
    ``run_bytes`` join chunks that lie at most ``gap_bytes`` apart. Threads by the cores that this process
    may use.
    """

    threads: int = field(default_factory=_threads)
    budget_bytes: int = 192 << 20
    run_bytes: int = 16 << 20
    gap_bytes: int = 64 << 10

    def __post_init__(self) -> None:
        require_number("threads", self.threads, low=1, high=1024, whole=True)
        for name in ("budget_bytes", "run_bytes"):
            require_number(name, getattr(self, name), low=1, high=1 << 50, whole=True)
        require_number("gap_bytes", self.gap_bytes, low=0, high=1 << 50, whole=True)


DEFAULT = ReadSettings()

_FEW = 8
_SMALLEST_RUN_BYTES = 1 << 20


def read_fragment(store: ObjectStore, ref: FragmentRef, at: Position) -> Fragment:
    """One fragment of the commit at ``at``, checked against what the commit says of it.

    Raises:
        ObjectDamaged: absent, or another size.
        RecordCorrupt: other bytes than the commit names.
    """
    stores = sources(store)
    for number, source in enumerate(stores):
        try:
            return read_fragment_here(source, ref, at)[0]
        except (CorruptError, StoreError) as error:
            if number + 1 == len(stores):
                raise
            if not isinstance(error.__cause__, ObjectNotFound):
                tell_passed_over(store, number, ref.key, error)
    raise AssertionError("unreachable: there is a last source")


def read_fragment_here(store: ObjectStore, ref: FragmentRef, at: Position) -> tuple[Fragment, bytes]:
    """As ``read_fragment``, from this very store; with the bytes it was proven by."""
    try:
        body = bytes(store.read(ref.key))
    except ObjectNotFound as error:
        raise ObjectDamaged(
            f"ObjectDamaged: {ref.key}, a fragment of {at}, is absent\n  the step cannot be read without it",
            key=ref.key,
            step=at.step,
        ) from error
    if len(body) != ref.size or digest_of(body) != ref.digest:
        raise ObjectDamaged(
            f"ObjectDamaged: {ref.key}, a fragment of {at}, is not the one that was committed\n"
            f"  expected {ref.size} bytes, xxh3-128 {ref.digest}; found {len(body)} bytes, {digest_of(body)}",
            key=ref.key,
            step=at.step,
        )
    fragment = decode(Fragment, body, ref.key)
    if (fragment.step, fragment.attempt) != (at.step, at.attempt) or fragment.failure:
        raise RecordCorrupt(
            f"RecordCorrupt: {ref.key} is a fragment of step {fragment.step} of attempt {fragment.attempt}"
            f"{', and tells of a failure' if fragment.failure else ''}; {at} names it as its own",
            key=ref.key,
            step=at.step,
        )
    return fragment, body


def read_fragments(
    store: ObjectStore,
    commit: Commit,
    wants: Collection[tuple[LeafSpec, Box]] | None = None,
    threads: int = 8,
) -> list[Fragment]:
    """The fragments of a commit; with ``wants``, only those that can hold a part of one."""
    refs = commit.fragments if wants is None else relevant(commit, wants)
    return read_refs(store, commit.at, refs, threads)


def read_refs(
    store: ObjectStore, at: Position, refs: Sequence[FragmentRef], threads: int = 8
) -> list[Fragment]:
    """These fragments of the commit at ``at``, in this order."""
    with ThreadPoolExecutor(max(1, min(threads, len(refs))), "ftckpt-read") as pool:
        return list(pool.map(lambda ref: read_fragment(store, ref, at), refs))


def leaf_specs(fragments: Iterable[Fragment]) -> dict[str, LeafSpec]:
    """Every leaf the fragments speak of, by name.

    Raises:
        RecordCorrupt: two of them say different things of one leaf.
    """
    specs: dict[str, LeafSpec] = {}
    for fragment in fragments:
        for leaf in fragment.leaves:
            spec = leaf.spec
            if specs.setdefault(leaf.name, spec) != spec:
                raise RecordCorrupt(
                    f"RecordCorrupt: the fragments of step {fragment.step} differ about {leaf.name}: "
                    f"{specs[leaf.name]} and {spec}",
                    leaf=leaf.name,
                    step=fragment.step,
                )
    return specs


def check_packs(store: ObjectStore, packs: Collection[tuple[str, int]], at: Position) -> None:
    """Every pack exists, at its stated size. A few are asked for one by one, so that the share of a rank costs
    the same however many ranks wrote; many by one listing per step that wrote any of them.

    Raises:
        ObjectDamaged: names the first that does not.
    """
    for problem in _damaged_packs(store, packs, at):
        raise problem


def _damaged_packs(
    store: ObjectStore, packs: Collection[tuple[str, int]], at: Position
) -> Iterator[ObjectDamaged]:
    wanted, found = dict(packs), dict[str, int]()
    for source in sources(store):
        absent = [key for key, size in wanted.items() if found.get(key) != size]
        found.update(_sizes(source, absent))
    for key, size in sorted(packs):
        if found.get(key) != size:
            state = f"has {found[key]} bytes" if key in found else "is absent"
            yield ObjectDamaged(
                f"ObjectDamaged: {key}, needed by {at}, {state}; the record states {size} bytes\n"
                "  no tensor was touched",
                key=key,
                step=at.step,
            )


def _sizes(store: ObjectStore, keys: Collection[str]) -> dict[str, int]:
    """Of those that are there."""
    if not keys:
        return {}
    if len(keys) > _FEW:
        prefixes = sorted({key.rpartition("/")[0] for key in keys})
        sizes = {info.key: info.size_bytes for prefix in prefixes for info in store.scan(prefix)}
        return {key: sizes[key] for key in keys if key in sizes}

    def size(key: str) -> int | None:
        try:
            return store.size(key)
        except ObjectNotFound:
            return None

    with ThreadPoolExecutor(len(keys), "ftckpt-read") as pool:
        return {
            key: found for key, found in zip(keys, pool.map(size, keys), strict=True) if found is not None
        }


def check_commit(store: ObjectStore, commit: Commit) -> list[Fragment]:
    """Everything the commit needs is there: fragments as named, packs at their sizes. Chunks are
    not read. Returns the fragments; raises ``CorruptError`` for the first thing that is wrong.
    """
    fragments = read_fragments(store, commit)
    packs = {(pack.key, pack.size) for fragment in fragments for pack in fragment.packs}
    check_packs(store, packs, commit.at)
    return fragments


def fetch(
    store: ObjectStore,
    fetches: Sequence[Fetch],
    place: Place,
    at: Position,
    settings: ReadSettings = DEFAULT,
    progress: Progress | None = None,
) -> None:
    """Fetch, verify, decode and place chunks. Blocks until all are placed.

    ``place`` is called from several threads, for regions that do not overlap. ``progress`` gets
    (bytes done, bytes in all) now and then.

    Raises:
        ChunkCorrupt: of the first bad chunk; none of its bytes were placed, others may have been.
        StoreError: the store failed.
    """
    runs, threads = shared_out(fetches, settings)
    total = sum(run.read_bytes for run in runs)
    stop = Flag()
    done = 0

    def work(run: Run) -> int:
        if stop.is_set():
            return 0
        try:
            for item, raw in _verified(store, run, at):
                for placement in item.placements:
                    place(placement, raw)
        except BaseException:
            stop.set()
            raise
        return run.read_bytes

    with ThreadPoolExecutor(threads, "ftckpt-read") as pool:
        pending = {pool.submit(work, run) for run in runs}
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
            for future in finished:
                try:
                    done += future.result()
                except BaseException:
                    stop.set()
                    for other in pending:
                        other.cancel()
                    raise
            if progress is not None:
                progress(done, total)


def shared_out(fetches: Sequence[Fetch], settings: ReadSettings) -> tuple[list[Run], int]:
    """Requests, and how many threads may be at one each so that all together stay within the budget."""
    decoding = max((item.memory_bytes for item in fetches), default=0)
    share = settings.budget_bytes // settings.threads - decoding
    run_bytes = min(settings.run_bytes, max(share, _SMALLEST_RUN_BYTES))
    runs = coalesce(fetches, settings.gap_bytes, run_bytes)
    widest = max((run.read_bytes for run in runs), default=1) + decoding
    return runs, max(1, min(settings.threads, settings.budget_bytes // widest, len(runs)))


@dataclass(frozen=True, slots=True)
class _Part:
    """What one request brought: from the ``source``-th of the stores, from byte ``start`` of a pack on."""

    source: int
    pack: str
    start: int
    body: memoryview

    def holds(self, link: Link) -> bool:
        offset, size = link.chunk.offset, link.chunk.size
        return (
            self.pack == link.pack and self.start <= offset and offset + size <= self.start + len(self.body)
        )

    def bytes_of(self, link: Link) -> memoryview:
        return self.body[link.chunk.offset - self.start :][: link.chunk.size]


def _verified(store: ObjectStore, run: Run, at: Position) -> Iterator[tuple[Fetch, memoryview]]:
    """The chunks of a run with their raw bytes. A chunk whose bytes are bad is fetched again, it alone,
    from the next source.
    """
    parts = _read_spans(store, run.spans, 0)
    for item in run.fetches:
        try:
            raw = _verify_in(parts, item, at)
        except CorruptError as error:
            raw = _refetched(store, parts, item, at, error)
        yield item, raw


def _verify_in(parts: Sequence[_Part], item: Fetch, at: Position) -> memoryview:
    own, *bases = _bodies(parts, item)
    return verify(item, own, at, bases)


def _bodies(parts: Sequence[_Part], item: Fetch) -> list[memoryview]:
    """The stored bytes of a chunk and of its bases, nearest first."""
    if not item.bases:  # the first request is the run's own
        chunk, own = item.chunk, parts[0]
        return [own.body[chunk.offset - own.start :][: chunk.size]]
    return [_part_of(parts, link).bytes_of(link) for link in item.links]


def _part_of(parts: Sequence[_Part], link: Link) -> _Part:
    return next(part for part in parts if part.holds(link))


def _refetched(
    store: ObjectStore, parts: Sequence[_Part], item: Fetch, at: Position, error: CorruptError
) -> memoryview:
    """A chunk whose bytes were bad, from the sources that come after the one that they came from."""
    last = len(sources(store)) - 1
    while True:
        number = max(_part_of(parts, link).source for link in item.links)
        if number == last:
            raise error
        tell_passed_over(store, number, item.pack, error)
        spans = [
            Span(link.pack, link.chunk.offset, link.chunk.offset + link.chunk.size) for link in item.links
        ]
        parts = _read_spans(store, spans, number + 1)
        try:
            return _verify_in(parts, item, at)
        except CorruptError as again:
            error = again


def _read_spans(store: ObjectStore, spans: Iterable[Span], first: int) -> list[_Part]:
    """Each span from the nearest source, ``first`` or further, that has its pack and can be read."""
    return [_read_span(store, span, first) for span in spans]


def _read_span(store: ObjectStore, span: Span, first: int) -> _Part:
    stores = sources(store)
    where = ByteRange(span.start, span.end)
    for number in range(first, len(stores)):
        try:
            body = memoryview(stores[number].read(span.pack, where))
            if len(body) != where.size:
                raise StoreUnavailable(
                    f"{stores[number].uri} answered {len(body)} of {where.size} bytes of {span.pack}",
                    op="read",
                    uri=stores[number].uri,
                    key=span.pack,
                )
            return _Part(number, span.pack, span.start, body)
        except StoreError as error:
            if number + 1 == len(stores):
                raise
            if not isinstance(error, ObjectNotFound):
                tell_passed_over(store, number, span.pack, error)
    raise AssertionError("unreachable: there is a last source")


def verify(item: Fetch, stored: Buffer, at: Position, bases: Sequence[Buffer] = ()) -> memoryview:
    """The raw bytes of a chunk, proven against both digests; what it builds on is proven as it is stored.

    ``stored`` are its own stored bytes, ``bases`` those of its bases, nearest first. When the result is
    wrong, the chain is decoded link by link, to name the one that is broken.

    Raises:
        ChunkCorrupt: naming the leaf, the chunk, the pack (of the base, if that is what is broken) and
            what was found.
    """
    chunk = item.chunk
    if chunk.codec == codec.RAW and len(stored) == item.raw_bytes:  # raw and stored bytes are the same
        found = xxhash.xxh3_128_digest(stored)
        if found == chunk.stored == chunk.raw:
            return memoryview(stored)
    links, bodies = item.links, (stored, *bases)
    for number, body in enumerate(bodies):
        expected, found = links[number].chunk.stored, xxhash.xxh3_128_digest(body)
        if found != expected:
            zero = ", all zero: often a torn write below the store" if not any(body) else ""
            raise _corrupt(item, number, at, f"stored bytes{zero}", expected, found)
    if bases:
        stack = [(body, link.chunk.codec) for body, link in zip(bodies, links, strict=True)]
        with suppress(ChunkCorrupt):
            whole_chain = codec.decode_chain(stack, item.raw_bytes)
            if xxhash.xxh3_128_digest(whole_chain) == chunk.raw:
                return memoryview(whole_chain)
    raw: Buffer | None = None
    for number in reversed(range(len(links))):
        chunk = links[number].chunk
        try:
            raw = codec.decode(bodies[number], chunk.codec, item.raw_bytes, raw)
        except ChunkCorrupt as error:
            raise _corrupt(item, number, at, error.message, chunk.raw, b"") from error
        found = xxhash.xxh3_128_digest(raw) if chunk.codec != codec.RAW else chunk.stored
        if found != chunk.raw:
            raise _corrupt(item, number, at, "decoded bytes", chunk.raw, found)
    assert raw is not None
    return memoryview(raw)


def _corrupt(
    item: Fetch, number: int, at: Position, what: str, expected: bytes, found: bytes
) -> ChunkCorrupt:
    chunk = item.chunk
    broken = item.links[number]
    base = f"  they build on {len(item.bases)} bases, and base {number} is broken\n" if number else ""
    return ChunkCorrupt(
        f"ChunkCorrupt: elements {chunk.start} to {chunk.stop} of a part of {item.leaf} ({at}) do not match "
        f"their checksum\n{base}"
        f"  {what}: expected xxh3-128 {expected.hex()}, found {found.hex() or 'nothing'}\n"
        f"  {broken.chunk.size} bytes at offset {broken.chunk.offset} of {broken.pack}",
        leaf=item.leaf,
        pack=broken.pack,
        offset=broken.chunk.offset,
        step=at.step,
        start=chunk.start,
        base=number,
    )


def read_values(
    store: ObjectStore,
    fragments: Sequence[Fragment],
    at: Position,
    settings: ReadSettings = DEFAULT,
    leaves: Sequence[LeafSpec] | None = None,
) -> dict[str, bytes]:
    """The packed bytes of value leaves, by leaf name: of these, or of all that the fragments speak of."""
    if leaves is None:
        leaves = [leaf for leaf in leaf_specs(fragments).values() if leaf.kind == "value"]
    wants = [(leaf, Box((0,), leaf.shape)) for leaf in leaves]
    fetches = plan_restore(wants, index_chunks(fragments, {leaf.name for leaf in leaves}))
    check_packs(store, packs_of(fetches), at)
    require_memory(sum(leaf.shape[0] for leaf in leaves), f"the plain values of {at}")
    buffers = [bytearray(leaf.shape[0]) for leaf in leaves]  # sizes that the chunks were found to fill

    def place(placement: Placement, raw: memoryview) -> None:
        start, size = placement.region.offset[0], placement.region.extent[0]
        skip = placement.first_byte + start - placement.piece.offset[0]
        buffers[placement.want][start : start + size] = raw[skip : skip + size]

    fetch(store, fetches, place, at, settings)
    return {leaf.name: bytes(buffer) for leaf, buffer in zip(leaves, buffers, strict=True)}


def verify_commit(
    store: ObjectStore,
    commit: Commit,
    settings: ReadSettings = DEFAULT,
    progress: Progress | None = None,
) -> list[CorruptError | StoreError]:
    """Read every chunk of a commit and check it; returns what is wrong (empty: nothing).

    Unlike a restore it goes on after the first bad chunk, so that all damage is named.
    """
    problems: list[CorruptError | StoreError] = []
    fragments = []
    for ref in commit.fragments:
        try:
            fragments.append(read_fragment(store, ref, commit.at))
        except (CorruptError, StoreError) as error:
            problems.append(error)
    if not problems:
        problems.extend(list(_untiled(fragments)) or _mislisted(commit, fragments))
    fetches = _every_chunk(fragments)
    damaged = list(_damaged_packs(store, packs_of(fetches), commit.at))
    problems.extend(damaged)
    bad = {error.facts["key"] for error in damaged}
    problems.extend(_missing_base(item, bad, commit.at) for item in fetches if _lost_base(item, bad))
    fetches = [item for item in fetches if not bad & {link.pack for link in item.links}]
    runs = coalesce(fetches, settings.gap_bytes, settings.run_bytes)
    done, total = 0, sum(run.read_bytes for run in runs)
    for run in runs:
        try:
            parts = _read_spans(store, run.spans, 0)
        except StoreError as error:
            problems.append(error)
            continue
        for item in run.fetches:
            try:
                _verify_in(parts, item, commit.at)
            except CorruptError as error:
                problems.append(error)
        done += run.read_bytes
        if progress is not None:
            progress(done, total)
    return problems


def _untiled(fragments: Sequence[Fragment]) -> Iterator[RecordCorrupt]:
    """Leaves of which the fragments do not hold every element once."""
    index = index_chunks(fragments)
    try:
        specs = leaf_specs(fragments)
    except RecordCorrupt as error:
        yield error
        return
    for leaf in specs.values():
        try:
            plan_restore([(leaf, whole(leaf.shape))], index)
        except RecordCorrupt as error:
            yield error


def _mislisted(commit: Commit, fragments: Sequence[Fragment]) -> Iterator[RecordCorrupt]:
    """A commit whose list of leaves would lead a reader past what it wants."""
    names = mislisted(commit, fragments)
    if names:
        key = layout.commit_key(commit.at)
        yield RecordCorrupt(
            f"RecordCorrupt: {key} does not list what its fragments hold: {', '.join(names[:8])}"
            f"{' …' if len(names) > 8 else ''}\n"
            "  its fragments and packs may be whole; a restore may ask the wrong ones",
            key=key,
            step=commit.step,
            leaves=tuple(names),
        )


def _lost_base(item: Fetch, bad: Collection[object]) -> bool:
    return item.pack not in bad and any(link.pack in bad for link in item.bases)


def _missing_base(item: Fetch, bad: Collection[object], at: Position) -> ChunkCorrupt:
    """A chunk that is whole and cannot be decoded, because a pack of its bases is damaged."""
    number, link = next((n, link) for n, link in enumerate(item.bases, 1) if link.pack in bad)
    return _corrupt(
        item, number, at, f"the pack of the base, {link.pack}, is damaged", link.chunk.stored, b""
    )


def _every_chunk(fragments: Iterable[Fragment]) -> list[Fetch]:
    """Every chunk that any fragment names, in the order of packs and offsets, nothing left out."""
    found: dict[tuple[str, int, str, int], Fetch] = {}
    for fragment in fragments:
        for leaf in fragment.leaves:
            itemsize = ITEMSIZE_BYTES[leaf.dtype]
            for chunk in (chunk for record in leaf.boxes for chunk in record.chunks):
                pack = fragment.packs[chunk.pack]
                raw_bytes = (chunk.stop - chunk.start) * itemsize
                found[pack.key, chunk.offset, leaf.name, chunk.start] = Fetch(
                    leaf.name, pack.key, pack.size, chunk, raw_bytes, (), bases_of(fragment, chunk)
                )
    return [found[key] for key in sorted(found)]


def fragment_owner(ref: FragmentRef) -> str:
    """The writer's name of a fragment, for people."""
    writer = layout.parse_writer(ref.key)
    return str(writer) if writer else ref.key
