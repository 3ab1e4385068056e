"""Options of Megatron that no plan contains, each with a bound of the seconds that it may change.

A plan is made without such an option if the bound is within the plan's own error, and names it; otherwise the option is
refused.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.config.classes import classes_among
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster
from optimus_cc_ext.tools.plan.iteration import PlannedIteration, breakdown
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.seconds import attention, head, layer
from optimus_cc_ext.tools.plan.sums import ring_bytes

Bound = Callable[[Cluster, Job, dict[str, float], str], float]
"""Function of cluster, job, vanilla's breakdown and the option's value. It returns the largest number of seconds of
computation or messages that the option changes in an iteration.
"""


def _layers(cluster: Cluster, job: Job) -> float:
    """Return the number of layers and micro-batches that a stage computes, with the cluster's software scale."""
    return cluster.software_scale * job.micro_batches * job.layers_per_stage


def _attention(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    once = attention(cluster.gpu, job)
    return _layers(cluster, job) * (once.forward + once.backward)


def _mixtures(cluster: Cluster, job: Job, parts: dict[str, float]) -> float:
    """Return the seconds of routed experts and their exchange, as the difference to layers without them."""
    if job.model.mixture is None:
        return 0.0
    dense = replace(job, model=replace(job.model, mixture=replace(job.model.mixture, top_k=1, ffn=1)))
    both, without = layer(cluster.gpu, job), layer(cluster.gpu, dense)
    computed = both.forward + both.backward - without.forward - without.backward
    return _layers(cluster, job) * computed + _exchange(cluster, job, parts, "")


def _capacity(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    return abs(float(value) - 1) * _mixtures(cluster, job, parts)


def _latent(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    width = float(value)
    if width % BLOCK:
        raise PlanError(f"--moe-latent-size {value}: no multiple of {BLOCK}, so tokens cannot be compressed. Give one")
    return (1 - min(1.0, width / job.model.hidden)) * _mixtures(cluster, job, parts)


def _recomputed_mixtures(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    return _layers(cluster, job) * layer(cluster.gpu, job).forward


def _head_weights(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    return cluster.software_scale * job.pp * head(cluster.gpu, job).backward / 2


def _exchange(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    return sum(parts[traffic.tag] for traffic in classes_among("experts"))


def _gather(cluster: Cluster, job: Job, parts: dict[str, float], value: str) -> float:
    return parts["parameter gather"]


BOUNDS: dict[str, tuple[str, Bound]] = {
    "--window-size": ("attention to a window of tokens", _attention),
    "--moe-expert-capacity-factor": ("tokens dropped or padded to a capacity", _capacity),
    "--moe-latent-size": ("experts on fewer values than the hidden size", _latent),
    "--moe-layer-recompute": ("experts computed once more", _recomputed_mixtures),
    "--defer-embedding-wgrad-compute": ("the output weight's gradients in the cooldown", _head_weights),
    "--delay-wgrad-compute": ("gradients of weights beside the experts' exchange", _exchange),
    "--overlap-param-gather-with-optimizer-step": ("the gather beside the optimizer's step", _gather),
}
"""Options that plans ignore, each with a description and an upper bound of the seconds that it may change."""


def _uneven(cluster: Cluster, job: Job) -> Iterator[tuple[str, float]]:
    """Yield the simplifications of a layout, with their bounds in seconds."""
    model, mixture, count = job.model, job.model.mixture, job.layers_per_stage
    if mixture is None or job.pp == 1:
        return
    if mixture.layers < model.layers:
        jobs = (
            job.replace(model=replace(model, mixture=each))
            for each in (mixture, replace(mixture, layers=0), replace(mixture, layers=model.layers))
        )
        mean, dense, routed = (each.forward + each.backward for each in (layer(cluster.gpu, each) for each in jobs))
        most = min(model.dense_layers, count)
        heaviest = max(most * dense + (count - most) * routed, count * routed)
        yield (
            "every stage is planned with equally many dense layers and mixtures of experts",
            cluster.software_scale * job.micro_batches * (heaviest - count * mean),
        )


def left_out(
    cluster: Cluster, job: Job, words: Sequence[str], vanilla: PlannedIteration, band: float
) -> tuple[list[str], list[str]]:
    """Return the lines about what the plan leaves out, and the other words of `words`, which no plan reads.

    Args:
        words: the words of Megatron's command line that the planner has not read.
        vanilla: the planned iteration of vanilla.
        band: relative error of the plan's seconds.

    Raises:
        PlanError: an option may change more than `band` of the seconds.
    """
    parts, said, rest = breakdown(job, vanilla), list[str](), list(words)
    if job.dispatcher in ("flex", "deepep") and job.ep * job.etp > cluster.gpus_per_node and not cluster.network.rdma:
        said.append(
            f"--moe-token-dispatcher-type flex takes RDMA between nodes: over TCP on {cluster.network.name} it "
            "does not run, and these seconds are those of RoCE"
        )
    if job.dispatcher == "deepep" and job.ep > 1:
        said.append("left out: DeepEP is planned as HybridEP; its one public run took 1.8 times as long as planned")
    if job.dispatcher == "ncclep" and job.ep > 1:
        said.append("left out: NCCL EP is planned as HybridEP; no public run tests it")
    found = [(text, seconds, "") for text, seconds in _uneven(cluster, job)]
    for flag, (text, bound) in BOUNDS.items():
        while flag in rest:
            begin = rest.index(flag)
            end = next((i for i in range(begin + 1, len(rest)) if rest[i].startswith("--")), len(rest))
            values = rest[begin + 1 : end] or [""]
            del rest[begin:end]
            try:
                seconds = sum(bound(cluster, job, parts, value.strip("'[],")) for value in values)
            except PlanError:
                raise
            except ValueError:
                raise PlanError(f"{flag} {' '.join(values)}: not a number") from None
            found.append((f"{' '.join([flag, *values]).strip()} ({text})", seconds, flag))
    for text, seconds, flag in found:
        share = max(0.0, seconds) / vanilla.seconds
        if share > band:
            raise PlanError(
                f"{text}: not modelled, and it may change {100 * share:.1f} % of vanilla's seconds, more than the "
                f"plan's own error of {100 * band:.0f} %. Plan {f'without {flag}' if flag else 'an even model'}"
            )
        said.append(f"left out: {text}; it changes at most {100 * share:.1f} % of vanilla's seconds")
    return said, rest


CONVOLUTION = 4
"""Width of a Mamba layer's convolution, and Megatron's default."""


def hybrid_bytes(pattern: str, job: Job, words: Sequence[str]) -> dict[str, float]:
    """Return the bytes that a rank of a middle stage sends in an iteration, by class, if the pattern's layers are dealt
    out evenly. Its letters are M (Mamba), * (attention), - (MLP) and E (experts).

    Args:
        pattern: value of `--hybrid-layer-pattern` or `--hybrid-override-pattern`.
        job: the job as if every layer had attention and an MLP.
        words: flags that the job does not read.
    """
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    for flag, default in (("state-dim", 128), ("head-dim", 64), ("num-groups", 8), ("num-heads", 0)):
        parser.add_argument(f"--mamba-{flag}", type=int, default=default)
    sizes, _ = parser.parse_known_args(list(words))
    model, hidden = job.model, job.model.hidden
    inner = sizes.mamba_num_heads * sizes.mamba_head_dim or 2 * hidden
    heads, states = inner // sizes.mamba_head_dim, 2 * sizes.mamba_num_groups * sizes.mamba_state_dim
    mamba = (
        hidden * (2 * inner + states + heads) + (CONVOLUTION + 1) * (inner + states) + 3 * heads + inner * (hidden + 1)
    )
    mixture = model.mixture
    per_layer = {
        "M": mamba,
        "*": sum(each.parameters for each in model.attention) // model.layers,
        "-": hidden * model.inner * (3 if model.gated else 2),
        "E": sum(each.parameters for each in (*model.shared_experts, *model.routed_experts[:1])) // mixture.layers
        if mixture else 0,
    }  # fmt: skip
    own = sum(pattern.count(kind) * (count + model.norm(hidden)) for kind, count in per_layer.items()) / job.tp / job.pp
    routed = pattern.count("E") * model.routed_parameters / mixture.layers if mixture else 0.0
    routed /= job.pp * job.ep * job.etp

    def over_replicas(width: int, *, twice: bool) -> float:
        parts = ((own, job.replicas), (routed, job.expert_replicas))
        return sum(ring_bytes(width * values, ranks, twice=twice) for values, ranks in parts)

    message = float(job.micro_batches * job.vpp * job.message_rows * hidden * job.value_bytes)
    tokens = 2.0 * job.micro_batches * pattern.count("E") / job.pp * job.value_bytes * job.routed_rows * hidden
    exchanged = " and ".join(traffic.tag for traffic in classes_among("experts"))
    found = {
        "DP gradients": over_replicas(job.gradient_bytes, twice=not job.distributed_optimizer),
        "parameter gather": over_replicas(job.value_bytes, twice=False) if job.distributed_optimizer else 0.0,
        "pipeline forward and pipeline backward each": message if job.pp > 1 else 0.0,
        f"{exchanged} each": tokens * (job.ep - 1) / job.ep if mixture else 0.0,
    }
    return {name: nbytes for name, nbytes in found.items() if nbytes}
