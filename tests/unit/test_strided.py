"""Few progressions cover a bucket's layout, and say what of them lies in a shard."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.techniques.strided import Progression, progressions


def offsets_of(found: list[Progression]) -> list[int]:
    return [p.first + i * p.stride for p in found for i in range(p.count)]


def test_one_matrix_per_layer_is_one_progression() -> None:
    assert progressions(range(7, 7 + 32 * 100, 100)) == [Progression(7, 100, 32)]


def test_several_per_layer_are_as_many_progressions_at_any_number_of_layers() -> None:
    for layers in (3, 8, 32):
        offsets = [100 * layer + place for layer in range(layers) for place in (3, 20, 65)]
        assert [p.count for p in progressions(offsets)] == [layers] * 3


def test_what_stands_alone_before_the_layers_costs_one_progression_more() -> None:
    for layers in (3, 8, 32):
        found = progressions([0, *range(1013, 1013 + 100 * layers, 100)])
        assert len(found) == 2


@given(st.sets(st.integers(0, 200), min_size=1, max_size=40))
def test_every_offset_is_covered_once(offsets: set[int]) -> None:
    assert sorted(offsets_of(progressions(offsets))) == sorted(offsets)


@given(
    st.integers(0, 9), st.integers(5, 12), st.integers(1, 8), st.integers(0, 110), st.integers(0, 110)
)  # fmt: skip
def test_what_lies_in_a_shard_is_found_element_by_element(
    first: int, stride: int, count: int, one: int, other: int
) -> None:
    start, stop, numel = min(one, other), max(one, other), 5
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


def test_a_batch_is_a_view_of_the_storage() -> None:
    flat = torch.arange(40.0)
    batch = Progression(2, 10, 3).batch(flat[5:], (2, 3))
    assert batch[:, 0, 0].tolist() == [2.0, 12.0, 22.0]
    assert batch[1].flatten().tolist() == [12.0, 13.0, 14.0, 15.0, 16.0, 17.0]
    batch.zero_()
    assert flat[12] == 0 and flat[18] == 18


def test_tensors_of_different_storages_are_refused_and_not_counted_for_ever():
    with pytest.raises(ValueError, match="views of one storage"):
        progressions([0, 8, 0])
