"""A tier: a folder on this machine that has the newest steps of a run before the far store has them.

Knows the folder, its store, who of this machine still lives, and how the far store's attempts get
into it. Refuses to know how steps are written into it (the save engine) and out of it (the agent).

*Signs of life* are locks on hidden files beside the objects. The kernel drops a lock when its process
dies, so nobody is taken for dead who lives, and no clock or process id is asked.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ftckpt import layout
from ftckpt.attempts import check_fence, create_owned
from ftckpt.clock import Clock
from ftckpt.commit import Patience, check_settled, read_commit
from ftckpt.errors import SettingsError, StoreError
from ftckpt.events import Events
from ftckpt.layout import Writer
from ftckpt.manifest import Commit, Position
from ftckpt.store import open_store
from ftckpt.store.api import ObjectStore

_LIFE = ".ftckpt-life-"
_STAGING = ".ftckpt-staging-"
_AGENT = "agent"
_TRIES = 20
_INSTANT_S = 0.01


@dataclass(frozen=True, slots=True)
class Tier:
    """A folder and the store in it. Any process of the machine may open it."""

    folder: Path
    store: ObjectStore

    def staging_path(self, writer: Writer) -> Path:
        """Where this writer stages."""
        return self.folder / f"{_STAGING}{writer}"

    def life(self, name: Writer | str) -> Life:
        """A sign of life of that name, not given yet."""
        return Life(self.folder / f"{_LIFE}{name}")

    def is_alive(self, name: Writer | str) -> bool:
        """Whether somebody of that name lives on this machine."""
        return _is_locked(self.folder / f"{_LIFE}{name}")

    def living(self) -> list[str]:
        """Everybody who lives and works with this tier, the agent left out."""
        names = [path.name.removeprefix(_LIFE) for path in self.folder.glob(f"{_LIFE}*")]
        return sorted(name for name in names if name != _AGENT and self.is_alive(name))

    @property
    def agent_lives(self) -> bool:
        """Whether an agent is at work here."""
        return self.is_alive(_AGENT)

    def agent_name(self) -> str:
        """Which agent is at work here; empty: none."""
        if not self.agent_lives:
            return ""
        with suppress(FileNotFoundError):
            return (self.folder / f"{_LIFE}{_AGENT}").read_text()
        return ""

    def agent_life(self, name: str) -> Life:
        """The sign of life of the agent of that name: one of them has it at a time."""
        return Life(self.folder / f"{_LIFE}{_AGENT}", name)

    @contextmanager
    def staged(self, writer: Writer) -> Iterator[memoryview]:
        """What a writer has staged; empty when there is nothing."""
        try:
            fd = os.open(self.staging_path(writer), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            yield memoryview(b"")
            return
        try:
            size = os.fstat(fd).st_size
            mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ) if size else b""
        finally:
            os.close(fd)
        yield memoryview(mapped)

    def bury(self) -> None:
        """Remove what dead writers left beside the objects, if nothing in the store speaks of them."""
        spoken_of = {
            str(layout.parse_writer(info.key))
            for prefix in (layout.SAVES, layout.STAGED)
            for info in self.store.scan(prefix)
        }
        for path in self.folder.glob(f"{_LIFE}*"):
            name = path.name.removeprefix(_LIFE)
            if name == _AGENT or name in spoken_of:
                continue
            if not self.is_alive(name):
                with suppress(BlockingIOError), Life(path):
                    (self.folder / f"{_STAGING}{name}").unlink(missing_ok=True)


def open_tier(address: str | os.PathLike[str], events: Events) -> Tier:
    """The tier in a folder, which is made if it is not there.

    Raises:
        SettingsError: the address is no folder of this machine.
    """
    text = os.fspath(address).removeprefix("file://")
    if "://" in text or not text.strip():
        raise SettingsError(
            f"SettingsError: {text or 'an empty address'} is no folder of this machine, so it cannot be a tier\n"
            "  a tier is in memory or on a disk: /dev/shm/ftckpt/NAME, /local/ftckpt/NAME; nothing was changed",
            tier=text,
        )
    folder = Path(text).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"SettingsError: the tier {folder} cannot be made: {error.strerror}\n  nothing was changed",
            tier=str(folder),
        ) from error
    return Tier(folder, open_store(folder, events=events))


class Life:
    """A lock that is held while this process lives and the block is entered.

    ``told`` stands in the file for whoever wants to know. Raises ``BlockingIOError`` on entering when
    somebody else holds it.
    """

    def __init__(self, path: Path, told: str = "") -> None:
        self._path = path
        self._told = told
        self._fd = -1

    def __enter__(self) -> Self:
        self._fd = _lock(self._path)
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._told.encode(), 0)
        # A forked child shares the lock: a trainer's data loaders would hold it beyond its death.
        me = weakref.ref(self)
        os.register_at_fork(after_in_child=lambda: _let_go(me()))
        return self

    def __exit__(self, *_exc: object) -> None:
        self._path.unlink(missing_ok=True)
        self.let_go()

    def let_go(self) -> None:
        """Close the file without a word to others; what a forked child does."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _let_go(life: Life | None) -> None:
    if life is not None:
        life.let_go()


