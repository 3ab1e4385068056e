"""What travels, class by class and format by format: bytes, and what compressing and decompressing them takes.

The table of formats says how many bits a format of blocks sends. Costs are assumed: the memory that
a fused kernel moves, and for low rank its products by `compute.gemm`; no GPU has measured them here.
"""

from functools import lru_cache
from typing import NamedTuple

from optimus_cc_ext.compressors.formats import SUM_FORMAT, block_format, format_named
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.plan import compute, links
from optimus_cc_ext.plan.hardware import Cluster, Constant, Gpu
from optimus_cc_ext.plan.links import Group
from optimus_cc_ext.plan.model import Job

__all__ = [
    "DENSE", "LAUNCH", "MessageCosts", "embedding_cost", "gather_cost", "gradient_cost", "low_rank_values",
    "message_costs",
]  # fmt: skip

LAUNCH = Constant(5e-6, "assumed", "of one kernel")
ORTHOGONALIZE_LAUNCHES = 12
"""Kernels of one batched orthogonalisation; assumed."""

DENSE = OptimusConfig()
"""Vanilla Megatron's traffic."""


class MessageCosts(NamedTuple):
    """Of messages between stages, on one rank: bytes, and seconds of what `timeline.StageCost` has of the same name."""

    activation_bytes: float
    gradient_bytes: float
    coding: dict[str, float]


def _kernel(gpu: Gpu, nbytes: float) -> float:
    return LAUNCH + compute.moved(gpu, nbytes)


def message_costs(cluster: Cluster, job: Job, config: OptimusConfig) -> MessageCosts:
    """An activation's and its gradient's message, (rows, hidden)."""
    gpu, n, m = cluster.gpu, job.message_rows, job.model.hidden
    width, form = job.value_bytes, config.compressed_backprop_format if config.compressed_backprop else "dense"
    forward, encode = _in_blocks(gpu, n * m, width, config.pipeline_forward_format)
    small, compress = _in_blocks(gpu, n * m, width, form)
    # What is left out: added to the next gradient before it is encoded, found by decoding what was sent.
    residual = _kernel(gpu, 3.0 * width * n * m) if block_format(form) and config.lazy_error_propagation else 0.0
    decompress, remember = compress, compress + residual if residual else 0.0
    compress += residual
    r = min(config.compressed_backprop_rank, n, m)
    if form == "low-rank" and r * (n + m) < n * m:
        small, coded = _in_blocks(gpu, r * (n + m), width, config.low_rank_wire)
        # As docs/how-it-works.md counts: M = G + E is written once in fp32, read by both products; E is written last.
        residual = _kernel(gpu, 2 * 4.0 * n * m) if config.lazy_error_propagation else 0.0
        products = compute.gemm(gpu, n, r, m) + compute.gemm(gpu, m, r, n)
        compress = products + residual + ORTHOGONALIZE_LAUNCHES * LAUNCH + coded
        decompress = compute.gemm(gpu, n, m, r) + LAUNCH + coded
        remember = decompress + residual if residual else 0.0
    coding = {
        "encode": encode, "decode": encode, "compress": compress, "decompress": decompress, "remember": remember
    }  # fmt: skip
    return MessageCosts(forward, small, {name: cluster.coding_scale * seconds for name, seconds in coding.items()})


def _coded_bytes(values: float, form: str) -> float:
    return values * format_named(form).bits_per_value / 8


def _in_blocks(gpu: Gpu, values: float, width: int, form: str) -> tuple[float, float]:
    """Return the bytes of a message of values of `width` bytes, and seconds to encode it or decode it.

    Dense and low-rank have no blocks: such a message is costed as dense. ValueError for an unknown format.
    """
    if block_format(form) is None:
        return float(width * values), 0.0
    small = _coded_bytes(values, form)
    return small, _kernel(gpu, width * values + small)


@lru_cache(maxsize=4096)
def gradient_cost(cluster: Cluster, job: Job, config: OptimusConfig, with_embedding: bool) -> tuple[float, float]:
    """Seconds of a stage's reduction over the replicas, with or without its copy of the embedding: of what can begin
    when a bucket is complete, and of what comes after all backward passes (phase Q, the all-gather of sums)."""
    group, width = Group.strided(job.dp, job.tp, cluster.gpus_per_node), job.gradient_bytes
    parameters, embedding = job.stage_parameters, job.embedding_share if with_embedding else 0
    if job.dp == 1:
        return 0.0, 0.0

    def dense(values: float) -> float:
        reduce = links.reduce_scatter if job.distributed_optimizer else links.all_reduce
        # One bucket's message decides how well the line is used.
        parts = job.buckets if job.overlap_grad_reduce else 1
        return parts * reduce(cluster, group, width * values / parts)

    form = config.dp_compression_format if config.dp_compression else "dense"
    if form == "dense":
        return dense(parameters + embedding), 0.0
    if form == "low-rank":
        sent, covered = low_rank_values(job, config)
        # One all-reduce for each phase, P and Q, of a wire as wide as the gradients; what is not compressed stays.
        if config.low_rank_wire == "dense":
            summed = links.all_reduce(cluster, group, width * sent / 2)
        else:
            summed = sum(_block_sum(cluster, group, sent / 2, width, config.low_rank_wire))
        phase = summed + _low_rank_seconds(cluster, job, config) / 2
        return phase + dense(parameters - covered + embedding), phase
    first, gathered = _block_sum(cluster, group, parameters, width, form)
    return first + (dense(embedding) if embedding else 0.0), 0.0 if job.distributed_optimizer else gathered


