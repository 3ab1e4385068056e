"""A plan's constants from a run of the user: the log of vanilla Megatron, or the seconds of an iteration.

The log gives the job, by the arguments that Megatron prints, and the seconds of an iteration, which set
`Cluster.software_scale`. A log that was cut, mixed or appended to gives the last run's job and seconds, or is refused.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from pathlib import Path
from statistics import median, quantiles
from typing import NoReturn

from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.flags import NOT_MODELLED, job_of, parsed_flags
from optimus_cc_ext.tools.plan.hardware import Cluster
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.left_out import BOUNDS
from optimus_cc_ext.tools.plan.memory import memory
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.report.log_lines import log_files, parse_techniques, parse_trial, without_prefix

LEAST_LINES = 4
"""Smallest number of iterations in a log; the first half is not used."""

STATED_ERROR = 0.05
"""Error of the seconds that `--seconds` gives; assumed, because one number has no spread."""

USUAL_SCALE, UNSTEADY = (0.6, 1.7), 0.15
"""Scales of computation, and the spread or trend of the seconds, beyond which a plan says that something else is
slow.
"""

NEEDED = (
    "world_size", "num_layers", "hidden_size", "num_attention_heads", "seq_length", "global_batch_size",
    "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size",
)  # fmt: skip
"""Arguments without which a log gives no job."""

_TOGETHER = (
    "attention_backend", "accumulate_allreduce_grads_in_fp32", "add_bias_linear", "bf16", "context_parallel_size",
    "expert_model_parallel_size", "ffn_hidden_size", "fp16", "fp8", "gradient_accumulation_fusion",
    "group_query_attention", "kv_channels", "moe_router_topk", "moe_token_dispatcher_type", "normalization",
    "num_experts", "num_layers_per_virtual_pipeline_stage", "num_query_groups", "overlap_grad_reduce",
    "overlap_param_gather", "position_embedding_type", "recompute_granularity", "sequence_parallel", "swiglu",
    "untie_embeddings_and_output_weights", "use_distributed_optimizer",
)  # fmt: skip
"""Arguments that every Megatron with the first one has, so that a table which lacks another one has lost a line."""

_BEGIN, _END = re.compile(r"-{3,} arguments -{3,}"), re.compile(r"-{3,} end of arguments -{3,}")
_ARGUMENT = re.compile(r"(\w+) (\.{2,}) (.*)$")
_CUT_ARGUMENT = re.compile(r"\s+\w+(?: \.*)?\s*$")
_ITERATION = re.compile(r"iteration\s+(\d+)/\s*\d+ \|(.*)$")
_ELAPSED = re.compile(r"elapsed time per iteration \((ms|s)\): ([\d.]+) \|")
_SAME = {
    "global_batch_size": re.compile(r"global[ _]batch[ _]size: +(\d+) \|"),
    "world_size": re.compile(r"world[ _]size: +(\d+) \|"),
}
"""Numbers that an iteration's line may repeat, by their arguments."""

_PADDED = re.compile(r"padded vocab .*new size: (\d+)\)")
_MICRO_BATCHES = re.compile(r"setting number of micro-?batches to constant (\d+)$")
_PARAMETERS = re.compile(r"number of parameters on \(.*\) model parallel rank \(0(?:, 0)*\): (\d+)$")
_OFF = {"disable-bias-linear": "add_bias_linear", "no-gradient-accumulation-fusion": "gradient_accumulation_fusion"}
"""Switches, each with the argument that it sets to False."""

_RENAMED = {"fp8-format": "fp8"}
_OLDER = {
    "model_parallel_size": "tensor_model_parallel_size",
    "intra_layer_model_parallel_size": "tensor_model_parallel_size",
    "inter_layer_model_parallel_size": "pipeline_model_parallel_size",
    "batch_size": "micro_batch_size",
}
"""Arguments of older Megatrons, with today's names."""

