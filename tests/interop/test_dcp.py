"""The DCP bridge: saves and loads of torch.distributed.checkpoint through a run."""

from __future__ import annotations

import collections
import fcntl
import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, reject
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import ftckpt
from ftckpt.attempts import claim, start
from ftckpt.begin import begin, this_process
from ftckpt.capture.tensors import as_bytes_view
from ftckpt.chaos.faults.store import Crash, Die, Fail, Fault, FaultyStore
from ftckpt.cli import main
from ftckpt.errors import (
    ChunkCorrupt,
    CorruptError,
    Fenced,
    ForeignUnsafe,
    FtckptError,
    NotEnoughMemory,
    RecordCorrupt,
    RestoreIncomplete,
    SaveFailed,
    SettingsError,
    StateMismatch,
    StepNotFound,
    StoreFull,
    UnsupportedValue,
)
from ftckpt.events import silent
from ftckpt.gc import collect
from ftckpt.interop.dcp.names import Contents, component_of, contents_of, leaf_name, packed
from ftckpt.leaf import ITEMSIZE_BYTES, LeafSpec
from ftckpt.memory import require_memory
from ftckpt.retention import Keep
from ftckpt.store import LocalStore, open_store
from ftckpt.values import TensorRef, unpack
from tests.formats import independent_reader
from tests.support.procs import run_ranks, wait_until

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def writer(run: object, **options: Any) -> ftckpt.dcp.StorageWriter:
    return ftckpt.dcp.StorageWriter(run, **{"events": silent, "chunk_bytes": 4096} | options)


def reader(run: object, step: int | None = None, **options: Any) -> ftckpt.dcp.StorageReader:
    return ftckpt.dcp.StorageReader(run, step, events=silent, **options)


def failure(act: Callable[[], object]) -> BaseException:
    """The one rank's error behind DCP's own, which is no ``Exception``."""
    assert not issubclass(CheckpointException, Exception)
    with pytest.raises(CheckpointException) as caught:
        act()
    return caught.value.failures[0][0]


def same(a: object, b: object) -> bool:
    """Equal types, structure and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.shape) == (b.dtype, b.shape) and bytes(
            as_bytes_view(a.resolve_conj().contiguous())
        ) == bytes(as_bytes_view(b.resolve_conj().contiguous()))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, io.BytesIO):
        return (a.getvalue(), a.tell()) == (b.getvalue(), b.tell())
    if isinstance(a, (np.ndarray, np.generic, float)):
        return np.asarray(a).tobytes() == np.asarray(b).tobytes() and np.shape(a) == np.shape(b)
    return a == b


def through_both(
    tmp_path: Path, state: dict[str, Any], blank: Callable[[], dict[str, Any]], **options: Any
) -> None:
    """What DCP's own files give back, a run gives back."""
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "torch"))
    dcp.save(state, storage_writer=writer(tmp_path / "run", **options))
    wanted, found = blank(), blank()
    dcp.load(wanted, storage_reader=FileSystemReader(tmp_path / "torch"))
    dcp.load(found, storage_reader=reader(tmp_path / "run", **options))
    for key in wanted:
        assert same(found[key], wanted[key]), (key, found[key], wanted[key])
    assert list(found) == list(wanted)


class Anything:
    """A class that has no form of ours."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Anything) and self.number == other.number


class Loader:
    """What a stateful data loader is to DCP."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {
            "epoch": 0,
            "sampler": {"seen": 0, "rng": b""},
            "workers": [{"at": 0}],
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def plain_values() -> dict[str, Any]:
    stream = io.BytesIO(b"0123456789")
    stream.seek(4)
    return {
        "none": None,
        "flag": True,
        "int": 1 << 80,
        "float": -0.0,
        "text": "ä",
        "bytes": b"\x00\xff",
        "tuple": (1, (2.5, "x")),
        "list": [1, 2, 3],
        "empty list": [],
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "counter": (collections.Counter("abca"), collections.OrderedDict(a=1)),
        "deque": collections.deque([1, 2], 5),
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "scalar": np.float32(1.5),
        "stream": stream,
        "large": list(range(50_000)),
        "large bytes": bytes(range(256)) * 400,
        "a@b/c%d": 1,
    }


# --- the same as torch ----------------------------------------------------------------------------


def test_plain_values_streams_and_objects_come_back_as_from_dcps_own_files(tmp_path):
    values = plain_values() | {"object": Anything(3), "tensors": (torch.ones(2), 1), "set": {1, 2}}
    state = {"values": values, "groups": [{"lr": 0.1, "t": torch.ones(3)}, {"lr": 0.2}], "top": 5}

    through_both(
        tmp_path,
        state,
        lambda: {
            "values": dict.fromkeys(values, 0),
            "groups": [{"lr": 0, "t": torch.zeros(3)}, {"lr": 0}],
            "top": 0,
        },
        allow_pickle=True,
    )


def test_tensors_of_every_dtype_and_layout_come_back_as_from_dcps_own_files(tmp_path):
    torch.manual_seed(0)
    state: dict[str, Any] = {}
    for name in ITEMSIZE_BYTES:
        raw = torch.randint(0, 2 if name == "bool" else 256, (6, 16), dtype=torch.uint8)
        if name not in ("complex32", "float4_e2m1fn_x2"):  # torch itself cannot make empty ones
            state[name] = raw.view(getattr(torch, name))
    base = torch.arange(24.0).reshape(4, 6)
    state |= {
        "0-dim": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "conj": torch.view_as_complex(base.reshape(4, 3, 2)).conj(),
        "parameter": nn.Parameter(base.clone()),
    }

    def blank() -> dict[str, Any]:
        return {name: torch.zeros(t.shape, dtype=t.dtype) for name, t in state.items()}

    through_both(tmp_path, state, blank)


def test_an_object_with_a_state_dict_is_asked_for_it_and_given_it_back(tmp_path):
    loader, model = Loader(), nn.Linear(3, 2)
    loader.state = {"epoch": 3, "sampler": {"seen": 17, "rng": b"\x01\x02"}, "workers": [{"at": 5}]}
    dcp.save({"model": model, "data": loader}, storage_writer=writer(tmp_path))

    other_model, other = nn.Linear(3, 2), Loader()
    dcp.load({"model": other_model, "data": other}, storage_reader=reader(tmp_path))

    assert other.state == loader.state
    assert same(dict(other_model.state_dict()), dict(model.state_dict()))


