"""Restoring one step into a state that several ranks hold together.

Knows that the parts of a DTensor are parts of one state, so that all ranks must take the same step, and
that none may go on when another could not. Refuses to know sessions: it is for who restores once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from ftckpt.capture import has_shards
from ftckpt.commit import read_commit
from ftckpt.errors import ObjectDamaged
from ftckpt.events import Events, silent
from ftckpt.layout import commit_key
from ftckpt.manifest import Commit, Position
from ftckpt.plan.asked import EXACTLY, Asked
from ftckpt.ranks import One, Ranks, ranks_here, tell, together
from ftckpt.reader import DEFAULT, Progress, ReadSettings
from ftckpt.restoring import Restored, restore_into
from ftckpt.store.api import ObjectStore


def restore_chosen(
    store: ObjectStore,
    choose: Callable[[], Commit],
    state: Mapping[str, object],
    *,
    asked: Asked = EXACTLY,
    settings: ReadSettings = DEFAULT,
    events: Events = silent,
    progress: Callable[[Commit], Progress] | None = None,
) -> Restored:
    """Overwrite the components in ``state`` with those of the commit that ``choose`` finds.

    A state with DTensors belongs to all ranks of torch.distributed: every one calls this, rank 0 chooses,
    and it raises on all or on none. Any other state is this process's own, and nobody is waited for.
    """
    with _sharers(state) as ranks:
        commit = _chosen(store, choose, ranks)
        with together(ranks, "restoring"):
            return restore_into(
                store,
                commit,
                state,
                rank=ranks.rank,
                world=ranks.world,
                subset=True,
                asked=asked,
                settings=settings,
                events=events,
                progress=progress(commit) if progress is not None else None,
            )


@contextmanager
def _sharers(state: Mapping[str, object]) -> Iterator[Ranks]:
    ranks: Ranks = ranks_here(1) if has_shards(state) else One()
    try:
        yield ranks
    finally:
        ranks.close()


def _chosen(store: ObjectStore, choose: Callable[[], Commit], ranks: Ranks) -> Commit:
    """Rank 0's choice, read by every rank."""
    mine: Commit | None = None
    with together(ranks, "choosing the step"):
        mine = choose() if ranks.rank == 0 else None
    told = tell(ranks, {} if mine is None else {"step": mine.step, "attempt": mine.attempt})
    with together(ranks, "reading the chosen step"):
        at = Position(int(str(told["step"])), int(str(told["attempt"])))
        return mine or _read(store, at)


def _read(store: ObjectStore, at: Position) -> Commit:
    found = read_commit(store, at)
    if found is None:
        raise ObjectDamaged(
            f"ObjectDamaged: {commit_key(at)}, which rank 0 read at {store.uri}, is absent for this rank\n"
            "  nothing was changed; every rank needs the same store",
            key=commit_key(at),
            step=at.step,
        )
    return found[0]
