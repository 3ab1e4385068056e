"""The law of the price: slopes of vanilla's loss, energies of errors, and the table of both."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts.experiments.models import MODELS, ExperimentError
from scripts.experiments.runs import add_row, read_rows
from scripts.study import blind, energies, grid, law, price
from scripts.study.batches import scaled, taken
from scripts.study.energies import measured, noise
from scripts.study.law import LAWS, SHAPED, SLOPES, WINDOW, Estimate, Known, Line
from scripts.study.noise_shaped import weights

CELL = {"model": "llama-h256", "layout": "pp2dp2", "text": "python", "cpu": "A", "text_hash": "t"}


@given(st.integers(1, 8), st.integers(1, 6).map(lambda half: 2 * half))
def test_at_each_step_a_smaller_batch_is_the_first_part_of_a_larger_one(steps: int, batch: int) -> None:
    window = WINDOW * batch
    for name, (share, _) in SLOPES.items():
        order, own = taken(steps, int(share * batch), window), int(share * batch)
        for step in range(steps):
            largest = list(range(step * window, (step + 1) * window))
            assert order[step * own : (step + 1) * own] == largest[:own], name


def test_a_flags_last_number_is_scaled_and_no_part_of_a_sequence_is_asked_for() -> None:
    words = ["--eval-interval", "5", "--lr", "1", "--eval-interval", "20"]
    assert scaled(words, "--eval-interval", Fraction(7, 10)) == [
        "--eval-interval",
        "5",
        "--lr",
        "1",
        "--eval-interval",
        "14",
    ]
    with pytest.raises(ExperimentError, match="--eval-interval 20: 1/3 of it is not a whole number"):
        scaled(words, "--eval-interval", Fraction(1, 3))


def test_slopes_are_those_of_a_loss_that_falls_with_the_logarithms_of_batch_and_steps() -> None:
    def loss(batch: float, steps: float) -> float:
        return 4.0 - 0.2 * math.log(batch) - 0.4 * math.log(steps)

    half, nested, double, fewer = loss(0.5, 1), loss(1, 1), loss(2, 1), loss(1, 0.7)
    assert law.slope_in_batch(half, double, nested) == pytest.approx(5.0)
    assert law.slope_in_steps(fewer, nested) == pytest.approx(10.0)


def test_each_law_is_its_formula() -> None:
    """Slopes of 5 and 10 %, an energy of 0.01 of which the gradients' noise is a half."""
    known = Known(batch=5.0, steps=10.0, energy=0.01, noise=0.5)
    assert {name: rule(known) for name, rule in LAWS.items()} == pytest.approx({
        "law": 5 * math.log(1.01), "noise": 5 * math.log(1.02), "steps": 0.05, "null": 0.05,
        "a message's energy": 5 * math.log(1.02), "slope in steps": 10 * math.log(1.01),
    })  # fmt: skip
    unknown = Known(batch=5.0, steps=None, energy=0.01, noise=0.0)
    assert [LAWS[name](unknown) for name in ("noise", "steps", "slope in steps")] == [None, None, None]


def test_a_line_through_the_widths_is_exact_without_noise_and_its_interval_grows_with_the_distance() -> None:
    exact = Line([(width, 2 + 3 * math.log(width)) for width in (128, 256, 384)])
    assert exact.at(768).mean == pytest.approx(2 + 3 * math.log(768)) and exact.at(768).within < 1e-6
    noisy = Line([(width, 5 + shift) for width in (128, 384) for shift in (-0.1, 0.1)])
    # Two pairs 0.1 from their means leave 0.04 / 2 with two degrees of freedom: t = 4.303.
    near, far = noisy.at(math.sqrt(128 * 384)), noisy.at(768)
    assert near.within == pytest.approx(4.303 * math.sqrt(0.02 / 4), rel=1e-3) and far.within > 2 * near.within
    assert not Line([(128, 1.0), (128, 2.0), (128, 3.0)]).known and not Line([(128, 1.0), (256, 2.0)]).known


def test_an_interval_is_students_and_a_prediction_holds_within_it_or_a_factor() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert (found.mean, found.seeds) == (2.0, 3) and found.within == pytest.approx(4.303 / math.sqrt(3), rel=1e-3)
    sharp = Estimate(2.0, 0.1, 3)
    assert [law.holds(each, sharp) for each in (1.3, 1.4, 2.9, 3.1)] == [False, True, True, False]
    assert law.holds(0.1, Estimate(2.0, 2.0, 3)) and math.isnan(Estimate.of([1.0]).within)


def test_the_noise_is_the_part_of_the_energy_that_changes_from_batch_to_batch() -> None:
    """The share is 0.2, and 400 batches of 3,000 values know it to 1 %."""
    generator = torch.Generator().manual_seed(1)
    common = 2 * torch.randn(3000, generator=generator)
    batches = [{"a": common + torch.randn(3000, generator=generator)} for _ in range(400)]
    assert noise(batches) == pytest.approx(0.2, abs=0.01)
    assert noise([{"a": common}, {"a": common}]) == pytest.approx(0.0, abs=1e-9)


