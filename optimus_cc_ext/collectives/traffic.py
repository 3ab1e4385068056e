"""Formulas of the bytes that a collective moves, and of those that leave a node.

These are logical bytes per rank by the usual formulas: a ring all-reduce of V bytes over D ranks sends 2 V (D - 1) / D
per rank, a reduce-scatter or an all-gather half of that. The bytes on a real transport can differ.
"""


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
