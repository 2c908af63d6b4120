"""Restoring a commit into live state: what is wanted, intersected with what was saved, put in place.

Everything that can be refused is refused before the first tensor is touched: names, shapes, dtypes,
and that every needed object exists at its size. After that a failure names the components it had
begun to overwrite; plain values and ``load_state_dict`` come last, after every byte was read. What may
differ between the two is in ``Asked``, and what of it did is in ``Restored``.

Only what is wanted is read: the values of live components, and those fragments that can hold a part of a
wanted tensor. What others hold is known by the commit's list of leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ftckpt.births import no_collecting
from ftckpt.capture import UNREAD, Carried, Passed, Target, carry_over, place, target
from ftckpt.capture.relabel import Relabelled, relabel
from ftckpt.commit import read_commit
from ftckpt.contents import Contents, contents
from ftckpt.errors import ObjectDamaged, RestoreIncomplete, first_line
from ftckpt.events import Event, Events, silent
from ftckpt.layout import commit_key
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import Commit, Ref
from ftckpt.plan.asked import EXACTLY, Asked, loses
from ftckpt.plan.restore import Placement, index_chunks, packs_of, plan_restore
from ftckpt.reader import DEFAULT, Progress, ReadSettings, check_packs, fetch
from ftckpt.store.api import ObjectStore
from ftckpt.values import path_part, unpack

GENERATORS = "rng"
"""The component of the random generators, which is nobody's to rename."""


