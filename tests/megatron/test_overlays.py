"""Extensions that replace Megatron's functions, as MindSpeed does: in both orders beside us, or refused."""

import functools
import importlib
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimus_cc_ext.hooks import start
from tests.megatron_runs import MegatronRun, run_megatron

REPLACED = (
    "megatron.training.arguments:parse_args",
    "megatron.training.arguments:validate_args",
    "megatron.training.training:train_step",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync",
    "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
)
LINE = shlex.split(
    "--pipeline-model-parallel-size 2 --train-iters 2 --optimus-cc --compressed-backprop-rank 4 --dp-compression-rank 4"
)
CALLS: dict[str, int] = {}


def overlay() -> None:
    """Replace each function by one that counts its calls and calls what it replaces."""
    for target in REPLACED:
        module, _, path = target.partition(":")
        *outer, name = path.split(".")
        owner = functools.reduce(getattr, outer, importlib.import_module(module))
        setattr(owner, name, counted(target, getattr(owner, name)))


def counted(target: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def theirs(*args: Any, **kwargs: Any) -> Any:
        CALLS[target] = CALLS.get(target, 0) + 1
        return original(*args, **kwargs)

    return theirs


def validation(original: Callable[..., Any]) -> None:
    """Replace Megatron's validation by one that calls `original`."""
    from megatron.training import arguments, initialize

    def validate_args(args: Any, *rest: Any, **more: Any) -> Any:
        return original(args, *rest, **more)

    for module in (arguments, initialize):
        if hasattr(module, "validate_args"):
            module.validate_args = validate_args


def ours_first() -> None:
    start()
    overlay()


def theirs_first() -> None:
    overlay()
    start()


def bypassed() -> None:
    from megatron.training import arguments

    original = arguments.validate_args
    start()
    validation(original)


def bypassed_first() -> None:
    from megatron.training import arguments

    validation(arguments.validate_args)
    start()


def calls(_models: list[torch.nn.Module], _optimizer: Any) -> dict[str, int]:
    return CALLS


def trained(before: Callable[[], Any]) -> list[MegatronRun]:
    runs = run_megatron(4, LINE, before=before, probe=calls)
    for run in runs:
        assert run.ended is None, run.printed[-5:]
    return runs


@pytest.mark.full
def test_an_overlay_that_calls_what_it_replaces_changes_nothing_in_either_order() -> None:
    alone = trained(start)
    for before in (ours_first, theirs_first, bypassed_first):
        for run, other in zip(trained(before), alone, strict=True):
            assert (run.losses, run.grad_norms, run.weights) == (other.losses, other.grad_norms, other.weights)
            # The last one is not called where fused embedding synchronisation sums in its place.
            assert before is bypassed_first or set(run.probed) >= set(REPLACED[:-1])


@pytest.mark.ci
def test_a_validation_that_no_longer_calls_ours_ends_the_run_instead_of_training_without_compression() -> None:
    runs = run_megatron(4, LINE, before=bypassed)
    assert [run.ended for run in runs] == [2] * 4
    assert any(
        "optimus-cc: error: --optimus-cc: no effect: tests.megatron.test_overlays.validation.<locals>.validate_args "
        "has replaced megatron.training.arguments.validate_args after Optimus-CC had wrapped it" in line
        for line in runs[0].printed
    )
