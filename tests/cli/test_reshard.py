"""``ftckpt show --reshard``: what it foretells is what a reader then does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ftckpt.boxes import whole
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.events import silent
from ftckpt.plan.forecast import rows_of
from ftckpt.plan.restore import index_chunks, plan_restore
from ftckpt.reader import fetch, leaf_specs, read_fragments
from ftckpt.restoring import restore_into
from ftckpt.run import open_run
from ftckpt.session import Session
from tests.cli.conftest import Cli


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors of 10, 3 and no rows and a 0-dimensional one, many chunks each."""
    run = tmp_path_factory.mktemp("reshard") / "run"
    state = {
        "tall": torch.arange(4000.0).reshape(10, 400),
        "short": torch.arange(300.0).reshape(3, 100),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(3.0),
        "plain": {"cursor": 7},
    }
    with Session(run, state, save_every=1, events=silent, chunk_bytes=512) as ckpt:
        for _ in ckpt.steps(until=1):
            state["tall"].add_(torch.rand(10, 400))
    return run


@pytest.mark.parametrize("world", [1, 2, 4, 16])
def test_each_rank_then_reads_just_what_was_foretold(cli: Cli, wide: Path, world: int) -> None:
    told = cli("show", wide, "--reshard", f"world={world}", "--json").json

    assert (told["step"], told["world"], told["per_rank_of"]) == (1, world, ["g0.0"])
    with open_run(str(wide)) as run:
        commit = run.commit(1)
        specs = leaf_specs(read_fragments(run.store, commit)).values()
        leaves = [leaf for leaf in specs if not leaf.owner]  # generators are of the rank that saved them
        for rank, load in enumerate(told["ranks"]):
            values = [(leaf, whole(leaf.shape)) for leaf in leaves if leaf.kind == "value"]
            tensors = [(leaf, rows_of(leaf.shape, world, rank)) for leaf in leaves if leaf.kind == "tensor"]
            wants = [*values, *tensors]
            counted = FaultyStore(run.store)
            fragments = read_fragments(counted, commit, wants)
            asked = len(counted.log)
            apart = [plan_restore(part, index_chunks(fragments)) for part in (values, tensors)]
            for part in apart:
                fetch(counted, part, lambda _placement, _raw: None, commit.at)
            items = [item for part in apart for item in part]

            assert load["fragments"] == asked and load["requests"] == len(counted.log) - asked
            assert load["chunks"] == len(items) and load["rank"] == rank
            assert load["needed_bytes"] == sum(box.numel * leaf.itemsize_bytes for leaf, box in wants)
            assert load["fetched_bytes"] >= sum(item.stored_bytes for item in items)
    cut = sum(leaf.itemsize_bytes * whole(leaf.shape).numel for leaf in leaves if leaf.shape[1:])
    rest = sum(leaf.itemsize_bytes * whole(leaf.shape).numel for leaf in leaves if not leaf.shape[1:])
    assert sum(load["needed_bytes"] for load in told["ranks"]) == cut + world * rest


def test_a_restore_on_one_rank_asks_for_just_what_was_foretold(cli: Cli, wide: Path) -> None:
    load = cli("show", wide, "--reshard", "world=1", "--json").json["ranks"][0]
    state = {
        "tall": torch.zeros(10, 400),
        "short": torch.zeros(3, 100),
        "empty": torch.zeros(0, 7),
        "scalar": torch.tensor(0.0),
        "plain": {"cursor": 0},
    }
    with open_run(str(wide)) as run:
        counted = FaultyStore(run.store)
        done = restore_into(counted, run.commit(1), state, subset=True, internal="ftckpt")

    reads = [call.key.partition("/")[0] for call in counted.log if call.op == "read"]
    assert reads.count("packs") == load["requests"] and reads.count("fragments") == load["fragments"] == 1
    assert load["fetched_bytes"] >= done.fetched_bytes and state["plain"] == {"cursor": 7}


@pytest.mark.parametrize("rows, world", [(10, 4), (3, 2), (3, 8), (0, 3), (8, 8), (1, 1)])
def test_rows_are_cut_as_torch_cuts_them(rows: int, world: int) -> None:
    parts = [rows_of((rows, 5), world, rank) for rank in range(world)]

    cut = torch.chunk(torch.arange(rows), world) if rows else ()
    assert [part.extent[0] for part in parts if part.extent[0]] == [len(piece) for piece in cut]
    assert sum(part.extent[0] for part in parts) == rows
    assert rows_of((), world, 0) == whole(())


def test_people_see_a_line_a_rank_and_the_sum(cli: Cli, wide: Path) -> None:
    few, many = (cli("show", wide, "--reshard", f"world={n}") for n in (2, 40))

    assert few.code == many.code == 0
    assert few.out.splitlines()[0].endswith("cut over 2 ranks by rows")
    assert [line.split()[0] for line in few.out.splitlines()[2:4]] == ["0", "1"]
    assert "all ranks" in few.out and "× what they need" in few.out
    assert "… 8 more; --json has all" in many.out


@pytest.mark.parametrize(
    "text", ["8", "world=", "world=0", "world=-1", "world=9999999", "ranks=2", "world=²"]
)
def test_what_is_no_world_is_a_usage_error(cli: Cli, made: Path, text: str) -> None:
    assert cli("show", made, "--reshard", text).code == 2


def test_it_stands_alone(cli: Cli, made: Path) -> None:
    assert cli("show", made, "--reshard", "world=2", "--leaves").code == 2
