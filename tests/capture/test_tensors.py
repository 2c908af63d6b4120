"""Tensors of every kind come back bit for bit, or are refused by name when they are saved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.boxes import Box, intersect, whole
from ftckpt.capture import as_bytes_view, capture, place
from ftckpt.capture.tensors import fresh_tensor
from ftckpt.errors import StateMismatch, UnsupportedValue
from ftckpt.leaf import ITEMSIZE_BYTES
from tests.capture.memory import contents, restore, same_bits, save


def random_bits(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """A tensor of random bit patterns: quiet and signalling NaNs, infinities, denormals."""
    tensor = fresh_tensor(shape, dtype)
    flat = tensor.reshape(-1).view(torch.uint8)
    flat.copy_(torch.randint(0, 2 if dtype == "bool" else 256, flat.shape, dtype=torch.uint8))
    return tensor


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (5, 7)])
@pytest.mark.parametrize("dtype", ITEMSIZE_BYTES)
def test_every_dtype_and_shape_keeps_its_bits(dtype, shape):
    """E6, E7: also without a dimension, and without an element."""
    original = random_bits(shape, dtype)
    live = {"w": random_bits(shape, dtype), "nested": {"list": [random_bits(shape, dtype)]}}
    saved = save({"w": original, "nested": {"list": [original]}})

    restore(saved, live)

    assert same_bits(live["w"], original)
    assert same_bits(live["nested"]["list"][0], original)


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float8_e5m2", "float32", "complex64", "complex128"])
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t.view(2, 3, 4).permute(2, 0, 1),
        lambda t: t[::2, 1:4:2],
        lambda t: t.as_strided((2, 3), (7, 2), 1),
        lambda t: t[3:, 2:],
        lambda t: t[0].expand(4, 4),
        lambda t: t.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
    ],
    ids=["t", "permute", "stride", "gaps", "offset", "expand", "channels_last"],
)
def test_views_of_any_strides_are_saved_as_their_values_and_filled_in_place(view, dtype):
    """E5: strides are those of the live tensor, whatever the saved one had."""
    original = view(random_bits((6, 4), dtype))
    live = view(random_bits((6, 4), dtype))
    state = {"w": live}

    restore(save({"w": original}), state)

    assert same_bits(state["w"], original)
    if 0 not in original.stride():
        assert state["w"] is live


def test_lazy_conjugates_and_negatives_become_their_true_values():
    """E1"""
    z = torch.randn(3, 3, dtype=torch.complex64)
    state = {
        "z": z,
        "real": z.real,
        "imag": z.imag,
        "conj": z.conj(),
        "neg": z.conj().imag,
        "mT": z.conj().mT,
    }
    live = {name: torch.zeros_like(value) for name, value in state.items()}

    restore(save(state), live)

    for name, value in state.items():
        assert same_bits(live[name], value), name
        assert not live[name].is_conj() and not live[name].is_neg()


def test_live_views_that_overlap_are_given_memory_of_their_own():
    """E1: a tensor and views of its bytes in other dtypes."""
    z = torch.randn(3, dtype=torch.complex64)
    saved = save({"s": {"z": z, "conj": z.conj(), "real": z.real + 1}})
    into = torch.zeros(3, dtype=torch.complex64)
    live = {"s": {"z": into, "conj": into.conj(), "real": into.real}}

    restore(saved, live)

    assert live["s"]["z"] is into
    assert same_bits(live["s"]["z"], z)
    assert same_bits(live["s"]["conj"], z.conj())
    assert same_bits(live["s"]["real"], z.real + 1)


class Wrapped(torch.Tensor):
    pass


def freed() -> torch.Tensor:
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def quantized() -> torch.Tensor:
    return torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)


@pytest.mark.parametrize(
    "make, why",
    [
        (lambda: torch.zeros(2).as_subclass(Wrapped), "Wrapped"),
        (lambda: torch.zeros(2, device="meta"), "meta"),
        (lambda: torch.eye(2).to_sparse(), "sparse"),
        (
            lambda: torch.nested.as_nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "Nested",
        ),
        (quantized, "qint8"),
        (freed, "freed"),
        (torch.nn.parameter.UninitializedParameter, "shape"),
        (lambda: torch.empty(2, dtype=torch.bits8), "bits8"),
    ],
    ids=["subclass", "meta", "sparse", "jagged", "quantized", "freed", "uninitialized", "bits"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own, about its prototypes
def test_tensors_that_cannot_come_back_are_refused_by_full_name(make, why):
    """E3, E4"""
    with pytest.raises(UnsupportedValue, match=why) as refused:
        capture({"buffer": {"seen": [1, make()]}})

    assert refused.value.leaf == "buffer.seen.1"


@pytest.mark.parametrize("other", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32])
def test_another_dtype_is_refused_and_nothing_is_changed(other):
    """E2"""
    saved = save({"w": torch.ones(3)})
    live = {"w": torch.zeros(3, dtype=other)}

    with pytest.raises(StateMismatch, match=r"w\.value: saved float32") as refused:
        restore(saved, live)

    assert len(refused.value.changed) == 1
    assert not live["w"].any()


def test_another_shape_is_refused():
    with pytest.raises(StateMismatch, match=r"\[3\], live float32\[1, 3\]"):
        restore(save({"w": torch.ones(3)}), {"w": torch.zeros(1, 3)})


def test_data_aliases_live_memory_and_is_not_copied():
    weight = torch.zeros(3)

    (leaf,) = (leaf for leaf in capture({"w": weight}, rng=False) if leaf.holding.leaf.kind == "tensor")

    assert leaf.data.data_ptr() == weight.data_ptr()
    assert not leaf.data.requires_grad
    assert not leaf.lazy


def test_saving_again_what_was_restored_gives_the_same_checkpoint():
    state = {"w": torch.randn(3, 4).t(), "x": {"a": [torch.zeros(()), 1], "b": (None, True)}}
    saved = save(state)
    live = {"w": torch.zeros(4, 3), "x": {}}

    restore(saved, live)

    assert contents(save(live)) == contents(saved)


@st.composite
def placements(draw):
    """A shape, three boxes in it such that ``region`` lies in the other two, and a dtype."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))

    def box() -> Box:
        offset = tuple(draw(st.integers(0, size - 1)) for size in shape)
        return Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))

    return (
        shape,
        box(),
        box(),
        draw(st.sampled_from(["bool", "bfloat16", "float32", "complex64", "complex128"])),
    )


