"""Sums of encoded values over ranks, in one level or two, and the seconds of coding."""

from collections.abc import Sequence

from optimus_cc_ext.compressors import formats
from optimus_cc_ext.compressors.formats import block_format, format_named
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant, Gpu
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import Group, all_to_all, moved, reduce_scatter
from optimus_cc_ext.tools.plan.timeline import Sent

LAUNCH = Constant(5e-6, "assumed", "of one kernel")


def kernel(gpu: Gpu, nbytes: float) -> float:
    return LAUNCH + moved(gpu, nbytes)


def coded_bytes(values: float, form: str) -> float:
    return values * format_named(form).bits_per_value / 8


def in_blocks(gpu: Gpu, values: float, width: int, form: str) -> tuple[float, float]:
    """Return the bytes of a message of values of `width` bytes each, and the seconds to encode or to decode it.

    Dense and low-rank have no blocks, so such a message is costed as dense. Raises ValueError for an unknown format.
    """
    if block_format(form) is None:
        return float(width * values), 0.0
    small = coded_bytes(values, form)
    return small, kernel(gpu, width * values + small)


def added(found: Sequence[Sent]) -> Sent:
    """Return the sums of bytes and seconds of transfers."""
    return Sent(
        nbytes=sum(each.nbytes for each in found),
        transfer=sum(each.transfer for each in found),
        second_phase=sum(each.second_phase for each in found),
    )


def ring_bytes(nbytes: float, ranks: int, *, twice: bool) -> float:
    """Return the bytes that a rank sends in a ring reduce-scatter or all-gather; with `twice`, in an all-reduce."""
    return (2 if twice else 1) * nbytes * (ranks - 1) / ranks


def block_sum(cluster: Cluster, group: Group, values: float, width: int, form: str) -> tuple[Sent, Sent]:
    """Return an all-to-all of encoded values, summed in fp32 by the receiver, then the all-gather of the sums in
    `SUM_FORMAT`.
    """
    gpu, small, sums = cluster.gpu, coded_bytes(values, form), coded_bytes(values, formats.SUM_FORMAT)
    shard = values / group.ranks
    # In the first phase a rank encodes, decodes the other ranks' messages for its shard, and adds them; in the second
    # it encodes the sum and decodes all sums.
    coding = kernel(gpu, width * values + small) + kernel(gpu, small + width * shard)
    again = kernel(gpu, width * shard + sums / group.ranks) + kernel(gpu, sums + width * values)
    steps = (small, all_to_all, coding), (sums, reduce_scatter, again)
    there, back = (
        Sent(
            nbytes=ring_bytes(nbytes, group.ranks, twice=False),
            transfer=travel(cluster, group, nbytes) + seconds * cluster.coding_scale,
        )
        for nbytes, travel, seconds in steps
    )
    return there, back


def sum_in_levels(
    cluster: Cluster, job: Job, config: OptimusConfig, group: Group, values: float, form: str
) -> tuple[Sent, Sent]:  # fmt: skip
    """Return both phases of a sum of encoded values, in two levels if nodes hold several replicas and the flags allow
    it: added up inside a node by a dense reduce-scatter, then between nodes in blocks.

    Without the distributed optimizer, the sums are gathered inside the node in the end.
    """
    width, members = job.gradient_bytes, group.per_node
    if config.dp_compression_levels == "one" or min(group.nodes, members) == 1 or group.ranks % members:
        return block_sum(cluster, group, values, width, form)
    node, rail = Group(members, members, group.rings), Group(group.nodes, 1, members * group.rings)
    inside = Sent(
        nbytes=ring_bytes(width * values, members, twice=False), transfer=reduce_scatter(cluster, node, width * values)
    )  # fmt: skip
    there, back = block_sum(cluster, rail, values / members, width, form)
    sharded = job.distributed_optimizer
    gathered = Sent() if sharded else inside
    return added([inside, there]), added([back, gathered])
