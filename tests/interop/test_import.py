"""Imports of real checkpoints, and of broken and hostile ones."""

from __future__ import annotations

import io
import json
import pickle  # noqa: TID251 - to make what must be refused
import re
import shlex
import shutil
import tracemalloc
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from transformers import AutoModelForCausalLM

import ftckpt
from ftckpt.chaos.faults.store import Crash, FaultyStore
from ftckpt.cli import main
from ftckpt.compare import compare
from ftckpt.errors import (
    ForeignDamaged,
    ForeignError,
    ForeignUnsafe,
    NotRepresentable,
    NotSameRun,
    ObjectNotFound,
    RunNotFound,
    SettingsError,
)
from ftckpt.events import silent
from ftckpt.interop import export_run, hf, import_run
from ftckpt.interop.api import Array, parts
from ftckpt.interop.hf import SafetensorsSource
from ftckpt.interop.importing import import_checkpoint
from ftckpt.interop.torch_metadata import read_metadata
from ftckpt.session import Session
from ftckpt.store import open_files, open_store
from tests.interop.world import SHARD_BYTES, same, tiny, train, train_step, weights

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass(frozen=True)
class Trained:
    run: Path
    state: dict[str, Any]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    state = train(folder / "run", tiny())
    return Trained(folder / "run", state, weights(state["actor"]))


@pytest.fixture
def folder(trained, tmp_path) -> Path:
    """What save_pretrained writes, in shards."""
    trained.state["actor"].save_pretrained(tmp_path / "hf", max_shard_size=SHARD_BYTES)
    return tmp_path / "hf"


def restored(run: Path, component: str = "actor") -> dict[str, torch.Tensor]:
    model = tiny(seed=9)
    ftckpt.restore(run, {component: model})
    return weights(model)


# --- each format ----------------------------------------------------------------------------------


def test_a_folder_of_save_pretrained_becomes_a_run_that_the_tied_model_restores(trained, folder, tmp_path):
    done = import_run(folder, tmp_path / "run", format="hf", component="actor")

    assert same(restored(tmp_path / "run"), trained.weights)
    assert done.components == {"actor": "module"} and done.tensors == 20
    with ftckpt.open(tmp_path / "run") as run:
        assert run.verify() == [] and [c.step for c in run.commits()] == [0]
        ((claim, start),) = run.attempts()
        assert claim.settings["imported_from"].startswith("hf file://") and start.parent is None


def test_one_file_that_holds_a_tied_tensor_twice_fits_the_tied_model_and_the_other(trained, tmp_path):
    save_file(trained.weights, tmp_path / "a.safetensors")

    done = import_run(tmp_path / "a.safetensors", tmp_path / "run", format="hf", component="actor")

    assert done.tensors == 20 and len(trained.weights) == 21
    assert same(restored(tmp_path / "run"), trained.weights)
    apart = tiny(tied=False)
    ftckpt.restore(tmp_path / "run", {"actor": apart})
    assert same(weights(apart), trained.weights)


@pytest.mark.parametrize("shared", [True, False])
def test_tensors_that_were_one_in_a_run_come_back_from_its_file_as_one(tmp_path, shared):
    """The file has them twice, and a note, which is believed if they still are equal."""

    def module() -> torch.nn.ModuleDict:
        made = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 5), "b": torch.nn.Linear(3, 5)})
        made["b"].bias = made["a"].bias
        return made

    model = module()
    with Session(tmp_path / "old", {"m": model}, events=silent):
        pass
    export_run(tmp_path / "old", tmp_path / "a.safetensors", format="safetensors", component="m")
    if not shared:  # somebody changed one of them; they are the last in the file, or the first
        body = (tmp_path / "a.safetensors").read_bytes()
        (tmp_path / "a.safetensors").write_bytes(
            body.replace(raw := model["a"].bias.detach().numpy().tobytes(), bytes(len(raw)), 1)
        )

    done = import_run(tmp_path / "a.safetensors", tmp_path / "run", format="hf", component="m")

    assert done.tensors == (3 if shared else 4)
    if shared:
        ftckpt.restore(tmp_path / "run", {"m": (again := module())})
        assert same(weights(again), weights(model))


