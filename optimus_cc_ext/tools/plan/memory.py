"""Memory of a rank in a plan, and what the bound of its message buffers costs.

Message buffers are counted by the rules of the runtime (`slots`), in closed forms like the bytes of a plan: they count
values where the runtime's plans count blocks and vectors one by one, and a test compares both.
"""

import math
from collections.abc import Collection
from typing import NamedTuple

from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS
from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.formats import (
    BLOCK,
    DENSE_ROWS,
    ROWS,
    RUN_BYTES,
    block_format,
    format_named,
    section_bytes,
)
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.classes import TrafficClass, classes_among
from optimus_cc_ext.slots import GRAIN, SLOTS, Exchanged, check_slot, slices, slot_bytes, slots_bytes
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, all_to_all, reduce_scatter
from optimus_cc_ext.tools.plan.sums import LAUNCH, coded_bytes
from optimus_cc_ext.tools.plan.traffic import DENSE, matrices

CONTEXT = Constant(3e9, "assumed", "CUDA's context, NCCL's buffers, fragments")

MEMORY_ERROR = Constant(0.1, "assumed", "two layouts of 16 H800s that ran (Pai-Megatron-Patch 643): 4 and 5 % too high")
"""Relative error of the bytes that a rank is estimated to need."""

SLICES_COST = 0.05
"""Largest share of an iteration that slices may cost without a line about it."""


class _Exchanged(NamedTuple):
    """Exchange of the gradients of a bucket, or gather of its parameters, in blocks."""

    kind: TrafficClass
    """The class whose exchanges are never under way at the same time as those of another kind."""

    group: Group
    nbytes: list[int]
    """Bytes of the messages of all ranks in one direction, by slice."""

    together: bool
    beside: float
    """Bytes of messages that wait for this exchange, and of its sum."""

    before: float = 0.0
    """Bytes of the old values of a slice."""

    inside: int = 0
    """Bytes in which gradients of 16 bits are added up inside a node, in fp32."""

    tables: float = 0.0
    """Bytes of the kernels' tables, without those that it shares with another exchange."""

    @property
    def slices(self) -> list[int]:
        """Bytes of memory for each slice: of gradients in both directions."""
        return self.nbytes if self.kind is classes.PARAM_GATHER else [2 * each for each in self.nbytes]


def _message_buffers(job: Job, config: OptimusConfig, per_node: int) -> float:
    """Return the bytes of slots on a rank of the first stage, of its unsent messages, of a slice's old values, and of
    the kernels' tables.
    """
    found = _exchanges(job, config, per_node)
    kinds = dict[TrafficClass, list[Exchanged]]()
    for each in found:
        kinds.setdefault(each.kind, []).append(Exchanged(each.slices, each.together))
    beside = sum(each.beside + each.tables for each in found)
    shared = sum(max((getattr(each, name) for each in found), default=0) for name in ("before", "inside"))
    if config.format_of(classes.DP_GRADIENTS) == "low-rank":
        # Vectors are sent with P.
        other = job.parameters_on(0) + (0 if job.ep > 1 else job.routed_on(0))
        beside += job.gradient_bytes * (
            other + sum(count * (r * (n + m) - n * m) for n, m, r, count in _low_rank(job, config))
        )
    return slots_bytes(kinds.values()) + beside + shared


def _low_rank(job: Job, config: OptimusConfig) -> list[tuple[int, int, int, float]]:
    """Return the matrices of the first stage that low rank shrinks, like `matrices`, with the position embedding."""
    n, m = job.model.positions, job.model.hidden
    r = min(config.dp_compression_rank, n, m)
    return matrices(job, config) + [(n, m, r, 1.0)] * (r * (n + m) < n * m)


def slicing(cluster: Cluster, job: Job, config: OptimusConfig) -> float:
    """Return the seconds that an iteration takes longer because exchanges of the first stage are cut into slices, as if
    nothing hid them: the latency of each slice, its two kernels, and the lower rate of smaller messages.
    """
    seconds = 0.0
    for each in _exchanges(job, config, cluster.gpus_per_node):
        travel = reduce_scatter if each.kind is classes.PARAM_GATHER else all_to_all
        alone = travel(cluster, each.group, float(sum(each.nbytes)))
        kernels = 2 * LAUNCH * (len(each.nbytes) - 1)
        seconds += sum(travel(cluster, each.group, float(nbytes)) for nbytes in each.nbytes) - alone + kernels
    return seconds


def enough_memory(cluster: Cluster, job: Job, config: OptimusConfig, seconds: float) -> int | None:
    """Return the smallest bound in MB, doubled from the given one, with which slices cost at most `SLICES_COST` of
    `seconds`; None if the given one does.

    Raises:
        FlagError: messages of one block to each rank do not fit; the message names the smallest bound that works.
    """
    bound = config.message_memory
    while slicing(cluster, job, config.replace(message_memory=bound)) > SLICES_COST * seconds:
        bound *= 2
    return None if bound == config.message_memory else bound


