"""Commits and attempts as lines for people and as JSON; shared by ``ls`` and ``show``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from ftckpt.begin import recorded
from ftckpt.cli.common import table
from ftckpt.layout import parse_writer
from ftckpt.manifest import Claim, Commit, Start

if TYPE_CHECKING:
    from ftckpt.run import Run


def groups_of(commit: Commit) -> list[str]:
    """The replica groups whose fragments make up a commit."""
    writers = (parse_writer(ref.key) for ref in commit.fragments)
    return sorted({writer.group for writer in writers if writer is not None})


def bytes_of(commit: Commit) -> dict[str, int]:
    """What a commit holds, what its own packs hold, and what it shares with its parent."""
    parts = commit.components.values()
    return {
        "raw_bytes": sum(part.raw_bytes for part in parts),
        "stored_bytes": sum(part.stored_bytes for part in parts),
        "reused_bytes": sum(part.reused_bytes for part in parts),
    }


def attempt_json(claim: Claim, start: Start | None) -> dict[str, Any]:
    """One attempt, for programs."""
    parent = start.parent if start is not None else None
    return {
        "attempt": claim.attempt,
        "started": start is not None,
        "parent": {"step": parent.step, "attempt": parent.attempt} if parent else None,
        "groups": claim.groups,
        "nproc": claim.nproc,
        "host": claim.host,
        "pid": claim.pid,
        "cwd": claim.cwd,
        "command": list(claim.command),
        "settings": claim.settings,
        "versions": start.versions if start is not None else {},
    }


def goes_on_from(start: Start | None) -> str:
    """Where an attempt began, in words."""
    if start is None:
        return "claimed, never started"
    return "nothing" if start.parent is None else str(start.parent.at)


def attempts_table(run: Run) -> Table:
    """Every attempt with its parent, oldest first."""
    rows = table("attempt", "goes on from", "groups × ranks", "host", "command", right=("attempt",))
    for claim, start in run.attempts():
        rows.add_row(
            str(claim.attempt),
            goes_on_from(start),
            f"{claim.groups} × {claim.nproc}",
            claim.host,
            recorded(claim.command),
        )
    return rows


def attempts_json(run: Run) -> list[dict[str, Any]]:
    """Every attempt, oldest first."""
    return [attempt_json(claim, start) for claim, start in run.attempts()]
