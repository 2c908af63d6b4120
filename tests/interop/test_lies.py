"""Checkpoints that state what is not so, and stores that fail while one is read: nothing wrong is imported."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - to make what must be refused
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import ftckpt
from ftckpt.errors import ForeignDamaged, NotEnoughMemory, NotRepresentable, RunNotFound, StoreUnavailable
from ftckpt.events import silent
from ftckpt.interop import export_run, import_run
from ftckpt.interop.torch_file import TorchSource
from ftckpt.session import Session
from ftckpt.store import Files, LocalStore
from tests.interop.test_import import orbax

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


# --- the parts of a DCP folder --------------------------------------------------------------------


@pytest.fixture
def parts(tmp_path, monkeypatch) -> Path:
    """A folder of DCP whose only tensor, of 8 elements, lies in two parts."""
    monkeypatch.setattr("ftckpt.interop.torch_folder.ITEM_BYTES", 16)
    with Session(tmp_path / "saved", {"m": {"w": torch.arange(8.0)}}, events=silent):
        pass
    export_run(tmp_path / "saved", tmp_path / "dcp", format="dcp", component="m")
    return tmp_path / "dcp"


def _edit(folder: Path, change: Callable[[list[Any]], object]) -> None:
    """Change what the metadata says of the parts of ``w``."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata.state_dict_metadata["w"].chunks)
    path.write_bytes(pickle.dumps(metadata))


def _stretch(chunks: list[Any]) -> None:
    chunks[0].sizes = torch.Size([6])
    chunks[1].sizes = torch.Size([2])


@pytest.mark.parametrize(
    "change",
    [
        lambda chunks: chunks.__setitem__(1, chunks[0]),  # the sizes add up, and half of it is not there
        lambda chunks: chunks.append(chunks.pop(0).__class__(torch.Size([3]), torch.Size([4]))),
        _stretch,
        lambda chunks: chunks.pop(),
    ],
)
def test_parts_that_overlap_or_leave_a_gap_are_refused_whatever_their_sizes_add_up_to(
    parts, tmp_path, change
):
    _edit(parts, change)

    with pytest.raises(ForeignDamaged, match="w"):
        import_run(parts, tmp_path / "run", format="dcp", component="m")

    assert not (tmp_path / "run").exists()


def test_a_part_that_is_told_twice_is_one_part(parts, tmp_path):
    _edit(parts, lambda chunks: chunks.append(chunks[0]))

    import_run(parts, tmp_path / "run", format="dcp", component="m")

    with ftckpt.open(tmp_path / "run") as run:
        assert run.array("m.w").read().result().tolist() == list(range(8))


