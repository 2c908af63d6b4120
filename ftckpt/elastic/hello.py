"""What members of a quorum tell each other before they train, and what follows from it.

torchft carries a step number and an opaque id; a step needs more: names, attempts, whether the
state came from a living peer. So every turn begins with an all-gather of one fixed-size record.
This module is the record and the judgement, both pure; sending it is ``replica_group``'s business.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ftckpt.errors import MembershipError
from ftckpt.membership import Member

_RECORD = struct.Struct("<8s16sqqqi??H48s")
_MAGIC = b"ftckpt.1"
SIZE_BYTES = _RECORD.size
NONE = -1
WISHES = ("stop", "save")
"""What a member may wish for; bit i of the record's last flags says WISHES[i]."""


@dataclass(frozen=True, slots=True)
class Hello:
    """One member as it introduces itself, after healing and before training.

    ``attempt`` is ``None`` where no supervisor claimed one. ``step`` is the last finished step,
    ``saved_step`` the last for which this group registered a save. ``carries``: its state never
    left the attempt, that is, it was not restarted inside it or has been healed since. ``ready``:
    nothing went wrong on the way here. ``wishes``: what this member wants all to do together after
    this step.
    """

    member: Member
    attempt: int | None
    life: int
    step: int
    saved_step: int | None
    carries: bool
    ready: bool
    wishes: frozenset[str] = frozenset()


def pack(hello: Hello) -> bytes:
    """The record, ``SIZE_BYTES`` long."""
    name = hello.member.group.encode()
    assert len(name) <= 48, name
    return _RECORD.pack(
        _MAGIC,
        bytes.fromhex(hello.member.incarnation),
        NONE if hello.attempt is None else hello.attempt,
        hello.step,
        NONE if hello.saved_step is None else hello.saved_step,
        hello.life,
        hello.carries,
        hello.ready,
        to_bits(hello.wishes),
        name,
    )


def unpack(record: bytes) -> Hello:
    """The inverse of ``pack``. Raises ``MembershipError`` for a record of another protocol."""
    magic, incarnation, attempt, step, saved, life, carries, ready, bits, name = _RECORD.unpack(record)
    if magic != _MAGIC:
        raise MembershipError(
            f"a member of the quorum speaks another protocol ({magic!r} instead of {_MAGIC!r})\n"
            "  all groups of a job must run the same version of ftckpt",
            found=magic,
        )
    return Hello(
        Member(name.rstrip(b"\0").decode(), incarnation.hex()),
        None if attempt == NONE else attempt,
        life,
        step,
        None if saved == NONE else saved,
        carries,
        ready,
        from_bits(bits),
    )


def to_bits(wishes: Collection[str]) -> int:
    """Wishes as the record spells them."""
    return sum(1 << WISHES.index(wish) for wish in wishes)


def from_bits(bits: int) -> frozenset[str]:
    """The inverse of ``to_bits``; bits without a meaning yet are ignored."""
    return frozenset(wish for i, wish in enumerate(WISHES) if bits >> i & 1)


def judge(hellos: Sequence[Hello], index: int) -> str | None:
    """``None`` if these members can train a step together, else why this turn must be repeated.

    Raises ``MembershipError`` on a member that has no place here: its attempt is over, or its name
    is taken by a newer life. The others repeat the turn without it.
    """
    mine = hellos[index]
    newest = max((h.attempt for h in hellos if h.attempt is not None), default=None)
    if mine.attempt is not None and newest is not None and mine.attempt < newest:
        raise MembershipError(
            f"group {mine.member.group} belongs to attempt {mine.attempt}, but the quorum is attempt {newest}'s\n"
            "  this attempt is over; what it committed stays readable\n"
            "  stop this process: the supervisor of the newer attempt starts what is needed",
            attempt=mine.attempt,
            newest=newest,
        )
    names = Counter(h.member.group for h in hellos)
    if names[mine.member.group] > 1:
        same = [h for h in hellos if h.member.group == mine.member.group]
        if mine != max(same, key=lambda h: (h.life, h.member.incarnation)):
            raise MembershipError(
                f"two members of the quorum are called {mine.member.group}, and the other is the newer life\n"
                "  this one leaves; give every replica group a name of its own (FTCKPT_GROUP)",
                group=mine.member.group,
            )
    if any(h.attempt is not None and h.attempt != newest for h in hellos):
        return "a member of an older attempt is in the quorum"
    if len(names) < len(hellos):
        return "two members have the same name"
    if unready := [h.member.group for h in hellos if not h.ready]:
        return f"not ready: {', '.join(unready)}"
    if len(steps := {h.step for h in hellos}) > 1:
        return f"members finished different steps: {sorted(steps)}"
    return None
