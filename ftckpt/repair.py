"""Repair: damaged or lost objects of a run, brought back from another place that holds the same run.

Knows which record proves which object. Refuses to judge by majority, date or name: bytes are put only
when they are proven to be those that the key was created with, and what nothing proves is left and
named. A damaged object is overwritten in one call, so a reader sees the damage or the good bytes and
never a key that is free; a lost one is created. Whoever dies half way is run again.

What proves what:

* a fragment: the size and digest in the commit that names it; a pack: those in the fragment that names it;
* a commit: the digest in any start or commit that names it; where none does, what is left of the record
  itself, or a fragment that is here just as the other place's commit names it;
* a start and a claim: the random nonce that each shares with the other, or what is left of it;
* ``run.json``: what is left of it, or a claim that is here and there with the same nonce.

"What is left": the record ends with the digest of its body, so that either half proves the whole.
Tombstones mean what they mean by being there, and pins, intents and notes of tiers belong to whoever
is at work: none of them is ever touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ftckpt import layout
from ftckpt.attempts import decode_commit, look, read_claim, read_start
from ftckpt.errors import (
    AlreadyExists,
    CorruptError,
    FtckptError,
    NotSameRun,
    ObjectNotFound,
    RunNotFound,
    StoreError,
    UnknownFormat,
    first_line,
)
from ftckpt.manifest import (
    Claim,
    Commit,
    Fragment,
    FragmentRef,
    PackRef,
    Ref,
    RunRecord,
    Start,
    decode,
    digest_of,
    is_what_is_left_of,
)
from ftckpt.reader import Progress, read_fragment_here
from ftckpt.run import Problem, Run
from ftckpt.store.api import ObjectStore


@dataclass(frozen=True, slots=True)
class Mended:
    """An object that is whole again, and where its bytes came from."""

    key: str
    source: str


@dataclass(frozen=True, slots=True)
class Left:
    """A problem that stays, and why nothing was done about it."""

    problem: Problem
    why: str


@dataclass(frozen=True, slots=True)
class Repaired:
    """What a repair did. ``left`` is empty when the run, or the step, is whole now."""

    mended: tuple[Mended, ...]
    left: tuple[Left, ...]


def repair(
    store: ObjectStore,
    sources: Sequence[ObjectStore],
    *,
    step: int | None = None,
    progress: Progress | None = None,
) -> Repaired:
    """Verify a run, or one step of it, and mend what is wrong from the first of ``sources`` that has it.

    Reads everything again after it mended something: what it calls whole was read. Safe beside a
    running job, a collector and another repair; it may die at any call and be run again.

    Raises:
        RunNotFound: there is no run, and nothing that any of the sources proves to be left of one.
        NotSameRun: a source holds another run. Nothing was changed.
        StepNotFound, NoCommit: as ``Run.verify``.
    """
    mended: dict[str, Mended] = {}
    why: dict[str, str] = {}
    for one in _mend_run(store, sources):
        mended[one.key] = one
    while True:
        problems = _verify(store, step, progress)
        if not problems:
            return Repaired(tuple(mended[key] for key in sorted(mended)), ())
        proofs = _gather_proofs(store)
        before = len(mended)
        for key in dict.fromkeys(problem.key for problem in problems):
            if key in mended:
                why[key] = "it is damaged again, or the store did not keep what it was given"
                continue
            done = _mend(store, sources, key, proofs)
            if isinstance(done, Mended):
                mended[key] = done
            else:
                why[key] = done
        if len(mended) == before:
            left = tuple(Left(problem, why[problem.key]) for problem in problems)
            still = {problem.key for problem in problems}
            return Repaired(tuple(mended[key] for key in sorted(mended.keys() - still)), left)


def _verify(store: ObjectStore, step: int | None, progress: Progress | None) -> list[Problem]:
    try:
        return Run(store).verify(step, progress)
    except CorruptError as error:  # what decides which steps there are, or the record of the step itself
        return [Problem(str(error.facts.get("key", "")), step, error)]


# --- run.json -------------------------------------------------------------------------------------


def _mend_run(store: ObjectStore, sources: Sequence[ObjectStore]) -> Iterator[Mended]:
    """See that every source holds this very run; bring ``run.json`` back if that is what is damaged."""
    theirs = [(source, *_read_run(source)) for source in sources]
    own = _maybe_read(store, layout.RUN)
    try:
        name = None if own is None else decode(RunRecord, own, layout.RUN).run
    except CorruptError:
        name = None
    if name is not None:
        for source, run, _ in theirs:
            if run.run != name:
                raise _another(store, source.uri)
        return
    for source, found, body in theirs:
        if (own is not None and is_what_is_left_of(own, body)) or _share_a_claim(store, source):
            for other, run, _ in theirs:
                if run.run != found.run:
                    raise _another(store, other.uri)
            _put(store, layout.RUN, body, lost=own is None)
            yield Mended(layout.RUN, source.uri)
            return
    if own is None:
        raise RunNotFound(
            f"RunNotFound: there is no run at {store.uri}, and no attempt of {' or '.join(source.uri for source in sources)} either\n"
            "  nothing was changed; `ftckpt copy` makes a copy where nothing is",
            uri=store.uri,
        )


def _read_run(source: ObjectStore) -> tuple[RunRecord, bytes]:
    try:
        body = bytes(source.read(layout.RUN))
    except ObjectNotFound as error:
        raise RunNotFound(
            f"RunNotFound: there is no run at {source.uri} to repair from\n  nothing was changed",
            uri=source.uri,
        ) from error
    return decode(RunRecord, body, layout.RUN), body


def _share_a_claim(store: ObjectStore, source: ObjectStore) -> bool:
    for info in store.scan(layout.ATTEMPTS):
        own, other = _maybe_read(store, info.key), _maybe_read(source, info.key)
        try:
            if own is not None and own == other and decode(Claim, own, info.key).nonce:
                return True
        except (CorruptError, UnknownFormat):
            continue
    return False


def _another(store: ObjectStore, uri: str) -> NotSameRun:
    return NotSameRun(
        f"NotSameRun: {uri} holds another run than {store.uri}\n"
        "  nothing was changed; repair from a tier of this run or from a copy of it",
        uri=uri,
        key=layout.RUN,
    )


# --- proofs ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Proofs:
    """What the records that are whole say of the others, by key."""

    nonces: dict[str, str] = field(default_factory=dict)
    commits: dict[str, set[str]] = field(default_factory=dict)
    fragments: dict[str, FragmentRef] = field(default_factory=dict)
    packs: dict[str, PackRef] = field(default_factory=dict)

    def name(self, ref: Ref | None) -> None:
        if ref is not None:
            self.commits.setdefault(layout.commit_key(ref.at), set()).add(ref.digest)


def _gather_proofs(store: ObjectStore) -> _Proofs:
    proofs = _Proofs()
    for info in store.scan(layout.ATTEMPTS):
        if (attempt := layout.parse_number(info.key)) is not None:
            try:
                proofs.nonces[layout.start_key(attempt)] = read_claim(store, attempt).nonce
            except (CorruptError, UnknownFormat, ObjectNotFound):
                continue
    for info in store.scan(layout.STARTS):
        if (attempt := layout.parse_number(info.key)) is not None:
            try:
                start = read_start(store, attempt)
            except (CorruptError, UnknownFormat, ObjectNotFound):
                continue
            proofs.nonces[layout.claim_key(attempt)] = start.nonce
            proofs.name(start.parent)
    try:
        seen = look(store)
    except CorruptError:
        return proofs  # a start: once it is mended the rest can be seen
    for at in sorted(seen.view.readable):
        if (commit := seen.commits.get(at)) is not None:
            proofs.name(commit.parent)
            _add_contents(store, commit, proofs)
    return proofs


def _add_contents(store: ObjectStore, commit: Commit, proofs: _Proofs) -> None:
    for ref in commit.fragments:
        proofs.fragments[ref.key] = ref
        try:
            fragment, _ = read_fragment_here(store, ref, commit.at)
        except (CorruptError, UnknownFormat, StoreError):
            continue
        for pack in fragment.packs:
            if pack.digest or pack.key not in proofs.packs:
                proofs.packs[pack.key] = pack


def _why_not(store: ObjectStore, key: str, body: bytes, own: bytes | None, proofs: _Proofs) -> str:
    """Why these bytes are not known to be what ``key`` was created with; empty: they are."""
    folder = key.partition("/")[0]
    if folder == layout.PACKS:
        pack = proofs.packs.get(key)
        if pack is None or not pack.digest:
            return "no record that is whole states its digest"
        same = len(body) == pack.size and digest_of(body) == pack.digest.hex()
        return "" if same else "the bytes there are not those that the records name"
    if folder == layout.FRAGMENTS and (ref := proofs.fragments.get(key)) is not None:
        same = len(body) == ref.size and digest_of(body) == ref.digest
        return "" if same else "the bytes there are not those that the commit names"
    try:
        return _why_no_record(store, key, body, own, proofs)
    except FtckptError as error:
        return f"what is there does not read either: {first_line(error)}"


def _why_no_record(store: ObjectStore, key: str, body: bytes, own: bytes | None, proofs: _Proofs) -> str:
    left = own is not None and is_what_is_left_of(own, body)
    folder = key.partition("/")[0]
    attempt, at = layout.parse_number(key), layout.parse_commit(key)
    if folder in (layout.ATTEMPTS, layout.STARTS) and attempt is not None:
        record = decode(Claim, body, key) if folder == layout.ATTEMPTS else decode(Start, body, key)
        if record.attempt != attempt:
            return f"what is there is of attempt {record.attempt}"
        proven = left or proofs.nonces.get(key) == record.nonce
        return "" if proven else "nothing here proves that what is there is the same attempt"
    if folder == layout.COMMITS and at is not None:
        commit, ref = decode_commit(at, body)
        named = proofs.commits.get(key, set())
        if named:
            same = named == {ref.digest}
            return "" if same else "another commit than that which is there is named here"
        proven = left or _has_a_fragment_of(store, commit)
        return "" if proven else "nothing here proves that what is there is the same commit"
    if folder == layout.FRAGMENTS:
        decode(Fragment, body, key)
        return "" if left else "no commit names it, and nothing is left of it that proves what it was"
    if key == layout.RUN:
        return "nothing here proves that what is there is the same run"
    return "objects of this kind are not repaired: it matters that they are there, or to whom is at work"


def _has_a_fragment_of(store: ObjectStore, commit: Commit) -> bool:
    """Whether a fragment is here just as that commit names it: its writer's life was never another's."""
    for ref in commit.fragments:
        try:
            read_fragment_here(store, ref, commit.at)
        except (CorruptError, UnknownFormat, StoreError):
            continue
        return True
    return False


# --- mending --------------------------------------------------------------------------------------


def _mend(store: ObjectStore, sources: Sequence[ObjectStore], key: str, proofs: _Proofs) -> Mended | str:
    """Put the first proven bytes; or say why there are none."""
    if not key:
        return "no single object is to blame"
    own = _maybe_read(store, key)
    reasons: dict[str, str] = {}
    for source in sources:
        try:
            body = _maybe_read(source, key)
        except StoreError as error:
            reasons[source.uri] = first_line(error)
            continue
        if body is None:
            reasons[source.uri] = "it is not there"
        elif body == own:
            reasons[source.uri] = "the same bytes are there"
        elif not (why := _why_not(store, key, body, own, proofs)):
            _put(store, key, body, lost=own is None)
            return Mended(key, source.uri)
        else:
            reasons[source.uri] = why
    return "; ".join(f"{uri}: {why}" for uri, why in reasons.items())


def _put(store: ObjectStore, key: str, body: bytes, *, lost: bool) -> None:
    if not lost:
        store.overwrite(key, body)
        return
    try:
        store.create(key, body)
    except AlreadyExists:  # another repair, or an earlier try of this one; the next look tells
        return


def _maybe_read(store: ObjectStore, key: str) -> bytes | None:
    try:
        return bytes(store.read(key))
    except ObjectNotFound:
        return None