def test_nothing_that_has_a_form_of_ours_is_a_pickle_in_the_store(tmp_path):
    state = {"values": plain_values(), "t": torch.ones(4)}

    dcp.save(state, storage_writer=writer(tmp_path, codec="raw"))

    packs = b"".join(path.read_bytes() for path in tmp_path.rglob("packs/**/*") if path.is_file())
    assert b"0123456789" in packs
    assert b"PK\x03\x04" not in packs and b"data.pkl" not in packs


HEARD: list[str] = []


class Sounding:
    """Tells when a pickle of it is made, and when one is run."""

    def __reduce__(self) -> Any:
        HEARD.append("pickled")
        return hear, ("run",)


def hear(what: str) -> None:
    HEARD.append(what)


def test_a_pickle_is_written_and_run_only_if_both_sides_say_so(tmp_path):
    """design.md §4: no pickle, unless somebody asked for it by name."""
    HEARD.clear()
    saved = {"w": torch.ones(3), "deep": {"it": Sounding()}}

    error = failure(lambda: dcp.save(saved, storage_writer=writer(tmp_path)))
    assert isinstance(error, UnsupportedValue) and error.leaf == "deep.it" and HEARD == []
    assert "Sounding" in str(error) and "StorageWriter(uri, allow_pickle=True)" in str(error)

    dcp.save(saved, storage_writer=writer(tmp_path, allow_pickle=True))
    HEARD.clear()
    found = {"w": torch.zeros(3), "deep": {"it": None}}
    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path)))
    assert isinstance(error, ForeignUnsafe) and error.named == "deep.it" and HEARD == []
    assert "StorageReader(uri, allow_pickle=True)" in str(error) and not found["w"].any()

    without = {"w": torch.zeros(3)}
    dcp.load(without, storage_reader=reader(tmp_path))
    assert same(without["w"], saved["w"]) and HEARD == []
    dcp.load(found, storage_reader=reader(tmp_path, allow_pickle=True))
    assert HEARD == ["run"]


def test_a_planner_that_has_bytes_of_its_own_gets_them_back(tmp_path):
    class Saving(DefaultSavePlanner):
        def transform_object(self, write_item: Any, value: Any) -> Any:
            return (
                io.BytesIO(json.dumps(value).encode())
                if isinstance(value, list)
                else super().transform_object(write_item, value)
            )

    class Loading(DefaultLoadPlanner):
        def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
            self.original_state_dict[read_item.dest_index.fqn] = json.load(value)

    dcp.save({"a": [1, "x"]}, storage_writer=writer(tmp_path, allow_pickle=True), planner=Saving())
    found: dict[str, Any] = {"a": None}
    dcp.load(found, storage_reader=reader(tmp_path, allow_pickle=True), planner=Loading())

    assert found == {"a": [1, "x"]}


def test_an_async_save_holds_what_was_there_when_it_was_asked_for(tmp_path):
    tensor, values = torch.arange(5000.0), {"n": 1}
    target = writer(tmp_path)
    for step in (1, 2):
        wanted = tensor.clone()
        saving = dcp.async_save({"t": tensor, "v": values}, storage_writer=target, checkpoint_id=step)
        tensor.add_(1)
        saving.result(20)

        found = {"t": torch.zeros(5000), "v": {"n": 0}}
        dcp.load(found, storage_reader=reader(tmp_path, step))
        assert same(found["t"], wanted)


