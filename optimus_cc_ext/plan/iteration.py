"""One iteration's seconds: a job's stages put through the forecast's timeline, and where the time goes.

The steady state of 1F1B repeats itself: beyond some rounds of P micro-batches every further round takes the same time
(a max-plus linear system, periodic after its transient), so it is simulated for a few rounds and continued from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.forecast import timeline
from optimus_cc_ext.forecast.timeline import StageCost, iteration_seconds, left_after_backward
from optimus_cc_ext.plan import compute, links
from optimus_cc_ext.plan.hardware import Cluster, Constant
from optimus_cc_ext.plan.links import Group
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.plan.traffic import DENSE, embedding_cost, gather_cost, gradient_cost, message_costs
from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved, Pass, Schedule

__all__ = [
    "CLASSES",
    "Iteration",
    "backward_ends",
    "breakdown",
    "compressed_messages",
    "iteration",
    "schedule_of",
    "simulated",
]

CLASSES = (
    "computation", "bubble", "tensor parallel", "pipeline forward", "pipeline backward", "DP gradients", "embedding",
    "optimizer", "parameter gather", "compression",
)  # fmt: skip
_CODING_BACK, _CODING_FORWARD = ("compress", "decompress", "remember"), ("encode", "decode")
ROUNDS = 2
"""Of P micro-batches that are simulated before the steady state is continued."""

CONTENTION = Constant(0.189, "measured", "Lee et al. 2025, arXiv 2507.03114: mean slowdown beside collectives")
"""What computation loses of each second that a collective goes on beside it."""

NORM_AND_LOG = 8
"""Small all-reduces over all ranks per iteration: found inf, norm, loss, and their waits; assumed."""


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """Seconds, as the timeline was given them and as it answered."""

    seconds: float
    ends: tuple[float, ...]
    """By stage, when its last backward pass is over."""

    compressed_stages: frozenset[int]
    costs: tuple[StageCost, ...]
    reductions: tuple[float, ...]
    """By stage, what is left of its gradients' reduction then."""

    tensor: float
    """Of a micro-batch's passes through a model chunk, what tensor parallelism takes."""

    embedding: float
    step: float
    gather: float