def test_a_part_that_its_bytes_cannot_hold_is_refused_before_anybody_goes_by_its_size(tmp_path):
    dcp.save({"w": torch.ones(4)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    told = metadata.state_dict_metadata["w"]
    told.size = told.chunks[0].sizes = torch.Size([1 << 50])
    path.write_bytes(pickle.dumps(metadata))

    with pytest.raises(ForeignDamaged, match="cannot hold"):
        import_run(tmp_path / "dcp", tmp_path / "run", format="dcp")


# --- files of torch -------------------------------------------------------------------------------


def _rezipped(
    path: Path, kind: int, change: Callable[[str, bytes], bytes] = lambda _name, body: body
) -> Path:
    """The same members in another zip file."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(path.with_suffix(".new.pt"), "w", kind) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return path.with_suffix(".new.pt")


def test_a_compressed_file_of_torch_is_refused_by_the_name_of_what_is_compressed(tmp_path):
    """Bytes that do not compress still lie in it as they were, only elsewhere: wrong ones would be read."""
    noise = torch.randint(256, (2, 200_000), dtype=torch.uint8)
    torch.save({"m": {"w": noise[0].clone(), "v": noise[1].clone()}}, tmp_path / "x.pt")  # noqa: TID251
    packed = _rezipped(tmp_path / "x.pt", zipfile.ZIP_DEFLATED)
    assert torch.equal(torch.load(packed)["m"]["w"], noise[0])  # noqa: TID251 - torch itself takes it

    with pytest.raises(NotRepresentable, match=r"x/data\.pkl of x\.new\.pt .* is compressed") as refused:
        import_run(packed, tmp_path / "run", format="torch")

    assert refused.value.member == "x/data.pkl" and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("said", "lie"),
    [
        (b"QK\x00K\n\x85", b"QK\x00K\xf0\x85"),  # the tensor: 240 elements instead of 10
        (b"K\ntq\x07QK\x00K\n\x85", b"K\xf0tq\x07QK\x00K\xf0\x85"),  # and its storage too
    ],
)
def test_a_tensor_that_is_larger_than_what_is_stored_of_it_is_refused(tmp_path, said, lie):
    torch.save({"w": torch.arange(10.0), "v": torch.ones(500)}, tmp_path / "x.pt")  # noqa: TID251

    def change(name: str, body: bytes) -> bytes:
        assert not name.endswith(".pkl") or said in body
        return body.replace(said, lie) if name.endswith(".pkl") else body

    with pytest.raises(ForeignDamaged, match="w needs 960 bytes, and 40 are stored of it"):
        import_run(_rezipped(tmp_path / "x.pt", zipfile.ZIP_STORED, change), tmp_path / "run", format="torch")


def test_one_element_that_stands_for_many_is_refused_where_they_have_no_room(tmp_path):
    torch.save({"w": torch.zeros(1).expand(10**13)}, tmp_path / "x.pt")  # noqa: TID251

    with pytest.raises(NotEnoughMemory, match=r"w in x\.pt") as refused:
        import_run(tmp_path / "x.pt", tmp_path / "run", format="torch")

    assert refused.value.needed_bytes == 4 * 10**13 and not (tmp_path / "run").exists()


class Failing(LocalStore):
    """Answers so many reads, and then no more."""

    def __init__(self, folder: Path, reads: int) -> None:
        super().__init__(folder)
        self.reads = reads
        self.errors: list[StoreUnavailable] = []

    def read(self, key: str, at: Any = None) -> Any:
        if self.reads > 0:
            self.reads -= 1
            return super().read(key, at)
        self.errors.append(StoreUnavailable(f"read {key}: the store is down", op="read", key=key))
        raise self.errors[-1]


@pytest.mark.parametrize("reads", [0, 1])
def test_a_store_that_is_down_is_not_told_as_a_damaged_file(tmp_path, reads):
    """In whatever library of torch or Python it was met: the first error of the store comes out, as it was."""
    torch.save({"w": torch.ones(2_000_000)}, tmp_path / "x.pt")  # noqa: TID251 - two windows
    store = Failing(tmp_path, reads)

    with pytest.raises(StoreUnavailable, match="the store is down") as told:
        TorchSource(Files(store, store.stream), "x.pt")

    assert told.value is store.errors[0]


# --- arrays of Orbax ------------------------------------------------------------------------------


def _told(folder: Path, name: str, zarr3: bool, **said: Any) -> None:
    path = folder / name / ("zarr.json" if zarr3 else ".zarray")
    about = json.loads(path.read_text())
    chunks = said.pop("chunks", None)
    if chunks is not None:
        (about["chunk_grid"]["configuration"] if zarr3 else about)["chunk_shape" if zarr3 else "chunks"] = (
            chunks
        )
    path.write_text(json.dumps({**about, **said}))


@pytest.mark.parametrize("zarr3", [False, True])
def test_a_chunk_that_no_memory_holds_is_refused_and_not_tried(tmp_path, zarr3):
    orbax(tmp_path / "o", {("a",): np.ones(3, np.float32)}, ocdbt=False, zarr3=zarr3)
    _told(tmp_path / "o", "a", zarr3, shape=[1 << 44], chunks=[1 << 44])

    with pytest.raises(NotEnoughMemory, match="one chunk of a"):
        import_run(tmp_path / "o", tmp_path / "run", format="orbax", component="f")


@pytest.mark.parametrize("zarr3", [False, True])
def test_a_shape_of_which_little_was_written_is_refused_before_anybody_goes_by_it(tmp_path, zarr3):
    orbax(tmp_path / "o", {("a",): np.ones(4, np.float32)}, ocdbt=False, zarr3=zarr3)
    _told(tmp_path / "o", "a", zarr3, shape=[1 << 60])

    with pytest.raises(ForeignDamaged, match="not all of its shape"):
        import_run(tmp_path / "o", tmp_path / "run", format="orbax", component="f")


def test_what_is_called_a_scalar_must_be_one(tmp_path):
    orbax(tmp_path / "o", {("a",): np.ones(3, np.float32), ("n",): 3}, ocdbt=False)
    path = tmp_path / "o" / "_METADATA"
    about = json.loads(path.read_text())
    about["tree_metadata"]["('a',)"]["value_metadata"]["value_type"] = "scalar"
    path.write_text(json.dumps(about))

    with pytest.raises(ForeignDamaged, match=r"a scalar, and it has the shape \(3,\)"):
        import_run(tmp_path / "o", tmp_path / "run", format="orbax", component="f")


def test_an_array_that_compressed_well_is_imported_all_the_same(tmp_path):
    zeros = np.zeros((512, 1024), np.float32)
    orbax(tmp_path / "o", {("a",): zeros})

    import_run(tmp_path / "o", tmp_path / "run", format="orbax", component="f")

    assert sum(path.stat().st_size for path in (tmp_path / "o").rglob("*") if path.is_file()) < zeros.nbytes
    with ftckpt.open(tmp_path / "run") as run:
        assert run.verify() == []


def test_a_run_is_not_readable_after_any_of_this(tmp_path):
    orbax(tmp_path / "o", {("a",): np.arange(64, dtype=np.float32)}, ocdbt=False)
    (tmp_path / "o" / "a" / "1").write_bytes(b"xx")

    with pytest.raises(ForeignDamaged, match="do not read"):
        import_run(tmp_path / "o", tmp_path / "run", format="orbax", component="f")

    with pytest.raises(RunNotFound):
        ftckpt.open(tmp_path / "run")
