"""What a commit says of its leaves, so that a reader needs no fragment to know what there is and where.

A committer has read all fragments: it lists every leaf once, and of each fragment which leaves it holds.
A reader then asks for the few fragments that can hold what it wants, out of thousands. Leaves are of
three sorts, since they lie about in three ways: *whole* ones (values, replicated tensors, scalars) are shared
out by name over the writers; of *cut* ones every writer holds some rows; *own* ones are one rank's.

Pure: records in, records out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

import msgspec
import numpy as np

from ftckpt.boxes import Box
from ftckpt.leaf import Kind, LeafSpec
from ftckpt.manifest import (
    ANY,
    CUT,
    OWN,
    SCALE,
    WHOLE,
    Commit,
    Fragment,
    FragmentRef,
    LeafGroup,
    LeafRange,
    LeafRecord,
    OwnRecord,
    fraction,
    leaf_range,
)

FEW, MOST = 8, 64
"""Ranges of one sort that a fragment has: more than a few are joined where leaves share a part of their
rows; where that leaves too many, one range is over all of them.
"""

Want = tuple[LeafSpec, Box]


@dataclass(frozen=True, slots=True)
class Listing:
    """The leaves of a commit, and the ranges of each of its fragments, in their order."""

    leaves: tuple[LeafGroup, ...]
    own: tuple[OwnRecord, ...]
    ranges: tuple[tuple[LeafRange, ...], ...]


def is_listed(commit: Commit) -> bool:
    """Whether the commit itself says which leaves there are."""
    return bool(commit.leaves or commit.own)


def listing(fragments: Sequence[Fragment]) -> Listing:
    """Of fragments that agree about their leaves. One fragment says all there is to say itself."""
    if len(fragments) < 2:
        return Listing((), (), tuple(leaf_range(fragment.leaves) for fragment in fragments))
    groups: dict[tuple[Kind, str, tuple[int, ...]], set[str]] = {}
    cut: set[str] = set()
    values: dict[str, set[str]] = {}
    holders: dict[str, set[int]] = {}
    for number, fragment in enumerate(fragments):
        for leaf in fragment.leaves:
            if leaf.owner:
                holders.setdefault(leaf.owner, set()).add(number)
                if leaf.kind == "value":
                    values.setdefault(leaf.owner, set()).add(leaf.name.rpartition("@")[0])
                continue
            groups.setdefault((leaf.kind, leaf.dtype, leaf.shape), set()).add(leaf.name)
            if any(record.extent != leaf.shape for record in leaf.boxes):
                cut.add(leaf.name)
    leaves = [
        LeafGroup(*spec, is_cut, tuple(sorted(names)))
        for spec, all_names in groups.items()
        for is_cut, names in ((False, all_names - cut), (True, all_names & cut))
        if names
    ]
    leaves.sort(key=lambda group: group.names)
    own = tuple(
        OwnRecord(owner, tuple(sorted(values.get(owner, ()))), tuple(sorted(holders[owner])))
        for owner in sorted(holders)
    )
    places = _places(leaves)
    ranges = tuple(ranges_of(fragment.leaves, places) for fragment in fragments)
    return Listing(tuple(leaves), own, ranges)


def listed(commit: Commit, fragments: Sequence[Fragment]) -> Commit:
    """The commit of these fragments, in the order of its refs, with what they hold."""
    found = listing(fragments)
    refs = tuple(
        msgspec.structs.replace(ref, ranges=ranges)
        for ref, ranges in zip(commit.fragments, found.ranges, strict=True)
    )
    return msgspec.structs.replace(commit, fragments=refs, leaves=found.leaves, own=found.own)


def specs_of(commit: Commit) -> dict[str, LeafSpec]:
    """The leaves of all ranks that a commit lists, by name and in that order."""
    found = [(name, group) for group in commit.leaves for name in group.names]
    found.sort(key=itemgetter(0))
    return {name: LeafSpec(name, group.kind, group.dtype, group.shape) for name, group in found}


def values_of(commit: Commit) -> list[str]:
    """The names of all value leaves that a commit lists, those of single ranks included."""
    common = [name for group in commit.leaves if group.kind == "value" for name in group.names]
    return common + [f"{name}@{own.owner}" for own in commit.own for name in own.values]


# --- which fragments --------------------------------------------------------------------------------


def relevant(commit: Commit, wants: Iterable[Want]) -> list[FragmentRef]:
    """Those fragments that can hold a part of a wanted box, by what the commit says of them, in its order.

    All ranges are compared at once, as often as there are different parts of rows among the wants: a fragment
    that cannot hold any costs next to nothing, however much is wanted.
    """
    cut = {name for group in commit.leaves if group.cut for name in group.names}
    known = is_listed(commit)
    parts: dict[tuple[int, int, int], list[str]] = {}
    owners: set[str] = set()
    for leaf, box in wants:
        if not box.numel:
            continue
        if known and leaf.owner:
            owners.add(leaf.owner)
            continue
        sort = ANY if not known else CUT if leaf.name in cut else WHOLE
        low, high = (0, SCALE) if sort == WHOLE else fraction(box, leaf.shape)
        parts.setdefault((sort, low, high), []).append(leaf.name)
    chosen = _of_owners(commit, owners)
    if parts:
        chosen.update(_holding(commit.fragments, parts))
    return [commit.fragments[number] for number in sorted(chosen)]


def owned_by(commit: Commit, owners: Collection[str]) -> list[FragmentRef]:
    """The fragments that hold what is these owners' own, by what a commit lists."""
    return [commit.fragments[number] for number in sorted(_of_owners(commit, owners))]


