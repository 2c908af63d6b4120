"""The commit: how fragments become one readable step, or visibly never do.

A step of an attempt is *settled* when its commit key is occupied, by a commit or by an ``aborted``
record. Giving up means creating ``aborted`` and finding out who was first. Everything here blocks
only in store and clock calls and owns no threads, so that a simulation can run many of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

import xxhash

from ftckpt import layout
from ftckpt.attempts import create_owned, decode_commit
from ftckpt.bounds import DAY_S, SHORTEST_S, require_number
from ftckpt.boxes import Box
from ftckpt.clock import Clock
from ftckpt.errors import (
    CorruptError,
    Diverged,
    ObjectNotFound,
    SaveAborted,
    StoreError,
)
from ftckpt.layout import Writer
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.manifest import (
    FORMAT,
    Commit,
    ComponentSummary,
    Fragment,
    FragmentRef,
    Guarantee,
    LeafRecord,
    Position,
    Ref,
    decode,
    digest_of,
    encode,
    let_go_of,
)
from ftckpt.plan.assign import covers
from ftckpt.plan.listing import listed
from ftckpt.store.api import ObjectStore


@dataclass(frozen=True, slots=True)
class Expected:
    """What a save of one step is: who writes, seen by which quorum, from which parent."""

    at: Position
    parent: Ref | None
    quorum: int
    members: str
    writers: tuple[Writer, ...]


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait. Writer number i may commit after ``i * takeover_s``; after ``deadline_s``
    anybody gives the step up.
    """

    deadline_s: float = 120.0
    takeover_s: float = 5.0
    poll_s: float = 0.02
    max_poll_s: float = 0.5

    def __post_init__(self) -> None:
        require_number("deadline_s", self.deadline_s, low=SHORTEST_S, high=DAY_S)
        require_number("takeover_s", self.takeover_s, low=0, high=DAY_S)
        for name in ("poll_s", "max_poll_s"):
            require_number(name, getattr(self, name), low=SHORTEST_S, high=DAY_S)


def put_fragment(store: ObjectStore, fragment: Fragment, writer: Writer) -> None:
    """Create a fragment, after all its packs are durable. Repeating it is harmless."""
    key = layout.fragment_key(Position(fragment.step, fragment.attempt), writer)
    create_owned(store, key, encode(fragment))


def failure(expected: Expected, writer: Writer, reason: str) -> Fragment:
    """The fragment of a writer that cannot write its share."""
    return Fragment(
        format=FORMAT,
        attempt=expected.at.attempt,
        step=expected.at.step,
        writer=str(writer),
        quorum=expected.quorum,
        members=expected.members,
        parent=expected.parent,
        failure=reason[:2000] or "failed",
    )


def read_commit(store: ObjectStore, at: Position) -> tuple[Commit, Ref] | None:
    """The record under a commit key, or ``None`` while it is not occupied."""
    try:
        body = bytes(store.read(layout.commit_key(at)))
    except ObjectNotFound:
        return None
    return decode_commit(at, body)


def abort(store: ObjectStore, at: Position, reason: str) -> tuple[Commit, Ref]:
    """Give a step up, unless it was settled before: returns what its key holds now."""
    reason = reason[:2000] or "given up"
    return create_commit(store, Commit(format=FORMAT, attempt=at.attempt, step=at.step, aborted=reason))


def gather(
    store: ObjectStore, expected: Expected, mine: Fragment | None = None
) -> dict[Writer, tuple[Fragment, FragmentRef]]:
    """The fragments of this save that are there now: of expected writers and of this quorum only.

    A fragment that a dead life, another quorum or another parent wrote is not of this save. Bytes that
    are those of ``mine`` need not be decoded. The refs have no ranges yet: those come of all together.
    """
    found = {}
    own = encode(mine) if mine is not None else b""
    for info in store.scan(layout.fragment_prefix(expected.at)):
        writer = layout.parse_writer(info.key)
        if writer not in expected.writers:
            continue
        try:
            body = bytes(store.read(info.key))
        except ObjectNotFound:
            continue  # collected since the listing: somebody else settled the step
        fragment = mine if mine is not None and body == own else decode(Fragment, body, info.key)
        same = (
            fragment.attempt == expected.at.attempt
            and fragment.step == expected.at.step
            and fragment.quorum == expected.quorum
            and fragment.members == expected.members
            and fragment.parent == expected.parent
        )
        if same or fragment.failure:
            ref = FragmentRef(info.key, len(body), digest_of(body), ())
            found[writer] = (fragment, ref)
    return found


def diverging(fragments: Iterable[Fragment]) -> list[str]:
    """Names of replicated leaves whose bytes differ between the fragments' writers."""
    seen: dict[tuple[str, tuple[int, ...]], bytes] = {}
    specs: dict[str, tuple[object, ...]] = {}
    names = set()
    for fragment in fragments:
        for replica in fragment.replicas:
            if seen.setdefault((replica.leaf, replica.offset), replica.digest) != replica.digest:
                names.add(replica.leaf)
        for leaf in fragment.leaves:
            spec = (leaf.kind, leaf.dtype, leaf.shape, leaf.owner)
            if specs.setdefault(leaf.name, spec) != spec:
                names.add(leaf.name)
    return sorted(names)


