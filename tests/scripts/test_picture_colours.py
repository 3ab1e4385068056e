"""Every colour of every picture has a value for the dark, and every picture's description has its numbers."""

import re
from collections.abc import Callable
from math import cos, exp, sin

import pytest
from matplotlib.figure import Figure

from optimus_cc_ext.tools.report import pictures
from optimus_cc_ext.tools.report.document import Picture
from optimus_cc_ext.tools.report.record import Curve, Share
from optimus_cc_ext.tools.report.style import TONES
from optimus_cc_ext.tools.report.table import Table
from scripts.bench.cluster import page as cluster
from scripts.bench.compressors import page as compressors
from scripts.paper import plots
from scripts.study.results import draw_prices
from scripts.study.screen import draw as draw_screen

pytestmark = pytest.mark.ci

MODELS, VARIANTS = ("GPT-335M", "GPT-2.5B", "GPT-8.3B"), ("Baseline", "CB without LEP", "CB", "CB+LEP", "CB+FE", "else")
RUNS = ("model", "variant")
LEARNING = Table((*RUNS, "iteration", "training hours", "validation perplexity"), [
    (model, variant, i, i / 10, exp(4 - i / 100 - place / 50))
    for model in MODELS for place, variant in enumerate(VARIANTS) for i in range(0, 100, 10)
])  # fmt: skip
BREAKDOWN = Table((*RUNS, *plots.BREAKDOWN), [
    (model, variant, 300.0 - 20 * place, 1 + place / 10, 5.0, 3.0)
    for model in MODELS for place, variant in enumerate(VARIANTS)
])  # fmt: skip
STATISTICS = Table(("model", "iteration", "stage", *plots.STATISTICS), [
    ("GPT-8.3B", i, stage, 0.01 * sin(i + stage), 1e-12 * cos(i), 1e-5 * sin(i)) for stage in range(4) for i in range(9)
])  # fmt: skip
MEMORY = Table((*RUNS, *plots.MEMORY), [(model, name, 9e3, 1.1) for model in MODELS for name in VARIANTS[:4]])
THROUGHPUT = Table(
    ("model", "rows", "columns", "rank", "compressor", "device", "times smaller", *plots.THROUGHPUT[1:]),
    [(model, 128, 240, rank, name, "CPU", 4.0, 100 / rank, 200 / rank)
     for model in MODELS for name in ("fast", "reference") for rank in range(8, 41, 8)],
)  # fmt: skip
PRICES = Table(("variant", "sent, %", "over vanilla, %", "standard error"), [
    ("balanced", 27.0, 0.006, 0.003), ("paper", 50.0, 1.2, 0.2), ("dp-int4", 30.0, 0.045, None), ("x", 95.0, 0.01, 0.02)
])  # fmt: skip
SCREEN = Table(("variant", "squared error, %^2", "price, %", "95 % below, %"), [
    ("noise-int4", 60.0, 0.1, 0.15), ("int4", 60.0, 0.09, 0.12), ("int8", 0.2, 0.001, 0.003)
])  # fmt: skip
TIMES = Table(("variant", "rate", "block", "seconds", "lower quartile", "upper quartile", "recovered", "bound"), [
    (name, rate, block, 1.0, 0.9, 1.1, None if name == "vanilla" else 0.5, 0.6)
    for name in ("vanilla", "paper", "balanced") for rate in ("none", "100mbit", "1gbit") for block in ("all", 1, 2)
])  # fmt: skip
SLICES = Table(("model", "work", "rank", "Gbit/s"), [
    (model, work, rank, 100 / rank) for model in MODELS for work in ("ours, compress", "hook") for rank in (8, 16)
])  # fmt: skip
LOSSES = {name: Curve(tuple(range(1, 60)), tuple(8 - i / 100 for i in range(1, 60))) for name in ("a", "b")}
SENT = {name: [Share("DP gradients", 4e6, 1e6), Share("all traffic", 4e6, 1e6)] for name in LOSSES}

DRAWN: dict[str, Callable[[], Figure]] = {
    "learning curves": lambda: plots.learning_curves(LEARNING), "breakdown": lambda: plots.breakdown(BREAKDOWN),
    "statistics": lambda: plots.error_statistics(STATISTICS), "memory": lambda: plots.memory(MEMORY),
    "throughput": lambda: plots.throughput(THROUGHPUT),
    "prices": lambda: draw_prices(PRICES, {"one-ulp": 0.05, "other-order": 0.4}, "Prices"),
    "screen": lambda: draw_screen(SCREEN, "Screen"), "times": lambda: cluster._draw_times(TIMES.where(block="all")),
    "shares": lambda: cluster._draw_shares(TIMES), "slices": lambda: compressors._draw_slices(SLICES),
    "losses": lambda: pictures.loss_curves("Losses", LOSSES), "curves": lambda: pictures.curves("Curves", "s", LOSSES),
    "difference": lambda: pictures.loss_difference("Difference", LOSSES, 0.001),
    "gain": lambda: pictures.gain({"100 Mbit/s": {"a": (1, 1.1, 1.2), "b": (0.5, 0.6, 0.7)}}, LOSSES, SENT, 0.001),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_every_colour_of_a_picture_has_one_for_the_dark(name: str) -> None:
    figure = DRAWN[name]()
    svg = Picture(name, figure, "3 words").files["svg"].decode()
    head, _, drawn = svg.partition("</style>")
    used = {match.lower() for match in re.findall(r"(?:fill|stroke): (#[0-9a-fA-F]{6})", drawn)}
    assert used - {light.lower() for light, _ in TONES.values()} == set()
    for light, dark in TONES.values():
        for kind in ("fill", "stroke"):
            assert f"{kind}: {light}" not in drawn or f"{{{kind}:{dark}!important}}" in head
    if name not in ("prices", "times", "shares", "gain"):  # which stand in Markdown, and not on a page for phones
        assert figure.get_figwidth() <= 7.0, "at 480 pixels the letters of a wider picture are below 6.5 pixels"


def test_a_table_is_described_by_the_first_and_last_values_of_its_lines() -> None:
    said = LEARNING.where(model="GPT-2.5B", variant="CB").in_words(RUNS, plots.LEARNING)
    assert said == "GPT-2.5B, CB: iteration 0 to 90, training hours 0 to 9, validation perplexity 52.46 to 21.33."
    assert (
        MEMORY.where(model="GPT-2.5B").in_words(["variant"], ["peak, MB"]).startswith("Baseline: peak, MB 9,000; CB ")
    )
    unknown = Table(("a", "b"), [("x", None), ("x", None), ("y", 2.0)])
    assert unknown.in_words(["a"], ["b"]) == "x: b -; y: b 2."
