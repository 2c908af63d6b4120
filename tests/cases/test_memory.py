"""Kind D: extra memory is bounded by settings and comes back; bytes are proportional to what is owned."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import xxhash

import ftckpt
from ftckpt.boxes import Box
from ftckpt.chaos.faults.store import FaultyStore
from ftckpt.events import silent
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import (
    BoxRecord,
    ChunkRecord,
    Commit,
    Fragment,
    FragmentRef,
    LeafRecord,
    PackRef,
    Position,
    digest_of,
    encode,
    leaf_range,
)
from ftckpt.plan.restore import index_chunks, packs_of, plan_restore
from ftckpt.reader import check_packs, fetch, read_fragments
from ftckpt.store import open_store
from tests.protocol.world import writer
from tests.support.procs import run_ranks

pytestmark = pytest.mark.timeout(180)
SCRIPT = "tests/ranks/case_memory.py"
STATE_MIB, LARGE_MIB = 64, 192


def numbers(output: str) -> dict[str, float]:
    return {name: float(mib) for name, mib in re.findall(r"^(.+): (\d+)$", output, re.MULTILINE)}


@pytest.mark.parametrize("stage", ["lazy", "eager"])
def test_thirty_saves_take_no_more_memory_than_three(tmp_path, stage):
    """D1: within one size of the state, with a fence at every save."""
    done = run_ranks(SCRIPT, 1, "saves", tmp_path / "run", stage, timeout_s=150).check()

    seen = numbers(done.outputs[0])
    assert seen["after 30"] - seen["after 3"] < STATE_MIB, seen


def test_a_restore_needs_its_budget_and_not_the_state_again(tmp_path):
    """D3: nothing is gathered, broadcast or read as a whole."""
    done = run_ranks(SCRIPT, 1, "restore", tmp_path / "run", timeout_s=150).check()

    assert numbers(done.outputs[0])["beside"] < 0.75 * LARGE_MIB, done.outputs[0]


def test_a_save_with_time_to_stream_needs_packs_and_not_the_state_again(tmp_path):
    """D: packs in flight, and nothing staged."""
    done = run_ranks(SCRIPT, 1, "saving", tmp_path / "run", timeout_s=150).check()

    assert numbers(done.outputs[0])["beside"] < 384, done.outputs[0]


# --- D4 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["lazy", "eager"])
def test_a_small_view_does_not_drag_its_whole_storage_along(tmp_path, stage):
    """D4: ten views of a KiB of a base of 64 MiB; also columns, and a parameter that is a view."""
    base = torch.randn(16 << 20)
    table = base.view(4096, 4096)
    state = {
        "views": {f"v{number}": base[number * 1000 : number * 1000 + 256] for number in range(10)},
        "column": {"c": table[:, 7]},
        "model": torch.nn.ParameterDict({"p": torch.nn.Parameter(base[:256])}),
    }
    with ftckpt.Session(tmp_path / "run", state, events=silent, codec="raw", stage=stage):
        pass

    stored = sum(path.stat().st_size for path in (tmp_path / "run").rglob("packs/*/*/*"))
    assert stored < 10 * 1024 + 16 * 1024 + 1024 + 16 * 1024


def test_restoring_into_a_small_view_leaves_the_rest_of_its_storage_alone(tmp_path):
    """D4, the other way."""
    base = torch.arange(10_000.0)
    with ftckpt.Session(tmp_path / "run", {"v": {"v": base[100:200].clone()}}, events=silent):
        pass
    live = torch.zeros(10_000)
    ftckpt.restore(tmp_path / "run", {"v": {"v": live[100:200]}})

    assert torch.equal(live[100:200], base[100:200])
    assert not live[:100].any() and not live[200:].any()


# --- D6 ------------------------------------------------------------------------------------------

SHARDS, TENSORS, ROW = 16, 40, 256


def sixteen() -> list[Fragment]:
    """What each of sixteen ranks wrote: a row of every tensor, all bytes zero, in one pack."""
    raw = xxhash.xxh3_128_digest(bytes(4 * ROW))
    fragments = []
    for shard in range(SHARDS):
        pack = PackRef(f"packs/000001/000000000001/{writer(shard)}-000000", TENSORS * 4 * ROW, b"d" * 16)
        leaves = tuple(
            LeafRecord(
                f"m.{number:03d}",
                "tensor",
                "float32",
                (SHARDS, ROW),
                "",
                (
                    BoxRecord(
                        (shard, 0),
                        (1, ROW),
                        (ChunkRecord(0, ROW, raw, raw, 0, 0, number * 4 * ROW, 4 * ROW),),
                    ),
                ),
            )
            for number in range(TENSORS)
        )
        fragments.append(
            Fragment(
                format=1,
                attempt=1,
                step=1,
                writer=str(writer(shard)),
                quorum=1,
                members="m",
                parent=None,
                packs=(pack,),
                leaves=leaves,
            )
        )
    return fragments


def test_a_rank_reads_what_it_wants_and_not_what_others_wrote():
    """D6: sixteen writers, each with a shard of forty tensors; one rank that wants the fifth shard reads the fragments that can hold it, one
    range of one pack, and a constant more."""
    store = open_store("memory://sixteen")
    refs = []
    for number, fragment in enumerate(sixteen()):
        body = encode(fragment)
        key = f"fragments/000001/000000000001/{writer(number)}"
        store.create(key, body)
        store.create(fragment.packs[0].key, bytes(fragment.packs[0].size))
        refs.append(FragmentRef(key, len(body), digest_of(body), leaf_range(fragment.leaves)))
    counted = FaultyStore(store)
    commit = Commit(format=1, attempt=1, step=1, fragments=tuple(refs))
    wants = [
        (LeafSpec(f"m.{number:03d}", "tensor", "float32", (SHARDS, ROW)), Box((5, 0), (1, ROW)))
        for number in range(TENSORS)
    ]

    fragments = read_fragments(counted, commit, wants)
    fetches = plan_restore(wants, index_chunks(fragments))
    check_packs(counted, packs_of(fetches), Position(1, 1))
    placed: Counter = Counter()
    fetch(counted, fetches, lambda placement, raw: placed.update([placement.want]), Position(1, 1))

    reads = [call for call in counted.log if call.op == "read"]
    assert len(placed) == TENSORS
    assert sum(call.key.startswith("packs/") for call in reads) == 1
    assert sum(call.key.startswith("fragments/") for call in reads) <= 2
    assert sum(item.stored_bytes for item in fetches) == TENSORS * ROW * 4
