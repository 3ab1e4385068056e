"""Forecast from measurements: gains by technique, classes that do not pay, and the stages that `auto` chooses."""

import gc
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.forecast.forecast import Forecast, Measured, forecast
from optimus_cc_ext.forecast.timeline import FREE, ClassCost, Link, RankCost, Rate, Sent, When, reduction
from optimus_cc_ext.hooks.schedules import _Forecasters
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.session import Session

ALL = OptimusConfig(compressed_backprop=True, fused_embedding_sync=True, dp_compression=True)
AUTO = ALL.replace(dp_compression_stages="auto")
SCHEDULE = NonInterleaved(2, 4)


def rank(
    stage: int,
    rate: Rate,
    *,
    dense_sum: Rate | None = None,
    backward: float = 0.02,
    buckets: int = 1,
    stages: int = 2,
    encode: float = 0.0,
    compress: float = 0.001,
    activation_bytes: int = 0,
    second_phase: float = 0.5,
    fused_with_replicas: int = 0,
    gather: tuple[int, int] = (0, 0),
    code_parameters: float = 0.0,
) -> Measured:
    """Return a rank of PP2 x DP2: a pass of 10 and 20 ms, messages of 1 MB, gradients of 10 MB, an embedding of 1
    MB.
    """
    dense_sum, link = dense_sum or rate, rate if stages > 1 else FREE
    embedding = 1_000_000 if stages > 1 else 0
    classes = (
        ClassCost(
            "pipeline forward", When.ACTIVATION, Link.STAGES,
            link.sent(1_000_000), link.sent(activation_bytes, encode=encode, decode=encode),
        ),
        ClassCost(
            "pipeline backward", When.GRADIENT, Link.STAGES,
            link.sent(1_000_000), link.sent(50_000, encode=compress, decode=0.0005),
        ),
        ClassCost(
            "DP gradients", When.AFTER_BACKWARD, Link.REPLICAS,
            dense_sum.sent(10_000_000), reduction(rate, 1_000_000, 0.02, second_phase),
        ),
        ClassCost(
            "embedding", When.AFTER_BACKWARD, Link.REPLICAS,
            dense_sum.sent(embedding), dense_sum.sent(fused_with_replicas),
        ),
        ClassCost(
            "embedding", When.AFTER_BACKWARD, Link.ENDS, rate.sent(embedding), rate.sent(embedding * 3 // 2),
        ),
        ClassCost(
            "parameter gather", When.AFTER_STEP, Link.REPLICAS,
            rate.sent(gather[0]), rate.sent(gather[1], encode=code_parameters),
        ),
    )  # fmt: skip
    cost = RankCost(stage=stage, forward=0.01, backward=backward, classes=classes, buckets=buckets)
    return Measured(cost=cost, link=rate if stages > 1 else None, replicas=rate)


def cluster(bytes_per_second: float, **changes: Any) -> list[Measured]:
    return [rank(stage, Rate(0.0, bytes_per_second), **changes) for stage in (0, 0, 1, 1)]


def one_stage(*changes: dict[str, Any]) -> list[Measured]:
    """Return the costs of two replicas on one stage, with nothing but passes and the reduction."""
    return [rank(0, Rate(0.0, 1e6), stages=1, **each) for each in changes * (3 - len(changes))]


def both(found: Forecast) -> str:
    return "\n".join(found.lines())


def test_on_slow_links_every_technique_gains_and_auto_compresses_both_stages() -> None:
    found = forecast(cluster(6e6), SCHEDULE, AUTO, None)
    assert found.compressed_stages == {0, 1}
    assert found.ours.reduced < found.plain.reduced / 1.5
    assert all(found.ours.reduced < without for without in found.without.values())
    assert "does not pay" not in both(found) and "% less) on 2 of 2 stages (0, 1)" in both(found)


def _in_levels(two: float, one: float) -> Forecast:
    """Forecast one stage whose reduction takes 10 s dense, `two` seconds in two levels, and `one` in one level."""

    def cost(seconds: float) -> RankCost:
        found = rank(0, Rate(0.0, 1e6), stages=1).cost
        reduced = Sent(nbytes=1.0, transfer=seconds)
        return replace(
            found, classes=tuple(
                replace(each, compressed=reduced) if each.name == "DP gradients" else each for each in found.classes
            )
        )  # fmt: skip

    everyone = [Measured(cost=cost(two), link=None, replicas=None, in_one_level=cost(one))] * 2
    return forecast(everyone, NonInterleaved(1, 4), AUTO, None)


@pytest.mark.parametrize(
    ("two", "one", "one_level", "stages"),
    [(1.0, 5.0, False, {0}), (5.0, 1.0, True, {0}), (20.0, 15.0, True, set()), (15.0, 20.0, False, set())],
)
def test_auto_takes_the_fastest_of_dense_one_level_and_two_levels(
    two: float, one: float, one_level: bool, stages: set[int]
) -> None:
    found = _in_levels(two, one)
    assert (found.one_level, set(found.compressed_stages)) == (one_level, stages)
    assert not forecast(
        [Measured(cost=rank(0, Rate(0.0, 1e6), stages=1).cost, link=None, replicas=None)],
        NonInterleaved(1, 4),
        AUTO,
        None,
    ).one_level, "without two levels there is nothing to choose"


def test_a_stage_without_the_memory_for_residuals_is_not_chosen_and_the_cure_is_said() -> None:
    ranks = cluster(6e6)
    ranks[1] = replace(ranks[1], lacking=2_000_000)
    found = forecast(ranks, SCHEDULE, AUTO, None)
    assert found.compressed_stages == {1}
    assert (
        "stage 0 is not compressed: its GPUs lack 2 MB for compression state and message buffers. "
        "--compression-state-dtype bf16" in both(found)
    )


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
    ranks = one_stage({}, {"dense_sum": Rate(0.5, 2e6)})
    config = OptimusConfig(dp_compression=True)
    found = forecast(ranks, NonInterleaved(1, 4), config, frozenset({0}))
    passes = 4 * 0.03
    assert found.plain.reduced == pytest.approx(passes + 10.0), "the slower replica is what is waited for"
    assert found.ours.reduced == pytest.approx(passes + 1.0 + 0.02)
    assert found.without == {"DP gradients": pytest.approx(found.plain.reduced)}


def test_a_fused_embedding_no_longer_travels_with_its_replicas() -> None:
    config = OptimusConfig(fused_embedding_sync=True)
    found = forecast(cluster(1e6), SCHEDULE, config, frozenset())
    assert found.plain.reduced - found.ours.reduced == pytest.approx(1.0 + 1.0 - 1.5)
    sharded = forecast(cluster(1e6, fused_with_replicas=1_000_000), SCHEDULE, config, frozenset())
    assert sharded.plain.reduced - sharded.ours.reduced == pytest.approx(1.0 - 1.5), (
        "only the sum over the pair is another one"
    )


def test_overlapped_reductions_count_only_what_the_backward_pass_does_not_hide() -> None:
    config = OptimusConfig(dp_compression=True)
    one, ten = (forecast(cluster(1e9, buckets=n), SCHEDULE, config, frozenset()) for n in (1, 10))
    assert ten.plain.reduced < one.plain.reduced


def test_of_a_compressed_reduction_what_the_last_two_buckets_begin_with_the_end_of_the_pass_is_not_hidden() -> None:
    # The job has one stage, whose last backward pass takes longer than all reductions.
    passes, whole = 4 * 20.01, 1.0 + 0.02
    for buckets, left in (1, whole), (10, (whole / 2 + 2 * whole / 2) / 10):
        overlapping = one_stage({"backward": 20.0, "buckets": buckets})
        found = forecast(overlapping, NonInterleaved(1, 4), OptimusConfig(dp_compression=True), frozenset({0}))
        assert found.ours.reduced == pytest.approx(passes + left)


def test_blocks_for_the_distributed_optimizer_have_one_phase_only() -> None:
    ranks = one_stage({"backward": 20.0, "second_phase": 0.0, "buckets": 10})
    found = forecast(ranks, NonInterleaved(1, 4), OptimusConfig(dp_compression_format="int4"), frozenset({0}))
    assert found.ours.reduced == pytest.approx(4 * 20.01 + (1.0 + 0.02) / 10)


def test_encoded_activations_gain_what_they_save_and_cost_what_encoding_takes() -> None:
    config = OptimusConfig(pipeline_forward_format="int8")
    slow, fast = (
        forecast(cluster(rate, activation_bytes=250_000, encode=0.01), SCHEDULE, config, frozenset())
        for rate in (1e6, 1e12)
    )
    # With compressed activations the first activation arrives 0.75 s earlier; afterwards the iteration waits for
    # gradients, one after the other.
    assert slow.plain.reduced - slow.ours.reduced == pytest.approx(0.75, abs=0.05)
    assert "It does not pay here: leave out --pipeline-forward-format" in both(fast)


def test_the_gather_of_parameters_is_said_and_not_part_of_the_comparison() -> None:
    with_it, without = (
        forecast(cluster(1e6, gather=(nbytes, nbytes)), SCHEDULE, ALL, frozenset({0, 1})) for nbytes in (2_000_000, 0)
    )
    assert (with_it.plain.reduced, with_it.ours.reduced) == (without.plain.reduced, without.ours.reduced)
    said = "parameter gather: 2000 ms after the optimizer's step, as in vanilla Megatron"
    assert said in both(with_it) and "gather" not in both(without)


@pytest.mark.parametrize(("rate", "pays"), [(1e6, True), (1e8, False)])
def test_of_a_compressed_gather_it_is_said_what_it_gains_and_where_it_does_not_pay(rate: float, pays: bool) -> None:
    config = OptimusConfig(param_gather_format="int4")
    measured = cluster(rate, gather=(2_000_000, 500_000), code_parameters=0.1)
    said = both(forecast(measured, SCHEDULE, config, frozenset()))
    assert (
        f"parameter gather: {600 if pays else 105} ms after the optimizer's step, instead of "
        f"{'2000 ms (70.0 % less)' if pays else '20 ms (425.0 % more)'}"
    ) in said
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


def test_a_rank_that_saves_nothing_is_told_as_doctor_tells_it_and_no_gain_is_credited() -> None:
    config = OptimusConfig(dp_compression=True, dp_compression_rank=128, dp_compression_stages="auto")
    everyone = []
    for measured in cluster(1e6):
        dense = [replace(c, compressed=c.dense) if c.name == "DP gradients" else c for c in measured.cost.classes]
        everyone.append(replace(measured, cost=replace(measured.cost, classes=tuple(dense))))
    found = forecast(everyone, SCHEDULE, config, frozenset({0, 1}))
    assert found.ours.reduced == found.plain.reduced
    _, *said = found.lines()
    assert said == [
        "forecast: --dp-compression-rank 128: saves nothing on this model: low rank would send more bytes, so "
        "DP gradients traffic is sent uncompressed. Lower the rank, or choose int8"
    ]
    assert "saves nothing" not in both(forecast(cluster(1e6), SCHEDULE, config, None))


def test_a_session_has_one_forecaster_which_goes_with_it():
    """Every micro-batch asks for the forecaster, and a process may have many sessions one after the other."""
    forecasters, session = _Forecasters(), Session(OptimusConfig())
    made = weakref.ref(forecasters.of(session))
    with patch("optimus_cc_ext.hooks.schedules.Forecaster", side_effect=AssertionError("made once more")):
        assert forecasters.of(session) is made()
    del session
    gc.collect()
    assert made() is None and not forecasters