_keys = st.text("ab.@%/é", min_size=0, max_size=4)
_nested = st.recursive(
    st.integers()
    | st.just(torch.float32)
    | st.binary(max_size=3)
    | st.just(LeafSpec("", "tensor", "int8", (2,))),
    lambda inner: st.dictionaries(_keys, inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(_keys, _nested, max_size=4))
def test_whatever_the_keys_are_a_step_says_again_what_was_saved_or_refuses_to(state):
    """``LeafSpec`` stands for a tensor."""
    try:
        flat, paths = flatten_state_dict(state)
    except ValueError:
        reject()  # DCP refuses it
    tensors = {
        key: LeafSpec(leaf_name(key), "tensor", "int8", (2,))
        for key, v in flat.items()
        if type(v) is LeafSpec
    }
    plain = {key: value for key, value in flat.items() if key not in tensors}
    contents = Contents(tensors, {}, plain, paths)
    with suppress(UnsupportedValue):
        trees = {name: unpack(data) for name, data in packed(contents).items()}
        assert contents_of(trees, {}) == contents
        assert {component_of(key) for key in flat} == {name for name in trees if name != "ftckpt"}


def said(**other: Any) -> dict[str, Any]:
    """The value leaves of a step of one tensor, one stream and one number, with something else in it."""
    dcp_says = {
        "planner": {"m.w": ("m", "w"), "s": ("s",), "m.n": ("m", "n")},
        "tensors": {"m.w": ("float32", (5,))},
        "bytes": {"s": ("stream", 3, 1)},
        "values": ["m.n"],
    }
    return {
        "m": {"kind": "tree", "tree": {"w": TensorRef("m.w"), "n": 7}},
        "s": {"kind": "tree", "tree": TensorRef("s.value")},
        "ftckpt": {"kind": "dcp", "tree": {"dcp": dcp_says | other}},
    }


CRAFTED: dict[str, dict[str, Any]] = {
    "nothing said": {"ftckpt": {"kind": "dcp"}},
    "a list for all": {"ftckpt": {"kind": "dcp", "tree": {"dcp": []}}},
    "a list of tensors": said(tensors=["m.w"]),
    "a number for a key": said(tensors={3: ("float32", (5,))}),
    "a dtype that is a list": said(tensors={"m.w": (["float32"], (5,))}),
    "an unknown dtype": said(tensors={"m.w": ("quint8", (5,))}),
    "a shape that is a number": said(tensors={"m.w": ("float32", 5)}),
    "a shape of truths": said(tensors={"m.w": ("float32", (True,))}),
    "a shape beyond 64 bits": said(tensors={"m.w": ("float32", (1 << 70,))}),
    "more bytes than 64 bits count": said(tensors={"m.w": ("float32", (1 << 40, 1 << 40))}),
    "thousands of dimensions": said(tensors={"m.w": ("float32", (1,) * 5000)}),
    "a tensor that is nowhere": said(tensors={"m.v": ("float32", (5,))}),
    "a tensor of nobody": said(tensors={"x.w": ("float32", (5,))}),
    "a number for bytes": said(bytes=7),
    "bytes of another form": said(bytes={"s": ("plain", 3, 0)}),
    "bytes without a place": said(bytes={"s": ("stream", 3)}),
    "a place that is text": said(bytes={"s": ("stream", 3, "no")}),
    "a place before the start": said(bytes={"s": ("stream", 3, -5)}),
    "a place beyond 64 bits": said(bytes={"s": ("stream", 3, 1 << 64)}),
    "a place in what is no stream": said(bytes={"s": ("packed", 3, 1)}),
    "a size that is none": said(bytes={"s": ("stream", -1, 0)}),
    "a size beyond 64 bits": said(bytes={"s": ("stream", 1 << 64, 0)}),
    "values that are text": said(values="m.n"),
    "a list for a value's key": said(values=[["m"]]),
    "a value twice": said(values=["m.n", "m.n"]),
    "a value that is a tensor": said(values=["m.w"]),
    "a value that holds one": said(values=["m"], planner={"m": ("m",)}),
    "a path through a number": said(values=["m.n.x"], planner={"m.n.x": ("m", "n", "x")}),
    "a path before the start": {
        **said(values=["a.-1"], planner={"a.-1": ("a", -1)}),
        "a": {"kind": "tree", "tree": [1]},
    },
    "a module of numbers": {"a": {"kind": "module", "tree": {3: 1}}},
    "a tensor that is packed bytes": {"a": {"kind": "tree", "tree": {"x": TensorRef("m")}}},
    "a key too long to be spelled": {"a": {"kind": "tree", "tree": {10**5000: 1}}},
}


@pytest.mark.parametrize("how", CRAFTED)
def test_a_step_that_says_what_cannot_be_is_refused_as_a_record(how):
    """Found by review: an AttributeError or a TypeError came out, or a size that no tensor has."""
    with pytest.raises(RecordCorrupt, match="nothing was changed"):
        contents_of(CRAFTED[how], {"m": LeafSpec("m", "value", "uint8", (9,))})


def test_the_step_that_is_crafted_above_is_whole():
    contents = contents_of(said(), {})

    assert contents.plain == {"m.n": 7} and contents.kept["s"].position == 1
    assert contents.tensors == {"m.w": LeafSpec("m.w", "tensor", "float32", (5,))}


def test_two_values_of_a_session_that_have_one_key_are_refused():
    trees = {"a": {"kind": "tree", "tree": {"b.c": 1, "b": {"c": 2}}}}

    with pytest.raises(StateMismatch, match=r"'a\.b\.c'"):
        contents_of(trees, {})


def test_lists_of_more_places_than_memory_holds_are_refused_before_they_are_made():
    """DCP's tools make a list as long as a path says."""
    paths = {"m.w": ("m", 1 << 50), "s": ("s",), "m.n": ("m", "n")}

    with pytest.raises(NotEnoughMemory):
        contents_of(said(planner=paths), {})


def test_values_that_take_more_memory_than_there_is_are_refused_before_it_is_taken(tmp_path, monkeypatch):
    """A chunk of zeros takes twenty bytes in the store, whatever its size."""
    dcp.save({"w": torch.ones(5), "s": io.BytesIO(bytes(65 << 20))}, storage_writer=writer(tmp_path))
    asked = partial(require_memory, available=lambda: 64 << 20)
    monkeypatch.setattr("ftckpt.interop.dcp.reader.require_memory", asked)
    found = {"w": torch.zeros(5), "s": None}

    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path)))

    assert isinstance(error, NotEnoughMemory) and error.needed_bytes == 65 << 20
    assert not found["w"].any() and found["s"] is None


# --- steps and attempts ---------------------------------------------------------------------------


def steps(run: Path) -> list[tuple[int, int]]:
    with ftckpt.open(run) as opened:
        return [(commit.step, commit.attempt) for commit in opened.commits()]


def tensor_of(run: Path, step: int | None = None) -> float:
    found = {"t": torch.zeros(10)}
    dcp.load(found, storage_reader=reader(run, step))
    return float(found["t"].mean())


def state(fill: float) -> dict[str, Any]:
    return {"t": torch.full((10,), float(fill)), "kept": torch.arange(5000.0)}


def test_the_checkpoint_id_is_the_step_and_without_one_steps_count_on(tmp_path):
    target = writer(tmp_path)
    returned = dcp.save(state(0), storage_writer=target)
    for number, checkpoint_id in enumerate([7, "9", "step-11", Path("outputs/global_step13")], 1):
        dcp.save(state(number), storage_writer=target, checkpoint_id=checkpoint_id)
    dcp.save(state(5), storage_writer=target)

    assert steps(tmp_path) == [(14, 1), (13, 1), (11, 1), (9, 1), (7, 1), (1, 1)]
    assert returned.storage_data == {"uri": LocalStore(str(tmp_path)).uri, "step": 1, "attempt": 1}
    assert [tensor_of(tmp_path, step) for step in (1, 7, 14)] == [0, 1, 5]
    found = {"t": torch.zeros(10)}
    dcp.load(found, storage_reader=reader(tmp_path), checkpoint_id="step-11")
    assert found["t"].mean() == 3


def test_a_reader_goes_back_to_its_own_step_when_a_load_names_none(tmp_path):
    """Found by review: the step of one load stayed for good."""
    target = writer(tmp_path)
    for step in (1, 2, 3):
        dcp.save(state(step), storage_writer=target)

    def loaded(source: ftckpt.dcp.StorageReader, **which: Any) -> float:
        found = {"t": torch.zeros(10)}
        dcp.load(found, storage_reader=source, **which)
        return float(found["t"].mean())

    newest, second = reader(tmp_path), reader(tmp_path, 2)
    assert [loaded(newest), loaded(newest, checkpoint_id=1), loaded(newest)] == [3, 1, 3]
    assert [loaded(second, checkpoint_id=1), loaded(second)] == [1, 2]
    failure(lambda: loaded(second, checkpoint_id=7))
    assert loaded(second) == 2


@pytest.mark.parametrize("checkpoint_id", ["latest", "step-", "step-4/model", -1, 10**12])
def test_a_checkpoint_id_that_names_no_step_is_refused(tmp_path, checkpoint_id):
    with pytest.raises(SettingsError, match="checkpoint_id"):
        dcp.save(state(0), storage_writer=writer(tmp_path), checkpoint_id=checkpoint_id)

    assert not list(tmp_path.iterdir())


