"""Estimates of bytes by class of traffic and memory per rank, for a GPT that no process has built."""

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import (
    CLASSES,
    DP_GRADIENTS,
    EMBEDDING,
    PARAM_GATHER,
    PIPELINE_BACKWARD,
    PIPELINE_FORWARD,
    TrafficClass,
)
from optimus_cc_ext.config.presets import Layout, saves_nothing
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.exchange import ExchangePlan, Formats, ParameterRecord
from optimus_cc_ext.techniques.fused_embedding_sync import fused_bytes, unfused_bytes
from optimus_cc_ext.techniques.groups import communicator_bytes
from optimus_cc_ext.techniques.low_rank_plan import LowRankPlan
from optimus_cc_ext.techniques.messages import LinkPlan, message_bytes
from optimus_cc_ext.techniques.schedule import Message, Schedule

__all__ = ["Gpt", "bytes_by_class", "gpt_from", "new_communicator_bytes", "state_bytes", "without_gain"]


@dataclass(frozen=True, kw_only=True)
class Gpt:
    """A GPT's sizes on one tensor-parallel rank, and the data types of its gradients and parameters."""

    layers: int
    """Number of layers of each pipeline stage; all stages have equally many."""

    layer: tuple[tuple[int, ...], ...]
    """Shapes of a layer's parameters on one rank."""

    embedding: tuple[int, int]
    """Shape of one rank's shard of the word embedding."""

    positions: tuple[int, ...] | None
    """Shape of the learned position embeddings on the first stage; None: the model has none."""

    last: tuple[tuple[int, ...], ...]
    """Shapes of the final norm's parameters, which only the last stage has."""

    tied: bool
    message: torch.Size
    """Shape of an activation between two stages: sequence (divided by TP with sequence parallelism) x micro-batch x
    hidden.
    """

    pipeline_dtype: torch.dtype
    gradient_dtype: torch.dtype
    parameter_dtype: torch.dtype
    tensor_parallel: int

    def of_stage(self, stage: int, stages: int) -> list[tuple[int, ...]]:
        """Return the shapes of a stage's parameters, without the word embedding and the output layer."""
        first = [self.positions] if stage == 0 and self.positions is not None else []
        return [*self.layer * self.layers, *first, *(self.last if stage == stages - 1 else ())]

    def word_embeddings(self, stage: int, stages: int) -> int:
        """Return the number of matrices of the word embedding's size that a stage holds."""
        first, last = stage == 0, stage == stages - 1
        return int(first or last) if self.tied else first + last


_BEYOND_A_GPT = (
    "num_experts",
    "multi_latent_attention",
    "mtp_num_layers",
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "heterogeneous_layers_config_path",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
)
"""Arguments that change the shapes of gradients, or the stage that holds them, in ways that these estimates do not
cover.
"""


