"""SC in Megatron: which stages are compressed, by number or by measurement, and the bytes that this saves.

The rates of the links are set, slow or fast, so that the decision is known; `scripts/bench` measures
`--dp-compression-stages auto` on links that are really slow.
"""

import pytest

from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS
from tests.megatron import runs as table
from tests.megatron.specs import full, uses
from tests.megatron.test_checkpoints import assert_goes_on
from tests.megatron_runs import last_stage_losses

FIRST_COMPRESSED = 2
"""Number of iterations that have finished when the stages are chosen."""


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


@uses((table.VANILLA, table.CHOSEN, table.CHOSEN_BEFORE))
def test_on_slow_links_it_is_vanilla_until_it_compresses_and_a_resumed_run_keeps_the_choice(runs):
    vanilla, whole, resumed = runs
    assert all(rank.ours.compressed_matrices > 0 for rank in whole.ranks)
    assert "--dp-compression-stages auto: compressed stages (of 2): 0, 1" in whole.said
    memory = [line for line in whole.said if line.startswith(f"{COMPRESSION_STATE} in")]
    assert len(memory) == 2, "before the first iteration, and once the stages are known"
    assert "0.0 MB gradient buckets" in memory[0] and "0.0 MB gradient buckets" not in memory[1]
    (announced,) = [line for line in whole.said if line.startswith("--dp-compression-stages auto will add up to")]
    (messages,) = [line for line in whole.said if line.startswith(MESSAGE_BUFFERS)]
    buckets = float(memory[1].split("link, ")[1].split(" MB gradient")[0])
    later, sent = (float(line.split("up to ")[1].split(" MB")[0]) for line in (announced, messages))
    # Each of the three printed numbers is rounded to a tenth.
    assert later == pytest.approx(buckets + sent, abs=0.16), "said before the first iteration"
    expected, losses = last_stage_losses(vanilla.ranks), last_stage_losses(whole.ranks)
    # The loss of an iteration shows the updates before it.
    assert losses[: FIRST_COMPRESSED + 1] == expected[: FIRST_COMPRESSED + 1]
    assert losses[FIRST_COMPRESSED + 1] != expected[FIRST_COMPRESSED + 1]
    assert_goes_on(resumed, whole, 4)


@uses(full(table.VANILLA_SHARDED, table.NONE_CHOSEN))
def test_on_fast_links_it_stays_vanilla_to_the_bit_and_says_so(runs):
    vanilla, ours = runs
    assert last_stage_losses(ours.ranks) == last_stage_losses(vanilla.ranks)
    assert [rank.ours.compressed_matrices for rank in ours.ranks] == [0] * 4
    assert "forecast: DP gradients, compressed: no stage's reduction is worth compressing" in ours.said
    assert "--dp-compression-stages auto: compressed stages (of 2): none" in ours.said


@uses((table.LOSSY_RUN, table.LOSSY_FORECAST))
def test_links_are_measured_once_and_what_gains_or_loses_is_said_by_the_first_rank_only(runs):
    silent, measured = runs
    lines = [[line for line in rank.said if "forecast" in line] for rank in measured.ranks]
    assert len(lines[0]) == 4, "the links, and a line for each class"
    assert not any(lines[1:])
    assert not [line for line in silent.said if "forecast" in line]
    assert last_stage_losses(silent.ranks) == last_stage_losses(measured.ranks), "measuring changes nothing computed"


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
def test_what_saves_nothing_is_said_before_the_first_iteration_and_is_forecast_no_gain(runs):
    warning = (
        "--dp-compression-rank 128: saves nothing on this model: low rank would send more bytes, so DP gradients "
        "traffic is sent uncompressed. Lower the rank, or choose int8"
    )
    assert [line for line in runs.said if "saves nothing" in line] == [warning, f"forecast: {warning}"]
    assert not [line for line in runs.said if line.startswith("forecast: DP gradients")]
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["DP gradients"]
        assert raw == sent and rank.ours.compressed_matrices == 0
