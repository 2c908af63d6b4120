"""Exports, opened by the libraries whose formats they are."""

from __future__ import annotations

import json
import shutil
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import obstore
import pytest
import tensorstore as ts
import torch
import torch.distributed.checkpoint as dcp
import zarr
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from transformers import AutoModelForCausalLM

import ftckpt
from ftckpt.chaos.faults.store import Crash
from ftckpt.errors import (
    AlreadyExists,
    DestinationTaken,
    ForeignDamaged,
    NotRepresentable,
    ObjectDamaged,
    SettingsError,
    StateMismatch,
)
from ftckpt.events import silent
from ftckpt.interop import export_run, hf, import_run, zarr_group
from ftckpt.interop.api import MARK
from ftckpt.interop.exporting import Choice, export
from ftckpt.interop.hf import FolderSink, SingleSink
from ftckpt.interop.ties import made_by_the_model
from ftckpt.interop.torch_folder import DcpSink
from ftckpt.interop.zarr_group import ZarrSink
from ftckpt.session import Session
from ftckpt.store import Files, LocalStore, open_files
from ftckpt.store.objectstore import memory
from tests.interop.world import SHARD_BYTES, Mortal, same, tiny, train, train_step, weights
from tests.support.procs import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass(frozen=True)
class Trained:
    """A run of a tied model, and everything it held at the end."""

    run: Path
    base: Path
    state: dict[str, Any]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Trained:
    folder = tmp_path_factory.mktemp("trained")
    model = tiny()
    model.save_pretrained(folder / "base")
    (folder / "base" / "tokenizer.json").write_text("{}")
    state = train(folder / "run", model)
    return Trained(folder / "run", folder / "base", state, weights(model))


# --- hf -------------------------------------------------------------------------------------------


def test_from_pretrained_loads_a_sharded_folder_with_every_bit(trained, tmp_path):
    done = export_run(
        trained.run,
        tmp_path / "hf",
        format="hf",
        component="actor",
        config=trained.base,
        shard_bytes=SHARD_BYTES,
    )

    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert same(weights(model), trained.weights)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert {"config.json", "tokenizer.json", hf.INDEX} <= names and MARK not in names
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    assert len(shards) > 3 and all((tmp_path / "hf" / s).stat().st_size < 2 * SHARD_BYTES for s in shards)
    assert (done.step, done.components, done.left_out) == (1, ("actor",), ())


def test_a_tied_tensor_is_written_once_where_the_config_ties_it_and_else_under_each_name(trained, tmp_path):
    export_run(trained.run, tmp_path / "tied", format="hf", component="actor", config=trained.base)
    export_run(trained.run, tmp_path / "bare", format="hf", component="actor")

    assert "lm_head.weight" not in load_file(tmp_path / "tied" / hf.WHOLE)
    assert same(load_file(tmp_path / "bare" / hf.WHOLE), trained.weights)


def test_ties_that_the_config_does_not_speak_of_are_written_under_each_name(trained, tmp_path):
    """A loader makes the output embedding out of the input's, and nothing else: what is left out is random."""
    model = tiny()
    model.model.layers[1].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
    with Session(tmp_path / "run", {"actor": model}, events=silent):
        pass

    export_run(tmp_path / "run", tmp_path / "hf", format="hf", component="actor", config=trained.base)

    loaded, told = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not told["missing_keys"] and same(weights(loaded), weights(model))
    assert "lm_head.weight" not in load_file(tmp_path / "hf" / hf.WHOLE)


@pytest.mark.parametrize(
    ("names", "tied", "made"),
    [
        (["model.embed_tokens.weight", "lm_head.weight"], {"lm_head.weight": "model.embed_tokens.weight"}, 1),
        (["lm_head.weight", "wte.weight"], {"wte.weight": "lm_head.weight"}, 0),  # whichever came first
        (["embed_tokens.weight", "lm_head.weight"], {}, None),  # not tied in the run
        (["x.weight", "lm_head.weight"], {"lm_head.weight": "x.weight"}, None),
        (["embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"], {1: 0}, 1),
        (["cls.predictions.bias", "cls.predictions.decoder.bias"], {1: 0}, None),
        (["shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"], {1: 0, 2: 0}, 2),
        (["lm_head", "wte"], {1: 0}, None),
    ],
)
def test_a_loader_makes_the_output_embedding_that_is_tied_to_an_input_embedding(names, tied, made):
    spelled = {
        (names[k] if type(k) is int else k): (names[v] if type(v) is int else v) for k, v in tied.items()
    }

    assert made_by_the_model(names, spelled) == ({names[made]} if made is not None else set())