def test_the_tensors_that_did_not_change_are_not_written_again(tmp_path):
    target = writer(tmp_path)
    for step in (1, 2):
        dcp.save(state(step), storage_writer=target)

    with ftckpt.open(tmp_path) as run:
        parts = run.components(2)
        assert run.verify() == []
    kept = parts["kept"]
    assert kept.stored_bytes == 0 and kept.reused_bytes == kept.raw_bytes > 20_000
    assert parts["t"].stored_bytes > 0 and parts["ftckpt"].stored_bytes == 0


def test_steps_only_go_up(tmp_path):
    target = writer(tmp_path)
    dcp.save(state(1), storage_writer=target, checkpoint_id=5)

    for step in (5, 4):
        error = failure(lambda step=step: dcp.save(state(2), storage_writer=target, checkpoint_id=step))
        assert isinstance(error, SaveFailed) and "after step 5" in str(error)
    error = failure(lambda: dcp.save(state(2), storage_writer=writer(tmp_path), checkpoint_id=3))
    assert isinstance(error, SaveFailed)

    assert steps(tmp_path) == [(5, 1)] and tensor_of(tmp_path) == 1


def test_a_new_writer_goes_on_from_the_newest_step_or_from_the_one_that_it_is_told(tmp_path):
    first = writer(tmp_path)
    for step in (1, 2, 3):
        dcp.save(state(step), storage_writer=first)

    dcp.save(state(4), storage_writer=writer(tmp_path))
    assert steps(tmp_path) == [(4, 2), (3, 1), (2, 1), (1, 1)]

    dcp.save(state(9), storage_writer=writer(tmp_path, step=2))
    assert steps(tmp_path) == [(3, 3), (2, 1), (1, 1)] and tensor_of(tmp_path) == 9
    error = failure(lambda: dcp.save(state(9), storage_writer=writer(tmp_path, step=8)))
    assert isinstance(error, StepNotFound)


def test_an_old_writer_is_fenced_and_what_it_saves_counts_for_nothing(tmp_path):
    old, new = writer(tmp_path), writer(tmp_path)
    dcp.save(state(1), storage_writer=old)
    dcp.save(state(2), storage_writer=new)

    error = failure(lambda: dcp.save(state(7), storage_writer=old, checkpoint_id=7))

    assert isinstance(error, Fenced)
    assert steps(tmp_path) == [(2, 2), (1, 1)] and tensor_of(tmp_path) == 2


def test_a_save_that_is_overtaken_while_it_writes_is_not_acknowledged(tmp_path):
    """The zombie's commit lands after the new attempt has begun: it is on no lineage."""
    other = LocalStore(str(tmp_path))

    class Overtaken:
        def around(self, call: Any, proceed: Any, clock: Any) -> Any:
            details = {"host": "h", "pid": 1, "command": (), "cwd": "/", "groups": 1, "nproc": 1}
            with ftckpt.open(tmp_path) as run:
                parent = run.look().refs[run.latest().at]
            start(other, claim(other, nonce="n", **details), parent)
            return proceed(call)

    store = FaultyStore(open_store(tmp_path), [Fault(Overtaken(), "create", "commits/", nth=2)])
    target = writer(tmp_path, store=store)
    dcp.save(state(1), storage_writer=target)

    error = failure(lambda: dcp.save(state(2), storage_writer=target))

    assert isinstance(error, Fenced)
    assert steps(tmp_path) == [(1, 1)] and tensor_of(tmp_path) == 1


def supervised(run: Path, monkeypatch: pytest.MonkeyPatch, step: int | None = None) -> None:
    """What a supervisor does for the processes that it starts."""
    begun = begin(LocalStore(str(run)), this_process(), name="n", step=step)
    monkeypatch.setenv("FTCKPT_RUN", str(run))
    monkeypatch.setenv("FTCKPT_ATTEMPT", str(begun.claim.attempt))


def test_under_a_supervisor_the_step_to_go_on_from_is_the_supervisors(tmp_path, monkeypatch):
    """Found by review: it was passed over without a word."""
    first = writer(tmp_path)
    for step in (1, 2, 3):
        dcp.save(state(step), storage_writer=first)

    supervised(tmp_path, monkeypatch)
    error = failure(lambda: dcp.save(state(9), storage_writer=writer(tmp_path, step=1)))
    assert isinstance(error, SettingsError) and "attempt 2" in str(error) and "from step 3" in str(error)
    assert "--step 1" in str(error) and steps(tmp_path)[0] == (3, 1)

    supervised(tmp_path, monkeypatch, step=1)
    for _ in range(2):  # the second was restarted inside of the attempt
        dcp.save(state(9), storage_writer=writer(tmp_path, step=1))
    assert steps(tmp_path) == [(3, 3), (2, 3), (1, 1)]


def test_under_a_supervisor_the_writer_lives_in_the_attempt_that_was_begun(tmp_path, monkeypatch):
    dcp.save(state(1), storage_writer=writer(tmp_path))
    supervised(tmp_path, monkeypatch)

    target = writer(tmp_path)
    dcp.save(state(2), storage_writer=target)
    dcp.save(state(3), storage_writer=writer(tmp_path))  # it was restarted inside of the attempt

    assert target.attempt == 2 and steps(tmp_path) == [(3, 2), (2, 2), (1, 1)]


def test_old_steps_are_collected_if_the_writer_was_told_how_many_to_keep(tmp_path):
    target = writer(tmp_path, keep=2)
    for step in range(1, 5):
        dcp.save(state(step), storage_writer=target)

    wait_until(lambda: steps(tmp_path) == [(4, 1), (3, 1)], 20, "the collection")
    assert tensor_of(tmp_path) == 4


# --- when it fails --------------------------------------------------------------------------------


