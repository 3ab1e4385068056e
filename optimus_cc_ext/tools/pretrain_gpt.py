"""GPT pretraining for users of Megatron's wheel who have no Megatron-LM checkout, on megatron.training's API of 0.19.

It trains exactly as pretrain_gpt.py of a Megatron-LM checkout (core_v0.19), bit for bit, for plain GPT pretraining:
indexed or mock data; tensor, context, pipeline (interleaved or not), expert and data parallelism; multi-token
prediction; evaluation. The other features of that
script (packed sequences, fill-in-the-middle, distillation) are refused by name.

It neither installs hooks nor chooses the device: ``python -m optimus_cc_ext`` does both before it calls `main`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from optimus_cc_ext.errors import FlagError, exit_with

LossFunction = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]]

# Maps attributes of Megatron's arguments to the flag to leave out. These flags need modules that only a checkout has,
# or batches with other tensors.
REFUSED = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "hybrid_context_parallel": "--hybrid-context-parallel",
    "check_for_spiky_loss": "--check-for-spiky-loss",
    "logits_load_dir": "--logits-load-dir",
    "per_dataset_sequences_path": "--per-dataset-sequences-path",
    "overlap_moe_expert_parallel_comm": "--overlap-moe-expert-parallel-comm",
}
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def refuse_unsupported(args: argparse.Namespace) -> None:
    """Raise FlagError naming the flags that only a checkout's pretrain_gpt.py supports."""
    if flags := [flag for name, flag in REFUSED.items() if getattr(args, name, None)]:
        raise FlagError(
            ", ".join(flags),
            "not supported by the built-in pretrain_gpt",
            "Leave out, or give the script of a Megatron-LM checkout: "
            "python -m optimus_cc_ext PATH/TO/pretrain_gpt.py ...",
        )


def next_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None) -> dict[str, Any]:
    """Return the next micro-batch: BATCH_KEYS to tensors [micro-batch, sequence], or to None on stages that need no
    data.

    The first tensor-parallel rank reads the batch and sends it to the others.
    """
    if not (is_first_or_last_pipeline_stage(vp_stage) or predicts_more_tokens(vp_stage)):
        return dict.fromkeys(BATCH_KEYS)

    args = get_args()
    tp_rank = mpu.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = {}
    if tp_rank == 0:
        assert data_iterator is not None  # this rank has an iterator, because `needs_datasets` is true
        sample = next(data_iterator)
        present = {key: sample[key] for key in BATCH_KEYS if sample.get(key) is not None}
        batch = dict.fromkeys(BATCH_KEYS)
        batch |= {key: value.cuda(non_blocking=True) for key, value in present.items()}
    whole = get_batch_on_this_tp_rank(
        batch,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=predicts_more_tokens(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if args.context_parallel_size == 1:
        return whole
    # Each context-parallel rank takes two pieces of the sequence, one from either end.
    part = get_batch_on_this_cp_rank(whole, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
    return {key: part.get(key) for key in BATCH_KEYS}


def predicts_more_tokens(vp_stage: int | None) -> bool:
    """Return True if this model chunk holds layers of multi-token prediction."""
    args = get_args()
    layout = args.pipeline_model_parallel_layout
    if isinstance(layout, str):
        layout = PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size)
    return bool(mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage))


def masked_loss(
    loss_mask: torch.Tensor, token_losses: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses of the counted tokens, their number (int32), and both again for Megatron's log.

    loss_mask and token_losses: [micro-batch, sequence].
    """
    mask = loss_mask.reshape(-1).float()
    loss = (token_losses.reshape(-1).float() * mask).sum()
    tokens = mask.sum().to(torch.int)

    if get_args().check_for_nan_in_loss_and_grad:
        for rejected, name in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=rejected,
                message=f"found {name} in local forward loss calculation",
                tolerance=0.0,  # a repeated forward pass has the same loss to the bit
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.stack((loss.detach(), tokens.to(loss.dtype)))}


def forward_step(
    data_iterator: Iterator[dict[str, Any]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, LossFunction]:
    """Run one micro-batch through this stage's layers.

    Returns the stage's output, and the loss function that Megatron calls on the last stage.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()

    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, partial(masked_loss, batch["loss_mask"])


def needs_datasets(vp_stage: int | None = None) -> bool:
    """Return whether this rank reads data: the first tensor-parallel rank of the first and of the last stage does."""
    reads = is_first_or_last_pipeline_stage(vp_stage) or predicts_more_tokens(vp_stage)
    return mpu.get_tensor_model_parallel_rank() == 0 and reads


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the training, validation and test datasets with ``num_samples`` samples each; None on a rank that reads no
    data.
    """
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        object_storage_cache_path=args.object_storage_cache_path,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size * args.sequence_parallel,
    )
    dataset_type = MockGPTDataset if args.mock_data else GPTDataset
    is_built_here = partial(needs_datasets, vp_stage=vp_stage)
    return tuple(BlendedMegatronDatasetBuilder(dataset_type, num_samples, is_built_here, config).build())


# The attribute lets Megatron call build_datasets on every rank, not only on tensor-parallel rank 0: the builder has
# collectives.
build_datasets.is_distributed = True  # type: ignore[attr-defined]


def main() -> None:
    """Parse Megatron's command line and train. A flag that only a checkout's script supports ends the process with
    status 2.
    """
    args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    try:
        refuse_unsupported(args)
    except FlagError as error:
        exit_with(error)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, build_datasets, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