def test_another_dtype_is_rounded_as_torch_rounds_and_told_in_the_config(trained, tmp_path):
    export_run(
        trained.run, tmp_path / "hf", format="hf", component="actor", config=trained.base, dtype="bf16"
    )

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert model.dtype == torch.bfloat16
    assert same(weights(model), {name: w.to(torch.bfloat16) for name, w in trained.weights.items()})


def test_an_older_step_is_exported_as_it_was(trained, tmp_path):
    export_run(trained.run, tmp_path / "a.safetensors", format="safetensors", component="actor", step=0)

    assert same(load_file(tmp_path / "a.safetensors"), weights(tiny()))


# --- safetensors ----------------------------------------------------------------------------------


def test_one_file_holds_all_components_under_their_names(trained, tmp_path):
    done = export_run(trained.run, tmp_path / "all.safetensors", format="safetensors")

    found = load_file(tmp_path / "all.safetensors")
    assert torch.equal(found["buffer.seen"], trained.state["buffer"]["seen"])
    assert torch.equal(found["actor.lm_head.weight"], trained.weights["lm_head.weight"])
    moment = trained.state["optim"].state[trained.state["actor"].model.norm.weight]["exp_avg"]
    assert torch.equal(found["optim.state.model.norm.weight.exp_avg"], moment)
    with safe_open(tmp_path / "all.safetensors", "pt") as file:
        assert file.metadata()["ftckpt.step"] == "1"
    assert done.tensors == len(found)


def test_every_dtype_that_the_format_has_comes_through_bit_for_bit(tmp_path):
    names = [*hf.unsaid.__globals__["NAMES"]]
    state = {"s": {name: _bits(getattr(torch, name)) for name in names} | {"none": torch.empty(0, 3)}}
    with Session(tmp_path / "run", state, events=silent):
        pass

    export_run(tmp_path / "run", tmp_path / "s.safetensors", format="safetensors", component="s")

    found = load_file(tmp_path / "s.safetensors")
    for name, tensor in state["s"].items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def _bits(dtype: torch.dtype) -> torch.Tensor:
    top = 2 if dtype is torch.bool else 256
    return torch.randint(top, (3, 16), dtype=torch.uint8).view(dtype).clone()


def test_a_dtype_that_the_format_lacks_is_refused_by_the_tensors_name(tmp_path):
    with Session(tmp_path / "run", {"s": {"z": torch.zeros(2, dtype=torch.complex128)}}, events=silent):
        pass

    with pytest.raises(NotRepresentable, match=r"z: safetensors has no dtype complex128"):
        export_run(tmp_path / "run", tmp_path / "s.safetensors", format="safetensors", component="s")

    assert not (tmp_path / "s.safetensors").exists()


# --- dcp ------------------------------------------------------------------------------------------


def test_dcp_load_brings_model_optimizer_and_plain_values_and_training_goes_on_alike(trained, tmp_path):
    export_run(trained.run, tmp_path / "dcp", format="dcp")

    model = tiny(seed=7)
    optim = torch.optim.AdamW(model.parameters())
    train_step(model, optim)  # so that the optimizer has state to load into
    state = {
        "actor": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optim),
        "buffer": {"cursor": 0, "seen": torch.zeros(2, 3), "names": []},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_optimizer_state_dict(model, optim, state["optim"])

    assert same(weights(model), trained.weights)
    assert state["buffer"]["cursor"] == 3 and state["buffer"]["names"] == ["a", None, 2.5]
    assert torch.equal(state["buffer"]["seen"], trained.state["buffer"]["seen"])
    other = tiny()
    ftckpt.restore(trained.run, goes_on := {"actor": other, "optim": torch.optim.AdamW(other.parameters())})
    for one in ((model, optim), (other, goes_on["optim"])):
        train_step(*one)
    assert same(weights(model), weights(other))


