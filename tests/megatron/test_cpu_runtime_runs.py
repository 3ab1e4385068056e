"""Megatron's own pretrain() on the CPU: layouts, precisions, and what the runtime had to cure."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron_runs import MegatronRun, last_stage_losses, run_megatron

PP2 = ["--pipeline-model-parallel-size", "2"]
TP2 = ["--tensor-model-parallel-size", "2"]
INTERLEAVED = [*PP2, "--num-virtual-stages-per-pipeline-rank", "2"]
NO_DROPOUT = ["--hidden-dropout", "0", "--attention-dropout", "0"]

NATURAL = math.log(512)
"""The loss of a model that knows nothing of 512 tokens (500 padded to a multiple of 128)."""


def assert_learns(runs: list[MegatronRun]) -> list[float]:
    losses = last_stage_losses(runs)
    assert all(map(math.isfinite, losses))
    # Initial weights of standard deviation 0.02 give nearly uniform predictions; mock data is easy to learn.
    assert losses[0] == pytest.approx(NATURAL, abs=0.1)
    assert losses[-1] < losses[0] - 0.1
    return losses


def test_pipeline_and_data_parallel_training_learns_and_evaluates() -> None:
    runs = run_megatron(4, [*PP2, "--eval-iters", "2", "--eval-interval", "2"])
    assert_learns(runs)
    for first, second in ((0, 1), (2, 3)):  # data-parallel replicas of each stage
        assert runs[first].weights == runs[second].weights
        assert runs[first].grad_norms == runs[second].grad_norms
    evaluations = runs[-1].evaluation_losses
    # Megatron evaluates at iterations 2 and 4, then the final validation and test sets.
    assert len(evaluations) == 4 and all(loss is not None and 0 < loss < NATURAL for loss in evaluations)


def test_eight_ranks_train_in_three_dimensions() -> None:
    runs = run_megatron(8, [*PP2, *TP2])
    assert_learns(runs)
    for stage in (0, 4):  # ranks of a stage: (tp 0, dp 0), (tp 1, dp 0), (tp 0, dp 1), (tp 1, dp 1)
        assert runs[stage].weights == runs[stage + 2].weights
        assert runs[stage + 1].weights == runs[stage + 3].weights
        assert runs[stage].weights != runs[stage + 1].weights


def give_every_layer_its_own_weights() -> None:
    """Make the initial weights a function of a parameter's place in the whole model, whatever the layout."""
    from megatron.core.transformer.transformer_layer import TransformerLayer
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    def setup_with_those_weights(*args: Any, **kwargs: Any) -> Any:
        model, *rest = setup(*args, **kwargs)
        for chunk in model:
            layers = [item for item in chunk.named_modules() if isinstance(item[1], TransformerLayer)]
            numbers = {name: layer.layer_number for name, layer in layers}
            for name, parameter in chunk.named_parameters():
                layer = next((numbers[prefix] for prefix in numbers if name.startswith(f"{prefix}.")), 0)
                generator = torch.Generator().manual_seed(1000 * layer + parameter.numel())
                if parameter.dim() > 1:
                    parameter.data.normal_(std=0.02, generator=generator)
        return model, *rest

    training.setup_model_and_optimizer = setup_with_those_weights


def test_interleaving_gives_the_losses_of_the_plain_pipeline() -> None:
    plain, runs = (
        run_megatron(2, [*layout, *NO_DROPOUT], before=give_every_layer_its_own_weights, probe=frees_outputs)
        for layout in (PP2, INTERLEAVED)
    )
    assert [run.probed for run in runs] == [[False, False]] * 2, "a send may be read after its buffer is gone"
    # The same sums in another order: fp32 rounding over 4 steps of Adam.
    assert assert_learns(runs) == pytest.approx(assert_learns(plain), rel=1e-5)


def frees_outputs(model: list[torch.nn.Module], optimizer: Any) -> list[bool]:
    return [chunk.config.deallocate_pipeline_outputs for chunk in model]


def test_bf16_trains_in_bf16_with_fp32_master_weights() -> None:
    runs = run_megatron(2, [*PP2, "--bf16"], probe=parameter_and_master_types)
    losses = assert_learns(runs)
    for run in runs:
        assert run.probed == ({"torch.cuda.BFloat16Tensor"}, {"torch.cuda.FloatTensor"})
    exact = last_stage_losses(run_megatron(2, PP2))
    # bf16 keeps 8 bits of mantissa; losses of about 6 agree to 4e-3 relative and must not agree to the bit.
    assert losses == pytest.approx(exact, rel=4e-3) and losses != exact


def parameter_and_master_types(model: list[torch.nn.Module], optimizer: Any) -> tuple[set[str], set[str]]:
    groups = [group for part in optimizer.chained_optimizers for group in part.fp32_from_float16_groups]
    masters = {parameter.type() for group in groups for parameter in group}
    return {parameter.type() for chunk in model for parameter in chunk.parameters()}, masters


def test_sequence_parallelism_gives_the_losses_of_tensor_parallelism() -> None:
    argv = [*TP2, *NO_DROPOUT]
    # Megatron warms its dropout up with draws of another shape here, which would change the initial weights.
    before = give_every_layer_its_own_weights
    plain = assert_learns(run_megatron(2, argv, before=before))
    runs = run_megatron(2, [*argv, "--sequence-parallel"], before=before, probe=norms)
    # The same sums in another order: fp32 rounding over 4 steps of Adam.
    assert assert_learns(runs) == pytest.approx(plain, rel=1e-5)
    # Each rank sees half of the sequence: replicated norms stay equal only if their gradients are summed.
    assert runs[0].probed == runs[1].probed and len(runs[0].probed) == 18


def norms(model: list[torch.nn.Module], optimizer: Any) -> dict[str, bytes]:
    return {
        name: parameter.detach().numpy().tobytes() for name, parameter in model[0].named_parameters() if "norm" in name
    }


def reseed_dropout() -> None:
    """Another seed for what the model draws while it trains; the same weights and data."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    def setup_and_reseed(*args: Any, **kwargs: Any) -> Any:
        built = setup(*args, **kwargs)
        model_parallel_cuda_manual_seed(4321, force_reset_rng=True)
        return built

    training.setup_model_and_optimizer = setup_and_reseed


def test_dropout_repeats_with_its_seed_and_changes_with_it() -> None:
    argv = [*PP2, "--train-iters", "2"]
    first, again = (run_megatron(2, argv) for _ in range(2))
    assert first == again, "a run does not repeat to the bit"
    assert len(set(first[0].random_states)) == 2, "dropout did not draw from the global random state"

    losses = last_stage_losses(first)
    reseeded = last_stage_losses(run_megatron(2, argv, before=reseed_dropout))
    without = last_stage_losses(run_megatron(2, [*argv, *NO_DROPOUT]))
    assert len({losses[0], reseeded[0], without[0]}) == 3
    assert losses == pytest.approx(reseeded, rel=0.01) and losses == pytest.approx(without, rel=0.01)


def test_a_checkpoint_written_in_the_background_resumes_to_the_bit(tmp_path: Path) -> None:
    """The writer is another process, which reads while training goes on."""
    save = ["--save", str(tmp_path), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    in_background = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    whole = run_megatron(2, [*PP2, *save, *in_background])
    resumed = run_megatron(2, [*PP2, "--load", str(tmp_path), "--ckpt-step", "2"])
    for run, continued in zip(whole, resumed, strict=True):
        assert continued.losses == run.losses[2:]
        assert continued.random_states == run.random_states[2:]
        assert continued.weights == run.weights
