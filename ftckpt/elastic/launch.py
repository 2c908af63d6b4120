"""What the supervisor tells a rank: read from the environment once, then a value.

The only place of this room that reads the environment. Knows names and their meaning; refuses to
know what is done with them.

=====================  ========================================================================
``FTCKPT_RUN``         the run's address
``FTCKPT_ATTEMPT``     the attempt that the supervisor claimed, ≥ 1
``FTCKPT_GROUP``       name of this replica group; ``g0`` when absent
``FTCKPT_REJOIN``      how often the group was restarted inside this attempt; 0 when absent
``FTCKPT_HOST``        the address at which peers reach this rank; 127.0.0.1 when absent
``FTCKPT_TIER``        the folder of this machine that saves go to first, if there is one
``FTCKPT_STATUS``      a file to which status events are appended as JSON lines
``TORCHFT_LIGHTHOUSE`` address of the lighthouse
``RANK`` …             torch's own: RANK, WORLD_SIZE, LOCAL_RANK, all *inside* the group
=====================  ========================================================================
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ftckpt.errors import SettingsError
from ftckpt.events import Event, Events, JsonLines, silent

GROUP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,47}")
"""Names become parts of keys in the store, of file names and of torchft's replica ids."""

HALF_TIMEOUTS = (
    "TORCHFT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_TIMEOUT_SEC",
    "TORCHFT_CONNECT_TIMEOUT_SEC",
    "TORCHFT_QUORUM_RETRIES",
)
"""torchft applies these to a part of its Manager only, so that the timeouts no longer fit together."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How this process was started. ``rank`` and ``world`` count inside the replica group.

    ``rejoin`` is true for a group that was restarted inside an attempt; ``life`` counts how often.
    """

    run: str | None = None
    attempt: int | None = None
    group: str = "g0"
    lighthouse: str | None = None
    rank: int = 0
    world: int = 1
    local_rank: int = 0
    rejoin: bool = False
    life: int = 0
    host: str = "127.0.0.1"
    status: str | None = None
    tier: str | None = None

    def __post_init__(self) -> None:
        if not GROUP_NAME.fullmatch(self.group):
            raise SettingsError(
                f"{self.group!r} is no name for a replica group\n"
                "  use up to 48 letters, digits, '-' and '_', beginning with a letter or digit",
                group=self.group,
            )
        if not 0 <= self.rank < self.world:
            raise SettingsError(
                f"rank {self.rank} does not exist in a group of {self.world} ranks (RANK, WORLD_SIZE)",
                rank=self.rank,
                world=self.world,
            )
        if self.attempt is not None and self.attempt < 1:
            raise SettingsError(f"attempts count from 1, not {self.attempt}", attempt=self.attempt)

    @staticmethod
    def from_env(environ: Mapping[str, str] | None = None) -> Launch:
        """What the environment says. Raises ``SettingsError`` for values without a meaning."""
        env = os.environ if environ is None else environ
        for name in HALF_TIMEOUTS:
            if env.get(name):
                raise SettingsError(
                    f"{name} is set\n"
                    "  torchft applies it to a part of its timeouts only, and they then contradict each other\n"
                    "  unset it and give heal_time_s and join_timeout_s to ReplicaGroup instead",
                    name=name,
                )
        life = _whole(env, "FTCKPT_REJOIN") or 0
        return Launch(
            run=env.get("FTCKPT_RUN") or None,
            attempt=_whole(env, "FTCKPT_ATTEMPT"),
            group=env.get("FTCKPT_GROUP") or "g0",
            lighthouse=env.get("TORCHFT_LIGHTHOUSE") or None,
            rank=_whole(env, "RANK") or 0,
            world=1 if (world := _whole(env, "WORLD_SIZE")) is None else world,
            local_rank=_whole(env, "LOCAL_RANK") or 0,
            rejoin=life > 0,
            life=life,
            host=env.get("FTCKPT_HOST") or "127.0.0.1",
            status=env.get("FTCKPT_STATUS") or None,
            tier=env.get("FTCKPT_TIER") or None,
        )


_AWS = (
    "endpoint_url",
    "access_key_id",
    "secret_access_key",
    "session_token",
    "region",
    "allow_http",
    "virtual_hosted_style_request",
)


def store_environ(options: Mapping[str, object]) -> dict[str, str]:
    """Store options as the ``AWS_*`` variables by which another process can be told of them.

    Raises ``SettingsError`` for one that has no such variable.
    """
    told = {}
    for key, value in options.items():
        name = key.lower().removeprefix("aws_")
        if name not in _AWS:
            raise SettingsError(
                f"SettingsError: store option {key!r} cannot be handed on to other processes\n"
                f"  they are told through their environment, which has a place for: {', '.join(_AWS)}\n"
                "  nothing was started; give it as store_options where the trainer makes its Session",
                option=key,
            )
        told[f"AWS_{name.upper()}"] = str(value)
    return told


def open_status(launch: Launch) -> Events:
    """Where this rank's status events go: appended to the supervisor's file, or nowhere.

    Raises ``SettingsError`` when the file cannot be written now. What cannot be written later is
    lost: a status is never worth a training step.
    """
    if launch.status is None:
        return silent
    path = Path(launch.status)
    try:
        path.touch()
    except OSError as e:
        raise SettingsError(
            f"cannot append to the status file {path} (FTCKPT_STATUS): {e.strerror}", path=launch.status
        ) from e

    def append(event: Event) -> None:
        with suppress(OSError), path.open("a", encoding="utf-8") as file:
            JsonLines(file)(event)

    return append


def _whole(env: Mapping[str, str], name: str) -> int | None:
    text = env.get(name, "")
    if not text:
        return None
    if not text.isdecimal():
        raise SettingsError(f"{name} must be a whole number, not {text!r}", name=name, value=text)
    return int(text)
