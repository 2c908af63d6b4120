"""Kind G of the cases: saved in one layout, restored in another, through real sessions of real processes.

One gang plays every job and compares with what torch itself put together (``full_tensor``); see
``tests/ranks/reshard_jobs.py``. The tests ask it what held.
"""

from __future__ import annotations

import fcntl
import json

import pytest

from tests.support.procs import run_ranks

pytestmark = pytest.mark.timeout(300)

WORLDS = (1, 2, 3, 4)
FSDP = [f"fsdp{n}" for n in WORLDS]
OTHERS = ["plain1", "ddp3", "tp2", "hsdp4", "dp_tp4", "fsdp_tp4"]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory, worker_id) -> list[str]:
    """What each rank printed. One gang runs for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    told = shared / "reshard-outputs.json"
    with (shared / "reshard-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            folder = tmp_path_factory.mktemp("jobs")
            gang = run_ranks("tests/ranks/reshard_jobs.py", 4, folder, timeout_s=240).check()
            told.write_text(json.dumps(gang.outputs))
    return json.loads(told.read_text())


@pytest.fixture(scope="module")
def held(outputs) -> set[str]:
    return {line.removeprefix("ok ") for line in outputs[0].splitlines() if line.startswith("ok ")}


@pytest.mark.parametrize("to", OTHERS + FSDP)
@pytest.mark.parametrize("saved", OTHERS + FSDP)
def test_every_layout_restores_what_any_other_saved_bit_for_bit(held, saved, to):
    """F7, G7: a plain process, DDP, FSDP2, HSDP, tensor parallelism alone, beside plain replicas and under
    FSDP2. Uneven shapes, AdamW moments, two groups, a parameter without state, a schedule, a buffer."""
    assert f"{saved} to {to}" in held


@pytest.mark.parametrize("kind", OTHERS + FSDP)
def test_on_the_same_ranks_the_next_step_is_that_of_the_job_that_went_on(held, kind):
    assert f"next step of {kind}" in held


@pytest.mark.parametrize("saved", OTHERS + FSDP)
def test_with_the_same_gradient_the_next_step_is_the_same_in_any_layout(held, saved):
    """F7, G7"""
    for to in OTHERS + FSDP:
        assert saved == to or f"next step after {saved} to {to}" in held


@pytest.mark.parametrize("world", WORLDS)
def test_one_restore_without_a_session_takes_the_same_step_on_all_ranks_of_a_sharded_state(outputs, world):
    for rank in range(world):
        assert f"ok once on {world}" in outputs[rank]


@pytest.mark.parametrize("world", WORLDS)
def test_shards_of_a_two_dimensional_mesh_some_of_them_empty_are_put_in_order(held, world):
    """G1"""
    assert f"G1 uneven to {world}" in held


def test_local_parts_of_sizes_that_the_placement_does_not_mean_are_refused_on_every_rank(outputs):
    """G2: the sizes are named, and nothing was written."""
    for rank in (0, 1):
        assert "ok G2 pieces (1, 4)" in outputs[rank]
        assert "ok G2 pieces (4, 1)" in outputs[rank]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("rows", [16, 6])
def test_tensor_parallel_and_fsdp2_at_once_keep_the_order_of_rows(held, rows, when):
    """G3"""
    assert f"G3 rows {rows} {when} a step" in held


@pytest.mark.parametrize("world", WORLDS)
def test_parameters_filled_with_their_index_keep_it_on_any_number_of_ranks(held, world):
    """G4"""
    assert f"G4 4 to {world}" in held


def test_per_rank_state_goes_back_to_its_ranks_and_to_no_others(outputs, held):
    """G5, G6: another world size is refused before anything changes, unless the caller said what to do."""
    assert {"own", "own refused on 1", "own refused on 3"} <= held
    assert "ok own" in outputs[1]


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("saved", [2, 4])
def test_samples_left_to_n_ranks_are_dealt_out_to_m_with_none_lost_and_none_twice(held, saved, world):
    """G6: by the loader's own ``reshard`` when asked; refused, or left alone and told, otherwise."""
    assert f"G6 {saved} to {world}" in held


@pytest.mark.parametrize("case", ["list", "number", "bit", "shape", "name", "mark", "component"])
def test_what_differs_between_ranks_and_is_not_declared_so_is_refused_at_save_by_name(outputs, case):
    """G5, G8: told on both ranks, with what to do."""
    assert f"ok undeclared {case}" in outputs[0] and f"ok undeclared {case}" in outputs[1]


def test_what_differs_between_ranks_and_is_declared_so_comes_back_to_each(outputs):
    """G5"""
    assert "ok declared" in outputs[0] and "ok declared" in outputs[1]


@pytest.mark.parametrize("kind", ["hsdp", "fsdp_tp", "tp"])
def test_replicas_of_a_part_that_differ_in_one_bit_never_commit(outputs, kind):
    """G8: of a shard, and of what tensor parallelism leaves whole; told on every rank."""
    assert all(f"ok G8 {kind}" in output for output in outputs)


@pytest.mark.parametrize("world", [1, 2])
def test_tensors_of_no_dimension_come_back_as_such_from_two_ranks(held, world):
    """E6: four dtypes, plain and on a mesh."""
    assert f"E6 2 to {world}" in held


@pytest.mark.parametrize("case", ["names", "shapes", "values", "replicas"])
def test_ranks_along_another_dimension_of_the_mesh_are_replicas_or_are_refused(outputs, case):
    """FSDP2 over one dimension, with a pipeline along the other: refused as the session is entered, with ranks and
    names, before anything is written; equal names with other values, at the first save. Replicas are saved."""
    assert all(f"ok staged {case}" in output for output in outputs)


def test_a_module_that_one_rank_has_more_of_is_refused_at_the_start_by_rank_and_name(outputs):
    assert "ok unlike" in outputs[0] and "ok unlike" in outputs[1]
