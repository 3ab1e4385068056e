"""Measurements of one rank for the forecast: rates of its links, and seconds and bytes of each class of traffic."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from optimus_cc_ext.collectives.messages import BlockCodecs
from optimus_cc_ext.collectives.nodes import ONE_LEVEL
from optimus_cc_ext.collectives.traffic import all_reduce_bytes, sharded_bytes
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.config import classes
from optimus_cc_ext.forecast.experts import InPasses
from optimus_cc_ext.forecast.microbenchmark import time_gradients, time_message, time_parameters
from optimus_cc_ext.forecast.probe import Collective, probe_collective, probe_link
from optimus_cc_ext.forecast.timeline import FREE, ClassCost, Link, RankCost, Rate, Sent, When, reduction
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.techniques.bucket_plan import GroupPlan
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop
from optimus_cc_ext.techniques.fused_embedding_sync import fused_bytes
from optimus_cc_ext.techniques.messages import BlockMessages, message_bytes
from optimus_cc_ext.techniques.schedule import Message
from optimus_cc_ext.techniques.session import Session

__all__ = ["EMBEDDING", "GATHER", "GRADIENTS", "Measured", "measure"]

FORWARD, BACKWARD = classes.PIPELINE_FORWARD.tag, classes.PIPELINE_BACKWARD.tag
GRADIENTS, EMBEDDING, GATHER = classes.DP_GRADIENTS.tag, classes.EMBEDDING.tag, classes.PARAM_GATHER.tag


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one rank: its costs, its links, and the memory that it lacks."""

    cost: RankCost
    link: Rate | None
    """Rate of the link to the next stage; None with one stage."""

    replicas: Rate | None
    """Rate of an all-reduce over the replicas; None with one replica."""

    exchange: Rate | None = None
    """Rate of an all-to-all over the replicas; None with one replica, or if the run uses no all-to-all."""

    inside: Rate | None = None
    """Rate of a reduce-scatter over the replicas of a node; None if gradients are compressed in one level."""

    across: Rate | None = None
    """Rate of an all-to-all between nodes; None if gradients are compressed in one level."""

    experts: Rate | None = None
    """Rate of an all-to-all over the ranks of the experts; None if no token is compressed."""

    in_one_level: RankCost | None = None
    """The costs with gradients compressed in one level; None if `cost` has them so."""

    lacking: int = 0
    """Bytes of residuals, factors and messages of this rank's gradients that would not fit on its GPU; 0 if all fit."""


def measure(session: Session, passes: Stopwatch, gradient: torch.Tensor | None, device: torch.device) -> Measured:
    """Measure this rank's links and compressors. Collective over all ranks of the model.

    Args:
        passes: the stopwatch that timed forward and backward passes.
        gradient: a tensor with the shape and dtype of all activation gradients; None if these are not known beforehand.
        device: the device of the tensors in collectives.

    Raises:
        OptimusError: a link failed.
    """
    gradients = session.gradients
    assert session.grid is not None, "the session has no place in the grid yet"
    sharded = session.layout is not None and session.layout.distributed_optimizer
    several = session.layout is not None and session.layout.instances > 1
    grid, everyone = session.grid, session.grid.groups
    link = probe_link(grid.pipeline_group, device, everyone, batched=grid.batched_messages)
    blocks = session.config.sums_in_blocks
    # A stage without parameters, which has no replicas to sum with, takes part as well, because the other ranks wait
    # for it.
    groups = gradients.buckets[0].groups if gradients.buckets else None
    whole, node, rail = (None, None, None) if groups is None else (groups.whole, groups.node, groups.rail)
    found = {
        collective: probe_collective(node if inside and several else whole, device, everyone, collective)
        for collective, used, inside in (
            (Collective.ALL_REDUCE, True, False), (Collective.REDUCE_SCATTER, sharded, True),
            (Collective.ALL_TO_ALL, blocks and not several, False), (Collective.ALL_GATHER, blocks or sharded, True),
        ) if used
    }  # fmt: skip
    replicas = found[Collective.ALL_REDUCE]
    rates = _Rates.of({collective: rate or FREE for collective, rate in found.items()})
    if blocks and any(buckets.plan.rules.in_fp32 for buckets in gradients.buckets):
        rates = replace(rates, dense=rates.blocks)  # in fp32, vanilla adds up by an all-to-all
    inside = across = None
    if session.two_levels or several:
        inside = probe_collective(node, device, everyone, Collective.REDUCE_SCATTER)
        across = probe_collective(rail, device, everyone, Collective.ALL_TO_ALL)
        rates = replace(rates, inside=inside or FREE, across=across or FREE)
    if several:
        between = probe_collective(rail, device, everyone, Collective.ALL_REDUCE)
        rates = replace(rates, dense=between or FREE, blocks=across or FREE)
    experts = None
    if session.config.sends_rows:
        experts = probe_collective(grid.expert_group, device, everyone, Collective.ALL_TO_ALL)
    exchanged = InPasses.of(session, passes, experts or FREE, device)
    coding = _coding(session, sharded)
    plans = [buckets.plan for buckets in gradients.buckets]
    cost = RankCost(
        stage=session.grid.place.stage,
        forward=exchanged.without(passes.median("forward"), When.FORWARD_PASS),
        backward=exchanged.without(passes.median("backward"), When.BACKWARD_PASS),
        classes=(
            *exchanged.classes,
            _forward(session, gradient, link or FREE),
            _backward(session, gradient, link or FREE),
            _gradients(session, plans, rates, coding, sharded),
            *_embedding(session, rates, replicas or link or FREE, sharded),
            _gather(session, rates.gather),
        ),
        buckets=sum(buckets.overlapping for buckets in gradients.buckets) or 1,
    )
    one = None
    if session.two_levels:
        in_one = _gradients(session, [plan.in_one_level for plan in plans], rates, coding, sharded)
        one = replace(cost, classes=tuple(in_one if each.name == GRADIENTS else each for each in cost.classes))
    return Measured(
        cost=cost,
        link=link,
        replicas=replicas,
        exchange=found.get(Collective.ALL_TO_ALL),
        inside=inside,
        across=across,
        experts=experts,
        in_one_level=one,
        lacking=_lacking(gradients.needed_bytes, device),
    )


