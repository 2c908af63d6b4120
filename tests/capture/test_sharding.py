"""Sharded state: every rank says the right box alone, and any number of ranks restores any other's."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.capture.sharding import shard_runs, strided_runs
from tests.capture.memory import Saved, load, restore, same_bits, save, specs, trees, whole_tensors
from tests.support.procs import run_ranks

SIZES = st.integers(0, 30)
PARTS = st.integers(1, 5)


def rows(runs) -> list[int]:
    return [row for start, stop in runs for row in range(start, stop)]


@given(SIZES, PARTS)
def test_rows_are_dealt_out_as_torch_chunk_does(size, parts):
    dealt = [rows(shard_runs([(0, size)], parts, index)) for index in range(parts)]

    assert list(chain(*dealt)) == list(range(size))
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(parts)] if size else []
    assert dealt == chunks + [[]] * (parts - len(chunks))


@given(SIZES, PARTS, PARTS)
def test_strided_rows_go_to_each_part_from_each_cut(size, split, parts):
    dealt = [rows(strided_runs([(0, size)], split, parts, index)) for index in range(parts)]

    cuts = torch.arange(size).chunk(split) if size else []
    for index in range(parts):
        pieces = [cut.chunk(parts) for cut in cuts]
        assert dealt[index] == [row for p in pieces if index < len(p) for row in p[index].tolist()]
    assert sorted(chain(*dealt)) == list(range(size))


def test_rows_that_touch_are_one_run():
    assert strided_runs([(0, 8)], 2, 1, 0) == [(0, 8)]
    assert strided_runs([(0, 8)], 2, 2, 0) == [(0, 2), (4, 6)]
    assert shard_runs([(0, 2), (4, 6)], 2, 1) == [(4, 6)]


@pytest.fixture(scope="module")
def gang(tmp_path_factory):
    """What four real ranks saved and printed."""
    folder = tmp_path_factory.mktemp("ranks")
    result = run_ranks("tests/ranks/capture_cases.py", 4, folder, timeout_s=110).check()
    return folder, result.outputs


def pieces(folder: Path, ranks: int) -> Saved:
    return load([folder / str(rank) for rank in range(ranks)])


def full(folder: Path) -> dict[str, torch.Tensor]:
    live: dict = {"full": None}
    restore(load([folder / "full"]), live, rng=False)
    return live["full"]


def judge(folder: Path, ranks: int) -> Saved:
    """The pieces tile every tensor once, hold what ``full_tensor()`` says, and name all their holders."""
    saved = pieces(folder, ranks)
    found, expected = whole_tensors(saved), full(folder)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert same_bits(tensor, expected[name]), name
    for piece in saved:
        if piece.box.numel:
            holders = [p for p in saved if p.leaf == piece.leaf and p.box == piece.box]
            assert piece.ranks == tuple(sorted({rank for p in holders for rank in p.ranks})), piece.leaf
            assert len(holders) == len(piece.ranks), piece.leaf
            assert {p.raw for p in holders} == {piece.raw}, piece.leaf
    return saved


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", range(5))
def test_two_way_sharding_of_uneven_tensors_gives_boxes_that_tile_them(gang, number):
    """G1"""
    judge(gang[0] / f"boxes{number}", 4)


@pytest.mark.timeout(120)
def test_what_is_not_what_its_placements_say_is_refused_by_name(gang):
    """G2"""
    printed = gang[1]

    assert all("uneven: t.w: cannot save t.w: this rank's part is" in out for out in printed[:2])
    assert "(1, 3)" in printed[0] and "(4, 3)" in printed[1]
    assert all(
        "mesh: t.w: cannot save t.w: it is a DTensor on a mesh of 2 ranks" in out for out in printed[:2]
    )
    for out in printed:
        assert "partial: t.w: cannot save t.w" in out
        assert "other rank: t.w: cannot save t.w" in out
        assert "local state: o.state.m.weight.local: cannot save o.state.m.weight.local" in out
        assert "not refused" not in out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rows", [16, 6])
def test_tensor_parallel_and_fsdp_together_keep_their_rows_in_order(gang, rows, when):
    """G3"""
    saved = pieces(gang[0] / f"tp{rows}{when}", 4)

    found, expected = whole_tensors(saved), full(gang[0] / f"tp{rows}{when}")

    assert all(same_bits(found[name], tensor) for name, tensor in expected.items())
    if when == "before":
        assert torch.equal(found["actor.0.weight"].flatten(), torch.arange(rows * 4.0))
    else:
        assert found["optim.state.actor.1.weight.exp_avg"].shape == (4, rows)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_sharded_model_and_its_optimizer_are_saved_whole(gang, ranks):
    saved = judge(gang[0] / f"fsdp{ranks}", ranks)

    assert specs(saved).keys() == specs(pieces(gang[0] / "fsdp1", 1)).keys()
    values = {piece.raw for piece in saved if piece.leaf.name == "actor"}
    assert len(values) == 1
    lazy = {piece.leaf.name for piece in saved if piece.lazy}
    assert lazy == specs(saved).keys() - {"actor.seen"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("to", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_any_number_of_ranks_restores_what_any_other_saved(gang, ranks, to):
    """G4, G7"""
    before = whole_tensors(pieces(gang[0] / f"fsdp{ranks}", ranks))

    after = whole_tensors(judge(gang[0] / f"fsdp{ranks}to{to}", to))

    assert before.keys() == after.keys()
    assert all(same_bits(before[name], after[name]) for name in before)


@pytest.mark.timeout(120)
def test_what_ranks_saved_loads_into_a_plain_model_here(gang):
    from tests.ranks.capture_cases import Model

    saved = pieces(gang[0] / "fsdp3", 3)
    model = Model()
    optim = torch.optim.AdamW(model.parameters())

    restore(saved, {"actor": model, "optim": optim}, rng=False)

    found = whole_tensors(saved)
    assert all(same_bits(p, found[f"actor.{name}"]) for name, p in model.named_parameters())
    assert model.head.weight is model.embed.weight
    assert optim.param_groups[0]["lr"] == 0.1
    assert trees(save({"actor": model, "optim": optim}, rng=False)).keys() == {"actor", "optim"}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("case", ["hsdp", "ddp"])
def test_replicas_are_named_as_holders_of_the_same_part(gang, case):
    saved = judge(gang[0] / case, 4)

    holders = {piece.ranks for piece in saved if piece.leaf.name == "actor.embed.weight"}
    assert holders == ({(0, 2), (1, 3)} if case == "hsdp" else {(0, 1, 2, 3)})
