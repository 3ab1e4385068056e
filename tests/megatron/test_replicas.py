"""Law: parameters that Megatron keeps equal across ranks stay bit-identical under lossy compression."""

from tests.megatron.optimus_runs import LOSSY, TP2_PP2_DP2, run_optimus


def test_replicas_stay_bit_identical_with_everything_on_at_rank_4():
    runs = run_optimus(TP2_PP2_DP2, ["--train-iters", "20", *LOSSY])
    by_place = {(r.probed["stage"], r.probed["tensor_rank"], r.probed["data_rank"]): r for r in runs}
    assert len(by_place) == 8
    compared_over_tensor_ranks = 0
    for (stage, tensor_rank, data_rank), run in by_place.items():
        assert run.weights == by_place[stage, tensor_rank, 0].weights, "replicas over data-parallel ranks"
        for name, split in run.probed["split_over_tensor_ranks"].items():
            if not split:
                twin = by_place[stage, 0, data_rank].weights[name]
                assert run.weights[name] == twin, f"{name} differs between tensor-parallel ranks"
                compared_over_tensor_ranks += 1
    # 2 layers with 2 norms (weight and bias) and 2 row-parallel biases, at least, on each of 8 ranks.
    assert compared_over_tensor_ranks >= 8 * 12
    for tensor_rank in (0, 1):
        copies = {r.probed["tied"][0] for r in runs if r.probed["tensor_rank"] == tensor_rank}
        assert len(copies) == 1, "the tied embedding of the first and the last stage"


def test_compression_was_lossy_and_counted():
    runs = run_optimus(TP2_PP2_DP2, LOSSY)
    for run in runs:
        for raw, sent in (run.probed["traffic"]["DP gradients"], run.probed["traffic"]["embedding"]):
            assert 0 < sent < raw
