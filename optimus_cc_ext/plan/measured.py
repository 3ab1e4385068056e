"""A plan's constants from measurements of the user: a log of vanilla Megatron, and a table of nccl-tests.

The log gives the job, by the arguments that Megatron prints, and the seconds of an iteration, which set
`Cluster.software_scale`. nccl-tests gives the rate and the latency of the network, or inside one node those of NVLink.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles

from optimus_cc_ext.plan import PlanError
from optimus_cc_ext.plan.flags import NOT_MODELLED, job_of, parsed_flags
from optimus_cc_ext.plan.hardware import Cluster, Constant
from optimus_cc_ext.plan.iteration import iteration
from optimus_cc_ext.plan.left_out import BOUNDS
from optimus_cc_ext.plan.model import Job
from optimus_cc_ext.plan.seconds import Group, all_reduce, all_to_all
from optimus_cc_ext.report.log_lines import parse_progress, parse_techniques

__all__ = ["MeasuredRun", "calibrated", "read_run", "solved", "with_nccl_tests"]

LEAST_LINES = 4
"""Smallest number of iterations in a log; the first half is not used."""

NEEDED = ("world_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "global_batch_size")
"""Arguments without which a log gives no job."""

_ARGUMENT = re.compile(r"^(?:\d+: )?\s*(\w+) \.{2,} (.*)$")
_PADDED = re.compile(r"padded vocab .*new size: (\d+)")
_OFF = {"disable-bias-linear": "add_bias_linear", "no-gradient-accumulation-fusion": "gradient_accumulation_fusion"}
"""Switches, each with the argument that it sets to False."""

_RENAMED = {"fp8-format": "fp8"}


@dataclass(frozen=True)
class MeasuredRun:
    """A run of vanilla Megatron."""

    path: Path
    flags: tuple[str, ...]
    """Megatron's flags, as far as a plan reads them, from the arguments that the log prints."""

    job: Job
    seconds: float
    """Median of the second half of the logged iterations."""

    spread: float
    """Half of the range of the middle four fifths of the iterations behind `seconds`, relative to it."""

    lines: int

    def words(self, scale: float, gpu: str) -> str:
        """Return the line about the calibration."""
        return (
            f"calibrated on {self.path}: {self.seconds:.3f} s an iteration (median of the last "
            f"{self.lines - self.lines // 2} of {self.lines}, +- {100 * self.spread:.1f} %); computation, and so "
            f"compression, takes {scale:.3g} times the seconds planned for the {gpu}"
        )