def test_a_save_that_fails_leaves_the_last_one_and_the_next_works(tmp_path):
    full_ = StoreFull("no space", op="create", key="packs")
    store = FaultyStore(
        open_store(tmp_path), [Fault(Fail(error=full_), "create", "packs/000001/000000000002")]
    )
    target = writer(tmp_path, store=store)
    dcp.save(state(1), storage_writer=target)

    assert isinstance(failure(lambda: dcp.save(state(2), storage_writer=target)), StoreFull)
    assert tensor_of(tmp_path) == 1
    dcp.save(state(3), storage_writer=target)

    assert steps(tmp_path) == [(3, 1), (1, 1)] and tensor_of(tmp_path) == 3
    with ftckpt.open(tmp_path) as run:
        (aborted,) = (entry for entry in run.entries() if entry.status == "aborted")
        assert aborted.at.step == 2 and "no space" in aborted.why


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"s": torch.ones(3, device="meta")}, "s.value"),
        ({"s": torch.eye(3).to_sparse()}, "s.value"),
        ({"ftckpt": {"x": 1}}, "belongs to ftckpt"),
        ({"a": torch.ones(2), "a.value": torch.ones(2)}, "a.value"),
        ({"a": 1, "a.b": 2}, "a.b"),
    ],
    ids=["meta", "sparse", "ftckpt", "one name", "one place"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_saved_faithfully_is_refused_by_name_and_the_step_given_up(tmp_path, bad, why):
    target = writer(tmp_path)
    dcp.save(state(1), storage_writer=target)

    error = failure(lambda: dcp.save(state(2) | bad, storage_writer=target))

    assert isinstance(error, UnsupportedValue) and why in str(error), error
    assert steps(tmp_path) == [(1, 1)]


@pytest.mark.parametrize("way", ["planner", "collectives"])
def test_what_would_give_ranks_something_else_to_save_is_refused(tmp_path, way):
    if way == "planner":
        error = failure(
            lambda: dcp.save(
                state(1),
                storage_writer=writer(tmp_path),
                planner=DefaultSavePlanner(enable_plan_caching=True),
            )
        )
    else:
        with pytest.raises(SettingsError) as caught:
            dcp.save(state(1), storage_writer=writer(tmp_path), use_collectives=False)
        error = caught.value

    assert isinstance(error, SettingsError)
    with suppress(FtckptError):
        assert not steps(tmp_path)


def test_at_whatever_call_a_save_dies_the_old_step_or_the_new_one_is_there(tmp_path):
    def saves(folder: Path, plan: list[Fault]) -> FaultyStore:
        store = FaultyStore(open_store(folder), plan)
        target = writer(folder, store=store)
        for step in (1, 2):
            dcp.save({"t": torch.full((10,), float(step)), "n": step}, storage_writer=target)
        return store

    calls = saves(tmp_path / "counted", []).log
    first = next(call.number for call in calls if call.key == "commits/000000000001-000001")
    assert len(calls) - first > 10

    for number in range(first, len(calls) + 1):
        for when in ("before", "after") if calls[number - 1].op == "create" else ("before",):
            folder = tmp_path / f"{number}-{when}"
            error = failure(lambda: saves(folder, [Fault(Die(when), nth=number, times=1000)]))  # noqa: B023
            assert isinstance(error, Crash)
            found = {"t": torch.zeros(10), "n": 0}
            with suppress(CheckpointException):
                dcp.load(found, storage_reader=reader(folder))
            committed = [c.number for c in calls if c.op == "create" and c.key.startswith("commits/")]
            done = sum(c < number or (c == number and when == "after") for c in committed)
            assert (found["n"], float(found["t"].mean())) == (done, done), (number, when)
            shutil.rmtree(folder)


def test_what_becomes_of_each_save_is_told(tmp_path):
    heard = []
    denied = StoreFull("no space", op="create", key="packs")
    store = FaultyStore(
        open_store(tmp_path), [Fault(Fail(error=denied), "create", "packs/000001/000000000002")]
    )
    target = writer(tmp_path, store=store, events=heard.append)
    dcp.save(state(1), storage_writer=target)
    failure(lambda: dcp.save(state(2), storage_writer=target))

    ends = [event for event in heard if event.name in ("save.committed", "save.failed")]
    assert [(event.name, event.fields["step"]) for event in ends] == [
        ("save.committed", 1),
        ("save.failed", 2),
    ]
    assert ends[0].fields["raw_bytes"] > 20_000 and ends[0].fields["put_s"] > 0
    assert ends[1].fields["stage"] == "put" and "no space" in ends[1].fields["error"]


# --- damage ---------------------------------------------------------------------------------------


def test_a_flipped_byte_is_refused_by_the_name_of_its_tensor(tmp_path):
    torch.manual_seed(0)
    dcp.save({"w": torch.randn(5000), "n": 1}, storage_writer=writer(tmp_path, codec="raw"))
    pack = max(tmp_path.rglob("packs/**/g0.*"), key=lambda path: path.stat().st_size)
    body = bytearray(pack.read_bytes())
    body[-100] ^= 1
    pack.write_bytes(body)
    found = {"w": torch.zeros(5000), "n": 0}

    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path)))

    assert isinstance(error, (ChunkCorrupt, RestoreIncomplete)) and "w.value" in str(error), error
    assert "do not match" in str(error) and found["n"] == 0


class Failing(DefaultLoadPlanner):
    """Fails at one of the things that it is given."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        if read_item.storage_index.fqn == self.at:
            raise OSError("no such thing")

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        if read_item.storage_index.fqn == self.at:
            raise OSError("no such thing")
        super().load_bytes(read_item, value)


@pytest.mark.parametrize("at", ["m.w", "m.n", "big"])
def test_a_load_that_fails_after_it_has_begun_names_what_it_overwrote(tmp_path, at):
    """Found by review: what failed behind the last chunk came out as it was, as if nothing had changed."""
    saved = {"m": {"w": torch.ones(5), "n": 1}, "big": list(range(20_000)), "other": torch.ones(5)}
    dcp.save(saved, storage_writer=writer(tmp_path))
    found = {"m": {"w": torch.zeros(5), "n": 0}, "big": None}

    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path), planner=Failing(at)))

    assert isinstance(error, RestoreIncomplete) and isinstance(error.__cause__, OSError)
    assert "m.w" in str(error) and "m" in error.components and "OSError: no such thing" in str(error)
    assert "other" not in error.components and ("big" in error.components) == (at != "m.w")


def test_a_cast_that_fails_after_another_tensor_was_read_names_that_one(tmp_path):
    """The planner's memory cannot be written to: a tensor that is expanded holds one element for many."""
    dcp.save({"a": torch.ones(5), "z": torch.ones(5)}, storage_writer=writer(tmp_path))
    found = {"a": torch.zeros(5), "z": torch.zeros(1, dtype=torch.float64).expand(5)}

    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path, cast=True)))

    assert isinstance(error, RestoreIncomplete) and "a" in error.components
    assert isinstance(error.__cause__, RuntimeError)


