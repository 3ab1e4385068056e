"""Seconds and gains of compression: for each technique and format, alone and together, and over a sweep.

A sweep plans the same model over several numbers of nodes, networks and layouts.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby, product

from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.presets import Layout, config_of
from optimus_cc_ext.config.trials import LEAST_GAIN, on_trial
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster, network_of
from optimus_cc_ext.tools.plan.iteration import PlannedIteration, iteration
from optimus_cc_ext.tools.plan.memory import MEMORY_ERROR, check_memory
from optimus_cc_ext.tools.plan.model import Job, layout_of
from optimus_cc_ext.tools.plan.published import band_of
from optimus_cc_ext.tools.plan.traffic import DENSE

SHORT = {
    "pipeline_forward": "forward", "compressed_backprop": "backward", "dp_compression": "gradients",
    "fused_embedding_sync": "embedding", "param_gather": "gather", "expert_dispatch": "dispatch",
}  # fmt: skip
"""The names of classes of traffic in the planner's rows, where they differ from those in the log."""


def _each_alone() -> Iterator[tuple[str, str]]:
    """Yield a name and the flags for each class of traffic in each of its formats, with only that class compressed."""
    for row in sorted(classes.CLASSES, key=lambda row: row is not classes.PIPELINE_BACKWARD):
        short = SHORT.get(row.name, row.tag)
        for form in row.formats:
            if form == "low-rank":
                yield f"{short} {form}", row.flag
                if row is classes.PIPELINE_BACKWARD:
                    yield f"{short} {form}, all", f"{row.flag} --compressed-backprop-messages all"
            elif form != "dense":
                yield f"{short} {form}", f"{row.format_flag} {form}"
            elif row is classes.EMBEDDING:
                yield f"{short} in one reduction", row.flag


FEWEST = "paper, fewest stages"
VARIANTS = dict(_each_alone()) | {
    "paper": "--optimus-cc",
    FEWEST: "--optimus-cc --dp-compression-stages 1",
    "balanced": "--optimus-cc balanced",
    "DP gradients int4": "--optimus-cc balanced --dp-compression-format int4",
    "int4": "--optimus-cc balanced --compressed-backprop-format int4 --dp-compression-format int4 "
    "--fused-embedding-sync-format int4",
}
"""Flags of each variant by name: each technique and format alone, then combinations. `FEWEST` takes `fewest_stages`."""

WORTH = 0.01
"""Smallest share of vanilla's seconds that counts as a gain."""

LINE, CODING, LEAST_BITS, MOST_BITS = 0.75, 2.0, 2.0, 5.0
"""Factors by which a link's rate and the cost of compression may be wrong, assumed; bits of a value in exact messages
at low and at the highest learning rates, measured.
"""


@dataclass(frozen=True)
class Gain:
    """Saved shares of vanilla's seconds: as planned, at least, and at most."""

    planned: float
    least: float
    most: float

    @property
    def verdict(self) -> str:
        """The verdict: pays, or does not pay, if the whole band of the gain agrees."""
        return "pays" if self.least > WORTH else "does not pay" if self.most < WORTH else "cannot be told"

    @property
    def word(self) -> str:
        """The answer in a word: no below what a trial in the run asks for, maybe if the band holds too small gains."""
        return "no" if self.planned < LEAST_GAIN else "yes" if self.least > WORTH else "maybe"


@dataclass(frozen=True)
class Variant:
    """One way to compress, and its gain."""

    name: str
    flags: str
    config: OptimusConfig
    result: PlannedIteration
    gain: Gain
    memory: float


def config_in(flags: Sequence[str], job: Job) -> OptimusConfig:
    """Return the configuration that training would use for our flags on a job; raises FlagError if it refuses them."""
    megatron = argparse.Namespace(
        overlap_moe_expert_parallel_comm=job.expert_overlap, fp8_param_gather=job.fp8_gather,
        moe_token_dispatcher_type="alltoall" if job.ep == 1 else job.dispatcher,
        num_distributed_optimizer_instances=job.instances,
    )  # fmt: skip
    return config_of(flags, layout_of(job), megatron=megatron)


