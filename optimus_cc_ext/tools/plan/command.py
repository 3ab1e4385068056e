"""`optimus-cc plan`: predicts the seconds per iteration on a cluster, vanilla and compressed, each with its
uncertainty.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from optimus_cc_ext.config.flags import add_flags
from optimus_cc_ext.config.presets import config_of
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.plan import PlanError, tables
from optimus_cc_ext.tools.plan.answer import answer_lines, answers, bounds, class_of, recommended, trials, why
from optimus_cc_ext.tools.plan.flags import Parser, job_of, read_words, taken, used_words
from optimus_cc_ext.tools.plan.hardware import CLUSTERS, Cluster, cluster_of
from optimus_cc_ext.tools.plan.left_out import left_out
from optimus_cc_ext.tools.plan.measured import calibrated, read_run, stated_run
from optimus_cc_ext.tools.plan.model import Job, layout_of
from optimus_cc_ext.tools.plan.nccl_tests import with_nccl_tests
from optimus_cc_ext.tools.plan.published import band_of
from optimus_cc_ext.tools.plan.shapes import MODELS
from optimus_cc_ext.tools.plan.variants import VARIANTS, Band, Sweep, Variant, points, variants
from optimus_cc_ext.tools.report import require as require_report
from optimus_cc_ext.tools.report.table import Table, printed

SWEPT = ("balanced", "DP gradients int4", "paper")
"""The variants that a sweep compares with vanilla if no flags of ours are given."""


MOVED = {"--output": "scripts.planned", "--validate": "scripts.planned.validate"}
"""Options of earlier versions, with the programs that do now what they did."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `optimus-cc plan`; the words after `--` are a Megatron command line."""
    parser.add_argument(
        "--cluster",
        help=f"cluster: {', '.join(CLUSTERS)}, another GPU and network such as h100-100gbe, or a JSON file such as "
        '{"gpu": "H100", "network": "100gbe"}',
    )
    parser.add_argument("--nodes", type=int, help="number of nodes")
    parser.add_argument(
        "--gpus-per-node",
        "--ranks-per-node",
        type=int,
        help="GPUs of each node, and so ranks (default: 8, or the cluster file's number)",
    )
    parser.add_argument("--model", help=f"model to plan: {', '.join(MODELS)} (default: the sizes in Megatron's flags)")
    parser.add_argument(
        "--from",
        dest="run",
        type=Path,
        metavar="RUN",
        help="log, or folder of logs, of a run without compression: it gives the model, the layout and the seconds of "
        "computation; --nodes plans it on another number of nodes. Where it has no table of arguments, --nodes and "
        "Megatron's flags give the job",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="seconds of an iteration of this job without compression, as any tool showed them: a log in one number",
    )
    parser.add_argument(
        "--nccl-tests",
        type=Path,
        metavar="FILE",
        help="output of all_reduce_perf or alltoall_perf on the cluster: it gives the network's rate and latency",
    )
    parser.add_argument(
        "--sweep",
        metavar="KEY=VALUES,...",
        help="plan many points: nodes=8..1250 (doubling) or nodes=8+16; link=hdr8+100gbe (networks); layout=given, all "
        "or best; batch=strong (constant) or weak (grows with the nodes)",
    )
    parser.add_argument(
        "--format", choices=("table", "csv", "json"), default="table", help="format of the output (default: table)"
    )
    parser.add_argument("--constants", action="store_true", help="also list all constants, with unit and source")
    parser.add_argument("--why", metavar="CLASS", help='explain the answer for one class, such as "DP gradients"')
    for option in MOVED:
        parser.add_argument(option, nargs="?", const="", help=argparse.SUPPRESS)
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="Megatron's flags for model and layout, and ours"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status: 0, or 2 (bad input)."""
    return run_command(lambda: _plan(options))


def _plan(options: argparse.Namespace) -> None:
    for option, program in MOVED.items():
        if getattr(options, option.lstrip("-")) is not None:
            raise PlanError(
                f"{option}: `python -m {program}` does this, in the folder that `optimus-cc files` prints. "
                "Leave the option out here"
            )
    if options.sweep:
        require_report()
        print(printed([swept(options)[0]], options.format), end="")
        return
    asked = asked_of(options)
    if options.why:
        print("\n".join(_explained(asked, options.why)))
        return
    answer = plan_of(asked)
    if options.format == "table":
        print("\n".join([*answer.lines, *(tables.constants(asked.cluster) if options.constants else [])]) + "\n")
    print(printed(answer.tables[1:2] if options.format == "csv" else answer.tables, options.format), end="")


@dataclass(frozen=True)
class Asked:
    """Parsed command line."""

    cluster: Cluster
    job: Job
    own: list[str]
    """Our flags."""

    unread: list[str]
    """Words that neither the planner nor we read."""

    measured: list[str]
    """Lines about measurements that were given."""

    megatron: list[str]
    """Megatron's flags after `--` that the planner read."""

    use: str
    """Megatron's flags with which training is the planned job."""


@dataclass(frozen=True)
class WholePlan:
    """A plan: its variants, the recommended one, lines and tables."""

    found: list[Variant]
    chosen: Variant
    lines: list[str]
    tables: list[Table]


