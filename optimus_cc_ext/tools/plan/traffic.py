"""Bytes of a plan: messages of each class in each format, and the seconds of coding.

These closed forms count values where the runtime's plans count blocks and vectors one by one; a test compares both. The
table of formats gives the bits per value of a block format. Coding in blocks costs the memory traffic of a fused
kernel; on an H200 int8 took 1.1 to 1.3 times as long. Low rank costs what was measured on the H200.
"""

from functools import lru_cache

from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant, Gpu
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, all_reduce, moved, reduce_scatter
from optimus_cc_ext.tools.plan.sums import (
    LAUNCH,
    added,
    block_sum,
    coded_bytes,
    in_blocks,
    kernel,
    ring_bytes,
    sum_in_levels,
)
from optimus_cc_ext.tools.plan.timeline import Sent

_EXACT_PASSES = Constant(16.0, "assumed", "68 instructions a value to encode, 40 to decode, at half of an H100's rate")
"""Cost of encoding or decoding one exact value, as the bytes that a GPU moves in that time."""

FP32_PRODUCTS = Constant(
    26e12, "measured", "H200, 18 layers at rank 128: P Q^T of 255 million values in 2.5 ms (docs/evidence.md)"
)
"""Operations per second of low rank's products, which have fp32's precision."""

ORTHOGONALIZE = Constant(8e-6, "measured", "H200: 0.08, 0.55 and 1.8 ms at ranks 16, 64 and 128 (docs/evidence.md)")
"""Seconds that a batched orthogonalisation takes for each column, one after the other."""

DENSE = OptimusConfig()
"""The configuration of vanilla Megatron's traffic."""