def _lock(path: Path) -> int:
    """A locked descriptor of the file that has this name. Somebody who only looks holds it for an
    instant, so it tries a few times.
    """
    tries = 0
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            tries += 1
            if tries == _TRIES:
                raise
            time.sleep(_INSTANT_S)
            continue
        if _has_name(fd, path):
            return fd
        os.close(fd)  # its owner, or who buried it, removed it meanwhile


def _has_name(fd: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat())
    return False


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


# --- the far store's attempts ---------------------------------------------------------------------


def mirror(far: ObjectStore, near: ObjectStore) -> None:
    """Make a tier the run that the far store is, as far as attempts go: claims, then starts, byte for
    byte. From then on who looks into the tier sees the fences of the far store.

    Raises:
        SettingsError: the tier holds another run. Nothing was changed.
    """
    run = bytes(far.read(layout.RUN))
    if create_owned(near, layout.RUN, run) != run:
        raise SettingsError(
            f"SettingsError: the tier {near.uri} belongs to another run than {far.uri}\n"
            "  nothing was changed; give every run a folder of its own",
            tier=near.uri,
            uri=far.uri,
        )
    for prefix in (layout.ATTEMPTS, layout.STARTS):
        there = {info.key for info in near.scan(prefix)}
        for info in far.scan(prefix):
            if info.key not in there:
                create_owned(near, info.key, bytes(far.read(info.key)))


def is_shared(near: ObjectStore, nonce: str) -> bool:
    """Whether a mark that another rank left with ``leave_mark`` is in this rank's tier as well."""
    return any(info.key.endswith(nonce) for info in near.scan(f"{layout.PROBES}/{nonce}"))


def leave_mark(near: ObjectStore) -> str:
    """A mark by which others can tell that they have the same tier; ``remove_mark`` takes it away."""
    nonce = uuid.uuid4().hex
    near.create(_mark_key(nonce), b"here")
    return nonce


def remove_mark(near: ObjectStore, nonce: str) -> None:
    """Take a mark away."""
    near.delete([_mark_key(nonce)])


def _mark_key(nonce: str) -> str:
    return f"{layout.PROBES}/{nonce}/{nonce}"


def wait_until_settled(
    far: ObjectStore, at: Position, clock: Clock, timeout_s: float | None, patience: Patience
) -> Commit:
    """The commit of a step in the far store, once an agent brought it there and no newer claim is.

    Raises:
        SaveAborted, Diverged: the far store will never have it.
        Fenced: a newer attempt owns the run.
        TimeoutError: it is not settled after ``timeout_s``; the agent goes on.
    """
    end_s = None if timeout_s is None else clock.now_s() + timeout_s
    pause_s = patience.poll_s
    trouble: StoreError | None = None
    while True:
        try:
            if (found := read_commit(far, at)) is not None:
                check_settled(found[0])
                check_fence(far, at.attempt)
                return found[0]
            trouble = None
        except StoreError as error:
            if not error.retryable:
                raise
            trouble = error
        if end_s is not None and clock.now_s() >= end_s:
            raise TimeoutError(
                f"{at} is in the tier and not yet in {far.uri} after {timeout_s:g} s; the agent goes on"
            ) from trouble
        clock.sleep(pause_s)
        pause_s = min(2 * pause_s, patience.max_poll_s)