_TOLD = 100
"""An event names so many things of a kind, and says how many there were."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A leaf whose values were carried over to another dtype. ``exact``: that dtype holds every value of the
    saved one. Otherwise values were rounded to the nearest, as ``Tensor.to`` does; ``infinite`` of them were finite
    when saved and lie beyond its range, ``zero`` were not zero and are too small for it.
    """

    leaf: str
    saved: str
    here: str
    exact: bool
    infinite: int
    zero: int

    def __str__(self) -> str:
        how = "exactly" if self.exact else "rounded to the nearest"
        lost = [f"{self.infinite} beyond its range are infinite now"] if self.infinite else []
        lost += [f"{self.zero} too small for it are zero now"] if self.zero else []
        return f"{self.leaf}: {self.saved} to {self.here}, {how}{''.join(f'; {line}' for line in lost)}"


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore did.

    ``notes``, in words: what it let pass because it was asked to, or had to. ``missing``: live and not saved,
    so left as they are, or begun anew. ``extra``: saved and not wanted here. ``reshaped``: left as they are,
    as they had another shape. ``renamed``: (name as saved, name here). ``casts``: leaves that were carried over
    to another dtype. ``rng_restored``: the random generators go on where they were saved.
    """

    commit: Commit
    notes: tuple[str, ...]
    values: Mapping[str, object]
    fetched_bytes: int
    rng_restored: bool
    passed: Passed = Passed()
    renamed: tuple[tuple[str, str], ...] = ()
    casts: tuple[Cast, ...] = ()

    @property
    def step(self) -> int:
        return self.commit.step

    @property
    def missing(self) -> tuple[str, ...]:
        return self.passed.missing

    @property
    def extra(self) -> tuple[str, ...]:
        return self.passed.extra

    @property
    def reshaped(self) -> tuple[str, ...]:
        return self.passed.reshaped

    @property
    def exactly(self) -> bool:
        """Whether what was wanted is here as it was saved, under the name that it had."""
        return not (self.notes or self.renamed or self.casts)


def read_ref(store: ObjectStore, ref: Ref) -> Commit:
    """The commit that a start names, or that was chosen a moment ago, proven by its digest.

    Raises:
        ObjectDamaged: it is not there, or not the one that was named.
    """
    found = read_commit(store, ref.at)
    if found is None or found[1] != ref:
        state = "is absent" if found is None else "is not the record that was named"
        raise ObjectDamaged(
            f"ObjectDamaged: {commit_key(ref.at)}, which is to be read, {state}\n"
            "  nothing was changed; somebody collected it or replaced it",
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
    groups: int | None = 1,
    subset: bool = False,
    asked: Asked = EXACTLY,
    internal: str | None = None,
    settings: ReadSettings = DEFAULT,
    progress: Progress | None = None,
    events: Events = silent,
) -> Restored:
    """Overwrite ``state`` with a commit. Blocks until every byte is in place. When something came about
    otherwise than it was saved, ``events`` hear of it as ``restore.differs``.

    ``group``, ``rank`` of ``world`` and ``groups`` say who asks; ``groups=None``: how many there are is not known.
    ``internal`` names a component that belongs to the session: it is returned in ``values`` and not
    looked for in ``state``.

    Raises:
        StateMismatch, WorldSizeMismatch: saved and live state differ. Nothing was changed.
        CorruptError, StoreError: something could not be read. Nothing was changed.
        RestoreIncomplete: the same, after it had begun; ``components`` are partly overwritten.
    """
    at = commit.at
    saved = contents(store, commit, settings)
    also = (internal, None if subset else GENERATORS)
    live = {*map(path_part, state), *filter(None, also)}
    needed = _needed(saved.values, live, group, rank, world, renamed=bool(asked.rename))
    trees: dict[str, Any] = dict.fromkeys(saved.values, UNREAD)
    trees |= _unpacked(saved, needed)
    values = {internal: trees.pop(internal)} if internal in trees else {}

    def compare() -> tuple[Relabelled, Target]:
        named = relabel(trees, asked.rename, idle=asked.idle, untouched=GENERATORS)
        return named, target(
            state,
            {name: spec for name, spec in saved.specs.items() if spec.kind == "tensor"},
            named.trees,
            group=group,
            rank=rank,
            world=world,
            groups=groups,
            subset=subset,
            asked=asked,
        )

    with no_collecting():
        named, goal = compare()
        if goal.unread:
            trees |= _unpacked(saved, sorted(goal.unread))
            named, goal = compare()
        wants = [(want.leaf, want.box) for want in goal.wants]
        fragments = saved.fragments(wants)
        fetches = plan_restore(wants, index_chunks(fragments, {leaf.name for leaf, _ in wants}))
    check_packs(store, packs_of(fetches), at)
    begun: set[str] = set()
    carried = {name: Carried() for name in goal.casts}
    lock = threading.Lock()

    def put(placement: Placement, raw: memoryview) -> None:
        want, leaf = goal.wants[placement.want], goal.wants[placement.want].leaf
        with lock:
            begun.add(named.homes.get(leaf.name) or leaf.name.partition("@")[0].partition(".")[0])
        piece = raw[placement.first_byte :][: placement.piece.numel * leaf.itemsize_bytes]
        if leaf.name not in carried:
            place(want.data, want.box, placement.piece, placement.region, piece, leaf.dtype)
            return
        found = carry_over(want.data, want.box, placement.piece, placement.region, piece, leaf.dtype)
        with lock:
            carried[leaf.name].infinite += found.infinite
            carried[leaf.name].zero += found.zero

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
    done = Restored(
        commit,
        goal.notes,
        values,
        sum(item.stored_bytes for item in fetches),
        rng_restored=any(component == GENERATORS for _, component, _ in goal.steps),
        passed=goal.passed,
        renamed=_renamed(named, goal),
        casts=_casts(saved.specs, goal, carried),
    )
    if not done.exactly:
        events(_differs(done))
    return done


def _needed(
    values: Iterable[str], live: Container[str], group: str, rank: int, world: int, *, renamed: bool
) -> list[str]:
    """Those values that a restore cannot do without: of live components, and of what is single ranks' own that
    of this rank, if as many ranks saved it. Where rules give names, the others' own too: where a value goes
    lies in its structure.
    """
    names = [(name, *name.partition("@")[::2]) for name in values]
    ranks = {whose.rpartition(".")[2] for _, _, whose in names if whose.rpartition(".")[0] == group}
    own = f"{group}.{rank}" if ranks == set(map(str, range(world))) else ""
    return [
        name
        for name, path, whose in names
        if (renamed or path.partition(".")[0] in live)
        and (whose in ("", own) or (renamed and "." not in path and path != GENERATORS))
    ]


def _unpacked(saved: Contents, names: Collection[str]) -> dict[str, Any]:
    return {name: unpack(data) for name, data in saved.packed(names).items()}


def _renamed(named: Relabelled, goal: Target) -> tuple[tuple[str, str], ...]:
    """Those of components that are here: other components keep their names to themselves."""
    return tuple(pair for pair in named.changed if pair[1].partition(".")[0] in goal.components)


def _casts(saved: Mapping[str, LeafSpec], goal: Target, carried: Mapping[str, Carried]) -> tuple[Cast, ...]:
    return tuple(
        Cast(
            name,
            saved[name].dtype,
            dtype,
            not loses(saved[name].dtype, dtype),
            carried[name].infinite,
            carried[name].zero,
        )
        for name, dtype in sorted(goal.casts.items())
    )


def _differs(done: Restored) -> Event:
    lists: dict[str, list[str]] = {
        "missing": list(done.missing),
        "extra": list(done.extra),
        "reshaped": list(done.reshaped),
        "renamed": [f"{saved} -> {here}" for saved, here in done.renamed],
        "casts": [str(cast) for cast in done.casts],
        "notes": list(done.notes),
    }
    counts = {f"{name}_in_all": len(lines) for name, lines in lists.items()}
    return Event("restore.differs", {"step": done.step, **counts, **{k: v[:_TOLD] for k, v in lists.items()}})