def asked_of(options: argparse.Namespace) -> Asked:
    """Read the parsed arguments.

    Raises:
        PlanError: an argument is missing or wrong, or a measurement cannot be used.
        FlagError: one of our flags cannot work on this layout.
    """
    cluster, job, others, measured, has_flags = _basis(options)
    own, unread = _own(others, job)
    megatron = read_words(_flags(options))
    # A run has flags that no plan reads, so its own command line stays, and is changed.
    use = f"the flags of {options.run} and " if has_flags else ""
    use += shlex.join(megatron if has_flags else used_words(megatron, job))
    return Asked(cluster, job, own, unread, measured, megatron, use)


def plan_of(asked: Asked) -> WholePlan:
    """Plan the job with every variant, and with the user's flags, if any."""
    cluster, job = asked.cluster, asked.job
    band = Band(cluster, job)
    left, unread = left_out(cluster, job, asked.unread, band.vanilla, band_of(cluster.gpu, job))
    found, said = variants(cluster, job, band, asked.own), answers(band, job)
    chosen = recommended(cluster, job, band, said, found[0])
    found += [chosen] if chosen.flags else []
    lines = [
        *answer_lines(cluster, job, said, chosen, found, asked.use),
        *trials(band, found),
        *bounds(cluster, job, found),
        *asked.measured,
        *tables.lines(cluster, job, found, chosen),
        *left,
        *([f"Not part of a plan: {' '.join(unread)}"] if unread else []),
    ]
    shown = [tables.parts(job, found, chosen), tables.summary(found), tables.needs(cluster, job, found, chosen)]
    return WholePlan(found, chosen, lines, shown)


def _explained(asked: Asked, name: str) -> list[str]:
    band, traffic = Band(asked.cluster, asked.job), class_of(name)
    said = next(each for each in answers(band, asked.job) if each.traffic is traffic)
    return why(asked.cluster, asked.job, said, variants(asked.cluster, asked.job, band, asked.own)[0])


def _flags(options: argparse.Namespace) -> list[str]:
    """Return the words after `--`."""
    return list(options.flags[1:] if options.flags[:1] == ["--"] else options.flags)


def _basis(options: argparse.Namespace) -> tuple[Cluster, Job, list[str], list[str], bool]:
    """Return the cluster, the job, the words that the planner does not read, the lines about measurements, and True if
    a log gave the job.
    """
    for wanted in ("cluster", "nodes"):
        if getattr(options, wanted) is None and not (wanted == "nodes" and options.run):
            raise PlanError(f"give --{wanted}{', which the log of --from does not say' if options.run else ''}")
    cluster, said = cluster_of(options.cluster), list[str]()
    for name in ("nodes", "gpus_per_node"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise PlanError(f"--{name.replace('_', '-')}: {getattr(options, name)} is not a positive number")
    if options.gpus_per_node:
        cluster = replace(cluster, gpus_per_node=options.gpus_per_node)
    flags = _flags(options)
    if options.nccl_tests:
        cluster, line = with_nccl_tests(cluster, options.nccl_tests)
        said.append(line)
    gpus = (options.nodes or 0) * cluster.gpus_per_node
    if not options.run:
        job, others = job_of(flags, gpus, options.model)
        if options.seconds is None:
            return cluster, job, others, said, False
        if not 0 < options.seconds < inf:
            raise PlanError(f"--seconds: {options.seconds:g} is not a positive number")
        run = stated_run(options.seconds, job)
        cluster = calibrated(cluster, run)
        return cluster, job, others, [*said, *run.words(cluster.software_scale, cluster)], False
    if options.seconds is not None:
        raise PlanError("--seconds: the log of --from gives the seconds. Leave one of the two out")
    run = read_run(options.run, flags, gpus, options.model)
    per_node = min(cluster.gpus_per_node, run.job.gpus)
    cluster = calibrated(replace(cluster, gpus_per_node=per_node), run)
    said += run.words(cluster.software_scale, cluster)
    if not run.flags:
        return cluster, *job_of(flags, gpus, options.model), said, False
    if options.model:
        raise PlanError("--model: the log of --from gives the model. Leave one of the two out")
    gpus = options.nodes * per_node if options.nodes else run.job.gpus
    job, others = job_of([*run.flags, *flags], gpus)
    if run.job.precision == "fp32":
        job = job.replace(precision="fp32", gradient_bytes=4)
    return cluster if job == run.job else replace(cluster, error=0.0), job, others, said, True


def _own(others: Sequence[str], job: Job) -> tuple[list[str], list[str]]:
    """Return our flags among those that `model` does not read, and the other ones."""
    parser = add_flags(Parser(allow_abbrev=False, add_help=False))
    _, unread = parser.parse_known_args(list(others))
    if own := taken(others, unread):
        config_of(own, layout_of(job))
    return own, unread


def swept(options: argparse.Namespace) -> tuple[Table, list[str]]:
    """Return the table of a sweep, and the names of the variants in it."""
    from rich.progress import Progress

    asked = asked_of(options)
    cluster = replace(asked.cluster, error=0.0)  # a log's error holds for its own number of nodes
    named = {"yours": " ".join(asked.own)} if asked.own else {name: VARIANTS[name] for name in SWEPT}
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("layouts")
        found = points(
            cluster, asked.job, Sweep.parsed(options.sweep), list(named.values()),
            lambda done, count: bars.update(task, completed=done, total=count),
        )  # fmt: skip
    return tables.sweep(found, list(named)), list(named)
