"""Attempts: who may write a run, and where each (re)start goes on from.

Claim, then look, then start. A claim fences: whoever sees a newer claim than its own stops being
acknowledged. A start says which commit its attempt goes on from, once and for all; every group
restores exactly that. Blocks only in store calls; owns no threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ftckpt import layout
from ftckpt.errors import (
    AlreadyExists,
    AttemptTaken,
    CorruptError,
    Fenced,
    NoCommit,
    ObjectNotFound,
    RecordCorrupt,
    RunNotFound,
    SaveFailed,
    StepNotFound,
    StoreError,
)
from ftckpt.lineage import View, on_lineage
from ftckpt.manifest import (
    FORMAT,
    Claim,
    Commit,
    Intent,
    Pin,
    PinKind,
    Position,
    Ref,
    RunRecord,
    Saving,
    Staging,
    Start,
    decode,
    digest_of,
    encode,
)
from ftckpt.store.api import ObjectStore

R = TypeVar("R", RunRecord, Claim, Start, Commit, Pin, Intent, Saving, Staging)
_READ_BACKS = 5


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a run showed: the view, the commit records that could be read (with their
    digests, as refs), and why the others could not.
    """

    view: View
    commits: Mapping[Position, Commit] = field(default_factory=dict)
    refs: Mapping[Position, Ref] = field(default_factory=dict)
    damaged: Mapping[Position, CorruptError] = field(default_factory=dict)

    @property
    def lineage(self) -> list[Position]:
        """Readable commits that count, newest first; damaged ones are among them."""
        return on_lineage(self.view)


def read_record(store: ObjectStore, kind: type[R], key: str) -> R:
    """Read and check one record."""
    return decode(kind, bytes(store.read(key)), key)


def create_owned(store: ObjectStore, key: str, body: bytes) -> bytes:
    """Create ``key`` and return what is there afterwards: ``body`` if this call, or an earlier try
    of it whose answer was lost, was the first; else the bytes of whoever was first.

    ``body`` must hold a nonce, or be such that equal bytes mean the same thing.
    """
    last: StoreError | None = None
    for _ in range(_READ_BACKS):
        try:
            store.create(key, body)
            return body
        except AlreadyExists:
            return bytes(store.read(key))
        except StoreError as error:
            if not error.retryable:
                raise
            last = error
        try:
            return bytes(store.read(key))
        except ObjectNotFound:
            continue
        except StoreError as error:
            if not error.retryable:
                raise
            last = error
    assert last is not None
    raise last


def open_run(store: ObjectStore, name: str) -> RunRecord:
    """Make the prefix a run, or find that it is one."""
    found = create_owned(store, layout.RUN, encode(RunRecord(format=FORMAT, run=name)))
    return decode(RunRecord, found, layout.RUN)


def find_run(store: ObjectStore) -> RunRecord:
    """The run at this address.

    Raises:
        RunNotFound: there is none. Nothing was created.
    """
    try:
        return read_record(store, RunRecord, layout.RUN)
    except ObjectNotFound as error:
        raise RunNotFound(
            f"RunNotFound: there is no run at {store.uri}\n"
            "  the address may be mistyped, or the run was never started; nothing was created or changed\n"
            "  `ftckpt ls` shows what an address holds; `ftckpt run` starts a run",
            uri=store.uri,
        ) from error


def look(store: ObjectStore) -> Look:
    """List and read what decides the lineage. Commits that do not decode are told apart, not skipped."""
    claims = {n for info in store.scan(layout.ATTEMPTS) if (n := layout.parse_number(info.key))}
    starts = {
        n: read_start(store, n).parent
        for info in store.scan(layout.STARTS)
        if (n := layout.parse_number(info.key))
    }
    keys = {at for info in store.scan(layout.COMMITS) if (at := layout.parse_commit(info.key))}
    collected = {at for info in store.scan(layout.COLLECTED) if (at := layout.parse_commit(info.key))}
    commits: dict[Position, Commit] = {}
    refs: dict[Position, Ref] = {}
    damaged: dict[Position, CorruptError] = {}
    for at in sorted(keys - collected):
        try:
            commits[at], refs[at] = decode_commit(at, bytes(store.read(layout.commit_key(at))))
        except CorruptError as error:
            damaged[at] = error
    view = View(
        claims=frozenset(claims),
        starts={n: parent.at if parent else None for n, parent in starts.items()},
        commits=frozenset(keys),
        aborted=frozenset(at for at, commit in commits.items() if commit.aborted),
        collected=frozenset(collected),
    )
    return Look(view, commits, refs, damaged)


