"""Seconds of transfers: NCCL's latency model, what of a line large rings reach, one queue per node and direction.

Latencies: NCCL's tuning.cc (`ncclTopoTuneModel`). Shares of the line: SimAI's `nic_ratio` table
(aliyun/SimAI, astra-sim-alibabacloud), measured with RDMA.
"""

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache
from math import log2

from optimus_cc_ext.plan.hardware import Cluster

__all__ = ["RING_SHARE", "Group", "all_reduce", "all_to_all", "reduce_scatter", "send"]

_NODES = (2, 4, 8, 16, 32, 64, 128)
RING_SHARE = {
    16 * 2**20: (0.32, 0.24, 0.13, 0.05, 0.044, 0.021, 0.009),
    128 * 2**20: (0.67, 0.67, 0.54, 0.38, 0.21, 0.11, 0.05),
    2**30: (0.92, 0.93, 0.90, 0.76, 0.74, 0.56, 0.31),
    8 * 2**30: (0.95, 0.96, 0.96, 0.96, 0.95, 0.91, 0.76),
}
"""Message of a node in bytes to the share of the line at `_NODES` nodes."""

_BASE, _NVLINK_HOP = {"LL": 6.6e-6, "LL128": 14e-6, "Simple": 8.4e-6}, {"LL": 0.6e-6, "LL128": 1.9e-6, "Simple": 3.4e-6}
_HOP = {"LL": 2.7 / 14, "LL128": 4 / 14, "Simple": 1.0}
"""Of `Network.hop`: tuning.cc has 2.7, 4 and 14 us for a ring's."""

_RATE = {"LL": 0.4, "LL128": 0.92, "Simple": 1.0}
_TREE_RATE = 0.85
"""Of a ring's bandwidth, between nodes; assumed."""


@dataclass(frozen=True)
class Group:
    """Ranks that reduce together, among others of their node that do the same at the same time."""

    ranks: int
    per_node: int
    """Of its ranks, those on one node."""

    rings: int
    """Such groups that share a node."""

    @property
    def nodes(self) -> int:
        """How many it spans."""
        return -(-self.ranks // self.per_node)

    @staticmethod
    def strided(ranks: int, stride: int, gpus_per_node: int) -> "Group":
        """Every `stride`-th rank, `ranks` of them: of a node's ranks each is in one such group."""
        per_node = max(1, min(ranks, gpus_per_node // stride))
        return Group(ranks, per_node, max(1, min(stride, gpus_per_node // per_node)))


def _interpolated(places: tuple[int, ...], values: tuple[float, ...], place: float) -> float:
    """Linear in the logarithm of the place, and constant outside."""
    if place <= places[0]:
        return values[0]
    if place >= places[-1]:
        return values[-1]
    i = bisect(places, place)
    share = log2(place / places[i - 1]) / log2(places[i] / places[i - 1])
    return values[i - 1] + share * (values[i] - values[i - 1])


@lru_cache(maxsize=65536)
def _share(node_bytes: float, nodes: int) -> float:
    """Of the line rate that large rings keep, relative to two nodes and the largest message."""
    by_size = tuple(_interpolated(_NODES, shares, nodes) for shares in RING_SHARE.values())
    return _interpolated(tuple(RING_SHARE), by_size, node_bytes) / RING_SHARE[8 * 2**30][0]


@lru_cache(maxsize=65536)
def reduce_scatter(cluster: Cluster, group: Group, nbytes: float) -> float:
    """Of `nbytes` on every rank; an all-gather to as many takes as long. Rings of a node's groups share its line."""
    n, rate, crossings = group.ranks, cluster.gpu.nvlink, group.nodes if group.nodes > 1 else 0
    if n == 1 or not nbytes:
        return 0.0
    if crossings:
        share = _share(nbytes * group.rings, crossings) if cluster.network.sums_in_table else 1.0
        rate = min(rate, cluster.network.node_rate * share / group.rings)

    def seconds(protocol: str) -> float:
        inside, outside = (n - 1 - crossings) * _NVLINK_HOP[protocol], crossings * cluster.network.hop * _HOP[protocol]
        return _BASE[protocol] + inside + outside + nbytes * (n - 1) / n / (rate * _RATE[protocol])

    return min(map(seconds, _BASE))


def all_reduce(cluster: Cluster, group: Group, nbytes: float) -> float:
    """The faster of a ring, which moves everything twice, and a double tree, which needs few steps."""
    if group.ranks == 1 or not nbytes:
        return 0.0
    ring = 2 * reduce_scatter(cluster, group, nbytes) - min(_BASE.values())
    if group.nodes == 1:
        return ring
    rate = min(cluster.gpu.nvlink, cluster.network.node_rate / group.rings) * _TREE_RATE
    steps = 2 * ((group.per_node - 1) * _NVLINK_HOP["Simple"] + log2(group.nodes) * cluster.network.hop)
    return min(ring, _BASE["Simple"] + steps + 2 * nbytes / rate)


def all_to_all(cluster: Cluster, group: Group, nbytes: float) -> float:
    """Each of a rank's `nbytes` goes to the one that sums it: no sums on the way, so what leaves the node is more."""
    n, nodes = group.ranks, group.nodes
    if n == 1 or not nbytes:
        return 0.0
    inside = nbytes * (group.per_node - 1) / n / cluster.gpu.nvlink
    outside = nbytes * (n - group.per_node) / n * group.per_node * group.rings / cluster.network.node_rate
    return _BASE["Simple"] + (cluster.network.hop if nodes > 1 else _NVLINK_HOP["Simple"]) + max(inside, outside)


def send(cluster: Cluster, nbytes: float, senders: int, crosses: bool) -> float:
    """One rank's message to the next stage, while all `senders` of its node send theirs."""
    if not nbytes:
        return 0.0
    if not crosses:
        return _NVLINK_HOP["Simple"] + nbytes / cluster.gpu.nvlink
    return cluster.network.hop + nbytes * senders / (cluster.network.node_rate * cluster.network.exchange_share)
