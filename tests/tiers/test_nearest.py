"""Restoring from the nearest store that has good bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ftckpt
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.errors import ChunkCorrupt, ObjectDamaged
from ftckpt.restoring import restore_into
from ftckpt.store import open_store
from ftckpt.store.nearest import NearestStore
from tests.session.toy import Heard, Toy, run

Damage = Callable[[Path], None]


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    for at in range(0, len(body), 64):  # every chunk: what is not asked for is not read
        body[at] ^= 1
    path.write_bytes(bytes(body))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def stretch(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"more")


@pytest.fixture(scope="module")
def both(tmp_path_factory) -> tuple[Path, Path, Toy]:
    """A run whose step 5 is in a tier and in the far store, and the state it holds."""
    folder = tmp_path_factory.mktemp("nearest")
    far, tier = folder / "far", folder / "tier"
    toy = run(far, 5, tiers=[tier], save_every=5, deadline_s=20)
    return far, tier, toy


class Reading:
    """Restores step 5 from copies of both and says who was asked for what."""

    def __init__(self, both: tuple[Path, Path, Toy], folder: Path) -> None:
        far, tier, self.saved = both
        self.far = Path(shutil.copytree(far, folder / "far"))
        self.tier = Path(shutil.copytree(tier, folder / "tier"))
        self.heard = Heard()
        self.asked = FaultyStore(open_store(self.far))
        self.stores = NearestStore([open_store(self.tier), self.asked], self.heard)

    def restore(self) -> Toy:
        with ftckpt.open(str(self.far)) as found:
            commit = found.latest()
        toy = Toy(seed=9)
        restore_into(self.stores, commit, toy.state, subset=True)
        return toy

    def spoil(self, where: Path, prefix: str, damage: Damage) -> None:
        for path in sorted((where / prefix).rglob("*.*")):
            damage(path)

    @property
    def far_reads(self) -> list[str]:
        return [call.key for call in self.asked.log if call.op == "read"]


@pytest.fixture
def reading(both, tmp_path) -> Reading:
    return Reading(both, tmp_path)


def same(one: Toy, other: Toy) -> bool:
    return all(torch.equal(value, other.tensors()[name]) for name, value in one.tensors().items())


def test_what_the_tier_has_is_not_fetched_from_afar(reading):
    toy = reading.restore()

    assert same(toy, reading.saved)
    assert reading.far_reads == []
    assert reading.heard == []


def test_a_tier_that_is_gone_is_no_news(reading):
    reading.spoil(reading.tier, "", Path.unlink)

    assert same(reading.restore(), reading.saved)
    assert reading.heard == []


@pytest.mark.parametrize("damage", [flip, cut, stretch])
@pytest.mark.parametrize("prefix", ["packs", "fragments"])
def test_bad_bytes_of_the_tier_are_told_of_and_fetched_from_afar(reading, prefix, damage):
    reading.spoil(reading.tier, prefix, damage)

    toy = reading.restore()

    assert same(toy, reading.saved)
    if (prefix, damage) != ("packs", stretch):  # what a pack holds beyond its chunks concerns nobody
        told = reading.heard.named("read.passed_over")
        assert told and all(one["key"].startswith(prefix) for one in told)
        assert told[0]["store"] == f"file://{reading.tier}"
        assert any(key.startswith(prefix) for key in reading.far_reads)


def test_what_is_bad_everywhere_is_an_error(reading):
    for where in (reading.tier, reading.far):
        reading.spoil(where, "packs", flip)

    with pytest.raises(ChunkCorrupt):
        reading.restore()


def test_what_no_store_has_is_an_error_before_anything_is_touched(reading):
    for where in (reading.tier, reading.far):
        reading.spoil(where, "packs", Path.unlink)

    with pytest.raises(ObjectDamaged, match="is absent"):
        reading.restore()


def test_a_session_prefers_its_tier(both, tmp_path):
    reading = Reading(both, tmp_path)
    reading.spoil(reading.tier, "packs", flip)
    heard = Heard()

    toy = run(reading.far, 5, Toy(seed=3), tiers=[reading.tier], events=heard, start_agent=False)

    assert toy.bits() == reading.saved.bits()
    assert heard.named("read.passed_over")


def test_a_restore_without_a_session_does_too(both, tmp_path):
    reading = Reading(both, tmp_path)
    toy = Toy(seed=3)

    ftckpt.restore(reading.far, {"actor": toy.actor}, tiers=[reading.tier])

    assert all(
        torch.equal(a, b)
        for a, b in zip(toy.actor.parameters(), reading.saved.actor.parameters(), strict=True)
    )
