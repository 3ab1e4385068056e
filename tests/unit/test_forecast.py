"""What is forecast from measurements: gains by technique, what does not pay, and the stages that `auto` chooses."""

from dataclasses import replace

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.forecast.decide import EmbeddingBytes, Forecast, Measured, forecast
from optimus_cc_ext.forecast.probe import Rate
from optimus_cc_ext.techniques.schedule import NonInterleaved

ALL = OptimusConfig(compressed_backprop=True, fused_embedding_sync=True, dp_compression=True)
AUTO = ALL.replace(dp_compression_stages="auto")
SCHEDULE = NonInterleaved(2, 4)


def cluster(bytes_per_second: float, **changes: object) -> list[Measured]:
    """PP2 x DP2: a pass of 10 and 20 ms, messages of 1 MB, gradients of 10 MB, an embedding of 1 MB."""
    rate = Rate(0.0, bytes_per_second)
    rank = Measured(
        stage=0, forward=0.01, backward=0.02, link=rate, dense_sum=rate, factor_sum=rate,
        message_bytes=1_000_000, compressed_message_bytes=50_000, compress=0.001, decompress=0.0005,
        dense_bytes=10_000_000, compressed_bytes=1_000_000, compress_gradients=0.02,
        embedding=EmbeddingBytes(with_replicas=1_000_000, with_pair=1_000_000, fused=1_500_000),
    )  # fmt: skip
    return [replace(rank, stage=stage, **changes) for stage in (0, 0, 1, 1)]


def one_stage(**changes: object) -> list[Measured]:
    """Two replicas, with nothing but passes and the reduction."""
    return [replace(m, link=None, embedding=EmbeddingBytes()) for m in cluster(1e6, **changes)[:2]]


def both(found: Forecast) -> str:
    return "\n".join(found.lines())


def test_on_slow_links_every_technique_gains_and_auto_compresses_both_stages() -> None:
    found = forecast(cluster(6e6), SCHEDULE, AUTO, None)
    assert found.compressed_stages == {0, 1}
    assert found.ours < found.plain / 1.5
    assert all(found.ours < without for without in found.without.values())
    assert "does not pay" not in both(found)


def test_a_stage_without_the_memory_for_residuals_is_not_chosen_and_the_cure_is_said() -> None:
    ranks = cluster(6e6)
    ranks[1] = replace(ranks[1], lacking=2_000_000)
    found = forecast(ranks, SCHEDULE, AUTO, None)
    assert found.compressed_stages == {1}
    assert "stage 0 is not compressed: its GPUs lack 2 MB for residuals. --compression-state-dtype bf16" in both(found)


def test_on_fast_links_each_loser_is_named_with_its_flag_and_auto_compresses_nothing() -> None:
    slow_compressors = cluster(1e12, compress=0.05)
    fixed = forecast(slow_compressors, SCHEDULE, ALL, frozenset({0, 1}))
    assert "It does not pay here: leave out --compressed-backprop" in both(fixed)
    assert "leave out --dp-compression, or give --dp-compression-stages auto" in both(fixed)
    assert "leave out --fused" not in both(fixed)
    chosen = forecast(slow_compressors, SCHEDULE, AUTO, None)
    assert chosen.compressed_stages == frozenset()
    assert "no stage's reduction is worth compressing" in both(chosen)


def test_bytes_and_rates_make_the_seconds_of_a_reduction() -> None:
    ranks = one_stage()
    ranks[1] = replace(ranks[1], dense_sum=Rate(0.5, 2e6))
    config = OptimusConfig(dp_compression=True)
    found = forecast(ranks, NonInterleaved(1, 4), config, frozenset({0}))
    passes = 4 * 0.03
    assert found.plain == pytest.approx(passes + 10.0), "the slower replica is what is waited for"
    assert found.ours == pytest.approx(passes + 1.0 + 0.02)
    assert found.without == {"--dp-compression": pytest.approx(found.plain)}


def test_a_fused_embedding_no_longer_travels_with_its_replicas() -> None:
    config = OptimusConfig(fused_embedding_sync=True)
    found = forecast(cluster(1e6), SCHEDULE, config, frozenset())
    assert found.plain - found.ours == pytest.approx(1.0 + 1.0 - 1.5)
    of_shards = EmbeddingBytes(
        with_replicas=1_000_000, with_pair=1_000_000, fused=1_500_000, fused_with_replicas=1_000_000
    )  # fmt: skip
    sharded = forecast(cluster(1e6, embedding=of_shards), SCHEDULE, config, frozenset())
    assert sharded.plain - sharded.ours == pytest.approx(1.0 - 1.5), "only the sum over the pair is another one"