def fitting(flags: Sequence[str], layout: Layout) -> list[str]:
    """Return our flags without those of classes of which the layout sends nothing."""
    words = list(flags)
    while words:
        try:
            config_of(words, layout)
            return words
        except FlagError as error:
            if error.flag not in words:
                return []
            place = words.index(error.flag)
            has_value = words[place + 1 : place + 2] and not words[place + 1].startswith("--")
            del words[place : place + (2 if has_value else 1)]
    return words


def with_best_dispatcher(cluster: Cluster, job: Job) -> Job:
    """Return vanilla's job with the faster of Megatron's dispatchers: HybridEP takes RDMA, and pays between nodes."""
    between = job.ep > 1 and job.ep * job.etp > cluster.gpus_per_node
    if job.dispatcher != "alltoall" or not between or not cluster.network.rdma:
        return job
    return min(job, job.replace(dispatcher="flex"), key=lambda each: iteration(cluster, each).seconds)


class Band:
    """A job's iterations as planned, and at the two ends of all that is uncertain: against compression and in its
    favour. They are compared with vanilla's best dispatcher.
    """

    def __init__(self, cluster: Cluster, job: Job) -> None:
        off = cluster.error or band_of(cluster.gpu, job)
        self._job, self._corners = job, [
            replace(
                cluster,
                network=replace(cluster.network, node_rate=cluster.network.node_rate * line),
                coding_scale=cluster.coding_scale * coding,
                exact_bits=bits,
                software_scale=cluster.software_scale * computation,
            )
            for line, coding, computation, bits in (
                (1, 1, 1, job.exact_bits),
                (1 / LINE, CODING, 1 + off, max(MOST_BITS, job.exact_bits)),
                (LINE, 1 / CODING, 1 - off, min(LEAST_BITS, job.exact_bits)),
            )
        ]  # fmt: skip
        best = with_best_dispatcher(cluster, job)
        self._plain = [iteration(corner, best) for corner in self._corners]
        self.vanilla = self._plain[0]

    def results(self, config: OptimusConfig) -> list[PlannedIteration]:
        """Return the iterations with `config`, in the way that a trial in the run would take: as planned, and at both
        ends of the uncertainty.
        """
        ours, tried = self._on(config), on_trial(config)
        if not tried:
            return ours
        off = {traffic.name: False for traffic in tried if hasattr(config, traffic.name)}
        dense = self._on(config.replace(**off, **{traffic.format_field: "dense" for traffic in tried}))
        pays = (each.seconds <= other.seconds * (1 - LEAST_GAIN) for each, other in zip(ours, dense, strict=True))
        return [each if saves else other for each, other, saves in zip(ours, dense, pays, strict=True)]

    def goes_dense(self, config: OptimusConfig) -> bool:
        """Return whether a trial in the run would leave out, as planned, what a preset alone asks for."""
        return self.results(config)[0].seconds != self._on(config)[0].seconds

    def seconds(self, config: OptimusConfig) -> list[float]:
        """Return the seconds of `results`."""
        return [each.seconds for each in self.results(config)]

    def _on(self, config: OptimusConfig) -> list[PlannedIteration]:
        return [iteration(corner, self._job, config) for corner in self._corners]

    def gain(self, config: OptimusConfig) -> Gain:
        """Return the gain of `config`."""
        pairs = zip(self.seconds(config), self._plain, strict=True)
        gains = [1 - seconds / plain.seconds for seconds, plain in pairs]
        return Gain(gains[0], min(gains), max(gains))