PARAMETERS_ERROR = 0.1
"""Relative difference between the parameters of the first rank, as logged and as planned, beyond which an argument must
be wrong.
"""


@dataclass(frozen=True)
class MeasuredRun:
    """A run of vanilla Megatron, or the dense iterations of another run."""

    path: Path | str
    flags: tuple[str, ...]
    """Megatron's flags, as far as a plan reads them, from the arguments that the log prints."""

    job: Job
    seconds: float
    """Median of the second half of the logged iterations."""

    spread: float
    """Half of the range of the middle four fifths of the iterations behind `seconds`, relative to it."""

    lines: int = 0
    how: str = "as given"
    """Source of the seconds, if they are not of `lines`."""

    trend: float = 1.0
    """Median of the later half of the iterations behind `seconds`, divided by that of the earlier half."""

    def words(self, scale: float, cluster: Cluster) -> list[str]:
        """Return the lines about the calibration."""
        how = f"median of the last {self.lines - self.lines // 2} of {self.lines}, +- {100 * self.spread:.1f} %"
        said = [
            f"calibrated on {self.path}: {self.seconds:.3f} s an iteration ({how if self.lines else self.how}); "
            f"computation, and so compression, takes {scale:.3g} times the seconds planned for the {cluster.gpu.name}"
        ]
        if not USUAL_SCALE[0] <= scale <= USUAL_SCALE[1]:
            said.append(
                f"doubtful: {scale:.3g} times is outside of {USUAL_SCALE[0]} to {USUAL_SCALE[1]}. The whole difference "
                f"was put on computation: check --cluster, and measure {cluster.network.name} with --nccl-tests"
            )
        if self.spread > UNSTEADY or abs(self.trend - 1) > UNSTEADY:
            rise = f", {100 * (self.trend - 1):+.0f} % from their first to their second half" if self.lines else ""
            said.append(f"doubtful: the iterations behind it are not steady{rise}: give a log of a steady run")
        return said


@dataclass(frozen=True)
class _Log:
    """Lines of one file, without prefixes; the first one has number 1."""

    path: Path
    lines: list[str]
    begin: int = 0
    """Number of the line after the last table of arguments, or 0."""

    tables: int = 0

    def refuse(self, number: int, reason: str) -> NoReturn:
        raise PlanError(f"--from {self.path}, line {number}: {reason}")


def _read(path: Path) -> _Log:
    try:
        lines = [without_prefix(line) for line in path.read_text("utf-8", "replace").splitlines()]
    except OSError as error:
        raise PlanError(
            f"--from {path}: {error.strerror}: give a log, or a folder with *.txt, *.log or *.out"
        ) from None
    begins = [number for number, line in enumerate(lines, 1) if _BEGIN.search(line)]
    log = _Log(path, lines, tables=len(begins))
    if not begins:
        return log
    end = next((n for n, line in enumerate(lines[begins[-1] :], begins[-1] + 1) if _END.search(line)), None)
    if end is None:
        log.refuse(begins[-1], "the table of arguments that begins here has no end: the log is cut. Give the whole log")
    if again := next((n for n, line in enumerate(lines[end:], end + 1) if line.startswith("using world size:")), None):
        log.refuse(again, "another run begins here without its table of arguments: give the log of one run")
    return replace(log, begin=end)


