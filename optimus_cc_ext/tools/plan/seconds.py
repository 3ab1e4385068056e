"""Seconds of computation on a GPU, and of transfers on its links.

Computation: the time of a GEMM follows from the tiles that fill the GPU's processors, all other time from the bytes
moved. Operations and bytes are counted after Narayanan et al. 2021 (arXiv 2104.04473, appendix) and Korthikanti et al.
2022 (arXiv 2205.05198, section 4); the waves of a GEMM after NVIDIA's "Matrix Multiplication Background" guide.

Transfers: NCCL's latency model, the share of the line rate that large rings reach, and one queue per node and
direction. Latencies are those of NCCL's tuning.cc (`ncclTopoTuneModel`), shares of the line rate those of SimAI's
`nic_ratio` table (aliyun/SimAI, astra-sim-alibabacloud), measured with RDMA.
"""

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from optimus_cc_ext.tools.plan.hardware import Cluster, Gpu
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import Matrix

TILES = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.7))
"""Rows, columns and relative speed of cuBLAS's tiles; assumed, after figures of NVIDIA's guide."""

OPTIMIZER_BYTES = 48
"""Bytes moved per parameter and step. Adam reads weights, both moments and the gradient, and writes the first three and
16-bit weights (30); unscaling and copying gradients, their norm and clipping take 18.
"""


@dataclass(frozen=True)
class Seconds:
    """Seconds of one micro-batch."""

    forward: float
    backward: float
    """Seconds of the backward pass, recomputation included."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.forward * factor, self.backward * factor)


@lru_cache(maxsize=65536)
def gemm(gpu: Gpu, m: int, n: int, k: int, count: int = 1, fp8: bool = False) -> float:
    """Return the seconds of `count` products of (m, k) and (k, n) in one launch: the longer of their whole waves of
    tiles and the transfer of their bytes.
    """
    waves = min(
        ceil(ceil(m / rows) * ceil(n / columns) * count / gpu.processors) * rows * columns / speed
        for rows, columns, speed in TILES
    )
    peak = gpu.fp8 if fp8 else gpu.bf16
    operations = 2.0 * waves * gpu.processors * k / (peak * gpu.gemm_efficiency)
    value = 1 if fp8 else 2
    return max(operations, moved(gpu, count * (value * (m + n) * k + 2 * m * n)))


def moved(gpu: Gpu, nbytes: float) -> float:
    """Return the seconds in which `nbytes` bytes are read or written."""
    return nbytes / (gpu.memory_rate * gpu.memory_efficiency)


def _linear(gpu: Gpu, rows: int, inputs: int, outputs: int, fp8: bool, count: int = 1) -> Seconds:
    """Return the seconds of the forward pass of `count` linear layers in one launch, and of the gradients of their
    inputs and weights.
    """
    forward = gemm(gpu, rows, outputs, inputs, count, fp8)
    backward = gemm(gpu, rows, inputs, outputs, count, fp8) + gemm(gpu, inputs, outputs, rows, count, fp8)
    return Seconds(forward, backward)


def attention(gpu: Gpu, job: Job) -> Seconds:
    """Return the seconds of scores, softmax, dropout and their product with the values, for this rank's heads and its
    part of the sequence.
    """
    model = job.model
    heads, s, width = job.micro_batch * model.heads // job.tp, model.sequence, model.head_width
    rows = s // job.cp
    value = model.latent.value if model.latent else width
    if job.flash:
        # Causality halves the attention scores; the backward pass computes five products for two. Fused kernels reach
        # about two thirds of a GEMM's speed (FlashAttention-2, arXiv 2307.08691, figures 4 to 6: 50 to 73 % of the
        # peak).
        once = 0.5 * 2 * heads * rows * s * (width + value) / (gpu.bf16 * gpu.gemm_efficiency * 2 / 3)
        return Seconds(once, 2.5 * once)
    scores, product = gemm(gpu, rows, s, width, heads), gemm(gpu, rows, value, s, heads)
    values = heads * rows * s
    # Bytes per attention score: forward, softmax takes 4 and dropout 5, with its mask; backward, dropout 5 and softmax
    # 6.
    return Seconds(
        scores + product + moved(gpu, (4 + 5) * values), 2 * (scores + product) + moved(gpu, (5 + 6) * values)
    )


@dataclass(frozen=True)
class _LayerPart:
    """Seconds of the GEMMs of a part of a layer, and the bytes that other kernels move beside them."""

    linear: Seconds
    forward: float
    backward: float

    def __add__(self, other: "_LayerPart") -> "_LayerPart":
        return _LayerPart(self.linear + other.linear, self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, share: float) -> "_LayerPart":
        return _LayerPart(self.linear * share, self.forward * share, self.backward * share)


_NO_LAYER_PART = _LayerPart(Seconds(0.0, 0.0), 0.0, 0.0)


def _mlp(gpu: Gpu, job: Job, matrices: tuple[Matrix, ...], rows: int, ranks: int, count: int = 1) -> _LayerPart:
    """Return the costs of `count` MLPs, each on `rows` rows, split over `ranks` tensor-parallel ranks."""
    if not matrices:
        return _NO_LAYER_PART
    fp8, ((hidden, up), (inner, _)) = job.precision == "fp8", (each.on_rank(ranks) for each in matrices)
    linear = _linear(gpu, rows, hidden, up, fp8, count) + _linear(gpu, rows, inner, hidden, fp8, count)
    # The activation function works on the rank's share. FP8 reads each GEMM's input and output gradient in 16 bits and
    # writes it in 8 bits, twice.
    forward, backward = 2 * (up + inner), 2 * (2 * up + inner)
    if fp8:
        forward, backward = forward + 4 * (hidden + inner), backward + 4 * (hidden + up)
    return _LayerPart(linear, float(forward * rows * count), float(backward * rows * count))


def _mixture(gpu: Gpu, job: Job) -> _LayerPart:
    """Return the costs of a layer's mixture: router, permutation, routed experts and shared ones."""
    model, mixture = job.model, job.model.mixture
    if mixture is None:
        return _NO_LAYER_PART
    (router, *routed), own = model.routed_experts, mixture.experts // job.ep
    arrived = job.routed_rows * job.etp
    tokens = job.rows // job.tp
    scores = _linear(gpu, tokens, router.inputs, router.outputs, False)
    # Tokens are permuted before they are sent and after they have arrived, and put back in both places on the way back:
    # each time read and written. The router's scores are in fp32.
    permuted = 4 * 4 * arrived * model.hidden + 24 * tokens * mixture.experts
    experts = _mlp(gpu, job, tuple(routed), max(1, ceil(arrived / own)), job.etp, own)
    shared = _mlp(gpu, job, model.shared_experts, job.rows, job.tp)
    return (_LayerPart(scores, float(permuted), float(permuted)) + experts) * (1 / gpu.mixture_efficiency) + shared


