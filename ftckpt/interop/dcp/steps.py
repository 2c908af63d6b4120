"""Steps as DCP's callers name them, and what a save is told by its coordinator. All values."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from ftckpt.bounds import require_number
from ftckpt.commit import Expected
from ftckpt.errors import SettingsError
from ftckpt.layout import Writer
from ftckpt.manifest import MAX_STEP, Position, Ref
from ftckpt.membership import alone

GROUP = "g0"
"""DCP knows one group of ranks."""

SUMMARY = "dcp"
"""The group in the name of the writer that adds the trees to a step."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One save, as its coordinator tells it to all ranks: they write one position from one parent, or none."""

    save: str
    uri: str
    at: Position
    parent: Ref | None
    incarnation: str
    world: int

    def writer(self, rank: int) -> Writer:
        """Who a rank is in this save."""
        return Writer(GROUP, rank, self.incarnation)

    @property
    def summary(self) -> Writer:
        """Who the coordinator is when all have written."""
        return Writer(SUMMARY, 0, self.incarnation)

    @property
    def expected(self) -> Expected:
        """What must be there before the step may be committed."""
        writers = (self.summary, *map(self.writer, range(self.world)))
        return Expected(self.at, self.parent, 0, alone(GROUP, self.incarnation).digest(), writers)


def step_of(checkpoint_id: str | os.PathLike[str] | int) -> int:
    """The step that a checkpoint id names: a number, or text or a path whose last part ends in one.

    Raises ``SettingsError`` when it names none.
    """
    if isinstance(checkpoint_id, int):
        return int(require_number("checkpoint_id", checkpoint_id, low=0, high=MAX_STEP, whole=True))
    last = os.fspath(checkpoint_id).rstrip("/").rpartition("/")[2]
    found = re.search(r"[0-9]+$", last)
    if found is None or int(found[0]) > MAX_STEP:
        raise SettingsError(
            f"SettingsError: checkpoint_id={os.fspath(checkpoint_id)!r:.120} names no step\n"
            "  a run is told of at the writer or reader; the id is a step's number, or ends in it: 400, "
            "'step-400', 'outputs/step-400'\n"
            "  nothing was changed",
            checkpoint_id=os.fspath(checkpoint_id),
        )
    return int(found[0])
