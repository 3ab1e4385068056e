"""Tiny GPT trained on text with its checkpoints, and Megatron's own answers with these weights."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.megatron_runs import run_megatron

__all__ = ["LENGTH", "PROMPTS", "Answers", "train"]

LENGTH = 64
PROMPTS = ("The table says that", "Compressed", "Megatron's checkpoint\n", "x = 1 +")
NEW_TOKENS = 20

Answers = dict[str, Any]
"""Megatron's answers: 'logits' [prompts, LENGTH, padded vocabulary] of the padded prompts, 'continuations' as token
ids, 'losses' of the windows of a text [windows, LENGTH].
"""


def train(
    world_size: int, flags: Sequence[str], *, data: Path, save: Path, prompts: list[list[int]], text: list[int],
    gelu_fusion: bool = False, other_format: str | None = None,
) -> Answers:  # fmt: skip
    """Train 3 iterations, save, and let the saved model answer, forward only, with dropout off.

    It saves to `save`, and once more in `other_format`, to the sibling of `save` of that name.
    """
    argv = [
        *flags, "--train-iters", "3", "--save", str(save), "--save-interval", "1000",
        "--data-path", str(data / "corpus"), "--split", "100,0,0", "--vocab-size", "0",
        "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer"),
        # These flags change weights and gradients visibly: with Megatron's deviation of 0.02 all gelus are alike within
        # a tolerance.
        "--init-method-std", "0.2", "--lr", "1e-2",
    ]  # fmt: skip
    runs = run_megatron(
        world_size,
        argv,
        before=functools.partial(_on_text, gelu_fusion),
        probe=functools.partial(_answer, prompts=prompts, text=text, other_format=other_format),
    )
    # The last rank answers for all: the ranks of the last stage have gathered the same tensors.
    answers: Answers = runs[-1].probed
    return answers


def _on_text(gelu_fusion: bool) -> None:
    """Remove flags of the tiny GPT that cannot be overridden."""
    for flag, values in (("--mock-data", 0), ("--vocab-size", 1), *([("--no-bias-gelu-fusion", 0)] * gelu_fusion)):
        while flag in sys.argv:
            at = sys.argv.index(flag)
            del sys.argv[at : at + 1 + values]


def _answer(
    model: list[torch.nn.Module], optimizer: Any, *, prompts: list[list[int]], text: list[int], other_format: str | None
) -> Answers:
    for chunk in model:
        chunk.eval()
    lengths = [len(prompt) for prompt in prompts]
    rows = torch.zeros(len(prompts), LENGTH, dtype=torch.int64)  # causal attention cannot see the tokens after a prompt
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    logits = _logits(model, rows)
    for _ in range(NEW_TOKENS):
        step = _logits(model, rows)
        for index, length in enumerate(lengths):
            # Rows of the padding, beyond the tokenizer's last token, are not words.
            rows[index, length] = step[index, length - 1, : _vocab_size()].argmax()
            lengths[index] += 1
    continuations = [row[length - NEW_TOKENS : length].tolist() for row, length in zip(rows, lengths, strict=True)]

    windows = [text[at : at + LENGTH + 1] for at in range(0, len(text) - LENGTH, LENGTH)]
    inside = _logits(model, torch.tensor([window[:-1] for window in windows]))
    targets = torch.tensor([window[1:] for window in windows])
    losses = torch.nn.functional.cross_entropy(inside.flatten(0, 1), targets.flatten(), reduction="none")
    if other_format is not None:
        _save_again(model, other_format)
    return {"logits": logits, "continuations": continuations, "losses": losses.view_as(targets)}


def _vocab_size() -> int:
    from megatron.training import get_tokenizer

    return int(get_tokenizer().vocab_size)


def _logits(model: list[torch.nn.Module], rows: torch.Tensor) -> torch.Tensor:
    """Return the logits of rows [batch, LENGTH], through all stages: [batch, LENGTH, padded vocabulary] on every
    rank.
    """
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    batch, length = rows.shape
    positions = torch.arange(length).expand(batch, length)
    unseen = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]

    def forward(_iterator: Any, chunk: torch.nn.Module) -> Any:
        # All micro-batches are the same one: an interleaved schedule needs as many micro-batches as there are stages.
        output = chunk(rows, positions, unseen)
        return output, lambda logits, non_loss_data=False: logits

    stages = mpu.get_pipeline_model_parallel_world_size()
    with torch.no_grad():
        collected = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None] * len(model),
            model=model,
            num_microbatches=stages,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
        shape = torch.zeros(3, dtype=torch.int64)
        logits = None
        if mpu.is_pipeline_last_stage(ignore_virtual=True):
            logits = gather_from_tensor_model_parallel_region(collected[0]).float().contiguous()
            shape = torch.tensor(logits.shape)
        if stages > 1:
            group, last = mpu.get_pipeline_model_parallel_group(), mpu.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast(shape, last, group=group)
            logits = torch.empty(*shape.tolist()) if logits is None else logits
            torch.distributed.broadcast(logits, last, group=group)
    assert logits is not None
    return logits


def _save_again(model: list[torch.nn.Module], other_format: str) -> None:
    from megatron.training import get_args
    from megatron.training.checkpointing import save_checkpoint

    args = get_args()
    args.save = str(Path(args.save).with_name(other_format))
    args.ckpt_format, args.use_dist_ckpt = other_format, other_format != "torch"
    args.no_save_optim = args.no_save_rng = True
    save_checkpoint(3, model, None, None, 0)
