"""The contract of ``Stream``, over every store that takes files of other tools."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from ftckpt.store import Files, open_files

MIB = 1 << 20


@dataclass(frozen=True)
class Place:
    """``open`` gives the files; ``large_bytes`` is more than what a stream of this kind sends at a time."""

    open: Callable[[], Files]
    large_bytes: int


@pytest.fixture(params=["local", "memory", "s3", "s3fs", "fsspec"])
def place(request, tmp_path) -> Place:
    name = f"{request.param}-{uuid.uuid4().hex}"
    if request.param in ("s3", "s3fs"):
        weed = request.getfixturevalue("weed")
        scheme = "fsspec+" if request.param == "s3fs" else ""
        return Place(lambda: open_files(f"{scheme}{weed.uri(name)}", environ=weed.env), 40 * MIB)
    uri = {"local": f"{tmp_path}/x", "memory": f"memory://{name}", "fsspec": f"fsspec+file://{tmp_path}/x"}
    return Place(lambda: open_files(uri[request.param]), 80 * MIB if request.param == "memory" else 24 * MIB)


def test_a_buffer_may_be_used_again_as_soon_as_it_was_written(place):
    """Exports read into two memories in turn: a stream that only looked at them would send the next bytes."""
    files, buffer = place.open(), np.empty(4 * MIB, np.uint8)

    with files.writing("big") as out:  # is read back and compared
        for number in range(place.large_bytes // buffer.nbytes):
            buffer[:] = number + 1
            out.write(memoryview(buffer))
            buffer[:] = 0

    assert files.sizes() == {"big": place.large_bytes}
    assert bytes(files.read("big", place.large_bytes - 1, place.large_bytes)) == bytes([number + 1])
    files.close()
