"""Bytes and memory of a plan: messages of each class in each format, the seconds of coding, and the memory of a rank.

These closed forms count values where the runtime's plans count blocks and vectors one by one; a test compares both. The
table of formats gives the bits per value of a block format. Coding in blocks costs the memory traffic of a fused
kernel; on an H200 int8 took 1.1 to 1.3 times as long. Low rank costs what was measured on the H200.
"""

import math
from collections.abc import Collection
from functools import lru_cache

from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS
from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.formats import block_format, format_named, section_bytes
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.classes import TrafficClass, classes_among
from optimus_cc_ext.slots import Exchanged, slices, slot_bytes, slots_bytes
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant, Gpu
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, all_reduce, moved, reduce_scatter
from optimus_cc_ext.tools.plan.sums import (
    LAUNCH,
    added,
    bits_of,
    block_sum,
    in_blocks,
    kernel,
    ring_bytes,
    sum_in_levels,
)
from optimus_cc_ext.tools.plan.timeline import Sent

CONTEXT = Constant(3e9, "assumed", "CUDA's context, NCCL's buffers, fragments")

_EXACT_PASSES = Constant(400.0, "assumed", "some 45 operators of torch, of 8 to 10 bytes a value: no kernel of our own")
"""Bytes that a GPU moves for each value that it encodes into exact messages, or decodes."""

MEMORY_ERROR = Constant(0.1, "assumed", "two layouts of 16 H800s that ran (Pai-Megatron-Patch 643): 4 and 5 % too high")
"""Relative error of the bytes that a rank is estimated to need."""

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


def _product(gpu: Gpu, n: int, m: int, r: int, count: int = 1) -> float:
    """Return the seconds of one batched product of low rank, M Q, M^T P or P Q^T, for `count` (n, m) matrices M."""
    return max(2.0 * n * m * r * count / FP32_PRODUCTS, moved(gpu, 4.0 * n * m * count))


def _orthogonalized(r: int) -> float:
    """Return the seconds to orthogonalise P, and Q for the next step."""
    return 2 * r * ORTHOGONALIZE


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
        bits, shard = cluster.exact_bits if form == formats.EXACT else bits_of(form), parameters / ranks
        gpu, nbytes = cluster.gpu, parameters * bits / 8
        # A rank keeps the old values of its shard, slice by slice, computes their change, and restores them; then it
        # decodes all messages and adds them to the parameters.
        coding = kernel(gpu, 7 * width * shard + nbytes / ranks) + kernel(gpu, nbytes + 5 * width * parameters)
        if form == formats.EXACT:
            coding = moved(gpu, _EXACT_PASSES * (shard + parameters))
    transfer = reduce_scatter(cluster, group, nbytes) + coding * cluster.coding_scale
    return Sent(nbytes=ring_bytes(nbytes, ranks, twice=False), transfer=transfer)


