"""Bytes and memory of a plan: messages of each class in each format, the seconds of coding, and the memory of a rank.

These closed forms count values where the runtime's plans count blocks and vectors one by one; a test compares both. The
table of formats gives the bits per value of a block format. Costs of coding are assumed (the memory traffic of a fused
kernel, and for low rank its products by `seconds.gemm`); no GPU has measured them here.
"""

from functools import lru_cache

from optimus_cc_ext.compressors.formats import SUM_FORMAT, block_format, format_named
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import (
    DP_GRADIENTS,
    EMBEDDING,
    PARAM_GATHER,
    PIPELINE_BACKWARD,
    PIPELINE_FORWARD,
)
from optimus_cc_ext.forecast.timeline import Sent
from optimus_cc_ext.plan import PlanError
from optimus_cc_ext.plan.hardware import Cluster, Constant, Gpu
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.plan.seconds import Group, all_reduce, all_to_all, gemm, moved, reduce_scatter

__all__ = [
    "DENSE", "LAUNCH", "activation_bytes", "activation_message", "check_memory", "embedding_sum", "gradient_message",
    "gradient_reduction", "low_rank_values", "memory", "parameter_gather",
]  # fmt: skip

LAUNCH = Constant(5e-6, "assumed", "of one kernel")
ORTHOGONALIZE_LAUNCHES = 12
"""Number of kernels of one batched orthogonalisation; assumed."""

CONTEXT = Constant(3e9, "assumed", "CUDA's context, NCCL's buffers, fragments")

DENSE = OptimusConfig()
"""The configuration of vanilla Megatron's traffic."""


def _kernel(gpu: Gpu, nbytes: float) -> float:
    return LAUNCH + moved(gpu, nbytes)


def _coded_bytes(values: float, form: str) -> float:
    return values * format_named(form).bits_per_value / 8


def _in_blocks(gpu: Gpu, values: float, width: int, form: str) -> tuple[float, float]:
    """Return the bytes of a message of values of `width` bytes each, and the seconds to encode or to decode it.

    Dense and low-rank have no blocks, so such a message is costed as dense. Raises ValueError for an unknown format.
    """
    if block_format(form) is None:
        return float(width * values), 0.0
    small = _coded_bytes(values, form)
    return small, _kernel(gpu, width * values + small)


