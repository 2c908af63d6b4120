"""The ranks of one job that share a session: how they agree at its start, and hear of a stop later.

Only gloo on a process group of its own, so that checkpoint traffic never meets the trainer's
collectives. Bytes travel, never pickled objects. After the start there are no collectives: a stop
is a key in the job's own key-value store, which every rank looks at between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ftckpt import errors
from ftckpt.errors import FtckptError, SettingsDiffer, SettingsError

START_TIMEOUT_S = 300.0

_FINE = b"\0"
"""What the word of a rank begins with that met no error."""


class Ranks(Protocol):
    """Everybody who entered the same session. Only ``gather`` is collective."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def gather(self, mine: bytes) -> list[bytes]:
        """Everybody's bytes, in rank order."""
        ...

    def stop_at(self, step: int | None) -> int | None:
        """Say that the job should stop after ``step`` (``None``: say nothing); returns the step that
        it was first told to stop after, if any.
        """
        ...

    def post(self, note: str) -> None:
        """Let every rank find this note from now on."""
        ...

    def posted(self, note: str) -> bool:
        """Whether any rank posted it."""
        ...

    def close(self) -> None:
        """Nothing more is asked of it."""
        ...


class One:
    """A session of one rank."""

    rank = 0
    world = 1

    def __init__(self) -> None:
        self._stop: int | None = None
        self._notes: set[str] = set()

    def gather(self, mine: bytes) -> list[bytes]:
        return [mine]

    def stop_at(self, step: int | None) -> int | None:
        if self._stop is None:
            self._stop = step
        return self._stop

    def post(self, note: str) -> None:
        self._notes.add(note)

    def posted(self, note: str) -> bool:
        return note in self._notes

    def close(self) -> None:
        """There is nothing to let go of."""


class Gang:
    """Ranks of an initialised torch.distributed, on a gloo group of their own."""

    def __init__(self, timeout_s: float = START_TIMEOUT_S) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self._group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_s), group_desc="ftckpt-session"
        )
        self._store: Any = c10d.PrefixStore("ftckpt", c10d._get_default_store())  # noqa: SLF001

    def gather(self, mine: bytes) -> list[bytes]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)]), group=self._group)
        widest = max(1, *(int(size) for size in sizes))
        padded = torch.zeros(widest, dtype=torch.uint8)
        if mine:
            padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        found = [torch.zeros(widest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(found, padded, group=self._group)
        return [bytes(body.numpy().tobytes()[: int(size)]) for body, size in zip(found, sizes, strict=True)]

    def stop_at(self, step: int | None) -> int | None:
        if step is not None:
            return int(self._store.compare_set("stop", "", str(step)))
        return int(self._store.get("stop")) if self._store.check(["stop"]) else None

    def post(self, note: str) -> None:
        self._store.set(f"note {note}", "")

    def posted(self, note: str) -> bool:
        return bool(self._store.check([f"note {note}"]))

    def close(self) -> None:
        dist.destroy_process_group(self._group)


def ranks_here(world: int) -> Ranks:
    """The ranks this process trains with: torch.distributed's if it is initialised.

    Raises ``SettingsError`` when the launch says there are several but torch.distributed is not up.
    """
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return Gang()
    if world > 1:
        raise SettingsError(
            f"SettingsError: this process was launched as one of {world} ranks, but torch.distributed is not "
            "initialised\n  call torch.distributed.init_process_group() before entering the session",
            world=world,
        )
    return One()


def agree(ranks: Ranks, settings: Mapping[str, object]) -> None:
    """Check that all ranks were given the same settings, before anything is written.

    Raises:
        SettingsDiffer: on every rank, naming the settings and what each rank was given.
    """
    everybody = [msgspec.json.decode(body) for body in ranks.gather(msgspec.json.encode(dict(settings)))]
    names = sorted({name for one in everybody for name in one})
    differing = [name for name in names if any(one.get(name) != everybody[0].get(name) for one in everybody)]
    if differing:
        lines = [
            f"  {name}: " + ", ".join(f"rank {r} has {one.get(name)!r}" for r, one in enumerate(everybody))
            for name in differing
        ]
        raise SettingsDiffer(
            "SettingsDiffer: the ranks of this job were given different settings\n"
            + "\n".join(lines)
            + "\n  nothing was written; give every rank the same",
            settings=tuple(differing),
        )


def tell(ranks: Ranks, mine: Mapping[str, object]) -> Mapping[str, object]:
    """Rank 0's values, on every rank."""
    found: dict[str, object] = msgspec.json.decode(ranks.gather(msgspec.json.encode(dict(mine)))[0])
    return found


@dataclass(slots=True)
class Told:
    """What ranks tell each other on leaving ``together``: set ``mine`` inside, ``everybodys`` is there after it."""

    mine: bytes = b""
    everybodys: Sequence[bytes] = ()


@contextmanager
def together(ranks: Ranks, doing: str) -> Iterator[Told]:
    """For a ``with`` that all ranks enter: if its body fails on any, it raises on every rank, the own
    error where there is one, else whose and what. One ``gather``, which also carries what they tell.
    """
    error: Exception | None = None
    told = Told()
    try:
        yield told
    except Exception as trouble:
        error = trouble
    mine = _FINE + told.mine if error is None else f"{type(error).__name__}\n{error}".encode()
    found = ranks.gather(mine)
    failed = [(rank, body.decode()) for rank, body in enumerate(found) if not body.startswith(_FINE)]
    told.everybodys = [body.removeprefix(_FINE) for body in found]
    if error is not None:
        if ranks.world > 1:
            error.add_note(f"this happened on rank {ranks.rank} of {ranks.world} while {doing}")
        raise error
    if failed:
        rank, text = failed[0]
        name, _, message = text.partition("\n")
        raise _kind(name)(
            f"{message or name}\n  this happened on rank {rank} of {ranks.world} while {doing}; "
            "every rank of the job stops with it",
            rank=rank,
        )


def _kind(name: str) -> type[FtckptError]:
    found: Any = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, FtckptError) else FtckptError
