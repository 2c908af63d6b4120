"""Two steps side by side: digests first, bytes only for what differs, bits decide."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.compare import Comparison, compare, max_abs
from ftckpt.errors import ChunkCorrupt
from ftckpt.events import silent
from ftckpt.run import open_run
from ftckpt.session import Session


def save(uri: Path, *states: dict[str, Any], **settings: Any) -> None:
    """A run whose step n holds the n-th state; every one has the same names."""
    first = dict(states[0])
    with Session(uri, first, keep=None, events=silent, **settings) as ckpt:
        for step, state in enumerate(states[1:], 1):  # step 0 is saved on entering
            first.update(state)
            ckpt.save(step).wait(30)


@pytest.fixture
def steps(tmp_path: Path) -> Callable[..., Comparison]:
    """Saves the states as steps of one run and compares the first with the last."""

    def of(*states: dict[str, Any], **settings: Any) -> Comparison:
        save(tmp_path / "run", *states, **settings)
        with open_run(str(tmp_path / "run")) as run:
            return compare((run.store, run.commit(0)), (run.store, run.commit(len(states) - 1)))

    return of


def by_name(found: Comparison) -> dict[str, Any]:
    return {leaf.name: leaf for leaf in found.leaves if not leaf.name.startswith(("ftckpt", "rng"))}


def part(found: Comparison, name: str) -> Any:
    return next(one for one in found.components if one.name == name)


def test_a_step_equals_itself_and_nothing_is_read(tmp_path):
    save(tmp_path / "run", {"w": torch.arange(8.0), "n": {"k": 1}})
    with open_run(str(tmp_path / "run")) as run:
        side = (run.store, run.commit(0))

        found = compare(side, side)

    assert found.equal
    assert found.leaves == () and found.read_bytes == 0
    assert {one.name for one in found.components} >= {"w", "n", "rng", "ftckpt"}


def test_only_chunks_whose_digests_differ_are_read(steps):
    before = torch.arange(4096.0)
    after = before.clone()
    after[3000] += 0.25

    y = before.clone()

    found = steps({"w": {"x": before, "y": y}}, {"w": {"x": after, "y": y}}, chunk_bytes=1024)

    leaf = by_name(found)["w.x"]
    assert set(by_name(found)) == {"w.x"}
    assert (leaf.verdict, leaf.changed_elems, leaf.max_abs) == ("changed", 1, 0.25)
    assert (part(found, "w").equal, part(found, "w").changed) == (2, 1)
    assert 0 < found.read_bytes < 4096  # a chunk of each side, and values; the leaf has 16384 bytes


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.float8_e4m3fn]
)
def test_the_largest_difference_is_that_of_the_numbers(steps, dtype):
    before = torch.tensor([0.0, 1.0, -2.0, 3.0]).to(dtype)
    after = torch.tensor([0.0, 1.0, 2.0, 2.0]).to(dtype)

    leaf = by_name(steps({"w": before}, {"w": after}))["w.value"]

    assert (leaf.changed_elems, leaf.max_abs) == (2, 4.0)


def test_what_was_saved_in_other_chunks_is_compared_element_by_element(tmp_path):
    weights = torch.randn(64, 33)
    other = weights.clone()
    other[17, 5] = 100.0
    save(tmp_path / "a", {"w": weights}, chunk_bytes=1000)
    save(tmp_path / "b", {"w": other}, chunk_bytes=777)
    save(tmp_path / "c", {"w": weights}, chunk_bytes=777)

    with open_run(str(tmp_path / "a")) as a, open_run(str(tmp_path / "b")) as b:
        changed = compare((a.store, a.latest()), (b.store, b.latest()), batch_bytes=2000)
    with open_run(str(tmp_path / "a")) as a, open_run(str(tmp_path / "c")) as c:
        equal = compare((a.store, a.latest()), (c.store, c.latest()), batch_bytes=1)

    leaf = by_name(changed)["w.value"]
    assert leaf.changed_elems == 1
    assert leaf.max_abs == pytest.approx(100.0 - float(weights[17, 5]))
    assert part(equal, "w").changed == 0


def test_plain_values_are_compared_one_by_one(steps):
    before = {"n": {"cursor": 7, "lr": 0.5, "name": "x", "same": [1, 2], "gone": 1}}
    after = {"n": {"cursor": 9, "lr": 0.25, "name": "y", "same": [1, 2], "new": None}}

    leaf = by_name(steps(before, after))["n"]

    assert {(c.path, c.a, c.b) for c in leaf.values} == {
        ("n.cursor", "7", "9"),
        ("n.lr", "0.5", "0.25"),
        ("n.name", "'x'", "'y'"),
        ("n.gone", "1", "absent"),
        ("n.new", "absent", "None"),
    }
    assert leaf.max_abs == 2.0


def test_a_value_that_changed_its_type_only_has_changed(steps):
    leaf = by_name(steps({"n": {"a": 1, "b": (1,)}}, {"n": {"a": True, "b": [1]}}))["n"]

    assert [(c.path, c.a, c.b) for c in leaf.values] == [("n.a", "1", "True"), ("n.b", "(1,)", "[1]")]


def test_missing_and_reshaped_leaves_are_told_apart(steps):
    before = {"m": {"a": torch.zeros(3), "b": torch.zeros(3), "c": torch.zeros(3)}}
    after = {"m": {"a": torch.zeros(4), "b": torch.zeros(3).half(), "d": torch.zeros(3)}}

    found = by_name(steps(before, after))

    assert {name: leaf.verdict for name, leaf in found.items() if name != "m"} == {
        "m.a": "reshaped",
        "m.b": "reshaped",
        "m.c": "only_a",
        "m.d": "only_b",
    }


def test_nan_on_one_side_is_not_a_number_apart(steps):
    before = torch.tensor([1.0, math.nan, math.inf])
    after = torch.tensor([math.nan, math.nan, math.inf])

    leaf = by_name(steps({"w": before}, {"w": after}))["w.value"]

    assert leaf.changed_elems == 1 and math.isnan(leaf.max_abs)


def test_bytes_that_cannot_be_proven_are_an_error_and_not_a_difference(tmp_path):
    save(tmp_path / "run", {"w": torch.zeros(512)}, {"w": torch.ones(512)}, codec="raw")
    for pack in (tmp_path / "run" / "packs").rglob("*-*"):
        body = bytearray(pack.read_bytes())
        body[3] ^= 1
        pack.chmod(0o644)
        pack.write_bytes(body)

    with open_run(str(tmp_path / "run")) as run, pytest.raises(ChunkCorrupt):
        compare((run.store, run.commit(0)), (run.store, run.commit(1)))


@given(st.sampled_from(["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]), st.data())
def test_distances_of_integers_are_exact(dtype, data):
    info = np.iinfo(dtype)
    numbers = st.lists(st.integers(int(info.min), int(info.max)), min_size=3, max_size=3)
    left, right = data.draw(numbers), data.draw(numbers)

    found = max_abs(*(np.array(side, dtype).view(np.uint8) for side in (left, right)), dtype)

    assert found == float(max(abs(a - b) for a, b in zip(left, right, strict=True)))


@pytest.mark.parametrize(
    "dtype", ["complex32", "complex64", "complex128", "float8_e5m2", "float8_e8m0fnu", "bool"]
)
def test_every_dtype_with_numbers_has_distances(dtype):
    kind = getattr(torch, dtype)
    ones = torch.ones(2) if dtype != "complex32" else torch.ones(4, dtype=torch.float16)
    twos = ones * 2 if dtype != "bool" else ones * 0
    raw = [
        (one.view(torch.uint8) if dtype == "complex32" else one.to(kind).view(torch.uint8)).numpy()
        for one in (ones, twos)
    ]

    assert max_abs(raw[0], raw[1], dtype) == pytest.approx(2**0.5 if dtype == "complex32" else 1.0)


def test_a_dtype_without_numbers_has_no_distance():
    assert max_abs(np.zeros(2, np.uint8), np.ones(2, np.uint8), "float4_e2m1fn_x2") is None
