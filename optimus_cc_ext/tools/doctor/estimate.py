"""Estimates of bytes by class of traffic and memory per rank, for a GPT that no process has built."""

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from optimus_cc_ext.collectives.legs import Bytes, Span, all_reduce, bytes_of
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels, Node
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.classes import TrafficClass, classes_among
from optimus_cc_ext.config.presets import Layout, saves_nothing
from optimus_cc_ext.metrics.traffic import BETWEEN_NODES
from optimus_cc_ext.placement import Placement
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan, ParameterRecord
from optimus_cc_ext.techniques.crossing import left_dense, levels_of_experts, levels_of_group
from optimus_cc_ext.techniques.fused_embedding_sync import legs_of_sum, union_ranks
from optimus_cc_ext.techniques.grid import RankPlace
from optimus_cc_ext.techniques.messages import LinkPlan, message_bytes
from optimus_cc_ext.techniques.schedule import Message, Schedule
from optimus_cc_ext.tools.doctor.shapes import NotBuilt, stages_of
from optimus_cc_ext.tools.doctor.tokens import NO_EXPERT_LAYERS, ExpertLayers, Tokens, away


@dataclass(frozen=True, kw_only=True)
class Gpt:
    """A model's parameters on one tensor-parallel rank of each stage, with the data types of messages and gradients."""

    stages: Sequence[Sequence[ParameterRecord]]
    message: torch.Size
    """Shape of an activation between two stages: sequence (divided by the context-parallel size, and by the
    tensor-parallel size with sequence parallelism) x micro-batch x hidden.
    """

    pipeline_dtype: torch.dtype
    gradient_dtype: torch.dtype
    parameter_dtype: torch.dtype
    tensor_parallel: int
    mixture: ExpertLayers = NO_EXPERT_LAYERS
    """Layers of the dispatcher `alltoall`; the log counts no tokens of other dispatchers."""

    expert_replicas: int = 0
    """Number of replicas of each routed expert; 0: experts lie among the other parameters."""

    overlaps_gradients: bool = False
    overlaps_parameters: bool = False
    """True if several buckets are reduced at once (`--overlap-grad-reduce`), or gathered (`--overlap-param-gather`)."""


