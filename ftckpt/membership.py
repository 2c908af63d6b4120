"""Who takes part: the members of one quorum, as values.

No torch, no sockets: what a quorum *is* for records and plans. How one comes about is
``ftckpt.elastic``'s business.
"""

from __future__ import annotations

from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True, order=True)
class Member:
    """A replica group in one of its lives. ``incarnation`` is the UUID (hex) that all ranks of the
    group share for as long as it lives; a restarted group has another one.
    """

    group: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class Membership:
    """The members of one quorum in quorum order; ``index`` is this group's place among them.

    ``quorum_id`` may repeat after the lighthouse was restarted; together with ``digest`` it does not.
    """

    quorum_id: int
    members: tuple[Member, ...]
    index: int

    def __post_init__(self) -> None:
        assert 0 <= self.index < len(self.members), (self.index, self.members)

    @property
    def groups(self) -> tuple[str, ...]:
        """Group names in quorum order."""
        return tuple(member.group for member in self.members)

    @property
    def me(self) -> Member:
        return self.members[self.index]

    def digest(self) -> str:
        """xxh3-128 (hex) of the sorted incarnations: the same on every member, in whatever order."""
        return xxhash.xxh3_128_hexdigest("\n".join(sorted(m.incarnation for m in self.members)).encode())


def alone(group: str, incarnation: str) -> Membership:
    """The membership of a group that is nobody's peer; quorum id 0."""
    return Membership(0, (Member(group, incarnation),), 0)