def test_tensors_that_are_merely_equal_stay_apart(tmp_path):
    """Of a norm and a bias that one training step made equal nothing says that they are one tensor."""
    held = {"embed_tokens.weight": torch.ones(4, 8), "lm_head.weight": torch.ones(4, 8)}
    apart = {"norm.bias": torch.full((8,), 0.25), "dense.bias": torch.full((8,), 0.25)}
    save_file(held | apart, tmp_path / "a.safetensors")

    done = import_run(tmp_path / "a.safetensors", tmp_path / "run", format="hf", component="m")

    assert done.tensors == 3
    with ftckpt.open(tmp_path / "run") as run:
        tree = run.value("m", 0)["tree"]
    assert tree["norm.bias"] != tree["dense.bias"]
    assert tree["embed_tokens.weight"] == tree["lm_head.weight"]


def test_a_file_of_torch_save_brings_tensors_of_any_strides_ties_and_plain_values(trained, tmp_path):
    base = torch.arange(24.0).reshape(4, 6)
    held = {
        "actor": trained.state["actor"].state_dict(),
        "rest": OrderedDict(turned=base.t(), part=base[1:3, 2:5], again=base.t(), epoch=3, name=("x", None)),
    }
    torch.save(held, tmp_path / "x.pt")  # noqa: TID251

    done = import_run(tmp_path / "x.pt", tmp_path / "run", format="torch", step=7)

    assert done.components == {"actor": "module", "rest": "tree"}
    assert same(restored(tmp_path / "run"), trained.weights)
    state = {"rest": {}}
    assert ftckpt.restore(tmp_path / "run", state).step == 7
    rest = state["rest"]
    assert torch.equal(rest["turned"], base.t()) and torch.equal(rest["part"], base[1:3, 2:5])
    assert rest["turned"] is not None and (rest["epoch"], rest["name"]) == (3, ("x", None))


def test_a_dcp_folder_with_optimizer_becomes_a_run_that_a_session_goes_on_with(trained, tmp_path):
    model, optim = trained.state["actor"], trained.state["optim"]
    held = {
        "actor": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optim),
        "buffer": trained.state["buffer"],
    }
    dcp.save(held, checkpoint_id=tmp_path / "dcp")

    done = import_run(tmp_path / "dcp", tmp_path / "run", format="dcp", step=1)

    assert done.components == {"actor": "module", "optim": "optimizer", "buffer": "tree"}
    runs = []
    for run in (tmp_path / "run", shutil.copytree(trained.run, tmp_path / "copy")):
        other = tiny(seed=3)
        state = {"actor": other, "optim": torch.optim.AdamW(other.parameters()), "buffer": {}}
        with Session(run, state, save_every=None, events=silent) as ckpt:
            assert ckpt.restored.step == 1
            for _ in ckpt.steps(until=2):
                train_step(other, state["optim"])
        runs.append(weights(other))
        assert state["buffer"]["names"] == ["a", None, 2.5]
    assert same(*runs)