def shared_experts(gpu: Gpu, job: Job) -> Seconds:
    """Return the seconds of the GEMMs of a layer's shared experts."""
    return _mlp(gpu, job, job.model.shared_experts, job.rows, job.tp).linear


@lru_cache(maxsize=4096)
def layer(gpu: Gpu, job: Job) -> Seconds:
    """Return the mean seconds of one transformer layer on one rank, without its transfers."""
    model, tp, rows, fp8 = job.model, job.tp, job.rows, job.precision == "fp8"
    linear = Seconds(0.0, 0.0)
    for matrix in model.attention:
        linear += _linear(gpu, rows, *matrix.on_rank(tp), fp8)
    split = tp if job.sequence_parallel else 1
    # Norms, and dropout with the residual connection, work on the whole hidden state.
    forward: float = 2 * (4 + 7) * rows * model.hidden / split
    backward: float = 2 * (8 + 5) * rows * model.hidden / split
    produced = sum(matrix.outputs for matrix in model.attention[:-1])
    if not job.flash:
        # Unfused attention transposes Q, K, V and its result.
        forward += 4 * (produced + model.hidden) * rows / tp
        backward += 4 * (produced + model.hidden) * rows / tp
    if fp8:
        forward += 4 * rows * (model.hidden + model.attention[-1].inputs / tp)
        backward += 4 * rows * (model.hidden + produced / tp)
    # Each micro-batch's gradient is added to the buffer, which is read and written. A separate kernel reads the
    # gradient once more; one that casts it before (DeepSpeed's BF16_Optimizer, `update_hp_grads`) also writes and reads
    # the copy.
    besides = {"fused": 0, "added": 2, "cast": 2 + 2 * job.gradient_bytes}[job.accumulation]
    routed = model.routed_parameters / model.layers / (job.ep * job.etp)
    backward += (2 * job.gradient_bytes + besides) * (model.layer_parameters / tp + routed)
    dense = _mlp(gpu, job, model.mlp, rows, tp) * (model.dense_layers / model.layers)
    mixture = _mixture(gpu, job) * (1 - model.dense_layers / model.layers)
    mlp = dense + mixture
    around = Seconds(
        moved(gpu, forward + mlp.forward) + gpu.layer_overhead,
        moved(gpu, backward + mlp.backward) + 2 * gpu.layer_overhead,
    )
    scores = attention(gpu, job)
    total = linear + mlp.linear + scores + around
    again = job.share_again * total.forward
    if job.recompute == "sel" and not job.flash:
        again = scores.forward
    if job.recomputed:
        shared = shared_experts(gpu, job).forward * (1 - model.dense_layers / model.layers)
        up = [each for each in model.attention[:-1] if each.split != "none"] if model.latent else []
        modules = {
            "core_attn": scores.forward,
            "mla_up_proj": sum(_linear(gpu, rows, *each.on_rank(tp), fp8).forward for each in up),
            "mlp": dense.linear.forward + moved(gpu, dense.forward),
            "moe": mixture.linear.forward + moved(gpu, mixture.forward),
            "shared_experts": shared,
            "layernorm": moved(gpu, 2 * 4 * rows * model.hidden / split),
            "moe_act": moved(gpu, 2 * (2 + model.gated) * job.routed_rows * model.mixture.ffn)
            if model.mixture
            else 0.0,
        }
        again = sum(modules.get(each, 0.0) for each in job.recomputed)
    return Seconds(total.forward, total.backward + again)