@pytest.mark.slow
@pytest.mark.timeout(130)
def test_dcp_loads_one_component_without_its_name_onto_two_ranks(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("ftckpt.interop.torch_folder.ITEM_BYTES", 1024)  # many parts a tensor
    monkeypatch.setattr("ftckpt.interop.torch_folder.FILE_BYTES", 30_000)  # and several files
    export_run(trained.run, tmp_path / "dcp", format="dcp", component="actor")
    save_file(trained.weights, tmp_path / "expected")

    ranks = run_ranks(
        "tests/ranks/interop_dcp.py", 2, tmp_path / "dcp", tmp_path / "expected", timeout_s=120
    ).check()

    assert all("equal" in output for output in ranks.outputs)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 2


# --- zarr -----------------------------------------------------------------------------------------


def test_tensorstore_and_zarr_python_open_every_array(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(zarr_group, "CHUNK_BYTES", 3000)
    export_run(trained.run, tmp_path / "z", format="zarr", component="actor")

    group = zarr.open_group(tmp_path / "z", mode="r")
    assert set(group.array_keys()) == set(trained.weights)
    for name, tensor in trained.weights.items():
        assert np.array_equal(group[name][...], tensor.numpy())
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(tmp_path / "z" / name)}}
        assert np.array_equal(ts.open(spec).result().read().result(), tensor.numpy())
    assert group["lm_head.weight"].chunks == (23, 32)  # 64 rows: two whole chunks and a part of one
    assert group.attrs["ftckpt"]["step"] == "1"


def test_zarr_takes_scalars_empty_and_brain_floats_and_names_with_slashes(tmp_path):
    state = {"s": {"n": torch.tensor(3.5), "none": torch.empty(0, 4), "b/f": torch.ones(3).bfloat16()}}
    with Session(tmp_path / "run", state, events=silent):
        pass

    export_run(tmp_path / "run", tmp_path / "z", format="zarr", component="s")

    def opened(name: str) -> Any:
        kvstore = {"driver": "file", "path": f"{tmp_path}/z/{zarr_group.folder(name)}/"}
        return ts.open({"driver": "zarr3", "kvstore": kvstore}).result()

    assert float(opened("n").read().result()) == 3.5 and opened("none").shape == (0, 4)
    assert opened("b/f").dtype.name == "bfloat16" and opened("b/f").read().result().tolist() == [1, 1, 1]


def test_a_flipped_bit_of_a_zarr_chunk_is_found_by_its_readers(trained, tmp_path):
    export_run(trained.run, tmp_path / "z", format="zarr", component="actor")
    chunk = tmp_path / "z" / "model.norm.weight" / "c" / "0"
    body = bytearray(chunk.read_bytes())
    body[3] ^= 1
    chunk.write_bytes(body)

    with pytest.raises(ValueError, match="checksum"):
        zarr.open_array(tmp_path / "z" / "model.norm.weight", mode="r")[...]


# --- what is refused ------------------------------------------------------------------------------


def test_hf_wants_one_model_and_says_which_components_there_are(trained, tmp_path):
    with pytest.raises(NotRepresentable, match="actor, buffer, optim"):
        export_run(trained.run, tmp_path / "hf", format="hf")
    with pytest.raises(StateMismatch, match="actor, buffer, optim"):
        export_run(trained.run, tmp_path / "hf", format="hf", component="policy")
    assert not (tmp_path / "hf").exists()


def test_settings_without_meaning_are_refused(trained, tmp_path):
    with pytest.raises(SettingsError, match="config"):
        export_run(trained.run, tmp_path / "x", format="dcp", config=trained.base)
    with pytest.raises(SettingsError, match="hf, safetensors, dcp, zarr"):
        export_run(trained.run, tmp_path / "x", format="onnx")
    with pytest.raises(NotRepresentable, match="bf16"):
        export_run(trained.run, tmp_path / "x", format="dcp", dtype="int3")
    assert not (tmp_path / "x").exists()


