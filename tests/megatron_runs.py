"""A tiny GPT through Megatron's own pretrain() in forked ranks, and what tests compare of it, to the bit."""

from __future__ import annotations

import functools
import hashlib
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.forked_ranks import run_ranks

__all__ = ["TINY_GPT", "MegatronRun", "last_stage_losses", "megatron_run", "run_megatron"]

TINY_GPT = shlex.split("""
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --num-workers 0
    --micro-batch-size 2 --global-batch-size 16 --train-iters 4 --lr 1e-3
    --eval-iters 0 --eval-interval 1000 --log-interval 1
    --transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-bias-gelu-fusion --no-bias-dropout-fusion
""")
"""Flags of every run: 4 layers, hidden 64, 4 iterations of 16 sequences. Later flags win: append your own."""


@dataclass(slots=True)
class MegatronRun:
    """What one rank recorded."""

    losses: list[float | None] = field(default_factory=list)
    """Per iteration: the averaged fp32 training loss, exactly; None off the last stage."""
    evaluation_losses: list[float | None] = field(default_factory=list)
    """Per evaluation: the same for the validation loss."""
    grad_norms: list[float | None] = field(default_factory=list)
    """Per iteration: the norm of the gradients before clipping."""
    random_states: list[str] = field(default_factory=list)
    """Per iteration: sha256 of torch's global random state after it."""
    weights: dict[str, str] = field(default_factory=dict)
    """At the end: "<model chunk>.<parameter's name>" to sha256 of the parameter's bytes."""
    probed: Any = None
    """What the test's probe returned."""


def run_megatron(
    world_size: int,
    argv: Sequence[str] = (),
    *,
    before: Callable[[], Any] | None = None,
    probe: Callable[[list[torch.nn.Module], Any], Any] | None = None,
    entry: Callable[[], Any] | None = None,
    timeout: float = 180.0,
) -> list[MegatronRun]:
    """:func:`megatron_run` on ``world_size`` forked ranks; the records in rank order."""
    return run_ranks(world_size, megatron_run, list(argv), before, probe, entry, timeout=timeout)


def megatron_run(
    argv: Sequence[str],
    before: Callable[[], Any] | None = None,
    probe: Callable[[list[torch.nn.Module], Any], Any] | None = None,
    entry: Callable[[], Any] | None = None,
) -> MegatronRun:
    """Train the tiny GPT with the flags ``argv`` in this rank; once per process: Megatron's state is global.

    ``before()`` runs before Megatron parses its flags (to install hooks); ``probe(model_chunks, optimizer)``
    at the end, its result must be picklable; ``entry`` replaces :func:`optimus_cc_ext.pretrain_gpt.main`.
    """
    from megatron.training import training

    run = MegatronRun()
    built: list[Any] = []
    train_step, evaluate, setup = training.train_step, training.evaluate, training.setup_model_and_optimizer

    @functools.wraps(train_step)
    def recording_train_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        run.losses.append(_loss(result[0]))
        run.grad_norms.append(None if result[5] is None else float(result[5]))
        run.random_states.append(hash_of(torch.get_rng_state()))
        return result

    @functools.wraps(evaluate)
    def recording_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        run.evaluation_losses.append(_loss(result[0]))
        return result

    @functools.wraps(setup)
    def recording_setup(*args: Any, **kwargs: Any) -> Any:
        built[:] = setup(*args, **kwargs)
        return tuple(built)

    training.train_step = recording_train_step
    training.evaluate = recording_evaluate
    training.setup_model_and_optimizer = recording_setup

    sys.argv = ["pretrain_gpt.py", *TINY_GPT, *argv]
    if before is not None:
        before()
    if entry is None:
        from optimus_cc_ext import pretrain_gpt  # here: an older Megatron runs another entry, and has not what it needs

        entry = pretrain_gpt.main
    entry()

    model, optimizer, _ = built
    run.weights = {
        f"{index}.{name}": hash_of(parameter)
        for index, chunk in enumerate(model)
        for name, parameter in chunk.named_parameters()
    }
    run.probed = None if probe is None else probe(model, optimizer)
    return run


def hash_of(tensor: torch.Tensor) -> str:
    """sha256 of the bytes of ``tensor``, of any shape and dtype."""
    return hashlib.sha256(tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy()).hexdigest()


def last_stage_losses(runs: Sequence[MegatronRun]) -> list[float]:
    """The training losses, after checking that every rank that has them has the same."""
    known = [run.losses for run in runs if None not in run.losses]
    assert known and all(losses == known[0] for losses in known), "last-stage ranks disagree about the loss"
    return [loss for loss in known[0] if loss is not None]


def _loss(losses: dict[str, Any]) -> float | None:
    value = losses.get("lm loss") if losses else None
    return None if value is None else float(value)
