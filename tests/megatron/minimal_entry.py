"""Entry into Megatron 0.17 and 0.18 from the wheel alone: the smallest GPT training on their public API.

For the smoke test of these versions where no checkout's pretrain_gpt.py is at hand: random tokens, pipeline and data
parallelism, no tensor parallelism. The package's own entry (optimus_cc_ext/tools/pretrain_gpt.py) is for 0.19.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

__all__ = ["main"]

SAMPLES = 4096
"""Number of samples: more than a smoke run reads."""


class RandomTokens(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Dataset whose sequences depend on their index only, so that every run and every rank sees the same."""

    def __init__(self, length: int, vocabulary: int) -> None:
        self.length, self.vocabulary = length, vocabulary

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return tokens, labels and position_ids [sequence], int64."""
        generator = torch.Generator().manual_seed(int(index))
        text = torch.randint(self.vocabulary, (self.length + 1,), generator=generator)
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": torch.arange(self.length)}


def datasets(samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    from megatron.training import get_args

    args = get_args()
    data = RandomTokens(args.seq_length, args.vocab_size)
    return data, data, data


# Let Megatron call `datasets` on every rank, not only on the first tensor-parallel one.
datasets.is_distributed = True  # type: ignore[attr-defined]


def build_model(
    pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None, **_: Any
) -> torch.nn.Module:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.training import get_args
    from megatron.training.arguments import core_transformer_config_from_args

    args = get_args()
    return GPTModel(
        core_transformer_config_from_args(args),
        get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        vp_stage=vp_stage,
    )


def loss(token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum over the tokens, their number, and both for Megatron's log; token_losses: [micro-batch,
    sequence].
    """
    total, tokens = token_losses.float().sum(), torch.tensor(token_losses.numel(), dtype=torch.int)
    return total, tokens, {"lm loss": torch.stack((total.detach(), tokens.to(total.dtype)))}


def forward_step(data: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    batch = next(data)
    length = batch["tokens"].size(1)
    later = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    output = model(batch["tokens"], batch["position_ids"], later, labels=batch["labels"])
    return output, loss


def main() -> None:
    """Parse Megatron's command line and train."""
    from megatron.core.enums import ModelType
    from megatron.training import arguments, pretrain

    work = (datasets, build_model, ModelType.encoder_or_decoder, forward_step)
    if not hasattr(arguments, "parse_and_validate_args"):  # 0.17: pretrain() parses
        pretrain(*work)
        return
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    pretrain(pretrain_cfg_container_from_args(arguments.parse_and_validate_args()), *work)
