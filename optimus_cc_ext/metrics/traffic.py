"""Bytes by traffic class: what vanilla Megatron would have sent, and what was sent.

These are logical bytes per rank, by the usual formulas: a point-to-point message counts once, at its sender; a
ring all-reduce of V bytes over D ranks moves 2 V (D - 1) / D, a reduce-scatter or an all-gather half of it. What a
transport really moves can differ.
"""

import enum

__all__ = ["TITLES", "Traffic", "TrafficClass", "all_reduce_bytes", "exchanged_bytes", "reduce_scatter_bytes"]


class TrafficClass(enum.Enum):
    """What crosses the network between the ranks of different nodes."""

    PIPELINE_FORWARD = "pipeline forward"
    PIPELINE_BACKWARD = "pipeline backward"
    DP_GRADIENTS = "DP gradients"
    EMBEDDING = "embedding"
    PARAM_GATHER = "parameter gather"
    """The distributed optimizer's all-gather of what its replicas updated."""


TITLES = {
    "pipeline_forward": "forward",
    "compressed_backprop": "CB",
    "dp_compression": "SC",
    "fused_embedding_sync": "FE",
    "param_gather": "gather",
}
"""The titles of techniques in the log. CB's time covers what a stage receives, too, and so does that of forward."""


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of `nbytes` over `ranks` ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


def reduce_scatter_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring reduce-scatter of `nbytes` over `ranks` ranks."""
    return nbytes * (ranks - 1) // ranks


def exchanged_bytes(message: int, ranks: int) -> int:
    """Bytes that one rank sends where every other one gets a message of its: in an all-to-all, or an all-gather."""
    return message * (ranks - 1)


class Traffic:
    """Counters of one process: since the start, and since the last report."""

    def __init__(self) -> None:
        self._counts = {traffic_class: [0, 0] for traffic_class in TrafficClass}

    def add(self, traffic_class: TrafficClass, *, raw: int, sent: int) -> None:
        """Count one transfer: `raw` bytes as vanilla Megatron would send it, `sent` bytes as it was sent."""
        count = self._counts[traffic_class]
        count[0] += raw
        count[1] += sent

    def total(self) -> dict[TrafficClass, tuple[int, int]]:
        """(raw, sent) bytes by class since the start."""
        return {traffic_class: (raw, sent) for traffic_class, (raw, sent) in self._counts.items()}

    def as_list(self) -> list[int]:
        """The counters in the order of `TrafficClass`, raw before sent; what ranks sum up for a report."""
        return [value for count in self._counts.values() for value in count]
