"""Seconds of one iteration: the costs of a job's stages, put through the timeline, and their breakdown.

The steady state of 1F1B is periodic: after some rounds of P micro-batches every further round takes the same time (a
max-plus linear system after its transient). A few rounds are therefore simulated, and the rest is extrapolated.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved, Schedule
from optimus_cc_ext.tools.plan import seconds, timeline
from optimus_cc_ext.tools.plan.hardware import Cluster
from optimus_cc_ext.tools.plan.inside import CONTENTION, CONTEXT, TENSOR, contended, experts, inside
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, Seconds, all_reduce, reduce_scatter
from optimus_cc_ext.tools.plan.timeline import (
    ClassCost,
    IterationTimes,
    Link,
    RankCost,
    Sent,
    StageCost,
    Switches,
    When,
    last_backward_ends,
    left_after_backward,
    reduced_after,
)
from optimus_cc_ext.tools.plan.traffic import (
    DENSE,
    activation_message,
    embedding_sum,
    gradient_message,
    gradient_reduction,
    parameter_gather,
)

FORWARD, BACKWARD = classes.PIPELINE_FORWARD.tag, classes.PIPELINE_BACKWARD.tag
GRADIENTS, EMBEDDING, GATHER = classes.DP_GRADIENTS.tag, classes.EMBEDDING.tag, classes.PARAM_GATHER.tag
_INSIDE = (TENSOR, CONTEXT, *(traffic.tag for traffic in classes.classes_among("experts")))
CLASSES = (
    "computation", "bubble", *_INSIDE, FORWARD, BACKWARD, GRADIENTS, EMBEDDING, "optimizer", GATHER,
    "compression",
)  # fmt: skip
_MESSAGES = ("activation", "gradient", "epilogue")
"""The names of the fields of `StageCost` that hold messages."""

ROUNDS = 2
"""Number of rounds of `pp` micro-batches that are simulated before the steady state is extrapolated."""

NORM_AND_LOG = 8
"""Number of small all-reduces over all ranks per iteration (found inf, gradient norm, loss) with their
waits; assumed.
"""


@dataclass(frozen=True, kw_only=True)
class PlannedIteration:
    """The times of a planned iteration: those of the timeline, and those that the timeline does not cover."""

    times: IterationTimes
    compressed_stages: frozenset[int]
    """The stages that compress their gradients."""

    inside: dict[str, float]
    """Seconds by class of the collectives inside a micro-batch's passes through a model chunk."""

    coding: float
    """Seconds of encoding and decoding tokens in a micro-batch's passes through a model chunk."""

    step: float
    """Seconds of the optimizer's step."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole iteration."""
        return self.times.reduced + self.step + self.times.after_step