def activation_message(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the message of one activation, (rows, hidden), on one rank, with a transfer time of 0."""
    numel = job.message_rows * job.model.hidden
    nbytes, coding = _in_blocks(cluster.gpu, numel, job.value_bytes, config.format_of(PIPELINE_FORWARD))
    return Sent(nbytes=nbytes, encode=cluster.coding_scale * coding, decode=cluster.coding_scale * coding)


def gradient_message(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the message of an activation's gradient, like `activation_message`."""
    gpu, n, m, scale = cluster.gpu, job.message_rows, job.model.hidden, cluster.coding_scale
    width, form = job.value_bytes, config.format_of(PIPELINE_BACKWARD)
    small, compress = _in_blocks(gpu, n * m, width, form)
    # Before encoding, the residual is added to the gradient; the new residual is computed by decoding the sent message.
    residual = _kernel(gpu, 3.0 * width * n * m) if block_format(form) and config.lazy_error_propagation else 0.0
    decompress, remember = compress, compress + residual if residual else 0.0
    compress += residual
    r = min(config.compressed_backprop_rank, n, m)
    if form == "low-rank" and r * (n + m) < n * m:
        small, coded = _in_blocks(gpu, r * (n + m), width, config.low_rank_wire)
        # docs/how-it-works.md counts the same bytes: M = G + E (gradient plus residual) is written once in fp32 and
        # read by both products; E is written last.
        residual = _kernel(gpu, 2 * 4.0 * n * m) if config.lazy_error_propagation else 0.0
        products = gemm(gpu, n, r, m) + gemm(gpu, m, r, n)
        compress = products + residual + ORTHOGONALIZE_LAUNCHES * LAUNCH + coded
        decompress = gemm(gpu, n, m, r) + LAUNCH + coded
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
    per_node = cluster.gpus_per_node
    group = Group.strided(job.replicas, job.replica_stride, per_node)
    found = _reduction(cluster, job, config, group, parameters, embedding)
    if not routed:
        return found
    # Low rank leaves routed experts dense.
    only = DENSE if config.format_of(DP_GRADIENTS) == "low-rank" else config
    experts = Group.strided(job.expert_replicas, job.expert_stride, per_node)
    more = _reduction(cluster, job, only, experts, routed)
    return Sent(
        nbytes=found.nbytes + more.nbytes,
        transfer=found.transfer + more.transfer,
        second_phase=found.second_phase + more.second_phase,
    )


def _reduction(
    cluster: Cluster, job: Job, config: OptimusConfig, group: Group, parameters: int, embedding: int = 0
) -> Sent:
    """Return the reduction of `parameters` and of `embedding` values over the ranks of `group`."""
    width = job.gradient_bytes
    if group.ranks == 1:
        return Sent()

    def dense(values: float) -> Sent:
        reduce = reduce_scatter if job.distributed_optimizer else all_reduce
        # The share of the line rate that a bucket's message reaches depends on the message's size.
        parts = job.buckets if job.overlap_grad_reduce else 1
        nbytes = _ring(width * values, group.ranks, twice=not job.distributed_optimizer)
        return Sent(nbytes=nbytes, transfer=parts * reduce(cluster, group, width * values / parts))

    form = "dense" if config.is_dense_inside(DP_GRADIENTS) and group.nodes == 1 else config.format_of(DP_GRADIENTS)
    if form == "dense":
        return dense(parameters + embedding)
    if form == "low-rank":
        sent, covered = low_rank_values(job, config)
        # Each phase, P and Q, is one all-reduce in the gradients' data type; uncompressed parameters are reduced dense.
        if config.low_rank_wire == "dense":
            nbytes, summed = _ring(width * sent, group.ranks, twice=True), all_reduce(cluster, group, width * sent / 2)
        else:
            there, back = _sum_in_levels(cluster, job, config, group, sent / 2, config.low_rank_wire, whole=True)
            nbytes, summed = 2 * (there.nbytes + back.nbytes), there.transfer + back.transfer
        phase, rest = summed + _low_rank_seconds(cluster, job, config) / 2, dense(parameters - covered + embedding)
        return Sent(nbytes=nbytes + rest.nbytes, transfer=phase + rest.transfer, second_phase=phase)
    there, back = _sum_in_levels(cluster, job, config, group, parameters, form)
    rest, back = dense(embedding) if embedding else Sent(), Sent() if job.distributed_optimizer else back
    return Sent(
        nbytes=there.nbytes + back.nbytes + rest.nbytes,
        transfer=there.transfer + rest.transfer,
        second_phase=back.transfer,
    )


def _ring(nbytes: float, ranks: int, *, twice: bool) -> float:
    """Return the bytes that a rank sends in a ring reduce-scatter or all-gather; with `twice`, in an all-reduce."""
    return (2 if twice else 1) * nbytes * (ranks - 1) / ranks


def _block_sum(cluster: Cluster, group: Group, values: float, width: int, form: str) -> tuple[Sent, Sent]:
    """Return an all-to-all of encoded values, summed in fp32 by the receiver, then the all-gather of the sums in
    `SUM_FORMAT`.
    """
    gpu, small, sums = cluster.gpu, _coded_bytes(values, form), _coded_bytes(values, SUM_FORMAT)
    shard = values / group.ranks
    # In the first phase a rank encodes, decodes the other ranks' messages for its shard, and adds them; in the second
    # it encodes the sum and decodes all sums.
    coding = _kernel(gpu, width * values + small) + _kernel(gpu, small + width * shard)
    again = _kernel(gpu, width * shard + sums / group.ranks) + _kernel(gpu, sums + width * values)
    steps = (small, all_to_all, coding), (sums, reduce_scatter, again)
    there, back = (
        Sent(
            nbytes=_ring(nbytes, group.ranks, twice=False),
            transfer=travel(cluster, group, nbytes) + seconds * cluster.coding_scale,
        )
        for nbytes, travel, seconds in steps
    )
    return there, back


def _sum_in_levels(
    cluster: Cluster, job: Job, config: OptimusConfig, group: Group, values: float, form: str, *, whole: bool = False
) -> tuple[Sent, Sent]:  # fmt: skip
    """Return both phases of a sum of encoded values, in two levels if nodes hold several replicas and the flags allow
    it: added up inside a node by a dense reduce-scatter, then between nodes in blocks.

    Without the distributed optimizer, or if `whole`, the sums are gathered inside the node in the end. If the forecast
    of a run chooses the stages, it also chooses the faster number of levels.
    """
    width, members = job.gradient_bytes, group.per_node
    one = _block_sum(cluster, group, values, width, form)
    if config.dp_compression_levels == "one" or min(group.nodes, members) == 1 or group.ranks % members:
        return one
    node, rail = Group(members, members, group.rings), Group(group.nodes, 1, members * group.rings)
    inside = Sent(
        nbytes=_ring(width * values, members, twice=False), transfer=reduce_scatter(cluster, node, width * values)
    )  # fmt: skip
    there, back = _block_sum(cluster, rail, values / members, width, form)
    sharded = job.distributed_optimizer and not whole
    gathered = Sent() if sharded else inside
    two = _together(inside, there), _together(back, gathered)
    chosen = config.dp_compression_levels == "auto" and config.dp_compression_stages == "auto"
    phases = 1 if sharded else 2
    return min(one, two, key=lambda ways: sum(way.transfer for way in ways[:phases])) if chosen else two


def _together(one: Sent, other: Sent) -> Sent:
    return Sent(nbytes=one.nbytes + other.nbytes, transfer=one.transfer + other.transfer)


def _matrices(job: Job, config: OptimusConfig) -> list[tuple[int, int, int, float]]:
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


def low_rank_values(job: Job, config: OptimusConfig) -> tuple[int, int]:
    """Return the number of values of a stage's P and Q, and of the matrices that they approximate, on one rank."""
    matrices = _matrices(job, config)
    sent, covered = sum(c * r * (n + m) for n, m, r, c in matrices), sum(c * n * m for n, m, _, c in matrices)
    return round(sent), round(covered)


def _low_rank_seconds(cluster: Cluster, job: Job, config: OptimusConfig) -> float:
    """Return the seconds to compress and decompress a stage's gradients."""
    gpu, spent = cluster.gpu, 0.0
    # M = G + E (gradient plus residual) is read and written, then E and G are written from the sum; each is in the
    # buffer's data type or in fp32.
    width = 3 * 4 + 3 * job.gradient_bytes if config.dp_error_feedback else 0
    for n, m, r, number in _matrices(job, config):
        count = max(1, round(number))
        products = gemm(gpu, n, r, m, count) + gemm(gpu, m, r, n, count)
        rebuild = gemm(gpu, n, m, r, count)
        spent += products + rebuild + _kernel(gpu, width * n * m * number) + ORTHOGONALIZE_LAUNCHES * LAUNCH
    return spent * cluster.coding_scale


def embedding_sum(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the sum of the tied embedding, after the first and the last stage have reduced their gradients."""
    if job.pp == 1 or not job.shares_embedding:
        return Sent()
    values: float = job.embedding_share
    per_node, fused = cluster.gpus_per_node, config.fused_embedding_sync and job.replicas > 1
    # First and last stage share a node only if the whole job does, or the pipeline does with --use-tp-pp-dp-mapping.
    together = job.gpus <= per_node or (job.pipeline_before_data and per_node % (job.tp * job.pp) == 0)
    pairs = per_node // job.pp if together and job.pipeline_before_data else job.senders(per_node)
    group = Group(2, 2 if together else 1, max(1, pairs))
    if fused and job.distributed_optimizer:
        values /= job.replicas
    elif fused:
        replicas = Group.strided(job.replicas, job.replica_stride, per_node)
        group = Group(2 * job.replicas, replicas.per_node * (2 if together else 1), replicas.rings)
    form = config.format_of(EMBEDDING)
    if form == "dense":
        nbytes = job.gradient_bytes * values
        return Sent(nbytes=_ring(nbytes, group.ranks, twice=True), transfer=all_reduce(cluster, group, nbytes))
    there, back = _sum_in_levels(cluster, job, config, group, values, form)
    return Sent(nbytes=there.nbytes + back.nbytes, transfer=there.transfer + back.transfer)


def parameter_gather(cluster: Cluster, job: Job, config: OptimusConfig) -> Sent:
    """Return the distributed optimizer's all-gather of the first stage's parameters, as if nothing hid it."""
    per_node, own = cluster.gpus_per_node, job.parameters_on(0) + job.embeddings_on(0)
    parts = (
        (Group.strided(job.replicas, job.replica_stride, per_node), own),
        (Group.strided(job.expert_replicas, job.expert_stride, per_node), job.routed_on(0)),
    )
    found = [_gather(cluster, job, config, group, parameters) for group, parameters in parts if parameters]
    return Sent(nbytes=sum(each.nbytes for each in found), transfer=sum(each.transfer for each in found))


def _gather(cluster: Cluster, job: Job, config: OptimusConfig, group: Group, parameters: int) -> Sent:
    form, width, ranks = config.format_of(PARAM_GATHER), job.value_bytes, group.ranks
    inside = config.is_dense_inside(PARAM_GATHER) and group.nodes == 1
    if form == "dense" or inside or ranks == 1:
        nbytes, coding = float(width * parameters), 0.0
    else:
        gpu, nbytes, shard = cluster.gpu, _coded_bytes(parameters, form), parameters / ranks
        # A rank keeps its own shard, computes its change, and restores it; then it decodes all messages and adds them
        # to the parameters.
        coding = _kernel(gpu, 7 * width * shard + nbytes / ranks) + _kernel(gpu, nbytes + 5 * width * parameters)
    transfer = reduce_scatter(cluster, group, nbytes) + coding * cluster.coding_scale
    return Sent(nbytes=_ring(nbytes, ranks, twice=False), transfer=transfer)


def memory(job: Job, config: OptimusConfig = DENSE) -> dict[str, float]:
    """Return the bytes that a rank of the first stage, which needs most, uses for each purpose."""
    own, routed = job.parameters_on(0) + job.embeddings_on(0), job.routed_on(0)
    parameters, shards = own + routed, own / job.replicas + routed / job.expert_replicas
    width, ours = 4 if config.compression_state_dtype == "fp32" else 2, 0.0
    gradients, messages, gathered = map(config.format_of, (DP_GRADIENTS, PIPELINE_BACKWARD, PARAM_GATHER))
    if gradients == "low-rank":
        small, covered = low_rank_values(job, config)
        ours += width * ((covered if config.dp_error_feedback else 0) + small)
    elif block_format(gradients):
        # Memory holds buffers for the messages of gradients in both phases; the sums reuse the first ones.
        ours += 2 * format_named(gradients).bits_per_value / 8 * (job.parameters_on(0) + routed)
    if block_format(messages) and config.lazy_error_propagation:
        ours += job.value_bytes * job.vpp * job.message_rows * job.model.hidden
    if config.backprop_remembers:
        residual = job.message_rows if config.lazy_error_propagation else 0
        ours += width * job.vpp * (residual + config.compressed_backprop_rank) * job.model.hidden
    if block_format(gathered):
        # The gather keeps messages of all shards, this rank's shard before the step, and the change of one shard.
        ours += format_named(gathered).bits_per_value / 8 * parameters + 2 * job.value_bytes * shards
    return {
        "weights": 2.0 * parameters,
        "gradients": float(job.gradient_bytes * parameters),
        # The optimizer keeps master weights and Adam's two moments in fp32: 12 bytes for each parameter.
        "optimizer": 12.0 * (shards if job.distributed_optimizer else parameters),
        "activations": activation_bytes(job),
        "compression": ours,
        "context": CONTEXT,
    }


def activation_bytes(job: Job) -> float:
    """Return a rank's bytes of activations, after Korthikanti et al. 2022, table 2: s b h (10 + 24 / t + 5 a s / (h t))
    per layer.

    With sequence parallelism all terms are divided by t; the last term is absent if scores are not kept; with full
    recomputation only the layer's input is kept.
    """
    model, t = job.model, job.tp
    tokens = job.rows * model.hidden
    scores = 5 * model.heads * model.sequence * job.rows / t
    attention = sum(each.outputs for each in model.attention[:-1]) + model.attention[-1].inputs
    gated = 2 + model.gated
    # Bytes per token that tensor parallelism splits: Q, K, V and their product, and both sides of the activation
    # function, in 2 bytes each. A routed expert also keeps the copies of its tokens.
    split = 2 * (attention + gated * model.inner * model.dense_layers / model.layers) * job.rows / t
    if mixture := model.mixture:
        routed = job.expert_rows * (model.hidden * job.etp + gated * mixture.ffn)
        split += 2 * (routed + gated * mixture.shared * job.rows / t) * mixture.layers / model.layers
    whole = 10 * tokens / (t if job.sequence_parallel else 1)
    if job.precision == "fp8":
        whole -= 7 * tokens / t  # in FP8 four GEMMs keep their inputs, 14 of the 34 bytes, in one byte per value
    layer = whole + split + (0 if job.flash or job.recompute == "sel" else scores)
    layers = job.layers_per_stage
    # 1F1B (one forward, one backward) keeps the activations of `pp` micro-batches; the interleaved schedule keeps 1 +
    # (pp - 1) / (pp vpp) times as many.
    kept = min(job.pp * (1 + (job.pp - 1) / (job.pp * job.vpp) if job.vpp > 1 else 1), job.micro_batches)
    head = 6.0 * job.rows * model.vocabulary / t if job.pp == 1 else 0.0
    if job.recompute == "full":
        return kept * layers * 2 * tokens / (t if job.sequence_parallel else 1) + layer + head
    return kept * layers * layer + head


def check_memory(cluster: Cluster, job: Job, config: OptimusConfig = DENSE) -> float:
    """Return the bytes of GPU memory that a rank of the first stage uses, and check that they fit.

    Raises:
        PlanError: the bytes exceed the GPU's memory; the message says by how much.
    """
    needs = memory(job, config)
    used = sum(needs.values())
    if used > cluster.gpu.memory:
        most = max(needs, key=lambda name: needs[name])
        raise PlanError(
            f"it does not fit: a rank needs {used / 1e9:.1f} GB, {(used - cluster.gpu.memory) / 1e9:.1f} GB more than "
            f"the {cluster.gpu.name} has ({needs[most] / 1e9:.1f} GB of it {most}). More tensor or pipeline ranks, a "
            "smaller micro-batch, --recompute-granularity full or --use-distributed-optimizer need less"
        )
    return used
