"""How others read what they saved, into the same live tensors. Each is called as its documentation says,
with its own defaults; a peer that is not installed says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.restore.measured import Tensors, blank, check, restore_numbers
from benchmarks.save import peers as savers
from benchmarks.save.measure import Numbers, costs
from benchmarks.save.places import Place

save_dcp = savers.dcp
save_s3torchconnector = savers.s3torchconnector
save_tensorstore = savers.tensorstore


def dcp(place: Place, size_bytes: int) -> Numbers:
    if place.is_s3:
        import s3fs
        from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

        assert s3fs
        reader: Any = FsspecReader(place.uri)
    else:
        from torch.distributed.checkpoint.filesystem import FileSystemReader

        reader = FileSystemReader(place.uri)
    return _measured(size_bytes, lambda tensors: _load(tensors, reader))


def s3torchconnector(place: Place, size_bytes: int) -> Numbers:
    from s3torchconnector import S3ClientConfig
    from s3torchconnector.dcp import S3StorageReader

    reader = S3StorageReader(
        region=place.environ["AWS_REGION"],
        path=place.uri,
        s3client_config=S3ClientConfig(force_path_style=True),
    )
    return _measured(size_bytes, lambda tensors: _load(tensors, reader))


def tensorstore(place: Place, size_bytes: int) -> Numbers:
    """All arrays at once, each straight into the memory of its tensor."""
    import tensorstore as ts

    def load(tensors: Tensors) -> None:
        context = ts.Context()
        opening = {
            name: ts.open({"driver": "zarr3", "kvstore": savers.kvstore(place, name)}, context=context)
            for name in tensors
        }
        copies = []
        for name, tensor in tensors.items():
            array = opening[name].result()
            memory = savers.as_numpy(tensor, array.dtype.numpy_dtype)
            copies.append(ts.array(memory, dtype=array.dtype, context=context, copy=False).write(array))
        for copy in copies:
            copy.result()

    return _measured(size_bytes, load)


def _load(tensors: Tensors, reader: Any) -> None:
    from torch.distributed.checkpoint.state_dict_loader import load

    load(tensors, storage_reader=reader, no_dist=True)


def _measured(size_bytes: int, load: Callable[[Tensors], object]) -> Numbers:
    state = blank(size_bytes)
    tensors = state.tensors
    memory = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    with torch.no_grad(), costs() as cost:
        load(tensors)
    assert {name: tensor.data_ptr() for name, tensor in tensors.items()} == memory
    check(tensors, size_bytes)
    return restore_numbers(cost) | {"raw_bytes": state.size_bytes}
