"""What a session is told besides its address and its state, and what it asks of its membership."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from ftckpt.begin import OnEmpty
from ftckpt.bounds import (
    DAY_S,
    SHORTEST_S,
    can,
    require,
    require_address,
    require_flag,
    require_folders,
    require_listener,
    require_number,
    require_options,
    require_state,
)
from ftckpt.codec import Codec
from ftckpt.elastic.launch import Launch
from ftckpt.errors import SettingsError
from ftckpt.manifest import MAX_CHUNK_BYTES, MAX_STEP
from ftckpt.membership import Membership
from ftckpt.plan.asked import Renames
from ftckpt.plan.assign import DEFAULT_CHUNK_BYTES
from ftckpt.policy import Policy
from ftckpt.retention import Keep
from ftckpt.slots import Turn

_NUMBERS: dict[str, tuple[float, float, bool, bool]] = {
    "step": (0, MAX_STEP, True, True),
    "chunk_bytes": (1, MAX_CHUNK_BYTES, True, False),
    "staging_bytes": (1, 1 << 50, True, True),
    "max_failed_saves": (1, 1 << 30, True, True),
    "run_seed": (-(1 << 63), (1 << 63) - 1, True, False),
    "mtbf_s": (SHORTEST_S, 365 * DAY_S, False, True),
    "deadline_s": (SHORTEST_S, DAY_S, False, False),
    "fence_deadline_s": (SHORTEST_S, DAY_S, False, False),
}
"""Every number among the settings: least, most, whole, and whether ``None`` means something."""

_FLAGS = ("fallback", "verify_snapshot", "derives_seeds", "check_replicas")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything about a session that is not its address or its state; the same on all ranks."""

    save_every: Policy = Policy()
    mtbf_s: float | None = None
    keep: Keep = Keep()
    on_empty: OnEmpty = "start"
    step: int | None = None
    fallback: bool = False
    rename: Renames = Renames()
    stage: Literal["lazy", "eager"] = "lazy"
    verify_snapshot: bool = False
    fence_deadline_s: float = 60.0
    codec: Codec = Codec()
    chunk_bytes: int = DEFAULT_CHUNK_BYTES
    staging_bytes: int | None = None
    run_seed: int = 0
    derives_seeds: bool = False
    max_failed_saves: int | None = None
    check_replicas: bool = True
    deadline_s: float = 300.0

    def __post_init__(self) -> None:
        for name, (low, high, whole, optional) in _NUMBERS.items():
            require_number(name, getattr(self, name), low=low, high=high, whole=whole, optional=optional)
        for name in _FLAGS:
            require_flag(name, getattr(self, name))
        if self.mtbf_s is not None and self.save_every.kind != "auto":
            raise SettingsError(
                f'SettingsError: mtbf_s={self.mtbf_s!r} has no meaning without save_every="auto"\n'
                "  the other policies do not depend on how often a job fails; nothing was changed",
                setting="mtbf_s",
                found=self.mtbf_s,
            )
        if self.on_empty not in ("start", "error"):
            raise SettingsError(
                f'SettingsError: on_empty={self.on_empty!r} has no meaning; give "start" or "error"',
                setting="on_empty",
                found=self.on_empty,
            )
        if self.stage not in ("lazy", "eager"):
            raise SettingsError(
                f'SettingsError: stage={self.stage!r} has no meaning; give "lazy" or "eager"',
                setting="stage",
                found=self.stage,
            )


class HealState(Protocol):
    """State as a peer gives and takes it: tensors and bytes by name."""

    def save(self) -> dict[str, object]: ...

    def load(self, state: dict[str, object]) -> None: ...


class Members(Protocol):
    """What a session asks of its membership; ``ftckpt.elastic.ReplicaGroup`` is one."""

    @property
    def launch(self) -> Launch: ...

    @property
    def incarnation(self) -> str: ...

    @property
    def membership(self) -> Membership: ...

    @property
    def finished_step(self) -> int: ...

    @property
    def last_vote(self) -> bool | None: ...

    @property
    def carries(self) -> bool: ...

    @property
    def peers_saved(self) -> int | None:
        """The last step that any member of the quorum registered a save for."""
        ...

    @property
    def agreed(self) -> frozenset[str]:
        """The wishes that anybody uttered before the turn that is under way or just ended."""
        ...

    def wish(self, word: str) -> None:
        """Utter a wish; in the next turn all members know of it, all of them at once."""
        ...

    def register_save(self, step: int) -> None: ...

    def state_dict(self) -> dict[str, int]: ...

    def load_state_dict(self, state: Mapping[str, int]) -> None: ...

    @property
    def index(self) -> int:
        """This group's place in the last quorum."""
        ...

    def join(self) -> None:
        """Be waited for from now on, without state yet."""
        ...

    def ask(self) -> tuple[int | None, ...]:
        """The attempt that each member of a quorum carries."""
        ...

    def spread(self, attempt: int | None) -> int | None:
        """Tell the others of the last ``ask`` what was claimed; returns what any of them claimed."""
        ...

    def settle(
        self,
        *,
        step: int,
        heal: HealState,
        attempt: int | None,
        on_turn: Callable[[Turn], None],
        carries: bool,
    ) -> None:
        """Take part in steps from now on, with the restored state."""
        ...

    def close(self, timeout_s: float = 5.0) -> None: ...


def require_given(*, uri: object, state: object, events: object, **others: object) -> None:
    """The objects that a session is given, each looked at before anything is begun; ``None`` among
    ``others``: not given.

    Raises:
        SettingsError: one that is not what its place is for.
    """
    require_address("uri", uri)
    require_state(state)
    require_listener(events)
    for name, value in others.items():
        if value is not None:
            _GIVEN[name](name, value)


def _with_methods(wanted: str, *methods: str) -> Callable[[str, object], None]:
    def check(name: str, value: object) -> None:
        require(name, value, can(value, *methods), f"{wanted}, or None")

    return check


def _launch(name: str, value: object) -> None:
    require(name, value, isinstance(value, Launch), "an ftckpt.elastic.Launch, or None")


def _rules(name: str, value: object) -> None:
    fits = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    require(name, value, fits, 'rules as {"name when saved": "name here"}, or None')


_GIVEN: dict[str, Callable[[str, object], None]] = {
    "tiers": require_folders,
    "store_options": lambda _, value: require_options(value),
    "rename": _rules,
    "launch": _launch,
    "store": _with_methods(
        "an ftckpt.store.ObjectStore", "create", "read", "size", "scan", "delete", "overwrite", "close"
    ),
    "clock": _with_methods("an ftckpt.clock.Clock, with now_s() and sleep()", "now_s", "sleep"),
    "yield_to": _with_methods("a callable without arguments that says whether to hold back", "__call__"),
    "budget": _with_methods(
        "an ftckpt.colocation.HostBudget, with take(bytes) and give(bytes)", "take", "give"
    ),
    "replica_group": _with_methods(
        "an ftckpt.elastic.ReplicaGroup", "settle", "register_save", "wish", "close"
    ),
}
