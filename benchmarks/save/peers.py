"""How others save the same tensors. Each is called as its documentation says, with its own defaults.

In a folder the files of every peer are synced before the clock stops, as ours are. On S3 each uses its
own client. A peer that is not installed says so; it is not left out in silence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from benchmarks.save.measure import Numbers, costs
from benchmarks.save.places import Place
from benchmarks.save.state import make_state

Tensors = dict[str, torch.Tensor]


def torch_save(place: Place, size_bytes: int) -> Numbers:
    def save(tensors: Tensors) -> None:
        with _opened(place, "state.pt") as file:
            torch.save(tensors, file)  # noqa: TID251 - a peer

    return _measured(place, size_bytes, save)


def safetensors(place: Place, size_bytes: int) -> Numbers:
    from safetensors.torch import save as to_bytes
    from safetensors.torch import save_file

    def save(tensors: Tensors) -> None:
        if not place.is_s3:
            Path(place.uri).mkdir(parents=True)
            save_file(tensors, str(Path(place.uri) / "state.safetensors"))
            return
        with _opened(place, "state.safetensors") as file:
            file.write(to_bytes(tensors))

    return _measured(place, size_bytes, save)


def dcp(place: Place, size_bytes: int) -> Numbers:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    return _measured(
        place, size_bytes, lambda tensors: dcp_save(tensors, storage_writer=_dcp_writer(place), no_dist=True)
    )


def dcp_async(place: Place, size_bytes: int) -> Numbers:
    return _measured_async(place, size_bytes, lambda: _dcp_writer(place))


def s3torchconnector(place: Place, size_bytes: int) -> Numbers:
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    return _measured(
        place,
        size_bytes,
        lambda tensors: dcp_save(tensors, storage_writer=_s3torch_writer(place), no_dist=True),
    )


def s3torchconnector_async(place: Place, size_bytes: int) -> Numbers:
    return _measured_async(place, size_bytes, lambda: _s3torch_writer(place))


def tensorstore(place: Place, size_bytes: int) -> Numbers:
    """One zarr3 array a tensor, chunks of about 4 MiB, each with its crc32c."""
    import tensorstore as ts

    def save(tensors: Tensors) -> None:
        context = ts.Context()
        writes = []
        for name, tensor in tensors.items():
            rows = max(1, (4 << 20) // (tensor.element_size() * (tensor.numel() // tensor.shape[0])))
            grid = [min(rows, tensor.shape[0]), *tensor.shape[1:]]
            array = ts.open(
                {
                    "driver": "zarr3",
                    "kvstore": kvstore(place, name),
                    "metadata": {
                        "shape": list(tensor.shape),
                        "data_type": str(tensor.dtype).removeprefix("torch."),
                        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": grid}},
                        "codecs": [
                            {"name": "bytes", "configuration": {"endian": "little"}},
                            {"name": "crc32c"},
                        ],
                    },
                },
                create=True,
                context=context,
            ).result()
            writes.append(array.write(as_numpy(tensor, array.dtype.numpy_dtype)))
        for write in writes:
            write.result()

    return _measured(place, size_bytes, save)


def _measured(place: Place, size_bytes: int, save: Callable[[Tensors], object]) -> Numbers:
    state = make_state(size_bytes)
    tensors = state.tensors
    with costs() as cost:
        save(tensors)
        if not place.is_s3:
            place.synced()
    return cost.numbers() | {"stall_s": cost.seconds, "raw_bytes": state.size_bytes}


def _measured_async(place: Place, size_bytes: int, writer: Callable[[], Any]) -> Numbers:
    from torch.distributed.checkpoint.state_dict_saver import async_save

    state = make_state(size_bytes)
    tensors = state.tensors
    with costs() as cost:
        begun_s = time.monotonic()
        future: Any = async_save(tensors, storage_writer=writer(), no_dist=True)
        stall_s = time.monotonic() - begun_s
        future.result()
        if not place.is_s3:
            place.synced()
    return cost.numbers() | {"stall_s": stall_s, "raw_bytes": state.size_bytes}


def _dcp_writer(place: Place) -> Any:
    if not place.is_s3:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter

        return FileSystemWriter(place.uri)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    return FsspecWriter(place.uri, sync_files=False)  # where a file has no sync, it would sync all disks


def _s3torch_writer(place: Place) -> Any:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageWriter

    return S3StorageWriter(
        region=place.environ["AWS_REGION"],
        path=place.uri,
        s3client_config=S3ClientConfig(force_path_style=True),
    )


def _opened(place: Place, name: str) -> Any:
    if place.is_s3:
        import fsspec

        return fsspec.open(f"{place.uri}/{name}", "wb")
    folder = Path(place.uri)
    folder.mkdir(parents=True)
    return (folder / name).open("wb")


def kvstore(place: Place, name: str) -> dict[str, object]:
    if not place.is_s3:
        return {"driver": "file", "path": f"{place.uri}/{name}/"}
    assert urlsplit(place.endpoint).scheme == "http"
    return {
        "driver": "s3",
        "bucket": place.bucket,
        "endpoint": place.endpoint,
        "aws_region": place.environ["AWS_REGION"],
        "path": f"{place.prefix}/{name}/",
    }


def as_numpy(tensor: torch.Tensor, dtype: Any) -> Any:
    """The tensor's memory as NumPy sees it; bf16 is a type of TensorStore's."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()