def read_run(path: Path, flags: Sequence[str] = (), gpus: int = 0, model: str | None = None) -> MeasuredRun:
    """Read a log, or those of a folder, because Megatron prints its arguments on the first rank and its iterations on
    the last one.

    If there is no table of arguments, `flags`, `gpus` and `model` give the job.

    Raises:
        PlanError: the file is missing, or lacks arguments or iterations, or they are of several runs, or the run was
            compressed without a trial; the message names the line.
    """
    logs = [_read(each) for each in log_files(path)]
    if not logs:
        raise PlanError(f"--from {path}: a folder without logs: give a log, or a folder with *.txt, *.log or *.out")
    tables = [log for log in logs if log.tables]
    logged = [log for log in logs if any(_ITERATION.search(line) for line in log.lines[log.begin :])]
    for found, what in ((tables, "tables of arguments"), (logged, "iterations")):
        if len(found) > 1:
            raise PlanError(f"--from {path}: {what} in {' and '.join(each.path.name for each in found)}: give one run")
    if tables and logged and tables != logged and tables[0].tables > 1:
        tables[0].refuse(tables[0].begin, f"the {tables[0].tables}th run begins here, but {logged[0].path.name} does "
                         "not say where. Give the logs of one run")  # fmt: skip
    if tables:
        arguments = _arguments(tables[0])
        flags, gpus = _flags(tables[0], arguments), int(arguments["world_size"][0])
        job = _job(tables[0], arguments, flags, gpus)
    elif (flags or model) and gpus:
        arguments = {}
        job, _ = job_of(flags, gpus, model)
    else:
        last = f" up to line {len(logs[0].lines)}, its last one" if len(logs) == 1 else ""
        raise PlanError(
            f"--from {path}: no table 'arguments', which Megatron's first rank prints{last}: give a log with it, or "
            "--nodes and Megatron's flags after --"
        )
    for log in logs:
        on = next((said for line in log.lines[log.begin :] if (said := parse_techniques(line))), "every")
        if not on.startswith("every"):
            return _of_trial(path, tuple(flags) if tables else (), job, logs, on)
    batch = int(arguments["global_batch_size"][0]) if arguments else job.batch if "--global-batch-size" in flags else 0
    seconds = _seconds(logged[0], {"global_batch_size": batch, "world_size": gpus}) if logged else []
    if len(seconds) < LEAST_LINES:
        where = f"after line {(logged or tables or logs)[0].begin}"
        raise PlanError(
            f"--from {path}: {len(seconds)} lines with 'elapsed time per iteration (ms)' {where}, at least "
            f"{LEAST_LINES} are needed: give a longer log, or --log-interval 1"
        )
    return _measured(path, tuple(flags) if tables else (), job, seconds)


