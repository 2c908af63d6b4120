"""What a leaf is, apart from its bytes: name, element type, global shape, and who holds which part.

A *leaf* is one value of the state. Tensors keep their dtype and shape; everything of a component
that is not a tensor (its structure, numbers, strings) is one leaf of kind ``"value"``: packed
bytes, named like the component. No torch here: dtypes are names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ftckpt.boxes import Box

Kind = Literal["tensor", "value"]

ITEMSIZE_BYTES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
"""Every element type of format 1, by torch's name without ``torch.``, and its size."""


def is_in(name: str, prefix: str) -> bool:
    """Whether ``name`` is ``prefix`` or stands inside of it: ``actor.w`` in ``actor``, not in ``act``."""
    return name == prefix or (name.startswith(prefix) and name[len(prefix)] in ".@")


class LeafSpec(msgspec.Struct, frozen=True, order=True, gc=False):
    """What is the same on every holder. ``shape`` is the global one; a value leaf has dtype
    ``uint8`` and shape ``(bytes,)``. ``owner`` is ``group.rank`` for a ``PerRank`` leaf, else "".
    """

    name: str
    kind: Kind
    dtype: str
    shape: tuple[int, ...]
    owner: str = ""

    @property
    def itemsize_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype]


class Holding(msgspec.Struct, frozen=True, gc=False):
    """The part of a leaf that one rank has, and which ranks have the very same part.

    ``ranks`` are ranks inside the replica group, this one included, ascending. ``every_group`` says
    that all participating groups hold it too (everything but ``PerRank`` leaves). ``frozen`` leaves
    never change after the first save; ``owned`` ones belong to an optimizer of the state.
    """

    leaf: LeafSpec
    box: Box
    ranks: tuple[int, ...]
    every_group: bool = True
    frozen: bool = False
    owned: bool = False

    @property
    def size_bytes(self) -> int:
        return self.box.numel * self.leaf.itemsize_bytes
