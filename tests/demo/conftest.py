"""One undisturbed run for all tests of this folder, whichever worker of pytest asks first."""

from __future__ import annotations

import fcntl
import os

import pytest

from ftckpt.chaos.killing import Job, Training, read_digest

TRAINING = Training(
    steps=60,
    save_every=4,
    more=("--prompts-per-step=32", "--samples-per-prompt=16", "--warmup-sft-steps=5"),
)
"""Steps large enough for a killed group to come back before the end."""


def environ() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """The digest that one group reaches when nothing is killed."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder = shared / "undisturbed"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "digest.g0.json").exists():
            job = Job(folder, ("g0",), environ())
            try:
                job.start("run", "checkpoints", "--json", "--", *TRAINING.command())
                job.finish(600.0)
            finally:
                job.close()
    return read_digest(folder / "digest.g0.json")
