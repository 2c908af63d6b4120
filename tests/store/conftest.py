"""Every kind of store as a ``Place``: somewhere that can be opened several times."""

from __future__ import annotations

import itertools
import os
import subprocess
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.clock import SystemClock
from ftckpt.events import silent
from ftckpt.store import LimitStore, LocalStore, ObjectStore, RetryStore, fsspec, open_store
from ftckpt.store.fsspec import FsspecStore
from ftckpt.store.objectstore import memory
from ftckpt.store.settings import HttpSettings, s3_settings
from tests.store.scripted import ScriptedServer


@dataclass(frozen=True)
class Place:
    """``open`` gives another instance on the same objects, as another process would have."""

    open: Callable[[], ObjectStore]
    exclusive: bool = True
    races: int = 20
    """``weed`` lets a loser of a crowded race wait for a second now and then, so fewer there."""


def _retrying(inner: ObjectStore) -> ObjectStore:
    return RetryStore(inner, deadline_s=5, clock=SystemClock(), events=silent)


@pytest.fixture(scope="session")
def s3fs_clients(weed) -> Iterator[Any]:
    """Two file systems of s3fs, handed out in turn: making one costs half a second of CPU."""
    made = [fsspec.s3fs_store(weed.bucket, "", s3_settings({}, weed.env), HttpSettings()) for _ in range(2)]
    return itertools.cycle([store._fs for store in made])


EXCLUSIVE = ["local", "memory", "s3", "s3fs", "retry", "limit", "faulty"]


@pytest.fixture(params=[*EXCLUSIVE, "fsspec"])
def place(request, tmp_path) -> Place:
    return _place(request, tmp_path)


@pytest.fixture(params=EXCLUSIVE)
def exclusive_place(request, tmp_path) -> Place:
    """Those that allow several writers."""
    return _place(request, tmp_path)


def _place(request, tmp_path) -> Place:
    name = f"{request.param}-{uuid.uuid4().hex}"
    match request.param:
        case "local":
            return Place(lambda: LocalStore(tmp_path / "runs" / "r1"))
        case "memory":
            return Place(lambda: open_store(f"memory://{name}"))
        case "s3":
            weed = request.getfixturevalue("weed")
            return Place(lambda: open_store(weed.uri(f"{name}/r1"), environ=weed.env), races=3)
        case "s3fs":
            weed = request.getfixturevalue("weed")
            clients = request.getfixturevalue("s3fs_clients")
            root = f"{weed.bucket}/{name}/r1"
            return Place(
                lambda: FsspecStore(next(clients), root, f"fsspec+s3://{root}", conditional=True), races=3
            )
        case "fsspec":
            uri = f"fsspec+file://{tmp_path}/runs/r1"
            return Place(lambda: open_store(uri, allow_unconditional=True), exclusive=False)
        case "retry":
            return Place(lambda: _retrying(memory(name)))
        case "limit":
            return Place(lambda: LimitStore(memory(name), max_calls=4))
        case _:
            return Place(lambda: FaultyStore(memory(name)))


@pytest.fixture
def store(place) -> Iterator[ObjectStore]:
    opened = place.open()
    yield opened
    opened.close()


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Answers S3 requests with whatever a test tells it to."""
    with ScriptedServer() as scripted:
        yield scripted


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of its own with one MiB of room; read-only after ``remount``."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mounted)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"mounting is not permitted here: {os.fsdecode(done.stderr).strip()}")
    yield mounted
    subprocess.run(["umount", str(mounted)], check=True)