def gpt_from(args: argparse.Namespace, *, trained_here: bool = False) -> Gpt:
    """Read the model from Megatron's validated arguments; `stages_of` has the argument and what it raises."""
    tp = args.tensor_model_parallel_size
    if args.padded_vocab_size is None and args.vocab_size is None:
        if args.tokenizer_type != "GPT2BPETokenizer":
            raise NotBuilt("the size of the vocabulary comes from the tokenizer: give --vocab-size")
        args = argparse.Namespace(**vars(args) | {"vocab_size": 50257})
    stages = stages_of(args, trained_here=trained_here)
    split = args.context_parallel_size * (tp if args.sequence_parallel else 1)
    in_fp32 = getattr(args, "accumulate_allreduce_grads_in_fp32", False) or args.params_dtype == torch.float32
    experts = args.expert_model_parallel_size * (args.expert_tensor_parallel_size or tp)
    return Gpt(
        stages=stages,
        message=torch.Size((args.seq_length // split, args.micro_batch_size, args.hidden_size)),
        pipeline_dtype=args.params_dtype,
        gradient_dtype=torch.float32 if in_fp32 else args.params_dtype,
        parameter_dtype=args.params_dtype,
        tensor_parallel=tp,
        overlaps_gradients=args.overlap_grad_reduce,
        overlaps_parameters=args.overlap_param_gather,
        mixture=ExpertLayers.of(args) if args.moe_token_dispatcher_type == "alltoall" else NO_EXPERT_LAYERS,
        expert_replicas=args.world_size // (args.pipeline_model_parallel_size * experts)
        if args.expert_model_parallel_size > 1
        else 0,
    )


_APART = Span(2)
"""Two ranks on different nodes."""


@dataclass(frozen=True, kw_only=True)
class OnNodes:
    """Facts about a run's nodes on which estimates depend; the defaults stand for unknown nodes."""

    levels: Levels = ONE_LEVEL
    """Levels in which the first group of replicas adds up gradients."""

    beside: int = 1
    """Number of ranks of the first group of replicas on one node."""

    union: Levels = ONE_LEVEL
    """Levels of the ranks that reduce a tied embedding together without the distributed optimizer: the first and the
    last stage's replicas.
    """

    beside_in_union: int = 1
    """Number of ranks on one node that reduce a tied embedding together."""

    left_dense: frozenset[TrafficClass] = frozenset()
    """Classes that are left dense because nothing of them leaves a node."""

    crossing: float = 1.0
    """Share of the hops between stages that cross nodes."""

    tokens_to_ranks: float = 0.0
    """Share of the tokens sent to experts that leave their rank."""

    tokens_to_nodes: float = 0.0
    """Share of the tokens sent to experts that leave their node."""

    experts: Levels = ONE_LEVEL
    """The nodes among which tokens go once; one level: they go direct."""

    pair: Span = _APART
    """The first and the last stage of the first pipeline."""

    @classmethod
    def of(cls, config: OptimusConfig, places: Sequence[RankPlace], layout: Layout) -> "OnNodes":
        """Return the facts that follow from the places of all ranks."""
        instances = layout.instances
        nodes = {place.rank: place.node.name for place in places}
        first = next(place for place in places if place.rank == 0)
        alike = [p.rank for p in places if (p.stage, p.tensor_rank) == (first.stage, first.tensor_rank)]
        levels = _instance_levels(len(alike), instances) or levels_of_group(places, sorted(alike))
        two = levels.instances or (config.sums_in_blocks and config.dp_compression_levels != "one")
        hops = [hop for place in places for hop in pairwise(place.pipeline)]
        ends = (*first.pipeline[:1], *first.pipeline[-1:])
        union = union_ranks(places, max(place.stage for place in places) + 1)[0]
        together = levels_of_group(places, union)
        return cls(
            levels=levels if two else dataclasses.replace(levels, members=1),
            beside=sum(nodes[rank] == nodes[0] for rank in alike),
            union=together if config.dp_compression_levels != "one" else ONE_LEVEL,
            beside_in_union=sum(nodes[rank] == nodes[0] for rank in union),
            left_dense=left_dense(config, places, instances),
            tokens_to_ranks=away(places, nodes=False),
            tokens_to_nodes=away(places, nodes=True),
            experts=levels_of_experts(config, places, layout),
            crossing=sum(nodes[a] != nodes[b] for a, b in hops) / max(1, len(hops)),
            pair=Span(2, beside=1 if len({nodes[rank] for rank in ends}) > 1 else 2),
        )


def _instance_levels(replicas: int, instances: int) -> Levels | None:
    """Return the levels of several instances of the distributed optimizer; None with one instance."""
    return Levels(nodes=instances, members=replicas // instances, instances=True) if instances > 1 else None


UNKNOWN = OnNodes()


def places_of(placement: Placement) -> list[RankPlace]:
    """Return the places of all ranks of a run, on nodes that each hold the same number of consecutive ranks."""
    tensor_ranks = {rank: index for ranks in placement.groups("tensor") for index, rank in enumerate(ranks)}
    return [
        RankPlace(
            rank=rank, stage=stage, tensor_rank=tensor_ranks[rank], node=Node(str(placement.node(rank))),
            pipeline=tuple(ranks) if len(ranks) > 1 else (),
            experts=tuple(placement.experts(rank)) if placement.expert > 1 else (),
        )
        for ranks in placement.groups("pipeline")
        for stage, rank in enumerate(ranks)
    ]  # fmt: skip


def bytes_by_class(
    gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule, on: OnNodes = UNKNOWN
) -> dict[str, tuple[int, int]]:
    """Return the (raw, sent) bytes of one iteration by class, and those between nodes, summed over all ranks, after
    every warm-up.

    The counts are the log's, of a run whose trial, if it has one, lets compression stay.
    """
    ranks, counted = layout.data_parallel * gpt.tensor_parallel, {traffic: [0, 0] for traffic in classes.CLASSES}
    leaving = [0.0, 0.0]
    for traffic, *transfer in _transfers(gpt, layout, config, schedule, on):
        for index, nbytes in enumerate(transfer):
            counted[traffic][index] += ranks * nbytes.sent
            leaving[index] += ranks * nbytes.leaving
    found = {traffic.tag: (raw, sent) for traffic, (raw, sent) in counted.items() if raw}
    raw, sent = map(round, leaving)
    return found | ({BETWEEN_NODES: (raw, sent)} if raw or sent else {})


def _transfers(
    gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule, on: OnNodes
) -> Iterator[tuple[TrafficClass, Bytes, Bytes]]:
    """Yield the classes of all that one rank of each stage sends in an iteration, with its bytes, raw and as sent."""
    for traffic in (classes.PIPELINE_FORWARD, classes.PIPELINE_BACKWARD):
        raw, sent = (Bytes(n, n * on.crossing) for n in _pipeline(gpt, config, schedule, traffic, on))
        yield traffic, raw, sent
    yield from _of_tokens(gpt, layout, config, schedule, on)
    for stage in range(layout.stages):
        for plan in plans_of(gpt, layout, config, stage, on):
            reduced, (raw, sent) = plan.bytes_by_class(plan.compresses), plan.gathered
            yield from ((traffic, nbytes, reduced[traffic]) for traffic, nbytes in plan.vanilla.items())
            yield classes.PARAM_GATHER, raw, sent if sent.sent else raw
            if plan.tied_bytes:
                raw = bytes_of([all_reduce(plan.tied_bytes, on.pair)])
                sent = _of_fused(plan, layout, config, on) if config.is_on(classes.EMBEDDING) else raw
                yield classes.EMBEDDING, raw, sent


def tokens_of(gpt: Gpt, layout: Layout) -> Tokens | None:
    """Return the tokens of an exchange; None if no token is sent to other ranks."""
    sequence, batch, hidden = gpt.message
    width, number = layout.row_width or hidden, sequence * batch * gpt.mixture.rows_per_token
    found = Tokens(number=number, dtype=gpt.parameter_dtype, hidden=width, mixture=gpt.mixture)
    return found if gpt.mixture.layers else None


def _of_tokens(
    gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule, on: OnNodes
) -> Iterator[tuple[TrafficClass, Bytes, Bytes]]:
    """Yield the classes of tokens, with their bytes of one rank of each stage, raw and as sent."""
    if (tokens := tokens_of(gpt, layout)) is None:
        return
    times = gpt.mixture.layers * sum(work.forward for work in schedule.passes(0)) // schedule.chunks
    for traffic in classes_among("experts"):
        chosen = "dense" if traffic in on.left_dense else config.format_of(traffic)
        raw, sent = (
            Bytes(round(on.tokens_to_ranks * nbytes), on.tokens_to_nodes * nbytes)
            for nbytes in (times * tokens.sent_bytes(traffic, each) for each in ("dense", chosen))
        )
        if on.experts.two:
            once = tokens.once(traffic, chosen, on.experts, layout.routing)
            sent = Bytes(times * once.sent, times * once.leaving)
        yield traffic, raw, sent


def _of_fused(plan: GroupPlan, layout: Layout, config: OptimusConfig, on: OnNodes) -> Bytes:
    """Return the bytes of a rank in the sum of a tied embedding over both stages."""
    dtype, sharded = plan.buckets[0].record.dtype, layout.distributed_optimizer
    numel = plan.tied_bytes // dtype.itemsize // (layout.owners if sharded else 1)
    union = None if sharded else Span(2 * layout.data_parallel, on.beside_in_union)
    return bytes_of(legs_of_sum(numel, dtype, embedding_formats(config, on), on.pair, union, on.union))


def embedding_formats(config: OptimusConfig, on: OnNodes) -> Formats | None:
    """Return the block formats of a tied embedding; None: dense."""
    return None if classes.EMBEDDING in on.left_dense else Formats.of(config.format_of(classes.EMBEDDING))


def links_of(config: OptimusConfig, schedule: Schedule) -> Iterator[tuple[LinkPlan, int]]:
    """Yield (plan, receiving stage) of each link between stages that carries activation gradients."""
    for stage in range(schedule.stages):
        if schedule.messages(stage) and (stage < schedule.stages - 1 or schedule.chunks > 1):
            yield LinkPlan(config, sending_stage=(stage + 1) % schedule.stages, receiving_stage=stage), stage


def _pipeline(
    gpt: Gpt, config: OptimusConfig, schedule: Schedule, traffic: TrafficClass, on: OnNodes
) -> tuple[int, int]:
    dtype, forward = gpt.pipeline_dtype, traffic is classes.PIPELINE_FORWARD
    dense = gpt.message.numel() * dtype.itemsize

    def sent_bytes(plan: LinkPlan, message: Message) -> int:
        if forward:
            return message_bytes(config.format_of(classes.PIPELINE_FORWARD), gpt.message.numel(), dtype)
        compressed = config.is_on(classes.PIPELINE_BACKWARD) and plan.compresses(message, gpt.message)
        return plan.message_bytes(gpt.message, dtype) if compressed else dense

    links = [(plan, message) for plan, stage in links_of(config, schedule) for message in schedule.messages(stage)]
    raw = dense * len(links)
    return raw, raw if traffic in on.left_dense else sum(sent_bytes(*each) for each in links)


def _compressed_stage(config: OptimusConfig, stage: int) -> bool:
    named = config.dp_compression_stages
    return config.is_on(classes.DP_GRADIENTS) and (not isinstance(named, int) or stage < named)


def plans_of(gpt: Gpt, layout: Layout, config: OptimusConfig, stage: int, on: OnNodes) -> list[GroupPlan]:
    """Plan a stage as one bucket, with the distributed optimizer a tied embedding as another, and routed experts that
    not every replica holds as a third one over their own replicas. Megatron uses more buckets, which changes little.
    """
    kinds: dict[str, list[ParameterRecord]] = {"rest": [], "tied": [], "apart": []}
    for each in gpt.stages[stage]:
        tied, apart = each.tied and layout.distributed_optimizer, each.expert and gpt.expert_replicas
        kind = "tied" if tied else "apart" if apart else "rest"
        kinds[kind].append(each)
    found = []
    for names, ranks in ((("rest", "tied"), layout.data_parallel), (("apart",), gpt.expert_replicas)):
        buckets = [_bucket(gpt, layout, ranks, kinds[name]) for name in names if kinds[name]]
        if not buckets:
            continue
        nodes = on if ranks == layout.data_parallel else OnNodes(
            levels=_instance_levels(ranks, layout.instances) or ONE_LEVEL
        )  # fmt: skip
        rules = BucketRules.of(
            config, ranks=ranks, sharded=layout.distributed_optimizer, left_dense=on.left_dense,
            fused=config.is_on(classes.EMBEDDING) and "tied" in names and any(p.tied for p in gpt.stages[stage]),
            levels=nodes.levels, beside=nodes.beside, in_fp32=layout.sums_in_fp32,
            exact_bits=layout.exact_bits,
        )  # fmt: skip
        if not _compressed_stage(config, stage):
            rules = dataclasses.replace(rules, format="dense")
        found.append(GroupPlan.of(buckets, rules))
    return found


def _bucket(gpt: Gpt, layout: Layout, ranks: int, parameters: Sequence[ParameterRecord]) -> BucketRecord:
    """Lay the parameters out one after the other; the distributed optimizer pads a bucket to shards of equal length."""
    starts = [0, *accumulate(parameter.range[1] for parameter in parameters)]
    unit = ranks if layout.distributed_optimizer else 1
    return BucketRecord(
        numel=-(-starts[-1] // unit) * unit,
        dtype=gpt.gradient_dtype,
        parameter_dtype=gpt.parameter_dtype,
        parameters=[dataclasses.replace(each, start=at) for each, at in zip(parameters, starts, strict=False)],
    )


def without_gain(gpt: Gpt, layout: Layout, config: OptimusConfig, schedule: Schedule) -> list[str]:
    """Return a line for each class of traffic that low rank does not shrink, because its compression rank is too
    high.
    """
    found = bytes_by_class(gpt, layout, dataclasses.replace(config, dp_compression_stages="all"), schedule)
    return [
        saves_nothing(config, traffic)
        for traffic in classes.CLASSES
        for raw, sent in [found.get(traffic.tag, (0, 0))]
        if config.format_of(traffic) == "low-rank" and raw == sent
    ]
