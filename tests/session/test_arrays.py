"""Tensors of a run without a trainer: ``run.array``, a lazy view, and ``run.tensors``, one after another."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import ftckpt
from ftckpt.arrays import BATCH_BYTES
from ftckpt.errors import ExtraMissing, StateMismatch, UnsupportedValue
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.run import Run
from ftckpt.store import LocalStore
from ftckpt.store.api import ByteRange
from tests.session.toy import Heard, raw
from tests.support.procs import ROOT

CHUNK_BYTES = 64 << 10
ROW = 256  # float32 elements: 64 rows make a chunk


class Counted(LocalStore):
    """Keeps the sizes of what is read."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.sizes: list[int] = []

    def read(self, key: str, at: ByteRange | None = None) -> bytes | memoryview:
        body = super().read(key, at)
        self.sizes.append(len(body))
        return body


def every_dtype() -> dict[str, torch.Tensor]:
    """Random bits, NaNs among them."""
    made = torch.Generator().manual_seed(1)
    found = {}
    for name, size in ITEMSIZE_BYTES.items():
        if name == "float4_e2m1fn_x2":
            continue
        bits = torch.randint(0, 256, (37, 11 * size), dtype=torch.uint8, generator=made)
        found[name] = bits > 127 if name == "bool" else bits.view(getattr(torch, name))
    return found


@pytest.fixture(scope="module")
def state() -> dict[str, object]:
    torch.manual_seed(0)
    odd = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 4),
        "thin": torch.randn(50_000, 3),  # no chunk ends where a row does
        "line": torch.randn(70_001).to(torch.bfloat16),
        "deep": torch.randn(3, 40, 5, 64),
    }
    return {"big": {"w": torch.randn(1024, ROW)}, "odd": odd, "all": every_dtype()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, state) -> str:
    folder = str(tmp_path_factory.mktemp("arrays") / "run")
    with ftckpt.Session(folder, state, codec="raw", chunk_bytes=CHUNK_BYTES, events=Heard()) as session:
        for _ in session.steps(until=1):
            state["big"]["w"][0, 0] += 1
    return folder


def bits(tensor: torch.Tensor) -> np.ndarray:
    numbers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.dtype == torch.complex128:
        return tensor.numpy()
    return tensor.contiguous().view(numbers[tensor.itemsize]).numpy()


SLICES = [
    np.s_[3],
    np.s_[5:9],
    np.s_[::7],
    np.s_[36:, 2:9:3],
    np.s_[20:4:-3, ::-1],
    np.s_[[30, 2, 2]],
    np.s_[:, 4],
]


@pytest.mark.parametrize("name", sorted(every_dtype().keys() - {"complex32"}))
def test_every_slice_of_an_array_has_the_bits_of_the_tensor(folder, state, name):
    tensor = state["all"][name]
    with ftckpt.open(folder) as run:
        array = run.array(f"all.{name}")

        assert array.shape == tuple(tensor.shape)
        assert array.dtype.name == name
        for where in SLICES:
            assert array[where].read().result().tobytes() == bits(tensor)[where].tobytes(), where


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("scalar", ()),
        ("empty", ()),
        ("thin", np.s_[10_000:30_000:3, 1]),
        ("thin", ()),
        ("line", np.s_[32_766:32_770]),
        ("line", np.s_[::-999]),
        ("deep", np.s_[1, ::3, 4]),
        ("deep", ()),
    ],
)
def test_tensors_of_any_shape_are_cut_anywhere(folder, state, name, where):
    with ftckpt.open(folder) as run:
        found = run.array(f"odd.{name}")[where].read().result()

    assert found.tobytes() == bits(state["odd"][name])[where].tobytes()


@pytest.mark.parametrize(
    ("where", "chunks"),
    [
        (np.s_[0:8], 1),
        (np.s_[63:65], 2),
        (np.s_[64:128], 1),
        (np.s_[::64, 3], 16),
        (np.s_[::128], 8),
        (np.s_[700], 1),
        (np.s_[[1, 1000]], 2),
        (np.s_[:], 16),
    ],
)
def test_a_slice_fetches_the_chunks_it_overlaps_and_no_other_byte(folder, state, where, chunks):
    store = Counted(folder)
    array = Run(store).array("big.w")[where]
    store.sizes.clear()

    found = array.read().result()

    assert store.sizes == [CHUNK_BYTES] * chunks
    assert found.tobytes() == bits(state["big"]["w"])[where].tobytes()