@lru_cache(maxsize=4096)
def head(gpu: Gpu, job: Job) -> Seconds:
    """Return the seconds of logits and loss on the last stage. Cross entropy in fp32 moves about 24 bytes per logit
    forward and 10 backward.
    """
    share = job.model.vocabulary // job.tp
    logits = _linear(gpu, job.rows, job.model.hidden, share, False)
    return logits + Seconds(moved(gpu, 24 * job.rows * share), moved(gpu, 10 * job.rows * share))


_NODES = (2, 4, 8, 16, 32, 64, 128)
RING_SHARE = {
    16 * 2**20: (0.32, 0.24, 0.13, 0.05, 0.044, 0.021, 0.009),
    128 * 2**20: (0.67, 0.67, 0.54, 0.38, 0.21, 0.11, 0.05),
    2**30: (0.92, 0.93, 0.90, 0.76, 0.74, 0.56, 0.31),
    8 * 2**30: (0.95, 0.96, 0.96, 0.96, 0.95, 0.91, 0.76),
}
"""Share of the line rate that a ring reaches at `_NODES` nodes, by the bytes of the message of a node."""

_BASE, _NVLINK_HOP = {"LL": 6.6e-6, "LL128": 14e-6, "Simple": 8.4e-6}, {"LL": 0.6e-6, "LL128": 1.9e-6, "Simple": 3.4e-6}
_HOP = {"LL": 2.7 / 14, "LL128": 4 / 14, "Simple": 1.0}
"""Share of `Network.hop` by protocol: tuning.cc has 2.7, 4 and 14 us for the hop of a ring."""

_RATE = {"LL": 0.4, "LL128": 0.92, "Simple": 1.0}
_TREE_RATE = 0.85
"""Bandwidth of a tree relative to a ring, between nodes; assumed."""


