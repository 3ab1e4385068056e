"""Bytes by class of traffic and memory per rank, of a GPT that no process has built yet."""

import argparse
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config import OptimusConfig, flag_of
from optimus_cc_ext.metrics.traffic import TrafficClass, all_reduce_bytes, reduce_scatter_bytes
from optimus_cc_ext.resolve import Layout
from optimus_cc_ext.techniques.bucket_plan import (
    BucketRecord,
    BucketRules,
    GroupPlan,
    gather_plan,
    sent_alone,
)
from optimus_cc_ext.techniques.exchange import ExchangePlan, Formats, ParameterRecord
from optimus_cc_ext.techniques.fused_embedding_sync import fused_bytes, unfused_bytes
from optimus_cc_ext.techniques.link_plan import LinkPlan
from optimus_cc_ext.techniques.low_rank_plan import LowRankPlan
from optimus_cc_ext.techniques.schedule import Message, Schedule

__all__ = ["Gpt", "bytes_by_class", "gpt_from", "state_bytes", "without_gain"]


@dataclass(frozen=True, kw_only=True)
class Gpt:
    """A GPT's sizes on each tensor-parallel rank, and how its gradients are kept."""

    layers: int
    """Of a pipeline stage; all stages have as many."""

    layer: tuple[tuple[int, ...], ...]
    """Shapes of a layer's parameters on one rank."""

    embedding: tuple[int, int]
    """The word embedding's share of one rank."""

    positions: tuple[int, ...] | None
    """Learned position embeddings, on the first stage."""

    last: tuple[tuple[int, ...], ...]
    """What the last stage has beyond its layers: the final norm."""

    tied: bool
    message: torch.Size
    """An activation between two stages: sequence (over TP with sequence parallelism) x micro-batch x hidden."""

    pipeline_dtype: torch.dtype
    gradient_dtype: torch.dtype
    parameter_dtype: torch.dtype
    tensor_parallel: int

    def of_stage(self, stage: int, stages: int) -> list[torch.Tensor]:
        """Gradients of a stage but the word embedding's and the output layer's, without memory."""
        shapes = list(self.layer) * self.layers
        if stage == 0 and self.positions is not None:
            shapes.append(self.positions)
        if stage == stages - 1:
            shapes += self.last
        return [torch.empty(shape, dtype=self.gradient_dtype, device="meta") for shape in shapes]

    def word_embeddings(self, stage: int, stages: int) -> int:
        """How many matrices of the embedding's size a stage holds."""
        first, last = stage == 0, stage == stages - 1
        return int(first or last) if self.tied else first + last

    def embedding_bytes(self, dtype: torch.dtype) -> int:
        """The word embedding's share of one rank."""
        return self.embedding[0] * self.embedding[1] * dtype.itemsize


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
"""Arguments that change the shapes of gradients, or which stage has them, in a way that is not counted here."""


def gpt_from(args: argparse.Namespace) -> Gpt | None:
    """The model in Megatron's validated arguments; None where it is more than a GPT of equal stages."""
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
    """(raw, sent) bytes of one iteration by class, of all ranks, after every warm-up; as the log counts them.

    `--dp-compression-stages auto` counts as all of them, which is the most that it can choose.
    """
    stages, replicas = layout.stages, layout.data_parallel
    counted = {
        TrafficClass.PIPELINE_FORWARD.value: _pipeline(gpt, config, schedule, forward=True),
        TrafficClass.PIPELINE_BACKWARD.value: _pipeline(gpt, config, schedule, forward=False),
        TrafficClass.DP_GRADIENTS.value: _over_stages(stages, partial(_of_stage, gpt, layout, config)),
        TrafficClass.EMBEDDING.value: _over_stages(stages, partial(_embedding, gpt, layout, config)),
    }
    if layout.distributed_optimizer:
        counted[TrafficClass.PARAM_GATHER.value] = _over_stages(stages, partial(_gathered, gpt, layout, config))
    per = {name: replicas * gpt.tensor_parallel for name in counted}
    return {name: (raw * per[name], sent * per[name]) for name, (raw, sent) in counted.items() if raw}


def _over_stages(stages: int, one: Callable[[int], tuple[int, int]]) -> tuple[int, int]:
    found = [one(stage) for stage in range(stages)]
    return sum(raw for raw, _ in found), sum(sent for _, sent in found)


