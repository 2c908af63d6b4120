"""Marks a person puts around state: what differs by rank, and what never changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

from ftckpt.errors import SettingsError

T = TypeVar("T")

OnResize = Literal["error", "reseed", "merge"]


class Reshards(Protocol):
    """What ``PerRank(x, on_resize="merge")`` needs of ``x``."""

    def reshard(self, states: Mapping[str, Any], *, group: str, rank: int, world: int) -> None:
        """Take over from other ranks: ``states`` holds what each of them saved, by ``group.rank``."""
        ...


@dataclass(slots=True, eq=False)
class Frozen(Generic[T]):
    """State that never changes after the first save: stored once per run, read once per process. What changes
    it all the same shows where memory tells, by ``load_state_dict``, and inside ``Session.mutating()``; a write
    through ``.data`` does not.

    Stands around a component or anything inside one. A restore sets ``value`` when it has to
    replace an object that cannot be changed in place.
    """

    value: T


@dataclass(slots=True, eq=False)
class PerRank(Generic[T]):
    """State that is each rank's own: every rank saves it, and gets back what it saved.

    ``on_resize`` says what a restore does when other ranks saved it than those that now ask:
    ``error`` refuses before anything is touched, ``reseed`` leaves the live value alone and says so
    in the notes, ``merge`` hands all saved states to the value's own ``reshard``.
    """

    value: T
    on_resize: OnResize = "error"

    def __post_init__(self) -> None:
        if self.on_resize not in ("error", "reseed", "merge"):
            raise SettingsError(
                f"PerRank(on_resize={self.on_resize!r}) has no meaning\n  use 'error', 'reseed' or 'merge'",
                setting="on_resize",
                found=self.on_resize,
            )
        if self.on_resize == "merge" and not callable(getattr(self.value, "reshard", None)):
            raise SettingsError(
                "PerRank(on_resize='merge') needs a value with a method reshard(states, *, group, rank, world)\n"
                f"  found {type(self.value).__qualname__}, which has none",
                setting="on_resize",
                found="merge",
            )


def unmarked(value: object) -> object:
    """What stands inside of the marks."""
    while isinstance(value, Frozen | PerRank):
        value = value.value
    return value


def is_frozen(value: object) -> bool:
    """Whether ``Frozen`` is among its marks."""
    while isinstance(value, PerRank):
        value = value.value
    return isinstance(value, Frozen)