@dataclass(frozen=True)
class _Rates:
    """Rates of the collectives over the replicas, named by their contents."""

    dense: Rate
    """The rate of Megatron's own sums: a reduce-scatter with the distributed optimizer, else an all-reduce; with
    several instances of that optimizer, the all-reduce between them.
    """

    factors: Rate
    """The rate of sums of uncompressed factors P and Q: an all-reduce."""

    blocks: Rate
    """Rate of an all-to-all, by which each rank gets the encoded blocks of the shard that it sums."""

    gather: Rate
    """The rate of encoded sums, and of parameters, that are sent to all ranks: an all-gather."""

    inside: Rate = FREE
    """The rate of sums inside a node: a reduce-scatter over the replicas of the node."""

    across: Rate = FREE
    """The rate of the encoded sums of nodes: an all-to-all between nodes."""

    @classmethod
    def of(cls, found: Mapping[Collective, Rate]) -> "_Rates":
        """Return the rates. A collective that the run does not use was not measured, and gets the all-reduce's rate."""
        summed = found[Collective.ALL_REDUCE]
        return cls(
            dense=found.get(Collective.REDUCE_SCATTER, summed), factors=summed,
            blocks=found.get(Collective.ALL_TO_ALL, summed), gather=found.get(Collective.ALL_GATHER, summed),
        )  # fmt: skip


# Each class of traffic has a function of its own. Compressors that are timed here have scratch memory of their own,
# because that of the buckets' compressors is used on the buckets' stream.


def _forward(session: Session, like: torch.Tensor | None, link: Rate) -> ClassCost:
    dense = compressed = link.sent(like.nbytes if like is not None else 0)
    if like is not None and session.forward.messages is not None:
        format = session.config.format_of(classes.PIPELINE_FORWARD)
        codec = session.new_codec(format)
        assert codec is not None
        encode, decode, _ = time_message(BlockMessages(codec, Gauge()), like)
        compressed = link.sent(message_bytes(format, like.numel(), like.dtype), encode=encode, decode=decode)
    return ClassCost(FORWARD, When.ACTIVATION, Link.STAGES, dense, compressed)


def _backward(session: Session, like: torch.Tensor | None, link: Rate) -> ClassCost:
    dense = compressed = link.sent(like.nbytes if like is not None else 0)
    ends = session.backprop.sending or session.backprop.receiving
    if like is not None and ends and ends.plan.compresses(Message(0, epilogue=True), like.shape):
        config = session.config
        tried = CompressedBackprop(config, fast_compressor(), session.new_codec(config.compressed_backprop_format))
        compress, decompress, remember = time_message(tried.messages(ends.plan), like)
        nbytes = ends.plan.message_bytes(like.shape, like.dtype)
        compressed = link.sent(nbytes, encode=compress, decode=decompress, remember=remember)
    return ClassCost(BACKWARD, When.GRADIENT, Link.STAGES, dense, compressed)


def _coding(session: Session, sharded: bool) -> float:
    """Return the seconds to code all gradients of this rank in one level."""
    gradients, config = session.gradients, session.config
    if not config.dp_compression or session.alone is None:
        return 0.0
    return time_gradients(
        [matrix for buckets in gradients.buckets for matrix in buckets.matrices],
        alone=session.alone,
        compressor=fast_compressor(),
        config=config,
        state_dtype=gradients.state_dtype,
        codecs=session.new_codecs(config.format_of(classes.DP_GRADIENTS)),
        sharded=sharded,
    )


