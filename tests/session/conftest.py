"""Deterministic kernels for every test of a session, and a run with two steps to damage."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.session.toy import run


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session")
def _two_steps(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("session") / "run"
    torch.use_deterministic_algorithms(True)
    run(folder, 20)
    torch.use_deterministic_algorithms(False)
    return folder


@pytest.fixture
def two_steps(_two_steps, tmp_path) -> Path:
    """A run of its own with commits of steps 0, 10 and 20."""
    return Path(shutil.copytree(_two_steps, tmp_path / "run"))
