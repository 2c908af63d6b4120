"""Whether all ranks of a session hold the modules of one state: looked at as it is entered.

Knows names, dtypes and shapes; refuses to know meshes. Stages of a pipeline, or experts that only some ranks
have, are no shards of a state that all of them hold, and no step with them would ever commit.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import xxhash

from ftckpt.errors import StateMismatch
from ftckpt.leaf import LeafSpec
from ftckpt.ranks import Ranks

_SHOWN = 6


def digest(modules: Mapping[str, LeafSpec]) -> bytes:
    """Equal on ranks that hold the same modules, each rank's own parts left out."""
    return xxhash.xxh3_128_digest("\n".join(_lines(modules)).encode())


def require_alike(ranks: Ranks, digests: Sequence[bytes], modules: Mapping[str, LeafSpec]) -> None:
    """Go on if all ranks hold the same modules; ``digests`` are those of all, in order. Collective only where
    they differ, on all ranks alike.

    Raises:
        StateMismatch: on every rank. Facts: ``ranks``, those that hold the same together; ``names``, for each of
            these what only some hold.
    """
    kinds = list(dict.fromkeys(digests))
    if len(kinds) == 1:
        return
    speakers = [digests.index(kind) for kind in kinds]
    lines = "\n".join(_lines(modules)) if ranks.rank in speakers else ""
    told = ranks.gather(zlib.compress(lines.encode()))
    held = [zlib.decompress(told[speaker]).decode().split("\n") for speaker in speakers]
    common = set(held[0]).intersection(*held[1:])
    alone = tuple(tuple(line for line in one if line and line not in common) for one in held)
    members = tuple(tuple(rank for rank, one in enumerate(digests) if one == kind) for kind in kinds)
    raise StateMismatch(
        "StateMismatch: the ranks of this job do not hold the same modules, so no step of theirs would be one state\n"
        + "".join(
            f"  {_some('ranks', mine)}: {_some('', names) if names else 'nothing that the others lack'}\n"
            for mine, names in zip(members, alone, strict=True)
        )
        + "  nothing was restored or saved\n"
        "  every rank must hold each tensor, whole or as a shard of it: stages of a pipeline and experts that only "
        "some ranks have cannot be saved in one session. Along the other dimensions of a mesh, as pp beside "
        'mesh["dp"], ranks must be replicas. A plain module that is each rank\'s own may be PerRank(module)',
        ranks=members,
        names=alone,
    )


def _lines(modules: Mapping[str, LeafSpec]) -> list[str]:
    return [
        f"{name} {leaf.dtype}{list(leaf.shape)}" for name, leaf in sorted(modules.items()) if not leaf.owner
    ]


def _some(what: str, items: Sequence[object]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return f"{what} {', '.join(map(str, items[:_SHOWN]))}{more}".lstrip()