def _gradients(
    session: Session, plans: Sequence[GroupPlan], rates: _Rates, coding: float, sharded: bool
) -> ClassCost:  # fmt: skip
    """Return the cost of the gradients that `plans` reduce, which `coding` seconds encode and decode (`_coding`)."""
    gradients = session.gradients
    several = any(plan.rules.instances > 1 for plan in plans)
    share = _second_phase(gradients.codecs, sharded and not several)
    inside = sum(plan.inside_bytes for plan in plans)
    if inside:
        # In two levels a rank encodes only its own part of the node's sum, whereas low rank factors all matrices on
        # each rank.
        first = later = rates.across
        coding /= 1 if gradients.codecs is None else max(plan.rules.levels.members for plan in plans)
    elif gradients.codecs is not None:
        first, later = rates.blocks, rates.gather
    else:
        first = later = rates.factors
    # Bucket groups in which nothing can be compressed are reduced by Megatron.
    others = _dense([plan for plan in plans if not plan.compresses], rates)
    sent = sum(plan.compressed_bytes() for plan in plans if plan.compresses)
    coded = reduction(first, sent - inside, coding, share, later)
    summed = rates.inside.sent(inside)
    return ClassCost(
        GRADIENTS,
        When.AFTER_BACKWARD,
        Link.REPLICAS,
        _dense(plans, rates),
        Sent(
            nbytes=coded.nbytes + others.nbytes + summed.nbytes,
            transfer=coded.transfer + others.transfer + summed.transfer,
            second_phase=coded.second_phase,
        ),
    )


def _dense(plans: Sequence[GroupPlan], rates: _Rates) -> Sent:
    """Return the cost of Megatron's own sums of the gradients in these plans."""
    nbytes, inside = (sum(getattr(plan, name) for plan in plans) for name in ("dense_bytes", "dense_inside_bytes"))
    return Sent(nbytes=nbytes, transfer=rates.dense.seconds(nbytes - inside) + rates.inside.seconds(inside))


def _second_phase(codecs: BlockCodecs | None, sharded: bool) -> float:
    """Return the share of a reduction's bytes that moves in its second phase: Q, or the sums of blocks."""
    if codecs is None:
        return 0.5  # P and Q have about the same size
    return 0.0 if sharded else _share_of_sums(codecs)


def _share_of_sums(codecs: BlockCodecs) -> float:
    """Return the share of a reduction's bytes that are sums, which all ranks get."""
    block = BlockLayout.of_one(BLOCK)
    there, back = (codec.message_bytes(block, torch.float32) for codec in codecs)
    return back / (there + back)


def _embedding(session: Session, rates: _Rates, pair: Rate, sharded: bool) -> tuple[ClassCost, ClassCost]:
    """Return the tied embedding's cost twice: over the replicas, and between the first and the last stage."""
    assert session.grid is not None
    nbytes, replicas = sum(buckets.plan.tied_bytes for buckets in session.gradients.buckets), session.grid.data_parallel
    instances = 1 if session.layout is None else session.layout.instances
    with_replicas = fused_with_replicas = (
        sum(sharded_bytes(nbytes, replicas, instances)) if sharded else all_reduce_bytes(nbytes, replicas)
    )
    with_pair = fused_with_pair = 0
    codecs, formats = session.embedding.codecs, session.embedding.formats
    # In block formats, one reduction goes over the replicas of a stage and then between two ranks, or over the replicas
    # of both stages.
    ours, pair_rate = rates.dense if codecs is None else rates.blocks, pair
    if codecs is not None and not sharded:
        pair_rate = rates.blocks.then(rates.gather, _share_of_sums(codecs))
    if nbytes and session.grid.stages > 1:
        rules = (buckets.plan.rules for buckets in session.gradients.buckets)
        levels = next((each.levels for each in rules if each.instances > 1), ONE_LEVEL)
        fused = fused_with_pair = fused_bytes(
            nbytes, replicas, sharded=sharded, formats=formats, instances=instances, levels=levels
        )  # fmt: skip
        if sharded:
            # After the replicas have reduced, the pair of ranks sums only its shard.
            fused_with_pair = fused_bytes(nbytes // (replicas // instances), 1, sharded=True, formats=formats)
        with_pair = all_reduce_bytes(nbytes, 2)
        fused_with_replicas = fused - fused_with_pair
    return (
        ClassCost(
            EMBEDDING, When.AFTER_BACKWARD, Link.REPLICAS,
            rates.dense.sent(with_replicas), ours.sent(fused_with_replicas),
        ),
        ClassCost(EMBEDDING, When.AFTER_BACKWARD, Link.ENDS, pair.sent(with_pair), pair_rate.sent(fused_with_pair)),
    )  # fmt: skip


def _gather(session: Session, rate: Rate) -> ClassCost:
    coding, codec = 0.0, session.new_codec(session.config.format_of(classes.PARAM_GATHER))
    if codec is not None and session.alone is not None:
        coding = time_parameters(session.parameters.buckets, alone=session.alone, codec=codec)
    dense = rate.sent(sum(buckets.plan.gather_bytes for buckets in session.gradients.buckets))
    compressed = rate.sent(session.parameters.sent_bytes, encode=coding)
    return ClassCost(GATHER, When.AFTER_STEP, Link.REPLICAS, dense, compressed)


def _lacking(nbytes: int, device: torch.device) -> int:
    """Return how many of `nbytes` exceed the memory left at the run's peak GPU allocation; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    room = free + torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    return max(0, nbytes - room)