def test_a_dcp_export_of_a_run_comes_back_as_the_same_step(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("ftckpt.interop.torch_folder.ITEM_BYTES", 4000)
    export_run(trained.run, tmp_path / "dcp", format="dcp")

    import_run(tmp_path / "dcp", tmp_path / "run", format="dcp", step=1)

    with ftckpt.open(trained.run) as a, ftckpt.open(tmp_path / "run") as b:
        found = compare((a.store, a.commit(1)), (b.store, b.commit(1)))
        assert b.value("buffer", 1)["tree"]["names"] == ["a", None, 2.5]
    tensors = [diff.name for diff in found.leaves if "." in diff.name.partition("@")[0]]
    assert tensors == [] and {c.name for c in found.components if c.equal} == {"actor", "buffer", "optim"}


def orbax(folder: Path, tree: dict[str, Any], *, zarr3: bool = False, ocdbt: bool = True) -> Path:
    """A checkpoint as Orbax lays it out: arrays through TensorStore, and ``_METADATA``."""
    folder.mkdir(parents=True)
    entries, strings = {}, {}
    for path, value in tree.items():
        name = ".".join(map(str, path))
        kind = {str: "string", int: "scalar", float: "scalar", type(None): "None"}.get(
            type(value), "jax.Array"
        )
        keys = [{"key": str(key), "key_type": 1 if type(key) is int else 2} for key in path]
        described = {"value_type": kind, "skip_deserialize": value is None}
        entries[str(path)] = {"key_metadata": keys, "value_metadata": described}
        if kind == "string":
            strings[name] = value
        elif value is not None:
            _write_array(folder, name, np.asarray(value), zarr3=zarr3, ocdbt=ocdbt)
    if strings:
        (folder / "_strings.json").write_text(json.dumps(strings))
    about = {"tree_metadata": entries, "use_ocdbt": ocdbt, "use_zarr3": zarr3}
    (folder / "_METADATA").write_text(json.dumps(about))
    return folder


def _write_array(folder: Path, name: str, array: np.ndarray, *, zarr3: bool, ocdbt: bool) -> None:
    base = {"driver": "file", "path": f"{folder}/"}
    kvstore = (
        {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        if ocdbt
        else {**base, "path": f"{folder}/{name}/"}
    )
    chunks = [max(1, n // 2) for n in array.shape]
    grid = (
        {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}}}
        if zarr3
        else {"chunks": chunks}
    )
    spec = {
        "driver": "zarr3" if zarr3 else "zarr",
        "kvstore": kvstore,
        "metadata": {"shape": array.shape, **grid},
    }
    opened = ts.open(
        {**spec, "store_data_equal_to_fill_value": True}, create=True, dtype=array.dtype
    ).result()
    opened.write(array).result()


TREE = {
    ("params", "dense", "kernel"): np.arange(35, dtype=np.float32).reshape(5, 7),
    ("params", "dense", "bias"): np.zeros(7, ts.bfloat16.numpy_dtype),
    ("opt", 0, "count"): np.asarray(3),
    ("opt", 1): None,
    ("step",): 12,
    ("lr",): 0.5,
    ("name",): "run-1",
}


@pytest.mark.parametrize(("zarr3", "ocdbt"), [(False, True), (True, True), (False, False)])
def test_a_tree_of_orbax_comes_with_its_arrays_lists_scalars_and_strings(tmp_path, zarr3, ocdbt):
    orbax(tmp_path / "100" / "default", TREE, zarr3=zarr3, ocdbt=ocdbt)

    import_run(tmp_path / "100", tmp_path / "run", format="orbax", component="flax", step=100)

    state = {"flax": {}}
    ftckpt.restore(tmp_path / "run", state)
    found = state["flax"]
    assert torch.equal(found["params"]["dense"]["kernel"], torch.arange(35.0).reshape(5, 7))
    assert found["params"]["dense"]["bias"].dtype == torch.bfloat16
    assert found["opt"][0]["count"].item() == 3 and found["opt"][1] is None
    assert (found["step"], found["lr"], found["name"]) == (12, 0.5, "run-1")


def test_from_a_bucket_to_a_bucket(trained, folder, s3, tmp_path):
    for path in folder.iterdir():
        open_files(s3.uri("import/hf")).put(path.name, path.read_bytes())

    import_run(s3.uri("import/hf"), s3.uri("import/run"), format="hf", component="actor")

    assert same(restored(s3.uri("import/run")), trained.weights)


# --- code in checkpoints --------------------------------------------------------------------------


class Bomb:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def _torch_bomb(where: Path, bomb: Bomb) -> Path:
    torch.save({"w": torch.ones(2), "x": bomb}, where / "x.pt")  # noqa: TID251
    return where / "x.pt"


def _dcp_bomb_in_metadata(where: Path, bomb: Bomb) -> Path:
    dcp.save({"w": torch.ones(2)}, checkpoint_id=where / "dcp")
    (where / "dcp" / ".metadata").write_bytes(pickle.dumps({"a": bomb}))
    return where / "dcp"


def _dcp_bomb_in_a_value(where: Path, bomb: Bomb) -> Path:
    dcp.save({"w": torch.ones(2), "x": bomb}, checkpoint_id=where / "dcp")
    return where / "dcp"


@pytest.mark.parametrize("made", [_torch_bomb, _dcp_bomb_in_metadata, _dcp_bomb_in_a_value])
def test_code_in_a_checkpoint_is_refused_by_name_and_never_run(tmp_path, made):
    source = made(tmp_path, Bomb(tmp_path / "ran"))

    with pytest.raises(ForeignUnsafe, match=r"pathlib|getattr|Path|Bomb") as refused:
        import_run(source, tmp_path / "run", format="torch" if source.suffix else "dcp")

    assert refused.value.named
    assert not (tmp_path / "ran").exists() and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "named",
    [
        "os.system",
        "builtins.eval",
        "torch.load",
        "torch.hub.load",
        "collections.Counter",
        "torch._C._jit_init",
    ],
)
def test_the_metadata_of_torch_may_name_nothing_but_what_torch_puts_there(named):
    module, _, name = named.rpartition(".")
    body = f"c{module}\n{name}\n(S'x'\ntR.".encode()

    with pytest.raises(ForeignUnsafe, match=named.replace(".", r"\.")):
        read_metadata(body, "here")


@pytest.mark.parametrize(
    "body",
    [
        b"]r\xff\xff\xff\x7f.",  # a place in the memo far beyond the others
        b"]p4294967295\n.",
        b"\x8e\xff\xff\xff\xff\x0f\x00\x00\x00.",  # bytes that are not there
        b"\x80\x04\x95\xff\xff\xff\xff\x0f\x00\x00\x00.",  # a frame that is not there
    ],
)
def test_a_metadata_that_asks_for_memory_is_refused_without_taking_it(body):
    tracemalloc.start()
    with pytest.raises(ForeignDamaged):
        read_metadata(body, "here")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 1 << 20


@settings(max_examples=150)
@given(st.data())
def test_a_damaged_metadata_is_refused_and_nothing_else(metadata_bytes, data):
    at = data.draw(st.integers(0, len(metadata_bytes) - 1))
    cut = data.draw(st.booleans())
    body = bytearray(metadata_bytes[:at] if cut else metadata_bytes)
    if not cut:
        body[at] ^= data.draw(st.integers(1, 255))

    with suppress(ForeignError):
        read_metadata(bytes(body), "here")


@pytest.fixture(scope="module")
def metadata_bytes(tmp_path_factory) -> bytes:
    where = tmp_path_factory.mktemp("metadata")
    dcp.save({"w": torch.ones(2, 3), "n": {"epoch": 3}}, checkpoint_id=where)
    return (where / ".metadata").read_bytes()


# --- broken checkpoints ---------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / hf.INDEX).read_text())
        change(index["weight_map"])
        (folder / hf.INDEX).write_text(json.dumps(index))

    return edit


SHARD = "model-00002-of-"


def _shard(folder: Path) -> Path:
    return next(folder.glob(f"{SHARD}*"))


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda folder: _cut(_shard(folder)), "cut off"),
        (lambda folder: _shard(folder).write_bytes(b"abc"), "cut off, or no safetensors"),
        (lambda folder: _shard(folder).unlink(), "names this shard, and it is absent"),
        (lambda folder: (folder / hf.INDEX).unlink(), "nobody knows whether that is all"),
        (lambda folder: (folder / hf.INDEX).write_text("{}"), "does not say which tensor"),
        (_edit_index(lambda names: names.update(ghost=min(names.values()))), "names ghost, which is not in"),
        (_edit_index(lambda names: names.pop(max(names))), "which the index does not say"),
        (_edit_index(lambda names: names.update(ghost="../x.safetensors")), "a shard that cannot be"),
    ],
)
def test_a_broken_folder_is_refused_before_anything_is_written(folder, tmp_path, breaks, says):
    breaks(folder)

    with pytest.raises(ForeignDamaged, match=says):
        import_run(folder, tmp_path / "run", format="hf")

    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("header", "error", "says"),
    [
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, ForeignDamaged, "would not fill"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}, ForeignDamaged, "cannot be"),
        (
            {"w": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}},
            ForeignDamaged,
            "cut off",
        ),
        ({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}}, NotRepresentable, "F4"),
        ({"w": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}, ForeignDamaged, "cannot be"),
        ({"w": {"dtype": None, "shape": [2], "data_offsets": [0, 8]}}, ForeignDamaged, "cannot be"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, ForeignDamaged, "do not follow"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, ForeignDamaged, "tensors end at"),
        ({"w": 3}, ForeignDamaged, "cannot be"),
        ([1], ForeignDamaged, "no JSON object"),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, header, error, says):
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    with pytest.raises(error, match=says):
        import_run(tmp_path / "a.safetensors", tmp_path / "run", format="hf")


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda folder: (folder / ".metadata").unlink(), "a save that did not end"),
        (lambda folder: _cut(folder / ".metadata"), "does not read"),
        (lambda folder: _cut(folder / "__0_0.distcp"), "cut off"),
        (lambda folder: (folder / "__0_0.distcp").unlink(), "it is absent"),
        (lambda folder: (folder / ".metadata").write_bytes(pickle.dumps([1])), "not the metadata"),
    ],
)
def test_a_broken_dcp_folder_is_refused_before_anything_is_written(tmp_path, breaks, says):
    dcp.save({"w": torch.ones(200), "n": 3}, checkpoint_id=tmp_path / "dcp")
    breaks(tmp_path / "dcp")

    with pytest.raises(ForeignDamaged, match=says):
        import_run(tmp_path / "dcp", tmp_path / "run", format="dcp")

    assert not (tmp_path / "run").exists()