def test_what_is_there_is_left_alone_unless_it_is_to_be_overwritten(trained, tmp_path):
    dest = tmp_path / "hf"
    export_run(trained.run, dest, format="hf", component="actor", shard_bytes=SHARD_BYTES)
    (dest / "README.md").write_text("mine")
    before = {path.name: path.read_bytes() for path in dest.iterdir()}

    with pytest.raises(DestinationTaken, match="--overwrite") as refused:
        export_run(trained.run, dest, format="hf", component="actor")
    assert isinstance(refused.value, FileExistsError) and not isinstance(refused.value, AlreadyExists)
    assert before == {path.name: path.read_bytes() for path in dest.iterdir()}

    export_run(trained.run, dest, format="hf", component="actor", overwrite=True)
    assert sorted(path.name for path in dest.iterdir()) == ["README.md", hf.WHOLE]
    assert same(load_file(dest / hf.WHOLE), trained.weights)


def test_a_file_that_is_there_is_replaced_whole_or_not_at_all(trained, tmp_path):
    (tmp_path / "beside.txt").write_text("mine")
    dest = tmp_path / "a.safetensors"
    dest.write_text("older")

    with pytest.raises(DestinationTaken):
        export_run(trained.run, dest, format="safetensors")
    assert dest.read_text() == "older"
    export_run(trained.run, dest, format="safetensors", component="actor", overwrite=True)

    assert same(load_file(dest), trained.weights)


def _bytes(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_config_that_cannot_be_used_is_refused_before_anything_is_removed(trained, tmp_path):
    dest = tmp_path / "hf"
    export_run(trained.run, dest, format="hf", component="actor", config=trained.base)
    (tmp_path / "same").symlink_to(dest)
    (tmp_path / "empty").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "config.json").write_text("{")
    before = _bytes(dest)

    for config, error in [
        (dest, SettingsError),
        (tmp_path / "same", SettingsError),
        (tmp_path / "empty", ForeignDamaged),
        (tmp_path / "torn", ForeignDamaged),
    ]:
        with pytest.raises(error, match="nothing was changed"):
            export_run(trained.run, dest, format="hf", component="actor", config=config, overwrite=True)
        assert _bytes(dest) == before


def test_overwriting_a_folder_of_hf_leaves_everything_but_weights_and_what_loaders_read(trained, tmp_path):
    base = shutil.copytree(trained.base, tmp_path / "base")
    (base / "README.md").write_text("of the base")
    (base / "merges.txt").write_text("new")
    dest = tmp_path / "hf"
    export_run(trained.run, dest, format="hf", component="actor", shard_bytes=SHARD_BYTES)
    mine = {"README.md": b"mine", "adapter.safetensors": b"mine", "model-ema.safetensors": b"mine"}
    for name, body in {**mine, "merges.txt": b"old"}.items():
        (dest / name).write_bytes(body)

    export_run(trained.run, dest, format="hf", component="actor", config=base, overwrite=True)

    found = _bytes(dest)
    assert {name: found[name] for name in mine} == mine
    assert found.keys() - mine.keys() == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        hf.WHOLE,
    } | {"merges.txt"}
    assert found["merges.txt"] == b"new"


def test_overwriting_a_zarr_group_removes_the_arrays_that_the_group_names_and_no_more(trained, tmp_path):
    dest = tmp_path / "work"
    mine = {"src/c/main.c": b"mine", "other/zarr.json": b"mine", "model.norm.weight/notes.txt": b"mine"}
    for name, body in mine.items():
        (dest / name).parent.mkdir(parents=True, exist_ok=True)
        (dest / name).write_bytes(body)

    export_run(trained.run, dest, format="zarr", component="actor", overwrite=True)
    export_run(trained.run, dest, format="zarr", component="buffer", overwrite=True)

    assert _bytes(dest).keys() == {*mine, "zarr.json", "seen/zarr.json", "seen/c/0/0"}
    assert mine.items() <= _bytes(dest).items()