@lru_cache(maxsize=256)
def schedule_of(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Return Megatron's schedule, with its order and warm-ups (`get_schedule_table`, `get_pp_rank_microbatches`)."""
    if chunks == 1:
        return NonInterleaved(stages, micro_batches)
    order = tuple(chunk for _ in range(micro_batches // stages) for chunk in range(chunks) for _ in range(stages))
    warmups = tuple(min(2 * (stages - 1 - stage) + (chunks - 1) * stages, len(order)) for stage in range(stages))
    return Interleaved(stages, chunks, order, warmups)


@lru_cache(maxsize=4096)
def backward_ends(chunks: int, micro_batches: int, costs: tuple[StageCost, ...]) -> tuple[float, ...]:
    """Return `last_backward_ends` for any number of micro-batches, in the time of simulating a few rounds."""
    stages = len(costs)
    rounds, rest = divmod(micro_batches, stages)
    if rounds <= ROUNDS + 1:
        return tuple(last_backward_ends(schedule_of(stages, chunks, micro_batches), costs))
    before, after = (
        last_backward_ends(schedule_of(stages, chunks, n * stages + rest), costs) for n in (ROUNDS, ROUNDS + 1)
    )
    further = rounds - ROUNDS - 1
    return tuple(end + further * (end - begin) for begin, end in zip(before, after, strict=True))


def rank_costs(cluster: Cluster, job: Job, config: OptimusConfig = DENSE) -> tuple[RankCost, ...]:
    """Return the costs of one rank of each stage: its computation and its messages, both dense and as `config` says."""
    layer, collectives = seconds.layer(cluster.gpu, job), inside(cluster, job)
    exchanges = experts(cluster, job, config)
    scale, predictors, last = cluster.software_scale / job.vpp, job.model.predictors, job.pp - 1

    def passes(stage: int) -> Seconds:
        # Each predictor of MTP is a layer and a head of its own.
        layers = job.layers_on(stage) + (predictors if stage == last else 0)
        computed = layer * layers
        return (computed + seconds.head(cluster.gpu, job) * (1 + predictors) if stage == last else computed) * scale

    def within(stage: int) -> list[ClassCost]:
        own, more = job.layers_on(stage), predictors if stage == last else 0
        layers = (own + more) / job.vpp
        # A predictor has a mixture as the last layer has, and `exchanges` are means over layers with and without one.
        tokens = (own + more * job.model.layers / mixture.layers) / job.vpp if (mixture := job.model.mixture) else 0.0
        return [
            ClassCost(name, when, link, *[Sent(transfer=transfer * layers)] * 2)
            for name, link in ((TENSOR, Link.TENSOR), (CONTEXT, Link.CONTEXT))
            for when, transfer in (
                (When.FORWARD_PASS, collectives[name].forward), (When.BACKWARD_PASS, collectives[name].backward)
            )
        ] + [
            replace(cost, dense=_times(cost.dense, tokens), compressed=_times(cost.compressed, tokens))
            for cost in exchanges
        ]  # fmt: skip

    first = passes(0).forward + sum(each.dense.transfer for each in within(0) if each.when is When.FORWARD_PASS)

    def both(make: Callable[[OptimusConfig], Sent]) -> tuple[Sent, Sent]:
        return make(DENSE), make(config)

    activation = both(lambda way: activation_message(cluster, job, way))
    gradient = both(lambda way: gradient_message(cluster, job, way))
    everywhere = (
        ClassCost(EMBEDDING, When.AFTER_BACKWARD, Link.ENDS, *both(lambda way: embedding_sum(cluster, job, way))),
        ClassCost(
            GATHER, When.AFTER_STEP, Link.REPLICAS,
            *both(lambda way: _exposed_gather(cluster, job, way, first)),
        ),
    )  # fmt: skip
    # A sharded optimizer always reduces the embedding together with the other gradients.
    apart = config.is_on(classes.EMBEDDING) and not job.distributed_optimizer

    def rank(stage: int) -> RankCost:
        own = job.parameters_on(stage), 0 if apart else job.embeddings_on(stage), job.routed_on(stage)
        computed = passes(stage)
        crosses = job.hop_crosses(stage, cluster.gpus_per_node)
        messages = (
            # A preset leaves dense what stays inside a node.
            [
                _sent_on(cluster, job, sent, crosses)
                for sent in ((dense, coded) if crosses or not stays else [dense] * 2)
            ]
            for (dense, coded), stays in (
                (activation, config.is_dense_inside(classes.PIPELINE_FORWARD)),
                (gradient, config.is_dense_inside(classes.PIPELINE_BACKWARD)),
            )
        )
        reduction = both(lambda way: gradient_reduction(cluster, job, way, *own))
        return RankCost(
            stage=stage,
            forward=computed.forward,
            backward=computed.backward,
            classes=(
                *within(stage),
                *everywhere,
                ClassCost(FORWARD, When.ACTIVATION, Link.STAGES, *next(messages)),
                ClassCost(BACKWARD, When.GRADIENT, Link.STAGES, *next(messages)),
                ClassCost(GRADIENTS, When.AFTER_BACKWARD, Link.REPLICAS, *reduction),
            ),
            buckets=job.buckets if job.overlap_grad_reduce else 1,
            # With several model chunks, the backward passes of the last `pp` micro-batches complete the gradients, one
            # chunk after the other.
            last_passes=1 + (job.vpp - 1) * job.pp,
        )

    return tuple(map(rank, range(job.pp)))


def _times(sent: Sent, factor: float) -> Sent:
    return Sent(**{name: factor * value for name, value in vars(sent).items()})


def _sent_on(cluster: Cluster, job: Job, message: Sent, crosses: bool) -> Sent:
    """Return a message with the seconds of its transfer to the next stage."""
    per_node = cluster.gpus_per_node
    transfer = seconds.send(cluster, message.nbytes, job.senders(per_node), crosses)
    if job.scatter_gather:
        # With scatter-gather each tensor-parallel rank receives a share of the activation, which the receiver
        # gathers.
        whole = job.value_bytes * job.rows * job.model.hidden
        transfer += reduce_scatter(cluster, Group.strided(job.tp, 1, per_node), whole)
    return replace(message, transfer=transfer)


def iteration(cluster: Cluster, job: Job, config: OptimusConfig = DENSE) -> PlannedIteration:
    """Return the times of one iteration of `job`, compressed as `config` says."""
    ranks, schedule = rank_costs(cluster, job, config), schedule_of(job.pp, job.vpp, job.micro_batches)
    compute = partial(
        timeline.iteration,
        contention=CONTENTION,
        simulate=lambda _, costs: backward_ends(job.vpp, job.micro_batches, costs),
    )
    switches, compressed = Switches.of(config, job.pp), frozenset[int]()
    if config.is_on(classes.DP_GRADIENTS) and job.replicas > 1:
        first = config.dp_compression_stages
        compressed = frozenset(range(min(first, job.pp) if isinstance(first, int) else job.pp))
    own, routed = job.parameters_on(0) + job.embeddings_on(0), job.routed_on(0)
    shards = job.instances * (own / job.replicas + routed / job.expert_replicas)
    shard = shards if job.distributed_optimizer else own + routed
    step = seconds.moved(cluster.gpu, seconds.OPTIMIZER_BYTES * shard) * cluster.software_scale
    step += NORM_AND_LOG * all_reduce(cluster, Group.strided(job.gpus, 1, cluster.gpus_per_node), 8)
    middle = [
        (cost.name, switches.sent(cost, job.pp // 2))
        for cost in ranks[job.pp // 2].classes
        if cost.when in (When.FORWARD_PASS, When.BACKWARD_PASS)
    ]
    return PlannedIteration(
        times=compute(ranks, schedule, switches.where(GRADIENTS, compressed)),
        compressed_stages=compressed,
        inside={name: sum(sent.transfer for each, sent in middle if each == name) for name in _INSIDE},
        coding=sum(sent.encode + sent.decode for _, sent in middle),
        step=step,
    )


def breakdown(job: Job, whole: PlannedIteration) -> dict[str, float]:
    """Return the seconds of `whole`, an iteration of `job`, by `CLASSES`: the exposed time that each part adds.

    The parts are found by removing one after the other: compression, the messages of gradients, the messages of
    activations.
    """
    passes, times = job.micro_batches * job.vpp, whole.times
    collectives, coding = [spent * passes for spent in whole.inside.values()], whole.coding * passes
    busy = max(cost.forward + cost.backward for cost in times.costs) * passes - sum(collectives) - coding

    def ends(*sent: str) -> float:
        """Return the end of an iteration in which only the messages named in `sent` take time, namely their
        transfer.
        """
        messages = [{name: Sent(transfer=getattr(cost, name).transfer) for name in sent} for cost in times.costs]
        costs = (
            StageCost(forward=cost.forward, backward=cost.backward, **message)
            for cost, message in zip(times.costs, messages, strict=True)
        )
        return max(backward_ends(job.vpp, job.micro_batches, tuple(costs)))

    free, activations, all_of_them = ends(), ends("activation"), ends(*_MESSAGES)
    last = max(times.ends)
    exposed = reduced_after(times.ends, times.reductions, 0.0)
    parts = (
        busy, free - busy - sum(collectives) - coding, *collectives, activations - free, all_of_them - activations,
        exposed - last, whole.seconds - exposed - whole.step - times.after_step, whole.step, times.after_step,
        last - all_of_them + coding,
    )  # fmt: skip
    # The difference of two equal times may be a rounding error instead of 0.
    return {name: 0.0 if abs(part) < 1e-12 * whole.seconds else part for name, part in zip(CLASSES, parts, strict=True)}


def _exposed_gather(cluster: Cluster, job: Job, config: OptimusConfig, forward: float) -> Sent:
    """Return the all-gather of updated parameters. With overlap, all buckets but the first are gathered beside forward
    passes.

    Args:
        forward: seconds of one of these forward passes.
    """
    if not job.distributed_optimizer:
        return Sent()
    whole = parameter_gather(cluster, job, config)
    if not job.overlap_param_gather:
        return whole
    window = forward * job.vpp * min(job.pp, job.micro_batches)
    left = left_after_backward(whole.transfer, window, job.buckets)
    return replace(whole, transfer=contended(whole.transfer, left))