def _message_buffers(job: Job, config: OptimusConfig, per_node: int) -> float:
    """Return the bytes of slots on a rank of the first stage, of its unsent messages, and of a slice's old values."""
    sharded, embedding, limit = job.distributed_optimizer, job.embeddings_on(0), slot_bytes(config.message_memory)
    tied = embedding if job.shares_embedding and job.pp > 1 else 0
    fused, routed = config.is_on(classes.EMBEDDING) and tied > 0, job.routed_on(0)
    other = job.parameters_on(0) + (0 if job.ep > 1 else routed)
    routers = round(sum(math.prod(m.on_rank(job.tp)) * m.layers for m in job.model.matrices if m.router) / job.pp)
    found, beside, before = dict[TrafficClass, list[Exchanged]](), 0.0, 0.0
    gathered = config.format_of(classes.PARAM_GATHER)
    replicas = Group.strided(job.replicas, job.replica_stride, per_node)
    experts = Group.strided(job.expert_replicas, job.expert_stride, per_node)

    def dense(form: str, of: TrafficClass, group: Group) -> bool:
        inside = config.is_dense_inside(of) and group.nodes == 1
        return form in ("dense", "low-rank") or group.ranks == 1 or inside

    for values, beside_embedding, group, of in (
        (other + embedding - tied, other, replicas, classes.DP_GRADIENTS),
        (tied, 0, replicas, classes.EMBEDDING if fused else classes.DP_GRADIENTS),
        (routed if job.ep > 1 else 0, 0, experts, classes.DP_GRADIENTS),
    ):
        if not values:
            continue
        # Messages are padded to the longest one, that of a shard without routers, because routers are sent dense.
        plain = routers * values / beside_embedding / group.ranks if beside_embedding else 0.0
        coded = values / group.ranks - (0.0 if (values - beside_embedding) * group.ranks > values else plain)
        form, shard = config.format_of(of), values * job.instances / group.ranks
        if not dense(form, of, group):
            two = config.dp_compression_levels != "one" and group.nodes > 1
            members = group.ranks // job.instances if job.instances > 1 else group.per_node if two else 1
            alone = of is classes.EMBEDDING and not sharded
            nbytes = _sliced(form, coded, plain, job.gradient_bytes, group.ranks // members, limit)
            found.setdefault(of if alone else classes.DP_GRADIENTS, []).append(
                Exchanged([2 * each for each in nbytes], job.overlap_grad_reduce and not alone)
            )
            beside += 2 * shard * bits_of(form) / 8 if of is classes.EMBEDDING and sharded else 0
        if sharded and not dense(gathered, classes.PARAM_GATHER, group):
            owners, width = group.ranks // job.instances, job.value_bytes
            if gathered == formats.EXACT:
                nbytes = [min(width * values, limit)] * math.ceil(width * values / limit)
                beside += formats.EXACT_KEPT_BITS / 8 * shard
            else:
                nbytes = _sliced(gathered, job.instances * coded, job.instances * plain, width, owners, limit)
                beside += sum(nbytes) / owners
            found.setdefault(classes.PARAM_GATHER, []).append(Exchanged(nbytes, job.overlap_param_gather))
            before = max(before, width * shard / len(nbytes))
    if config.format_of(classes.DP_GRADIENTS) == "low-rank":
        beside += 4 * low_rank_values(job, config)[0]
    return slots_bytes(found.values()) + beside + before


def _sliced(form: str, coded: float, plain: float, width: int, ranks: int, limit: int) -> list[int]:
    """Return the bytes of the messages of all ranks in one direction, by slice: `coded` values of each message are
    encoded, and `plain` ones are sent in `width` bytes.
    """

    def nbytes(blocks: int, values: int) -> int:
        return ranks * section_bytes(blocks, values, format_named(form).code_bytes, width)[2]

    blocks, values = math.ceil(coded / formats.BLOCK), math.ceil(plain)
    if 2 * nbytes(blocks, values) <= limit:
        return [nbytes(blocks, values)]
    count, unit = slices(lambda *each: 2 * nbytes(*each), blocks, values, limit, formats.AT_ONCE)
    # Where they can be cut, the longest slice is some half of a unit longer than the others.
    share = -(-blocks // count), -(-values // count)
    return [nbytes(share[0] + unit // 2, share[1]), *[nbytes(*share)] * (count - 1)]


def memory(job: Job, config: OptimusConfig = DENSE, per_node: int = 8) -> dict[str, float]:
    """Return the bytes that a rank of the first stage, which needs most, uses for each purpose.

    Args:
        per_node: GPUs of a node.
    """
    own, routed = job.parameters_on(0) + job.embeddings_on(0), job.routed_on(0)
    parameters, shards = own + routed, job.instances * (own / job.replicas + routed / job.expert_replicas)
    width, state, tokens = 4 if config.compression_state_dtype == "fp32" else 2, 0.0, 0.0
    if config.format_of(classes.DP_GRADIENTS) == "low-rank":
        # Residuals and warm starts are kept twice, so that a step can be repeated.
        state = sum(
            count * (2 * width * (n * bool(config.dp_error_feedback) + r) + 4 * r) * m
            for n, m, r, count in _matrices(job, config)
        )
    if config.lazy_error_propagation and config.is_on(classes.PIPELINE_BACKWARD):
        copies = 2 * width if config.remembers(classes.PIPELINE_BACKWARD) else job.value_bytes
        state += copies * job.vpp * job.message_rows * job.model.hidden
    rows = max(map(config.format_of, classes_among("experts")), key=_row_bits)
    if block_format(rows):
        # An exchange keeps two messages and the decoded tokens.
        tokens = job.routed_rows * job.model.hidden * (2 * _row_bits(rows) / 8 + job.value_bytes)
    return {
        "weights": 2.0 * parameters,
        "gradients": float(job.gradient_bytes * parameters),
        # The optimizer keeps master weights and Adam's two moments in fp32: 12 bytes for each parameter.
        "optimizer": 12.0 * (shards if job.distributed_optimizer else parameters),
        "activations": activation_bytes(job),
        COMPRESSION_STATE: state,
        MESSAGE_BUFFERS: _message_buffers(job, config, per_node),
        "experts' tokens": tokens,
        "context": CONTEXT,
    }


def _row_bits(form: str) -> float:
    return format_named(form).bits_per_value if block_format(form) else 0.0


def activation_bytes(job: Job) -> float:
    """Return a rank's bytes of activations, after Korthikanti et al. 2022, table 2: s b h (10 + 24 / t + 5 a s / (h t))
    per layer.

    With sequence parallelism all terms are divided by t; the last term is absent if scores are not kept; of a layer
    that full recomputation computes once more only the input is kept.
    """
    model, t = job.model, job.tp
    tokens = job.rows * model.hidden
    scores = 5 * model.heads * model.sequence * job.rows / t

    def layer_without(again: Collection[str]) -> float:
        """Return the bytes of a layer if the modules in `again` keep nothing that they compute once more."""
        kept = (each for each in model.attention[:-1] if each.split == "none" or "mla_up_proj" not in again)
        attention = sum(each.outputs for each in kept) + model.attention[-1].inputs
        gated = 2 + model.gated
        # Bytes per token that tensor parallelism splits: Q, K, V and their product, and both sides of the activation
        # function, in 2 bytes each. A routed expert also keeps the copies of its tokens.
        dense = 0 if "mlp" in again else gated * model.inner * model.dense_layers / model.layers
        split = 2 * (attention + dense) * job.rows / t
        if (mixture := model.mixture) and "moe" not in again:
            routed = job.routed_rows * (model.hidden * job.etp + (gated - ("moe_act" in again)) * mixture.ffn)
            shared = 0 if "shared_experts" in again else gated * mixture.shared * job.rows / t
            split += 2 * (routed + shared) * mixture.layers / model.layers
        whole = (6 if "layernorm" in again else 10) * tokens / (t if job.sequence_parallel else 1)
        if job.precision == "fp8":
            whole -= 7 * tokens / t  # in FP8 four GEMMs keep their inputs, 14 of the 34 bytes, in one byte per value
        return whole + split + (0 if job.flash or job.recompute == "sel" else scores)

    layer, computed = layer_without(job.recomputed), layer_without(())
    layers = job.layers_per_stage
    # 1F1B (one forward, one backward) keeps the activations of `pp` micro-batches; the interleaved schedule keeps 1 +
    # (pp - 1) / (pp vpp) times as many.
    kept = min(job.pp * (1 + (job.pp - 1) / (job.pp * job.vpp) if job.vpp > 1 else 1), job.micro_batches)
    head = 6.0 * job.rows * model.vocabulary / t if job.pp == 1 else 0.0
    if again := job.share_again:
        inputs = 2 * tokens / (t if job.sequence_parallel else 1)
        return kept * layers * (again * inputs + (1 - again) * layer) + layer + head
    return kept * layers * layer + computed - layer + head


def check_memory(
    cluster: Cluster, job: Job, config: OptimusConfig = DENSE, error: float = MEMORY_ERROR
) -> float:  # fmt: skip
    """Return the bytes of GPU memory that a rank of the first stage uses, and check that they may fit.

    Raises:
        PlanError: the bytes exceed the GPU's memory by more than the relative `error`; the message says by how much.
    """
    needs = memory(job, config, cluster.gpus_per_node)
    used = cluster.memory_scale * sum(needs.values())
    if used > cluster.gpu.memory * (1 + error):
        most = max(needs, key=lambda name: needs[name])
        raise PlanError(
            f"it does not fit: a rank needs {used / 1e9:.1f} GB, {(used - cluster.gpu.memory) / 1e9:.1f} GB more than "
            f"the {cluster.gpu.name} has ({needs[most] / 1e9:.1f} GB of it {most}). More tensor or pipeline ranks, a "
            "smaller micro-batch, --recompute-granularity full or --use-distributed-optimizer need less"
        )
    return used