def test_a_zarr_group_of_others_is_not_overwritten(trained, tmp_path):
    zarr.open_group(tmp_path / "z", mode="w").create_array("x", data=np.arange(3))
    before = _bytes(tmp_path / "z")

    with pytest.raises(DestinationTaken, match="not of an export"):
        export_run(trained.run, tmp_path / "z", format="zarr", component="actor", overwrite=True)

    assert _bytes(tmp_path / "z") == before


def test_nothing_is_exported_into_a_run(trained, tmp_path):
    run = shutil.copytree(trained.run, tmp_path / "run")
    before = _bytes(run)

    for kind in ("hf", "dcp", "zarr"):
        with pytest.raises(DestinationTaken, match="is a run"):
            export_run(trained.run, run, format=kind, component="actor", overwrite=True)

    assert _bytes(run) == before


def test_a_file_beside_the_config_that_no_store_takes_is_left_out_and_named(trained, tmp_path):
    """In a bucket a listing shows it; a folder's listing does not."""
    base = open_files("memory://base-with-a-dot")
    for path in trained.base.iterdir():
        base.put(path.name, path.read_bytes())
    obstore.put(memory("base-with-a-dot")._inner, ".gitattributes", b"x")  # as git leaves it
    out = open_files(tmp_path / "hf")

    done = export(
        LocalStore(trained.run), out, FolderSink(out, base), Choice(component="actor"), kind="hf", pins=False
    )

    assert [name.partition(" ")[0] for name in done.left_out] == [".gitattributes"]
    assert same(weights(AutoModelForCausalLM.from_pretrained(tmp_path / "hf")), trained.weights)


def test_a_store_that_keeps_other_bytes_than_it_was_given_is_found_out(trained, tmp_path):
    class Liar(LocalStore):
        def stream(self, key: str) -> Any:
            stream = super().stream(key)
            write = stream.write
            stream.write = lambda data: write(bytes(data)[:-1] + b"\x7f" if len(data) > 4096 else data)
            return stream

    store = Liar(tmp_path / "hf")
    with pytest.raises(ObjectDamaged, match="removed again"):
        export(
            LocalStore(trained.run),
            Files(store, store.stream),
            FolderSink(Files(store, store.stream)),
            Choice(component="actor"),
            kind="hf",
        )

    assert not (tmp_path / "hf" / hf.WHOLE).exists()


# --- interrupted ----------------------------------------------------------------------------------


def _is_whole(folder: Path, kind: str) -> bool:
    last = {"hf": hf.INDEX, "dcp": ".metadata", "zarr": zarr_group.GROUP, "safetensors": "a.safetensors"}
    return (folder / last[kind]).exists()


def _check_whole(folder: Path, kind: str, expected: dict[str, torch.Tensor]) -> None:
    if kind == "hf":
        found = weights(AutoModelForCausalLM.from_pretrained(folder))
    elif kind == "dcp":
        found = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
        dcp.load(found, checkpoint_id=folder)
    elif kind == "zarr":
        group = zarr.open_group(folder, mode="r")
        found = {name: torch.from_numpy(group[name][...]) for name in group.array_keys()}
    else:
        found = load_file(folder / "a.safetensors")
    assert same(found, expected)


