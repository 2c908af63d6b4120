"""Restoring a commit into live state: what is wanted, intersected with what was saved, put in place.

Everything that can be refused is refused before the first tensor is touched: names, shapes, dtypes,
and that every needed object exists at its size. After that a failure names the components it had
begun to overwrite; plain values and ``load_state_dict`` come last, after every byte was read.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from ftckpt.births import no_collecting
from ftckpt.capture import place, target
from ftckpt.commit import read_commit
from ftckpt.errors import ObjectDamaged, RestoreIncomplete, first_line
from ftckpt.layout import commit_key
from ftckpt.manifest import Commit, Ref
from ftckpt.plan.restore import Placement, index_chunks, packs_of, plan_restore
from ftckpt.reader import (
    DEFAULT,
    Progress,
    ReadSettings,
    check_packs,
    fetch,
    leaf_specs,
    read_fragments,
    read_values,
)
from ftckpt.store.api import ObjectStore
from ftckpt.values import unpack


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did. ``notes`` say what it let pass because it was asked to, or had to.
    ``rng_restored``: the random generators go on where they were saved.
    """

    commit: Commit
    notes: tuple[str, ...]
    values: Mapping[str, object]
    fetched_bytes: int
    rng_restored: bool


def read_ref(store: ObjectStore, ref: Ref) -> Commit:
    """The commit that a start names, proven by its digest.

    Raises:
        ObjectDamaged: it is not there, or not the one that was named.
    """
    found = read_commit(store, ref.at)
    if found is None or found[1] != ref:
        state = "is absent" if found is None else "is not the record that was named"
        raise ObjectDamaged(
            f"ObjectDamaged: {commit_key(ref.at)}, which this attempt goes on from, {state}",
            key=commit_key(ref.at),
            step=ref.step,
        )
    return found[0]


def restore_into(
    store: ObjectStore,
    commit: Commit,
    state: Mapping[str, object],
    *,
    group: str = "g0",
    rank: int = 0,
    world: int = 1,
    subset: bool = False,
    strict: bool = True,
    internal: str | None = None,
    settings: ReadSettings = DEFAULT,
    progress: Progress | None = None,
) -> Restored:
    """Overwrite ``state`` with a commit. Blocks until every byte is in place.

    ``internal`` names a component that belongs to the session: it is returned in ``values`` and not
    looked for in ``state``.

    Raises:
        StateMismatch, WorldSizeMismatch: saved and live state differ. Nothing was changed.
        CorruptError, StoreError: something could not be read. Nothing was changed.
        RestoreIncomplete: the same, after it had begun; ``components`` are partly overwritten.
    """
    at = commit.at
    fragments = read_fragments(store, commit)
    trees = {name: unpack(data) for name, data in read_values(store, fragments, at, settings).items()}
    specs = leaf_specs(fragments)
    values = {internal: trees.pop(internal)} if internal in trees else {}
    saved = {name: spec for name, spec in specs.items() if spec.kind == "tensor"}
    with no_collecting():
        goal = target(state, saved, trees, group=group, rank=rank, world=world, subset=subset, strict=strict)
        wants = [(want.leaf, want.box) for want in goal.wants]
        fetches = plan_restore(wants, index_chunks(fragments, {leaf.name for leaf, _ in wants}))
    check_packs(store, packs_of(fetches), at)
    begun: set[str] = set()
    lock = threading.Lock()

    def put(placement: Placement, raw: memoryview) -> None:
        want = goal.wants[placement.want]
        with lock:
            begun.add(want.leaf.name.partition("@")[0].partition(".")[0])
        piece = raw[placement.first_byte :][: placement.piece.numel * want.leaf.itemsize_bytes]
        place(want.data, want.box, placement.piece, placement.region, piece, want.leaf.dtype)

    try:
        fetch(store, fetches, put, at, settings, progress)
    except Exception as error:
        if not begun:
            raise
        names = tuple(sorted(begun))
        raise RestoreIncomplete(
            f"RestoreIncomplete: restoring {at} failed after it had begun to overwrite {', '.join(names)}\n"
            f"  {first_line(error)}\n"
            "  no plain value was applied and no load_state_dict was called; the live state must not be used\n"
            "  the store is unchanged: start a new process and restore again, or an older step",
            components=names,
            step=at.step,
        ) from error
    goal.finish()
    return Restored(
        commit,
        goal.notes,
        values,
        sum(item.stored_bytes for item in fetches),
        rng_restored=any(component == "rng" for _, component, _ in goal.steps),
    )