def _links(config: OptimusConfig, schedule: Schedule) -> Iterator[tuple[LinkPlan, int]]:
    """(what both ends of a link know, the receiver), receiver by receiver."""
    for stage in range(schedule.stages):
        if schedule.messages(stage) and (stage < schedule.stages - 1 or schedule.chunks > 1):
            codec, factor_codec = (_codec(name) for name in (config.compressed_backprop_format, config.low_rank_wire))
            yield LinkPlan(
                config=config, sending_stage=(stage + 1) % schedule.stages, receiving_stage=stage, seed=0, codec=codec,
                factor_codec=factor_codec,
            ), stage  # fmt: skip


def _codec(chosen: str) -> Codec | None:
    format = block_format(chosen)
    return None if format is None else Codec(format)


def _pipeline(gpt: Gpt, config: OptimusConfig, schedule: Schedule, *, forward: bool) -> tuple[int, int]:
    dtype = gpt.pipeline_dtype
    dense, blocks = gpt.message.numel() * dtype.itemsize, BlockLayout.of_one(gpt.message.numel())

    def sent_bytes(plan: LinkPlan, message: Message) -> int:
        if not forward and not (config.compressed_backprop and plan.compresses(message, gpt.message)):
            return dense
        if isinstance(codec := _codec(config.pipeline_forward_format) if forward else plan.codec, Codec):
            return codec.message_bytes(blocks, dtype)
        return dense if forward else plan.factor_bytes(gpt.message, dtype)

    found = [
        sent_bytes(plan, message) for plan, stage in _links(config, schedule) for message in schedule.messages(stage)
    ]
    return dense * len(found), sum(found)


def _compressed_stage(config: OptimusConfig, stage: int) -> bool:
    named = config.dp_compression_stages
    return config.dp_compression and (not isinstance(named, int) or stage < named)


