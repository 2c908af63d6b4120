"""Everything that decodes bytes which somebody else may have written, as functions of bytes.

A target answers ``True`` (the bytes meant something, and that something says the same again) or ``False``
(refused by name). It raises for anything else: that is a violation.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import typer

from ftckpt import codec, layout
from ftckpt.agent.notes import read_plans, with_parent
from ftckpt.boxes import whole
from ftckpt.cli.common import locate, parse_options, split_step, to_json
from ftckpt.cli.reshard import parse_world
from ftckpt.commit import diverging, state_digest, summarize, uncovered
from ftckpt.elastic.heal import fetch, publish
from ftckpt.errors import CorruptError, FtckptError, SettingsError, StoreError
from ftckpt.inventory import take_inventory
from ftckpt.manifest import (
    Commit,
    Fragment,
    Position,
    Record,
    Saving,
    StagedSpan,
    Staging,
    decode,
    encode,
    fraction,
    leaf_range,
    may_hold,
)
from ftckpt.plan.restore import coalesce, index_chunks, packs_of, plan_restore
from ftckpt.reader import leaf_specs
from ftckpt.store import open_store
from ftckpt.store.keys import check_key
from ftckpt.values import pack, unpack
from tests.core.records import EVERY_KIND, FRAGMENT, PARENT, WRITER, chunk, fragment, leaf, seal
from tests.fuzz import chunks, foreign, mutate, run_of
from tests.fuzz.target import Target, refused
from tests.support.stores import Sim

# --- records --------------------------------------------------------------------------------------

AT = Position(12, 2)
SAVING = Saving(
    format=1,
    attempt=2,
    step=12,
    writer=WRITER,
    quorum=7,
    members="cd" * 16,
    writers=(WRITER,),
    parent=PARENT,
    keep_last=3,
)
DELTA = msgspec.structs.replace(
    chunk(0, 12, size=20), codec=codec.DELTA, base=chunk(0, 12, pack=0, offset=0, size=48)
)
FRAGMENTS = (
    fragment(),
    fragment(
        leaf(DELTA),
        leaf(chunk(0, 8, size=8), kind="value", dtype="uint8", shape=(8,), offset=(0,), extent=(8,)),
    ),
    fragment(leaf(chunk(0, 6, size=24), chunk(6, 12, offset=24, size=24))),
)
STAGING = Staging(
    format=1, partial=fragment(), spans=(StagedSpan(0, 0, 12, 0, bytes(16)),), writers=(WRITER,)
)


def follow_fragment(made: Fragment) -> None:
    """What every reader does with a fragment that decoded."""
    at = Position(made.step, made.attempt)
    specs = leaf_specs([made])
    index = index_chunks([made])
    ranges = leaf_range(made.leaves)
    for spec in specs.values():
        box = whole(spec.shape)
        may_hold(ranges, spec.name, *fraction(box, spec.shape))
        if not refused(lambda spec=spec, box=box: plan_restore([(spec, box)], index)):
            fetches = plan_restore([(spec, box)], index)
            packs_of(fetches)
            coalesce(fetches, 1 << 16, 16 << 20)
    take_inventory(at, [made])
    summarize(at, [made])
    state_digest([made])
    diverging([made, made])
    uncovered([made])


def follow(record: Record) -> None:
    to_json(record)
    if isinstance(record, Fragment):
        refused(lambda: follow_fragment(record))
    elif isinstance(record, Commit):
        for ref in record.fragments:
            may_hold(ref.ranges, "actor.weight")


def record_target(key: str, seeds: Sequence[Record]) -> Target:
    kind: Any = type(seeds[0])
    coder: Any = msgspec.msgpack if kind in (Fragment, Staging) else msgspec.json
    bodies = [encode(seed)[:-43] for seed in seeds]

    def check(data: bytes) -> bool:
        assert refused(lambda: decode(kind, data, key)) or seal(data[:-43]) == data
        try:
            record = decode(kind, seal(data), key)
        except FtckptError:
            return False
        assert decode(kind, encode(record), key) == record
        follow(record)
        return True

    def craft(draw: Random) -> bytes:
        if draw.random() < 0.3:
            return mutate.bytes_of(bodies, draw)
        fields = mutate.plain(coder.decode(draw.choice(bodies)), draw)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            made: bytes = coder.encode(fields)
            return made
        return mutate.bytes_of(bodies, draw)

    return Target(f"record {kind.__name__}", check, bodies, craft)


def records() -> list[Target]:
    seeds: dict[str, list[Record]] = {key: [record] for key, record in EVERY_KIND.items()}
    seeds[FRAGMENT] = list(FRAGMENTS)
    seeds[f"saves/{WRITER}"] = [SAVING]
    seeds[f"staged/{WRITER}"] = [STAGING]
    return [record_target(key, kinds) for key, kinds in seeds.items()]


# --- values ---------------------------------------------------------------------------------------


def values() -> Target:
    import collections

    import numpy as np
    import torch

    tree: dict[Any, Any] = {
        "a": [1, -5, 1 << 70, 2.5, None, True, "é", b"\x00"],
        3: ((1, 2), {4, 5}, frozenset("x"), collections.deque([1], 4), 1 + 2j, range(3), slice(1, None, 2)),
        "np": [
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.float32(1.5),
            np.dtype("<M8[ns]"),
            np.str_("é"),
        ],
        "torch": [torch.float32, torch.Size((2, 3)), torch.device("cpu"), torch.device("cuda", 1)],
        "c": collections.Counter("hello"),
        "o": collections.OrderedDict(x=1),
    }
    seeds = [pack(part, leaf="seed") for part in (tree, *tree.values(), 1, "x", np.zeros(3))]

    def check(data: bytes) -> bool:
        try:
            value = unpack(data)
        except CorruptError:
            return False
        again = pack(value, leaf="again")
        assert pack(unpack(again), leaf="again") == again
        return True

    def craft(draw: Random) -> bytes:
        if draw.random() < 0.5:
            return mutate.bytes_of(seeds, draw)
        with contextlib.suppress(FtckptError, TypeError, ValueError, OverflowError, RecursionError):
            return pack(mutate.plain(tree, draw), leaf="crafted")
        return mutate.bytes_of(seeds, draw)

    return Target("values", check, seeds, craft)


# --- names and addresses --------------------------------------------------------------------------


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def keys() -> Target:
    spelled = [key.encode() for key in EVERY_KIND] + [f"packs/000002/000000000012/{WRITER}-000000".encode()]

    def check(data: bytes) -> bool:
        key = _text(data)
        number, commit = layout.parse_number(key), layout.parse_commit(key)
        position, writer = layout.parse_position(key), layout.parse_writer(key)
        if number is not None:
            assert key in (layout.claim_key(number), layout.start_key(number))
        if commit is not None:
            assert key in (layout.commit_key(commit), layout.tombstone_key(commit))
        if position is not None:
            assert key.split("/", 3)[1:3] == [f"{position.attempt:06d}", f"{position.step:012d}"]
        if writer is not None:
            assert key.endswith(str(writer))
        layout.is_name(key)
        refused(lambda: check_key(key, op="read", uri="x://"))
        return (number or commit or position or writer) is not None

    return Target("keys", check, spelled, lambda draw: mutate.bytes_of(spelled, draw))


def arguments() -> Target:
    """RUN@STEP, KEY=VALUE, world=N."""
    seeds = [b"s3://b/run@400", b"/data/run@latest", b"run", b"a=b", b"world=8", b"@12", b"@" + b"9" * 5000]

    def check(data: bytes) -> bool:
        text = _text(data)
        address, step = split_step(text)
        assert step is None or f"{address}@" == text[: len(address) + 1]
        with contextlib.suppress(typer.BadParameter):
            parse_options([text])
        with contextlib.suppress(typer.BadParameter):
            assert parse_world(text) >= 1
        refused(lambda: locate(text))
        return step is not None

    return Target("RUN@STEP and options", check, seeds, lambda draw: mutate.bytes_of(seeds, draw))


def addresses() -> Target:
    seeds = [
        b"s3://bucket/runs/a",
        b"gs://bucket/a",
        b"az://c/a",
        b"fsspec+file:///tmp/x",
        b"file:///data/run%20x",
        b"/data/run",
        b"s3://[::1]/x",
        b"s3://user:pass@bucket/x",
        b"nothing://x/y",
        b"s3://b/../x?y#z",
    ]

    def check(data: bytes) -> bool:
        uri = _text(data)
        scheme = uri.partition("://")[0].lower()
        if scheme.removeprefix("fsspec+") not in _KNOWN and "://" in uri:
            uri = f"unknown+{uri}"  # whatever fsspec knows may ask the network when it is opened
        try:
            store = open_store(uri, environ={})
        except (SettingsError, StoreError):
            return False
        store.close()
        return True

    return Target("addresses", check, seeds, lambda draw: mutate.bytes_of(seeds, draw), most=2000)


_KNOWN = ("s3", "gs", "az", "file")


# --- between processes ----------------------------------------------------------------------------


class Peer:
    """Answers every request with the same bytes, whatever they are, and hangs up."""

    def __init__(self) -> None:
        self.answer = b""
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._socket.getsockname()[1]}/token"
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                there, _ = self._socket.accept()
            except OSError:
                return
            with there, contextlib.suppress(OSError):
                there.recv(1 << 16)
                there.sendall(self.answer)
                there.shutdown(socket.SHUT_WR)
                while there.recv(1 << 16):
                    pass

    def close(self) -> None:
        """From then on nobody answers."""
        self._socket.close()


def healed() -> tuple[bytes, bytes]:
    """Header and bytes of a state that a peer gives."""
    import torch

    state = {"w": torch.arange(6.0).reshape(2, 3), "b": b"plain", "e": torch.empty(0, 3)}
    made = publish(5, {"step": 5}, state)
    return made.head, b"".join(bytes(part) for part in made.bodies)


def framed_answer(head: bytes, bodies: bytes, size: int | None = None) -> bytes:
    body = len(head).to_bytes(8, "little") + head + bodies
    lines = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body) if size is None else size}\r\n\r\n"
    return lines.encode() + body


def framed_heal(
    craft: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    *,
    head: bytes | None = None,
    length: int | None = None,
) -> object:
    """Heal from a peer whose first leaf is announced otherwise, or whose header is other bytes."""
    made, bodies = healed()
    header = msgspec.msgpack.decode(made)
    header["leaves"] = [craft(header["leaves"][0]), *header["leaves"][1:]]
    peer = Peer()
    peer.answer = framed_answer(msgspec.msgpack.encode(header) if head is None else head, bodies, length)
    try:
        return fetch(peer.address, 5, "1", 5.0)
    finally:
        peer.close()


def heals() -> Target:
    peer = Peer()
    made, bodies = healed()
    header = msgspec.msgpack.decode(made)

    def framed(head: bytes, size: int | None = None) -> bytes:
        return framed_answer(head, bodies, size)

    seeds = [framed(made), framed(made, 1 << 50), b"HTTP/1.1 409 no such state here\r\n\r\n"]

    def check(data: bytes) -> bool:
        peer.answer = data
        return not refused(lambda: fetch(peer.address, 5, "1", 2.0))

    def craft(draw: Random) -> bytes:
        if draw.random() < 0.4:
            return mutate.bytes_of(seeds, draw)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            head = msgspec.msgpack.encode(mutate.plain(header, draw))
            return framed(head, draw.choice((None, None, 1 << 50)))
        return mutate.bytes_of(seeds, draw)

    return Target("heal of a peer", check, seeds, craft)


def notes() -> Target:
    """Notes of a tier, as an agent reads them. One byte says which kind."""
    kinds: list[tuple[str, Any, Record]] = [
        (layout.SAVES, msgspec.json, SAVING),
        (layout.STAGED, msgspec.msgpack, STAGING),
    ]
    seeds = [bytes([n]) + encode(record)[:-43] for n, (_, _, record) in enumerate(kinds)]

    def check(data: bytes) -> bool:
        sim = Sim()
        folder = kinds[data[0] % 2 if data else 0][0]
        sim.objects[f"{folder}/{AT.attempt:06d}/{AT.step:012d}/{WRITER}"] = seal(data[1:])
        try:
            plans = read_plans(sim.store, AT)
        except FtckptError:
            return False
        for plan in plans:
            refused(lambda plan=plan: with_parent(plan, sim.store))
        return True

    def craft(draw: Random) -> bytes:
        number = draw.randrange(2)
        _, coder, record = kinds[number]
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            return bytes([number]) + coder.encode(mutate.plain(coder.decode(encode(record)[:-43]), draw))
        return mutate.bytes_of(seeds, draw)

    return Target("notes of a tier", check, seeds, craft)


# --- whole runs -----------------------------------------------------------------------------------


def runs() -> Target:
    """The input seeds what is done to a run; every digest on the way is made right again."""
    objects = run_of.make_run()

    def touch(call: Callable[[], object]) -> bool:
        return not refused(call)

    def check(data: bytes) -> bool:
        return run_of.read_everything(run_of.crafted(objects, Random(data)), touch)

    seeds = [bytes([n]) for n in range(8)]
    return Target("runs, read and restored", check, seeds, lambda draw: draw.randbytes(8), most=64)


def every_target() -> dict[str, Callable[[], Target]]:
    """By name; made when asked for."""
    made: dict[str, Callable[[], Target]] = {
        target.name: (lambda target=target: target) for target in records()
    }
    return {
        **made,
        "values": values,
        "codec frames": chunks.frames,
        "chains of deltas": chunks.chains,
        "keys": keys,
        "RUN@STEP and options": arguments,
        "addresses": addresses,
        "heal of a peer": heals,
        "notes of a tier": notes,
        "what a step holds for DCP": foreign.contents,
        "headers of safetensors": foreign.safetensors,
        "metadata of DCP": foreign.torch_metadata,
        "runs, read and restored": runs,
    }