def _measured(path: Path, flags: tuple[str, ...], job: Job, seconds: list[float]) -> MeasuredRun:
    steady = seconds[len(seconds) // 2 :]
    tenths, half = quantiles(steady, n=10, method="inclusive"), len(steady) // 2
    spread = (tenths[-1] - tenths[0]) / 2 / median(steady)
    trend = median(steady[-half:]) / median(steady[:half])
    return MeasuredRun(path, flags, job, median(steady), spread, len(seconds), trend=trend)


def _of_trial(path: Path, flags: tuple[str, ...], job: Job, logs: Sequence[_Log], on: str) -> MeasuredRun:
    """Return a compressed run by the dense iterations of its trial.

    Raises:
        PlanError: no trial was logged.
    """
    found = [seconds for log in logs for line in log.lines[log.begin :] if (seconds := parse_trial(line))]
    if not found:
        raise PlanError(
            f"--from {path}: the run is compressed ({on}), and has no line 'optimus-cc: iterations .. dense .. s' of a "
            "trial: give the log of a run without compression"
        )
    middle, least, most = found[-1]
    return MeasuredRun(path, flags, job, middle, (most - least) / 2 / middle, how="dense iterations of its trial")


def stated_run(seconds: float, job: Job) -> MeasuredRun:
    """Return a run of which only the seconds of an iteration are known."""
    return MeasuredRun("--seconds", (), job, seconds, STATED_ERROR)


Arguments = dict[str, tuple[str, int]]
"""Arguments by name: the value, and the number of its line."""


def _arguments(log: _Log) -> Arguments:
    """Return the last table of arguments, with today's names."""
    found: Arguments = {}
    begin = max(number for number, line in enumerate(log.lines[: log.begin], 1) if _BEGIN.search(line))
    table = list(enumerate(log.lines[begin : log.begin - 1], begin + 1))
    read = [_argument(flag) for flag, *_ in parsed_flags()]
    widths = Counter(len(match[1] + match[2]) for _, line in table if (match := _ARGUMENT.search(line)))
    for number, line in table:
        if match := _ARGUMENT.search(line):
            # Megatron fills all names with dots to one width; only a longer name has two of them.
            if len(match[2]) > 2 and len(match[1] + match[2]) != widths.most_common(1)[0][0]:
                log.refuse(number, f"argument {match[1]!r} is cut or mixed with another line. Give the whole log")
            found[match[1]] = match[3].strip(), number
        elif _CUT_ARGUMENT.match(line) and any(name.startswith(line.strip(" .")) for name in (*NEEDED, *read)):
            log.refuse(number, f"argument {line.strip(' .')!r} has no value: the line is cut. Give the whole log")
    for old, name in _OLDER.items():
        if found.get(old, ("None", 0))[0] != "None" and name not in found:
            found[name] = found[old]
            if old == "model_parallel_size":  # these Megatrons had no pipelines
                found.setdefault("pipeline_model_parallel_size", ("1", found[old][1]))
    if found.get("checkpoint_activations", ("",))[0] == "True":
        found["recompute_granularity"] = "full", found["checkpoint_activations"][1]
    needed = (*NEEDED, *(_TOGETHER if _TOGETHER[0] in found else ()))
    if missing := [name for name in needed if name not in found]:
        log.refuse(log.begin, f"the table that ends here has no argument {', '.join(missing)}: give a whole log of "
                   "Megatron-LM, or --seconds with Megatron's flags")  # fmt: skip
    for name in NEEDED:
        if not found[name][0].isdecimal():
            log.refuse(found[name][1], f"{name} {found[name][0]!r} is not a whole number: the line is cut or mixed")
    padded = [match for line in log.lines[log.begin :] if (match := _PADDED.search(line))]
    return found | ({"padded_vocab_size": (padded[0][1], log.begin)} if padded else {})


def _argument(flag: str) -> str:
    """Return the argument that a flag sets."""
    return _OFF.get(flag, _RENAMED.get(flag, flag.replace("-", "_")))


def _flags(log: _Log, found: Arguments) -> tuple[str, ...]:
    """Return the flags that give the arguments `found`: those of a plan, and those that it cannot contain."""
    words = []
    for flag, switch, whole in parsed_flags():
        value, number = found.get(_argument(flag), ("None", 0))
        if switch and value not in ("True", "False", "None", "0", "1"):
            log.refuse(number, f"{flag} {value!r} is neither True nor False: the line is cut or mixed with another one")
        if switch:
            words += [f"--{flag}"] if value == str(flag not in _OFF) else []
        elif value not in ("None", "0"):
            if whole and not value.isdecimal():
                log.refuse(number, f"{flag} {value!r} is not a whole number: the line is cut or mixed with another one")
            value = value.removeprefix("AttnBackend.")
            words += [f"--{flag}", *(re.findall(r"'([^']+)'", value) or [value])]
    for flag in (*NOT_MODELLED, *(each.removeprefix("--") for each in BOUNDS)):
        value, _ = found.get(flag.replace("-", "_"), ("None", 0))
        if value not in ("None", "False"):
            words += [f"--{flag}", *([] if value == "True" else re.findall(r"[\w.]+", value))]
    return tuple(words)


def _job(log: _Log, found: Arguments, flags: Sequence[str], gpus: int) -> Job:
    """Return the job of the arguments, which other lines of the log must confirm."""
    try:
        job, _ = job_of(flags, gpus)
    except PlanError as error:
        raise PlanError(f"--from {log.path}, the table that ends in line {log.begin}: {error}") from None
    if "True" not in (found.get("bf16", ("",))[0], found.get("fp16", ("",))[0]):
        job = job.replace(precision="fp32", gradient_bytes=4)
    after = log.lines[log.begin :]
    logged = next((int(match[1]) for line in after if (match := _PARAMETERS.search(line))), None)
    planned = job.parameters_on(0) + job.routed_on(0) + job.embeddings_on(0)
    uneven = job.model.mixture and job.model.dense_layers and job.pp > 1
    batches = next((int(match[1]) for line in after if (match := _MICRO_BATCHES.search(line))), None)
    data, _ = found.get("data_parallel_size", ("", 0))
    ranks = prod((job.tp, job.pp, job.cp, int(data))) if data.isdecimal() else gpus
    for wrong, reason in (
        (ranks != gpus, f"tensor x pipeline x context x data-parallel size is {ranks}, and world_size {gpus}"),
        (batches not in (None, job.micro_batches), f"{batches} micro-batches are logged, {job.micro_batches} follow "
         "from the sizes of batch and micro-batch"),
        (logged and not uneven and abs(planned / logged - 1) > PARAMETERS_ERROR, f"the first rank has {logged} "
         f"parameters, and {planned} follow from the arguments"),
        *((found.get(f"encoder_{name}", found[name])[0] not in (found[name][0], "None"), f"{name} is "
           f"{found[name][0]}, and encoder_{name} {found.get(f'encoder_{name}', found[name])[0]}")
          for name in ("num_layers", "seq_length")),
    ):  # fmt: skip
        if wrong:
            log.refuse(log.begin, f"the arguments that end here contradict the log: {reason}. A line is cut, or the "
                       "log is of several runs: give the whole log of one run")  # fmt: skip
    return job


def _seconds(log: _Log, expected: dict[str, int]) -> list[float]:
    """Return the seconds of each iteration, in their order, of the run that begins after the last table."""
    found: dict[int, tuple[float, int]] = {}
    other = 0
    for number, line in enumerate(log.lines[log.begin :], log.begin + 1):
        if (match := _ITERATION.search(line)) is None:
            continue
        if (elapsed := _ELAPSED.search(match[2])) is None:
            if number == len(log.lines):
                break  # this line is being written
            log.refuse(number, "an iteration without 'elapsed time per iteration (ms)': the line is cut")
        differs = [
            f"{name} {said[1]}, and {wanted} in the arguments"
            for name, wanted in expected.items()
            if wanted and (said := _SAME[name].search(match[2])) and int(said[1]) != wanted
        ]
        if differs:
            other, why = number, differs[0]
            continue
        seconds = float(elapsed[2]) / (1e3 if elapsed[1] == "ms" else 1)
        if found.setdefault(int(match[1]), (seconds, number))[0] != seconds:
            log.refuse(number, f"iteration {match[1]} once more, with other seconds than in line "
                       f"{found[int(match[1])][1]}: give the log of one run")  # fmt: skip
    if other > max((number for _, number in found.values()), default=0):
        log.refuse(other, f"{why}: give a log of this size, from after a --rampup-batch-size")
    steps = sorted(found)
    intervals = [later - step for step, later in pairwise(steps[1:])]  # the first one is logged at any interval
    if len(set(intervals)) > 1:
        step = steps[1 + max(range(len(intervals)), key=intervals.__getitem__)]
        log.refuse(
            found[step][1], f"iteration {step} is not followed by the next one: lines are lost. Give a whole log"
        )
    return [found[step][0] for step in steps]


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
            f"{run.path}: messages alone take {network:.3f} s on {cluster.network.name}, more than the run's "
            f"{run.seconds:.3f} s: give --nccl-tests, or a cluster file with the network's node_rate"
        )
    scale = solved(seconds, run.seconds)
    coding = cluster.coding_scale * scale / cluster.software_scale
    fits = min(1.0, cluster.gpu.memory / sum(memory(run.job).values()))
    return replace(cluster, software_scale=scale, coding_scale=coding, memory_scale=fits, error=max(run.spread, 0.01))