def decode_commit(at: Position, body: bytes) -> tuple[Commit, Ref]:
    """The record that was read from the commit key of ``at``, and the ref to it."""
    key = layout.commit_key(at)
    record = decode(Commit, body, key)
    if record.at != at:
        raise _misplaced(key, str(record.at))
    return record, Ref(at.step, at.attempt, digest_of(body))


def _misplaced(key: str, found: str) -> RecordCorrupt:
    return RecordCorrupt(f"RecordCorrupt: {key} holds the record of {found}", key=key)


def choose(seen: Look, uri: str, step: int | None = None) -> Ref:
    """The commit to go on from: the newest on the lineage, or that of ``step``.

    Raises:
        NoCommit: nothing is readable.
        StepNotFound: ``step`` has no readable commit.
        RecordCorrupt: the chosen one is damaged; the message names the next older good one.
    """
    lineage = seen.lineage
    steps = ", ".join(str(at.step) for at in lineage[:8]) + (", …" if len(lineage) > 8 else "")
    if not lineage:
        raise NoCommit(
            f"NoCommit: the run at {uri} has no readable commit\n"
            f"  attempts claimed: {len(seen.view.claims)}, given-up steps: {len(seen.view.aborted)}; "
            "nothing was changed",
            uri=uri,
        )
    at = lineage[0] if step is None else next((at for at in lineage if at.step == step), None)
    if at is None:
        raise StepNotFound(
            f"StepNotFound: step {step} of {uri} has no readable commit\n"
            f"  readable steps, newest first: {steps}\n"
            "  nothing was changed; choose one of these, or leave the step out for the newest",
            uri=uri,
            step=step,
        )
    if at in seen.damaged:
        raise explain_damage(seen, at, seen.damaged[at])
    return seen.refs[at]


def older_good(seen: Look, at: Position) -> Position | None:
    """The next older commit on the lineage whose record reads well."""
    return next((o for o in seen.lineage if o < at and o not in seen.damaged), None)


def explain_damage(seen: Look, at: Position, error: CorruptError) -> CorruptError:
    """The same error, with what is still safe."""
    older = older_good(seen, at)
    advice = (
        f"  step {older.step} is the next older one: `ftckpt resume RUN --step {older.step}`, or allow `--fallback`"
        if older
        else "  no older commit is left on this lineage"
    )
    return type(error)(f"{error.message}\n{advice}", **{**error.facts, "step": at.step, "older": older})


def claim(
    store: ObjectStore,
    *,
    attempt: int | None = None,
    nonce: str,
    host: str,
    pid: int,
    command: Sequence[str],
    cwd: str,
    groups: int,
    nproc: int,
    settings: Mapping[str, str] | None = None,
) -> Claim:
    """Claim an attempt: the next number, or ``attempt`` when it was given.

    From then on older attempts are not acknowledged any more.

    Raises:
        AttemptTaken: somebody else was first. It is never followed by a try for the next number.
    """
    if attempt is None:
        taken = (layout.parse_number(info.key) or 0 for info in store.scan(layout.ATTEMPTS))
        attempt = max(taken, default=0) + 1
    mine = Claim(
        attempt=attempt,
        nonce=nonce,
        host=host,
        pid=pid,
        command=tuple(command),
        cwd=cwd,
        groups=groups,
        nproc=nproc,
        settings=dict(settings or {}),
    )
    key = layout.claim_key(attempt)
    found = decode(Claim, create_owned(store, key, encode(mine)), key)
    if found.nonce != nonce:
        raise AttemptTaken(
            f"AttemptTaken: attempt {attempt} of {store.uri} was claimed by process {found.pid} on {found.host}\n"
            "  another job is starting this run at the same moment; this one stops and changed nothing\n"
            "  if that job is dead, start again: the next attempt will be claimed",
            attempt=attempt,
            host=found.host,
            nonce=found.nonce,
        )
    return mine


def read_claim(store: ObjectStore, attempt: int) -> Claim:
    """The claim of an attempt."""
    return read_record(store, Claim, layout.claim_key(attempt))


def read_start(store: ObjectStore, attempt: int) -> Start:
    """The start of an attempt. Raises ``ObjectNotFound`` when it has not begun."""
    key = layout.start_key(attempt)
    record = read_record(store, Start, key)
    if record.attempt != attempt:
        raise _misplaced(key, f"attempt {record.attempt}")
    return record