def _block_sum(cluster: Cluster, group: Group, values: float, width: int, form: str) -> tuple[float, float]:
    """Cost an all-to-all of encoded values and their sum in fp32; then the all-gather of sums, in `SUM_FORMAT`."""
    gpu, small, sums = cluster.gpu, _coded_bytes(values, form), _coded_bytes(values, SUM_FORMAT)
    shard = values / group.ranks
    # Encode; decode what all others sent of the own shard, and add. Encode the sum, decode all sums.
    coding = _kernel(gpu, width * values + small) + _kernel(gpu, small + width * shard)
    again = _kernel(gpu, width * shard + sums / group.ranks) + _kernel(gpu, sums + width * values)
    return (
        links.all_to_all(cluster, group, small) + coding * cluster.coding_scale,
        links.reduce_scatter(cluster, group, sums) + again * cluster.coding_scale,
    )


def _matrices(job: Job, config: OptimusConfig) -> list[tuple[int, int, int]]:
    """Rows, columns and compression rank of those of a layer's matrices, on one rank, on which low rank saves."""
    found = []
    for place, (inputs, outputs) in enumerate(job.model.layer_matrices):
        # QKV and the MLP's first matrix are cut by outputs, the other two by inputs.
        rows, columns = (outputs // job.tp, inputs) if place % 2 == 0 else (outputs, inputs // job.tp)
        r = min(config.dp_compression_rank, rows, columns)
        if r * (rows + columns) < rows * columns:
            found.append((rows, columns, r))
    return found


def low_rank_values(job: Job, config: OptimusConfig) -> tuple[int, int]:
    """Values of a stage's P and Q, and of the matrices that they stand for, on one rank."""
    matrices, layers = _matrices(job, config), job.layers_per_stage
    return layers * sum(r * (n + m) for n, m, r in matrices), layers * sum(n * m for n, m, _ in matrices)


def _low_rank_seconds(cluster: Cluster, job: Job, config: OptimusConfig) -> float:
    """To compress and decompress a stage's gradients."""
    gpu, layers, spent = cluster.gpu, job.layers_per_stage, 0.0
    # M = G + E read and written, E and G written from the sum, each in the buffer's width or fp32.
    width = 3 * 4 + 3 * job.gradient_bytes if config.dp_error_feedback else 0
    for n, m, r in _matrices(job, config):
        products = compute.gemm(gpu, n, r, m, layers) + compute.gemm(gpu, m, r, n, layers)
        rebuild = compute.gemm(gpu, n, m, r, layers)
        spent += products + rebuild + _kernel(gpu, width * n * m * layers) + ORTHOGONALIZE_LAUNCHES * LAUNCH
    return spent * cluster.coding_scale


def embedding_cost(cluster: Cluster, job: Job, config: OptimusConfig) -> float:
    """What comes after the first and the last stage have reduced their gradients, in seconds."""
    if job.pp == 1 or not job.model.tied:
        return 0.0
    values: float = job.embedding_share
    per_node, fused = cluster.gpus_per_node, config.fused_embedding_sync and job.dp > 1
    # First and last stage: on one node only if the job is.
    group = Group(2, 2 if job.gpus <= per_node else 1, min(job.gpus // job.pp, per_node))
    if fused and job.distributed_optimizer:
        values /= job.dp
    elif fused:
        replicas = Group.strided(job.dp, job.tp, per_node)
        group = Group(2 * job.dp, replicas.per_node, replicas.rings)
    form = config.fused_embedding_sync_format if config.fused_embedding_sync else "dense"
    if form == "dense":
        return links.all_reduce(cluster, group, job.gradient_bytes * values)
    return sum(_block_sum(cluster, group, values, job.gradient_bytes, form))


def gather_cost(cluster: Cluster, job: Job, config: OptimusConfig, parameters: float) -> float:
    """Seconds of the distributed optimizer's all-gather of a stage's parameters, nothing of it hidden."""
    group, width = Group.strided(job.dp, job.tp, cluster.gpus_per_node), job.value_bytes
    form = config.param_gather_format
    if form == "dense" or job.dp == 1:
        return links.reduce_scatter(cluster, group, width * parameters)
    gpu, small, shard = cluster.gpu, _coded_bytes(parameters, form), parameters / job.dp
    # The own shard is kept, compared and put back; then all messages are decoded, and added to all parameters.
    coding = _kernel(gpu, 7 * width * shard + small / job.dp) + _kernel(gpu, small + 5 * width * parameters)
    return links.reduce_scatter(cluster, group, small) + coding * cluster.coding_scale
