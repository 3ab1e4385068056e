"""Lines and tables of a plan and a sweep."""

from collections.abc import Collection, Iterator, Sequence

from optimus_cc_ext.config.classes import classes_among
from optimus_cc_ext.tools.plan.answer import in_bf16
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant
from optimus_cc_ext.tools.plan.inside import goes_once
from optimus_cc_ext.tools.plan.iteration import CLASSES, breakdown, iteration
from optimus_cc_ext.tools.plan.memory import MEMORY_ERROR, memory
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.published import BAND, band_of, nearest, shipped
from optimus_cc_ext.tools.plan.seconds import Group
from optimus_cc_ext.tools.plan.variants import Gain, Point, Variant, with_best_dispatcher
from optimus_cc_ext.tools.report.table import Cell, Table


def summary(found: Sequence[Variant]) -> Table:
    """Return the table of seconds and gain of each variant."""
    return Table(
        ("variant", "seconds", "gain %", "from %", "to %", "", "DP stages", "GB a rank", "flags"),
        [
            (
                v.name, v.result.seconds, *_percent(v.gain), v.gain.verdict if v.flags else "",
                _stages(v.result.compressed_stages, len(v.result.times.ends)), v.memory / 1e9, v.flags,
            )
            for v in found
        ],
        title="Seconds per iteration",
        name="plan",
        note="The band: lines at 3/4 to 4/3 of their rate, compression at half to twice its assumed cost, computation "
        "off by the error beside vanilla's seconds. No public run tests the compression terms.",
    )  # fmt: skip


def _percent(gain: Gain | None) -> list[float | None]:
    return [round(100 * share, 2) for share in (gain.planned, gain.least, gain.most)] if gain else [None] * 3


def _stages(compressed: Collection[int], stages: int) -> str:
    if len(compressed) in (0, stages):
        return "all" if compressed else ""
    return ",".join(map(str, sorted(compressed)))


def parts(job: Job, found: Sequence[Variant], chosen: Variant) -> Table:
    """Return the breakdown of the seconds of vanilla, of the user's flags, if any, and of the recommended variant."""
    shown = list({v.name: v for v in (found[0], *(v for v in found if v.name == "yours"), chosen)}.values())
    breakdowns = [breakdown(job, v.result) for v in shown]
    rows: list[tuple[Cell, ...]] = [(name, *(each[name] for each in breakdowns)) for name in CLASSES]
    rows.append(("sum", *(v.result.seconds for v in shown)))
    return Table(("", *(v.name for v in shown)), rows, title="Where the seconds go, unhidden", last_is_sum=True)


def needs(cluster: Cluster, job: Job, found: Sequence[Variant], chosen: Variant) -> Table:
    """Return the memory of vanilla and of the recommended variant."""
    needed = [memory(job, v.config, cluster.gpus_per_node) for v in (found[0], chosen)]
    rows: list[tuple[Cell, ...]] = [(name, *(round(each[name] / 1e9, 2) for each in needed)) for name in needed[0]]
    return Table(("GB on a rank of the first stage", "vanilla", chosen.name), rows, title="Memory")


def lines(cluster: Cluster, job: Job, found: Sequence[Variant], chosen: Variant) -> list[str]:
    """Return the lines about the job, its baseline, and the trust in its prediction."""
    gpu, plain, band = cluster.gpu, found[0].result.seconds, cluster.error or band_of(cluster.gpu, job)
    said = [
        f"{_count(job.model.parameters)} parameters on {job.gpus} x {gpu.name}, "
        f"{cluster.gpus_per_node} on each node, {cluster.network.name}: tensor "
        f"{job.tp} x pipeline {job.pp}{f' ({job.vpp} chunks)' if job.vpp > 1 else ''}"
        f"{f' x context {job.cp}' if job.cp > 1 else ''} x data {job.dp}{_mixture(job)}, "
        f"{job.micro_batches} micro-batches of {job.micro_batch}",
        f"vanilla: {plain:.3f} s per iteration, {plain * (1 - band):.3f} to {plain * (1 + band):.3f} "
        f"({'iterations of the log' if cluster.error else _held_out(gpu.name, job)} within {100 * band:.0f} %)"
        f"{f'; not validated: {names}, which no public run has' if (names := ', '.join(job.unvalidated)) else ''}",
    ]
    said += _about_dispatchers(cluster, job, found)
    for variant in (found[0], chosen)[: 1 + bool(chosen.flags)]:
        if variant.memory > gpu.memory:
            said.append(
                f"{variant.name} may not fit: {variant.memory / 1e9:.1f} GB are planned on a rank, the {gpu.name} has "
                f"{gpu.memory / 1e9:g}; the estimate may be {100 * MEMORY_ERROR:.0f} % off"
            )
    if narrow := in_bf16(job):
        dense = iteration(cluster, with_best_dispatcher(cluster, narrow)).seconds
        ours = iteration(cluster, narrow, chosen.config).seconds
        compressed = f"; with the flags above {ours:.3f} s" if chosen.flags else ""
        said.append(f"vanilla with --grad-reduce-in-bf16: {dense:.3f} s{compressed}")
    if job.model.mixture is None and not cluster.error and (row := nearest(shipped(), cluster, job)):
        said.append(
            f"nearest published run: {row.campaign} {row.model} on {row.job.gpus} GPUs, {row.seconds:g} s; predicted "
            f"{100 * (row.ratio() - 1):+.1f} %{', a row that constants were fitted on' if row.fitted else ''}"
        )
    return said


