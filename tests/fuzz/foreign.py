"""What other libraries read and write: a step as DCP sees it, headers of safetensors, DCP's own metadata."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
import warnings
from pathlib import Path
from random import Random
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp

from ftckpt.errors import FtckptError
from ftckpt.interop.dcp.forms import in_dcp_form
from ftckpt.interop.dcp.names import contents_of, metadata_of, packed
from ftckpt.interop.headers import header, read_header, unsaid
from ftckpt.interop.torch_metadata import read_metadata
from ftckpt.leaf import LeafSpec
from ftckpt.store.files import Files
from ftckpt.values import TensorRef, pack, unpack
from tests.fuzz import mutate
from tests.fuzz.target import Target, refused
from tests.support.stores import Sim

SPECS = {
    "m.w": LeafSpec("m.w", "tensor", "float32", (5,)),
    "m": LeafSpec("m", "value", "uint8", (9,)),
}
BY_DCP: dict[str, Any] = {
    "m": {"kind": "tree", "tree": {"w": TensorRef("m.w"), "n": 7, "list": [{"lr": 0.1}, {"lr": 0.2}]}},
    "s": {"kind": "tree", "tree": TensorRef("s.value")},
    "ftckpt": {
        "kind": "dcp",
        "tree": {
            "dcp": {
                "planner": {
                    "m.w": ("m", "w"),
                    "m.n": ("m", "n"),
                    "m.list.1.lr": ("m", "list", 1, "lr"),
                    "s": ("s",),
                },
                "tensors": {"m.w": ("float32", (5,))},
                "bytes": {"s": ("stream", 3, 1)},
                "values": ["m.n", "m.list.1.lr"],
            }
        },
    },
}
BY_SESSION: dict[str, Any] = {
    "m": {"kind": "module", "tree": {"w": TensorRef("m.w"), "v.u": 3}},
    "b": {"kind": "tree", "tree": {"n": [1, {"x": 2}], "t": (TensorRef("m.w"), 1), 7: "seven"}},
    "ftckpt": {"kind": "session", "tree": {"saved": 1}},
}


def contents() -> Target:
    """Packed value leaves of a step, by name. What is understood can be said again, and then says the same."""

    def check(data: bytes) -> bool:
        try:
            trees = unpack(data)
            if type(trees) is not dict or any(type(name) is not str for name in trees):
                return False
            found = contents_of(trees, SPECS)
        except FtckptError:
            return False
        metadata_of(found, {})
        for value in found.plain.values():
            in_dcp_form(value)
        if not refused(lambda: packed(found)):
            again = packed(found)
            assert packed(contents_of({name: unpack(body) for name, body in again.items()}, {})) == again
        return True

    seeds = [pack(trees, leaf="seed") for trees in (BY_DCP, BY_SESSION)]

    def craft(draw: Random) -> bytes:
        if draw.random() < 0.2:
            return mutate.bytes_of(seeds, draw)
        with contextlib.suppress(FtckptError, TypeError, ValueError, OverflowError, RecursionError):
            return pack(mutate.plain(draw.choice((BY_DCP, BY_DCP, BY_SESSION)), draw), leaf="crafted")
        return mutate.bytes_of(seeds, draw)

    return Target("what a step holds for DCP", check, seeds, craft)


def safetensors() -> Target:
    """A file. What its header says can be written again, and then reads the same."""

    def files(body: bytes) -> Files:
        sim = Sim()
        sim.objects["x.safetensors"] = body
        return Files(sim.store, _no_stream)

    def check(data: bytes) -> bool:
        try:
            found = read_header(files(data), "x.safetensors")
        except FtckptError:
            return False
        arrays = [array for array, _ in found.tensors.values()]
        assert not unsaid(arrays)
        again = header(arrays, {}, found.tied) + bytes(sum(array.size_bytes for array in arrays))
        assert [array for array, _ in read_header(files(again), "x.safetensors").tensors.values()] == arrays
        return True

    record = {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [], "data_offsets": [24, 26]},
        "c": {"dtype": "U8", "shape": [0, 4], "data_offsets": [26, 26]},
    }

    def framed(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + bytes(26)

    seeds = [
        framed(json.dumps(record).encode()),
        framed(json.dumps(record).encode("utf-16")),
        framed(b"{}")[:-26],
    ]

    def craft(draw: Random) -> bytes:
        if draw.random() < 0.3:
            return mutate.bytes_of(seeds, draw)
        with contextlib.suppress(TypeError, ValueError, OverflowError, RecursionError):
            return framed(json.dumps(mutate.plain(record, draw)).encode("utf-8", "surrogatepass"))
        return mutate.bytes_of(seeds, draw)

    return Target("headers of safetensors", check, seeds, craft)


def torch_metadata() -> Target:
    """The pickle in a folder of DCP: torch's own classes come of it, or nothing."""
    state = {"w": torch.ones(2, 3), "n": {"epoch": 3}, "s": io.BytesIO(b"abc")}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
        seeds = [(Path(folder) / ".metadata").read_bytes()]
    seeds += [
        b"cos\nsystem\n(S'true'\ntR.",
        b"]p4294967295\n.",
        b"\x80\x04\x95\x02\x00\x00\x00\x00\x00\x00\x00}.",
    ]

    def check(data: bytes) -> bool:
        try:
            found = read_metadata(data, "here")
        except FtckptError:
            return False
        assert type(found) is dcp.Metadata
        return True

    return Target("metadata of DCP", check, seeds, lambda draw: mutate.bytes_of(seeds[:1], draw))


def _no_stream(name: str) -> NoReturn:
    raise AssertionError(f"a header is read, and nothing written: {name}")