def test_bytes_of_a_dcp_item_that_are_no_tensor_leave_no_run(tmp_path):
    dcp.save({"w": torch.ones(200)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / "__0_0.distcp"
    path.write_bytes(bytes(path.stat().st_size))

    with pytest.raises(ForeignDamaged, match="an item of w"):
        import_run(tmp_path / "dcp", tmp_path / "run", format="dcp", component="m")

    with pytest.raises(RunNotFound):
        ftckpt.open(tmp_path / "run")


@pytest.mark.parametrize("breaks", [_cut, lambda path: path.write_bytes(b"x" * 50)])
def test_a_broken_file_of_torch_is_refused(tmp_path, breaks):
    torch.save({"w": torch.ones(200)}, tmp_path / "x.pt")  # noqa: TID251
    breaks(tmp_path / "x.pt")

    with pytest.raises(ForeignDamaged, match="cut off, or written by a torch older"):
        import_run(tmp_path / "x.pt", tmp_path / "run", format="torch")


def test_a_file_of_torch_in_another_byte_order_is_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")  # noqa: TID251
    body = io.BytesIO()
    with zipfile.ZipFile(tmp_path / "x.pt") as old, zipfile.ZipFile(body, "w") as new:
        for name in old.namelist():
            new.writestr(name, b"big" if name.endswith("byteorder") else old.read(name))
    (tmp_path / "x.pt").write_bytes(body.getvalue())

    with pytest.raises(ForeignDamaged, match="byte order"):
        import_run(tmp_path / "x.pt", tmp_path / "run", format="torch")


@pytest.mark.parametrize(
    ("breaks", "says"),
    [
        (lambda folder: (folder / "_METADATA").unlink(), "was not finished"),
        (lambda folder: (folder / "_METADATA").write_text("{"), "cannot be"),
        (lambda folder: (folder / "manifest.ocdbt").unlink(), "did not end"),
        (lambda folder: shutil.rmtree(folder / "d"), "step|params|opt"),
    ],
)
def test_a_broken_checkpoint_of_orbax_is_refused(tmp_path, breaks, says):
    orbax(tmp_path / "o", TREE)
    breaks(tmp_path / "o")

    with pytest.raises(ForeignDamaged, match=says):
        import_run(tmp_path / "o", tmp_path / "run", format="orbax", component="flax")

    with pytest.raises(RunNotFound):
        ftckpt.open(tmp_path / "run")


def test_what_a_run_cannot_hold_is_refused_by_name(tmp_path):
    torch.save({"m": {"w": torch.ones(2, 2).to_sparse()}}, tmp_path / "x.pt")  # noqa: TID251
    with pytest.raises(NotRepresentable, match=r"m\.w"):
        import_run(tmp_path / "x.pt", tmp_path / "run", format="torch")
    torch.save({"rng": {"x": 1}}, tmp_path / "y.pt")  # noqa: TID251
    with pytest.raises(NotRepresentable, match="--component"):
        import_run(tmp_path / "y.pt", tmp_path / "run", format="torch")
    with pytest.raises(SettingsError, match="hf, torch, dcp, orbax"):
        import_run(tmp_path / "y.pt", tmp_path / "run", format="zarr")
    with pytest.raises(ObjectNotFound, match="holds nothing"):
        import_run(tmp_path / "nowhere", tmp_path / "run", format="hf")


# --- the new run ----------------------------------------------------------------------------------


def test_whoever_dies_at_any_call_leaves_no_run_or_a_whole_one_and_the_next_try_completes_it(trained, folder):
    def bring(store: Any) -> None:
        source = SafetensorsSource(open_files(folder))
        import_checkpoint(source, store, origin="here", kind="hf", component="actor")

    from ftckpt.chaos.faults.store import Fault
    from tests.protocol.test_crash_points import Meet, every_change

    counted = FaultyStore(open_store("memory://import-counted"))
    bring(counted)
    changes = sum(every_change(call) for call in counted.log)
    assert changes >= 6  # claim, start, a pack, fragment, commit, run.json
    for nth in range(1, changes + 1):
        for how in ("before", "after"):
            uri = f"memory://import-{nth}-{how}"
            with suppress(Crash):
                bring(FaultyStore(open_store(uri), [Fault(Meet(nth, how, every_change))]))
            with suppress(RunNotFound):
                assert same(restored(uri), trained.weights)
            bring(open_store(uri))
            assert same(restored(uri), trained.weights)
            with ftckpt.open(uri) as run:
                assert run.verify() == []


def test_an_address_that_holds_something_else_is_left_alone(trained, folder, tmp_path):
    import_run(folder, tmp_path / "run", format="hf", component="actor")
    import_run(folder, tmp_path / "run", format="hf", component="actor")  # the same again: nothing to do

    for other in ({"component": "critic"}, {"component": "actor", "step": 5}):
        with pytest.raises(NotSameRun, match="left alone"):
            import_run(folder, tmp_path / "run", format="hf", **other)
    with pytest.raises(NotSameRun):
        import_run(folder, shutil.copytree(trained.run, tmp_path / "copy"), format="hf")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    with pytest.raises(NotSameRun, match=r"a\.txt"):
        import_run(folder, tmp_path / "notes", format="hf")

    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["a.txt"]


def _retrained_file(where: Path, value: float) -> tuple[Path, str]:
    save_file({"a": torch.zeros(40_000), "z": torch.full((40_000,), value)}, where / "a.safetensors")
    return where / "a.safetensors", "hf"


def _retrained_dcp(where: Path, value: float) -> tuple[Path, str]:
    """Torches that gave a save no id wrote the same metadata at every step of a training."""
    metadata = where / "dcp" / ".metadata"
    before = metadata.read_bytes() if metadata.exists() else None
    shutil.rmtree(where / "dcp", ignore_errors=True)
    dcp.save({"a": torch.zeros(40_000), "z": torch.full((40_000,), value)}, checkpoint_id=where / "dcp")
    if before is not None:
        metadata.write_bytes(before)
    return where / "dcp", "dcp"


@pytest.mark.parametrize("made", [_retrained_file, _retrained_dcp])
@pytest.mark.parametrize("ended", [True, False])
def test_another_checkpoint_of_the_same_names_and_sizes_is_not_taken_for_the_one_that_is_there(
    tmp_path, made, ended
):
    """Also where the first import died before it was a run, or the second was told that it had been done."""
    source, kind = made(tmp_path, 1.0)
    import_run(source, tmp_path / "run", format=kind, component="m")
    if not ended:
        (tmp_path / "run" / "run.json").unlink()
    made(tmp_path, 2.0)

    with pytest.raises(NotSameRun, match=r"differs from this one in m\.z"):
        import_run(source, tmp_path / "run", format=kind, component="m")

    assert (tmp_path / "run" / "run.json").exists() == ended
    made(tmp_path, 1.0)
    assert import_run(source, tmp_path / "run", format=kind, component="m").tensors == 2
    with ftckpt.open(tmp_path / "run") as run:
        assert run.array("m.z")[0:3].read().result().tolist() == [1.0, 1.0, 1.0]


def test_a_run_whose_imported_step_was_collected_is_not_said_to_hold_it(folder, tmp_path):
    import_run(folder, tmp_path / "run", format="hf", component="actor")
    for path in (tmp_path / "run" / "commits").iterdir():
        path.unlink()

    with pytest.raises(NotSameRun, match="step 0 is gone"):
        import_run(folder, tmp_path / "run", format="hf", component="actor")


@given(st.lists(st.integers(0, 7), max_size=4), st.integers(1, 40))
def test_parts_of_an_array_are_contiguous_and_follow_each_other(shape, limit):
    array = Array("w", "float32", tuple(shape))

    boxes = list(parts(array, 4 * limit))

    elements = np.arange(array.numel).reshape(array.shape)
    found = [
        elements[tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))].reshape(-1)
        for box in boxes
    ]
    assert np.array_equal(np.concatenate(found), np.arange(array.numel))
    assert all(box.numel <= limit for box in boxes)


