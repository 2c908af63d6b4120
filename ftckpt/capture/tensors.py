"""Tensors as bytes: which can be saved, their raw bytes, and putting raw bytes back bit for bit.

Knows memory: dtypes, strides, storage. Refuses to know names of state, ranks and sharding. Elements
are only ever moved as integers of their size, so that no NaN is quieted and no bit is rounded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ftckpt.boxes import Box
from ftckpt.leaf import ITEMSIZE_BYTES
from ftckpt.memory import require_memory
from ftckpt.values import refuse

_AS_INTEGER: dict[int, torch.dtype] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.int64,  # two of them: a last dimension of 2
}
_SMALL_BYTES = 64 << 10
"""Up to here a copy takes less time than giving up the interpreter for it."""

_view_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_READ, _PYBUF_WRITE = 0x100, 0x200
_LACKING = frozenset({"complex32", "float4_e2m1fn_x2"})
"""Asking for memory of these warns that operators lack them, or fails where algorithms are deterministic."""

Buffer = bytes | bytearray | memoryview

_PLAIN_CLASSES = (torch.Tensor, torch.nn.Parameter)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def require_plain(tensor: torch.Tensor, leaf: str) -> torch.Tensor:
    """The tensor detached, sharing its memory, with lazy conjugation and negation made real.

    Raises:
        UnsupportedValue: it cannot be saved faithfully.
    """
    if type(tensor) not in _PLAIN_CLASSES:
        if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
            refuse(tensor, leaf, "a parameter that has no shape yet; run one forward pass first")
        refuse(tensor, leaf, f"a tensor subclass {type(tensor).__qualname__} has no form in the format")
    why = _why_not(tensor)
    if why:
        refuse(tensor, leaf, why)
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        return plain.resolve_conj().resolve_neg()
    return plain


def _why_not(tensor: torch.Tensor) -> str:
    if tensor.is_quantized or dtype_name(tensor.dtype) not in ITEMSIZE_BYTES:
        return f"a tensor of dtype {dtype_name(tensor.dtype)} has no form in the checkpoint format"
    if tensor.is_nested:
        return "a nested tensor has no form in the checkpoint format"
    if tensor.layout != torch.strided:
        return f"a tensor of layout {tensor.layout} has no form in the checkpoint format"
    if tensor.device.type == "meta":
        return "a tensor on the meta device has no data"
    if tensor.numel() and tensor.untyped_storage().nbytes() == 0:
        return "its storage has been freed (resized to 0)"
    return ""


def fresh_tensor(shape: Sequence[int], dtype: str, device: torch.device | str = "cpu") -> torch.Tensor:
    """Memory of its own for a tensor, not filled.

    Raises:
        NotEnoughMemory: the host has less than that.
    """
    assert dtype in ITEMSIZE_BYTES, dtype
    if torch.device(device).type == "cpu":
        require_memory(prod(shape) * ITEMSIZE_BYTES[dtype], f"a tensor of shape {tuple(shape)}")
    if dtype in _LACKING:
        integers = torch.empty(tuple(shape), dtype=_AS_INTEGER[ITEMSIZE_BYTES[dtype]], device=device)
        return integers.view(getattr(torch, dtype))
    return torch.empty(tuple(shape), dtype=getattr(torch, dtype), device=device)


def can_fill(tensor: torch.Tensor) -> bool:
    """Whether bytes may be put into it: each element has a place of its own, and nothing is lazy."""
    if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride < reach:
                return False
            reach += (size - 1) * stride
    return True


def as_bytes_view(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a contiguous CPU tensor of any dtype, row-major, without a copy; read-only."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), (tensor.device, tensor.stride())
    view: memoryview = _array_over(tensor.detach().reshape(-1).view(torch.uint8)).data
    return view.toreadonly()


def copy_bytes(tensor: torch.Tensor, start: int, stop: int, into: npt.NDArray[np.uint8]) -> None:
    """Copy bytes ``start`` to ``stop`` of a contiguous CPU tensor to the beginning of ``into``. Makes no
    view that outlives the call: for memory that its owner may resize.
    """
    if stop > start:
        memory = _memory_at(tensor.data_ptr() + start, stop - start)
        np.copyto(into[: stop - start], np.frombuffer(memory, np.uint8))


def _memory_at(address: int, size_bytes: int, *, writable: bool = False) -> memoryview:
    """Host memory by its address; valid only while somebody keeps it alive."""
    view: memoryview = _view_memory(address, size_bytes, _PYBUF_WRITE if writable else _PYBUF_READ)
    return view


def _array_over(integers: torch.Tensor) -> Any:
    """A NumPy array over a CPU tensor's memory, which it keeps alive. Not by ``Tensor.numpy``: that
    would forbid for ever to resize the storage, as offloading does.
    """
    dtype = np.dtype(dtype_name(integers.dtype))
    if not integers.numel():
        return np.empty(tuple(integers.shape), dtype)
    last = sum((n - 1) * stride for n, stride in zip(integers.shape, integers.stride(), strict=True))
    block: Any = (ctypes.c_ubyte * ((last + 1) * dtype.itemsize)).from_address(integers.data_ptr())
    block.owner = integers
    strides = tuple(stride * dtype.itemsize for stride in integers.stride())
    return np.ndarray(tuple(integers.shape), dtype, buffer=block, strides=strides)


def place(
    dest: torch.Tensor,
    dest_box: Box,
    piece: Box,
    region: Box,
    raw: Buffer,
    dtype: str,
) -> None:
    """Copy ``region`` out of ``raw``, which holds ``piece`` row-major, into ``dest``, which holds ``dest_box``.

    ``region`` lies inside both boxes, all in coordinates of the global tensor. ``dest`` may have any
    strides and be on any device; it must pass ``can_fill``. Exact for every bit of every dtype.
    """
    itemsize_bytes = ITEMSIZE_BYTES[dtype]
    assert dtype_name(dest.dtype) == dtype, (dest.dtype, dtype)
    assert tuple(dest.shape) == dest_box.extent, (dest.shape, dest_box)
    assert len(raw) == piece.numel * itemsize_bytes, (len(raw), piece, dtype)
    if not region.numel:
        return
    if len(raw) <= _SMALL_BYTES and region == piece == dest_box:  # all of a small tensor, as it is
        live = dest.detach()
        if live.device.type == "cpu" and live.is_contiguous():
            _memory_at(live.data_ptr(), len(raw), writable=True)[:] = memoryview(raw).cast("B")
            return
    integer = _AS_INTEGER[itemsize_bytes]
    pair = (2,) if itemsize_bytes == 16 else ()
    numbers: Any = np.frombuffer(raw, dtype=dtype_name(integer)).reshape((*piece.extent, *pair))
    source = numbers[(*_slices(region, piece), ...)]
    live = dest.detach()
    whole: Any = (torch.view_as_real(live) if pair else live).view(integer)
    into = whole[(*_slices(region, dest_box), ...)]
    if into.device.type == "cpu":
        np.copyto(_array_over(into), source)
    else:
        into.copy_(torch.from_numpy(np.array(source)))


@dataclass(slots=True)
class Carried:
    """How values fared that were carried over to another dtype: ``infinite`` were finite before, ``zero``
    were not zero.
    """

    infinite: int = 0
    zero: int = 0


def carry_over(
    dest: torch.Tensor, dest_box: Box, piece: Box, region: Box, raw: Buffer, dtype: str
) -> Carried:
    """As ``place``, into a tensor of another dtype: each value becomes the nearest that it has, as
    ``Tensor.to`` rounds, and infinite beyond its range. ``dtype``: that of ``raw``.
    """
    saved = fresh_tensor(piece.extent, dtype)
    place(saved, piece, piece, piece, raw, dtype)
    source = saved[_slices(region, piece)]
    values = source.to(dest.dtype)
    dest.detach()[_slices(region, dest_box)].copy_(values)
    carried = Carried()
    for now, before in zip(_reals(values), _reals(source), strict=True):
        carried.infinite += int((now.isinf() & before.isfinite()).sum())
        carried.zero += int(((now == 0) & (before != 0)).sum())
    return carried


def _reals(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (tensor.real, tensor.imag) if tensor.is_complex() else (tensor,)


def _slices(region: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(
        slice(low - origin, low - origin + size)
        for low, size, origin in zip(region.offset, region.extent, outer.offset, strict=True)
    )