def uncovered(fragments: Iterable[Fragment]) -> list[str]:
    """Names of leaves that the fragments do not tile: an element is missing, or held twice; or the leaf is
    missing, which only some of the writers have; or it is one rank's own for some, and common for others.
    """
    fragments = list(fragments)
    missing = {replica.leaf for fragment in fragments for replica in fragment.replicas}
    owned = {leaf.name.rpartition("@")[0] for one in fragments for leaf in one.leaves if leaf.owner}
    for name, leaves in _by_leaf(fragments):
        spans = {
            (record.offset, record.extent, chunk.start, chunk.stop)
            for leaf in leaves
            for record in leaf.boxes
            for chunk in record.chunks
        }
        missing.discard(name)
        if name in owned or not _covered(leaves[-1].shape, spans):
            missing.add(name)
    return sorted(missing)


def _by_leaf(fragments: Iterable[Fragment]) -> Iterator[tuple[str, list[LeafRecord]]]:
    """What the fragments say of each leaf, by name. One leaf at a time: with a container for each of many
    leaves, Python's collector comes and holds every thread; so does sorting what is in all of them at once.
    """
    leaves = sorted((leaf for fragment in fragments for leaf in fragment.leaves), key=lambda leaf: leaf.name)
    for name, group in groupby(leaves, key=lambda leaf: leaf.name):
        yield name, list(group)


_Spans = tuple[tuple[int, ...], tuple[int, ...], int, int]


def _covered(shape: tuple[int, ...], spans: Collection[_Spans]) -> bool:
    if spans == {((0,) * len(shape), shape, 0, prod(shape))}:  # one chunk holds it all
        return True
    return covers(shape, [(Box(offset, extent), start, stop) for offset, extent, start, stop in spans])


def state_digest(fragments: Iterable[Fragment]) -> str:
    """Digest of the content: every leaf with every span's raw digest, whoever wrote which."""
    digest = xxhash.xxh3_128()
    for name, leaves in _by_leaf(fragments):
        lines: set[tuple[str, str, tuple[int, ...], int, int, bytes]] = set()
        for leaf in leaves:
            lines.add((name, f"{leaf.kind} {leaf.dtype} {leaf.shape} {leaf.owner}", (), 0, 0, b""))
            for record in leaf.boxes:
                for chunk in record.chunks:
                    lines.add((name, "", record.offset, chunk.start, chunk.stop, chunk.raw))
        for line in sorted(lines):
            digest.update(repr(line).encode())
    return digest.hexdigest()


def summarize(at: Position, fragments: Sequence[Fragment]) -> dict[str, ComponentSummary]:
    """Per component: leaves, raw bytes, stored bytes, and raw bytes that an earlier step wrote."""
    own = layout.pack_prefix(at) + "/"
    names: dict[str, set[str]] = {}
    sums: dict[str, list[int]] = {}
    seen: set[tuple[str, tuple[int, ...], int]] = set()
    for fragment in fragments:
        for leaf in fragment.leaves:
            component = component_of(leaf)
            names.setdefault(component, set()).add(leaf.name)
            total = sums.setdefault(component, [0, 0, 0])
            for record in leaf.boxes:
                for chunk in record.chunks:
                    key = (leaf.name, record.offset, chunk.start)
                    if key in seen:
                        continue
                    seen.add(key)
                    raw_bytes = (chunk.stop - chunk.start) * ITEMSIZE_BYTES[leaf.dtype]
                    total[0] += raw_bytes
                    if fragment.packs[chunk.pack].key.startswith(own):
                        total[1] += chunk.size
                    else:
                        total[2] += raw_bytes
    return {name: ComponentSummary(len(names[name]), *sums[name]) for name in sorted(names)}


def component_of(leaf: LeafRecord) -> str:
    """The component a leaf belongs to: its name up to the first dot or ``@``."""
    return leaf.name.partition("@")[0].partition(".")[0]


def build(expected: Expected, found: Mapping[Writer, tuple[Fragment, FragmentRef]]) -> Commit:
    """The record for these fragments: a commit when they agree and cover, else ``aborted``."""
    at = expected.at
    fragments = [fragment for fragment, _ in found.values()]
    failed = [f"{f.writer}: {f.failure}" for f in fragments if f.failure]
    reason = "; ".join(sorted(failed))
    if not reason and (names := diverging(fragments)):
        reason = f"{DIVERGED}{', '.join(names[:20])}{' …' if len(names) > 20 else ''}"
    if not reason and (names := uncovered(fragments)):
        reason = f"the fragments do not cover {', '.join(names[:20])}"
    if reason:
        return Commit(format=FORMAT, attempt=at.attempt, step=at.step, aborted=reason[:2000])
    ordered = [found[writer] for writer in sorted(found)]
    guarantees: list[Guarantee] = [fragment.guarantee for fragment, _ in ordered]
    commit = Commit(
        format=FORMAT,
        attempt=at.attempt,
        step=at.step,
        parent=expected.parent,
        state=state_digest(fragments),
        fragments=tuple(ref for _, ref in ordered),
        quorums=(expected.quorum,),
        components=summarize(at, [fragment for fragment, _ in ordered]),
        guarantee=max(guarantees, default="E4"),
        why=tuple(sorted({reason for fragment, _ in ordered for reason in fragment.why})),
        left_out=tuple(sorted({line for fragment, _ in ordered for line in fragment.left_out})),
    )
    return listed(commit, [fragment for fragment, _ in ordered])