def test_an_array_stays_at_the_step_it_was_asked_for(folder, state):
    with ftckpt.open(folder) as run:
        first, last = (run.array("big.w", step=step)[0, 0].read().result() for step in (0, 1))

    assert last == state["big"]["w"][0, 0] == first + 1


def test_a_changed_byte_is_named_and_not_given(tmp_path):
    """The error is TensorStore's own; our text is in it."""
    with ftckpt.Session(tmp_path / "run", {"w": torch.randn(64, 64)}, codec="raw", events=Heard()):
        pass
    pack = max((tmp_path / "run/packs").rglob("*.*"), key=os.path.getsize)
    body = bytearray(pack.read_bytes())
    body[len(body) // 2] ^= 1
    pack.write_bytes(body)

    with (
        ftckpt.open(tmp_path / "run") as run,
        pytest.raises(ValueError, match=r"w\.value .* do not match their checksum"),
    ):
        run.array("w.value")[10:50].read().result()


def test_what_tensorstore_does_not_know_is_refused_by_name(folder):
    with ftckpt.open(folder) as run:
        with pytest.raises(UnsupportedValue, match=r"all\.complex32 is of dtype complex32"):
            run.array("all.complex32")
        with pytest.raises(StateMismatch, match=r"no tensor 'big\.v'"):
            run.array("big.v")


def test_without_tensorstore_the_error_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorstore", None)

    with ftckpt.open(folder) as run, pytest.raises(ExtraMissing, match="pip install tensorstore"):
        run.array("big.w")


_PEAK = """
import sys
import numpy as np
import ftckpt

def peak_mib():
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

run = ftckpt.open(sys.argv[1])
big, small = run.array("w.value"), run.array("small.value")
small[::-1].read().result()
before = peak_mib()
part = big[::4096].read().result()
print(part.nbytes, peak_mib() - before)
"""


def test_a_slice_takes_the_memory_of_the_slice_and_of_a_few_chunks(tmp_path):
    """256 MiB in all, of which one row in 4096 is asked for: 64 KiB. All 64 chunks pass through."""
    state = {"w": torch.zeros(1 << 16, 1024), "small": torch.zeros(4, 4)}
    state["w"] += torch.arange(1 << 16)[:, None]
    with ftckpt.Session(tmp_path / "run", state, codec="raw", events=Heard()):
        pass

    told = subprocess.run(
        [sys.executable, "-c", _PEAK, str(tmp_path / "run")],
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ).stdout.split()

    assert int(told[0]) == 16 * 4096
    assert float(told[1]) < 96


# --- run.tensors -----------------------------------------------------------------------------------


def test_tensors_come_one_after_another_bit_for_bit(folder, state):
    with ftckpt.open(folder) as run:
        everything = dict(run.tensors())
        some = dict(run.tensors(["odd.thin", "all"]))

    live = {f"{part}.{name}": tensor for part, inside in state.items() for name, tensor in inside.items()}
    assert {name: raw(tensor) for name, tensor in everything.items()} == {n: raw(t) for n, t in live.items()}
    assert some.keys() == {"odd.thin", *(f"all.{name}" for name in state["all"])}


def test_a_name_means_itself_and_what_is_in_it_but_not_what_begins_alike(tmp_path):
    state = {"a": {"w": torch.zeros(2), "wide": torch.ones(2)}, "ab": torch.ones(1)}
    with ftckpt.Session(tmp_path / "run", state, events=Heard()):
        pass

    with ftckpt.open(tmp_path / "run") as run:
        assert [name for name, _ in run.tensors("a")] == ["a.w", "a.wide"]
        assert [name for name, _ in run.tensors("a.w")] == ["a.w"]
        with pytest.raises(StateMismatch, match=r"no tensor 'a\.x'"):
            run.tensors(["a.w", "a.x"])


def test_what_was_not_asked_for_yet_is_not_fetched(tmp_path):
    """Two tensors that do not fit into one batch: the second is read when it is asked for."""
    half = BATCH_BYTES // 4 // 2 + 1
    with ftckpt.Session(tmp_path / "run", {"a": torch.zeros(half), "b": torch.ones(half)}, events=Heard()):
        pass
    store = Counted(str(tmp_path / "run"))
    tensors = Run(store).tensors()

    first, _ = next(tensors)
    between = len(store.sizes)
    second, tensor = next(tensors)

    assert (first, second) == ("a.value", "b.value")
    assert len(store.sizes) > between
    assert bool((tensor == 1).all())
