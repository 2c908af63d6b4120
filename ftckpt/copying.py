"""Copy and fork: a run, or one step of it, in another place; the run they come from stays as it is.

A *copy* is the run itself: same name, same attempts, same keys, byte for byte. It may be made while the
run is written, and made again to bring what came since. A *fork* is a new run whose attempt 1 goes on
from one step of another.

Either pins what it takes, writes packs, then fragments, then commits, and ``run.json`` last of all, so that a
place is no run before it holds all it should. Everything is proven by the digests of records on its
way, and created, never overwritten; whoever died half way is run again. Blocks only in store calls and
owns no threads: who wants several copies at a time hands in ``together``.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import msgspec
import xxhash

from ftckpt import layout
from ftckpt.attempts import (
    Look,
    choose,
    claim,
    create_owned,
    explain_damage,
    find_run,
    look,
    pin,
    read_claim,
    read_start,
    start,
)
from ftckpt.commit import state_digest, summarize
from ftckpt.errors import (
    AlreadyExists,
    AttemptTaken,
    NoCommit,
    NotSameRun,
    ObjectDamaged,
    ObjectNotFound,
    StepNotFound,
    StoreError,
    first_line,
)
from ftckpt.events import Event, Events, silent
from ftckpt.layout import Writer
from ftckpt.manifest import (
    FORMAT,
    Claim,
    Commit,
    Fragment,
    FragmentRef,
    PackRef,
    Position,
    Ref,
    RunRecord,
    decode,
    digest_of,
    encode,
)
from ftckpt.plan.listing import listed
from ftckpt.reader import Progress, read_fragment_here
from ftckpt.store.api import ObjectStore

Together = Callable[[Sequence[Callable[[], int]]], list[int]]
"""Runs copies, all of them, and returns the bytes of each; raises the first failure."""

ServerSide = Callable[[str, str], None]
"""Has the store itself copy an object: its key in the one prefix, its key in the other. Create-only."""


def in_turn(copies: Sequence[Callable[[], int]]) -> list[int]:
    """One after the other."""
    return [copy() for copy in copies]


@dataclass(frozen=True, slots=True)
class Means:
    """How bytes get across. Memory is one pack for each copy that ``together`` makes at a time.

    ``server_side`` copies are proven by their size only, and so are packs of whose bytes no record has a
    digest; what the store cannot copy itself is streamed, with an event.
    ``pins``: keep collectors of the run from what is copied, for as long as it takes.
    """

    together: Together = in_turn
    server_side: ServerSide | None = None
    pins: bool = True
    events: Events = silent
    progress: Progress = field(default=lambda _done, _total: None)


@dataclass(frozen=True, slots=True)
class Copied:
    """What is there now. ``left_out``: steps that a collector of the run, or of the copy, has taken.
    ``copied_bytes`` of packs; ``found_bytes`` of them were there already.
    """

    steps: tuple[Position, ...]
    left_out: tuple[Position, ...]
    copied_bytes: int
    found_bytes: int


MEANS = Means()
"""One pack after the other, through here, with pins."""


def copy(source: ObjectStore, dest: ObjectStore, *, step: int | None = None, means: Means = MEANS) -> Copied:
    """Copy a run with all its readable commits, or with that of ``step`` only. Blocks until it is done.

    The run may be written meanwhile: commits that come later are for the next copy. Running it again
    adds what is new and what was missing. What the copy has and the run has collected stays.

    Raises:
        RunNotFound, NoCommit, StepNotFound: nothing to copy. Nothing was written.
        NotSameRun: ``dest`` holds another run, or went on by itself. No commit was written.
        CorruptError: something of the run is damaged; no commit was written.
    """
    record = find_run(source)
    body = bytes(source.read(layout.RUN))
    if _maybe_read(dest, layout.RUN) not in (None, body):
        raise _other_run(dest, layout.RUN, f"that of run {record.run}")
    seen, listed = _commits_first(source)
    wanted = _not_collected(dest, _wanted(seen, listed, source.uri, step))
    with pinned(source, wanted, f"ftckpt copy to {dest.uri}", pins=means.pins) as held:
        _copy_attempts(source, dest, seen)
        packs: dict[str, PackRef] = {}
        for at in held:
            _add_packs(packs, _fragments(source, seen.commits[at]))
        copied_bytes, found_bytes = _copy_packs(source, dest, {key: key for key in packs}, packs, means)
        for at in held:
            for key, fragment in _fragments(source, seen.commits[at]).items():
                _create(dest, key, fragment.body, f"that of {at}")
        for at in held:
            key = layout.commit_key(at)
            _create(dest, key, bytes(source.read(key)), f"that of run {record.run}")
        _create(dest, layout.RUN, body, f"that of run {record.run}")
    left_out = tuple(at for at in _wanted(seen, listed, source.uri, step) if at not in held)
    return Copied(held, left_out, copied_bytes, found_bytes)


def fork(source: ObjectStore, dest: ObjectStore, *, step: int | None = None, means: Means = MEANS) -> Copied:
    """Make ``dest`` a new run whose attempt 1 goes on from a step of another: the newest, or ``step``.

    The other run may be written meanwhile, and is as it was afterwards. Attempt 1 carries the command of
    the attempt that it comes from, without its tier. Doing the same fork again completes it.

    Raises:
        RunNotFound, NoCommit, StepNotFound: nothing to fork. Nothing was written.
        NotSameRun: ``dest`` holds another run.
        CorruptError: the step is damaged; no commit was written.
    """
    run = find_run(source)
    seen = look(source)
    ref = choose(seen, source.uri, step)
    origin, at = seen.commits[ref.at], Position(ref.step, 1)
    nonce = xxhash.xxh3_128_hexdigest(f"fork of run {run.run}, {ref.at}, {ref.digest}".encode())
    holder = f"ftckpt fork to {dest.uri}"
    if _is_complete(dest, nonce):
        if means.pins:  # of a try that ended just before it would have let go
            source.delete([layout.pin_key(_pin_name(ref.at, holder))])
        return Copied((at,), (), 0, 0)
    with pinned(source, [ref.at], holder, pins=means.pins):
        mine = _claim_fork(source, dest, ref.at, nonce)
        fragments = _fragments(source, origin)
        packs: dict[str, PackRef] = {}
        _add_packs(packs, fragments)
        packer = Writer("fork", 0, nonce)
        names = {key: layout.pack_key(at, packer, number) for number, key in enumerate(sorted(packs))}
        copied_bytes, found_bytes = _copy_packs(source, dest, names, packs, means)
        moved = {_moved_key(key, at): _moved(one.fragment, at, names) for key, one in fragments.items()}
        record = _moved_commit(origin, at, moved)
        for key, fragment in moved.items():
            _create(dest, key, encode(fragment), "that of this fork")
        parent = Ref(at.step, at.attempt, digest_of(encode(record)))  # it is put there for this start
        start(dest, mine, parent, versions=read_start(source, ref.attempt).versions)
        _create(dest, layout.commit_key(at), encode(record), "that of this fork")
        _create(dest, layout.RUN, encode(RunRecord(format=FORMAT, run=nonce)), "that of this fork")
    return Copied((at,), (), copied_bytes, found_bytes)


# --- what is taken --------------------------------------------------------------------------------


def _commits_first(source: ObjectStore) -> tuple[Look, frozenset[Position]]:
    """A look, and the commits that were listed before it: the starts of whatever made them are in it."""
    listed = {at for info in source.scan(layout.COMMITS) if (at := layout.parse_commit(info.key))}
    return look(source), frozenset(listed)


def _wanted(seen: Look, listed: frozenset[Position], uri: str, step: int | None) -> list[Position]:
    if step is not None:
        return [choose(seen, uri, step).at]
    wanted = sorted(seen.view.readable & listed)
    if not wanted:
        raise NoCommit(
            f"NoCommit: the run at {uri} has no readable commit\n  there is nothing to copy; nothing was written",
            uri=uri,
        )
    for at in wanted:
        if at in seen.damaged:
            raise explain_damage(seen, at, seen.damaged[at])
    return wanted


def _not_collected(dest: ObjectStore, wanted: Sequence[Position]) -> list[Position]:
    """Those that the copy has not collected by itself: a commit's key is never used again.

    Raises:
        StepNotFound: it has collected all of them.
    """
    gone = {at for info in dest.scan(layout.COLLECTED) if (at := layout.parse_commit(info.key))}
    left = [at for at in wanted if at not in gone]
    if not left:
        raise StepNotFound(
            f"StepNotFound: {dest.uri} has collected step {wanted[-1].step}, and does not take it back\n"
            "  nothing was written; copy it to another address",
            uri=dest.uri,
            step=wanted[-1].step,
        )
    return left


@contextmanager
def pinned(
    source: ObjectStore, wanted: Sequence[Position], holder: str, *, pins: bool
) -> Iterator[tuple[Position, ...]]:
    """Hold commits; gives those that no collector is about to take. The ids are those of an earlier try
    of the same, so that pins which it left behind go with these.

    Raises:
        StepNotFound: none of them is left.
    """
    if not pins:
        yield tuple(wanted)
        return
    names = {at: _pin_name(at, holder) for at in wanted}
    try:
        held = tuple(at for at in wanted if pin(source, names[at], at, "reader", holder))
        if not held:
            raise StepNotFound(
                f"StepNotFound: step {wanted[-1].step} of {source.uri} is being collected at this moment\n"
                "  no commit was written; choose another step, or let the collection end and try again",
                uri=source.uri,
                step=wanted[-1].step,
            )
        yield held
    finally:
        with suppress(StoreError):  # what brought us here, if anything, says more
            source.delete([layout.pin_key(name) for name in names.values()])


def _pin_name(at: Position, holder: str) -> str:
    return f"copy-{xxhash.xxh3_64_hexdigest(holder.encode())}-{at.step}-{at.attempt}"


@dataclass(frozen=True, slots=True)
class _Proven:
    """A fragment, and the bytes that it was proven by."""

    fragment: Fragment
    body: bytes


def _fragments(source: ObjectStore, commit: Commit) -> dict[str, _Proven]:
    """The fragments of a commit by key."""
    return {ref.key: _Proven(*read_fragment_here(source, ref, commit.at)) for ref in commit.fragments}


def _add_packs(packs: dict[str, PackRef], fragments: Mapping[str, _Proven]) -> None:
    """Every pack that they name, by key; with its digest, if any of them knows it."""
    for one in fragments.values():
        for pack in one.fragment.packs:
            if pack.digest or pack.key not in packs:
                packs[pack.key] = pack


# --- how it gets across ---------------------------------------------------------------------------


def _copy_attempts(source: ObjectStore, dest: ObjectStore, seen: Look) -> None:
    """Claims, then starts: from then on nobody takes the place for one where nothing was."""
    keys = [layout.claim_key(n) for n in sorted(seen.view.claims)]
    keys += [layout.start_key(n) for n in sorted(seen.view.starts)]
    for key in keys:
        _create(dest, key, bytes(source.read(key)), "the run")


def _create(dest: ObjectStore, key: str, body: bytes, what: str) -> None:
    """Create a record, or find it there just so."""
    if create_owned(dest, key, body) != body:
        raise _other_run(dest, key, what)


def _other_run(dest: ObjectStore, key: str, what: str) -> NotSameRun:
    return NotSameRun(
        f"NotSameRun: {dest.uri} holds another {key} than {what}\n"
        "  it is another run, or a copy that went on by itself; what is there was left alone\n"
        "  give an address that holds nothing",
        uri=dest.uri,
        key=key,
    )


def _copy_packs(
    source: ObjectStore,
    dest: ObjectStore,
    names: Mapping[str, str],
    packs: Mapping[str, PackRef],
    means: Means,
) -> tuple[int, int]:
    """Bring packs to the keys that ``names`` gives them, but for those that are there. Bytes copied, and
    bytes found.
    """
    there: dict[str, int] = {}
    for prefix in sorted({key.rpartition("/")[0] for key in names.values()}):
        there.update((info.key, info.size_bytes) for info in dest.scan(prefix))
    for key, name in names.items():
        if there.get(name, packs[key].size) != packs[key].size:
            raise _other_run(dest, name, f"the run, whose pack has {packs[key].size} bytes")
    absent = [(packs[key], name) for key, name in sorted(names.items()) if name not in there]
    done = _Done(means.progress, sum(pack.size for pack, _ in absent))
    done.add(0)
    copied = sum(means.together([_PackCopy(source, dest, pack, name, means, done) for pack, name in absent]))
    return copied, sum(packs[key].size for key in names) - copied


@dataclass(slots=True)
class _Done:
    """Bytes done so far. Copies add to it from several threads."""

    progress: Progress
    total_bytes: int
    bytes: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, more: int) -> None:
        with self.lock:
            self.bytes += more
            self.progress(self.bytes, self.total_bytes)


@dataclass(frozen=True, slots=True)
class _PackCopy:
    """One pack, by the store itself or through here."""

    source: ObjectStore
    dest: ObjectStore
    pack: PackRef
    name: str
    means: Means
    done: _Done

    def __call__(self) -> int:
        try:
            if self.means.server_side is None or not self._by_the_store(self.means.server_side):
                self._through_here()
        except ObjectNotFound as error:
            raise ObjectDamaged(
                f"ObjectDamaged: {self.pack.key} is not in {self.source.uri}, and a commit there needs it\n"
                "  no commit was written",
                key=self.pack.key,
            ) from error
        self.done.add(self.pack.size)
        return self.pack.size

    def _by_the_store(self, server_side: ServerSide) -> bool:
        try:
            with suppress(AlreadyExists):
                server_side(self.pack.key, self.name)
        except ObjectNotFound:
            raise
        except StoreError as error:
            self.means.events(Event("copy.streamed", {"key": self.pack.key, "why": first_line(error)}))
            return False
        self._check_size()
        return True

    def _through_here(self) -> None:
        body = self.source.read(self.pack.key)
        digest = xxhash.xxh3_128_digest(body)
        if len(body) != self.pack.size or digest != (self.pack.digest or digest):
            raise ObjectDamaged(
                f"ObjectDamaged: {self.pack.key} is not what the records of {self.source.uri} say\n"
                f"  expected {self.pack.size} bytes, xxh3-128 {self.pack.digest.hex()}; found {len(body)} bytes, "
                f"{digest.hex()}\n  it was not copied, and no commit was written; `ftckpt verify` names the steps "
                "that need it, and --step copies another",
                key=self.pack.key,
            )
        with suppress(AlreadyExists):  # an earlier try: nobody else can use the name
            self.dest.create(self.name, body)
        self._check_size()

    def _check_size(self) -> None:
        found = self.dest.size(self.name)
        if found != self.pack.size:
            raise ObjectDamaged(
                f"ObjectDamaged: {self.dest.uri} holds {found} bytes of {self.name}, not {self.pack.size}\n"
                "  no commit was written",
                key=self.name,
            )


def _maybe_read(store: ObjectStore, key: str) -> bytes | None:
    try:
        return bytes(store.read(key))
    except ObjectNotFound:
        return None


# --- a fork's own records -------------------------------------------------------------------------


def _is_complete(dest: ObjectStore, nonce: str) -> bool:
    """Whether this very fork was made already. Otherwise nothing is there but what an earlier try left.

    Raises:
        NotSameRun: something else is there.
    """
    body = _maybe_read(dest, layout.RUN)
    if body is not None:
        if decode(RunRecord, body, layout.RUN).run != nonce:
            raise _other_run(dest, layout.RUN, "this fork")
        return True
    key = layout.claim_key(1)
    taken = [info.key for info in dest.scan(layout.ATTEMPTS)]
    if taken and (key not in taken or read_claim(dest, 1).nonce != nonce):
        raise _other_run(dest, taken[0], "this fork")
    return False


def _claim_fork(source: ObjectStore, dest: ObjectStore, origin: Position, nonce: str) -> Claim:
    """Claim attempt 1, with the command of the attempt that it comes from."""
    before = read_claim(source, origin.attempt)
    settings = {name: text for name, text in before.settings.items() if name != "tier"}
    try:
        return claim(
            dest,
            attempt=1,
            nonce=nonce,
            host=socket.gethostname(),
            pid=os.getpid(),
            command=before.command,
            cwd=before.cwd,
            groups=before.groups,
            nproc=before.nproc,
            settings={**settings, "forked_from": f"{source.uri}@{origin.step}"},
        )
    except AttemptTaken as error:
        raise _other_run(dest, layout.claim_key(1), "this fork") from error


def _moved_key(key: str, at: Position) -> str:
    writer = layout.parse_writer(key)
    if writer is None:
        raise ObjectDamaged(f"ObjectDamaged: {key} is not the key of a fragment", key=key)
    return layout.fragment_key(at, writer)


def _moved(fragment: Fragment, at: Position, names: Mapping[str, str]) -> Fragment:
    """The same content as a fragment of another position, whose packs have other names."""
    packs = tuple(PackRef(names[pack.key], pack.size, pack.digest) for pack in fragment.packs)
    return msgspec.structs.replace(fragment, attempt=at.attempt, step=at.step, parent=None, packs=packs)


def _moved_commit(origin: Commit, at: Position, fragments: Mapping[str, Fragment]) -> Commit:
    """The commit of moved fragments: of the same state, and with no parent in its new run."""
    refs = []
    for key, fragment in fragments.items():
        body = encode(fragment)
        refs.append(FragmentRef(key, len(body), digest_of(body), ()))
    found = state_digest(fragments.values())
    if found != origin.state:
        raise ObjectDamaged(
            f"ObjectDamaged: the fragments of {origin.at} hold state {found}, its commit states {origin.state}\n"
            "  no commit was written",
            key=layout.commit_key(origin.at),
            step=origin.step,
        )
    moved = msgspec.structs.replace(
        origin,
        attempt=at.attempt,
        parent=None,
        fragments=tuple(refs),
        components=summarize(at, list(fragments.values())),
    )
    return listed(moved, list(fragments.values()))