DIVERGED = "replicas diverged: "


def settle(
    store: ObjectStore,
    clock: Clock,
    expected: Expected,
    me: Writer,
    mine: Fragment,
    patience: Patience,
    gone: Callable[[], Collection[str]] = tuple,
) -> tuple[Commit, Ref]:
    """Wait until the step is settled, and settle it if that is this writer's turn.

    Called by every writer after its fragment (or failure fragment) exists. On return the step's
    commit key is occupied and will not change. Whoever is not the committer only reads that key.
    ``gone`` names incarnations known to be dead: a share of theirs that is missing will not come, so
    the step is given up at once.

    Raises:
        Diverged: the step was committed without this writer, and with another state.
        StoreError: the store gave no answer within the deadline; the step is not known to be
            settled, and the caller must not begin another save before it is (call this again).
    """
    begun_s = clock.now_s()
    turn_s = begun_s + expected.writers.index(me) * patience.takeover_s
    end_s = begun_s + patience.deadline_s
    pause_s = patience.poll_s
    trouble: StoreError | None = None
    while True:
        try:
            settled = read_commit(store, expected.at)
            if settled is not None:
                _check_adoption(store, settled[0], me, mine)
                return settled
            now_s = clock.now_s()
            lost = gone()
            if now_s >= turn_s or now_s >= end_s or lost:
                found = gather(store, expected, mine)
                missing = [writer for writer in expected.writers if writer not in found]
                if not missing or any(fragment.failure for fragment, _ in found.values()):
                    created = create_commit(store, build(expected, found))
                    shares = [fragment for fragment, _ in found.values()]
                    found.clear()
                    let_go_of(shares)
                    _check_adoption(store, created[0], me, mine)
                    return created
                dead = [writer for writer in missing if writer.incarnation in lost]
                if dead:
                    return abort(store, expected.at, f"{', '.join(map(str, dead[:8]))} died before its share")
                if now_s >= end_s:
                    names = ", ".join(map(str, missing[:8]))
                    return abort(
                        store, expected.at, f"no fragment of {names} within {patience.deadline_s:.0f} s"
                    )
            trouble = None
        except CorruptError as error:
            reason = f"a record does not read: {error.message.splitlines()[0]}"
            settled = abort(store, expected.at, reason)
            _check_adoption(store, settled[0], me, mine)
            return settled
        except StoreError as error:
            if not error.retryable:
                raise
            trouble = error
        if trouble is not None and clock.now_s() >= end_s:
            raise trouble
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, patience.max_poll_s)


def _check_adoption(store: ObjectStore, record: Commit, me: Writer, mine: Fragment) -> None:
    """Raise ``Diverged`` if a commit that leaves this writer's fragment out says something else.

    A slow owner whose share was taken over, or a life that repeats what an earlier one committed,
    wrote the same content: adding it to what was committed then changes nothing.
    """
    if record.aborted or mine.failure or any(ref.key.endswith(f"/{me}") for ref in record.fragments):
        return
    committed = [decode(Fragment, bytes(store.read(ref.key)), ref.key) for ref in record.fragments]
    if state_digest([*committed, mine]) != record.state:
        raise Diverged(
            f"Diverged: {record.at} was committed by others, with another state than this process has\n"
            "  two lives of this attempt trained differently; the commit is intact, and this one must not go on",
            step=record.step,
            leaves=(),
        )


def create_commit(store: ObjectStore, record: Commit) -> tuple[Commit, Ref]:
    return decode_commit(record.at, create_owned(store, layout.commit_key(record.at), encode(record)))


def check_settled(record: Commit) -> None:
    """Raise what an unreadable outcome means.

    Raises:
        Diverged: replicas differed.
        SaveAborted: the step was given up.
    """
    at = record.at
    if record.aborted.startswith(DIVERGED):
        leaves = tuple(record.aborted.removeprefix(DIVERGED).split(", "))
        raise Diverged(
            f"Diverged: {at} was not committed, because ranks that must hold equal bytes do not\n"
            f"  leaves: {', '.join(leaves)}\n"
            "  earlier commits are intact; declare what differs by rank with ftckpt.PerRank(...), or find out "
            "why replicas differ\n"
            "  of a DTensor on some dimensions of a mesh, ranks along the others are taken for replicas: they must "
            "not be stages of a pipeline, or hold other experts",
            step=at.step,
            leaves=leaves,
        )
    if record.aborted:
        raise SaveAborted(
            f"SaveAborted: {at} was given up and will never be readable\n  {record.aborted}\n"
            "  earlier commits are intact; training may go on and the next save may succeed",
            step=at.step,
            reason=record.aborted,
        )