@given(placements(), st.booleans())
def test_place_copies_exactly_the_region(case, transposed):
    shape, dest_box, piece, dtype = case
    full = random_bits(shape, dtype)
    source = full[
        tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.extent, strict=True))
    ].contiguous()
    dest = fresh_tensor(dest_box.extent[::-1] if transposed else dest_box.extent, dtype)
    dest = dest.permute(tuple(reversed(range(dest.ndim)))) if transposed else dest
    dest.zero_() if dtype != "bool" else dest.fill_(False)
    region = intersect(dest_box, piece)
    expected = torch.zeros(shape, dtype=getattr(torch, dtype))
    if region is None:
        return
    inside = tuple(slice(o, o + n) for o, n in zip(region.offset, region.extent, strict=True))
    expected[inside] = full[inside]
    outer = tuple(slice(o, o + n) for o, n in zip(dest_box.offset, dest_box.extent, strict=True))

    place(dest, dest_box, piece, region, as_bytes_view(source), dtype)

    assert same_bits(dest, expected[outer])


def test_place_of_nothing_is_nothing():
    empty = Box((0, 0), (0, 3))

    place(torch.empty(0, 3), empty, empty, empty, b"", "float32")
    place(torch.empty(()), whole(()), whole(()), whole(()), bytes(4), "float32")