def activation_message(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the message of one activation, (rows, hidden), on one rank, with a transfer time of 0."""
    numel = job.message_rows * job.model.hidden
    nbytes, coding = in_blocks(cluster.gpu, numel, job.value_bytes, config.format_of(classes.PIPELINE_FORWARD))
    return Sent(nbytes=nbytes, encode=cluster.coding_scale * coding, decode=cluster.coding_scale * coding)


def gradient_message(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the message of an activation's gradient, like `activation_message`."""
    gpu, n, m, scale = cluster.gpu, job.message_rows, job.model.hidden, cluster.coding_scale
    width, form = job.value_bytes, config.format_of(classes.PIPELINE_BACKWARD)
    small, compress = in_blocks(gpu, n * m, width, form)
    # Before encoding, the residual is added to the gradient; the new residual is computed by decoding the sent message.
    residual = kernel(gpu, 3.0 * width * n * m) if block_format(form) and config.lazy_error_propagation else 0.0
    decompress, remember = compress, compress + residual if residual else 0.0
    compress += residual
    r = min(config.compressed_backprop_rank, n, m)
    if form == "low-rank" and r * (n + m) < n * m:
        small = width * r * (n + m)
        # M = G + E (gradient plus residual) is written once in fp32 and read by both products; E is written last.
        residual = kernel(gpu, 2 * 4.0 * n * m) if config.lazy_error_propagation else 0.0
        compress = 2 * _product(gpu, n, m, r) + residual + _orthogonalized(r)
        decompress = _product(gpu, n, m, r) + LAUNCH
        remember = decompress + residual if residual else 0.0
    return Sent(nbytes=small, encode=scale * compress, decode=scale * decompress, remember=scale * remember)


@lru_cache(maxsize=4096)
def gradient_reduction(
    cluster: Cluster, job: Job, config: OptimusConfig, parameters: int, embedding: int, routed: int
) -> Sent:
    """Return a stage's reduction over the replicas: `parameters` and `embedding` values of all ranks' replicas, and
    `routed` values of routed experts over the experts' replicas.

    The second phase (Q, or the all-gather of sums) comes after all backward passes.
    """
    only, apart, beside = config, 0, embedding
    if config.format_of(classes.DP_GRADIENTS) == "low-rank":
        # Low rank leaves embeddings and routed experts dense. A sharded tied embedding has a bucket of its own, and
        # routed experts have theirs unless every replica holds them.
        only, apart = DENSE, embedding if job.distributed_optimizer and job.shares_embedding and job.pp > 1 else 0
        beside = embedding - apart + (routed if job.ep == 1 else 0)
        routed = 0 if job.ep == 1 else routed
    found = []
    for ranks, stride, way, values, dense_values in (
        (job.replicas, job.replica_stride, config, parameters, beside),
        (job.replicas, job.replica_stride, DENSE, 0, apart),
        (job.expert_replicas, job.expert_stride, only, routed, 0),
    ):
        group = Group.strided(ranks, stride, cluster.gpus_per_node)
        if not values + dense_values or ranks == 1:
            continue
        if job.instances > 1:
            found.append(_between_instances(cluster, job, way, ranks, stride, values, dense_values))
        else:
            found.append(_reduction(cluster, job, way, group, values, dense_values))
    return added(found)


def _between_instances(
    cluster: Cluster, job: Job, config: OptimusConfig, ranks: int, stride: int, parameters: int, embedding: int
) -> Sent:  # fmt: skip
    """Return the reduction over `ranks` replicas in several instances of the distributed optimizer: a dense
    reduce-scatter inside an instance, then an all-reduce of each rank's shard between the instances, in blocks if the
    flags say so. The embedding is summed dense there.
    """
    owners, width = ranks // job.instances, job.gradient_bytes
    inside = Group.strided(owners, stride, cluster.gpus_per_node)
    between = Group.strided(job.instances, owners * stride, cluster.gpus_per_node)
    whole = width * (parameters + embedding)
    first = Sent(nbytes=ring_bytes(whole, owners, twice=False), transfer=reduce_scatter(cluster, inside, whole))
    form = config.format_of(classes.DP_GRADIENTS)
    if form == "low-rank":
        raise PlanError("gradients in low rank with several instances of the distributed optimizer: not modelled")
    if form == "dense" or (config.is_dense_inside(classes.DP_GRADIENTS) and between.nodes == 1):
        shard = whole / owners
        second = Sent(
            nbytes=ring_bytes(shard, job.instances, twice=True), transfer=all_reduce(cluster, between, shard)
        )  # fmt: skip
        return added([first, second])
    rest = width * embedding / owners
    dense = Sent(nbytes=ring_bytes(rest, job.instances, twice=True), transfer=all_reduce(cluster, between, rest))
    there, back = block_sum(cluster, between, parameters / owners, width, form)
    return Sent(
        nbytes=first.nbytes + there.nbytes + back.nbytes + dense.nbytes,
        transfer=first.transfer + there.transfer + dense.transfer,
        second_phase=back.transfer,
    )


def _reduction(
    cluster: Cluster, job: Job, config: OptimusConfig, group: Group, parameters: int, embedding: int = 0
) -> Sent:
    """Return the reduction of `parameters` and of `embedding` values over the ranks of `group`."""
    width = job.gradient_bytes

    def dense(values: float, twice: bool = not job.distributed_optimizer or cluster.network.scatters_twice) -> Sent:
        reduce = all_reduce if twice else reduce_scatter
        # The share of the line rate that a bucket's message reaches depends on the message's size.
        parts = job.buckets if job.overlap_grad_reduce else 1
        nbytes = ring_bytes(width * values, group.ranks, twice=twice)
        return Sent(nbytes=nbytes, transfer=parts * reduce(cluster, group, width * values / parts))

    inside = config.is_dense_inside(classes.DP_GRADIENTS) and group.nodes == 1
    form = "dense" if inside else config.format_of(classes.DP_GRADIENTS)
    if form == "dense":
        return dense(parameters + embedding)
    if form == "low-rank":
        sent, covered = low_rank_values(job, config)
        # Each phase, P and Q, is one all-reduce in the gradients' data type, and so is that of uncompressed parameters.
        nbytes, summed = ring_bytes(width * sent, group.ranks, twice=True), all_reduce(cluster, group, width * sent / 2)
        rest, whole = dense(parameters - covered + embedding, twice=True), dense(parameters + embedding)
        if nbytes + rest.nbytes >= whole.nbytes:
            return whole
        phase = summed + _low_rank_seconds(cluster, job, config) / 2
        return Sent(nbytes=nbytes + rest.nbytes, transfer=phase + rest.transfer, second_phase=phase)
    there, back = sum_in_levels(cluster, job, config, group, parameters, form)
    rest, back = dense(embedding) if embedding else Sent(), Sent() if job.distributed_optimizer else back
    return Sent(
        nbytes=there.nbytes + back.nbytes + rest.nbytes,
        transfer=there.transfer + rest.transfer,
        second_phase=back.transfer,
    )


def matrices(job: Job, config: OptimusConfig) -> list[tuple[int, int, int, float]]:
    """Return the matrices of a stage that low rank shrinks, as (rows, columns, compression rank, number) on one
    tensor-parallel rank.
    """
    found = []
    for matrix in job.model.matrices:
        columns, rows = matrix.on_rank(job.tp)
        r = min(config.dp_compression_rank, rows, columns)
        if r * (rows + columns) < rows * columns and not (matrix.routed or matrix.router):
            found.append((rows, columns, r, matrix.layers * job.layers_per_stage / job.model.layers))
    return found


def _product(gpu: Gpu, n: int, m: int, r: int, count: int = 1) -> float:
    """Return the seconds of one batched product of low rank, M Q, M^T P or P Q^T, for `count` (n, m) matrices M."""
    return max(2.0 * n * m * r * count / FP32_PRODUCTS, moved(gpu, 4.0 * n * m * count))


def _orthogonalized(r: int) -> float:
    """Return the seconds to orthogonalise P, and Q for the next step."""
    return 2 * r * ORTHOGONALIZE


def low_rank_values(job: Job, config: OptimusConfig) -> tuple[int, int]:
    """Return the number of values of a stage's P and Q, and of the matrices that they approximate, on one rank."""
    found = matrices(job, config)
    sent, covered = sum(c * r * (n + m) for n, m, r, c in found), sum(c * n * m for n, m, _, c in found)
    return round(sent), round(covered)


def _low_rank_seconds(cluster: Cluster, job: Job, config: OptimusConfig) -> float:
    """Return the seconds to compress and decompress a stage's gradients."""
    gpu, spent = cluster.gpu, 0.0
    # M = G + E (gradient plus residual) is read and written, then E and G are written from the sum; each is in the
    # buffer's data type or in fp32.
    width = 3 * 4 + 3 * job.gradient_bytes if config.dp_error_feedback else 0
    for n, m, r, number in matrices(job, config):
        count = max(1, round(number))
        spent += 3 * _product(gpu, n, m, r, count) + kernel(gpu, width * n * m * number) + _orthogonalized(r)
    return spent * cluster.coding_scale


def embedding_sum(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the sum of the tied embedding, after the first and the last stage have reduced their gradients."""
    if job.pp == 1 or not job.shares_embedding:
        return Sent()
    values: float = job.embedding_share
    per_node, fused = cluster.gpus_per_node, config.is_on(classes.EMBEDDING) and job.replicas > 1
    # First and last stage share a node only if the whole job does, or the pipeline does with --use-tp-pp-dp-mapping.
    together = job.gpus <= per_node or (job.pipeline_before_data and per_node % (job.tp * job.pp) == 0)
    pairs = per_node // job.pp if together and job.pipeline_before_data else job.senders(per_node)
    group = Group(2, 2 if together else 1, max(1, pairs))
    if fused and job.distributed_optimizer:
        values /= job.replicas // job.instances
    elif fused:
        replicas = Group.strided(job.replicas, job.replica_stride, per_node)
        group = Group(2 * job.replicas, replicas.per_node * (2 if together else 1), replicas.rings)
    form = config.format_of(classes.EMBEDDING)
    if form == "dense":
        nbytes = job.gradient_bytes * values
        return Sent(nbytes=ring_bytes(nbytes, group.ranks, twice=True), transfer=all_reduce(cluster, group, nbytes))
    there, back = sum_in_levels(cluster, job, config, group, values, form)
    return Sent(nbytes=there.nbytes + back.nbytes, transfer=there.transfer + back.transfer)


def parameter_gather(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the distributed optimizer's all-gather of the first stage's parameters, as if nothing hid it."""
    per_node, own = cluster.gpus_per_node, job.parameters_on(0) + job.embeddings_on(0)
    parts = (
        (Group.strided(job.replicas // job.instances, job.replica_stride, per_node), own),
        (Group.strided(job.expert_replicas // job.instances, job.expert_stride, per_node), job.routed_on(0)),
    )
    found = [_gather(cluster, job, config, group, parameters) for group, parameters in parts if parameters]
    return Sent(nbytes=sum(each.nbytes for each in found), transfer=sum(each.transfer for each in found))


def _gather(cluster: Cluster, job: Job, config: OptimusConfig, group: Group, parameters: int) -> Sent:
    form, width, ranks = config.format_of(classes.PARAM_GATHER), job.value_bytes, group.ranks
    inside = config.is_dense_inside(classes.PARAM_GATHER) and group.nodes == 1
    if form == "dense" or inside or ranks == 1:
        nbytes, coding = float((1 if job.fp8_gather else width) * parameters), 0.0
    else:
        exact, shard = form == formats.EXACT, parameters / ranks
        bits = cluster.exact_bits or job.exact_bits
        gpu, nbytes = cluster.gpu, parameters * bits / 8 if exact else coded_bytes(parameters, form)
        # A rank keeps the old values of its shard, slice by slice, computes their change, and restores them; then it
        # decodes all messages and adds them to the parameters.
        coding = kernel(gpu, 7 * width * shard + nbytes / ranks) + kernel(gpu, nbytes + 5 * width * parameters)
        if exact:
            coding = moved(gpu, _EXACT_PASSES * (shard + parameters))
    transfer = reduce_scatter(cluster, group, nbytes) + coding * cluster.coding_scale
    return Sent(nbytes=ring_bytes(nbytes, ranks, twice=False), transfer=transfer)