@dataclass(frozen=True)
class Group:
    """Ranks that reduce together, with the number of equal groups that share their nodes."""

    ranks: int
    per_node: int
    """Number of ranks of the group on one node."""

    rings: int
    """Number of equal groups that share a node and reduce at the same time."""

    @property
    def nodes(self) -> int:
        """The number of nodes that the group spans."""
        return -(-self.ranks // self.per_node)

    @staticmethod
    def strided(ranks: int, stride: int, gpus_per_node: int) -> "Group":
        """Return a group of `ranks` ranks, every `stride`-th one; each rank of a node belongs to one group of this
        kind.
        """
        per_node = max(1, min(ranks, gpus_per_node // stride))
        return Group(ranks, per_node, max(1, min(stride, gpus_per_node // per_node)))


def _interpolated(places: tuple[int, ...], values: tuple[float, ...], place: float) -> float:
    """Return the value at `place`, interpolated linearly in the logarithm of the place, and constant outside of
    `places`.
    """
    if place <= places[0]:
        return values[0]
    if place >= places[-1]:
        return values[-1]
    i = bisect(places, place)
    share = log2(place / places[i - 1]) / log2(places[i] / places[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


@lru_cache(maxsize=65536)
def _share(node_bytes: float, nodes: int) -> float:
    """Return the share of the line rate that large rings keep, relative to two nodes and the largest message."""
    by_size = tuple(_interpolated(_NODES, shares, nodes) for shares in RING_SHARE.values())
    return _interpolated(tuple(RING_SHARE), by_size, node_bytes) / RING_SHARE[8 * 2**30][0]


@lru_cache(maxsize=65536)
def reduce_scatter(cluster: Cluster, group: Group, nbytes: float) -> float:
    """Return the seconds of a reduce-scatter of `nbytes` on every rank; an all-gather takes as long. The rings of a
    node share its line.
    """
    n, rate, crossings = group.ranks, cluster.gpu.nvlink, group.nodes if group.nodes > 1 else 0
    if n == 1 or not nbytes:
        return 0.0
    if crossings:
        share = _share(nbytes * group.rings, crossings) if cluster.network.rdma else 1.0
        rate = min(rate, cluster.network.node_rate * share / group.rings)

    def seconds(protocol: str) -> float:
        inside, outside = (n - 1 - crossings) * _NVLINK_HOP[protocol], crossings * cluster.network.hop * _HOP[protocol]
        return _BASE[protocol] + inside + outside + nbytes * (n - 1) / n / (rate * _RATE[protocol])

    return min(map(seconds, _BASE))


def all_reduce(cluster: Cluster, group: Group, nbytes: float) -> float:
    """Return the seconds of the faster all-reduce: a ring, which moves everything twice, or a double tree, which needs
    few steps.
    """
    if group.ranks == 1 or not nbytes:
        return 0.0
    ring = 2 * reduce_scatter(cluster, group, nbytes) - min(_BASE.values())
    if group.nodes == 1:
        return ring
    rate = min(cluster.gpu.nvlink, cluster.network.node_rate / group.rings) * _TREE_RATE
    steps = 2 * ((group.per_node - 1) * _NVLINK_HOP["Simple"] + log2(group.nodes) * cluster.network.hop)
    return min(ring, _BASE["Simple"] + steps + 2 * nbytes / rate)


def all_to_all(cluster: Cluster, group: Group, nbytes: float) -> float:
    """Return the seconds of an all-to-all, which sends each part of a rank's `nbytes` to the rank that sums it. More
    bytes leave the node than in a ring, because nothing is summed on the way.
    """
    n, nodes = group.ranks, group.nodes
    if n == 1 or not nbytes:
        return 0.0
    inside = nbytes * (group.per_node - 1) / n / cluster.gpu.nvlink
    outside = nbytes * (n - group.per_node) / n * group.per_node * group.rings
    outside /= cluster.network.node_rate * cluster.network.all_to_all_share
    return _BASE["Simple"] + (cluster.network.hop if nodes > 1 else _NVLINK_HOP["Simple"]) + max(inside, outside)


def send(cluster: Cluster, nbytes: float, senders: int, crosses: bool) -> float:
    """Return the seconds of one rank's message to the next stage, while all `senders` ranks of its node send theirs."""
    if not nbytes:
        return 0.0
    if not crosses:
        return _NVLINK_HOP["Simple"] + nbytes / cluster.gpu.nvlink
    return cluster.network.hop + nbytes * senders / (cluster.network.node_rate * cluster.network.exchange_share)
