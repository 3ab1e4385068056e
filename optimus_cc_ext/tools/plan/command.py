"""`optimus-cc plan`: predicts the seconds per iteration on a cluster, vanilla and compressed, each with its
uncertainty.
"""

import argparse
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from optimus_cc_ext.config.flags import add_flags
from optimus_cc_ext.config.presets import config_of
from optimus_cc_ext.errors import run_command
from optimus_cc_ext.tools.plan import PlanError, tables, validate
from optimus_cc_ext.tools.plan.answer import answer_lines, answers, class_of, recommended, why
from optimus_cc_ext.tools.plan.flags import job_of, layout_flags
from optimus_cc_ext.tools.plan.hardware import CLUSTERS, Cluster, cluster_of
from optimus_cc_ext.tools.plan.left_out import left_out
from optimus_cc_ext.tools.plan.measured import calibrated, read_run, stated_run
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.nccl_tests import with_nccl_tests
from optimus_cc_ext.tools.plan.recipes import configurations, judged
from optimus_cc_ext.tools.plan.shapes import MODELS
from optimus_cc_ext.tools.plan.validate import band_of
from optimus_cc_ext.tools.plan.variants import VARIANTS, Band, Sweep, layout_of, points, variants
from optimus_cc_ext.tools.report import require as require_report
from optimus_cc_ext.tools.report.table import printed

__all__ = ["add_arguments", "run"]

