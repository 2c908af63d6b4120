"""The agent: brings what a tier holds to the far store, in order, whoever has died meanwhile.

It goes through the steps that the tier owes, by attempt and step, and passes none over: the far store
gets the step, or an ``aborted`` record. Bytes are copied as they are, packs first, then fragments,
then the commit, so the far store never has a commit that names absent packs. It may die at any call
and be run again; two at once are harmless.

Blocks only in store and clock calls and owns no threads: whoever wants several copies at a time
hands in ``together``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from ftckpt import layout
from ftckpt.agent.notes import Plan, read_plans, with_parent
from ftckpt.attempts import create_owned, decode_commit, find_run, pin, read_start, unpin
from ftckpt.clock import Clock, SystemClock
from ftckpt.commit import Patience, abort, build, create_commit, gather, put_fragment, read_commit
from ftckpt.errors import (
    AlreadyExists,
    CorruptError,
    FtckptError,
    ObjectDamaged,
    ObjectNotFound,
    RunNotFound,
    first_line,
)
from ftckpt.events import Event, Events, silent
from ftckpt.gc import collect, owed, superseded
from ftckpt.layout import Writer
from ftckpt.lineage import View
from ftckpt.manifest import (
    FORMAT,
    Commit,
    Fragment,
    PackRef,
    Position,
    Ref,
    Tombstone,
    decode,
    digest_of,
    encode,
)
from ftckpt.store.api import ObjectStore
from ftckpt.tiers import mirror

Together = Callable[[Sequence[Callable[[], int]]], list[int]]
"""Runs copies, all of them, and returns the bytes of each; raises the first failure."""


_PATIENCE = Patience()


class Near(Protocol):
    """What the agent asks of a tier."""

    @property
    def store(self) -> ObjectStore: ...

    def is_alive(self, name: Writer | str) -> bool:
        """Whether the writer's process lives, and so finishes its share itself."""
        ...

    def staged(self, writer: Writer) -> AbstractContextManager[memoryview]:
        """The writer's staging file; empty when there is none."""
        ...

    def bury(self) -> None:
        """Remove what dead writers left beside the objects."""
        ...


@dataclass(frozen=True, slots=True)
class Drained:
    """What one pass did. ``waiting``: steps that somebody who lives, here or elsewhere, must finish."""

    committed: tuple[Position, ...] = ()
    given_up: tuple[Position, ...] = ()
    waiting: tuple[Position, ...] = ()
    copied_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Settled:
    """What became of a step in the far store, who planned it, and what it took."""

    record: Commit
    plans: Sequence[Plan] = ()
    copied_bytes: int = 0


def in_turn(copies: Sequence[Callable[[], int]]) -> list[int]:
    """One after the other."""
    return [copy() for copy in copies]


