"""Collecting: delete what nothing needs any more, and nothing else. No clock decides.

The collector writes its intent with the victims, re-reads pins, starts and commits, and may only
shrink the list; then tombstones, then packs. If it cannot read a record that it keeps it stops:
absent is never empty. It blocks only in store calls and owns no threads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ftckpt import layout
from ftckpt.attempts import Look, create_owned, look, read_intents, read_pins
from ftckpt.commit import abort
from ftckpt.errors import CorruptError, GcStopped, StoreError
from ftckpt.lineage import View, on_lineage, orphans, reach
from ftckpt.manifest import Commit, Intent, Pin, Position, Tombstone, encode, let_go_of
from ftckpt.reader import read_fragments
from ftckpt.retention import Keep, retained
from ftckpt.store.api import ObjectStore


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection did, or with ``dry_run`` would do."""

    victims: tuple[Position, ...]
    kept: tuple[Position, ...]
    objects: tuple[str, ...]
    freed_bytes: int


def choose_victims(
    seen: View,
    pins: Collection[Pin],
    keep: Keep,
    abandoned: bool = False,
    owed: Collection[Position] = (),
) -> frozenset[Position]:
    """Commits to collect: on the lineage and not retained, pinned, ``owed`` to a far store or newest;
    with ``abandoned`` also those off the lineage. Pure.
    """
    lineage = on_lineage(seen)
    pinned = {Position(pin.step, pin.attempt) for pin in pins}
    kept = set(retained(lineage, keep)) | pinned | set(lineage[:1])
    victims = set(lineage) - kept
    if abandoned:
        victims |= set(orphans(seen)) - pinned
    return frozenset(at for at in victims.difference(owed) if at.attempt <= seen.newest_start)


def overtaken(at: Position, seen: View) -> bool:
    """Whether the position lies below the newest commit of the newest attempt. Its writers settle one step
    before the next, so nobody is at work on it but a slow agent, if a direct writer shares its store.
    """
    own = [other.step for other in seen.commits if other.attempt == at.attempt]
    return at.attempt == seen.newest_start and at.step < max(own, default=-1)


def superseded(at: Position, seen: View) -> bool:
    """Whether the position belongs to an older attempt and lies above where its descendants left
    it: whatever it may become is on no lineage.
    """
    bounds = reach(seen)
    bound = bounds.get(at.attempt, -1)
    return at.attempt < seen.newest_start and bound is not None and at.step > bound


def collect(
    store: ObjectStore, keep: Keep, *, intent_id: str, abandoned: bool = False, dry_run: bool = False
) -> Collected:
    """Collect what ``keep`` does not retain, and the leavings of saves that came to nothing.

    Safe beside a running job, other collectors, starts and readers with pins, at any moment, and
    after dying at any moment: running it again completes it.

    Raises:
        GcStopped: a kept record does not read. Nothing was deleted.
    """
    seen = look(store)
    victims = choose_victims(seen.view, read_pins(store), keep, abandoned, owed(store))
    declared = not dry_run and bool(victims)
    if declared:
        intent = Intent(intent=intent_id, victims=tuple(sorted((at.step, at.attempt) for at in victims)))
        create_owned(store, layout.intent_key(intent_id), encode(intent))
    seen = look(store)
    victims &= choose_victims(seen.view, read_pins(store), keep, abandoned, owed(store))
    kept = seen.view.readable - victims
    try:
        needed = _needed(store, seen, kept)
    except GcStopped:
        if declared:
            store.delete([layout.intent_key(intent_id)])
        raise
    if not dry_run:
        for at in sorted(victims):
            tombstone = Tombstone(step=at.step, attempt=at.attempt, intent=intent_id)
            create_owned(store, layout.tombstone_key(at), encode(tombstone))
    doomed, freed_bytes = [], 0
    unsettled: dict[Position, str] = {}
    for prefix in (layout.PACKS, layout.FRAGMENTS):
        for info in store.scan(prefix):
            where = layout.parse_position(info.key)
            if where is None or info.key in needed or where.attempt > seen.view.newest_start:
                continue
            if where in seen.view.commits:
                doomed.append(info.key)
                freed_bytes += info.size_bytes
            elif overtaken(where, seen.view):
                unsettled[where] = "given up: a later step of its attempt is committed"
            elif superseded(where, seen.view):
                why = f"given up for a dead attempt; attempt {seen.view.newest_start} goes on"
                unsettled[where] = why
    if not dry_run:
        for at in sorted(unsettled):
            abort(store, at, unsettled[at])
        _forget_aborted(store, seen, intent_id)
        for start in range(0, len(doomed), 500):
            store.delete(doomed[start : start + 500])
        if declared:
            store.delete([layout.intent_key(intent_id)])
        _forget_intents(store, seen.view.collected | victims)
    return Collected(
        victims=tuple(sorted(victims)),
        kept=tuple(sorted(kept)),
        objects=tuple(doomed),
        freed_bytes=freed_bytes,
    )


def owed(store: ObjectStore) -> list[Position]:
    """Steps of a tier that its far store has not settled yet, oldest attempt and step first; of any other
    store, none. Whatever a look showed before was owed from before its commit on.
    """
    found = {
        at
        for prefix in (layout.SAVES, layout.STAGED)
        for info in store.scan(prefix)
        if (at := layout.parse_position(info.key)) is not None
    }
    return sorted(found, key=lambda at: (at.attempt, at.step))


def _needed(store: ObjectStore, seen: Look, kept: Collection[Position]) -> set[str]:
    """Keys of all packs and fragments that kept commits name."""
    needed: set[str] = set()
    for at in kept:
        commit: Commit | None = seen.commits.get(at)
        try:
            if commit is None:
                raise seen.damaged[at]
            fragments = read_fragments(store, commit)
            needed.update(pack.key for fragment in fragments for pack in fragment.packs)
            let_go_of(fragments)
            needed.update(ref.key for ref in commit.fragments)
        except (CorruptError, StoreError) as error:
            raise GcStopped(
                f"GcStopped: the collector keeps {at} but cannot read it, so it deleted nothing\n  {error}\n"
                "  `ftckpt verify RUN` shows the damage; what is not readable is never taken for empty",
                step=at.step,
                attempt=at.attempt,
            ) from error
    return needed


def _forget_intents(store: ObjectStore, collected: Collection[Position]) -> None:
    """Intents of collectors that died, once tombstones say all that they said. One that names a
    commit without a tombstone stays: its collector may live, and may have read the pins already.
    """
    for intent in read_intents(store):
        if all(Position(*victim) in collected for victim in intent.victims):
            store.delete([layout.intent_key(intent.intent)])


def _forget_aborted(store: ObjectStore, seen: Look, intent_id: str) -> None:
    """Tombstone aborted records that lie below the newest commit, so that looks need not read them."""
    newest = max((at.step for at in seen.view.readable), default=-1)
    for at in sorted(seen.view.aborted):
        if at.step < newest:
            tombstone = Tombstone(step=at.step, attempt=at.attempt, intent=intent_id)
            create_owned(store, layout.tombstone_key(at), encode(tombstone))