def test_the_page_about_it_does_what_it_says(trained, tmp_path, monkeypatch, capsys):
    page = (Path(__file__).parents[2] / "docs/howto/import-export.md").read_text(encoding="utf-8")
    shutil.copytree(trained.run, tmp_path / "runs" / "grpo-1")
    model = trained.state["actor"]
    model.save_pretrained(tmp_path / "base-model")
    torch.save({"actor": model.state_dict(), "epoch": 3}, tmp_path / "checkpoint.pt")  # noqa: TID251
    dcp.save({"actor": model.state_dict()}, checkpoint_id=tmp_path / "dcp-folder")
    orbax(tmp_path / "flax" / "100" / "default", TREE)
    monkeypatch.chdir(tmp_path)

    commands = [line for line in page.splitlines() if line.startswith(("ftckpt export", "ftckpt import"))]
    assert len(commands) == 8
    for command in commands:
        assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
    programs = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {"actor": tiny(seed=4)}
    exec("\n".join(programs), names)

    assert same(weights(names["actor"]), trained.weights)
    assert same(weights(AutoModelForCausalLM.from_pretrained("policy")), trained.weights)
    again = tiny(seed=5).bfloat16()
    ftckpt.restore("runs/again", {"actor": again})
    assert same(weights(again), {name: w.to(torch.bfloat16) for name, w in trained.weights.items()})
