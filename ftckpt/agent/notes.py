"""What the saves of one step left in a tier for whoever finishes them: read back as plans.

A plan is one save: who writes it, and which of them have begun it, or staged their share, in this
tier. Two lives of a group that save the same step are two plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ftckpt import layout
from ftckpt.attempts import look, read_record, read_start
from ftckpt.commit import Expected
from ftckpt.errors import ObjectNotFound, RecordCorrupt, SettingsError, first_line
from ftckpt.layout import Writer
from ftckpt.manifest import Fragment, Position, Saving, Staging
from ftckpt.retention import Keep
from ftckpt.store.api import ObjectStore

N = TypeVar("N", Saving, Staging)


@dataclass(frozen=True, slots=True)
class Plan:
    """One save of a step. ``here`` are the writers that left a note in this tier; ``begun``: one of them
    knew the parent, and ``expected`` has it.
    """

    expected: Expected
    shared: bool
    keep: Keep
    begun: bool = False
    here: frozenset[Writer] = frozenset()
    stagings: Mapping[Writer, Staging] = field(default_factory=dict)

    @property
    def writers(self) -> tuple[Writer, ...]:
        return self.expected.writers


def read_plans(near: ObjectStore, at: Position) -> list[Plan]:
    """Every plan of a step, in an order that is the same for everybody.

    Raises:
        RecordCorrupt: a note does not read.
    """
    plans: dict[tuple[object, ...], Plan] = {}
    for writer, saving in _notes(near, Saving, f"{layout.SAVES}/{_folder(at)}"):
        key = (saving.quorum, saving.members, saving.writers)
        plan = plans.get(key) or Plan(_expected(at, saving, saving.writers), saving.shared, _keep(at, saving))
        expected = replace(plan.expected, parent=saving.parent)
        plans[key] = replace(plan, expected=expected, begun=True, here=plan.here | {writer})
    for writer, staging in _notes(near, Staging, f"{layout.STAGED}/{_folder(at)}"):
        key = (staging.partial.quorum, staging.partial.members, staging.writers)
        plan = plans.get(key) or Plan(
            _expected(at, staging.partial, staging.writers), staging.shared, _keep(at, staging)
        )
        stagings = {**plan.stagings, writer: staging}
        plans[key] = replace(plan, here=plan.here | {writer}, stagings=stagings)
    return [plans[key] for key in sorted(plans, key=repr)]


def with_parent(plan: Plan, store: ObjectStore) -> Expected:
    """What the save of a plan is, its parent included. One that nobody had begun builds on the newest
    commit of its attempt in ``store``, as its writers would have: the step before is settled there.
    """
    if plan.begun:
        return plan.expected
    at = plan.expected.at
    seen = look(store)
    own = [o for o in seen.view.readable if o.attempt == at.attempt and o < at]
    if not own:
        return replace(plan.expected, parent=read_start(store, at.attempt).parent)
    newest = max(own)
    if newest in seen.damaged:
        raise seen.damaged[newest]
    return replace(plan.expected, parent=seen.refs[newest])


def _folder(at: Position) -> str:
    return f"{at.attempt:06d}/{at.step:012d}"


def _expected(at: Position, note: Saving | Fragment, writers: tuple[str, ...]) -> Expected:
    found = tuple(writer for name in writers if (writer := layout.parse_writer(name)) is not None)
    if len(found) != len(writers):
        raise RecordCorrupt(f"RecordCorrupt: a note on {at} names a writer that cannot be", step=at.step)
    return Expected(at, None, note.quorum, note.members, found)


def _keep(at: Position, note: Saving | Staging) -> Keep:
    try:
        return Keep(last=note.keep_last, every=note.keep_every)
    except SettingsError as error:
        raise RecordCorrupt(
            f"RecordCorrupt: a note on {at} asks for what cannot be kept: {first_line(error)}", step=at.step
        ) from error


def _notes(near: ObjectStore, kind: type[N], prefix: str) -> Iterator[tuple[Writer, N]]:
    for info in near.scan(prefix):
        writer = layout.parse_writer(info.key)
        if writer is None:
            continue
        try:
            yield writer, read_record(near, kind, info.key)
        except ObjectNotFound:
            continue  # its writer has finished since the listing
