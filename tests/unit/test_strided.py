"""Few progressions cover a bucket's layout, and give the part of it that lies in a shard."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.techniques.strided import Progression, progressions


@pytest.mark.parametrize("layers", [3, 8, 32])
def test_progressions_are_as_many_as_matrices_of_a_layer_and_one_more_for_what_stands_before(layers: int) -> None:
    assert progressions(range(7, 7 + layers * 100, 100)) == [Progression(7, 100, layers)]
    several = [100 * layer + place for layer in range(layers) for place in (3, 20, 65)]
    assert [p.count for p in progressions(several)] == [layers] * 3
    assert len(progressions([0, *range(1013, 1013 + 100 * layers, 100)])) == 2


@given(st.sets(st.integers(0, 200), min_size=1, max_size=40))
def test_every_offset_is_covered_once(offsets: set[int]) -> None:
    assert sorted(p.first + i * p.stride for p in progressions(offsets) for i in range(p.count)) == sorted(offsets)


@given(st.integers(0, 9), st.integers(5, 12), st.integers(1, 8), st.tuples(st.integers(0, 110), st.integers(0, 110)))
def test_what_lies_in_a_shard_is_found_element_by_element(
    first: int, stride: int, count: int, bounds: tuple[int, int]
) -> None:
    (start, stop), numel = sorted(bounds), 5
    pieces = Progression(first, stride, count).shared_with(start, stop, numel)
    assert len(pieces) <= 3
    found = [
        first + (piece.index + i) * stride + element
        for piece in pieces
        for i in range(piece.count)
        for element in range(piece.low, piece.high)
    ]
    everywhere = [first + i * stride + element for i in range(count) for element in range(numel)]
    assert found == [place for place in everywhere if start <= place < stop]


def test_a_batch_is_a_view_into_the_flat_buffer() -> None:
    flat = torch.arange(40.0)
    batch = Progression(2, 10, 3).batch(flat[5:], (2, 3))
    assert batch[:, 0, 0].tolist() == [7.0, 17.0, 27.0]
    assert batch[1].flatten().tolist() == [17.0, 18.0, 19.0, 20.0, 21.0, 22.0]
    batch.zero_()
    assert flat[17] == 0 and flat[23] == 23


def test_tensors_at_one_place_are_refused_and_not_counted_for_ever():
    with pytest.raises(ValueError, match="overlap"):
        progressions([0, 8, 0])
