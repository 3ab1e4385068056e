"""Validation on NVIDIA's published throughput of today's models on DGX H100s.

recipes.csv holds rows of Megatron-Bridge's docs/performance-summary.md and its archive, releases 26.02 to 26.06, as
tokens per second and GPU, with routing forced to be balanced. Shapes, dispatcher and overlap are those of its recipes,
which reduce gradients in bf16 and overlap all that Megatron can overlap. Columns that are equal in several releases are
one configuration, held against its newest release.

One row differs from the page: Qwen3 30B of release 26.02.01. The page repeats the layout of 26.02 (two stages, 8 expert
ranks) beside 1.77 times its throughput. The recipe at that release's tag, v0.3.1, has one stage, 16 expert ranks and
HybridEP, as the pages of later releases have, whose throughput it is; the recipe at 26.02's tag, v0.3.0, has DeepEP.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

from optimus_cc_ext.tools.plan.hardware import CLUSTERS, Constant
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import MODELS, Model

__all__ = ["Configuration", "Judged", "configurations", "fitted_efficiency", "judged"]

RECIPES = Path(__file__).with_name("recipes.csv")
_CLUSTER = CLUSTERS["h100-ndr400"]
_SIZES = ("gpus", "batch", "micro_batch", "tp", "pp", "cp", "vpp", "ep")
_LEAST_EFFICIENCY = 0.1


@dataclass(frozen=True)
class Configuration:
    """A model and layout with its published seconds per iteration, by release."""

    name: str
    job: Job
    seconds: dict[str, float]

    @property
    def published(self) -> float:
        """The seconds of the newest release."""
        return self.seconds[max(self.seconds)]

    @property
    def spread(self) -> float:
        """The largest published seconds over the smallest, minus 1."""
        return max(self.seconds.values()) / min(self.seconds.values()) - 1

    def predicted(self, efficiency: float | None = None) -> float:
        """Return the predicted seconds, with another `Gpu.mixture_efficiency` if `efficiency` is given."""
        cluster = _CLUSTER
        if efficiency is not None:
            constant = Constant(efficiency, "fitted", "trial")
            cluster = replace(cluster, gpu=replace(cluster.gpu, mixture_efficiency=constant))
        return iteration(cluster, self.job).seconds

    @property
    def modelled(self) -> bool:
        """False for DeepEP, which is planned as HybridEP and took 1.8 times as long in the one public row that has
        it.
        """
        return self.job.dispatcher != "deepep"

    @cached_property
    def operations(self) -> float:
        """Operations of one GPU in an iteration: six for each parameter that a token meets, and causal attention."""
        model: Model = self.job.model
        met = model.shared_parameters + model.embedding_parameters
        if model.mixture:
            met += model.routed_parameters * model.mixture.top_k // model.mixture.experts
        attention = 6 * model.layers * model.heads * model.head_width * model.sequence
        return (6 * met + attention) * self.job.batch * model.sequence / self.job.gpus


def configurations() -> tuple[list[Configuration], list[str]]:
    """Return the configurations of recipes.csv, and why others cannot be planned."""
    found: dict[tuple[str, ...], Configuration] = {}
    left_out: dict[str, None] = {}
    with RECIPES.open(newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if row["model"] not in MODELS:
                left_out[f"{row['model']}: a hybrid of attention and Mamba layers is not modelled"] = None
                continue
            key = tuple(value for name, value in row.items() if name not in ("release", "tokens_per_second_per_gpu"))
            job = _job(row)
            tokens = job.batch * job.model.sequence / job.gpus
            name = f"{row['model']}, tensor {job.tp} x pipeline {job.pp} x context {job.cp}, experts on {job.ep}"
            name += ", DeepEP" if job.dispatcher == "deepep" else ""
            each = found.setdefault(key, Configuration(name, job, {}))
            each.seconds[row["release"]] = tokens / float(row["tokens_per_second_per_gpu"])
    return list(found.values()), list(left_out)


def _job(row: dict[str, str]) -> Job:
    model = replace(MODELS[row["model"]], sequence=int(row["sequence"]))
    sizes = {name: int(row[name]) for name in _SIZES}
    # Where layers do not divide among chunks, the recipes count the embedding and the loss as layers.
    uneven = model.layers % (sizes["pp"] * sizes["vpp"]) > 0
    return Job(
        model=model, **sizes,  # type: ignore[arg-type]
        precision="fp8" if row["precision"] == "fp8" else "bf16",
        sequence_parallel=sizes["tp"] > 1, tp_overlap=sizes["tp"] > 1 and model.mixture is None,
        overlap_grad_reduce=True, overlap_param_gather=True, distributed_optimizer=True, gradient_bytes=2,
        dispatcher=row["dispatcher"], expert_overlap=row["expert_overlap"] == "1",  # type: ignore[arg-type]
        embedding_slot=uneven, loss_slot=uneven,
    )  # fmt: skip


def fitted_efficiency(rows: Sequence[Configuration]) -> float:
    """Return the efficiency of a mixture with the smallest sum of squared logarithmic errors on `rows`."""

    def loss(efficiency: float) -> float:
        return sum(math.log(each.predicted(efficiency) / each.published) ** 2 for each in rows)

    low, high = _LEAST_EFFICIENCY, 1.0
    for _ in range(20):
        third = (high - low) / 3
        low, high = (low, high - third) if loss(low + third) < loss(high - third) else (low + third, high)
    return (low + high) / 2


@dataclass(frozen=True)
class Judged:
    """A configuration with relative errors, each by constants that no row of its model was fitted on."""

    configuration: Configuration
    error: float
    by_rate: float
    """Error of a predictor of constant TFLOP/s, the mean of all other models' configurations."""

    by_rate_of_kind: float | None
    """Error of a predictor of the other mixtures' mean TFLOP/s; None for a dense model."""


def judged(rows: Sequence[Configuration]) -> list[Judged]:
    """Return every configuration with its errors, one model left out after the other. Dense models have nothing that is
    fitted on any of these rows.
    """
    found = []
    for each in rows:
        others = [other for other in rows if other.job.model != each.job.model and other.modelled]
        alike = [other for other in others if other.job.model.mixture]
        mixture = each.job.model.mixture is not None
        predicted = each.predicted(fitted_efficiency(alike) if mixture else None)
        found.append(
            Judged(
                each,
                predicted / each.published - 1,
                each.operations / _rate(others) / each.published - 1,
                each.operations / _rate(alike) / each.published - 1 if mixture else None,
            )
        )
    return found


def _rate(rows: Sequence[Configuration]) -> float:
    """Return the geometric mean of the operations per second of `rows`, each model counted once."""
    by_model: dict[Model, list[float]] = {}
    for each in rows:
        by_model.setdefault(each.job.model, []).append(math.log(each.operations / each.published))
    return math.exp(fmean(fmean(logs) for logs in by_model.values()))
