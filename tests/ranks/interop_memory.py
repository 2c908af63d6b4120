"""How much memory imports and exports take beside the process itself: prints MiB for each, as JSON.

interop_memory.py FOLDER    320 MiB: one tensor of 160 MiB, the rest in 40 of 4 MiB; parts and packs of 4 MiB
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tensorstore as ts
import torch
import torch.distributed.checkpoint
from safetensors.numpy import save_file

from ftckpt.codec import Codec
from ftckpt.interop import api, hf, orbax, torch_folder, zarr_group
from ftckpt.interop.exporting import Choice, export
from ftckpt.interop.hf import FolderSink, SafetensorsSource
from ftckpt.interop.importing import import_checkpoint
from ftckpt.interop.torch_file import TorchSource
from ftckpt.interop.torch_folder import DcpSink, DcpSource
from ftckpt.interop.zarr_group import ZarrSink
from ftckpt.store import LocalStore, open_files
from ftckpt.writer import WriteSettings
from tests.ranks.case_memory import forget_peak, resident

PART_BYTES = 4 << 20
ROWS_OF_MIB = 256
SETTINGS = WriteSettings(
    codec=Codec("raw"), pack_bytes=PART_BYTES, max_pack_bytes=PART_BYTES, packs_in_flight=1
)
orbax.CACHE_BYTES = hf.PART_BYTES = torch_folder.ITEM_BYTES = zarr_group.CHUNK_BYTES = PART_BYTES


def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"big.weight": 160, **{f"layers.{n}.weight": 4 for n in range(40)}}
    return {name: rng.integers(-9, 9, (mib * ROWS_OF_MIB, 1024), np.int32) for name, mib in sizes.items()}


def write_orbax(folder: Path, held: dict[str, np.ndarray]) -> None:
    entries = {}
    for name, array in held.items():
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"},
            "metadata": {"shape": array.shape, "chunks": [ROWS_OF_MIB, 1024], "dtype": "<i4"},
        }
        ts.open(spec, create=True).result().write(array).result()
        keys = [{"key": name, "key_type": 2}]
        entries[name] = {"key_metadata": keys, "value_metadata": {"value_type": "np.ndarray"}}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": entries, "use_ocdbt": True}))


def beside(work: Callable[[], object]) -> float:
    gc.collect()
    before = resident()
    forget_peak()
    work()
    return round(resident("VmHWM") - before)


def measure(top: Path) -> dict[str, float]:
    held = arrays()
    (top / "hf").mkdir()
    save_file(held, top / "hf" / "model.safetensors")
    write_orbax(top / "orbax", held)
    torch.save({k: torch.from_numpy(v) for k, v in held.items()}, top / "x.pt")  # noqa: TID251 - what is read
    del held

    def brought(kind: str, source: Callable[[], api.Source]) -> float:
        store = LocalStore(top / f"from-{kind}")
        options = {"origin": "", "component": "model", "settings": SETTINGS}
        return beside(lambda: import_checkpoint(source(), store, kind=kind, **options))

    def given(kind: str, sink: Callable[[], api.Sink]) -> float:
        files = open_files(top / f"as-{kind}")
        options = {"batch_bytes": PART_BYTES, "pins": False}
        run = LocalStore(top / "from-hf")
        return beside(
            lambda: export(run, files, sink(files), Choice(component="model"), kind=kind, **options)
        )

    found = {"import hf": brought("hf", lambda: SafetensorsSource(open_files(top / "hf")))}
    for kind, sink in (("hf", FolderSink), ("dcp", DcpSink), ("zarr", ZarrSink)):
        found[f"export {kind}"] = given(kind, sink)
    found["import dcp"] = brought("dcp", lambda: DcpSource(open_files(top / "as-dcp")))
    found["import torch"] = brought("torch", lambda: TorchSource(open_files(top), "x.pt"))
    found["import orbax"] = brought("orbax", lambda: orbax.OrbaxSource(open_files(top / "orbax")))
    return found


print(json.dumps(measure(Path(sys.argv[1]))))
