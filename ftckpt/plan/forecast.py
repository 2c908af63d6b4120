"""What a restore onto other ranks would read, rank by rank, before anybody starts one.

Every tensor is cut along its first dimension as FSDP2 does: equal rows, the last ranks fewer or none.
Plain values and 0-dimensional tensors are whole on every rank. Computed from what a commit says of its
fragments, and from them; no chunk is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from ftckpt.boxes import Box, whole
from ftckpt.leaf import LeafSpec
from ftckpt.manifest import Commit
from ftckpt.plan.listing import is_listed, relevant
from ftckpt.plan.restore import Fetch, Run, Saved, plan_restore


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank reads: ``needed_bytes`` are raw bytes of its state; ``fetched_bytes`` what its
    ``requests`` to packs bring, decoded ``chunks`` of them; before that, so many fragments. Values are read
    before tensors, since they say which tensors there are: by requests of their own.
    """

    rank: int
    needed_bytes: int
    fetched_bytes: int
    requests: int
    chunks: int
    fragments: int
    fragment_bytes: int


def rows_of(shape: tuple[int, ...], world: int, rank: int) -> Box:
    """The rows that FSDP2 gives to a rank."""
    if not shape:
        return whole(shape)
    rows = -(-shape[0] // world)
    low, high = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
    return Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))


def forecast(
    commit: Commit,
    leaves: Collection[LeafSpec],
    index: Mapping[str, Sequence[Saved]],
    world: int,
    join: Callable[[Sequence[Fetch]], Sequence[Run]],
) -> list[RankLoad]:
    """The load of every rank of ``world``; ``join`` makes requests of what is to be fetched, as the reader does.

    ``leaves`` of single ranks (``PerRank``) are left out: who takes them over is the trainer's choice.

    Raises:
        RecordCorrupt: the chunks do not hold every element once.
    """
    common = [leaf for leaf in leaves if not leaf.owner]
    values = [(leaf, whole(leaf.shape)) for leaf in common if leaf.kind == "value"]
    tensors = [leaf for leaf in common if leaf.kind == "tensor"]
    of_values = plan_restore(values, index)
    loads = []
    for rank in range(world):
        parts = [(leaf, rows_of(leaf.shape, world, rank)) for leaf in tensors]
        of_tensors = plan_restore(parts, index)
        runs = [*join(of_values), *join(of_tensors)]
        near = relevant(commit, [*values, *parts]) if is_listed(commit) else commit.fragments
        loads.append(
            RankLoad(
                rank=rank,
                needed_bytes=sum(box.numel * leaf.itemsize_bytes for leaf, box in (*values, *parts)),
                fetched_bytes=sum(run.read_bytes for run in runs),
                requests=sum(len(run.spans) for run in runs),
                chunks=len(of_values) + len(of_tensors),
                fragments=len(near),
                fragment_bytes=sum(ref.size for ref in near),
            )
        )
    return loads
