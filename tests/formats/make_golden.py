"""Makes the golden run of the format: ``python -m tests.formats.make_golden FOLDER``.

A golden run that was released is never made anew: FOLDER must not exist. Its files differ from those
of any other making in incarnations and nonces only.

    attempt 1   one rank; deltas: steps 0 to 4; step 5 is given up
    attempt 2   one rank, from step 4; zstd: steps 5 and 6, which nobody needs later
    attempt 3   two ranks, back to step 4; byte planes: steps 5 and 6; step 7 is given up
    collector   takes step 1, on which later deltas build
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ftckpt
from ftckpt.attempts import look
from ftckpt.begin import Caller, begin
from ftckpt.codec import Codec
from ftckpt.commit import abort
from ftckpt.elastic.launch import Launch
from ftckpt.events import silent
from ftckpt.gc import collect
from ftckpt.manifest import Position
from ftckpt.retention import Keep
from ftckpt.store import open_store
from tests.formats.describe import describe, sha256
from tests.formats.golden_state import Golden
from tests.support.procs import run_ranks

CHUNK_BYTES = 4096
DELTAS = Codec("delta", max_chain=4)


def claim(run: Path, number: int, *, ranks: int = 1, step: int | None = None) -> int:
    """Begin the next attempt, as a job on a machine of no name."""
    caller = Caller(("python", "train.py"), "/train", f"node{number}", 100 + number, 1, ranks)
    store = open_store(run)
    begun = begin(store, caller, name="golden", step=step, on_empty="start")
    store.close()
    return begun.claim.attempt


def train(
    run: Path, attempt: int, steps: range, golden: Golden, codec: Codec, world: int = 1
) -> dict[str, Any]:
    """Restore what the attempt begins from, then train and save; what each saved step holds."""
    launch = Launch(run=str(run), attempt=attempt, rank=golden.rank, world=world)
    options: dict[str, Any] = {"codec": codec, "chunk_bytes": CHUNK_BYTES, "keep": None, "events": silent}
    held = {}
    with ftckpt.Session(run, golden.state, launch=launch, stage="eager", **options) as session:
        if session.restored is None:
            held[f"0-{attempt}"] = golden.expected()
        for step in steps:
            golden.train(step)
            session.save(step).wait(60)
            held[f"{step}-{attempt}"] = golden.expected()
    return held


def two_ranks(run: Path) -> None:
    """Attempt 3, as one of its ranks; leaves what it expects beside the run."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    rank = dist.get_rank()
    golden = Golden(rank, lambda tensor, dim: distribute_tensor(tensor, mesh, [Shard(dim)]))
    held = train(run, 3, range(5, 7), golden, Codec("planes"), world=2)
    run.with_name(f"rank{rank}.json").write_text(json.dumps(held))
    dist.barrier()
    dist.destroy_process_group()


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """What all ranks together expect of each step; where two speak of one leaf, they agree."""
    steps: dict[str, Any] = {}
    for part in parts:
        for name, told in part.items():
            step = steps.setdefault(name, {"tensors": {}, "values": {}})
            for kind, leaves in told.items():
                for leaf, said in leaves.items():
                    assert step[kind].setdefault(leaf, said) == said, (name, leaf)
    return steps


def main(folder: Path) -> None:
    run = folder / "run"
    folder.mkdir(parents=True)  # never over one that is there
    golden = Golden()
    expected = train(run, claim(run, 1), range(1, 5), golden, DELTAS)
    store = open_store(run)
    abort(store, Position(5, 1), "golden: given up in time")
    expected |= train(run, claim(run, 2), range(5, 7), golden, Codec("zstd"))
    claim(run, 3, ranks=2, step=4)
    run_ranks("tests/formats/make_golden.py", 2, "rank", run, timeout_s=120).check()
    ranks = [folder / f"rank{rank}.json" for rank in range(2)]
    expected |= merged([json.loads(path.read_text()) for path in ranks])
    for path in ranks:
        path.unlink()
    collect(store, Keep(last=4, every=2), intent_id="golden")
    abort(store, Position(7, 3), "golden: given up")
    seen = look(store)
    store.close()
    files = sorted(path for path in run.rglob("*") if path.is_file())
    told = {
        "lineage": [[at.step, at.attempt] for at in seen.lineage],
        "readable": [[at.step, at.attempt] for at in sorted(seen.view.readable)],
        "aborted": [[at.step, at.attempt] for at in sorted(seen.view.aborted)],
        "collected": [[at.step, at.attempt] for at in sorted(seen.view.collected)],
        "files": {str(path.relative_to(run)): sha256(path.read_bytes()) for path in files},
        "plain": describe(golden.spell_out()),
        "steps": expected,
    }
    (folder / "expected.json").write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        assert os.environ["WORLD_SIZE"] == "2"
        two_ranks(Path(sys.argv[2]))
    else:
        main(Path(sys.argv[1]).absolute())
