"""Geometry against NumPy and brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ftckpt.boxes import Box, intersect, overlap, rows_touched, span_boxes, whole
from tests.core.strategies import boxes_inside, elements, shapes


@given(st.data(), shapes())
def test_the_pieces_of_a_span_are_its_elements_in_order(data, shape):
    box = data.draw(boxes_inside(shape))
    start, stop = sorted(data.draw(st.tuples(st.integers(0, box.numel), st.integers(0, box.numel))))

    pieces = list(span_boxes(box, start, stop))

    flat = elements(box, shape).reshape(-1)
    found = [elements(piece, shape).reshape(-1) for _, piece in pieces]
    np.testing.assert_array_equal(np.concatenate([flat[:0], *found]), flat[start:stop])
    assert all(np.array_equal(flat[first:][: p.numel], elements(p, shape).reshape(-1)) for first, p in pieces)
    assert all(piece.numel for _, piece in pieces)
    assert len(pieces) <= max(1, 2 * len(shape) - 1)


def test_a_span_through_the_middle_of_a_matrix_is_three_boxes():
    pieces = list(span_boxes(Box((10, 20), (4, 5)), 3, 17))

    assert pieces == [
        (3, Box((10, 23), (1, 2))),
        (5, Box((11, 20), (2, 5))),
        (15, Box((13, 20), (1, 2))),
    ]


@given(st.data(), shapes())
def test_an_intersection_is_what_both_sets_of_elements_share(data, shape):
    a, b = data.draw(boxes_inside(shape)), data.draw(boxes_inside(shape))

    both = intersect(a, b)

    shared = np.intersect1d(elements(a, shape), elements(b, shape))
    assert (both is None) == (not shared.size)
    if both is not None:
        np.testing.assert_array_equal(np.sort(elements(both, shape).reshape(-1)), shared)


def test_a_scalar_meets_itself():
    scalar = whole(())

    assert scalar.numel == 1
    assert intersect(scalar, scalar) == scalar
    assert list(span_boxes(scalar, 0, 1)) == [(0, scalar)]
    assert overlap([scalar, scalar]) == (scalar, scalar)
    assert overlap([scalar]) is None


@given(st.data(), shapes(max_side=4), st.integers(0, 6))
def test_overlap_agrees_with_comparing_every_pair(data, shape, count):
    boxes = [data.draw(boxes_inside(shape)) for _ in range(count)]

    found = overlap(boxes)

    assert (found is not None) == any(intersect(a, b) for a, b in combinations(boxes, 2))
    if found is not None:
        assert intersect(*found) is not None


@given(st.data(), shapes())
def test_rows_touched_is_the_smallest_span_that_holds_the_region(data, shape):
    box = data.draw(boxes_inside(shape))
    region = intersect(box, data.draw(boxes_inside(shape)))
    if region is None:
        return

    first, last = rows_touched(box, region)

    flat = elements(box, shape).reshape(-1)
    places = np.flatnonzero(np.isin(flat, elements(region, shape)))
    assert (first, last) == (places[0], places[-1] + 1)
