"""What every test runs under: a quiet environment, one hypothesis profile, an S3 server on request."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported; tests share two cores
for _name in [name for name in os.environ if name.startswith(("AWS_", "FTCKPT_", "TORCHFT_"))]:
    del os.environ[_name]  # tests pass what they mean, and never reach a real account
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
# xdist's workers must name their tests alike, also those whose parameters are sets. The ranks that
# tests start each get another seed (tests/support/procs.py): no plan may rest on the order of a set.
os.environ.setdefault("PYTHONHASHSEED", "0")

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.weed import Weed, start_weed

# No deadline per example: other processes share the cores. pytest-timeout limits each test.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


@pytest.fixture(scope="session")
def weed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Weed]:
    """A real S3 server; each xdist worker starts its own, when the first of its tests asks.

    Shared: use your own prefix (``weed.uri(...)``). A test that kills it restarts it.
    """
    with start_weed(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def s3(weed: Weed, monkeypatch: pytest.MonkeyPatch) -> Weed:
    """``weed`` with the AWS_* variables of this process pointing at it."""
    for name, value in weed.env.items():
        monkeypatch.setenv(name, value)
    return weed