def test_values_that_do_not_read_are_found_before_a_tensor_is_overwritten(tmp_path):
    saved = {"w": torch.ones(5), "big": list(range(20_000))}
    dcp.save(saved, storage_writer=writer(tmp_path, codec="raw"))
    pack = max(tmp_path.rglob("packs/**/g0.*"), key=lambda path: path.stat().st_size)
    body = bytearray(pack.read_bytes())
    body[-100] ^= 1
    pack.write_bytes(body)
    found = {"w": torch.zeros(5), "big": None}

    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path)))

    assert isinstance(error, ChunkCorrupt) and "big.value" in str(error)
    assert not found["w"].any() and found["big"] is None


@pytest.mark.parametrize("kind", ["packs", "fragments", "commits"])
def test_an_object_that_is_damaged_or_gone_changes_no_tensor(tmp_path, kind):
    dcp.save({"w": torch.ones(5000), "n": 1}, storage_writer=writer(tmp_path / "run"))
    for path in [p for p in (tmp_path / "run" / kind).rglob("*") if p.is_file()]:
        for harm in ("gone", "cut"):
            folder = Path(shutil.copytree(tmp_path / "run", tmp_path / f"{path.name}{harm}"))
            victim = folder / path.relative_to(tmp_path / "run")
            victim.unlink() if harm == "gone" else victim.write_bytes(victim.read_bytes()[:-1])
            found = {"w": torch.zeros(5000), "n": 0}

            error = failure(lambda: dcp.load(found, storage_reader=reader(folder)))  # noqa: B023

            if type(error) is AssertionError:  # DCP puts what read_metadata raises into words
                assert re.search("failed: (ObjectDamaged|RecordCorrupt|NoCommit): ", str(error)), error
            else:
                assert isinstance(error, CorruptError), error
            assert not found["w"].any() and found["n"] == 0


def test_other_dtypes_are_refused_by_name_unless_asked_for(tmp_path):
    """E2: DCP converts in silence."""
    torch.manual_seed(0)
    saved = torch.randn(100)
    dcp.save({"w": saved, "v": saved}, storage_writer=writer(tmp_path))
    found = {"w": torch.zeros(100, dtype=torch.bfloat16), "v": torch.zeros(100)}

    error = failure(lambda: dcp.load(found, storage_reader=reader(tmp_path)))
    assert isinstance(error, StateMismatch) and "w: saved float32, asked for as bfloat16" in str(error)
    assert not found["w"].any() and not found["v"].any()

    dcp.load(found, storage_reader=reader(tmp_path, cast=True))
    assert same(found["w"], saved.bfloat16()) and same(found["v"], saved)


def test_a_missing_key_and_another_shape_are_refused(tmp_path):
    dcp.save({"w": torch.ones(10)}, storage_writer=writer(tmp_path))

    for wrong in ({"w": torch.zeros(11)}, {"x": torch.zeros(10)}):
        failure(lambda wrong=wrong: dcp.load(wrong, storage_reader=reader(tmp_path)))
        assert not any(tensor.any() for tensor in wrong.values())


def test_an_address_without_a_run_is_refused_and_stays_as_it_is(tmp_path):
    error = failure(lambda: dcp.load({"t": torch.zeros(1)}, storage_reader=reader(tmp_path / "none")))

    assert "RunNotFound" in str(error) and not (tmp_path / "none").exists()


def test_a_pack_that_a_tier_has_is_read_there_and_bad_bytes_of_it_are_passed_over(tmp_path):
    run, tier = tmp_path / "run", tmp_path / "tier"
    dcp.save(state(1), storage_writer=writer(run, codec="raw"))
    shutil.copytree(run, tier)
    packs = [path for path in tier.rglob("packs/**/g0.*") if path.is_file()]
    for path in packs:
        path.write_bytes(bytes(path.stat().st_size))
    passed: list[str] = []
    found = {"t": torch.zeros(10), "kept": torch.zeros(5000)}
    told = ftckpt.dcp.StorageReader(run, tiers=[tier], events=lambda event: passed.append(event.name))

    dcp.load(found, storage_reader=told)

    assert same(found, state(1)) and "read.passed_over" in passed


@pytest.mark.parametrize("step", [1, 9], ids=["the same step", "a newer step"])
def test_a_tier_of_another_run_gives_none_of_its_bytes(tmp_path, step):
    dcp.save(state(1), storage_writer=writer(tmp_path / "run"), checkpoint_id=1)
    dcp.save(state(9), storage_writer=writer(tmp_path / "tier"), checkpoint_id=step)
    found = {"t": torch.zeros(10), "kept": torch.zeros(5000)}
    source = reader(tmp_path / "run", tiers=[tmp_path / "tier"])

    dcp.load(found, storage_reader=source)

    assert same(found, state(1)) and source.read_metadata().storage_data["step"] == 1