def fewest_stages(cluster: Cluster, job: Job) -> int:
    """Return the smallest number of stages that low rank compresses as profitably as any number, within 2.5 %.

    Compression costs accuracy, so a stage whose dense reduction does not hold up the iteration stays dense.
    """
    numbers = range(1, job.pp + 1)
    configs = [config_in(["--optimus-cc", "--dp-compression-stages", str(number)], job) for number in numbers]
    seconds = [iteration(cluster, job, config).seconds for config in configs]
    return next(n for n, each in zip(numbers, seconds, strict=True) if each <= min(seconds) * 1.025)


def variants(cluster: Cluster, job: Job, band: Band, own: Sequence[str] = ()) -> list[Variant]:
    """Return vanilla, then all variants that the layout allows and memory holds; `own` are the user's flags, if any.

    Raises:
        PlanError: vanilla or the user's variant does not fit in memory.
        FlagError: the user's flags are refused.
    """
    found = [Variant("vanilla", "", DENSE, band.vanilla, Gain(0.0, 0.0, 0.0), check_memory(cluster, job))]
    asked = {"yours": " ".join(own)} if own else {}
    for name, flags in (asked | VARIANTS).items():
        try:
            if flags.count("-format ") > 1 and name not in asked:  # a combination keeps what the layout allows
                flags = " ".join(fitting(flags.split(), layout_of(job)))
            if not flags:
                continue
            if name == FEWEST:
                flags = f"--optimus-cc --dp-compression-stages {fewest_stages(cluster, job)}"
            config = config_in(flags.split(), job)
            used = check_memory(cluster, job, config)
            found.append(Variant(name, flags, config, band.results(config)[0], band.gain(config), used))
        except (FlagError, PlanError):
            if name in asked:
                raise
    return found


MICRO_BATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Sweep:
    """The ranges of a sweep; an empty range keeps the plan's value."""

    nodes: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    layout: str = "given"
    """Layouts to plan: `given`, `all`, or `best`, which of all layouts is fastest on its cluster without
    compression.
    """

    weak: bool = False
    """True if the batch grows with the number of nodes."""

    @staticmethod
    def parsed(text: str) -> "Sweep":
        """Parse `nodes=8..1250,link=hdr8+100gbe,layout=all,batch=weak`; a range of nodes doubles.

        Raises:
            PlanError: a key is unknown, or a value is not allowed for its key.
        """
        values = dict(part.partition("=")[::2] for part in text.split(","))
        if unknown := values.keys() - {"nodes", "link", "layout", "batch"}:
            raise PlanError(f"--sweep: unknown {', '.join(sorted(unknown))}: give nodes, link, layout or batch")
        for key, allowed in (("layout", ("given", "all", "best")), ("batch", ("strong", "weak"))):
            if values.setdefault(key, allowed[0]) not in allowed:
                raise PlanError(f"--sweep: {key}={values[key]}: give one of {', '.join(allowed)}")
        links = tuple(values["link"].split("+")) if "link" in values else ()
        for link in links:
            network_of(link)
        return Sweep(_numbers(values.get("nodes", "")), links, values["layout"], values["batch"] == "weak")


def _numbers(text: str) -> tuple[int, ...]:
    first, dots, last = text.partition("..")
    try:
        found = [int(part) for part in first.split("+")] if text else []
        if dots:
            if int(last) < found[-1]:
                raise ValueError
            while 0 < found[-1] * 2 < int(last):
                found.append(found[-1] * 2)
            found += [int(last)] if int(last) > found[-1] else []
    except ValueError:
        raise PlanError(f"--sweep: nodes={text}: not a range or a list of numbers. Give 8..1250, or 8+64+512") from None
    if min(found, default=1) < 1:
        raise PlanError(f"--sweep: nodes={text}: give positive numbers of nodes")
    return tuple(found)


Point = tuple[Cluster, Job, float, float, list[Gain | None]]
"""One layout on one cluster: cluster, job, bytes on a rank, vanilla's seconds, and the gain of each set of flags (None:
the layout has nothing that they compress, or training would refuse them).
"""


