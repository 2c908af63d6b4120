"""What only real processes can show: races between them, SIGKILL in a create, forks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ftckpt.store import LocalStore, open_store
from ftckpt.store.local import TEMPORARY_PREFIX
from tests.support.procs import ROOT, run_ranks, spawn, wait_until


@pytest.mark.parametrize("kind, races", [("local", 60), ("s3", 10)])
def test_of_two_processes_exactly_one_creates_each_key(kind, races, request, tmp_path):
    if kind == "s3":
        weed = request.getfixturevalue("weed")
        uri, env = weed.uri(f"race-{os.urandom(4).hex()}"), weed.env
    else:
        uri, env = str(tmp_path / "run"), {}

    result = run_ranks("tests/store/racer.py", 2, uri, races, env=env).check()

    won = [line.split()[1] for output in result.outputs for line in output.splitlines() if "won" in line]
    assert sorted(won) == sorted(f"commits/{number}" for number in range(races))
    store = open_store(uri, environ=env)
    for rank, output in enumerate(result.outputs):
        for line in output.splitlines():
            assert bytes(store.read(line.split()[1])) == f"{rank}".encode() * 5000


SLOW_WRITER = """
import os, sys
from ftckpt.store import local
real = os.write
def slow(fd, data):
    done = real(fd, data[:1000])
    print("writing", flush=True)
    sys.stdin.readline()  # never comes: killed here, in the middle of a body
    return done
local.os.write = slow
local.LocalStore(sys.argv[1]).create("packs/1", bytes(5000))
"""


def test_a_writer_killed_in_mid_body_leaves_nothing_that_can_be_read(tmp_path):
    """The object is absent, and the next process removes the leftover (cases J6, K6)."""
    root = tmp_path / "run"
    writer = subprocess.Popen(
        [sys.executable, "-c", SLOW_WRITER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert writer.stdin is not None and writer.stdout is not None
    try:
        assert writer.stdout.readline() == b"writing\n"
        store = LocalStore(root)
        (leftover,) = [path for path in root.rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]

        assert list(store.scan("")) == []
        assert store.sweep() == 0, "its writer lives"
        assert leftover.exists()
    finally:
        writer.kill()
        writer.wait()
        writer.stdin.close()
        writer.stdout.close()

    assert list(store.scan("")) == []
    store.create("packs/1", b"whole")

    assert not leftover.exists()
    assert bytes(store.read("packs/1")) == b"whole"


FORKER = """
import os, sys
from ftckpt.errors import StoreError
from ftckpt.store import open_store
uri = sys.argv[1]
old = open_store(uri)
list(old.scan(""))
child = os.fork()
if child == 0:
    for store in (old, open_store(uri)):
        try:
            store.create("a", b"x")
        except StoreError as error:
            print("refused:", error.retryable, "spawn" in str(error), flush=True)
    os._exit(0)
os.waitpid(child, 0)
old.create("a", b"parent")
print("parent goes on", flush=True)
"""


def test_a_forked_child_is_refused_and_does_not_hang(weed, tmp_path):
    """Case J5."""
    log = tmp_path / "log"
    process = spawn([sys.executable, "-c", FORKER, weed.uri(f"fork-{os.urandom(4).hex()}")], log, weed.env)

    wait_until(lambda: process.poll() is not None, 30, log.read_text)

    assert log.read_text().splitlines() == ["refused: False True"] * 2 + ["parent goes on"]
