"""Published iteration times, and the error bands of plans that were judged on them.

public_timings.csv holds 116 runs on A100s: Narayanan et al. 2021 (arXiv 2104.04473, tables 1 and 2, seconds from their
TFLOP/s by their formula), Korthikanti et al. 2022 (arXiv 2205.05198, table 5), vTrain (Bang et al. 2024, arXiv
2312.12391, its public ground truth), BLOOM (bigscience's chronicles), MT-NLG (Smith et al. 2022, arXiv 2201.11990).

mlperf.csv holds 18 runs on H100s: NVIDIA's GPT-3 submissions to MLPerf Training v3.0 to v4.1. The layout of v3.1 on 768
GPUs and more is assumed to be that on 512.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.hardware import Cluster, Constant, Gpu, gpu_of, network_of
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import Model

SHIPPED = tuple(Path(__file__).with_name(name) for name in ("public_timings.csv", "mlperf.csv"))
BAND = {"A100": 0.16, "H100": 0.07}
"""Error that nine of ten held-out rows do not exceed: the error band of a plan's seconds. A test compares it with the
rows.
"""

MIXTURE_BAND = 0.12
"""Error band of a mixture of experts: three times the largest error of the three models of recipes.csv, each predicted
without its own rows, because the form of the one constant was chosen with these errors in view. A test compares it with
the rows.
"""

LARGE_MIXTURE_BAND = 0.36
"""Error band of a mixture of experts with micro-batches above 1, on the rows of Pai-Megatron-Patch 658 (Qwen3 235B,
micro-batches of 4), which are planned 31 and 35 % too slow. The rows behind `Gpu.mixture_efficiency` have micro-batches
of 1: what it holds for a share of the kernels' speed is mostly a fixed time of each layer, which large ones regain.
"""

UNTRIED_BAND = 0.25
"""Error band on a GPU without published rows; assumed."""

DEEPSPEED = ("BLOOM", "MT-NLG")
"""Beginnings of the names of campaigns that ran forks of Megatron; one scale from three rows stands for the fork's
speed.
"""

SYNCHRONOUS = ("BLOOM",)
"""Prefixes of the names of campaigns that ran with `CUDA_LAUNCH_BLOCKING=1`: the host waits for each kernel before it
launches the next one, so the time of a launch is not hidden.
"""

LAUNCHES = Constant(8.7e-4, "measured", "200B on 80 A100s, chronicles-prequel.md: 97.2 TFLOPS without, 91.0 with it")
"""Seconds that these launches add to a forward pass through one layer; a backward pass has twice that. The runs of 200B
recompute everything, in micro-batches of 1 and 8 layers a stage: 3.5 ms for each layer and micro-batch.
"""

SMALL = 1536
_MODEL = ("layers", "hidden", "heads", "sequence", "vocabulary")
_WHOLE = ("gpus", "tp", "pp", "vpp", "micro_batch", "batch", *_MODEL)
_ONE_OF = {
    "recompute": ("none", "sel", "full"),
    "sequence_parallel": ("0", "1"),
    "tp_overlap": ("0", "1"),
    "precision": ("fp16", "bf16", "fp8"),
}
_COLUMNS = ("campaign", "model", "gpu", "network", "recompute", *_WHOLE, "sequence_parallel", "seconds")


@dataclass(frozen=True)
class Row:
    """One published run."""

    campaign: str
    model: str
    cluster: Cluster
    job: Job
    seconds: float
    line: int

    @property
    def fitted(self) -> bool:
        """True if constants of `hardware` were fitted on this row."""
        if self.campaign == "Nar-T1":
            return self.model in ("1.7B", "7.5B", "39B", "145B", "530B")
        return (self.campaign == "Kor-T5" and self.job.recompute == "full") or self.small_mlperf

    @property
    def small_mlperf(self) -> bool:
        """True for a small run that gives the scale of its MLPerf round."""
        return self.campaign.startswith("MLPerf") and self.job.gpus <= SMALL

    def ratio(self, gpu: Gpu | None = None) -> float:
        """Return predicted seconds divided by published seconds."""
        cluster = replace(self.cluster, gpu=gpu) if gpu else self.cluster
        return iteration(cluster, self.job).seconds / self.seconds


def shipped() -> list[Row]:
    """Return all rows of `SHIPPED`."""
    return [row for path in SHIPPED for row in read_rows(path)[0]]


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a CSV with the columns of public_timings.csv, and the reasons why other rows cannot be
    planned.

    Optional columns: `precision` (fp16, bf16, fp8; default fp16 on an A100, bf16 on an H100) and `tp_overlap` (0, 1).

    Raises:
        PlanError: a column is missing, or a value is of the wrong kind; the message names line and column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as stream:
            reader = csv.DictReader(stream)
            if missing := [name for name in _COLUMNS if name not in (reader.fieldnames or ())]:
                raise PlanError(f"{path}: line 1: no column {', '.join(missing)}. Give {','.join(_COLUMNS)}")
            cells = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: {error}") from error
    if not cells:
        raise PlanError(f"{path}: the file has no rows. Give one with rows below its header")
    found: list[Row] = []
    left_out = []
    for line, row in cells:
        numbers = {column: _number(path, line, column, row[column]) for column in (*_WHOLE, "seconds")}
        for column, allowed in _ONE_OF.items():
            if (row.get(column) or allowed[0]) not in allowed:
                said = f"{path}: line {line}, column {column}: {row[column]!r} is not one of {', '.join(allowed)}"
                raise PlanError(said)
        try:
            gpu = gpu_of(row["gpu"] or "")
            if (row["campaign"] or "").startswith(SYNCHRONOUS):
                gpu = replace(gpu, layer_overhead=gpu.layer_overhead + LAUNCHES)
            cluster = Cluster(gpu=gpu, network=network_of(row["network"] or ""))
        except PlanError as error:
            raise PlanError(f"{path}: line {line}: {error}") from error
        try:
            job = _job(row, {column: int(numbers[column]) for column in _WHOLE})
            found.append(Row(row["campaign"] or "", row["model"] or "", cluster, job, numbers["seconds"], line))
        except PlanError as error:
            left_out.append(f"line {line}: {error}")
    return found, left_out


def _number(path: Path, line: int, column: str, cell: str | None) -> float:
    try:
        value = float(cell or "")
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise PlanError(f"{path}: line {line}, column {column}: {cell!r} is not a positive number")
    if column in _WHOLE and value != int(value):
        raise PlanError(f"{path}: line {line}, column {column}: {cell!r} is not a whole number")
    return value


def _job(cells: dict[str, str], sizes: dict[str, int]) -> Job:
    """Return the job of a row, with assumptions for settings that the columns do not give.

    A100s ran the Megatrons of 2021 and 2022: no overlaps, no fused attention, the full optimizer state on every rank.
    H100s ran those of 2023, which have all of these.
    """
    recent, campaign = cells["gpu"] == "H100", cells["campaign"] or ""
    precision = cells.get("precision") or ("bf16" if recent else "fp16")
    cast = precision == "bf16" and campaign.startswith(DEEPSPEED)  # DeepSpeed's BF16_Optimizer casts
    return Job(
        model=Model(**{name: sizes[name] for name in _MODEL}),  # type: ignore[arg-type]
        **{name: size for name, size in sizes.items() if name not in _MODEL},  # type: ignore[arg-type]
        recompute=cells["recompute"] or "none",  # type: ignore[arg-type]
        sequence_parallel=cells["sequence_parallel"] == "1",
        precision=precision,  # type: ignore[arg-type]
        tp_overlap=cells.get("tp_overlap") == "1",
        gradient_bytes=4 if precision == "bf16" else 2,
        accumulation="fused" if recent else "cast" if cast else "added",
        scatter_gather=True,
        flash=recent,
        overlap_grad_reduce=recent,
        overlap_param_gather=recent,
        distributed_optimizer=recent,
    )


def band_of(gpu: Gpu, job: Job) -> float:
    """Return the relative error that the seconds of a plan may have."""
    band = BAND.get(gpu.name, UNTRIED_BAND)
    if not job.model.mixture:
        return band
    return max(band, MIXTURE_BAND if job.micro_batch == 1 else LARGE_MIXTURE_BAND)


def nearest(rows: Sequence[Row], cluster: Cluster, job: Job) -> Row | None:
    """Return the published run that is most similar to `job`, by logarithms of its sizes; None if there is none on this
    GPU.
    """

    def sizes(job: Job) -> list[float]:
        values = (job.gpus, job.model.parameters, job.tp, job.pp, job.micro_batch, job.micro_batches)
        return [math.log(value) for value in values]

    mine = [row for row in rows if row.cluster.gpu.name == cluster.gpu.name]
    return min(mine, key=lambda row: math.dist(sizes(row.job), sizes(job)), default=None)
