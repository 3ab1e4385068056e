"""Laws: state follows the step, nothing non-finite is kept, residuals of a clipped step are scaled by its clipping."""

import pytest

from tests.megatron import runs as table
from tests.megatron.interventions import INF_AT, NAN_AT
from tests.megatron.specs import full, uses
from tests.megatron.test_checkpoints import assert_goes_on

RESUME_TO_DISAMBIGUATE = 16
"""Exit code of Megatron for a run that has to be resumed (core/rerun_state_machine.py)."""


@uses(full(table.POISONED), table.POISONED_SHARDED)
def test_what_is_not_finite_on_one_replica_is_skipped_by_all_and_kept_by_none(runs):
    for rank in runs.ranks:
        steps = rank.steps
        assert [step.skipped for step in steps] == [i in (INF_AT, NAN_AT) for i in range(6)]
        for step in steps:
            # The norm of a tensor is finite if all its entries are; `0 <=` fails for NaN, `< inf` for infinities.
            assert step.memory_norms and all(0 <= norm < float("inf") for norm in step.memory_norms)
        for iteration in (INF_AT, NAN_AT):
            before, skipped, after = steps[iteration - 1 : iteration + 2]
            assert skipped.memory == before.memory and skipped.weights == before.weights
            assert after.memory != before.memory and after.weights != before.weights
    losses = [loss for rank in runs.ranks for loss in rank.losses if loss is not None]
    assert len(losses) == 2 * 6 and max(losses) < 6.5, "finite, and falling from log 512"
    for first, second in (runs.ranks[:2], runs.ranks[2:]):
        assert [step.weights for step in first.steps] == [step.weights for step in second.steps]


@uses(table.POISONED_TO_THE_END)
def test_megatrons_own_check_ends_the_run_on_all_ranks(runs):
    # Megatron's rerun state machine repeats the iteration, finds the same fault, saves and exits to be started again.
    assert [rank.ended for rank in runs.ranks] == [RESUME_TO_DISAMBIGUATE] * 4
    assert all(len(rank.losses) == INF_AT + 1 for rank in runs.ranks)


@uses(full(table.SCALED))
def test_residuals_survive_overflows_and_follow_the_loss_scale(runs):
    changes = set()
    for rank in runs.ranks:
        for before, after in zip(rank.steps[:-1], rank.steps[1:], strict=True):
            changes.add((after.loss_scale / before.loss_scale, after.skipped))
            assert all(0 <= norm < float("inf") for norm in after.memory_norms)
            # A skipped step leaves the state, in units of unscaled gradients, unchanged at the new loss scale.
            assert (after.memory == before.memory) == after.skipped
        assert rank.steps[-1].memory_norms[0] > 0, "there was something to scale"
        assert sum(not step.skipped for step in rank.steps) >= 2
    assert {ratio for ratio, _ in changes} == {0.5, 1.0, 2.0}, "the scale was halved, kept and doubled"
    assert {skipped for _, skipped in changes} == {True, False}


@pytest.mark.ci
@uses((table.CALM, table.REPEATED, table.STOPPED, table.AFTER_STOP))
def test_repeated_passes_leave_no_trace_and_a_checkpoint_before_the_update_resumes_exactly(runs):
    calm, repeated, stopped, resumed = runs
    assert calm.ranks[0].passes == 5
    # Megatron checks no run's first step.
    assert [rank.passes for rank in repeated.ranks] == [5 + 4] * 4
    assert_goes_on(repeated, calm, 0)
    # If an error appears again in the second pass, Megatron saves before the update, and exits.
    assert [(rank.passes, rank.ended) for rank in stopped.ranks] == [(1 + 2, RESUME_TO_DISAMBIGUATE)] * 4
    assert [len(rank.losses) for rank in stopped.ranks] == [2] * 4, "it left in the second step"
    assert_goes_on(resumed, calm, 1)


@uses(full(table.USUAL, table.CLIPPED))
def test_ten_steps_after_a_batch_of_a_hundred_times_the_usual_norm_no_residual_is_twice_what_it_would_be(runs):
    usual, clipped = runs
    assert max(clipped.ranks[0].grad_norms) > 50 * sorted(usual.ranks[0].grad_norms)[len(usual.ranks[0].steps) // 2]
    for without, with_it in zip(usual.ranks, clipped.ranks, strict=True):
        expected, norms = (rank.steps[table.OUTLIER + 10].memory_norms for rank in (without, with_it))
        assert norms and with_it.steps[0].memory, "every rank remembers something"
        assert all(norm < 2 * usually for norm, usually in zip(norms, expected, strict=True))
