"""Seconds of the collectives inside a pass through one layer: tensor parallel, context parallel, experts' exchange."""

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import EXPERT_DISPATCH, EXPERT_GRADIENT, TrafficClass, classes_among
from optimus_cc_ext.config.presets import share_of_copies, too_many_copies
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.plan import seconds
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant
from optimus_cc_ext.tools.plan.model import Job, layout_of
from optimus_cc_ext.tools.plan.seconds import Group, Seconds, all_reduce, all_to_all, reduce_scatter
from optimus_cc_ext.tools.plan.sums import in_blocks, kernel
from optimus_cc_ext.tools.plan.timeline import ClassCost, Link, Sent, When

TENSOR, CONTEXT, EXPERTS = "tensor parallel", "context parallel", "experts' exchange"

CONTENTION = Constant(0.189, "measured", "Lee et al. 2025, arXiv 2507.03114: mean slowdown beside collectives")
"""Share by which computation slows down while a collective runs beside it."""

_NOTHING = Seconds(0.0, 0.0)


def contended(whole: float, left: float) -> float:
    """Return the cost of a transfer of `whole` seconds of which `left` seconds are not hidden by computation."""
    return left + CONTENTION * (whole - left)


def inside(cluster: Cluster, job: Job) -> dict[str, Seconds]:
    """Return the mean seconds of a layer's collectives that computation does not hide, by class."""
    layer = seconds.layer(cluster.gpu, job)
    exchanged = {when: 0.0 for when in (When.FORWARD_PASS, When.BACKWARD_PASS)}
    for cost in experts(cluster, job, OptimusConfig()):
        exchanged[cost.when] += cost.dense.transfer
    return {
        TENSOR: _tensor_parallel(cluster, job, layer),
        CONTEXT: _context_parallel(cluster, job),
        EXPERTS: Seconds(exchanged[When.FORWARD_PASS], exchanged[When.BACKWARD_PASS]),
    }


def _tensor_parallel(cluster: Cluster, job: Job, layer: Seconds) -> Seconds:
    """Return the seconds of a layer's tensor-parallel collectives: two all-reduces a pass (Shoeybi et al. 2019), or
    with sequence parallelism as many all-gathers and reduce-scatters.

    The backward pass with sequence parallelism gathers once more, hidden by the GEMMs (Korthikanti et al. 2022, section
    4.2.2).
    """
    if job.tp == 1:
        return _NOTHING
    group = Group.strided(job.tp, 1, cluster.gpus_per_node)
    nbytes = job.value_bytes * job.rows * job.model.hidden
    if job.sequence_parallel:
        once = 4 * reduce_scatter(cluster, group, nbytes)
    else:
        once = 2 * all_reduce(cluster, group, nbytes)
    if (mixture := job.model.mixture) and not mixture.shared:
        # Routed experts have their own exchange instead of the second pair of collectives.
        once *= 1 - mixture.layers / job.model.layers / 2
    if job.tp_overlap:
        # The transfer is cut into `tp` pieces that are sent while the GEMMs of other pieces run. Exposed are the first
        # piece, and the time by which the transfer is longer than the GEMMs.
        once = contended(once, max(once / job.tp, once - layer.forward))
    return Seconds(once, once * (1 + job.share_again))


def _context_parallel(cluster: Cluster, job: Job) -> Seconds:
    """Return the seconds of a layer's exchange of keys and values between the ranks of a sequence.

    A ring hides the transfer of the next part behind the attention of the last one; backward, the parts' gradients
    are sent, too.
    """
    if job.cp == 1:
        return _NOTHING
    model, group = job.model, Group.strided(job.cp, job.tp, cluster.gpus_per_node)
    pairs = 2 * (model.groups or model.heads) * model.head_width / job.tp
    if job.cp_exchange == "a2a":
        values = job.rows * (pairs + 2 * model.heads * model.head_width / job.tp)
        once = all_to_all(cluster, group, job.value_bytes * values)
        return Seconds(once, once * (1 + job.share_again))
    once = reduce_scatter(cluster, group, job.value_bytes * job.rows * job.cp * pairs)
    there = Seconds(once, 2 * once)
    if job.cp_exchange != "allgather":
        attention = seconds.attention(cluster.gpu, job)
        there = Seconds(
            contended(once, max(0.0, once - attention.forward)),
            contended(2 * once, max(0.0, 2 * once - attention.backward)),
        )
    return there + Seconds(0.0, job.share_again * there.forward)


