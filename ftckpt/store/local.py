"""A folder as a store: create-only files that are durable when ``create`` returns.

A body is written to a temporary file beside its final place, synced, and linked to the final name.
``link`` fails when the name exists, also for two racing processes, so exactly one creator wins and
a reader never sees half an object. Rejected: ``O_EXCL`` on the final name (readers see it grow),
``rename`` (the last one wins), fsspec's local file system (58 of 200 races had several winners).

A temporary file is locked while its writer lives. The kernel drops the lock when the process
dies, so a leftover is told from a live writer's file without clocks or process ids: whoever can
take the lock may remove the file.

Knows files; knows nothing of what is in them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ftckpt.errors import (
    AccessDenied,
    AlreadyExists,
    BucketNotFound,
    ObjectNotFound,
    StoreError,
    StoreFull,
    StoreTimeout,
    StoreUnavailable,
    UnsafeStore,
)
from ftckpt.store.api import Buffer, ByteRange, ObjectInfo
from ftckpt.store.keys import DOTTED, check_key, check_prefix, view

TEMPORARY_PREFIX = ".ftckpt-tmp-"
"""No key may begin a part with a dot, so no scan or read can meet one of these."""

_NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS)
_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS)
_PIECE_BYTES = 1 << 20
_TRIES = 100


class LocalStore:
    """Objects as files below ``root``.

    The folder is made by the first ``create`` (with its parents); before that it reads as empty.
    The first ``create`` also removes what killed writers left behind.
    """

    def __init__(self, root: str | Path) -> None:
        self._root = Path(root).absolute()
        self._swept = False

    def __repr__(self) -> str:
        return f"LocalStore({str(self._root)!r})"

    @property
    def uri(self) -> str:
        return f"file://{self._root}"

    @property
    def conditional_create(self) -> bool:
        return True

    def create(self, key: str, body: Buffer) -> None:
        path = self._path(key, "create")
        with self._errors("create", key):
            if not self._swept:
                self._swept = True
                self.sweep()
            try:
                if os.path.lexists(path):  # spares writing a large body only to lose; ``link`` decides
                    raise FileExistsError(errno.EEXIST, "exists", str(path))
                self._until_named(path, view(body), os.link)
            except FileExistsError:
                if path.is_dir():
                    raise IsADirectoryError(errno.EISDIR, "there is a folder of that name") from None
                self._sync_folders(path.parent, ())  # what the loser acts upon is durable, too
                raise

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        path = self._path(key, "read")
        with self._errors("read", key), _opened(path) as fd:
            size_bytes = _file_size(os.fstat(fd))
            if at is None:
                at_start, wanted_bytes = 0, size_bytes
            elif at.end <= size_bytes:
                at_start, wanted_bytes = at.start, at.size
            else:
                raise StoreError(
                    f"read {key} in {self.uri}: bytes {at.start} to {at.end} were asked for, "
                    f"but the object has {size_bytes}",
                    op="read",
                    key=key,
                    uri=self.uri,
                    size_bytes=size_bytes,
                )
            body = _pread(fd, at_start, wanted_bytes)
            if len(body) != wanted_bytes:
                raise StoreUnavailable(
                    f"read {key} in {self.uri}: {len(body)} of {wanted_bytes} bytes came; "
                    "the file shrank while it was read",
                    op="read",
                    key=key,
                    uri=self.uri,
                )
            return body

    def size(self, key: str) -> int:
        path = self._path(key, "size")
        with self._errors("size", key):
            return _file_size(path.stat())

    def scan(self, prefix: str) -> Iterator[ObjectInfo]:
        check_prefix(prefix, uri=self.uri)
        top = self._root.joinpath(*prefix.split("/")) if prefix else self._root
        with self._errors("scan", prefix):
            if self._root.exists() and not self._root.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(self._root))
            found = [
                ObjectInfo(path.relative_to(self._root).as_posix(), size_bytes)
                for path, size_bytes in _files_below(top)
                if not path.name.startswith(".") or path.name in DOTTED
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects, and the folders that this leaves empty.

        The removal itself is not synced: an object that comes back after a power failure is
        deleted again by the next collector, who also lists what nobody references.
        """
        for key in keys:
            path = self._path(key, "delete")
            with self._errors("delete", key):
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                self._prune(path.parent)

    def overwrite(self, key: str, body: Buffer) -> None:
        path = self._path(key, "overwrite")
        with self._errors("overwrite", key):
            self._until_named(path, view(body), os.replace)

    def close(self) -> None:
        """Nothing is held between calls."""

    def stream(self, key: str) -> LocalStream:
        """Begin an object that is written part by part."""
        path = self._path(key, "stream")
        if not self._swept:
            self._swept = True
            self.sweep()
        with self._errors("stream", key):
            made = self._make_folders(path.parent)
            temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _lock(fd)
        return LocalStream(self, key, path, temporary, fd, tuple(made))

    def sweep(self) -> int:
        """Remove the temporary files of writers that no longer live; returns how many.

        Never touches one whose writer lives, in this process or another.
        """
        stale = [path for path, _ in _files_below(self._root) if path.name.startswith(TEMPORARY_PREFIX)]
        return sum(_remove_if_abandoned(path) for path in stale)

    def _path(self, key: str, op: str) -> Path:
        check_key(key, op=op, uri=self.uri)
        return self._root.joinpath(*key.split("/"))

    def _until_named(self, path: Path, body: memoryview, name: Callable[[Path, Path], None]) -> None:
        """Write it and give it its name, over again when others take away what it stands on: that is bad
        luck once or twice, and a thing that nobody should wait for when it does not end.
        """
        for _ in range(_TRIES):
            if self._write_and_name(path, body, name):
                return
        raise OSError(errno.EBUSY, f"its folder, or the file, was taken away by others {_TRIES} times")

    def _write_and_name(self, path: Path, body: memoryview, name: Callable[[Path, Path], None]) -> bool:
        """Write a temporary file, then give it its name. False when another process took the folder or
        the temporary file away: do it again.
        """
        made = self._make_folders(path.parent)
        temporary = path.with_name(f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}")
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileNotFoundError:
            return False  # a collector pruned the empty folder
        try:
            if not _lock(fd):
                return False  # a sweeper holds it and is about to remove it
            _write_all(fd, body)
            os.fsync(fd)
            try:
                name(temporary, path)
            except FileNotFoundError:
                return False  # a sweeper came between open and flock
            except OSError as error:
                if error.errno in _NO_HARD_LINKS:
                    raise UnsafeStore(
                        f"{self.uri}: this file system has no hard links ({error.strerror}), so creates "
                        "cannot be exclusive\n  nothing was written; choose another folder or a bucket",
                        op="create",
                        uri=self.uri,
                    ) from error
                raise
        finally:
            temporary.unlink(missing_ok=True)
            os.close(fd)
        self._sync_folders(path.parent, made)
        return True

    def _make_folders(self, folder: Path) -> list[Path]:
        """Those of the folder and its parents that this call made.

        A collector prunes folders of the run while others make them, and that is noticed when the file
        is opened. Nobody prunes the run's own folder or those above it: what fails there does so for good.
        """
        missing: list[Path] = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        made: list[Path] = []
        for path in reversed(missing):
            try:
                path.mkdir()
            except FileNotFoundError:
                if self._root not in path.parents:
                    raise self._no_folder(path, "the system makes no folder there") from None
            except FileExistsError:
                if path.is_symlink() and not path.exists():
                    why = f"it is a link to {path.readlink()}, which is not there; is its disk mounted?"
                    raise self._no_folder(path, why) from None
                if path.exists() and not path.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, "is a file, not a folder", str(path)) from None
            else:
                made.append(path)
        return made

    def _no_folder(self, path: Path, why: str) -> BucketNotFound:
        return BucketNotFound(
            f"{self.uri}: the folder {path} is absent and cannot be made: {why}\n"
            "  nothing was written; mount it, or choose another place",
            op="create",
            key=str(path),
            uri=self.uri,
        )

    def _sync_folders(self, folder: Path, made: Sequence[Path]) -> None:
        """Make the new name durable, and every folder on the way to it.

        All of them each time, not only those made here: another process may have made a folder
        and not have synced it yet. Syncing what is clean costs next to nothing.
        """
        while True:
            _sync_folder(folder)
            if folder == self._root:
                break
            folder = folder.parent
        for above in {path.parent for path in made}:
            if not above.is_relative_to(self._root):
                _sync_folder(above)

    def _prune(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EBUSY):
                    return
                if error.errno != errno.ENOENT:
                    raise
            folder = folder.parent

    @contextlib.contextmanager
    def _errors(self, op: str, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except OSError as error:
            raise _translated(error, op, key, self.uri) from error


class LocalStream:
    """A temporary file that takes its final name when it is whole."""

    def __init__(
        self, store: LocalStore, key: str, path: Path, temporary: Path, fd: int, made: Sequence[Path]
    ) -> None:
        self._store, self._key = store, key
        self._path, self._temporary, self._fd, self._made = path, temporary, fd, made

    def write(self, data: Buffer) -> None:
        with self._store._errors("stream", self._key):  # noqa: SLF001 - the two are one thing
            _write_all(self._fd, view(data))

    def close(self) -> None:
        with self._store._errors("stream", self._key):  # noqa: SLF001
            try:
                os.fsync(self._fd)
                self._temporary.replace(self._path)
            finally:
                self.abort()  # which finds nothing to remove under the temporary name, if all went well
            self._store._sync_folders(self._path.parent, self._made)  # noqa: SLF001

    def abort(self) -> None:
        self._temporary.unlink(missing_ok=True)
        os.close(self._fd)


def _translated(error: OSError, op: str, key: str, uri: str) -> StoreError:
    what = f"{op} {key or 'everything'} in {uri}"
    facts = {"op": op, "key": key, "uri": uri}
    match error.errno:
        case errno.EEXIST if op == "create":
            return AlreadyExists(f"{what}: an object of that name exists and was left alone", **facts)
        case errno.ENOENT:
            return ObjectNotFound(f"{what}: there is no such object", **facts)
        case errno.ENOTDIR if op in ("read", "size"):
            return ObjectNotFound(f"{what}: there is no such object", **facts)
        case errno.ENOSPC | errno.EDQUOT:
            return StoreFull(
                f"{what}: {error.strerror}\n  nothing became visible and the part written was removed; "
                "free some space (`ftckpt gc`) or choose another place",
                **facts,
            )
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return AccessDenied(
                f"{what}: {error.strerror}\n  nothing was changed; check who owns the folder and "
                "whether it is mounted read-only",
                **facts,
            )
        case errno.ETIMEDOUT:
            return StoreTimeout(f"{what}: {error.strerror}", **facts)
        case errno.ESTALE | errno.EAGAIN | errno.EBUSY | errno.ENOTCONN | errno.EREMOTEIO:
            return StoreUnavailable(f"{what}: {error.strerror}", **facts)
        case _:
            return StoreError(f"{what}: {error.strerror or error}", **facts)


@contextlib.contextmanager
def _opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _file_size(found: os.stat_result) -> int:
    if not stat.S_ISREG(found.st_mode):
        raise FileNotFoundError(errno.ENOENT, "not a file")
    return found.st_size


def _pread(fd: int, start: int, wanted_bytes: int) -> bytes:
    """Usually one call; the kernel hands out at most 2 GiB at a time."""
    parts: list[bytes] = []
    while wanted_bytes and (part := os.pread(fd, wanted_bytes, start)):
        parts.append(part)
        start += len(part)
        wanted_bytes -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_all(fd: int, body: memoryview) -> None:
    """In pieces, each told at once not to be needed in the page cache: so the disk begins with the first
    while the next are copied, and a checkpoint does not push out what the trainer reads.
    """
    written_bytes = 0
    while body:
        size_bytes = os.write(fd, body[:_PIECE_BYTES])
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.posix_fadvise(fd, written_bytes, size_bytes, os.POSIX_FADV_DONTNEED)
        written_bytes += size_bytes
        body = body[size_bytes:]


def _sync_folder(folder: Path) -> None:
    """A folder that is gone was pruned after the object in it had been deleted again."""
    with contextlib.suppress(FileNotFoundError), _opened(folder, os.O_RDONLY | os.O_DIRECTORY) as fd:
        os.fsync(fd)


def _files_below(folder: Path) -> Iterator[tuple[Path, int]]:
    """Path and size of every file; what vanishes meanwhile is left out, an absent folder is empty."""
    try:
        with os.scandir(folder) as listing:
            entries = list(listing)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _files_below(folder / entry.name)
        else:
            with contextlib.suppress(FileNotFoundError):
                yield folder / entry.name, entry.stat().st_size


def _lock(fd: int) -> bool:
    """False when somebody else holds it. Where files cannot be locked nothing is ever swept."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _remove_if_abandoned(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), _opened(path) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False  # its writer lives, or nobody can tell
        path.unlink()
        return True
    return False
