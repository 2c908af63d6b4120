"""Where everything lies: the only place that spells keys.

Steps print with 12 digits, attempts with 6, so that key order is number order. What a key looks
like and who may create it is the protocol; this module only spells and parses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ftckpt.manifest import Position

RUN = "run.json"
ATTEMPTS = "attempts"
STARTS = "starts"
PACKS = "packs"
FRAGMENTS = "fragments"
COMMITS = "commits"
COLLECTED = "collected"
LOG = "log"
PINS = "pins"
GC = "gc"
PROBES = "probes"
SAVES = "saves"
STAGED = "staged"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_WRITER = re.compile(r"([A-Za-z0-9_-]{1,64})\.(0|[1-9][0-9]{0,5})\.([0-9a-f]{32})")
_COMMIT = re.compile(r"(?:commits|collected)/([0-9]{12})-([0-9]{6})")
_POSITION = re.compile(r"(?:packs|fragments|log|saves|staged)/([0-9]{6})/([0-9]{12})/(.+)")
_NUMBERED = re.compile(r"(?:attempts|starts)/([0-9]{6})")


@dataclass(frozen=True, slots=True, order=True)
class Writer:
    """One life of one rank: the group's name, the rank inside it, the incarnation (32 hex digits)."""

    group: str
    rank: int
    incarnation: str

    def __post_init__(self) -> None:
        assert _WRITER.fullmatch(str(self)), str(self)

    def __str__(self) -> str:
        return f"{self.group}.{self.rank}.{self.incarnation}"


def is_name(text: str) -> bool:
    """Whether a group or an id may be called that: letters, digits, ``_`` and ``-``, at most 64."""
    return _NAME.fullmatch(text) is not None


def claim_key(attempt: int) -> str:
    return f"{ATTEMPTS}/{attempt:06d}"


def start_key(attempt: int) -> str:
    return f"{STARTS}/{attempt:06d}"


def pack_key(at: Position, writer: Writer, sequence: int) -> str:
    return f"{PACKS}/{at.attempt:06d}/{at.step:012d}/{writer}-{sequence:06d}"


def pack_prefix(at: Position) -> str:
    return f"{PACKS}/{at.attempt:06d}/{at.step:012d}"


def fragment_key(at: Position, writer: Writer) -> str:
    return f"{FRAGMENTS}/{at.attempt:06d}/{at.step:012d}/{writer}"


def fragment_prefix(at: Position) -> str:
    return f"{FRAGMENTS}/{at.attempt:06d}/{at.step:012d}"


def save_key(at: Position, writer: Writer) -> str:
    return f"{SAVES}/{at.attempt:06d}/{at.step:012d}/{writer}"


def staged_key(at: Position, writer: Writer) -> str:
    return f"{STAGED}/{at.attempt:06d}/{at.step:012d}/{writer}"


def commit_key(at: Position) -> str:
    return f"{COMMITS}/{at.step:012d}-{at.attempt:06d}"


def tombstone_key(at: Position) -> str:
    return f"{COLLECTED}/{at.step:012d}-{at.attempt:06d}"


def pin_key(pin: str) -> str:
    assert is_name(pin), pin
    return f"{PINS}/{pin}"


def intent_key(intent: str) -> str:
    assert is_name(intent), intent
    return f"{GC}/{intent}"


def parse_number(key: str) -> int | None:
    """The attempt of a claim or start key."""
    match = _NUMBERED.fullmatch(key)
    return int(match[1]) if match and int(match[1]) else None


def parse_commit(key: str) -> Position | None:
    """The position of a commit or tombstone key."""
    match = _COMMIT.fullmatch(key)
    return Position(int(match[1]), int(match[2])) if match and int(match[2]) else None


def parse_position(key: str) -> Position | None:
    """The position that a pack, a fragment, a log object or a note of a tier belongs to."""
    match = _POSITION.fullmatch(key)
    return Position(int(match[2]), int(match[1])) if match and int(match[1]) else None


def parse_writer(key: str) -> Writer | None:
    """The writer of a fragment key, or of a note in a tier."""
    match = _WRITER.fullmatch(key.rpartition("/")[2])
    return Writer(match[1], int(match[2]), match[3]) if match else None
