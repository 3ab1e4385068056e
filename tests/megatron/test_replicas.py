"""Law: parameters that Megatron keeps equal across ranks stay bit-identical under lossy compression."""

from tests.megatron.runs import BLOCKS_TP2, GATHER_TP2, LOSSY_TP2
from tests.megatron.specs import full, uses


@uses(LOSSY_TP2, full(BLOCKS_TP2), full(GATHER_TP2))
def test_replicas_stay_bit_identical_at_rank_4_and_in_blocks(runs):
    by_place = runs.by_place()
    assert len(by_place) == 8
    compared_over_tensor_ranks = 0
    for (stage, tensor_rank, data_rank), run in by_place.items():
        assert run.weights == by_place[stage, tensor_rank, 0].weights, "replicas over data-parallel ranks"
        for name, split in run.split_over_tensor_ranks.items():
            if not split:
                twin = by_place[stage, 0, data_rank].weights[name]
                assert run.weights[name] == twin, f"{name} differs between tensor-parallel ranks"
                compared_over_tensor_ranks += 1
    # Each of 8 ranks has at least 2 layers with 2 norms (weight and bias) and 2 row-parallel biases.
    assert compared_over_tensor_ranks >= 8 * 12
    for tensor_rank in (0, 1):
        copies = {copy for place, run in by_place.items() if place[1] == tensor_rank for copy in run.tied.values()}
        assert len(copies) == 1, "the tied embedding of the first and the last stage"


@uses(LOSSY_TP2, full(BLOCKS_TP2))
def test_compression_was_lossy_and_counted(runs):
    for rank in runs.ranks:
        for raw, sent in (rank.ours.traffic["DP gradients"], rank.ours.traffic["embedding"]):
            assert 0 < sent < raw
