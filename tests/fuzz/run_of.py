"""A small real run in memory, changed so that every digest on the way to the change is right again.

The digests of format 1 find damage and no malice: whoever may write into the store can seal anything.
So the last line of defence is what is checked of records that are sealed well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

import ftckpt
from ftckpt.attempts import look
from ftckpt.errors import RestoreIncomplete
from ftckpt.events import silent
from ftckpt.manifest import Commit, Fragment, PackRef, decode, digest_of, encode
from ftckpt.restoring import restore_into
from ftckpt.run import Run
from ftckpt.session import Session
from ftckpt.values import pack, unpack
from tests.core.records import seal
from tests.fuzz import mutate
from tests.support.stores import Sim

Objects = dict[str, bytes]
STEP = 1
CHUNK_BYTES = 4096
"""The smallest chunk of which a base is kept."""


class Live:
    """The live state that a restore overwrites."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.actor = torch.nn.Linear(4, 3)
        self.optim = torch.optim.AdamW(self.actor.parameters())
        self.loads = 0
        self.state: dict[str, object] = {
            "actor": self.actor,
            "optim": self.optim,
            "cursor": self,
            "buffer": {
                "rewards": torch.randn(3 * CHUNK_BYTES // 4),
                "marks": np.zeros(3),
                "log": [1, ("a", 2)],
                "n": None,
            },
        }

    def state_dict(self) -> dict[str, object]:
        return {"loads": self.loads, "where": {"epoch": 1, "ids": [1, 2, 3]}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loads = state["loads"] + 1

    def train(self) -> None:
        self.actor(torch.ones(2, 4)).sum().backward()
        self.optim.step()
        self.optim.zero_grad()
        buffer = self.state["buffer"]
        assert isinstance(buffer, dict)
        first, _, last = buffer["rewards"].chunk(3)
        first[::100] += 1  # most of it stays, so that a delta is smallest
        last.normal_()

    def bits(self) -> dict[str, str]:
        """Everything, so that equal means untouched. A string for each component."""
        tensors = {f"actor.{n}": p.detach().numpy().tobytes().hex() for n, p in self.actor.named_parameters()}
        optim = {
            f"optim.{n}.{key}": value.numpy().tobytes().hex()
            for n, p in self.actor.named_parameters()
            for key, value in self.optim.state.get(p, {}).items()
        }
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.optim.param_groups]
        buffer = self.state["buffer"]
        assert isinstance(buffer, dict)
        plain = {
            "buffer": repr([(k, np.asarray(v).tolist() if k != "log" else v) for k, v in buffer.items()])
        }
        return {**tensors, **optim, **plain, "optim.groups": repr(groups), "cursor": repr(self.loads)}


@contextmanager
def memory_of(objects: Objects) -> Iterator[Sim]:
    sim = Sim()
    sim.objects = objects
    yield sim


def make_run(seed: int = 0) -> Objects:
    """Steps 0 and 1 of one attempt. Of the three chunks of ``buffer.rewards`` the newest step has one as a delta,
    one as it was, and one anew.
    """
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as name:
        live = Live(seed)
        folder = Path(name) / "run"
        options: dict[str, Any] = {
            "save_every": 1,
            "keep": None,
            "codec": "delta",
            "chunk_bytes": CHUNK_BYTES,
        }
        with Session(folder, live.state, events=silent, **options) as ckpt:
            for _ in ckpt.steps(until=STEP):
                live.train()
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# --- crafting -------------------------------------------------------------------------------------


def newest(objects: Objects) -> tuple[str, Commit]:
    key = max(key for key in objects if key.startswith("commits/"))
    return key, decode(Commit, objects[key], key)


def with_fragment(objects: Objects, craft: Callable[[Fragment, Objects], bytes]) -> Objects:
    """The newest step with its first fragment replaced by the record that ``craft`` gives, and a commit that
    names it. ``craft`` may add packs.
    """
    made = dict(objects)
    at, commit = newest(objects)
    ref = commit.fragments[0]
    made[ref.key] = body = craft(decode(Fragment, objects[ref.key], ref.key), made)
    ref = msgspec.structs.replace(ref, size=len(body), digest=digest_of(body))
    made[at] = encode(msgspec.structs.replace(commit, fragments=(ref, *commit.fragments[1:])))
    return made


def with_value(objects: Objects, component: str, body: bytes) -> Objects:
    """The newest step with other packed bytes as the plain values of a component, in a pack of their own."""

    def craft(fragment: Fragment, made: Objects) -> bytes:
        key = fragment.packs[0].key[:-6] + "000099"
        made[key] = body or b"\0"
        raw = xxhash.xxh3_128_digest(body)
        packs = (*fragment.packs, PackRef(key, len(made[key]), xxhash.xxh3_128_digest(made[key])))
        leaves = []
        for held in fragment.leaves:
            leaf = held
            if leaf.name == component and leaf.kind == "value":
                box = leaf.boxes[0]
                chunk = msgspec.structs.replace(
                    box.chunks[0],
                    start=0,
                    stop=len(body),
                    raw=raw,
                    stored=raw,
                    codec=0,
                    pack=len(packs) - 1,
                    offset=0,
                    size=len(body),
                    base=None,
                )
                box = msgspec.structs.replace(
                    box, offset=(0,), extent=(len(body),), chunks=(chunk,) if body else ()
                )
                leaf = msgspec.structs.replace(leaf, shape=(len(body),), boxes=(box,))
            leaves.append(leaf)
        return encode(msgspec.structs.replace(fragment, packs=packs, leaves=tuple(leaves)))

    return with_fragment(objects, craft)


def crafted(objects: Objects, draw: Random) -> Objects:
    """Anything that somebody may do who can write into the store."""
    made = dict(objects)
    keys = sorted(made)
    match draw.randrange(8):
        case 0:  # damage, without right digests
            key = draw.choice(keys)
            made[key] = mutate.bytes_of([made[key]], draw)
        case 1:
            del made[draw.choice(keys)]
        case 2:  # two objects change places
            one, other = draw.sample(keys, 2)
            made[one], made[other] = made[other], made[one]
        case 3:  # any small record, sealed again
            key = draw.choice([key for key in keys if not key.startswith(("packs", "fragments"))])
            fields = mutate.plain(msgspec.json.decode(made[key][:-43]), draw)
            made[key] = seal(_json(fields))
        case 4 | 5:

            def craft(fragment: Fragment, _: Objects) -> bytes:
                fields = msgspec.msgpack.decode(encode(fragment)[:-43])
                return seal(_msgpack(mutate.plain(fields, draw)))

            made = with_fragment(objects, craft)
        case _:
            _, commit = newest(objects)
            component = draw.choice(sorted(commit.components))
            packed = packed_values(objects)[component]
            body = mutate.bytes_of([packed], draw) if draw.random() < 0.3 else _repacked(packed, draw)
            made = with_value(objects, component, body)
    return made


def packed_values(objects: Objects) -> dict[str, bytes]:
    from ftckpt.reader import read_fragments, read_values

    with memory_of(objects) as sim:
        _, commit = newest(objects)
        found = read_values(sim.store, read_fragments(sim.store, commit), commit.at)
    return {name.partition("@")[0]: body for name, body in found.items()}


def _repacked(packed: bytes, draw: Random) -> bytes:
    tree = mutate.plain(unpack(packed), draw)
    try:
        return pack(tree, leaf="crafted")
    except (ValueError, TypeError, OverflowError):
        return mutate.bytes_of([packed], draw)


def _json(fields: Any) -> bytes:
    try:
        return msgspec.json.encode(fields)
    except (TypeError, ValueError):
        return b"{}"


def _msgpack(fields: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(fields)
    except (TypeError, ValueError, OverflowError):
        return b"\x80"


# --- what a reader makes of it --------------------------------------------------------------------


def read_everything(objects: Objects, touch: Callable[[Callable[[], object]], bool]) -> bool:
    """Every way of the public API to read this run; ``touch`` says whether a call was refused by name. Whether
    nothing was refused.
    """
    with memory_of(objects) as sim:
        opened: list[Run] = []
        whole = touch(lambda: opened.append(Run(sim.store)))
        if not opened:
            return False
        run = opened[0]
        calls: list[Callable[[], object]] = [
            run.entries,
            run.attempts,
            run.commits,
            run.leaves,
            run.inventory,
            run.verify,
            lambda: run.verify(STEP),
            lambda: look(sim.store),
            *(lambda name=name: run.value(name) for name in ("actor", "optim", "buffer", "cursor")),
            *(lambda name=name: run.tensor(name) for name in ("actor.weight", "buffer.rewards")),
        ]
        for call in calls:
            whole = touch(call) and whole
        return restores(sim, touch) and whole


def restores(sim: Sim, touch: Callable[[Callable[[], object]], bool]) -> bool:
    """A restore into a live state: all of it, or nothing changed but what the error names."""
    live = Live()
    before = live.bits()
    errors: list[BaseException] = []

    def act() -> None:
        try:
            restore_into(sim.store, Run(sim.store).latest(), live.state, subset=True)
        except ftckpt.FtckptError as error:
            errors.append(error)
            raise

    if touch(act):
        return True
    if not errors:
        return False
    if isinstance(errors[0], RestoreIncomplete):
        assert errors[0].facts["components"], errors[0]
    else:
        assert live.bits() == before, f"a restore that was refused changed something: {errors[0]}"
    return False