def test_a_tier_whose_objects_have_the_names_of_ours_is_told_to_be_passed_over(tmp_path):
    dcp.save(state(1), storage_writer=writer(tmp_path / "run"))
    shutil.copytree(tmp_path / "run", tmp_path / "tier")
    for path in (tmp_path / "tier").rglob("fragments/**/*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[::-1])
    shutil.rmtree(tmp_path / "tier" / "commits")
    heard: list[Any] = []
    found = {"t": torch.zeros(10), "kept": torch.zeros(5000)}
    told = ftckpt.dcp.StorageReader(tmp_path / "run", tiers=[tmp_path / "tier"], events=heard.append)

    dcp.load(found, storage_reader=told)

    passed = [event.fields["key"] for event in heard if event.name == "read.passed_over"]
    assert same(found, state(1)) and any(key.startswith("fragments/") for key in passed)


def test_a_bucket_is_as_good_as_a_folder(s3):
    run = s3.uri("dcp")
    target = writer(run)
    for step in (1, 2):
        dcp.save(state(step), storage_writer=target)
    found = {"t": torch.zeros(10), "kept": torch.zeros(5000)}
    dcp.load(found, storage_reader=reader(run))

    assert same(found, state(2))
    with ftckpt.open(run) as opened:
        assert opened.verify() == [] and opened.components(2)["kept"].stored_bytes == 0


# --- ftckpt's own tools, and DCP's -----------------------------------------------------------------


def training_state() -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = [{"lr": 0.1, "names": ["0.weight"]}, {"lr": 0.2, "names": []}]
    return model, {
        "model": model.state_dict(),
        "optim": {"groups": groups, "step": torch.tensor(3.0)},
        "n": 7,
    }


def test_what_the_bridge_wrote_is_a_run_like_any_other(tmp_path, capsys):
    model, saved = training_state()
    target = writer(tmp_path)
    dcp.save(saved, storage_writer=target)
    saved["optim"]["groups"][1]["lr"] = 0.3
    with torch.no_grad():
        model[0].bias += 1
    dcp.save(saved, storage_writer=target)

    with ftckpt.open(tmp_path) as run:
        assert run.verify() == []
        assert sorted(run.components()) == ["ftckpt", "model", "n", "optim"]
        assert same(run.tensor("model.0.weight"), saved["model"]["0.weight"])
        assert run.value("optim")["tree"]["groups"] == [
            {"lr": 0.1, "names": ["0.weight"]},
            {"lr": 0.3, "names": []},
        ]
    blank = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    found = {
        "model": dict(blank.state_dict()),
        "optim": {"groups": [{}, {}], "step": torch.tensor(0.0)},
        "n": 0,
    }
    ftckpt.restore(tmp_path, found, step=2)
    assert same(found, {**saved, "model": dict(saved["model"])})
    assert same(dict(blank.state_dict()), dict(model.state_dict())), "state_dict() shares the module's memory"

    capsys.readouterr()
    for command in (["show", tmp_path, "--leaves"], ["verify", tmp_path], ["ls", tmp_path]):
        assert main([*map(str, command)]) == 0
    assert "model.0.weight" in capsys.readouterr().out
    assert main(["diff", f"{tmp_path}@1", f"{tmp_path}@2", "--json"]) == 1
    differing = json.loads(capsys.readouterr().out)
    assert {leaf["name"] for leaf in differing["leaves"]} == {"model.0.bias", "optim"}
    assert main(["copy", str(tmp_path), str(tmp_path / "copy")]) == 0
    assert steps(tmp_path / "copy") == steps(tmp_path)
    assert main(["fork", str(tmp_path), str(tmp_path / "fork"), "--step", "1"]) == 0
    again = {"n": 0, "model": {"0.bias": torch.zeros(3)}}
    dcp.load(again, storage_reader=reader(tmp_path / "fork"))
    assert again["n"] == 7 and same(again["model"]["0.bias"], saved["model"]["0.bias"] - 1)
    collect(LocalStore(str(tmp_path)), Keep(last=1), intent_id="by-hand")
    assert steps(tmp_path) == [(2, 1)]


def test_what_dcp_saved_is_exported_and_a_folder_of_dcp_is_imported(tmp_path):
    """Out as DCP's own folder and as safetensors; and DCP loads a run that was imported from its folder."""
    _, saved = training_state()
    dcp.save(saved, storage_writer=writer(tmp_path / "run"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "folder"), "--format", "dcp"]) == 0
    one = ["--component", "model", "--format", "safetensors"]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "model.safetensors"), *one]) == 0
    assert main(["import", str(tmp_path / "folder"), str(tmp_path / "again"), "--format", "dcp"]) == 0

    weights = dict(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)).state_dict())
    for source in (FileSystemReader(tmp_path / "folder"), reader(tmp_path / "again")):
        found = {
            "model": {key: torch.zeros_like(t) for key, t in weights.items()},
            "optim": {"step": torch.tensor(0.0)},
        }
        dcp.load(found, storage_reader=source)
        assert same(found["model"], dict(saved["model"])) and found["optim"]["step"] == 3
    exported = load_file(tmp_path / "model.safetensors")
    assert same(dict(sorted(exported.items())), dict(sorted(saved["model"].items())))


def test_a_session_goes_on_from_what_dcp_saved(tmp_path):
    model, saved = training_state()
    dcp.save(saved, storage_writer=writer(tmp_path))
    blank = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    live = {"model": dict(blank.state_dict()), "optim": {"groups": [], "step": torch.tensor(0.0)}, "n": 0}

    with ftckpt.Session(tmp_path, live, events=silent) as session:
        assert session.restored.step == 1 and session.attempt == 2
        session.save(2)

    assert live["n"] == 7 and live["optim"]["groups"] == saved["optim"]["groups"]
    assert same(dict(blank.state_dict()), dict(model.state_dict()))
    assert steps(tmp_path)[0] == (2, 2)


def test_dcps_own_tools_read_a_run(tmp_path):
    _, saved = training_state()
    dcp.save(saved, storage_writer=writer(tmp_path))

    metadata = reader(tmp_path).read_metadata()
    whole = _load_state_dict_from_keys(storage_reader=reader(tmp_path))
    part = _load_state_dict_from_keys({"model"}, storage_reader=reader(tmp_path))

    weight = metadata.state_dict_metadata["model.0.weight"]
    assert (weight.size, weight.properties.dtype) == (torch.Size([3, 4]), torch.float32)
    assert metadata.planner_data["optim.groups.0.lr"] == ("optim", "groups", 0, "lr")
    assert metadata.version == "1.0.0"
    assert same(whole, {**saved, "model": dict(saved["model"])})
    assert same(part, {"model": dict(saved["model"])})


def test_a_flat_state_dict_of_a_module_comes_back_flat(tmp_path):
    model, _ = training_state()
    saved = dict(model.state_dict())
    dcp.save(saved, storage_writer=writer(tmp_path))

    assert same(_load_state_dict_from_keys(storage_reader=reader(tmp_path)), saved)
    with ftckpt.open(tmp_path) as run:
        assert "0.weight" in run.leaves()


