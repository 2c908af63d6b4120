"""`make demo` as a test: the whole play, once, as a user starts it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ftckpt.chaos.killing import differences, shown, where_it_died
from tests.demo.conftest import environ


@pytest.mark.slow
@pytest.mark.timeout(900)  # about a minute alone on two cores; other tests may want them too
def test_the_demo_loses_a_group_then_everything_and_ends_in_the_same_bits(tmp_path):
    folder = tmp_path / "demo"

    done = subprocess.run(
        [sys.executable, "-m", "ftckpt.chaos.demo", "--keep", str(folder)],
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-4000:]
    for part in (
        "SIGKILL to g1",
        "the supervisor saw it killed by SIGKILL",
        "its life number 2",
        "full strength",
        "SIGKILL to every process of the job: supervisor",
        "all 4 processes were alive when the signal was sent",
        "$ ftckpt resume checkpoints",
        "attempt 2 goes on from step",
        "finished step 90, as planned",
        "all good",
        "equal bit for bit after 90 steps",
    ):
        assert part in done.stdout, done.stdout[-8000:]
    assert (folder / "disturbed" / "checkpoints").is_dir()


def test_the_demo_leaves_a_folder_alone_that_is_not_empty(tmp_path):
    (tmp_path / "mine").write_text("precious")

    done = subprocess.run(
        [sys.executable, "-m", "ftckpt.chaos.demo", "--keep", str(tmp_path)],
        env=environ(),
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 2
    assert "is not empty" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_differences_are_named_by_their_place():
    one = {"actor": "a", "counters": {"step": 3, "tokens": 9}, "rng": "r"}
    other = {"actor": "b", "counters": {"step": 3, "tokens": 8}}

    assert differences(one, one) == []
    assert differences(one, other) == ["actor", "counters.tokens", "rng"]


def test_a_death_is_told_by_what_the_group_last_said():
    assert where_it_died("begun", 7).startswith("in the middle of step 7")
    assert "the meeting for step 8" in where_it_died("voted", 7)
    assert where_it_died("starting", 0) == "before its first step"


def test_a_command_is_shown_as_a_person_types_it():
    argv = [sys.executable, "-m", "ftckpt.cli", "run", "r", "--", sys.executable, "-m", "x"]

    assert shown(argv) == "ftckpt run r -- \\\n    python -m x"
    assert shown([sys.executable, "-m", "ftckpt.cli", "ls", "r"]) == "ftckpt ls r"