SWEPT = ("balanced", "DP gradients int4", "paper")
"""The variants that a sweep compares with vanilla if no flags of ours are given."""


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
    parser.add_argument(
        "--output",
        type=Path,
        help="folder for CSV, JSON, a page with pictures and a Perfetto trace; or a file of a grid of plans, over "
        "networks, replicas on a node, batches and formats: FILE.html, a page on which one is chosen, FILE.csv, or a "
        "picture, FILE.svg or FILE.png",
    )
    parser.add_argument(
        "--validate",
        nargs="?",
        const="",
        metavar="FILE.csv",
        help="compare predictions with published iteration times, or with those in FILE.csv",
    )
    parser.add_argument(
        "flags", nargs=argparse.REMAINDER, metavar="-- FLAGS", help="Megatron's flags for model and layout, and ours"
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; return the exit status: 0, 1 (validation found too large errors), or 2 (bad input)."""
    return run_command(lambda: _plan(options) if options.validate is None else _validate(options))


def _validate(options: argparse.Namespace) -> int:
    rows, left_out = [], []
    for path in [Path(options.validate)] if options.validate else validate.SHIPPED:
        more, without = validate.read_rows(path)
        rows += more
        left_out += [f"{path}: {reason}" for reason in without]
    if not rows:
        raise PlanError("; ".join(left_out))
    found, shown = validate.campaigns(rows), []
    if not options.validate:
        today, not_modelled = configurations()
        shown = [tables.recipes(judged(today))]
        for reason in not_modelled:
            print(f"not judged: {reason}", file=sys.stderr)
    print(printed([*tables.validation(rows, found), *shown], options.format), end="")
    for reason in left_out:
        print(f"error: row left out: {reason}", file=sys.stderr)
    return 0 if not left_out and all(campaign.good for campaign in found) else 1


def _plan(options: argparse.Namespace) -> None:
    if options.output or options.sweep:
        require_report()
    cluster, job, others, measured = _basis(options)
    own, unread = _own(others, job)
    if options.output and options.output.suffix:
        _grid(options, cluster, job, _taken(_flags(options), others), own)
        return
    if options.sweep:
        _sweep(options, replace(cluster, error=0.0), job, own)  # a log's error holds for its own number of nodes
        return
    band = Band(cluster, job)
    left, unread = left_out(cluster, job, unread, band.vanilla, band_of(cluster.gpu, job))
    found, said = variants(cluster, job, band, own), answers(band, job)
    if options.why:
        traffic = class_of(options.why)
        print("\n".join(why(cluster, job, next(each for each in said if each.traffic is traffic), found[0])))
        return
    chosen = recommended(cluster, job, band, said, found[0])
    found += [chosen] if chosen.flags else []
    shown = [tables.parts(job, found, chosen), tables.summary(found), tables.needs(job, found, chosen)]
    constants = tables.constants(cluster)
    lines = [
        *answer_lines(cluster, job, said, chosen, found, layout_flags(job)),
        *measured,
        *tables.lines(cluster, job, found, chosen),
        *left,
        *([f"Not part of a plan: {' '.join(unread)}"] if unread else []),
        *(constants if options.constants else []),
    ]
    if options.format == "table":
        print("\n".join(lines) + "\n")
    print(printed(shown[1:2] if options.format == "csv" else shown, options.format), end="")
    if options.output:
        from optimus_cc_ext.tools.plan.page import write_plan

        write_plan(options.output, job, found, chosen, shown, list(dict.fromkeys([*lines, *constants])))


def _flags(options: argparse.Namespace) -> list[str]:
    """Return the words after `--`."""
    return list(options.flags[1:] if options.flags[:1] == ["--"] else options.flags)


def _basis(options: argparse.Namespace) -> tuple[Cluster, Job, list[str], list[str]]:
    """Return the cluster, the job, the words that the planner does not read, and the lines about measurements.

    Raises:
        PlanError: an argument is missing or wrong, or a measurement cannot be used.
    """
    for wanted in ("cluster", "nodes"):
        if getattr(options, wanted) is None and not (wanted == "nodes" and options.run):
            also = ", which the log of --from does not say" if options.run else ", or --validate"
            raise PlanError(f"give --{wanted}{also}")
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
            return cluster, job, others, said
        if options.seconds <= 0:
            raise PlanError(f"--seconds: {options.seconds:g} is not a positive number")
        run = stated_run(options.seconds, job)
        cluster = calibrated(cluster, run)
        return cluster, job, others, [*said, *run.words(cluster.software_scale, cluster)]
    if options.seconds is not None:
        raise PlanError("--seconds: the log of --from gives the seconds. Leave one of the two out")
    run = read_run(options.run, flags, gpus, options.model)
    per_node = min(cluster.gpus_per_node, run.job.gpus)
    cluster = calibrated(replace(cluster, gpus_per_node=per_node), run)
    said += run.words(cluster.software_scale, cluster)
    if not run.flags:
        return cluster, *job_of(flags, gpus, options.model), said
    if options.model:
        raise PlanError("--model: the log of --from gives the model. Leave one of the two out")
    gpus = options.nodes * per_node if options.nodes else run.job.gpus
    job, others = job_of([*run.flags, *flags], gpus)
    if run.job.precision == "fp32":
        job = job.replace(precision="fp32", gradient_bytes=4)
    return cluster if job == run.job else replace(cluster, error=0.0), job, others, said


def _own(others: Sequence[str], job: Job) -> tuple[list[str], list[str]]:
    """Return our flags among those that `model` does not read, and the other ones.

    Raises:
        FlagError: one of our flags cannot work on this layout.
    """
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    _, unread = parser.parse_known_args(list(others))
    if own := _taken(others, unread):
        config_of(own, layout_of(job))
    return own, unread


def _taken(words: Sequence[str], left: Sequence[str]) -> list[str]:
    """Return the words that a parser took: all but the words `left`, which keep the order of the command line."""
    taken, rest = [], deque(left)
    for word in words:
        if rest and word == rest[0]:
            rest.popleft()
        else:
            taken.append(word)
    return taken


def _grid(options: argparse.Namespace, cluster: Cluster, job: Job, flags: Sequence[str], own: Sequence[str]) -> None:
    """Write the file of a grid of plans that the user asked for."""
    from rich.progress import Progress

    from optimus_cc_ext.tools.plan.grid import Question, planned_grid
    from optimus_cc_ext.tools.plan.grid_files import check_grid_file, write_grid

    check_grid_file(options.output)
    if options.run:
        raise PlanError(f"--output {options.output}: a grid is planned from Megatron's flags. Leave out --from")
    given = ("cluster", "nodes", "gpus_per_node", "nccl_tests", "model")
    words = [(f"--{name.replace('_', '-')}", getattr(options, name)) for name in given]
    typed = [str(word) for pair in words if pair[1] is not None for word in pair]
    question = Question(typed, cluster, job.gpus, options.model, flags, own)
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("points")
        grid = planned_grid(question, lambda done, count: bars.update(task, completed=done, total=count))
    write_grid(options.output, grid)
    print(f"wrote {options.output}: {len(grid.cells)} plans")


def _sweep(options: argparse.Namespace, cluster: Cluster, job: Job, own: Sequence[str]) -> None:
    from rich.progress import Progress

    named = {"yours": " ".join(own)} if own else {name: VARIANTS[name] for name in SWEPT}
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bars:
        task = bars.add_task("layouts")
        found = points(
            cluster, job, Sweep.parsed(options.sweep), list(named.values()),
            lambda done, count: bars.update(task, completed=done, total=count),
        )  # fmt: skip
    table = tables.sweep(found, list(named))
    print(printed([table], options.format), end="")
    if options.output:
        from optimus_cc_ext.tools.plan.page import write_sweep

        write_sweep(options.output, table, list(named))