def experts(cluster: Cluster, job: Job, config: OptimusConfig) -> tuple[ClassCost, ...]:
    """Return the mean costs of a layer's tokens in a pass: their dispatch to experts and their way back (combine),
    dense and as `config` says. In the backward pass their gradients are sent, and recomputed tokens once more.
    """
    mixture = job.model.mixture
    if mixture is None or job.ep * job.etp == 1:
        return ()
    # Recomputed experts send their tokens once more.
    share, again = mixture.layers / job.model.layers, max(job.share_again, float("moe" in job.recomputed))
    layer = seconds.layer(cluster.gpu, job)
    windows = (0.0, 0.0)
    if job.expert_overlap:
        # The exchange of a forward pass is hidden by the backward pass of another micro-batch, and the other way round.
        windows = layer.backward, layer.forward
    elif job.shared_expert_overlap and mixture.shared:
        windows = (seconds.shared_experts(cluster.gpu, job).forward,) * 2

    def left(spent: float, window: float) -> float:
        """Return the share of `spent` seconds that computation does not hide."""
        return contended(spent, max(0.0, spent - window)) / spent if spent else 0.0

    def both(way: OptimusConfig) -> tuple[Sent, Sent, Sent]:
        """Return the transfers of tokens, of recomputed tokens, and of gradients."""
        tokens, gradients = (_exchange(cluster, job, way, each) for each in (EXPERT_DISPATCH, EXPERT_GRADIENT))
        forward = left(tokens.transfer, windows[0])
        backward = left(gradients.transfer + again * tokens.transfer, windows[1])
        return (
            _scaled(tokens, share, forward), _scaled(tokens, share * again, backward),
            _scaled(gradients, share, backward),
        )  # fmt: skip

    places = (
        (EXPERT_DISPATCH, When.FORWARD_PASS), (EXPERT_DISPATCH, When.BACKWARD_PASS),
        (EXPERT_GRADIENT, When.BACKWARD_PASS),
    )  # fmt: skip
    return tuple(
        ClassCost(traffic.tag, when, Link.EXPERTS, dense, sent)
        for (traffic, when), dense, sent in zip(places, both(OptimusConfig()), both(config), strict=True)
    )


def _scaled(sent: Sent, share: float, exposed: float) -> Sent:
    return Sent(
        nbytes=share * sent.nbytes, transfer=share * exposed * sent.transfer, encode=share * sent.encode,
        decode=share * sent.decode,
    )  # fmt: skip


def _exchange(cluster: Cluster, job: Job, config: OptimusConfig, traffic: TrafficClass) -> Sent:
    """Return a mixture's exchange of tokens or of their gradients, there and back, as if nothing hid it."""
    model, per_node, width = job.model, cluster.gpus_per_node, job.value_bytes
    group, within = Group.strided(job.ep, job.etp, per_node), Group.strided(job.etp, 1, per_node)
    if job.dispatcher == "allgather":
        # Every rank of the group gets all tokens, and the results are reduced and scattered.
        everyone = Group.strided(job.ep * job.etp, 1, per_node)
        nbytes = width * model.hidden * job.rows / job.tp * everyone.ranks
        return Sent(nbytes=2 * nbytes, transfer=2 * reduce_scatter(cluster, everyone, nbytes))
    form = config.format_of(traffic)
    if job.dispatcher != "alltoall" or (config.is_dense_inside(traffic) and group.nodes == 1):
        form = "dense"
    values = float(job.routed_rows * model.hidden)
    nbytes, coding = in_blocks(cluster.gpu, values, width, form)
    coding *= 2 * cluster.coding_scale
    if (mixture := model.mixture) and goes_once(job, config, group):
        # Hop 1 takes a row once to each node; hop 2 takes it on, and brings dense results to where they are added up.
        # Ahead go the numbers of rows, and the bits of a row's experts.
        nodes, members, own = group.nodes, group.per_node, mixture.experts // group.nodes
        rail, beside = Group(nodes, 1, members * group.rings), Group(members, members, group.rings)
        share = share_of_copies(layout_of(job).routing, nodes)
        ahead = share * job.routed_rows * -(-own // 8), 8.0 * (1 + members) * nodes
        legs = [share * nbytes, share * nbytes, *(ahead if traffic is EXPERT_DISPATCH else ())]
        between = [all_to_all(cluster, rail, each) for each in legs]
        within_node = [all_to_all(cluster, beside, each) for each in (nbytes, width * values)]
        placed = 4 * nbytes + (5 + share) * width * values
        return Sent(
            nbytes=sum(legs) * (nodes - 1) / nodes + (nbytes + width * values) * (members - 1) / members,
            transfer=sum(between) + sum(within_node) + kernel(cluster.gpu, placed),
            encode=coding * share, decode=coding * (1 + share) / 2,
        )  # fmt: skip
    if job.dispatcher != "alltoall" and mixture:
        # A token is sent once to each node that holds one of its experts, or once to each rank of the node.
        places = group.nodes if group.nodes > 1 else group.ranks
        nbytes *= places * (1 - (1 - 1 / places) ** mixture.top_k) / mixture.top_k
    gathered = reduce_scatter(cluster, within, width * values * job.etp)
    return Sent(
        nbytes=2 * nbytes * (group.ranks - 1) / group.ranks,
        transfer=2 * (all_to_all(cluster, group, nbytes) + gathered), encode=coding, decode=coding,
    )  # fmt: skip


def goes_once(job: Job, config: OptimusConfig, group: Group) -> bool:
    """Return whether tokens go once to each node of the group of experts, as `crossing.levels_of_experts` says.

    Raises:
        FlagError: once a node was asked for, and is not possible.
    """
    on = any(map(config.is_on, classes_among("experts"))) and job.dispatcher == "alltoall" and job.ep > 1
    if not on or config.expert_exchange == "direct":
        return False
    layout, once = layout_of(job), config.expert_exchange == "once-a-node"
    found = {
        "all of a group's ranks share a node": group.nodes == 1,
        "a node holds one of a group's ranks": group.per_node == 1,
        "its nodes hold unequal numbers of its ranks": group.ranks != group.nodes * group.per_node,
    }
    reason = layout.direct or next((each for each, holds in found.items() if holds), "")
    if reason and once:
        raise FlagError("--expert-exchange", f"tokens cannot go once a node: {reason}", "Give auto or direct")
    return not reason and (once or not too_many_copies(layout.routing, group.nodes))
