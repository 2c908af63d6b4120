"""What the pages about other formats promise, where no test of a single format holds it up."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import torch
import zarr

import ftckpt
from ftckpt.events import silent
from ftckpt.interop import export_run, import_run
from ftckpt.session import Session
from ftckpt.store import open_files
from tests.interop.test_import import TREE, orbax

ROOT = Path(__file__).parents[2]


def test_the_state_of_an_optimizer_by_position_comes_as_a_tree(tmp_path):
    """Nothing says which parameter a number means. It restores into a dict, and ``load_state_dict`` takes it."""
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optim.step()
    torch.save({"model": model.state_dict(), "optim": optim.state_dict()}, tmp_path / "x.pt")  # noqa: TID251

    done = import_run(tmp_path / "x.pt", tmp_path / "run", format="torch")

    assert done.components == {"model": "module", "optim": "tree"}
    state = {"optim": {}}
    ftckpt.restore(tmp_path / "run", state)
    other = torch.optim.AdamW(model.parameters())
    other.load_state_dict(state["optim"])
    assert torch.equal(other.state[model.weight]["exp_avg"], optim.state[model.weight]["exp_avg"])


def test_a_checkpoint_of_orbax_is_read_from_a_bucket(s3, tmp_path):
    orbax(tmp_path / "o", TREE)
    for path in (tmp_path / "o").rglob("*"):
        if path.is_file():
            open_files(s3.uri("orbax")).put(str(path.relative_to(tmp_path / "o")), path.read_bytes())

    import_run(s3.uri("orbax"), s3.uri("from-orbax"), format="orbax", component="flax")

    state = {"flax": {}}
    ftckpt.restore(s3.uri("from-orbax"), state)
    assert torch.equal(state["flax"]["params"]["dense"]["kernel"], torch.arange(35.0).reshape(5, 7))


def test_an_upload_to_a_bucket_that_was_cut_off_stays_invisible(s3):
    files = open_files(s3.uri("cut-off"))
    with pytest.raises(KeyboardInterrupt), files.writing("a.safetensors") as out:
        out.write(np.ones(20 << 20, np.uint8).data)  # parts of it were uploaded
        raise KeyboardInterrupt

    assert files.sizes() == {}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_which_dtypes_of_zarr_tensorstore_opens_and_zarr_python_does_not(tmp_path, dtype):
    with Session(tmp_path / "run", {"s": {"w": torch.ones(3).to(getattr(torch, dtype))}}, events=silent):
        pass
    export_run(tmp_path / "run", tmp_path / "z", format="zarr", component="s")

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{tmp_path}/z/w/"}}
    assert ts.open(spec).result().read().result().astype(np.float32).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match=dtype):
        zarr.open_array(tmp_path / "z" / "w", mode="r")


def test_the_loader_of_the_page_about_other_ranks_deals_out_what_was_left():
    page = (ROOT / "docs/explanation/resharding.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    names = {"torch": torch, "ftckpt": ftckpt, "model": torch.nn.Linear(1, 1)}
    exec(program.replace("loader, on_resize", "Loader(), on_resize"), names)
    assert names["state"]["loader"].on_resize == "merge"
    saved = {f"g0.{rank}": {"ids": torch.arange(10 * rank, 10 * rank + 3)} for rank in range(2)}

    loaders = [names["Loader"]() for _ in range(3)]
    for rank, loader in enumerate(loaders):
        loader.reshard(saved, group="g0", rank=rank, world=3)

    assert [loader.ids.tolist() for loader in loaders] == [[0, 10], [1, 11], [2, 12]]
