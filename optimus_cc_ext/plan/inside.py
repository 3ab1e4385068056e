"""Seconds of the collectives inside a pass through one layer: tensor parallel, context parallel, experts' exchange."""

from optimus_cc_ext.plan import seconds
from optimus_cc_ext.plan.hardware import Cluster, Constant
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.plan.seconds import Group, Seconds, all_reduce, all_to_all, reduce_scatter

__all__ = ["CONTENTION", "CONTEXT", "EXPERTS", "TENSOR", "contended", "inside"]

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
    return {
        TENSOR: _tensor_parallel(cluster, job, layer),
        CONTEXT: _context_parallel(cluster, job),
        EXPERTS: _experts(cluster, job, layer),
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
    return Seconds(once, once * (2 if job.recompute == "full" else 1))


def _context_parallel(cluster: Cluster, job: Job) -> Seconds:
    """Return the seconds of a layer's exchange of keys and values between the ranks of a sequence.

    A ring hides the transfer of the next part behind the attention of the last one; backward, the parts' gradients
    travel, too.
    """
    if job.cp == 1:
        return _NOTHING
    model, group = job.model, Group.strided(job.cp, job.tp, cluster.gpus_per_node)
    pairs = 2 * (model.groups or model.heads) * model.head_width / job.tp
    if job.cp_exchange == "a2a":
        values = job.rows * (pairs + 2 * model.heads * model.head_width / job.tp)
        once = all_to_all(cluster, group, job.value_bytes * values)
        return Seconds(once, once * (2 if job.recompute == "full" else 1))
    once = reduce_scatter(cluster, group, job.value_bytes * job.rows * job.cp * pairs)
    there = Seconds(once, 2 * once)
    if job.cp_exchange != "allgather":
        attention = seconds.attention(cluster.gpu, job)
        there = Seconds(
            contended(once, max(0.0, once - attention.forward)),
            contended(2 * once, max(0.0, 2 * once - attention.backward)),
        )
    return there + Seconds(0.0, there.forward if job.recompute == "full" else 0.0)


def _experts(cluster: Cluster, job: Job, layer: Seconds) -> Seconds:
    """Return the seconds of a layer's dispatch of tokens to experts and of their way back (combine), in a pass."""
    mixture, model = job.model.mixture, job.model
    if mixture is None or job.ep * job.etp == 1:
        return _NOTHING
    per_node, token = cluster.gpus_per_node, job.value_bytes * model.hidden
    group = Group.strided(job.ep, job.etp, per_node)
    if job.dispatcher == "allgather":
        # Every rank of the group gets all tokens, and the results are reduced and scattered.
        everyone = Group.strided(job.ep * job.etp, 1, per_node)
        once = 2 * reduce_scatter(cluster, everyone, token * job.rows / job.tp * everyone.ranks)
    else:
        rows = float(job.expert_rows)
        if job.dispatcher == "flex":
            # A token is sent once to each node that holds one of its experts, or once to each rank of the node.
            places = group.nodes if group.nodes > 1 else group.ranks
            rows *= places * (1 - (1 - 1 / places) ** mixture.top_k) / mixture.top_k
        within = Group.strided(job.etp, 1, per_node)
        once = 2 * all_to_all(cluster, group, token * rows)
        once += 2 * reduce_scatter(cluster, within, token * job.expert_rows * job.etp)
    share, again = mixture.layers / model.layers, 2 if job.recompute == "full" else 1
    if job.expert_overlap:
        # The exchange of a forward pass is hidden by the backward pass of another micro-batch, and the other way round.
        forward = contended(once, max(0.0, once - layer.backward))
        return Seconds(forward, contended(again * once, max(0.0, again * once - layer.forward))) * share
    if job.shared_expert_overlap and mixture.shared:
        once = contended(once, max(0.0, once - seconds.shared_experts(cluster.gpu, job).forward))
    return Seconds(once, again * once) * share