@pytest.mark.slow
@pytest.mark.timeout(130)
@pytest.mark.filterwarnings("ignore:Object at ftckpt-export.json")  # zarr-python sees the mark
@pytest.mark.parametrize("kind", ["hf", "dcp", "zarr", "safetensors"])
def test_whoever_dies_at_any_change_leaves_nothing_whole_and_the_next_try_completes_it(
    trained, tmp_path, kind, monkeypatch
):
    monkeypatch.setattr("ftckpt.interop.torch_folder.FILE_BYTES", 40_000)

    def run(place: Mortal) -> None:
        sinks = {
            "hf": lambda: FolderSink(place.files, open_files(trained.base), 40_000),
            "dcp": lambda: DcpSink(place.files),
            "zarr": lambda: ZarrSink(place.files),
            "safetensors": lambda: SingleSink(place.files, "a.safetensors"),
        }
        store = LocalStore(trained.run)
        export(store, place.files, sinks[kind](), Choice(component="actor"), kind=kind, pins=False)

    counted = Mortal(tmp_path / "counted")
    run(counted)
    every = range(1, counted.changes + 1)
    late = every[-4:]
    for nth in (*every[: -len(late) : max(1, len(every) // 6)], *late):
        folder = tmp_path / f"{nth}"
        with suppress(Crash):
            run(Mortal(folder, nth))
        if _is_whole(folder, kind):
            _check_whole(folder, kind, trained.weights)
        if not _is_whole(folder, kind) or (folder / MARK).exists():
            run(Mortal(folder))
        _check_whole(folder, kind, trained.weights)
        assert not (folder / MARK).exists()
        shutil.rmtree(folder)


def test_what_another_export_left_half_way_is_not_gone_on_with(trained, tmp_path):
    dest = tmp_path / "hf"
    with suppress(Crash):
        place = Mortal(dest, 6)
        export(
            LocalStore(trained.run),
            place.files,
            FolderSink(place.files, None, SHARD_BYTES),
            Choice(component="actor"),
            kind="hf",
        )

    with pytest.raises(DestinationTaken, match="half way"):
        export_run(trained.run, dest, format="hf", component="actor", step=0)
    with pytest.raises(DestinationTaken, match="half way"):
        export_run(trained.run, dest, format="dcp", component="actor")

    export_run(trained.run, dest, format="hf", component="actor")
    assert same(load_file(dest / hf.WHOLE), trained.weights)


@pytest.mark.filterwarnings("ignore:Object at")  # zarr-python sees the mark
@pytest.mark.parametrize("kind", ["hf", "zarr"])
def test_whoever_dies_while_one_checkpoint_replaces_another_leaves_no_mixture(trained, tmp_path, kind):
    """The arrays of the old one that have no successor go with it, also if the group is gone already."""

    def put(place: Mortal, component: str, *, overwrite: bool) -> None:
        sink = FolderSink(place.files, None, SHARD_BYTES) if kind == "hf" else ZarrSink(place.files)
        choice = Choice(component=component)
        store = LocalStore(trained.run)
        export(store, place.files, sink, choice, kind=kind, overwrite=overwrite, pins=False)

    put(Mortal(tmp_path / "old"), "actor", overwrite=False)
    put(Mortal(tmp_path / "new"), "buffer", overwrite=False)
    old, new = _bytes(tmp_path / "old"), _bytes(tmp_path / "new")
    counted = Mortal(shutil.copytree(tmp_path / "old", tmp_path / "counted"))
    put(counted, "buffer", overwrite=True)
    assert _bytes(tmp_path / "counted") == new
    for nth in range(1, counted.changes + 1, max(1, counted.changes // 8)):
        folder = shutil.copytree(tmp_path / "old", tmp_path / f"{nth}")
        with suppress(Crash):
            put(Mortal(folder, nth), "buffer", overwrite=True)
        found = _bytes(folder)
        head = hf.INDEX if kind == "hf" else zarr_group.GROUP
        if head in found and found[head] == old[head]:
            assert old.items() <= found.items()
        put(Mortal(folder), "buffer", overwrite=True)
        assert _bytes(folder) == new
        shutil.rmtree(folder)


@pytest.mark.parametrize("ends", [True, False])
def test_of_two_exports_that_begin_at_an_empty_address_one_is_let_in(trained, tmp_path, ends):
    """
    The second looks, then the first begins, and ends or goes on: files of two steps would be a checkpoint
    that nobody saved.
    """
    dest = tmp_path / "hf"

    def first() -> None:
        place = Mortal(dest, None if ends else 8)
        sink = FolderSink(place.files, None, SHARD_BYTES)
        with suppress(Crash):
            export(LocalStore(trained.run), place.files, sink, Choice(0, "actor"), kind="hf", pins=False)

    class Looking(LocalStore):
        looked = False

        def scan(self, prefix: str) -> Any:
            found = list(super().scan(prefix))
            if not self.looked:
                self.looked = True
                first()
            return iter(found)

    store = Looking(dest)
    files = Files(store, store.stream)
    with pytest.raises(DestinationTaken, match="not empty" if ends else "just begun"):
        export(LocalStore(trained.run), files, FolderSink(files), Choice(1, "actor"), kind="hf", pins=False)

    assert not (dest / hf.WHOLE).exists() and (dest / MARK).exists() != ends
    export_run(trained.run, dest, format="hf", component="actor", step=0, overwrite=ends)
    assert same(load_file(dest / hf.WHOLE), weights(tiny()))


# --- other stores, and memory ---------------------------------------------------------------------


def test_from_a_bucket_to_a_bucket(trained, s3, tmp_path):
    from ftckpt.copying import copy
    from ftckpt.store import open_store

    copy(LocalStore(trained.run), open_store(s3.uri("export/run")))

    for kind in ("hf", "dcp", "zarr"):
        export_run(s3.uri("export/run"), s3.uri(f"export/{kind}"), format=kind, component="actor")
    export_run(s3.uri("export/run"), s3.uri("export/a.safetensors"), format="safetensors", component="actor")

    for kind in ("hf", "dcp", "zarr"):
        here = tmp_path / kind
        there = open_files(s3.uri(f"export/{kind}"))
        for name, size in there.sizes().items():
            (here / name).parent.mkdir(parents=True, exist_ok=True)
            (here / name).write_bytes(there.read(name, 0, size))
    assert same(load_file(tmp_path / "hf" / hf.WHOLE), trained.weights)
    _check_whole(tmp_path / "dcp", "dcp", trained.weights)
    _check_whole(tmp_path / "zarr", "zarr", trained.weights)
    one = open_files(s3.uri("export")).sizes()
    assert one["a.safetensors"] == (tmp_path / "hf" / hf.WHOLE).stat().st_size


def test_a_live_run_keeps_the_step_for_as_long_as_it_is_exported(trained, tmp_path):
    held = []

    class Watching(LocalStore):
        def stream(self, key: str) -> Any:
            held.extend(info.key for info in LocalStore(trained.run).scan("pins"))
            return super().stream(key)

    store = Watching(tmp_path / "x")
    files = Files(store, store.stream)
    export(LocalStore(trained.run), files, FolderSink(files), Choice(component="actor"), kind="hf")

    assert any(key.startswith("pins/copy-") for key in held)
    assert not list(LocalStore(trained.run).scan("pins/copy"))


def test_batches_are_read_into_two_memories_in_turn(tmp_path):
    """Memory asked for anew for each tensor is not found again between what stays: exports grew by the state."""
    with Session(
        tmp_path / "run", {"model": {f"w{n}": torch.full((4096,), n) for n in range(12)}}, events=silent
    ):
        pass
    files, starts = open_files(tmp_path / "dcp"), []

    class Watching(DcpSink):
        def write(self, outline, read):
            def watched(wants):
                for tensor in read(wants):
                    starts.append(tensor.data_ptr())
                    yield tensor

            return super().write(outline, watched)

    choice = Choice(component="model")
    export(LocalStore(tmp_path / "run"), files, Watching(files), choice, kind="dcp", batch_bytes=4096 * 8)

    assert len(starts) == 12 and len(set(starts)) == 2
    loaded = {f"w{n}": torch.zeros(4096, dtype=torch.int64) for n in range(12)}
    dcp.load(loaded, checkpoint_id=tmp_path / "dcp")
    assert all(torch.equal(loaded[f"w{n}"], torch.full((4096,), n)) for n in range(12))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_memory_is_bounded_however_large_the_state_is():
    """
    320 MiB through every format, both ways, in parts of 4 MiB, beside at most 64 MiB. What is freed goes back
    to the system at once, so that what malloc keeps is not taken for ours, and hides nothing of the next.
    """
    with TemporaryDirectory(dir="/dev/shm") as folder:  # is in no process's memory
        result = run_ranks(
            "tests/ranks/interop_memory.py",
            1,
            folder,
            timeout_s=170,
            env={"MALLOC_TRIM_THRESHOLD_": "131072"},
        ).check()

    beside = json.loads(result.outputs[0].splitlines()[-1])
    assert len(beside) == 7 and max(beside.values()) < 64, beside


# --- what is left out -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    """A run with everything that one format or the other has no place for."""
    folder = tmp_path_factory.mktemp("mixed")
    state = {
        "mixed": {
            "w": torch.ones(2),
            "epoch": 3,
            "log": {"names": ["a"], "loss": 0.5},
            "both": {"w": torch.zeros(1), "n": None},
            "mine": ftckpt.PerRank({"n": 1}),
            "pair": (torch.full((2,), 7.0), 3),
            "last": deque([torch.full((1,), 8.0), 4], maxlen=2),
            "counts": {0: 5, 1: 6},
            "plain": (1, {2: 3}),
            "empty": {},
        },
        "words": {"name": "x"},
        "loader": ftckpt.PerRank({"ids": torch.ones(3)}),
    }
    with Session(folder / "run", state, events=silent):
        pass
    return folder / "run"


def _arrays_only(run: Path, dest: Path, kind: str, **asked: Any) -> tuple[str, ...]:
    name = dest / "a.safetensors" if kind == "safetensors" else dest / kind
    return export_run(run, name, format=kind, **asked).left_out


PLAIN = ("epoch", "log", "both.n", "pair.1", "last.1", "counts", "plain")


@pytest.mark.parametrize("kind", ["safetensors", "zarr", "hf"])
def test_plain_values_are_told_as_left_out_of_formats_that_hold_arrays_only(mixed, tmp_path, kind):
    left_out = _arrays_only(mixed, tmp_path, kind, component="mixed")

    assert left_out == ("mine (each rank's own)", *(f"{name} (plain values)" for name in PLAIN))


@pytest.mark.parametrize("kind", ["safetensors", "zarr"])
def test_without_a_component_every_name_that_is_left_out_begins_with_its_component(mixed, tmp_path, kind):
    left_out = _arrays_only(mixed, tmp_path, kind)

    own = ("mixed.mine (each rank's own)", "loader (each rank's own)")
    assert left_out == (*own, *(f"mixed.{name} (plain values)" for name in PLAIN), "words (plain values)")


def test_of_a_component_nothing_is_told_that_others_hold(mixed, tmp_path):
    assert _arrays_only(mixed, tmp_path, "safetensors", component="words") == ("words (plain values)",)
    assert _arrays_only(mixed, tmp_path, "dcp", component="words") == ()


def test_what_becomes_another_thing_in_a_dcp_folder_is_told_by_name(mixed, tmp_path):
    done = export_run(mixed, tmp_path / "dcp", format="dcp", component="mixed")

    assert done.left_out == (
        "mine (each rank's own)",
        "pair (a tuple; in DCP it is a list)",
        "last (a deque; in DCP it is a list)",
        "counts (its keys are numbers; in DCP they are text)",
        "empty (an empty dict, which DCP does not hold)",
    )
    import_run(tmp_path / "dcp", tmp_path / "run", format="dcp", component="mixed")
    state = {"mixed": {}}
    ftckpt.restore(tmp_path / "run", state)
    found = state["mixed"]
    assert (found["pair"][0].tolist(), found["pair"][1]) == ([7.0, 7.0], 3)
    assert (found["last"][0].tolist(), found["last"][1]) == ([8.0], 4)
    assert found["counts"] == {"0": 5, "1": 6} and found["plain"] == (1, {2: 3}) and "empty" not in found


def test_numbers_as_the_outermost_keys_of_a_component_are_told_under_its_name(tmp_path):
    with Session(tmp_path / "run", {"s": {0: torch.ones(2), 1: torch.zeros(2)}}, events=silent):
        pass

    done = export_run(tmp_path / "run", tmp_path / "dcp", format="dcp", component="s")

    assert done.left_out == ("s (its keys are numbers; in DCP they are text)",)
