"""The distributed optimizer's gather of parameters in blocks of few bits, in Megatron's own loop."""

from collections import Counter
from itertools import pairwise

from tests.megatron import runs as table
from tests.megatron.interventions import INF_AT, NAN_AT
from tests.megatron.specs import full, in_ci, uses
from tests.megatron.test_checkpoints import assert_goes_on
from tests.megatron.test_lossless_limits import assert_tied
from tests.megatron_runs import last_stage_losses, relative_gap

IN_4_BITS = 4.125 / 16


AT_ONCE, OVERLAPPED = zip(table.VANILLA_GATHERS, table.EXACT_GATHERS, strict=True)


@uses(*(full(*case) for case in (AT_ONCE, OVERLAPPED)))
def test_messages_that_leave_nothing_out_reproduce_vanilla(runs):
    vanilla, ours = runs
    # Changes of parameters are rounded to bf16, and so are weights: the tolerance is that of buckets in bf16.
    assert relative_gap(last_stage_losses(ours.ranks), last_stage_losses(vanilla.ranks)) < table.BF16_BUCKETS[0]
    assert_tied(ours)
    for rank in ours.ranks:
        raw, sent = rank.ours.traffic["parameter gather"]
        assert sent > 1.9 * raw, "4 bytes a value instead of 2"


def assert_to_the_bit(ours, vanilla) -> None:
    assert last_stage_losses(ours.ranks) == last_stage_losses(vanilla.ranks)
    for mine, theirs in zip(ours.ranks, vanilla.ranks, strict=True):
        assert mine.weights == theirs.weights
        assert [step.weights for step in mine.steps] == [step.weights for step in theirs.steps]
        raw, sent = mine.ours.traffic["parameter gather"]
        assert 0 < sent < raw, "the first gather, and one after a skipped step, are Megatron's own"


@uses(
    in_ci(table.VANILLA_GATHERS[0], table.EXACT_DIFFERENCES[0]),
    full(table.VANILLA_GATHERS[1], table.EXACT_DIFFERENCES[1]),
    full(table.FP16_DENSE, table.FP16_EXACT),
)
def test_exact_differences_keep_vanillas_losses_and_weights_to_the_bit(runs):
    vanilla, ours = runs
    assert_to_the_bit(ours, vanilla)


@uses(full(table.SAVED_GATHER, table.resumed(table.SAVED_GATHER, 4)))
def test_a_resumed_run_is_the_rest_of_the_run_that_never_stopped_and_copies_stay_equal(runs):
    whole, part = runs
    assert_goes_on(part, whole, 4)
    assert_tied(whole)
    for rank in whole.ranks:
        assert not rank.ours.remembered.keys() - {"iteration", "usual_clipping", "loss_scale"}, "nothing to keep"
        assert {f"Shards.{name}" for name in ("encode", "start", "finish")} <= rank.asked.keys()
        assert not [what for calls in rank.asked.values() for what in calls], "allocated or asked of the host"
    for first, second in (whole.ranks[:2], whole.ranks[2:]):
        assert first.weights == second.weights


@uses(full(table.SAVED_GATHER))
def test_only_what_no_step_has_changed_is_gathered_as_it_is(runs):
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["parameter gather"]
        # Megatron itself gathers before the first iteration, and again after each save, for which it has gathered
        # already.
        dense = rank.probed
        assert 0 < dense < raw / 3
        share = (sent - dense) / (raw - dense)
        # Vectors are sent dense, and the short blocks of narrow matrices' shards are padded.
        assert IN_4_BITS < share < 1.35 * IN_4_BITS


@uses(table.POISONED_GATHER)
def test_after_a_skipped_step_there_is_nothing_new_to_gather(runs):
    for rank in runs.ranks:
        assert [step.skipped for step in rank.steps] == [i in (INF_AT, NAN_AT) for i in range(6)]
    for first, second in (runs.ranks[:2], runs.ranks[2:]):
        weights = [step.weights for step in first.steps]
        assert weights == [step.weights for step in second.steps]
        # With overlap, a step's change arrives with the next forward pass, so a skipped step shows one step later.
        changes = [after != before for before, after in pairwise(weights)]
        assert changes == [i not in (INF_AT, NAN_AT) for i in range(5)]


@uses(in_ci(table.FP16_GATHER))
def test_fp16_parameters_are_gathered_too(runs):
    first, second, *_ = runs.ranks
    assert any(step.skipped for step in first.steps) and not all(step.skipped for step in first.steps)
    assert first.weights == second.weights
    raw, sent = first.ours.traffic["parameter gather"]
    assert sent < 1.35 * IN_4_BITS * raw


@uses(full(table.SOME_IN_FP32))
def test_parameters_without_a_master_copy_are_gathered_as_they_are_with_all_of_their_group(runs):
    for first, second in (runs.ranks[:2], runs.ranks[2:]):
        assert first.weights == second.weights
        assert any("layernorm" in name for name in first.weights)
        raw, sent = first.ours.traffic["parameter gather"]
        # The first chunk of each stage has bucket groups of one bucket each, the second chunk one group of all buckets.
        assert IN_4_BITS * raw < sent < raw


@uses(full(table.EXPERTS_GATHERED))
def test_experts_are_gathered_over_their_own_replicas(runs):
    copies = Counter((name, weight) for rank in runs.ranks for name, weight in rank.weights.items())
    for (name, _), count in copies.items():
        assert count == (2 if ".experts." in name else 4), name
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["parameter gather"]
        # Each of the two optimizers gathers all buckets, of which it has changed its own. All messages are as long as
        # that of the shard that has most of the few vectors.
        assert sent < 0.5 * 0.7 * raw, "a bucket is gathered once a step"


@uses(full(table.GATHER_TP2))
def test_the_balanced_preset_gathers_to_the_bit_where_there_are_master_copies(runs):
    assert any("parameter gather (exact)" in line for line in runs.said)
    for rank in runs.ranks:
        raw, sent = rank.ours.traffic["parameter gather"]
        # The first gather is dense. At this learning rate some messages of so few values are sent raw.
        assert sent < 0.75 * raw