def test_dcp_loads_what_a_session_saved_under_the_names_of_its_leaves(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optim = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(4)).sum().backward()
    optim.step()
    buffer = {"cursor": 5, "items": [1, 2], "scores": torch.arange(3.0), 7: "seven"}
    own = {"seed": 1}
    live = {"actor": model, "optim": optim, "buffer": buffer, "mine": ftckpt.PerRank(own), "t": torch.ones(2)}
    with ftckpt.Session(tmp_path, live, events=silent) as session:
        session.save(1)

    blank = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    moments = {"exp_avg": torch.zeros(3, 4), "step": torch.tensor(0.0)}
    found = {
        "actor": blank.state_dict(),
        "optim": {"state": {"actor.0.weight": moments}, "param_groups": [{"lr": 0.0}]},
        "buffer": {"cursor": 0, "items": [], "scores": torch.zeros(3), "7": ""},
        "t": torch.zeros(2),
    }
    dcp.load(found, storage_reader=reader(tmp_path, 1))

    assert same(dict(blank.state_dict()), dict(model.state_dict()))
    assert same(moments["exp_avg"], optim.state[model[0].weight]["exp_avg"])
    assert moments["step"] == 1 and found["optim"]["param_groups"] == [{"lr": 0.25}]
    assert same(found["buffer"], {"cursor": 5, "items": [1, 2], "scores": torch.arange(3.0), "7": "seven"})
    assert same(found["t"], torch.ones(2))
    assert not [key for key in reader(tmp_path).read_metadata().state_dict_metadata if key.startswith("mine")]


def test_the_programs_of_the_how_to_page_do_what_it_says(tmp_path):
    text = Path("docs/howto/dcp.md").read_text(encoding="utf-8")
    save, load, restore = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    run = tmp_path / "run"

    def play(program: str, model: nn.Module, loader: object) -> None:
        code = program.replace("s3://bucket/runs/grpo-1", str(run))
        exec(code, {"model": model, "loader": loader, "ftckpt": ftckpt, "dcp": dcp})

    model, loader = nn.Linear(3, 2), Loader()
    loader.state = {"epoch": 3, "sampler": {"seen": 17, "rng": b""}, "workers": [{"at": 5}]}
    play(save, model, loader)
    assert steps(run) == [(400, 1)]

    loaded, other = nn.Linear(3, 2), Loader()
    play(load, loaded, other)
    assert same(dict(loaded.state_dict()), dict(model.state_dict())) and other.state == loader.state
    restored = nn.Linear(3, 2)
    play(restore, restored, None)
    assert same(dict(restored.state_dict()), dict(model.state_dict()))


# --- many ranks -----------------------------------------------------------------------------------

KINDS = ["plain1", "fsdp2", "fsdp3", "fsdp4"]
many_ranks = pytest.mark.timeout(420)


@dataclass(frozen=True, slots=True)
class Played:
    """What the ranks of the gang printed, and where they saved."""

    outputs: tuple[str, ...]
    folder: Path


@pytest.fixture(scope="module")
def played(tmp_path_factory, worker_id) -> Played:
    """One gang runs for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    told, folder = shared / "dcp-outputs.json", shared / "dcp-jobs"
    with (shared / "dcp-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not told.exists():
            gang = run_ranks("tests/ranks/dcp_jobs.py", 4, folder, timeout_s=400)
            assert not gang.timed_out and gang.exit_codes == (0, -9, 0, -9), gang.report()
            told.write_text(json.dumps(gang.outputs))
    return Played(tuple(json.loads(told.read_text())), folder)


@many_ranks
@pytest.mark.parametrize("saved", KINDS)
def test_what_n_ranks_saved_m_ranks_load_bit_for_bit(played, saved):
    """FSDP2 with uneven shards, AdamW's state, plain values, and values of single ranks (G5); saved by
    ``save``, or by ``async_save`` while training went on."""
    for to in KINDS:
        assert f"ok {saved} to {to}\n" in played.outputs[0]


@many_ranks
@pytest.mark.parametrize("world", [1, 3, 4])
def test_shards_of_two_dimensions_keep_their_places(played, world):
    """G1, G3, G4"""
    assert f"ok meshes to {world}\n" in played.outputs[0]


@many_ranks
def test_the_second_reader_reads_what_four_ranks_saved_by_the_format_page_alone(played):
    run = independent_reader.Run(played.folder / "mesh")
    step = run.read(run.lineage()[0])

    leaf = step.leaves["mesh.5x7"]
    assert leaf.data == torch.arange(35, dtype=torch.float32).numpy().tobytes()
    notes = step.trees["ftckpt"]["tree"]["dcp"]
    assert notes["tensors"]["mesh.5x7"] == (leaf.dtype, leaf.shape) == ("float32", (5, 7))
    assert notes["planner"]["rows.0.weight"] == ("rows", "0.weight")
    assert step.trees["rows"] == {"kind": "tree", "tree": {"0.weight": ("rows.0.weight",)}}


@many_ranks
@pytest.mark.parametrize(
    "case", ["one rank fails", "other settings", "own disks", "coordinator chooses", "another process"]
)
def test_two_ranks_fail_together_and_agree(played, case):
    """A11, C2, G9"""
    assert all(f"ok {case}\n" in output for output in played.outputs[:2])


@many_ranks
@pytest.mark.parametrize(("name", "victim", "survivor"), [("killed share", 3, 2), ("killed commit", 1, 0)])
def test_a_rank_that_is_killed_in_mid_save_leaves_the_step_before(played, tmp_path, name, victim, survivor):
    """The survivor hears of it from DCP. The next job goes on from step 1 and saves step 2 again; of the first
    try nothing counts, and the collector takes it away."""
    for rank in (victim, survivor):
        assert f"saved {name} 1\n" in played.outputs[rank] and f"saved {name} 2" not in played.outputs[rank]
    assert f"heard of {name}" in played.outputs[survivor]
    run = Path(shutil.copytree(played.folder / name, tmp_path / "run"))
    left = {path for path in run.rglob("*/000001/000000000002/*") if path.is_file()}
    assert left and steps(run) == [(1, 1)]

    found = {"t": torch.zeros(64), "n": 0}
    dcp.load(found, storage_reader=reader(run))
    assert found["n"] == 1 and same(found["t"], torch.ones(64))
    dcp.save({"t": torch.full((64,), 5.0), "n": 5}, storage_writer=writer(run))

    assert steps(run) == [(2, 2), (1, 1)]
    dcp.load(found, storage_reader=reader(run))
    assert found["n"] == 5 and same(found["t"], torch.full((64,), 5.0))
    for intent in ("first", "second"):  # the first settles the position of the dead
        collect(LocalStore(str(run)), Keep(), intent_id=intent)
    assert not any(path.exists() for path in left)
    with ftckpt.open(run) as opened:
        assert opened.verify() == []