def test_overlapped_reductions_count_only_what_the_backward_pass_does_not_hide() -> None:
    config = OptimusConfig(dp_compression=True)
    one, ten = (forecast(cluster(1e9, buckets=n), SCHEDULE, config, frozenset()) for n in (1, 10))
    assert ten.plain < one.plain


def test_of_a_compressed_reduction_only_the_first_phase_is_hidden() -> None:
    # One stage, whose last backward pass is longer than everything that is reduced.
    ranks = one_stage(backward=20.0)
    passes, whole = 4 * 20.01, 1.0 + 0.02
    for buckets, left in (1, whole), (10, whole / 2 + whole / 2 / 10):
        overlapping = [replace(m, buckets=buckets) for m in ranks]
        found = forecast(overlapping, NonInterleaved(1, 4), OptimusConfig(dp_compression=True), frozenset({0}))
        assert found.ours == pytest.approx(passes + left)


def test_blocks_for_the_distributed_optimizer_have_one_phase_only() -> None:
    ranks = one_stage(backward=20.0, second_phase=0.0, buckets=10)
    found = forecast(ranks, NonInterleaved(1, 4), OptimusConfig(dp_compression_format="int4"), frozenset({0}))
    assert found.ours == pytest.approx(4 * 20.01 + (1.0 + 0.02) / 10)


def test_encoded_activations_gain_what_they_save_and_cost_what_encoding_takes() -> None:
    config = OptimusConfig(pipeline_forward_format="fp8")
    slow, fast = (
        forecast(
            cluster(rate, compressed_activation_bytes=250_000, encode=0.01, decode=0.01), SCHEDULE, config, frozenset()
        )
        for rate in (1e6, 1e12)
    )
    # The first activation arrives that much earlier; then gradients, one behind the other, are what is waited for.
    assert slow.plain - slow.ours == pytest.approx(0.75, abs=0.05)
    assert "It does not pay here: leave out --pipeline-forward-format" in both(fast)


def test_the_gather_of_parameters_is_said_and_not_part_of_the_comparison() -> None:
    with_it, without = (
        forecast(cluster(1e6, gather_bytes=nbytes, compressed_gather_bytes=nbytes), SCHEDULE, ALL, frozenset({0, 1}))
        for nbytes in (2_000_000, 0)
    )
    assert (with_it.plain, with_it.ours) == (without.plain, without.ours)
    said = "parameter gather: 2000 ms beside that, as in vanilla Megatron"
    assert said in both(with_it) and "gather" not in both(without)


@pytest.mark.parametrize(("rate", "pays"), [(1e6, True), (1e8, False)])
def test_of_a_compressed_gather_it_is_said_what_it_gains_and_where_it_does_not_pay(rate: float, pays: bool) -> None:
    config = OptimusConfig(param_gather_format="int4")
    measured = cluster(rate, gather_bytes=2_000_000, compressed_gather_bytes=500_000, code_parameters=0.1)
    said = both(forecast(measured, SCHEDULE, config, frozenset()))
    assert (f"parameter gather: {600 if pays else 105} ms beside that, instead of {2000 if pays else 20} ms") in said
    assert ("give --param-gather-format dense" not in said) == pays


def test_a_forecast_says_which_warm_ups_it_leaves_out() -> None:
    config = ALL.replace(dp_compression_warmup=0.25, compressed_backprop_warmup=0.5)
    said = both(forecast(cluster(1e6), SCHEDULE, config, frozenset({0})))
    assert "after the warm-up (--compressed-backprop-warmup 0.5, --dp-compression-warmup 0.25)" in said
    only_gradients = config.replace(compressed_backprop=False)
    assert "(--dp-compression-warmup 0.25)" in both(forecast(cluster(1e6), SCHEDULE, only_gradients, frozenset({0})))
    assert "warm-up" not in both(forecast(cluster(1e6), SCHEDULE, ALL, frozenset({0})))


def test_only_the_classes_that_are_switched_on_have_a_line() -> None:
    found = forecast(cluster(1e6), SCHEDULE, OptimusConfig(fused_embedding_sync=True), frozenset())
    assert len(found.lines()) == 2 and "embedding, fused" in both(found)
    assert "1.0 MB/s between stages, 1.0 MB/s among replicas" in found.lines()[0]