def gpt_from(args: argparse.Namespace) -> Gpt | None:
    """Read the model from Megatron's validated arguments; None if it is not a GPT with equal stages."""
    stages, tp = args.pipeline_model_parallel_size, args.tensor_model_parallel_size
    words = args.padded_vocab_size or args.vocab_size or _known_vocabulary(args)
    if any(getattr(args, name, None) for name in _BEYOND_A_GPT) or args.num_layers % stages or words is None:
        return None
    if not args.padded_vocab_size:
        multiple = args.make_vocab_size_divisible_by * tp
        words = -(-words // multiple) * multiple
    h = args.hidden_size
    heads = args.kv_channels * args.num_attention_heads
    groups = args.kv_channels * (args.num_query_groups if args.group_query_attention else args.num_attention_heads)
    qkv, mlp = (heads + 2 * groups) // tp, args.ffn_hidden_size // tp
    first = 2 * mlp if args.swiglu else mlp
    norm: tuple[tuple[int, ...], ...] = ((h,),) if args.normalization == "RMSNorm" else ((h,), (h,))
    layer: list[tuple[int, ...]] = [(qkv, h), (h, heads // tp), (first, h), (h, mlp), *norm, *norm]
    if args.add_bias_linear:
        layer += [(qkv,), (h,), (first,), (h,)]
    elif args.add_qkv_bias:
        layer += [(qkv,)]
    learned = args.position_embedding_type == "learned_absolute"
    split = tp if args.sequence_parallel else 1
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", False) or args.params_dtype == torch.float32
    return Gpt(
        layers=args.num_layers // stages,
        layer=tuple(layer),
        embedding=(words // tp, h),
        positions=(args.max_position_embeddings, h) if learned else None,
        last=norm,
        tied=not args.untie_embeddings_and_output_weights,
        message=torch.Size((args.seq_length // split, args.micro_batch_size, h)),
        pipeline_dtype=args.params_dtype,
        gradient_dtype=torch.float32 if in_fp32 else args.params_dtype,
        parameter_dtype=args.params_dtype,
        tensor_parallel=tp,
    )


def _known_vocabulary(args: argparse.Namespace) -> int | None:
    return 50257 if args.tokenizer_type == "GPT2BPETokenizer" else None


def bytes_by_class(gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule) -> dict[str, tuple[int, int]]:
    """Return the (raw, sent) bytes of one iteration by class, summed over all ranks, after every warm-up.

    The counts follow the formulas of the log. `--dp-compression-stages auto` counts as all stages, the most that it can
    choose.
    """
    counted = {
        PIPELINE_FORWARD.tag: _pipeline(gpt, config, schedule, forward=True),
        PIPELINE_BACKWARD.tag: _pipeline(gpt, config, schedule, forward=False),
    }
    by_stage = [_of_stage(gpt, layout, config, stage) for stage in range(layout.stages)]
    for traffic in (DP_GRADIENTS, EMBEDDING, PARAM_GATHER):
        counted[traffic.tag] = sum(each[traffic][0] for each in by_stage), sum(each[traffic][1] for each in by_stage)
    ranks = layout.data_parallel * gpt.tensor_parallel
    return {name: (raw * ranks, sent * ranks) for name, (raw, sent) in counted.items() if raw}


def _links(config: OptimusConfig, schedule: Schedule) -> Iterator[tuple[LinkPlan, int]]:
    """Yield (plan, receiving stage) of each link between stages that carries activation gradients."""
    for stage in range(schedule.stages):
        if schedule.messages(stage) and (stage < schedule.stages - 1 or schedule.chunks > 1):
            yield LinkPlan(config, sending_stage=(stage + 1) % schedule.stages, receiving_stage=stage), stage


def _codec(chosen: str) -> Codec | None:
    format = block_format(chosen)
    return None if format is None else Codec(format)


def _pipeline(gpt: Gpt, config: OptimusConfig, schedule: Schedule, *, forward: bool) -> tuple[int, int]:
    dtype = gpt.pipeline_dtype
    dense = gpt.message.numel() * dtype.itemsize

    def sent_bytes(plan: LinkPlan, message: Message) -> int:
        if forward:
            return message_bytes(config.format_of(PIPELINE_FORWARD), gpt.message.numel(), dtype)
        compressed = config.compressed_backprop and plan.compresses(message, gpt.message)
        return plan.message_bytes(gpt.message, dtype) if compressed else dense

    found = [
        sent_bytes(plan, message) for plan, stage in _links(config, schedule) for message in schedule.messages(stage)
    ]
    return dense * len(found), sum(found)


def _compressed_stage(config: OptimusConfig, stage: int) -> bool:
    named = config.dp_compression_stages
    return config.dp_compression and (not isinstance(named, int) or stage < named)


def _of_stage(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int) -> dict[TrafficClass, tuple[int, int]]:
    """Return the (raw, sent) bytes that one rank of a stage reduces and gathers over its replicas, from its bucket
    plan.
    """
    plan, sharded, embedding = _plan(gpt, layout, config, stage), layout.distributed_optimizer, (0, 0)
    sent, saved = plan.sent_bytes(compressing=plan.compresses, whole=False)
    if plan.tied_bytes:
        raw = unfused_bytes(plan.tied_bytes, layout.data_parallel, sharded=sharded)
        embedding = raw, raw - saved
        if config.fused_embedding_sync:
            formats, dtype = Formats.of(config.format_of(EMBEDDING)), gpt.gradient_dtype
            fused = fused_bytes(plan.tied_bytes, layout.data_parallel, sharded=sharded, formats=formats, dtype=dtype)
            embedding = raw, fused
    gathers = [bucket.gather for bucket in plan.buckets if bucket.gather is not None]
    gathered = sum(gather.gathered_bytes() for gather in gathers) if gathers else plan.gather_bytes
    return {
        DP_GRADIENTS: (plan.dense_bytes, sent),
        EMBEDDING: embedding,
        PARAM_GATHER: (plan.gather_bytes, gathered),
    }


def _plan(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int, *, words: bool = True) -> GroupPlan:
    """Plan a stage as one bucket, with a tied embedding as another. Megatron uses more buckets, which changes little.

    Args:
        words: True if the word embedding and the output layer are among the stage's parameters.
    """
    tied = gpt.tied and layout.stages > 1
    count = gpt.word_embeddings(stage, layout.stages) if words else 0
    embeddings = [ParameterRecord(shape=gpt.embedding, start=0, tied=tied, embedding=True)] * count
    rest = [ParameterRecord(shape=shape, start=0) for shape in gpt.of_stage(stage, layout.stages)]
    buckets = [rest, embeddings] if tied else [embeddings + rest]
    fused = config.fused_embedding_sync and tied
    rules = BucketRules.of(config, ranks=layout.data_parallel, sharded=layout.distributed_optimizer, fused=fused)
    if not _compressed_stage(config, stage):
        rules = dataclasses.replace(rules, format="dense")
    return GroupPlan.of([_bucket(gpt, layout, bucket) for bucket in buckets if bucket], rules)


def _bucket(gpt: Gpt, layout: Layout, parameters: Sequence[ParameterRecord]) -> BucketRecord:
    """Lay the parameters out one after the other; the distributed optimizer pads a bucket to shards of equal length."""
    starts = [0, *accumulate(parameter.range[1] for parameter in parameters)]
    unit = layout.data_parallel if layout.distributed_optimizer else 1
    return BucketRecord(
        numel=-(-starts[-1] // unit) * unit,
        dtype=gpt.gradient_dtype,
        parameter_dtype=gpt.parameter_dtype,
        parameters=[dataclasses.replace(each, start=at) for each, at in zip(parameters, starts, strict=False)],
    )


def state_bytes(gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule) -> int:
    """Return the bytes of residuals and low-rank factors on the rank that has most of them.

    Each is kept twice, so that a step can be repeated. Block formats keep no state across iterations; for them the
    result counts the message buffers of gradients and the residual of one message.
    """
    itemsize = 2 if config.compression_state_dtype == "bf16" else 4
    links = [plan for plan, stage in _links(config, schedule) if any(
        plan.compresses(message, gpt.message) for message in schedule.messages(stage)
    )]  # fmt: skip
    link = schedule.chunks * gpt.message.numel() if links else 0
    if config.backprop_remembers:
        link *= 2 * itemsize
    else:
        link *= gpt.pipeline_dtype.itemsize if config.lazy_error_propagation else 0
    plans = [plan for stage in range(layout.stages) for plan in _plan(gpt, layout, config, stage, words=False).buckets]
    low_rank = [plan.compressed.low_rank for plan in plans if isinstance(plan.compressed, LowRankPlan)]
    taken = [sum(2 * math.prod(matrix.shape) * itemsize for matrix in matrices) for matrices in low_rank]
    taken += [plan.compressed.wire_bytes for plan in plans if isinstance(plan.compressed, ExchangePlan)]
    buckets = max(taken, default=0)
    shards = max(_of_gather(gpt, layout, config, stage) for stage in range(layout.stages))
    return link + buckets + shards


def new_communicator_bytes(layout: Layout, config: OptimusConfig) -> int:
    """Return a rank's bytes for the parameter gather: all shards' messages, and its own shard before the step and its
    change.
    """
    union = config.fused_embedding_sync and not layout.distributed_optimizer
    return communicator_bytes(2 * layout.data_parallel) if union else 0


def _of_gather(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int) -> int:
    """Return a warning for each compression rank at which every tensor is sent uncompressed."""
    if (codec := _codec(config.format_of(PARAM_GATHER))) is None:
        return 0
    buckets = _plan(gpt, layout, config, stage).buckets
    values = sum(parameter.range[1] for bucket in buckets for parameter in bucket.record.parameters)
    messages = codec.message_bytes(BlockLayout.of_one(values), gpt.parameter_dtype)
    return messages + 2 * values // layout.data_parallel * gpt.parameter_dtype.itemsize


def without_gain(gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule) -> list[str]:
    """Return a line for each class of traffic that low rank does not shrink, because its compression rank is too
    high.
    """
    found = bytes_by_class(gpt, layout, dataclasses.replace(config, dp_compression_stages="all"), schedule)
    return [
        saves_nothing(config, traffic)
        for traffic in CLASSES
        for raw, sent in [found.get(traffic.tag, (0, 0))]
        if config.format_of(traffic) == "low-rank" and raw == sent
    ]
