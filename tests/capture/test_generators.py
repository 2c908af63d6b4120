"""Random number generators go on where they were, or are reseeded to something derived."""

from __future__ import annotations

import random

import numpy as np
import torch

from ftckpt.capture import reseed
from tests.capture.memory import restore, save


def draws() -> tuple:
    return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()  # noqa: NPY002


def test_the_next_draws_after_a_restore_are_those_of_the_straight_run():
    reseed(1, 0, 0)
    draws()
    random.gauss(0, 1)  # leaves half a pair behind, in Python and in NumPy
    np.random.randn()  # noqa: NPY002
    saved = save({})
    expected = draws()
    draws()

    aim = restore(saved, {})

    assert draws() == expected
    assert aim.notes == ()


def test_saving_draws_nothing():
    reseed(1, 0, 0)
    expected = draws()
    reseed(1, 0, 0)

    save({})

    assert draws() == expected


def test_each_rank_has_its_own_generators():
    saved = []
    expected = []
    for rank in range(2):
        reseed(3, 7, rank)
        saved += save({}, rank=rank, world=2)
        expected.append(draws())

    got = []
    for rank in range(2):
        restore(saved, {}, rank=rank, world=2)
        got.append(draws())

    assert got == expected and got[0] != got[1]


def test_on_another_topology_generators_are_left_alone_and_it_is_said():
    saved = [piece for rank in range(2) for piece in save({}, rank=rank, world=2)]
    reseed(4, 4, 4)

    aim = restore(saved, {})

    after = draws()
    reseed(4, 4, 4)
    assert after == draws()
    assert any("rng" in note and "not restored" in note for note in aim.notes)


def test_a_seed_gives_the_same_draws_again_and_another_rank_other_ones():
    seen = {}
    for triple in [(1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 3), (12, 3, 4), (1, 23, 4)]:
        reseed(*triple)
        seen[triple] = draws()
    reseed(1, 2, 3)

    assert draws() == seen[1, 2, 3]
    assert len(set(map(str, seen.values()))) == len(seen)