def read_run(path: Path) -> MeasuredRun:
    """Read a log, or all `*.txt`, `*.log` and `*.out` files of a folder, because Megatron prints its arguments on the
    first rank and its iterations on the last one.

    Raises:
        PlanError: the file is missing, or lacks arguments or iterations, or the run was compressed.
    """
    files = [each for end in ("txt", "log", "out") for each in sorted(path.glob(f"*.{end}"))]
    try:
        lines = [line for each in files or [path] for line in each.read_text("utf-8", "replace").splitlines()]
    except OSError as error:
        raise PlanError(
            f"--from {path}: {error.strerror}: give a log, or a folder with *.txt, *.log or *.out"
        ) from None
    found = {match[1]: match[2].strip() for line in lines if (match := _ARGUMENT.match(line))}
    if missing := [name for name in NEEDED if name not in found]:
        raise PlanError(
            f"--from {path}: no argument {', '.join(missing)}: give a log with the table 'arguments' that Megatron's "
            "first rank prints"
        )
    on = next((said for line in lines if (said := parse_techniques(line)) and not said.startswith("every")), None)
    if on:
        raise PlanError(f"--from {path}: the run is compressed ({on}): give the log of a run without compression")
    logged = [progress.seconds for line in lines if (progress := parse_progress(line)) and progress.seconds]
    if len(logged) < LEAST_LINES:
        raise PlanError(
            f"--from {path}: {len(logged)} lines with 'elapsed time per iteration (ms)', at least {LEAST_LINES} are "
            "needed: give a longer log, or --log-interval 1"
        )
    padded = [size for line in lines for size in _PADDED.findall(line)]
    found |= {"padded_vocab_size": padded[0]} if padded else {}
    flags, steady = _flags(found), logged[len(logged) // 2 :]
    job, _ = job_of(flags, int(found["world_size"]))
    if "True" not in (found.get("bf16"), found.get("fp16")):
        job = job.replace(precision="fp32", gradient_bytes=4)
    tenths = quantiles(steady, n=10, method="inclusive")
    spread = (tenths[-1] - tenths[0]) / 2 / median(steady)
    return MeasuredRun(path, flags, job, median(steady), spread, len(logged))


def _flags(found: dict[str, str]) -> tuple[str, ...]:
    """Return the flags that give the arguments `found`, by name: those of a plan, and those that it cannot contain."""
    words = []
    for flag, switch in parsed_flags():
        value = found.get(_OFF.get(flag, _RENAMED.get(flag, flag.replace("-", "_"))), "None")
        if switch:
            words += [f"--{flag}"] if value == str(flag not in _OFF) else []
        elif value not in ("None", "0"):
            value = value.removeprefix("AttnBackend.")
            words += [f"--{flag}", *(re.findall(r"'([^']+)'", value) or [value])]
    for flag in (*NOT_MODELLED, *(each.removeprefix("--") for each in BOUNDS)):
        value = found.get(flag.replace("-", "_"), "None")
        if value not in ("None", "False"):
            words += [f"--{flag}", *([] if value == "True" else re.findall(r"[\w.]+", value))]
    return tuple(words)


def solved(seconds: Callable[[float], float], wanted: float) -> float:
    """Return the number at which `seconds` gives `wanted`; both grow together. 0 if `seconds` is too large even at
    0.
    """
    low, high = 0.0, 1.0
    while seconds(high) < wanted and high < 1e12:
        high *= 4
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(middle) < wanted else (low, middle)
    return low


def calibrated(cluster: Cluster, run: MeasuredRun) -> Cluster:
    """Return the cluster with the software scale at which vanilla's iteration takes the run's seconds; compression is
    scaled alike.

    Raises:
        PlanError: the network alone takes longer.
    """

    def seconds(scale: float) -> float:
        return iteration(replace(cluster, software_scale=scale), run.job).seconds

    network = seconds(0.0)
    if network >= run.seconds:
        raise PlanError(
            f"--from {run.path}: messages alone take {network:.3f} s on {cluster.network.name}, more than the run's "
            f"{run.seconds:.3f} s: give --nccl-tests, or a cluster file with the network's node_rate"
        )
    scale = solved(seconds, run.seconds)
    coding = cluster.coding_scale * scale / cluster.software_scale
    return replace(cluster, software_scale=scale, coding_scale=coding, error=max(run.spread, 0.01))


_COLLECTIVES = {"all_reduce_perf": all_reduce, "alltoall_perf": all_to_all}


def with_nccl_tests(cluster: Cluster, path: Path) -> tuple[Cluster, str]:
    """Return the cluster with the network's rate and latency as nccl-tests measured them, and a line about them. A test
    inside one node gives NVLink's rate.

    Raises:
        PlanError: the file is missing, or is no output of all_reduce_perf or alltoall_perf with its ranks.
    """
    try:
        text = path.read_text("utf-8", "replace")
    except OSError as error:
        raise PlanError(f"--nccl-tests {path}: {error.strerror}: give the output of all_reduce_perf") from None
    hosts = re.findall(r"^#\s+Rank\s+\d+ .*?\bon\s+(\S+)", text, re.MULTILINE)
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+\d+\s+\w+\s+\w+\s+-?\d+\s", line)]
    sizes = {float(row[0]): float(row[5]) / 1e6 for row in rows if float(row[0])}
    name = next((each for each in _COLLECTIVES if each in text or each in path.name), None)
    for lacks, words in (
        (name is None, "the name all_reduce_perf or alltoall_perf, in the file or in its name"),
        (len(set(hosts)) == 0, "lines '#  Rank  0 .. on HOST', which list the ranks"),
        (len(sizes) < 2, "a table with two sizes or more"),
    ):
        if lacks:
            raise PlanError(f"--nccl-tests {path}: it lacks {words}: give the whole output of nccl-tests")
    nodes, (least, most) = len(set(hosts)), (min(sizes), max(sizes))
    group, travel = Group(len(hosts), -(-len(hosts) // nodes), 1), _COLLECTIVES[name or ""]

    def place(rate: float, hop: float) -> Cluster:
        line = Constant(rate, "measured", str(path))
        if nodes == 1:
            return replace(cluster, gpu=replace(cluster.gpu, nvlink=line))
        words = f"{cluster.network.name}, as measured"
        return replace(
            cluster,
            network=replace(cluster.network, name=words, node_rate=line, hop=Constant(hop, "measured", str(path))),
        )

    def rate_for(hop: float) -> float:
        return 1 / max(1e-15, solved(lambda slow: travel(place(1 / max(slow, 1e-15), hop), group, most), sizes[most]))

    def hop_for(rate: float) -> float:
        return solved(lambda slow: travel(place(rate, slow / 1e6), group, least), sizes[least]) / 1e6

    # The largest message gives the rate for a latency, the smallest one the latency for a rate.
    hop = hop_for(rate_for(cluster.network.hop))
    rate = rate_for(hop)
    said = f"{path}: {name} over {len(hosts)} ranks on {nodes} nodes: {rate / 1e9:.3g} GB/s"
    return place(rate, hop), f"{said} {'inside a node' if nodes == 1 else f'a node, {1e6 * hop:.3g} us a hop'}"
