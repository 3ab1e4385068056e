"""The forecast of exact messages: it is near what steps were measured to take, and near the mean of a schedule."""

import csv
from argparse import Namespace
from statistics import fmean

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from optimus_cc_ext.compressors.formats import EXACT_BITS, EXACT_PEAK_BITS
from optimus_cc_ext.config.forecast import exact_bits, exact_forecast
from tests.shell_scripts import ROOT

DEVIATIONS = {"small-weights": 0.0156}
"""Standard deviation of the first weights in a case of the study, whose models have 0.0625 otherwise."""

STEPS = 1000

TABLES = 0.1
"""Bits of a value for tables and half words, in rows from before these were measured."""

OTHERS = {("weight-decay", "40"), ("weight-decay", "41")}
"""Steps without moments of earlier gradients."""


def _measured() -> list[tuple[str, float, float]]:
    """Return (row, forecast, measured bits) of the steps of Adam after the first ones, where gradients are clipped."""
    with (ROOT / "docs/exact-bits.csv").open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if row["kind"] == "all" and int(row["iteration"]) >= 20]
    return [
        (
            f"{row['model']}, {row['case']}, iteration {row['iteration']}",
            exact_bits(float(row["rate"]), DEVIATIONS.get(row["case"], 0.0625)),
            float(row["exact"] or float(row["rice"]) + TABLES),
        )
        for row in rows
        if "muon" not in row["model"]
        and row["case"] != "gradient-spike"
        and (row["case"], row["iteration"]) not in OTHERS
    ]


def test_the_forecast_of_a_step_is_within_15_percent_of_every_measured_one() -> None:
    found = _measured()
    assert len(found) >= 12
    # Where few values change, nearly all bits are the one of each value and those of tables.
    off = {row: abs(forecast / bits - 1) for row, forecast, bits in found}
    assert not {row: share for row, share in off.items() if share > 0.15}
    assert max(off[row] for row, _, bits in found if bits < 1.2) < 0.05


def _rates(style: str, options: Namespace, warm_up: float) -> list[float]:
    """Return the learning rates of a run, by Megatron's own schedule."""
    group = {"lr": 0.0, "weight_decay": 0.0}
    schedule = OptimizerParamScheduler(
        Namespace(param_groups=[group]), 0.0, options.lr, options.min_lr, int(warm_up * STEPS), STEPS, style,
        0.0, 0.0, STEPS, "constant", wsd_decay_steps=STEPS // 5, lr_wsd_decay_style="linear",
    )  # fmt: skip
    found = []
    for _ in range(STEPS):
        schedule.step(1)
        found.append(group["lr"])
    return found


@pytest.mark.parametrize("warm_up", [0.01, 0.1])
@pytest.mark.parametrize("least", [0.0, 3e-5, 2e-4])
@pytest.mark.parametrize(
    ("style", "off"), [("cosine", 0.1), ("linear", 0.1), ("constant", 0.1), ("WSD", 0.1), ("inverse-square-root", 0.3)]
)
def test_the_mean_is_near_that_of_megatrons_schedule_and_the_peak_is_its_highest(
    style: str, off: float, least: float, warm_up: float
) -> None:
    options = Namespace(lr=3e-4, min_lr=least, lr_decay_style=style, init_method_std=0.02)
    rates = _rates(style, options, warm_up)
    mean, peak = exact_forecast(options)
    assert mean == pytest.approx(fmean(map(exact_bits, rates)), rel=off)
    assert peak == pytest.approx(exact_bits(max(rates)), rel=0.01)


def test_small_weights_and_the_finer_places_of_fp16_take_more_bits_and_an_unknown_rate_the_usual_ones() -> None:
    assert exact_forecast(Namespace()) == exact_forecast(Namespace(lr=None)) == (EXACT_BITS, EXACT_PEAK_BITS)
    usual, half, small = (
        exact_forecast(Namespace(lr=1e-4, **others)) for others in ({}, {"fp16": True}, {"init_method_std": 0.0025})
    )
    assert half == small and half[0] > usual[0] + 1.5 and half[1] > usual[1] + 2
    assert exact_bits(0.0) < 1.2
