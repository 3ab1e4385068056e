"""Counters of bytes by class of traffic: raw bytes, which vanilla Megatron would have sent, and sent bytes.

These are logical bytes per rank by the usual formulas: a point-to-point message counts once, at its sender; a ring
all-reduce of V bytes over D ranks sends 2 V (D - 1) / D per rank, a reduce-scatter or an all-gather half of that. The
bytes on a real transport can differ.
"""

from optimus_cc_ext.config.classes import CLASSES, TrafficClass

__all__ = [
    "BETWEEN_NODES",
    "FALLBACK",
    "Traffic",
    "all_reduce_bytes",
    "exchanged_bytes",
    "leaving_exchange",
    "leaving_instances",
    "leaving_ring",
    "reduce_scatter_bytes",
    "sharded_bytes",
]


BETWEEN_NODES = "between nodes"
"""The name of the bytes of all classes that leave a node."""

FALLBACK = "optimus-cc/compressed by torch"
"""Tag of the text that says why torch compresses in place of Triton's kernels."""


def all_reduce_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a ring all-reduce of `nbytes` over `ranks` ranks."""
    return 2 * nbytes * (ranks - 1) // ranks


def reduce_scatter_bytes(nbytes: int, ranks: int) -> int:
    """Return the bytes that one rank sends in a ring reduce-scatter of `nbytes` over `ranks` ranks."""
    return nbytes * (ranks - 1) // ranks


def sharded_bytes(nbytes: int, ranks: int, instances: int = 1) -> tuple[int, int]:
    """Return the bytes that one rank sends while `ranks` ranks with a distributed optimizer sum `nbytes`: in the
    reduce-scatter inside an instance of the optimizer, and in the all-reduce of its shard between instances.
    """
    owners = ranks // instances
    return reduce_scatter_bytes(nbytes, owners), all_reduce_bytes(nbytes // owners, instances)


def exchanged_bytes(message: int, ranks: int) -> int:
    """Return the bytes that one rank sends if every other rank gets one message of `message` bytes: all-to-all,
    all-gather.
    """
    return message * (ranks - 1)


def leaving_ring(sent: float, ranks: int, beside: int) -> float:
    """Return one rank's share of the bytes that leave its node in a ring collective: the ring of `ranks` ranks crosses
    each node once, whatever the number of its ranks.

    Args:
        sent: the bytes that one rank sends in the ring.
        beside: the number of ranks of the group on this rank's node, with this rank.
    """
    return sent / beside if beside < ranks else 0.0


def leaving_instances(sent: tuple[float, float], ranks: int, instances: int, beside: int) -> float:
    """Return one rank's share of the bytes that leave its node in rings inside the instances of the distributed
    optimizer, and between instances.

    Args:
        sent: the bytes that one rank sends inside its instance, and between instances.
        beside: the number of ranks, of all `ranks` that hold the same parameters, on this rank's node.
    """
    owners = ranks // instances
    inside, between = sent
    return leaving_ring(inside, owners, min(beside, owners)) + leaving_ring(
        between, instances, max(1, beside // owners)
    )  # fmt: skip


def leaving_exchange(message: int, ranks: int, beside: int) -> int:
    """Return the bytes of one rank that leave its node if it sends a message of `message` bytes to every other rank;
    `beside` of the `ranks` are on its node.
    """
    return message * (ranks - beside)


class Traffic:
    """Counters of one process, since its start and since the last report."""

    def __init__(self) -> None:
        self._counts = {traffic: [0, 0] for traffic in CLASSES}
        self._leaving = [0, 0]
        self._reported = self.as_list()

    def add(self, traffic: TrafficClass, *, raw: int, sent: int) -> None:
        """Count one transfer: `raw` bytes as vanilla Megatron would send it, `sent` bytes as it was sent."""
        count = self._counts[traffic]
        count[0] += raw
        count[1] += sent

    def add_leaving(self, *, raw: float, sent: float) -> None:
        """Count the bytes of a transfer that leave this rank's node: `raw` for vanilla Megatron, and `sent`."""
        self._leaving[0] += round(raw)
        self._leaving[1] += round(sent)

    @property
    def leaving(self) -> tuple[int, int]:
        """The (raw, sent) bytes that left this rank's node since the start; zeros if nodes are not known."""
        raw, sent = self._leaving
        return raw, sent

    def total(self) -> dict[TrafficClass, tuple[int, int]]:
        """Return the (raw, sent) bytes by class since the start."""
        return {traffic: (raw, sent) for traffic, (raw, sent) in self._counts.items()}

    def as_list(self) -> list[int]:
        """Return the counters in the order of `CLASSES`, raw before sent; the last two are of bytes between nodes."""
        return [value for count in (*self._counts.values(), self._leaving) for value in count]

    def since_last_report(self) -> list[int]:
        """Return the counters' increments since the last call, in the order of `as_list`."""
        before, self._reported = self._reported, self.as_list()
        return [now - then for now, then in zip(self._reported, before, strict=True)]