_TOKENS = classes_among("experts")
HYBRID = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"


def _about_dispatchers(cluster: Cluster, job: Job, found: Sequence[Variant]) -> Iterator[str]:
    """Yield the lines about the ways of tokens between nodes: Megatron's best dispatcher, and ours once a node."""
    ours = next((v for v in found if v.name in ("yours", "balanced") and any(map(v.config.is_on, _TOKENS))), found[0])
    once = ours.config.replace(expert_exchange="auto")
    hybrid, seconds = with_best_dispatcher(cluster, job) is not job, {ours.name: ours.result.seconds}
    if hybrid:
        plain, fastest = iteration(cluster, job).seconds, found[0].result.seconds
        yield f"vanilla is planned with HybridEP ({HYBRID}), which RDMA allows; with alltoall it takes {plain:.3f} s"
        seconds |= {"HybridEP without compression": fastest}
    if ours.config.expert_exchange == "direct" and goes_once(
        job, once, Group.strided(job.ep, job.etp, cluster.gpus_per_node)
    ):
        name = f"{ours.name} with --expert-exchange auto, by which a token leaves a node once"
        seconds |= {name: iteration(cluster, job, once).seconds}
        yield f"{name}: {seconds[name]:.3f} s"
    if hybrid and ours.flags:
        name = min(seconds, key=lambda name: seconds[name])
        yield f"the fastest here: {name}, {seconds[name]:.3f} s. HybridEP's plan may be off by a half: time both"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"


UNITS = {
    "bf16": "operations/s", "fp8": "operations/s", "memory_rate": "bytes/s", "memory": "bytes", "nvlink": "bytes/s",
    "gemm_efficiency": "of the peak", "memory_efficiency": "of the rate", "layer_overhead": "s",
    "mixture_efficiency": "of a dense layer's speed", "node_rate": "bytes/s", "hop": "s",
    "exchange_share": "of the rate",
    "all_to_all_share": "of the rate",
}  # fmt: skip
"""Units of the constants of a GPU and a network."""


def constants(cluster: Cluster) -> list[str]:
    """Return a line for each constant, with its unit, kind and source."""
    found = {**vars(cluster.gpu), **vars(cluster.network)}
    return [
        f"  {name} {c:g} {UNITS[name]}: {c.kind}, {c.source}" for name, c in found.items() if isinstance(c, Constant)
    ]


def _held_out(gpu: str, job: Job) -> str:
    if gpu not in BAND:
        return f"assumed, because no published {gpu} run was found:"
    if job.model.mixture and job.micro_batch > 1:
        return "published runs of mixtures in larger micro-batches are"
    if job.model.mixture:
        return "published runs of mixtures on H100s, each predicted without its own model, are"
    return f"nine of ten published {gpu} runs that were held out are"


def _mixture(job: Job) -> str:
    if (mixture := job.model.mixture) is None:
        return ""
    shared = f"on {job.ep} ranks, {job.expert_replicas} replicas of each"
    return f", experts {mixture.experts} ({mixture.top_k} a token) {shared}"


def sweep(found: Sequence[Point], names: Sequence[str]) -> Table:
    """Return a row for each layout on each cluster."""
    columns = (
        "nodes", "GPUs", "link", "tensor", "pipeline", "chunks", "data", "micro-batch", "batch", "recompute",
        "GB a rank", "vanilla s", *(f"{name}: {bound} %" for name in names for bound in ("gain", "from", "to")),
    )  # fmt: skip
    rows = [
        (
            job.gpus // place.gpus_per_node, job.gpus, place.network.name, job.tp, job.pp, job.vpp, job.dp,
            job.micro_batch, job.batch, job.recompute, round(used / 1e9, 1), seconds,
            *(cell for gain in gains for cell in _percent(gain)),
        )
        for place, job, used, seconds, gains in found
    ]  # fmt: skip
    return Table(columns, rows, title="Sweep, from the fastest of each cluster", name="sweep")