def start(
    store: ObjectStore,
    mine: Claim,
    parent: Ref | None,
    *,
    log_end: int | None = None,
    versions: Mapping[str, str] | None = None,
) -> Start:
    """Begin a claimed attempt from ``parent``, which ``look`` showed *after* the claim existed.

    Raises:
        Fenced: a newer claim appeared meanwhile; nothing was begun.
        AttemptTaken: another process began it.
    """
    check_fence(store, mine.attempt)
    record = Start(
        attempt=mine.attempt,
        nonce=mine.nonce,
        parent=parent,
        log_end=log_end,
        groups=mine.groups,
        nproc=mine.nproc,
        versions=dict(versions or {}),
    )
    key = layout.start_key(mine.attempt)
    found = decode(Start, create_owned(store, key, encode(record)), key)
    if found.nonce != mine.nonce:
        raise AttemptTaken(
            f"AttemptTaken: attempt {mine.attempt} of {store.uri} was begun by somebody else\n"
            "  this process stops and changed nothing",
            attempt=mine.attempt,
            nonce=found.nonce,
        )
    return record


def check_fence(store: ObjectStore, attempt: int) -> None:
    """Raise unless this attempt still owns the run. One listing.

    Raises:
        Fenced: a newer attempt was claimed.
        SaveFailed: the attempt's own claim is gone, and so is the run for whoever looks for it.
    """
    claims = {layout.parse_number(info.key) or 0 for info in store.scan(layout.ATTEMPTS)}
    newest = max(claims, default=0)
    if newest > attempt:
        raise Fenced(
            f"Fenced: attempt {newest} of {store.uri} was claimed; this is attempt {attempt}\n"
            "  what this job wrote before that is safe; what it writes from now on is on no lineage\n"
            "  it stops at the step boundary so that two jobs do not train one run",
            attempt=attempt,
            newest=newest,
        )
    if attempt not in claims:
        raise SaveFailed(
            f"SaveFailed: the claim of attempt {attempt} is gone from {store.uri}: somebody emptied or replaced it\n"
            "  what is saved there now belongs to no run and could not be resumed; training may go on\n"
            "  restore what was deleted; a tier is made anew when the job starts again, a run needs another address",
            attempt=attempt,
        )


def adopt(carried: Sequence[int | None]) -> int | None:
    """The attempt that a set of members goes on with: the highest that any of them carries, or
    ``None`` when none carries one and a new one must be claimed. A restarted member carries none,
    and so cannot fence the peers that live.
    """
    return max((attempt for attempt in carried if attempt is not None), default=None)


def pin(
    store: ObjectStore,
    pin_id: str,
    at: Position,
    kind: PinKind,
    holder: str,
    *,
    by_attempt: int = 0,
    by_step: int = 0,
) -> bool:
    """Pin a commit, then look for collectors that are about to delete it.

    False: one is; the pin is gone again and the caller chooses anew. True: until ``unpin`` no
    collector that begins now, or re-reads now, will take it. An id is for one commit and one holder:
    after ``unpin`` a delayed create may bring the old pin back.

    Raises:
        AlreadyExists: the id is in use for something else. Nothing was changed.
    """
    record = Pin(
        pin=pin_id,
        step=at.step,
        attempt=at.attempt,
        kind=kind,
        holder=holder,
        by_attempt=by_attempt,
        by_step=by_step,
    )
    key = layout.pin_key(pin_id)
    body = encode(record)
    if (found := create_owned(store, key, body)) != body:
        other = decode(Pin, found, key)
        raise AlreadyExists(
            f"AlreadyExists: pin {pin_id} of {store.uri} holds step {other.step} of attempt {other.attempt} "
            f"for {other.holder}\n  nothing was changed; `ftckpt gc --drop-pin {pin_id}` lets go of it",
            op="create",
            key=key,
            uri=store.uri,
        )
    doomed = any((at.step, at.attempt) in intent.victims for intent in read_intents(store))
    if doomed or any(layout.parse_commit(i.key) == at for i in store.scan(layout.COLLECTED)):
        unpin(store, pin_id)
        return False
    return True


def unpin(store: ObjectStore, pin_id: str) -> None:
    """Let go of a pin; an absent one is fine."""
    store.delete([layout.pin_key(pin_id)])


def read_pins(store: ObjectStore) -> list[Pin]:
    """All pins. One that vanishes between listing and reading was let go of."""
    return [pin for info in store.scan(layout.PINS) if (pin := _maybe(store, Pin, info.key)) is not None]


def read_intents(store: ObjectStore) -> list[Intent]:
    """What open collections are about to delete."""
    return [found for info in store.scan(layout.GC) if (found := _maybe(store, Intent, info.key)) is not None]


def _maybe(store: ObjectStore, kind: type[R], key: str) -> R | None:
    try:
        return read_record(store, kind, key)
    except ObjectNotFound:
        return None
