"""Megatron's own pretrain() on the CPU, without Optimus-CC: layouts, precisions, and the faults that the runtime
mends.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.megatron import interventions
from tests.megatron.runs import NO_DROPOUT, PP2, TP2_PP2_DP2, VANILLA, VANILLA_TP2
from tests.megatron.specs import Run, RunSpec, full, uses
from tests.megatron_runs import last_stage_losses

NATURAL = math.log(512)
"""Loss of a model that knows nothing of 512 tokens (500 padded to a multiple of 128)."""


def assert_learns(run: Run) -> list[float]:
    losses = last_stage_losses(run.ranks)
    assert all(map(math.isfinite, losses))
    # Initial weights with a standard deviation of 0.02 predict all tokens about equally; mock data is easy to learn.
    assert losses[0] == pytest.approx(NATURAL, abs=0.1)
    assert losses[-1] < losses[0] - 0.1
    return losses


@uses(VANILLA, full(VANILLA_TP2))
def test_training_in_three_dimensions_learns_and_evaluates(runs):
    assert_learns(runs)
    places = runs.by_place()
    for stage, tensor_rank, _ in places:
        first, second = (places[stage, tensor_rank, replica] for replica in (0, 1))
        assert first.weights == second.weights
        assert first.grad_norms == second.grad_norms
        if runs.spec.layout == TP2_PP2_DP2:
            assert places[stage, 0, 0].weights != places[stage, 1, 0].weights
    evaluations = runs.ranks[-1].evaluation_losses
    # Megatron evaluates every 4 iterations, and after training on the validation and the test set.
    assert len(evaluations) == len(runs.ranks[-1].losses) // 4 + 2
    assert all(loss is not None and 0 < loss < NATURAL for loss in evaluations)


def frees_outputs(model: list[torch.nn.Module], optimizer: Any) -> list[bool]:
    return [chunk.config.deallocate_pipeline_outputs for chunk in model]


def types(model: list[torch.nn.Module], optimizer: Any) -> tuple[set[str], set[str]]:
    """Return the dtypes of the parameters, and those of their master copies."""
    groups = [group for part in optimizer.chained_optimizers for group in part.fp32_from_float16_groups]
    masters = {parameter.type() for group in groups for parameter in group}
    return {parameter.type() for chunk in model for parameter in chunk.parameters()}, masters


def norms(model: list[torch.nn.Module], optimizer: Any) -> dict[str, bytes]:
    return {
        name: parameter.detach().numpy().tobytes() for name, parameter in model[0].named_parameters() if "norm" in name
    }


TWO_STAGES = RunSpec(name="two ranks", layout=PP2)
PLAIN = RunSpec(
    name="plain pipeline", layout=PP2, flags=NO_DROPOUT, before=(interventions.weights_by_place,), probe=frees_outputs
)
TENSOR_PARALLEL = replace(PLAIN, name="tensor parallel", layout=(2, "--tensor-model-parallel-size 2"), probe=norms)
SHORTER = TWO_STAGES.but("two iterations", flags="--train-iters 2")


@pytest.mark.full
@uses((PLAIN, PLAIN.but("interleaved", flags="--num-virtual-stages-per-pipeline-rank 2")))
def test_interleaving_gives_the_losses_of_the_plain_pipeline(runs):
    plain, interleaved = runs
    for run in (plain, interleaved):
        assert not any(any(rank.probed) for rank in run.ranks), "a send may be read after its buffer is gone"
    # Interleaving adds the same values in another order; 1e-5 is fp32 rounding over 4 steps of Adam.
    assert assert_learns(interleaved) == pytest.approx(assert_learns(plain), rel=1e-5)


@pytest.mark.full
@uses((TWO_STAGES, TWO_STAGES.but("two ranks, bf16", flags="--bf16", probe=types)))
def test_bf16_trains_in_bf16_with_fp32_master_weights(runs):
    exact, rounded = runs
    losses = assert_learns(rounded)
    for rank in rounded.ranks:
        assert rank.probed == ({"torch.cuda.BFloat16Tensor"}, {"torch.cuda.FloatTensor"})
    expected = last_stage_losses(exact.ranks)
    # bf16 keeps 8 bits of mantissa; losses of about 6 agree to 4e-3 relative and must not agree to the bit.
    assert losses == pytest.approx(expected, rel=4e-3) and losses != expected


@pytest.mark.full
@uses((TENSOR_PARALLEL, TENSOR_PARALLEL.but("sequence parallel", flags="--sequence-parallel")))
def test_sequence_parallelism_gives_the_losses_of_tensor_parallelism(runs):
    # In this run Megatron warms its dropout up with draws of another shape, which would change the initial weights.
    plain, parallel = runs
    # Sequence parallelism adds the same values in another order; 1e-5 is fp32 rounding over 4 steps of Adam.
    assert assert_learns(parallel) == pytest.approx(assert_learns(plain), rel=1e-5)
    # Each rank sees half of the sequence: the weights of replicated norms stay equal only if their gradients are
    # summed.
    first, second = (rank.probed for rank in parallel.ranks)
    assert first == second and len(first) == 18


@pytest.mark.full
@uses(
    (
        SHORTER,
        # `int` changes nothing, but makes the specification a run of its own
        SHORTER.but("again", before=(int,)),
        SHORTER.but("another dropout", before=(interventions.another_dropout,)),
        SHORTER.but("no dropout", flags=NO_DROPOUT),
    )
)
def test_dropout_repeats_with_its_seed_and_changes_with_it(runs):
    first, again, reseeded, without = runs
    for mine, its in zip(first.ranks, again.ranks, strict=True):
        assert (mine.losses, mine.weights, mine.random_states) == (its.losses, its.weights, its.random_states)
    assert len(set(first.ranks[0].random_states)) == 2, "dropout did not draw from the global random state"
    losses = [last_stage_losses(run.ranks) for run in (first, reseeded, without)]
    assert len({curve[0] for curve in losses}) == 3
    assert losses[0] == pytest.approx(losses[1], rel=0.01) and losses[0] == pytest.approx(losses[2], rel=0.01)