def _of_stage(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int) -> tuple[int, int]:
    """One rank's share of the reduction over its replicas, without a tied embedding, which is a class of its own."""
    gradients = gpt.of_stage(stage, layout.stages)
    tied = gpt.tied and layout.stages > 1
    dense = 0 if tied else gpt.word_embeddings(stage, layout.stages) * gpt.embedding_bytes(gpt.gradient_dtype)
    nbytes = sum(gradient.nbytes for gradient in gradients) + dense
    raw = (reduce_scatter_bytes if layout.distributed_optimizer else all_reduce_bytes)(nbytes, layout.data_parallel)
    if not _compressed_stage(config, stage):
        return raw, raw
    plan = _plan(layout, config, gradients, 0 if tied else dense // gpt.gradient_dtype.itemsize, gpt.gradient_dtype)
    return raw, plan.compressed_bytes() if plan.compresses else raw


def _record(layout: Layout, tensors: Sequence[torch.Tensor], embedding: int, dtype: torch.dtype) -> BucketRecord:
    """A stage's gradients, or its parameters, in one bucket: that Megatron cuts it into several changes little.

    Args:
        embedding: values of word embeddings and output layers among them.
    """
    at, parameters = embedding, []
    if embedding:
        parameters.append(ParameterRecord(shape=(embedding, 1), start=0, embedding=True))
    for tensor in tensors:
        parameters.append(ParameterRecord(shape=tuple(tensor.shape), start=at))
        at += tensor.numel()
    numel = -(-at // layout.data_parallel) * layout.data_parallel
    return BucketRecord(numel=numel, dtype=dtype, parameter_dtype=dtype, parameters=parameters)


def _plan(
    layout: Layout, config: OptimusConfig, gradients: Sequence[torch.Tensor], embedding: int, dtype: torch.dtype
) -> GroupPlan:
    rules = BucketRules.of(config, ranks=layout.data_parallel, sharded=layout.distributed_optimizer, fused=False)
    return GroupPlan.of([_record(layout, gradients, embedding, dtype)], rules)


def _embedding(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int) -> tuple[int, int]:
    if not gpt.tied or layout.stages == 1 or not gpt.word_embeddings(stage, layout.stages):
        return 0, 0
    nbytes, sharded = gpt.embedding_bytes(gpt.gradient_dtype), layout.distributed_optimizer
    raw = unfused_bytes(nbytes, layout.data_parallel, sharded=sharded)
    if config.fused_embedding_sync:
        formats = Formats.of(config.fused_embedding_sync_format)
        return raw, fused_bytes(
            nbytes, layout.data_parallel, sharded=sharded, formats=formats, dtype=gpt.gradient_dtype
        )  # fmt: skip
    formats = Formats.of(config.dp_compression_format)
    if formats is None or not _compressed_stage(config, stage):
        return raw, raw
    # In its bucket, in the format of the gradients; then the pair of stages as ever.
    of_pair = all_reduce_bytes(nbytes, 2)
    numel = nbytes // gpt.gradient_dtype.itemsize
    return raw, of_pair + sent_alone(numel, gpt.gradient_dtype, layout.data_parallel, sharded, formats)


def _gathered(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int) -> tuple[int, int]:
    """(vanilla, ours): one rank's share of the distributed optimizer's gather of the parameters."""
    buckets, dtype = _gathered_buckets(gpt, layout, stage), gpt.parameter_dtype
    raw = sum(
        reduce_scatter_bytes(sum(parameter.numel() for parameter in bucket) * dtype.itemsize, layout.data_parallel)
        for bucket in buckets
    )
    if (format := block_format(config.param_gather_format)) is None:
        return raw, raw
    plans = [gather_plan(_record(layout, bucket, 0, dtype), format, layout.data_parallel) for bucket in buckets]
    return raw, sum(plan.gathered_bytes() for plan in plans)


def _gathered_buckets(gpt: Gpt, layout: Layout, stage: int) -> list[list[torch.Tensor]]:
    """A stage's parameters as they are gathered: a tied embedding in a bucket of its own."""
    rest = gpt.of_stage(stage, layout.stages)
    embedding = [torch.empty(gpt.embedding, device="meta")] * gpt.word_embeddings(stage, layout.stages)
    alone = gpt.tied and layout.stages > 1
    return [bucket for bucket in ([rest, embedding] if alone else [embedding + rest]) if bucket]


def state_bytes(gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule) -> int:
    """What residuals and factors take on the rank where they take most: each is kept twice, for repeated steps.

    Of block formats, which remember nothing across iterations: what their messages of gradients take, and the residual
    of one message.
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
    buckets = 0
    for stage in filter(partial(_compressed_stage, config), range(layout.stages)):
        gradients = gpt.of_stage(stage, layout.stages)
        for bucket in _plan(layout, config, gradients, 0, gpt.gradient_dtype).buckets:
            if isinstance(bucket.compressed, ExchangePlan):
                buckets = max(buckets, bucket.compressed.wire_bytes)
            elif isinstance(bucket.compressed, LowRankPlan):
                matrices = bucket.compressed.low_rank
                buckets = max(buckets, sum(2 * m.rows * m.columns * itemsize for m in matrices))
    shards = max(_of_gather(gpt, layout, config, stage) for stage in range(layout.stages))
    return link + buckets + shards


def _of_gather(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int) -> int:
    """Memory of a rank for messages of all shards, the own one before the step, and what changed in one."""
    if (codec := _codec(config.param_gather_format)) is None:
        return 0
    values = sum(parameter.numel() for bucket in _gathered_buckets(gpt, layout, stage) for parameter in bucket)
    messages = codec.message_bytes(BlockLayout.of_one(values), gpt.parameter_dtype)
    return messages + 2 * values // layout.data_parallel * gpt.parameter_dtype.itemsize


def without_gain(gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule) -> list[str]:
    """Compression ranks at which everything is sent as it is."""
    found = bytes_by_class(gpt, layout, dataclasses.replace(config, dp_compression_stages="all"), schedule)
    said = []
    classes = {"compressed_backprop": TrafficClass.PIPELINE_BACKWARD, "dp_compression": TrafficClass.DP_GRADIENTS}
    for technique, of in classes.items():
        low_rank = getattr(config, technique) and getattr(config, f"{technique}_format") == "low-rank"
        raw, sent = found.get(of.value, (0, 0))
        if low_rank and raw == sent:
            flag, rank = flag_of(f"{technique}_rank"), getattr(config, f"{technique}_rank")
            said.append(f"{flag} {rank}: saves nothing on this model: all {of.value} are sent as they are. Lower it")
    return said
