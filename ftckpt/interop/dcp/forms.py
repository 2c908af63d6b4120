"""What of a DCP state dict is no tensor: as bytes of ours, and as the bytes that DCP's planners take.

DCP pickles such values, and unpickles whatever it finds under their keys. Here a plain value is kept as
tagged MessagePack and given back to the planner as DCP's form of that very value: what torch then
unpickles was made a moment ago, of plain values, in this process. What has no form of ours is refused;
it is kept as the planner gave it, and given back to be unpickled, only where both sides ask for that.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import assert_never

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from ftckpt import values
from ftckpt.errors import UnsupportedValue, first_line
from ftckpt.interop.dcp.names import Form

LARGEST_PLAIN_BYTES = 16 << 10
"""Beyond that a value has a leaf of its own, so that it is written by the rank that has it."""


@dataclass(frozen=True, slots=True)
class Lowered:
    """A value as bytes. ``position`` is that of a stream."""

    form: Form
    data: bytes
    position: int = 0


def lower(item: WriteItem, planner: SavePlanner, *, allow_pickle: bool) -> Lowered:
    """What is to be kept of a value that is no tensor.

    Raises:
        UnsupportedValue: it has no form but a pickle, and that is not allowed.
    """
    why = f"{type(planner).__qualname__} spells values itself"
    if isinstance(planner, DefaultSavePlanner) and _gives_what_it_has(planner):
        value = planner.lookup_object(item.index)
        if type(value) is io.BytesIO:
            return Lowered("stream", value.getvalue(), value.tell())
        try:
            data = values.pack(value, leaf=item.index.fqn)
        except UnsupportedValue as error:
            why = first_line(error)
        else:
            return Lowered("plain" if len(data) <= LARGEST_PLAIN_BYTES else "packed", data)
    if not allow_pickle:
        raise UnsupportedValue(
            f"UnsupportedValue: {item.index.fqn} has no form but the bytes that the planner gives, a pickle to DCP\n"
            f"  {why}\n"
            "  this step will not be readable; earlier commits are intact\n"
            "  convert it to tensors, numbers, text, lists or dicts; or keep the pickle, which runs code when it is "
            "loaded: StorageWriter(uri, allow_pickle=True), and StorageReader likewise",
            leaf=item.index.fqn,
        )
    given = planner.resolve_data(item)
    assert isinstance(given, io.BytesIO), type(given)
    return Lowered("given", given.getvalue())


def _gives_what_it_has(planner: DefaultSavePlanner) -> bool:
    """Whether its bytes are nothing but the pickled value."""
    kind = type(planner)
    return (
        kind.resolve_data is DefaultSavePlanner.resolve_data
        and kind.transform_object is DefaultSavePlanner.transform_object
    )


def as_given(form: Form, data: bytes, position: int) -> io.BytesIO:
    """The stream that a load planner takes for a value."""
    if form == "given":
        return io.BytesIO(data)
    if form == "stream":
        stream = io.BytesIO(data)
        stream.seek(position)
        return in_dcp_form(stream)
    if form == "packed":
        return in_dcp_form(values.unpack(data))
    if form == "plain":
        raise AssertionError("a plain value stands in its component's tree")
    assert_never(form)


def in_dcp_form(value: object) -> io.BytesIO:
    """A plain value as DCP's planners take it. Nothing of it goes to a store."""
    stream = io.BytesIO()
    torch.save(value, stream)  # noqa: TID251 - DCP's interface knows values only like this
    stream.seek(0)
    return stream
