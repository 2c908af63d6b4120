"""One example of every kind of record, and records as an attacker would seal them."""

from __future__ import annotations

import xxhash

from ftckpt.manifest import (
    SCALE,
    BoxRecord,
    ChunkRecord,
    Claim,
    Commit,
    ComponentSummary,
    Fragment,
    FragmentRef,
    Intent,
    LeafRange,
    LeafRecord,
    PackRef,
    Pin,
    Record,
    Ref,
    ReplicaDigest,
    RunRecord,
    Start,
    Tombstone,
    digest_of,
)

WRITER = "g0.0." + "ab" * 16
PARENT = Ref(8, 1, digest_of(b"parent"))
PACK = f"packs/000002/000000000012/{WRITER}-000000"
FRAGMENT = f"fragments/000002/000000000012/{WRITER}"


def chunk(start: int = 0, stop: int = 12, *, pack: int = 0, offset: int = 0, size: int = 48) -> ChunkRecord:
    raw = xxhash.xxh3_128_digest(f"{start}-{stop}".encode())
    return ChunkRecord(start, stop, raw, raw, 0, pack, offset, size)


def leaf(
    *chunks: ChunkRecord,
    name: str = "actor.weight",
    shape: tuple[int, ...] = (3, 4),
    kind: str = "tensor",
    dtype: str = "float32",
    offset: tuple[int, ...] = (0, 0),
    extent: tuple[int, ...] = (3, 4),
) -> LeafRecord:
    return LeafRecord(name, kind, dtype, shape, "", (BoxRecord(offset, extent, chunks),))  # type: ignore[arg-type]


def fragment(*leaves: LeafRecord, packs: tuple[PackRef, ...] = (PackRef(PACK, 48),)) -> Fragment:
    return Fragment(
        format=1,
        attempt=2,
        step=12,
        writer=WRITER,
        quorum=7,
        members="cd" * 16,
        parent=PARENT,
        packs=packs,
        leaves=leaves or (leaf(chunk()),),
        replicas=(ReplicaDigest("actor.weight", (0, 0), bytes(range(16))),),
        guarantee="E2",
        why=("sampling seeds are not derived",),
    )


def commit(*, key: str = FRAGMENT, size: int = 400) -> Commit:
    return Commit(
        format=1,
        attempt=2,
        step=12,
        parent=PARENT,
        state=digest_of(b"state"),
        fragments=(FragmentRef(key, size, digest_of(b"fragment"), (LeafRange("actor", "optim", 0, SCALE),)),),
        quorums=(7,),
        components={"actor": ComponentSummary(1, 48, 48, 0)},
        guarantee="E1",
    )


EVERY_KIND: dict[str, Record] = {
    "run.json": RunRecord(format=1, run="grpo-1"),
    "attempts/000002": Claim(
        attempt=2,
        nonce="n" * 32,
        host="node-é",
        pid=7,
        command=("python", "train.py", "--x=😀"),
        cwd="/work",
        groups=2,
        nproc=1,
        settings={"seed": "1"},
    ),
    "starts/000002": Start(
        attempt=2, nonce="n" * 32, parent=PARENT, log_end=11, groups=2, nproc=1, versions={"torch": "2"}
    ),
    FRAGMENT: fragment(),
    "commits/000000000012-000002": commit(),
    "collected/000000000012-000002": Tombstone(step=12, attempt=2, intent="gc1"),
    "pins/start-000002": Pin(
        pin="start-000002", step=8, attempt=1, kind="start", holder="attempt 2", by_attempt=2
    ),
    "gc/gc1": Intent(intent="gc1", victims=((1, 1), (2, 1))),
}


def seal(body: bytes) -> bytes:
    """A record whose digest is right whatever its body is."""
    return body + b"\nxxh3-128:" + digest_of(body).encode() + b"\n"