class Agent:
    """Drains one tier into one far store. ``nonce`` gives 32 hex digits that nobody ever used."""

    def __init__(
        self,
        near: Near,
        far: ObjectStore,
        *,
        nonce: Callable[[], str],
        clock: Clock,
        events: Events = silent,
        patience: Patience = _PATIENCE,
        together: Together = in_turn,
    ) -> None:
        self._tier = near
        self._near = near.store
        self._far = far
        self._nonce = nonce
        self._life = nonce()
        self._clock = clock
        self._events = events
        self._patience = patience
        self._together = together
        self._newest_claim = 0
        self._first_seen_s: dict[Position, float] = {}

    def watch(self) -> None:
        """Bring newer claims and starts of the far store into the tier, where its writers look."""
        mirror(self._far, self._near)
        claims = (layout.parse_number(info.key) or 0 for info in self._near.scan(layout.ATTEMPTS))
        newest = max(claims, default=0)
        if newest > self._newest_claim > 0:
            self._events(Event("agent.fenced", {"newest": newest}))
        self._newest_claim = newest

    def drain(self) -> Drained:
        """One pass over everything owed. On return each step of it is settled in the far store, but for
        those ``waiting``.

        Raises:
            StoreError: one of the stores failed; what was settled before stays so, and the step it
                stopped at is still owed. Run it again.
        """
        committed: list[Position] = []
        given_up: list[Position] = []
        waiting: list[Position] = []
        copied_bytes, last = 0, None
        for at in owed(self._near):
            begun_s = self._clock.now_s()
            behind = any(other.attempt == at.attempt for other in waiting)
            done = None if behind else self._step(at)
            if done is None:
                waiting.append(at)
                continue
            self._release(at, done.record)
            copied_bytes += done.copied_bytes
            told = {"step": at.step, "attempt": at.attempt}
            if done.record.aborted:
                given_up.append(at)
                self._events(Event("agent.aborted", {**told, "why": done.record.aborted}))
                continue
            committed.append(at)
            last = done
            if not all(plan.shared for plan in done.plans):
                self._prune(at)
            seconds = round(self._clock.now_s() - begun_s, 3)
            self._events(Event("agent.drained", {**told, "bytes": done.copied_bytes, "seconds": seconds}))
        if last is not None:
            self._collect(last)
        if committed or given_up:
            self._tier.bury()
        return Drained(tuple(committed), tuple(given_up), tuple(waiting), copied_bytes)

    def _step(self, at: Position) -> _Settled | None:
        """Settle a step in the far store; ``None`` while somebody who lives must add to it."""
        plans: list[Plan] = []
        trouble = ""
        shared = True
        try:
            plans = read_plans(self._near, at)
            shared = all(plan.shared for plan in plans)
            if shared and self._settle_here(at, plans) is None:
                return None
        except CorruptError as error:
            trouble = f"the tier is damaged: {first_line(error)}"
        self.watch()
        try:
            found = read_commit(self._far, at)
        except CorruptError as error:
            return _Settled(_given_up(at, f"its key is taken by what does not read: {first_line(error)}"))
        if found is not None:
            return _Settled(found[0], plans)
        if (newest := self._superseded_by(at)) is not None:
            return _Settled(abort(self._far, at, f"attempt {newest} goes on from an earlier step")[0])
        if trouble:
            return _Settled(abort(self._far, at, trouble)[0])
        try:
            return self._copy_step(at, plans) if shared else self._bring_shares(at, plans)
        except CorruptError as error:
            return _Settled(abort(self._far, at, first_line(error))[0])

    def _superseded_by(self, at: Position) -> int | None:
        """The newest attempt, if it leaves this position behind."""
        starts = {
            n: parent.at if (parent := read_start(self._near, n).parent) is not None else None
            for info in self._near.scan(layout.STARTS)
            if (n := layout.parse_number(info.key))
        }
        view = View(starts=starts)
        return view.newest_start if superseded(at, view) else None

    # --- the tier ------------------------------------------------------------------------------

    def _settle_here(self, at: Position, plans: Sequence[Plan]) -> Commit | None:
        """What became of a step in a tier that all its writers share. Who lives settles it; what only dead
        ones have left is finished and settled here.
        """
        if (found := read_commit(self._near, at)) is not None:
            return found[0]
        dead = self._dead(plans)
        why = "nobody left a note of who writes it"
        for plan in read_plans(self._near, at):  # once more: what the dead wrote last
            expected = with_parent(plan, self._near)
            plan_dead = [writer for writer in plan.writers if writer in dead]
            lost = self._finish(plan, expected.parent, plan_dead)
            if len(plan_dead) < len(plan.writers):
                if lost:
                    return abort(self._near, at, lost)[0]
                return None
            if not lost:
                return create_commit(self._near, build(expected, gather(self._near, expected)))[0]
            why = lost
        return abort(self._near, at, why)[0]

    def _dead(self, plans: Iterable[Plan]) -> set[Writer]:
        writers = {writer for plan in plans for writer in plan.writers}
        return {writer for writer in writers if not self._tier.is_alive(writer)}

    def _finish(self, plan: Plan, parent: Ref | None, dead: Sequence[Writer]) -> str:
        """See that the fragments of these writers are in the tier. Why that cannot be, if it cannot."""
        at = plan.expected.at
        for writer in dead:
            key = layout.fragment_key(at, writer)
            if any(info.key == key for info in self._near.scan(layout.fragment_prefix(at))):
                continue
            staging = plan.stagings.get(writer)
            if staging is None:
                return f"{writer} died before its share was safe"
            from ftckpt.agent.finish import finish_share

            packer = Writer(writer.group, writer.rank, self._nonce())
            with self._tier.staged(writer) as staged:
                fragment = finish_share(self._near, staging, staged, parent, packer)
            put_fragment(self._near, fragment, writer)
            self._events(
                Event("agent.finished", {"step": at.step, "attempt": at.attempt, "writer": str(writer)})
            )
        return ""

    # --- the far store -------------------------------------------------------------------------

    def _copy_step(self, at: Position, plans: Sequence[Plan]) -> _Settled:
        """Copy a step that is settled in the tier."""
        body = bytes(self._near.read(layout.commit_key(at)))
        record, _ = decode_commit(at, body)
        if record.aborted:
            return _Settled(abort(self._far, at, record.aborted)[0], plans)
        fragments = {}
        for ref in record.fragments:
            fragments[ref.key] = self._read(ref.key, ref.size, ref.digest)
        copied_bytes = self._copy_shares(at, record.parent, fragments)
        found = create_owned(self._far, layout.commit_key(at), body)
        return _Settled(decode_commit(at, found)[0], plans, copied_bytes)

    def _bring_shares(self, at: Position, plans: Sequence[Plan]) -> _Settled | None:
        """Bring what this machine has of a step that several machines write, and settle it if that was all."""
        dead = self._dead(plans)
        copied_bytes = 0
        self._first_seen_s.setdefault(at, self._clock.now_s())
        for plan in read_plans(self._near, at):
            expected = with_parent(plan, self._far)
            lost = self._finish(plan, expected.parent, sorted(dead & plan.here))
            if lost:
                return _Settled(abort(self._far, at, lost)[0])
            there = {info.key for info in self._near.scan(layout.fragment_prefix(at))}
            keys = [key for writer in plan.here if (key := layout.fragment_key(at, writer)) in there]
            fragments = {key: bytes(self._near.read(key)) for key in keys}
            copied_bytes += self._copy_shares(at, expected.parent, fragments)
            found = gather(self._far, expected)
            if len(found) == len(plan.writers) or any(fragment.failure for fragment, _ in found.values()):
                return _Settled(create_commit(self._far, build(expected, found))[0], plans, copied_bytes)
        waited_s = self._clock.now_s() - self._first_seen_s[at]
        if waited_s >= self._patience.deadline_s:
            why = f"not all shares came within {self._patience.deadline_s:.0f} s"
            return _Settled(abort(self._far, at, why)[0])
        return None

    def _copy_shares(self, at: Position, parent: Ref | None, fragments: dict[str, bytes]) -> int:
        """Fragments and, before them, all packs they name. The bytes that were not there yet."""
        packs = {
            pack.key: pack for key, body in fragments.items() for pack in decode(Fragment, body, key).packs
        }
        own = layout.pack_prefix(at) + "/"
        if any(not key.startswith(own) for key in packs):
            self._hold(at, parent)
        copied_bytes = self._copy_packs(packs.values())
        for key, body in fragments.items():
            if create_owned(self._far, key, body) != body:
                raise ObjectDamaged(f"ObjectDamaged: {self._far.uri} has another {key}", key=key)
        return copied_bytes

    def _hold(self, at: Position, parent: Ref | None) -> None:
        """Keep collectors from the packs that a step shares with its parent, until ``_release`` lets go."""
        found = None if parent is None else read_commit(self._far, parent.at)
        if parent is None or found is None or found[1] != parent or not self._pin(at, parent.at):
            raise ObjectDamaged(
                f"ObjectDamaged: {at} builds on {parent.at if parent else 'nothing'}, which is not in the far "
                "store, or is being collected there",
                step=at.step,
            )

    def _pin(self, at: Position, parent: Position) -> bool:
        name = f"{_pin_prefix(at)}{self._life}"
        holder = f"the agent, for {at}"
        return pin(self._far, name, parent, "agent", holder, by_attempt=at.attempt, by_step=at.step)

    def _copy_packs(self, packs: Iterable[PackRef]) -> int:
        wanted = {pack.key: pack for pack in packs}
        there: dict[str, int] = {}
        for prefix in sorted({key.rpartition("/")[0] for key in wanted}):
            there.update((info.key, info.size_bytes) for info in self._far.scan(prefix))
        absent = [pack for key, pack in sorted(wanted.items()) if there.get(key) != pack.size]
        return sum(self._together([partial(self._copy_pack, pack) for pack in absent]))

    def _copy_pack(self, pack: PackRef) -> int:
        """One pack, proven on the way."""
        body = self._read(pack.key, pack.size, pack.digest.hex())
        with suppress(AlreadyExists):
            self._far.create(pack.key, body)
        found = self._far.size(pack.key)
        if found != len(body):
            raise ObjectDamaged(
                f"ObjectDamaged: {self._far.uri} holds {found} bytes of {pack.key}, of {len(body)} it was given",
                key=pack.key,
            )
        return len(body)

    def _read(self, key: str, size: int, digest: str) -> bytes:
        """An object of the tier as a record names it."""
        try:
            body = bytes(self._near.read(key))
        except ObjectNotFound as error:
            raise ObjectDamaged(f"ObjectDamaged: {key} is not in the tier any more", key=key) from error
        if len(body) != size or (digest and digest_of(body) != digest):
            raise ObjectDamaged(f"ObjectDamaged: {key} has changed in the tier", key=key)
        return body

    # --- afterwards ----------------------------------------------------------------------------

    def _release(self, at: Position, record: Commit) -> None:
        """The far store has settled a step: it is not owed any more, and nothing is held for it."""
        if record.aborted:
            self._give_up_here(at, record.aborted)
        for info in self._far.scan(layout.PINS):
            name = info.key.rpartition("/")[2]
            if name.startswith(_pin_prefix(at)):
                unpin(self._far, name)
        notes = [
            info.key
            for prefix in (layout.SAVES, layout.STAGED)
            for info in self._near.scan(f"{prefix}/{at.attempt:06d}/{at.step:012d}")
        ]
        self._near.delete(notes)
        self._first_seen_s.pop(at, None)

    def _prune(self, at: Position) -> None:
        """Of steps that are settled elsewhere, keep the newest share and what is owed; the tier's own collector
        knows nothing of the others.
        """
        kept = {at, *owed(self._near)}
        needed: set[str] = set()
        for info in self._near.scan(layout.FRAGMENTS):
            if layout.parse_position(info.key) in kept:
                try:
                    fragment = decode(Fragment, bytes(self._near.read(info.key)), info.key)
                except CorruptError:
                    return  # what does not read may need anything
                needed.update([info.key, *(pack.key for pack in fragment.packs)])
        settled_here = {layout.parse_commit(info.key) for info in self._near.scan(layout.COMMITS)}
        doomed = []
        for prefix in (layout.PACKS, layout.FRAGMENTS):
            for info in self._near.scan(prefix):
                where = layout.parse_position(info.key)
                if where is None or where in kept or where in settled_here or info.key in needed:
                    continue
                if (where.attempt, where.step) < (at.attempt, at.step):
                    doomed.append(info.key)
        self._near.delete(doomed)

    def _give_up_here(self, at: Position, why: str) -> None:
        """The far store will never have this step, so no later one may build on it."""
        try:
            lost = not abort(self._near, at, why)[0].aborted
        except CorruptError:
            lost = True
        if lost:
            tombstone = Tombstone(step=at.step, attempt=at.attempt, intent="the far store gave it up")
            create_owned(self._near, layout.tombstone_key(at), encode(tombstone))

    def _collect(self, last: _Settled) -> None:
        """Collect in the far store what is not retained there, unless somebody has claimed a newer attempt.
        Where several machines write, the first writer of a step does it itself.
        """
        plan = next(iter(last.plans), None)
        if plan is None or plan.writers[0] not in plan.here or plan.keep.last is None:
            return
        if not plan.shared or self._newest_claim > last.record.attempt:
            return
        try:
            done = collect(self._far, plan.keep, intent_id=self._nonce())
        except FtckptError as error:
            self._events(Event("gc.failed", {"error": str(error)}))
        else:
            steps = [at.step for at in done.victims]
            self._events(Event("gc.collected", {"steps": steps, "freed_bytes": done.freed_bytes}))


def drain_first(near: Near, far: ObjectStore, events: Events) -> None:
    """Bring what a tier still owes to the far store, before a new attempt is claimed there: it may be the
    newest there is. What somebody who lives has to finish is left alone.

    Raises:
        StoreError: it could not be brought; nothing should be claimed then.
    """
    try:
        find_run(far)
    except RunNotFound:
        return
    Agent(near, far, nonce=lambda: uuid.uuid4().hex, clock=SystemClock(), events=events).drain()


def _pin_prefix(at: Position) -> str:
    return f"agent-{at.attempt:06d}-{at.step:012d}-"


def _given_up(at: Position, why: str) -> Commit:
    return Commit(format=FORMAT, attempt=at.attempt, step=at.step, aborted=why[:2000])
