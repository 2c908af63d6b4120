"""Membership that changes: replica groups over torchft, and the supervisor that keeps them running.

The only room that imports torchft. ``Supervisor`` and ``Launch`` need no torch, so it is loaded
only when a ``ReplicaGroup`` is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftckpt.elastic.launch import Launch, open_status
from ftckpt.elastic.supervisor import GroupStatus, JobPlan, Supervisor

if TYPE_CHECKING:
    from ftckpt.elastic.heal import HealState
    from ftckpt.elastic.replica_group import ReplicaGroup

__all__ = ["Launch", "open_status", "ReplicaGroup", "HealState", "Supervisor", "JobPlan", "GroupStatus"]


def __getattr__(name: str) -> object:
    if name == "ReplicaGroup":
        from ftckpt.elastic.replica_group import ReplicaGroup

        return ReplicaGroup
    if name == "HealState":
        from ftckpt.elastic.heal import HealState

        return HealState
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
