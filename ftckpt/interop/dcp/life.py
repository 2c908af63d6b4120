"""A writer's life in a run: the attempt it claimed once, the parent of its next save, and what is in doubt.

Only the coordinator has one: it claims, settles and commits, and tells the others. Blocks only in store
calls.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ftckpt.attempts import check_fence, look, read_start
from ftckpt.begin import begin, this_process
from ftckpt.commit import abort, read_commit
from ftckpt.elastic.launch import Launch
from ftckpt.errors import SaveFailed, SettingsError
from ftckpt.events import Events
from ftckpt.interop.dcp.steps import Ticket
from ftckpt.lineage import on_lineage
from ftckpt.manifest import MAX_STEP, Commit, Position, Ref
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore


@dataclass(slots=True)
class Life:
    """One attempt. ``last`` is the highest step that it may not save any more; ``doubtful`` a position that
    was begun and whose end is not known.
    """

    attempt: int
    incarnation: str
    parent: Ref | None
    last: int
    doubtful: Position | None = None

    def next(self, store: ObjectStore, step: int | None, world: int) -> Ticket:
        """The next save: of ``step``, or of the step after the last. Whatever was begun before is settled.

        Raises:
            Fenced: a newer attempt owns the run. Nothing was written.
            SaveFailed: steps only go up.
        """
        check_fence(store, self.attempt)
        if self.doubtful is not None:
            found = read_commit(store, self.doubtful)
            self.settled(
                *(found or abort(store, self.doubtful, "its writers could not learn what became of it"))
            )
        step = max(1, self.last + 1) if step is None else step
        if not self.last < step <= MAX_STEP:
            raise SaveFailed(
                f"SaveFailed: step {step} of {store.uri} cannot be saved after step {self.last}\n"
                "  a step is saved once, and steps only go up; nothing was changed\n"
                "  to go on from an older step and leave the newer ones behind: StorageWriter(uri, step=…)",
                step=step,
                last=self.last,
            )
        at = Position(step, self.attempt)
        self.last, self.doubtful = step, at
        return Ticket(uuid.uuid4().hex, store.uri, at, self.parent, self.incarnation, world)

    def settled(self, record: Commit, ref: Ref) -> None:
        """Its position is occupied."""
        self.doubtful = None
        if not record.aborted:
            self.parent = ref


def begin_life(
    store: ObjectStore,
    address: str,
    *,
    step: int | None,
    world: int,
    launch: Launch,
    options: Mapping[str, object],
    events: Events,
) -> Life:
    """Claim the next attempt of the run, from its newest commit or that of ``step``; or, under a supervisor
    of this very run, live in the attempt that it began.

    Raises:
        SettingsError: the supervisor began that attempt from another step than ``step``.
    """
    if launch.attempt is None or launch.run is None or not _same(launch.run, store, options):
        caller = replace(this_process(nproc=world), settings={"run": address})
        begun = begin(store, caller, name=uuid.uuid4().hex, step=step, on_empty="start", events=events)
        return _life(begun.claim.attempt, begun.start.parent, ())
    parent = read_start(store, launch.attempt).parent
    if step is not None and (parent is None or parent.step != step):
        raise _begun_elsewhere(store, launch.attempt, parent, step)
    seen = look(store)
    taken = [at for at in seen.view.commits if at.attempt == launch.attempt]
    own = next((at for at in on_lineage(seen.view, newest=launch.attempt) if at in taken), None)
    if own is not None and own in seen.damaged:
        raise seen.damaged[own]
    return _life(launch.attempt, parent if own is None else seen.refs[own], taken)


def _begun_elsewhere(store: ObjectStore, attempt: int, parent: Ref | None, step: int) -> SettingsError:
    found = "with nothing" if parent is None else f"from step {parent.step}"
    return SettingsError(
        f"SettingsError: StorageWriter(step={step}), but the supervisor began attempt {attempt} of {store.uri} "
        f"{found}\n"
        "  under a supervisor it alone says where an attempt goes on from; nothing was written\n"
        f"  leave step out of the program, and end the job and start it with `ftckpt resume RUN --step {step}`",
        setting="step",
        step=step,
        attempt=attempt,
    )


def _life(attempt: int, parent: Ref | None, taken: Sequence[Position]) -> Life:
    last = max([-1 if parent is None else parent.step, *(at.step for at in taken)])
    return Life(attempt, uuid.uuid4().hex, parent, last)


def _same(address: str, store: ObjectStore, options: Mapping[str, object]) -> bool:
    other = open_store(address, options=options, allow_unconditional=True)
    try:
        return other.uri == store.uri
    finally:
        other.close()