def test_an_energy_is_that_of_the_sum_of_all_batches_and_matrices() -> None:
    dense = [{"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, {"a": torch.tensor([0.0]), "b": torch.tensor([5.0])}]
    ours = [{name: value + (name == "a") for name, value in batch.items()} for batch in dense]
    assert float(measured(ours, dense)["energy"]) == pytest.approx(2 / 50)
    with pytest.raises(ValueError, match="the same batches"):
        measured(ours, dense[::-1][:1])


def rows_of(tmp_path: Path) -> tuple[Path, Path]:
    """Write runs of a cell whose price is the law's in int4, and twice as much in int3."""
    runs, found = tmp_path / "runs.csv", tmp_path / "energies.csv"
    for seed, shift in ((1, 0.0), (2, 0.001), (3, -0.001)):
        for variant, loss in {
            "vanilla": 4.0, "vanilla-nested": 4.0, "half-batch": 4.0 + 0.2 * math.log(2),
            "double-batch": 4.0 - 0.2 * math.log(2), "fewer-steps": 4.0 - 0.4 * math.log(0.7),
            "dp-int4": 4.0 * (1 + (5 + shift) / 100 * math.log(1.01)),
            "dp-int3": 4.0 * (1 + (10 + shift) / 100 * math.log(1.05)),
        }.items():  # fmt: skip
            row = dict.fromkeys(grid.COLUMNS, "") | CELL
            add_row(
                runs, row | {"iterations": "160", "seed": str(seed), "variant": variant, "loss": repr(loss)},
                grid.COLUMNS,
            )  # fmt: skip
    for form, points in {"int4": (0.004, 0.012), "int3": (0.05, 0.05)}.items():
        for point, energy in zip((20, 100), points, strict=True):
            row = dict.fromkeys(energies.COLUMNS, "") | {name: CELL[name] for name in ("model", "layout", "text")}
            add_row(
                found, row | {"of": "160", "point": str(point), "format": form, "energy": energy, "noise": 0.5},
                energies.COLUMNS,
            )  # fmt: skip
    return runs, found


def test_points_stand_for_the_parts_of_the_training_around_them(tmp_path: Path) -> None:
    """Weights of iterations 20 and 100 of 160 stand for 60 and for 100 iterations."""
    _, found = rows_of(tmp_path)
    means = price.mean_energies(read_rows(found, energies.COLUMNS))
    cell = ("llama-h256", "pp2dp2", "python", "160")
    assert means[cell, "int4"] == pytest.approx(((0.004 * 60 + 0.012 * 100) / 160, 0.5))


def test_random_weights_of_the_replicas_make_noise_of_the_energy_that_the_law_counts_with() -> None:
    """20,000 draws know the energy to 2 %; the weights of a draw cancel, so that what replicas share stays."""
    generator = torch.Generator().manual_seed(3)
    for replicas in (2, 4):
        own = torch.randn(replicas, 20_000, generator=generator)
        drawn = torch.stack([weights(replicas, seed) for seed in range(20_000)], 1)
        assert drawn.sum(0).abs().max() < 1e-5
        added, noise = (drawn * own).sum(0).square().mean(), own.sum(0).square().mean()
        assert float(added / noise) == pytest.approx(SHAPED**2, rel=0.08)


def test_the_table_says_where_the_law_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, found = rows_of(tmp_path)
    assert price.main(["--rows", str(runs), "--energies", str(found)]) == 0
    cells = [[each.strip() for each in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    (slope,) = [row for row in cells if len(row) == 9 and row[0] == "llama-h256"]
    assert [float(slope[place]) for place in (4, 5, 7)] == pytest.approx([3, 5, 10])
    prices = {row[4]: row for row in cells if len(row) == 17 and row[0] == "llama-h256"}
    assert [prices[form][-1] for form in ("int4", "int3")] == ["yes", "no"]
    assert float(prices["shaped"][5]) == pytest.approx(SHAPED**2 * 0.5, rel=1e-3)
    laws = {row[0]: row[1:] for row in cells if len(row) == 4}
    # int3's price is twice the law's, which is what a message's energy predicts; int4 has int3's as a coarser one.
    assert laws["law"] == ["2", "1", "1"] and laws["a message's energy"] == ["2", "1", "1"]
    assert laws["a coarser format's energy"] == ["1", "0", "0"]


def predicted(tmp_path: Path) -> list[dict[str, str]]:
    words = ["--rows", str(tmp_path / "runs.csv"), "--energies", str(tmp_path / "energies.csv")]
    assert blind.main([*words, "--predict", "--predictions", str(tmp_path / "predictions.csv")]) == 0
    return read_rows(tmp_path / "predictions.csv", blind.COLUMNS)


def test_a_price_that_is_measured_is_not_predicted_and_a_prediction_is_not_changed(tmp_path: Path) -> None:
    runs, found = rows_of(tmp_path)
    assert predicted(tmp_path) == []
    row = read_rows(found, energies.COLUMNS)[0] | {"format": "int2", "energy": "0.4"}
    add_row(found, row, energies.COLUMNS)
    (first,) = predicted(tmp_path)
    assert (first["format"], first["slope_of"]) == ("int2", "own")
    assert float(first["law"]) == pytest.approx(5 * math.log(1.4), rel=1e-3)
    more = {"seed": "4", "variant": "half-batch", "loss": "9.0"}
    for each in (more, more | {"variant": "double-batch"}, more | {"variant": "vanilla-nested"}):
        add_row(runs, read_rows(runs, grid.COLUMNS)[0] | each, grid.COLUMNS)
    assert predicted(tmp_path) == [first]


def test_the_slope_of_a_cell_without_runs_is_on_the_line_of_models_of_other_widths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, found = rows_of(tmp_path)
    row = read_rows(found, energies.COLUMNS)[0] | {"model": "llama-h768", "format": "int2", "energy": "0.4"}
    add_row(found, row, energies.COLUMNS)
    assert predicted(tmp_path) == [] and "llama-h768, pp2dp2, python, 160: no slope" in capsys.readouterr().err
    for run in read_rows(runs, grid.COLUMNS):
        # A gpt of another width is no model of the same line.
        for model, share in (("llama-h128", 0.5), ("gpt-h384", 9.0)):
            loss = 4.0 + share * (float(run["loss"]) - 4.0)
            add_row(runs, run | {"model": model, "loss": repr(loss)}, grid.COLUMNS)
    (line,) = predicted(tmp_path)
    rise = 2.5 / math.log(2)  # slopes of 2.5 and 5 at widths of 128 and 256
    assert line["slope_of"] == "2 models" and float(line["within"]) < 0.01
    assert float(line["slope"]) == pytest.approx(5 + rise * math.log(3), rel=1e-3)
    assert float(line["slope_in_steps"]) == pytest.approx(2 * float(line["slope"]), rel=1e-3)


def test_the_mutation_takes_the_energy_of_a_coarser_format_and_of_no_finer_one() -> None:
    """int4 costs what the law says of int3, and int3 much more than it says of either."""
    cell = ("llama-h256", "pp1dp2", "python", "80")
    made = {
        (cell, form): price.Prediction(Known(5.0, 10.0, energy, 0.5), 0.1)
        for form, energy in {"int4": 0.01, "int3": 0.05}.items()
    }
    costs = {"vanilla": 0.0, "dp-int4": law.price(5.0, 0.05), "dp-int3": law.price(5.0, 0.5)}
    runs = {variant: {(seed, "t", "A"): 4 * (1 + cost / 100) for seed in ("1", "2")} for variant, cost in costs.items()}
    rows = {str(name): (prices, hold) for name, prices, _, hold in price.table_of_laws({cell: runs}, made).rows}
    assert rows["law"] == (2, 0) and rows["a coarser format's energy"] == (1, 1)


def test_one_seed_gives_no_prediction_because_its_slope_has_no_interval(tmp_path: Path) -> None:
    runs, _ = rows_of(tmp_path)
    first = [row for row in read_rows(runs, grid.COLUMNS) if row["seed"] == "1" and row["variant"] != "dp-int4"]
    runs.unlink()
    for row in first:
        add_row(runs, row, grid.COLUMNS)
    assert predicted(tmp_path) == []


def test_models_of_one_line_differ_in_their_width_alone() -> None:
    for kind in ("gpt", "llama"):
        first = blind.family(MODELS[f"{kind}-h128"])
        alike = {name for name, model in MODELS.items() if blind.family(model) == first}
        assert alike == {f"{kind}-h{width}" for width in (128, 256, 384, 768)}


@pytest.mark.full
@pytest.mark.timeout(900)  # eleven trainings, each of which starts four ranks
def test_the_commands_make_the_rows_of_a_tiny_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs, found = tmp_path / "runs.csv", tmp_path / "energies.csv"
    words = ["--models", "llama", "--tiny", "--max-mb", "1", "--output", str(tmp_path / "out")]
    variants = ",".join(["vanilla", *SLOPES, "dp-int2", "dp-shaped"])
    much = ["--texts", "python", "--seeds", "1", "--iterations", "40", "--interval", "10", "--evaluations", "2"]
    assert grid.main([*words, *much, "--variants", variants, "--rows", str(runs)]) == 0
    loss = {row["variant"]: float(row["loss"]) for row in read_rows(runs, grid.COLUMNS)}
    assert loss["half-batch"] > loss["vanilla-nested"] > loss["double-batch"] and loss["fewer-steps"] > loss["vanilla"]
    many = ["--points", "10,40", "--batches", "2", "--formats", "int4,int2", "--rows", str(found)]
    assert energies.main([*words, *many]) == 0
    energy = {(row["point"], row["format"]): float(row["energy"]) for row in read_rows(found, energies.COLUMNS)}
    assert all(0.0 < 20 * energy[point, "int4"] < energy[point, "int2"] for point in ("10", "40"))
    capsys.readouterr()
    assert price.main(["--rows", str(runs), "--energies", str(found)]) == 0
    assert "int2" in capsys.readouterr().out
