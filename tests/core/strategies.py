"""What hypothesis draws: shapes, boxes inside them, and ways to cut a tensor over ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from ftckpt.boxes import Box


def shapes(max_dims: int = 3, max_side: int = 6) -> st.SearchStrategy[tuple[int, ...]]:
    """Of any tensor: 0-dimensional and empty ones too."""
    return st.lists(st.integers(0, max_side), max_size=max_dims).map(tuple)


@st.composite
def boxes_inside(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(low for low, _ in ends), tuple(high - low for low, high in ends))


@st.composite
def tilings(draw: st.DrawFn, shape: tuple[int, ...], max_cuts: int = 2) -> list[Box]:
    """Boxes that hold every element once: a grid of uneven cuts, empty parts among them, as FSDP and
    tensor parallelism make them.
    """
    parts: list[list[tuple[int, int]]] = [[]]
    for size in shape:
        cuts = sorted(draw(st.lists(st.integers(0, size), max_size=max_cuts)))
        edges = [0, *cuts, size]
        spans = [(low, high - low) for low, high in pairwise(edges)]
        parts = [[*part, span] for part in parts for span in spans]
    return [Box(tuple(o for o, _ in part), tuple(n for _, n in part)) for part in parts]


def elements(box: Box, shape: tuple[int, ...]) -> np.ndarray:
    """The box's elements as row-major numbers within a tensor of ``shape``, in the box's shape."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    return numbers[tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent, strict=True))]