def layouts(job: Job, gpus: int, batch: int, gpus_per_node: int) -> Iterator[Job]:
    """Yield every layout of the model of `job` on `gpus` GPUs, with tensor parallelism within nodes."""
    model = job.model
    tensor = [tp for tp in (1, 2, 4, 8, 16) if tp <= gpus_per_node and model.heads % tp == 0]
    stages = [pp for pp in range(1, model.layers + 1) if model.layers % pp == 0 and gpus % pp == 0]
    recompute = dict.fromkeys((job.recompute, "full"))
    for tp, pp, vpp, micro_batch, again in product(tensor, stages, (1, 2, 4), MICRO_BATCHES, recompute):
        sizes = {"gpus": gpus, "batch": batch, "tp": tp, "pp": pp, "vpp": vpp, "micro_batch": micro_batch}
        sizes |= {"etp": tp} if job.etp == job.tp else {}
        with suppress(PlanError):
            yield job.replace(**sizes, recompute=again, sequence_parallel=tp > 1)


def points(
    cluster: Cluster, job: Job, sweep: Sweep, flags: Sequence[str], progress: Callable[[int, int], None]
) -> list[Point]:
    """Return all points that fit in memory, those of one cluster from the fastest on; full recomputation only where
    memory needs it.

    `progress` is called with the number of finished points and of all points.

    Raises:
        PlanError: no point is left; the message has the reason for the last one.
    """
    chosen = _fitting(cluster, job, sweep)
    if sweep.layout == "best":
        # `chosen` lists the points of one cluster consecutively.
        seconds = []
        for count, (place, way, _) in enumerate(chosen):
            progress(count, len(chosen))
            seconds.append(iteration(place, way).seconds)
        by_cluster = groupby(range(len(chosen)), key=lambda i: (chosen[i][0], chosen[i][1].gpus))
        chosen = [chosen[min(group, key=lambda i: seconds[i])] for _, group in by_cluster]
    found: list[Point] = []
    for count, (place, way, used) in enumerate(chosen):
        progress(count, len(chosen))
        band = Band(place, way)
        gains: list[Gain | None] = []
        for text in flags:
            words = fitting(text.split(), layout_of(way))
            try:
                gains.append(band.gain(config_in(words, way)) if words else None)
            except FlagError:
                gains.append(None)
        found.append((place, way, used, band.vanilla.seconds, gains))
    return sorted(found, key=lambda point: (point[1].gpus, point[0].network.name, point[3]))


def _fitting(cluster: Cluster, job: Job, sweep: Sweep) -> list[tuple[Cluster, Job, float]]:
    """Return (cluster, job, bytes on a rank) of all points that fit in memory, cluster by cluster."""
    reason: str | Exception = "no layout divides"
    all_of_them = sweep.layout != "given"
    here = job.gpus // cluster.gpus_per_node
    found: dict[tuple[object, ...], tuple[Cluster, Job, float]] = {}
    for nodes, link in product(sweep.nodes or (here,), sweep.links or (None,)):
        place = replace(cluster, network=network_of(link)) if link else cluster
        gpus, batch = nodes * place.gpus_per_node, job.batch * nodes // here if sweep.weak else job.batch
        ways: Iterable[Job] = []
        try:
            ways = (
                layouts(job, gpus, batch, place.gpus_per_node) if all_of_them else [job.replace(gpus=gpus, batch=batch)]
            )
        except PlanError as error:
            reason = error
        for way in ways:
            key = place, way.gpus, way.tp, way.pp, way.vpp, way.micro_batch
            try:
                # What a sweep proposes fits as planned; what the user gives may fit.
                used = check_memory(place, way, error=0.0 if all_of_them else MEMORY_ERROR)
                found.setdefault(key, (place, way, used))
            except PlanError as error:
                reason = error
    if not found:
        raise PlanError(f"--sweep: nothing is left to plan: {reason}")
    return list(found.values())
