"""A simulation whose actors are all gone when its test ends, however it ends."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stores import Sim


@pytest.fixture
def sim() -> Iterator[Sim]:
    sim = Sim()
    yield sim
    sim.end()