def _of_owners(commit: Commit, owners: Collection[str]) -> set[int]:
    if not owners:
        return set()
    return {number for own in commit.own if own.owner in owners for number in own.fragments}


def _holding(
    refs: Sequence[FragmentRef], parts: Mapping[tuple[int, int, int], Sequence[str]]
) -> Iterator[int]:
    """First those ranges that meet any part, of thousands mostly a few; then these with each part."""
    lows, highs = [SCALE] * 4, [0] * 4
    for sort, first, last in parts:
        for one in {ANY, sort} if sort != ANY else range(4):
            lows[one], highs[one] = min(lows[one], first), max(highs[one], last)
    near = [
        (number, held)
        for number, ref in enumerate(refs)
        for held in ref.ranges
        if held.low < highs[held.of] and lows[held.of] < held.high
    ]
    low, high, of = (
        np.fromiter((getattr(held, field) for _, held in near), np.int64, len(near))
        for field in ("low", "high", "of")
    )
    for (sort, first, last), found in parts.items():
        names = sorted(found)
        meets = (low < last) & (high > first)
        if sort != ANY:
            meets &= (of == sort) | (of == ANY)
        for at in np.flatnonzero(meets):
            number, held = near[at]
            if bisect_left(names, held.first) < bisect_right(names, held.last):
                yield number


# --- whether it is true ----------------------------------------------------------------------------


def mislisted(commit: Commit, fragments: Sequence[Fragment]) -> list[str]:
    """The leaves of which a commit does not say what its fragments, all of them and in its order, say."""
    if not is_listed(commit):
        return []
    found = listed(commit, fragments)
    said, true = (_sorted_out(one) for one in (commit, found))
    wrong = {name for name in said.keys() | true.keys() if said.get(name) != true.get(name)}
    places = _places(found.leaves)
    for ref, fragment in zip(commit.fragments, fragments, strict=True):
        for leaf in fragment.leaves:
            sort = OWN if leaf.owner else places[leaf.name][0]
            if not any(_holds(held, sort, leaf.name, *_part(leaf)) for held in ref.ranges):
                wrong.add(leaf.name)
    return sorted(wrong)


def _sorted_out(commit: Commit) -> dict[str, object]:
    """What is said of each leaf, and of each owner."""
    cut = {name for group in commit.leaves if group.cut for name in group.names}
    said: dict[str, object] = {name: (spec, name in cut) for name, spec in specs_of(commit).items()}
    return said | {f"@{own.owner}": (set(own.values), set(own.fragments)) for own in commit.own}


def _holds(held: LeafRange, sort: int, name: str, low: int, high: int) -> bool:
    within = held.first <= name <= held.last and held.low <= low and high <= held.high
    return within and held.of in (ANY, sort)


# --- what a fragment holds ------------------------------------------------------------------------


def _places(groups: Iterable[LeafGroup]) -> dict[str, tuple[int, int]]:
    """Of each leaf of all ranks its sort, and its place among those of that sort by name."""
    names: dict[int, list[str]] = {WHOLE: [], CUT: []}
    for group in groups:
        names[CUT if group.cut else WHOLE].extend(group.names)
    return {name: (sort, place) for sort, found in names.items() for place, name in enumerate(sorted(found))}


@dataclass(frozen=True, slots=True)
class _Held:
    """A run of leaves of one sort, by name and by their places; of each, that part of its rows."""

    first: str
    last: str
    low: int
    high: int
    end: int

    def joined(self, other: _Held) -> _Held:
        return _Held(
            min(self.first, other.first),
            max(self.last, other.last),
            min(self.low, other.low),
            max(self.high, other.high),
            other.end,
        )

    def is_like(self, other: _Held) -> bool:
        """Whether both are of nearly the same rows, so that what a range over both says is nearly true."""
        both = max(self.high, other.high) - min(self.low, other.low)
        return 4 * both <= 5 * min(self.high - self.low, other.high - other.low)


def ranges_of(leaves: Iterable[LeafRecord], places: Mapping[str, tuple[int, int]]) -> tuple[LeafRange, ...]:
    """What a fragment holds of leaves of each sort; ``places`` says of those of all ranks which sort they
    are of, and which place they have in it.
    """
    runs: dict[int, list[_Held]] = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.name):
        own = runs.setdefault(OWN, []) if leaf.owner else None
        if own is not None:
            held = _Held(leaf.name, leaf.name, 0, SCALE, len(own))
            runs[OWN] = [own[0].joined(held) if own else held]
            continue
        sort, place = places[leaf.name]
        held = _Held(leaf.name, leaf.name, *_part(leaf), place)
        found = runs.setdefault(sort, [])
        if found and found[-1].end + 1 >= place and found[-1].is_like(held):
            found[-1] = found[-1].joined(held)
        else:
            found.append(held)
    return tuple(
        LeafRange(one.first, one.last, one.low, one.high, sort)
        for sort in sorted(runs)
        for one in _few(runs[sort])
    )


def _part(leaf: LeafRecord) -> tuple[int, int]:
    parts = [fraction(record.box, leaf.shape) for record in leaf.boxes]
    return min((low for low, _ in parts), default=0), max((high for _, high in parts), default=SCALE)


def _few(runs: Collection[_Held]) -> list[_Held]:
    """Not many more than a few, without hiding anything."""
    if len(runs) <= FEW:
        return list(runs)
    alike: list[_Held] = []
    for one in sorted(runs, key=lambda held: (held.low, held.high, held.first)):
        if alike and alike[-1].is_like(one):
            alike[-1] = alike[-1].joined(one)
        else:
            alike.append(one)
    if len(alike) <= MOST:
        return alike
    over_all = alike[0]
    for one in alike[1:]:
        over_all = over_all.joined(one)
    return [over_all]
