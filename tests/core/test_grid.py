"""The cells of a lazy view: whatever was saved, they tile the tensor, and are exact where that is cheap."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from ftckpt.boxes import Box, intersect, span_boxes, whole
from ftckpt.plan.assign import chunk_spans
from ftckpt.plan.grid import arranged, cell_shape
from ftckpt.plan.restore import Saved
from tests.core.records import chunk
from tests.core.strategies import boxes_inside, shapes, tilings


@st.composite
def saved_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[Box, int, int]]]:
    shape = draw(shapes(max_side=12))
    spans = [
        (box, start, stop)
        for box in draw(tilings(shape))
        for start, stop in chunk_spans(box.numel, 4, draw(st.integers(4, 200)))
    ]
    return shape, spans


@given(saved_tensors(), st.integers(1, 400), st.integers(1, 400))
def test_cells_fit_the_tensor_and_their_bound(tensor, cell_bytes, least_bytes):
    shape, spans = tensor

    cell = cell_shape(shape, 4, spans, cell_bytes=cell_bytes, least_bytes=least_bytes)

    assert len(cell) == len(shape)
    assert all(1 <= side <= max(1, size) for side, size in zip(cell, shape, strict=True))
    assert prod(cell) * 4 <= max(cell_bytes, 4)


def test_cells_of_whole_rows_meet_one_chunk_each():
    """100 rows of 8 in chunks of 6 rows: cells of 3 rows, as 4 would lie across an edge."""
    spans = [(whole((100, 8)), start, stop) for start, stop in chunk_spans(800, 4, 6 * 8 * 4)]

    assert cell_shape((100, 8), 4, spans, cell_bytes=4 * 8 * 4, least_bytes=8) == (3, 8)
    assert cell_shape((100, 8), 4, spans, cell_bytes=4 * 8 * 4, least_bytes=4 * 8 * 4) == (4, 8)


@given(saved_tensors(), st.data())
def test_the_chunks_that_hold_a_part_of_a_region_are_found(tensor, data):
    shape, spans = tensor
    region = data.draw(boxes_inside(shape))
    every = [Saved("w", box, chunk(start, stop), "packs/p", 1) for box, start, stop in spans]

    found = list(arranged(every).meeting(region))

    needed = [
        saved
        for saved in every
        if any(
            intersect(piece, region)
            for _, piece in span_boxes(saved.box, saved.chunk.start, saved.chunk.stop)
        )
    ]
    assert all(saved in found for saved in needed)
    assert len(found) == len({id(saved) for saved in found})