def schedule_of(stages: int, chunks: int, micro_batches: int) -> Schedule:
    """Megatron's, with its order and warm-ups (`get_schedule_table`, `get_pp_rank_microbatches`)."""
    if chunks == 1:
        return NonInterleaved(stages, micro_batches)
    order = tuple(chunk for _ in range(micro_batches // stages) for chunk in range(chunks) for _ in range(stages))
    warmups = tuple(min(2 * (stages - 1 - stage) + (chunks - 1) * stages, len(order)) for stage in range(stages))
    return Interleaved(stages, chunks, order, warmups)


def compressed_messages(config: OptimusConfig) -> tuple[str | None, bool]:
    """Which gradients' messages are compressed, all or the epilogue's, and whether activations' are."""
    back = config.compressed_backprop_messages if config.compressed_backprop else None
    return back, config.pipeline_forward_format != "dense"


def simulated(
    chunks: int, micro_batches: int, costs: Sequence[StageCost], back: str | None, forward: bool,
    observe: Callable[[int, Pass | None, float, float], None] | None = None,
) -> list[float]:  # fmt: skip
    """`timeline.last_backward_ends` with `compressed_messages`."""
    return timeline.last_backward_ends(
        schedule_of(len(costs), chunks, micro_batches),
        costs,
        lambda message: back == "all" or (back is not None and message.epilogue),
        compressed_activations=forward,
        observe=observe,
    )


def backward_ends(
    chunks: int, micro_batches: int, costs: Sequence[StageCost], config: OptimusConfig = DENSE
) -> tuple[float, ...]:
    """`simulated` of any number of micro-batches, in the time of a few rounds of them."""
    back, forward = compressed_messages(config)
    # What is not compressed has the same ends whatever compressing it would cost.
    unused: tuple[str, ...] = () if forward else ("compressed_activation", *_CODING_FORWARD)
    unused += () if back else ("compressed_gradient", *_CODING_BACK)
    used = tuple(replace(cost, **dict.fromkeys(unused, 0.0)) for cost in costs)
    return _ends(chunks, micro_batches, used, back, forward)


@lru_cache(maxsize=4096)
def _ends(
    chunks: int, micro_batches: int, costs: tuple[StageCost, ...], back: str | None, forward: bool
) -> tuple[float, ...]:
    stages = len(costs)
    rounds, rest = divmod(micro_batches, stages)
    if rounds <= ROUNDS + 1:
        return tuple(simulated(chunks, micro_batches, costs, back, forward))
    before, after = (simulated(chunks, n * stages + rest, costs, back, forward) for n in (ROUNDS, ROUNDS + 1))
    further = rounds - ROUNDS - 1
    return tuple(end + further * (end - begin) for begin, end in zip(before, after, strict=True))


def _tensor_parallel(cluster: Cluster, job: Job, layer: compute.Seconds) -> compute.Seconds:
    """Of one layer: two all-reduces a pass (Shoeybi et al. 2019), or as many all-gathers and reduce-scatters.

    Backward with sequence parallelism gathers once more, behind the GEMMs (Korthikanti et al. 2022, section 4.2.2).
    """
    if job.tp == 1:
        return compute.Seconds(0.0, 0.0)
    group = Group.strided(job.tp, 1, cluster.gpus_per_node)
    nbytes = job.value_bytes * job.rows * job.model.hidden
    if job.sequence_parallel:
        once = 4 * links.reduce_scatter(cluster, group, nbytes)
    else:
        once = 2 * links.all_reduce(cluster, group, nbytes)
    if job.tp_overlap:
        # Cut into tp pieces that travel beside the GEMMs of the others: the first piece, and what is longer than they.
        once = _contended(once, max(once / job.tp, once - layer.forward))
    return compute.Seconds(once, once * (2 if job.recompute == "full" else 1))


def _crosses(cluster: Cluster, job: Job, stage: int) -> bool:
    """Whether what a stage sends to the next one leaves the node; the wrap link from the last stage is the last's."""
    ranks, per_node = job.gpus // job.pp, cluster.gpus_per_node  # Megatron's last rank axis is the pipeline's.
    apart = (stage * ranks) // per_node != ((stage + 1) % job.pp * ranks) // per_node or ranks >= per_node
    return apart and job.gpus > per_node


def iteration(cluster: Cluster, job: Job, config: OptimusConfig = DENSE) -> Iteration:
    """Seconds of one iteration of `job`, compressed as `config` says."""
    per_node, scale = cluster.gpus_per_node, cluster.software_scale
    layer, messages = compute.layer(cluster.gpu, job), message_costs(cluster, job, config)
    layers = job.layers_per_stage / job.vpp
    tensor = _tensor_parallel(cluster, job, layer) * layers
    top = compute.head(cluster.gpu, job) * (scale / job.vpp)
    shares = 0.0
    if job.scatter_gather:
        # What the receiver of a message adds to put tensor-parallel ranks' shares together.
        whole = job.value_bytes * job.rows * job.model.hidden
        shares = links.reduce_scatter(cluster, Group.strided(job.tp, 1, per_node), whole)
    sent = job.value_bytes * job.message_rows * job.model.hidden, messages.activation_bytes, messages.gradient_bytes
    inner, costs = layer * (layers * scale), []
    for stage in range(job.pp):
        passes = (inner if stage < job.pp - 1 else inner + top) + tensor
        senders, crosses = min(job.gpus // job.pp, per_node), _crosses(cluster, job, stage)
        dense, activation, gradient = (shares + links.send(cluster, nbytes, senders, crosses) for nbytes in sent)
        costs.append(
            StageCost(
                forward=passes.forward,
                backward=passes.backward,
                activation=dense,
                gradient=dense,
                compressed_activation=activation,
                compressed_gradient=gradient,
                **messages.coding,
            )
        )
    ends = backward_ends(job.vpp, job.micro_batches, costs, config)
    dense_left, small_left = (_reductions(cluster, job, config, formats, costs) for formats in (DENSE, config))
    embedding, compressed = embedding_cost(cluster, job, config), frozenset[int]()
    if config.dp_compression and job.dp > 1:
        if config.dp_compression_stages == "auto":
            compressed = timeline.smallest_useful(ends, dense_left, small_left, embedding)
        else:
            first = config.dp_compression_stages
            compressed = frozenset(range(job.pp if first == "all" else min(first, job.pp)))
    left = tuple(small_left[s] if s in compressed else dense_left[s] for s in range(job.pp))
    own = job.stage_parameters + job.embedding_share
    shard = own / (job.dp if job.distributed_optimizer else 1)
    step = compute.moved(cluster.gpu, compute.OPTIMIZER_BYTES * shard) * scale
    step += NORM_AND_LOG * links.all_reduce(cluster, Group.strided(job.gpus, 1, per_node), 8)
    gather = _parameter_gather(cluster, job, config, own, costs[0])
    return Iteration(
        seconds=iteration_seconds(ends, left, embedding) + step + gather,
        ends=ends,
        compressed_stages=compressed,
        costs=tuple(costs),
        reductions=left,
        tensor=tensor.forward + tensor.backward,
        embedding=embedding,
        step=step,
        gather=gather,
    )


def breakdown(job: Job, config: OptimusConfig, whole: Iteration) -> dict[str, float]:
    """Where `whole`, the iteration of these, goes: seconds by `CLASSES`, what each adds and nothing hides.

    By taking away one thing after the other: compression, gradients' messages, activations' messages.
    """
    passes = job.micro_batches * job.vpp
    tensor = whole.tensor * passes
    busy = max(cost.forward + cost.backward for cost in whole.costs) * passes - tensor

    def ends(*zero: str) -> float:
        costs = [replace(cost, **dict.fromkeys((*_CODING_FORWARD, *_CODING_BACK, *zero), 0.0)) for cost in whole.costs]
        return max(backward_ends(job.vpp, job.micro_batches, costs, config))

    gradients, activations = ("gradient", "compressed_gradient"), ("activation", "compressed_activation")
    free, sent, both = ends(*activations, *gradients), ends(*gradients), ends()
    last = max(whole.ends)
    exposed = iteration_seconds(whole.ends, whole.reductions, 0.0)
    parts = (
        busy, free - busy - tensor, tensor, sent - free, both - sent, exposed - last,
        whole.seconds - exposed - whole.step - whole.gather, whole.step, whole.gather, last - both,
    )  # fmt: skip
    return dict(zip(CLASSES, parts, strict=True))


def _reductions(
    cluster: Cluster, job: Job, config: OptimusConfig, formats: OptimusConfig, costs: Sequence[StageCost]
) -> list[float]:
    """By stage, what is left of the reduction over the replicas, in these formats, after the last backward pass."""
    # A sharded optimizer reduces the embedding with the other gradients in any case.
    apart = config.fused_embedding_sync and not job.distributed_optimizer
    found = []
    for stage, cost in enumerate(costs):
        first, second = gradient_cost(cluster, job, formats, stage in (0, job.pp - 1) and not apart)
        # With chunks, the last group of P micro-batches leaves one chunk after the other complete.
        window = cost.backward * (1 + (job.vpp - 1) * job.pp)
        left = left_after_backward(first, window, job.buckets if job.overlap_grad_reduce else 1)
        found.append(_contended(first, left) + second)
    return found


def _contended(whole: float, left: float) -> float:
    """What a transfer of `whole` seconds costs of which `left` are not hidden."""
    return left + CONTENTION * (whole - left)


def _parameter_gather(cluster: Cluster, job: Job, config: OptimusConfig, parameters: float, first: StageCost) -> float:
    """All-gather of updated parameters; overlapped, all but the first bucket travel beside forward passes."""
    if not job.distributed_optimizer:
        return 0.0
    seconds = gather_cost(cluster, job, config, parameters)
    if not job.overlap_param_gather:
        return seconds
    window = first.forward * job.vpp * min(job.pp, job.micro_batches)
    return _contended(seconds, left_after_backward(seconds, window, job.buckets))
