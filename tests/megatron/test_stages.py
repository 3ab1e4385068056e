"""SC in Megatron: which stages are compressed, and the bytes that this saves."""

import pytest

from tests.megatron import runs as table
from tests.megatron.specs import uses
from tests.megatron_runs import last_stage_losses

pytestmark = pytest.mark.ci


@uses(table.REPORTED)
def test_only_the_first_n_stages_are_compressed(runs):
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["DP gradients"]
        if rank.stage == 0:
            assert rank.ours.compressed_matrices > 0 and sent < raw
        else:
            assert rank.ours.compressed_matrices == 0 and sent == raw


@uses((table.INSTALLED, table.LOSSY_EVALUATED))
def test_counted_raw_traffic_is_what_vanilla_sends(runs):
    off, on = runs
    for vanilla, compressed in zip(off.ranks, on.ranks, strict=True):
        for traffic_class, (raw, sent) in vanilla.ours.traffic.items():
            assert raw == sent, "nothing is compressed"
            assert compressed.ours.traffic[traffic_class][0] == raw


@uses((table.EXPERTS_AMONG, table.EXPERTS_UNPAID))
def test_a_bucket_whose_factors_and_dense_rest_save_nothing_is_megatrons_to_the_bit_and_that_is_said(runs):
    """The distributed optimizer reduces local experts by a reduce-scatter, half the bytes of low rank's all-reduce."""
    vanilla, ours = runs
    assert last_stage_losses(ours.ranks) == last_stage_losses(vanilla.ranks)
    (line,) = [line for line in ours.said if "saves nothing" in line]
    assert line.startswith("--dp-compression-rank 4: saves nothing on this model: low rank would send more bytes")
    for rank in ours.ranks:
        raw, sent = rank.ours.traffic["DP gradients"]
        assert raw == sent > 0 and rank.ours.compressed_matrices == 0


@uses(table.EXPERTS_IN_ONE_LAYER)
def test_buckets_that_stay_dense_beside_compressed_ones_are_counted_in_a_line(runs):
    lines = [line for line in runs.said if line.startswith("DP gradients: ")]
    assert lines == ["DP gradients: 2 of 6 buckets of a rank stay dense, because compression would send no fewer bytes"]
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["DP gradients"]
        assert 0 < sent < raw and rank.ours.compressed_matrices > 0


@uses(table.NOTHING_SHRINKS)
def test_what_saves_nothing_is_said_before_the_first_iteration(runs):
    warning = (
        "--dp-compression-rank 128: saves nothing on this model: low rank would send more bytes, so DP gradients "
        "traffic is sent uncompressed. Lower the rank, or choose int8"
    )
    assert [line for line in runs.said if "saves nothing" in line] == [warning]
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["DP gradients"]
        assert raw == sent and rank.ours.compressed_matrices == 0
