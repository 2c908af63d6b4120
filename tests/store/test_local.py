"""What is the folder's own: durability, leftovers, a body that fails half way."""

from __future__ import annotations

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftckpt.errors import AlreadyExists, BucketNotFound, StoreError, StoreFull, StoreUnavailable, UnsafeStore
from ftckpt.store import LocalStore, local
from ftckpt.store.local import TEMPORARY_PREFIX


def files(root):
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_the_folder_is_made_by_the_first_create_and_not_before(tmp_path):
    root = tmp_path / "deep" / "run"
    store = LocalStore(root)

    assert list(store.scan("")) == []
    assert list(tmp_path.iterdir()) == []

    store.create("a/b", b"x")

    assert files(root) == ["a/b"]


def test_the_body_is_synced_before_its_name_appears_and_every_folder_after(tmp_path, monkeypatch):
    """
    Whoever sees the name may count on the bytes; when create returns, the name itself and the way
    to it survive a power failure. (The calls are watched, not replaced.)
    """
    root = tmp_path / "new" / "run"
    seen = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(fd):
        seen.append(("fsync", str(Path(f"/proc/self/fd/{fd}").readlink())))
        real_fsync(fd)

    def link(source, target):
        seen.append(("link", str(target)))
        real_link(source, target)

    monkeypatch.setattr(local.os, "fsync", fsync)
    monkeypatch.setattr(local.os, "link", link)

    LocalStore(root).create("a/b/c", b"x")

    names = [(what, path.removeprefix(str(tmp_path))) for what, path in seen]
    assert names[0][0] == "fsync" and TEMPORARY_PREFIX in names[0][1]
    assert names[1] == ("link", "/new/run/a/b/c")
    assert {path for _, path in names[2:]} == {"/new/run/a/b", "/new/run/a", "/new/run", "/new", ""}


def test_a_body_that_fails_half_way_leaves_no_object_and_no_leftover(tmp_path, monkeypatch):
    """Case J6: nothing closes itself into existence."""
    store = LocalStore(tmp_path)
    real = os.write

    def write(fd, data):
        if len(data) < 5000:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, data[:3000])

    monkeypatch.setattr(local.os, "write", write)
    with pytest.raises(StoreError, match="Input/output error"):
        store.create("packs/1", bytes(5000))
    monkeypatch.undo()

    assert files(tmp_path) == []
    store.create("packs/1", b"whole")


def test_a_stream_that_cannot_be_made_durable_leaves_no_file_and_holds_none_open(tmp_path, monkeypatch):
    stream = LocalStore(tmp_path).stream("a/big")
    stream.write(bytes(5000))
    held = len(list(Path("/proc/self/fd").iterdir()))

    def fsync(_fd):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(local.os, "fsync", fsync)
    with pytest.raises(StoreFull):
        stream.close()
    monkeypatch.undo()

    assert files(tmp_path) == []
    assert len(list(Path("/proc/self/fd").iterdir())) == held - 1


def test_leftovers_are_never_shown_and_their_names_are_no_keys(tmp_path):
    store = LocalStore(tmp_path)
    store.create("a/b", b"x")
    (tmp_path / "a" / f"{TEMPORARY_PREFIX}123").write_bytes(b"half")

    assert [info.key for info in store.scan("")] == ["a/b"]
    with pytest.raises(StoreError, match="not a key"):
        store.read(f"a/{TEMPORARY_PREFIX}123")
    assert store.sweep() == 1
    assert files(tmp_path) == ["a/b"]


def test_sweeping_never_disturbs_live_writers(tmp_path):
    """The rule of case K6, with many writers and a sweeper that does nothing else."""
    stores = [LocalStore(tmp_path) for _ in range(4)]
    done = threading.Event()

    def sweep():
        while not done.is_set():
            stores[0].sweep()

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: stores[n % 4].create(f"a/{n}", b"x" * n), range(200)))
    done.set()
    sweeper.join()

    assert {info.key: info.size_bytes for info in stores[0].scan("")} == {f"a/{n}": n for n in range(200)}
    assert len(files(tmp_path)) == 200


def test_empty_folders_go_with_their_last_object_while_others_create_there(tmp_path):
    store = LocalStore(tmp_path)

    def create_and_delete(number):
        for again in range(15):
            store.create(f"packs/1/{number}-{again}", b"x")
            store.delete([f"packs/1/{number}-{again}"])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(create_and_delete, range(4)))

    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_the_place_of_an_object_is_no_object(tmp_path):
    store = LocalStore(tmp_path)
    store.create("a/b", b"x")

    with pytest.raises(StoreError, match="folder of that name") as caught:
        store.create("a", b"x")

    assert not isinstance(caught.value, AlreadyExists)


def test_a_file_system_without_hard_links_is_refused(tmp_path, monkeypatch):
    def link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(local.os, "link", link)

    with pytest.raises(UnsafeStore, match="hard links"):
        LocalStore(tmp_path).create("a", b"x")

    assert files(tmp_path) == []


# --- folders that cannot be made, and what is taken away without end -------------------------------

WRITES = {
    "create": lambda store: store.create("a/b", b"x"),
    "overwrite": lambda store: store.overwrite("a/b", b"x"),
    "stream": lambda store: store.stream("a/b"),
}
timeout = pytest.mark.timeout(30)


@timeout
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("at", ["runs", "runs/one", "runs/one/a"])
def test_a_link_to_a_disk_that_is_not_there_is_named_at_once(tmp_path, at, write):
    link = tmp_path / at
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tmp_path / "unmounted")

    with pytest.raises(BucketNotFound, match=rf"{link} .*{tmp_path / 'unmounted'}.*is its disk mounted"):
        WRITES[write](LocalStore(tmp_path / "runs" / "one"))

    (tmp_path / "unmounted").mkdir()
    WRITES[write](LocalStore(tmp_path / "runs" / "one"))  # it is back


@timeout
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("root", ["/proc/ftckpt", "/proc/ftckpt/deep/run"])
def test_a_folder_where_the_system_makes_none_is_refused_at_once(root, write):
    with pytest.raises(StoreError, match=r"/proc/ftckpt .*cannot be made"):
        WRITES[write](LocalStore(root))


@timeout
@pytest.mark.parametrize(("write", "named_by"), [("create", "link"), ("overwrite", "replace")])
def test_a_file_that_is_taken_away_again_and_again_is_given_up_for_the_moment(
    tmp_path, monkeypatch, write, named_by
):
    def taken_away(source, target):
        raise FileNotFoundError(errno.ENOENT, "No such file", str(source))

    monkeypatch.setattr(local.os, named_by, taken_away)

    with pytest.raises(StoreUnavailable, match="taken away by others 100 times"):
        WRITES[write](LocalStore(tmp_path))

    assert files(tmp_path) == []