def _exchanges(job: Job, config: OptimusConfig, per_node: int) -> list[_Exchanged]:
    """Return the exchanges in blocks, and the gathers, of a rank of the first stage."""
    sharded, embedding = job.distributed_optimizer, job.embeddings_on(0)
    in_fp32 = job.sums_in_fp32 and sharded
    limit = slot_bytes(config.message_memory, SLOTS + in_fp32)  # sums in fp32 take the memory of one slot
    tied = embedding if job.shares_embedding and job.pp > 1 else 0
    fused, routed = config.is_on(classes.EMBEDDING) and tied > 0, job.routed_on(0)
    other = job.parameters_on(0) + (0 if job.ep > 1 else routed)
    routers = round(sum(math.prod(m.on_rank(job.tp)) * m.layers for m in job.model.matrices if m.router) / job.pp)
    found, gathered = list[_Exchanged](), config.format_of(classes.PARAM_GATHER)
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
        # Routers are sent dense. Messages are padded to the longest one: that of a shard with the routers of as many
        # layers as it can touch, and for the other values that of a shard without routers.
        layers = job.layers_per_stage * values / group.ranks / beside_embedding if beside_embedding else 0.0
        plain = routers * math.ceil(layers) / job.layers_per_stage
        within = routers * layers / job.layers_per_stage
        coded = values / group.ranks - (0.0 if (values - beside_embedding) * group.ranks > values else within)
        form, shard, owners = config.format_of(of), values * job.instances / group.ranks, group.ranks // job.instances
        if not dense(form, of, group):
            two = config.dp_compression_levels != "one" and group.nodes > 1
            members = owners if job.instances > 1 else group.per_node if two else 1
            rail = Group(group.ranks // members, 1, members * group.rings) if members > 1 else group
            alone = of is classes.EMBEDDING and not sharded
            nbytes = _sliced(form, coded, plain, job.gradient_bytes, rail.ranks, limit)
            value = members * job.gradient_bytes + 4
            inside = min(math.ceil(values / group.ranks), limit // value) * value
            found.append(
                _Exchanged(
                    of if alone else classes.DP_GRADIENTS, rail, nbytes, job.overlap_grad_reduce and not alone,
                    2 * coded_bytes(shard, form) if of is classes.EMBEDDING and sharded else 0.0,
                    inside=inside if in_fp32 and members > 1 and job.gradient_bytes < 4 else 0,
                    tables=_tables(rail.ranks, coded, plain),
                )
            )  # fmt: skip
        if sharded and not dense(gathered, classes.PARAM_GATHER, group):
            width = job.value_bytes
            if gathered == formats.EXACT:
                nbytes = [min(width * values, limit)] * math.ceil(width * values / limit)
                beside, tables = formats.EXACT_KEPT_BITS / 8 * shard, 0.0
            else:
                nbytes = _sliced(gathered, job.instances * coded, job.instances * plain, width, owners, limit)
                beside = sum(nbytes) / owners
                shapes = (classes.DP_GRADIENTS, group, len(nbytes))
                alike = bool(found) and (found[-1].kind, found[-1].group, len(found[-1].nbytes)) == shapes
                tables = 0.0 if alike else _tables(owners, job.instances * coded, job.instances * plain)
            of_owners = Group.strided(owners, job.replica_stride if group is replicas else job.expert_stride, per_node)
            found.append(
                _Exchanged(
                    classes.PARAM_GATHER, of_owners, nbytes, job.overlap_param_gather, beside,
                    width * shard / len(nbytes), tables=tables,
                )
            )  # fmt: skip
    return found


def _tables(messages: int, coded: float, plain: float) -> float:
    """Return the bytes of the kernels' tables for messages of so many encoded and dense values."""
    return RUN_BYTES * messages * (coded / ROWS + plain / DENSE_ROWS) / BLOCK


def _sliced(form: str, coded: float, plain: float, width: int, ranks: int, limit: int) -> list[int]:
    """Return the bytes of the messages of all ranks in one direction, by slice: `coded` values of each message are
    encoded, and `plain` ones are sent in `width` bytes.
    """

    def nbytes(blocks: int, values: int) -> int:
        return ranks * section_bytes(blocks, values, format_named(form).code_bytes, width)[2]

    blocks, values = math.ceil(coded / BLOCK), math.ceil(plain)
    if 2 * nbytes(blocks, values) <= limit:
        return [nbytes(blocks, values)]
    check_slot(2 * nbytes(1, 1), limit, f"one block to each of {ranks} ranks")
    count, unit = slices(lambda *each: 2 * nbytes(*each), blocks, values, limit, formats.AT_ONCE)
    # Where they can be cut, the longest slice is some blocks longer than the others.
    share = -(-blocks // count), -(-values // count)
    return [nbytes(share[0] + min(unit, GRAIN), share[1]), *[nbytes(*share)] * (count - 1)]


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
            for n, m, r, count in _low_rank(job, config)
        )
    if config.lazy_error_propagation and config.is_on(classes.PIPELINE_BACKWARD):
        copies = 2 * width if config.remembers(classes.PIPELINE_BACKWARD) else job.value_bytes
        state += copies * job.vpp * job.message_rows * job.model.hidden
    rows = max(map(config.format_of, classes_among("experts")), key=_row_bits)
    if block_format(rows):
        # An exchange of tokens needs memory for the message it sends, the one it receives, and the decoded tokens.
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
