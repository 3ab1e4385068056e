"""The study of several models and texts: pairs are of one kind, bounds are of 95 %, finished runs are not repeated."""

import math
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.tools.data import DataError, PreparedData
from scripts.experiments.models import MODELS, ExperimentError, Layout, Training
from scripts.experiments.runs import add_row, read_rows
from scripts.experiments.texts import Text
from scripts.hosts.launch import RunFailed
from scripts.study import grid
from scripts.study.cells import Cell, behind, compared, losses, student, upper_bound, verdicts
from scripts.study.grid import COLUMNS, main
from scripts.study.noise import block_noise, relative_noise

ROW = dict.fromkeys(COLUMNS, "") | {
    "model": "gpt", "layout": "pp2dp2", "text": "python", "iterations": "400", "cpu": "A", "text_hash": "t",
}  # fmt: skip


def row(seed: int, variant: str, loss: float, **further: str) -> dict[str, str]:
    return ROW | {"seed": str(seed), "settings": f"s{seed}", "variant": variant, "loss": str(loss)} | further


def cell(variant: str, *differences: float, text: str = "python") -> Cell:
    return Cell("gpt", text, "pp2dp2", 400, variant, differences)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--models", "bert"], "--models: 'bert' is none of"),
        (["--texts", "latin"], "--texts: 'latin' is none of python, prose, and no file or folder"),
        (["--variants", "magic"], "--variants: 'magic' is none of"),
        (["--seeds", "one"], "give whole numbers"),
        (["--iterations", "60"], "a run needs 4 validations"),
        (["--layout", "pp1dp1"], "a single host has no links"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert reason in capsys.readouterr().err


def test_the_quantiles_are_those_of_published_tables() -> None:
    """The reference is the usual table of Student's t, one-sided 95 %, of three decimals."""
    assert [round(student(freedom), 3) for freedom in (1, 2, 4, 10, 30)] == [6.314, 2.920, 2.132, 1.812, 1.697]


def test_pairs_never_mix_texts_kinds_of_cpu_or_settings() -> None:
    rows = [
        row(1, "vanilla", 5.0), row(1, "balanced", 5.05), row(2, "vanilla", 4.0), row(2, "balanced", 4.0),
        row(3, "balanced", 9.0), row(1, "int8", 9.0, cpu="B"), row(1, "int8", 9.0, text_hash="u"),
        row(1, "int8", 9.0, settings="s9"),
    ]  # fmt: skip
    (found,) = compared(rows)
    assert found.variant == "balanced" and found.differences == pytest.approx((1.0, 0.0))


def test_a_variant_passes_if_every_bound_and_the_mean_of_all_cells_are_low_enough() -> None:
    cells = [cell("a", 0.01, 0.02, 0.03), cell("a", 0.01, 0.01, 0.02, text="prose"), cell("b", 0.0, 0.2, 0.1)]
    # The bound by hand is 0.02 + 2.920 x 0.01 / sqrt(3).
    assert upper_bound(cells[0]) == pytest.approx(0.0369, abs=1e-4)
    assert verdicts(cells).column("passes") == ["yes", "no"]
    assert verdicts([cell("a", 0.03, 0.031, 0.032)]).column("passes") == ["no"], "the mean is above 0.03 %"


def test_the_bound_of_a_cell_comes_from_its_own_differences_alone() -> None:
    quiet, noisy = cell("a", 0.0, 0.01, 0.02), cell("a", -0.1, 0.0, 0.1, text="prose")
    column = losses([quiet, noisy]).column("95 % below, %")
    assert column == pytest.approx([0.0269, 0.1686], abs=1e-4), "0.01 + 2.92 x 0.01 / sqrt(3); 2.92 x 0.1 / sqrt(3)"
    assert column[:1] == losses([quiet]).column("95 % below, %")
    table = verdicts([quiet, noisy])
    assert table.column("passes") == ["undecided"] and table.column("undecided") == [1]


def test_a_cell_of_less_than_three_seeds_is_neither_a_proof_nor_a_fault() -> None:
    assert verdicts([cell("a", 0.0)]).column("passes") == ["no"], "nothing was judged"
    judged, single = cell("a", 0.01, 0.02, 0.03), cell("a", 0.3, text="prose")
    table = verdicts([judged, single])
    assert table.column("cells") == [1] and table.column("passes") == ["yes"]
    assert table.column("not judged") == [1], "the reader is told that there is more to see"
    assert table.column("worst bound, %") == verdicts([judged]).column("worst bound, %")


def test_a_loss_is_as_many_iterations_behind_as_vanillas_curve_says() -> None:
    falling = " ".join(f"{iteration}:{5 - iteration / 100}" for iteration in range(10, 101, 10))
    end = 5 - 85 / 100  # the mean of the validations after 70, 80, 90 and 100 iterations
    assert behind(falling, end) == pytest.approx(0)
    assert behind(falling, end + 0.05) == pytest.approx(5) and behind(falling, end + 0.25) == pytest.approx(25)
    assert behind(falling, end - 0.03) == pytest.approx(-3)
    assert math.isnan(behind(falling, 9.0)) and math.isnan(behind("10:5 20:5 30:5 40:5 50:5", 5.0))


def test_a_finished_run_is_a_line_of_the_file(tmp_path: Path) -> None:
    for seed in (1, 2):
        add_row(tmp_path / "runs.csv", row(seed, "vanilla", 5.0), COLUMNS)
    assert read_rows(tmp_path / "runs.csv", COLUMNS) == [row(1, "vanilla", 5.0), row(2, "vanilla", 5.0)]


def test_a_file_of_other_columns_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    rows = tmp_path / "runs.csv"
    rows.write_text("model,loss\n")
    with pytest.raises(ExperimentError, match=r"the columns are model, loss\. Give another file"):
        read_rows(rows, COLUMNS)


def test_a_run_without_compressed_bytes_of_a_class_that_was_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = Path(__file__).parents[1] / "unit" / "logs_of_runs" / "balanced"
    monkeypatch.setattr(grid, "LAST", 1)  # the run validated once
    assert grid.measured(log, ["pipeline forward", "DP gradients"])["bytes"] < 1
    with pytest.raises(RunFailed, match="the log shows no compressed bytes of expert dispatch"):
        grid.measured(log, ["pipeline forward", "expert dispatch"])


def test_the_architectures_of_the_study_are_what_their_names_say() -> None:
    flags = {name: Training(model=MODELS[name]).flags() for name in ("gpt", "llama", "moe", "moe-ep2")}
    assert "--swiglu" not in flags["gpt"] and "--untie-embeddings-and-output-weights" in flags["llama"]
    assert flags["moe"][-2:] == ["--expert-model-parallel-size", "1"] and flags["moe-ep2"][-1] == "2"
    assert MODELS["gpt"].tied and not MODELS["moe"].tied
    assert Training(model=MODELS["llama"], layout=Layout(replicas=4)).config_of(["--optimus-cc", "balanced"])


@pytest.mark.parametrize(
    ("model", "layout", "iterations", "reason"),
    [
        ("gpt", "tp8pp1dp2", 1, "layout tp8pp1dp2: 4 attention heads cannot be divided by 8"),
        ("llama", "tp4pp1dp2", 1, "2 query groups cannot be divided by 4"),
        ("moe-ep2", "pp2dp1", 1, "1 replicas cannot be divided by 2"),
        ("gpt", "pp2dp2", 100, "204,800 tokens are needed, and the text has 90,000 for training"),
    ],
)
def test_what_a_model_or_a_text_cannot_do_is_refused_before_anything_is_trained(
    model: str, layout: str, iterations: int, reason: str
) -> None:
    training = Training(model=MODELS[model], layout=Layout.parsed(layout), iterations=iterations)
    text = PreparedData(Path(), Path(), 4096, documents=9, tokens=100_000, text_bytes=400_000, up_to_date=True)
    with pytest.raises(ExperimentError, match=reason):
        training.check(text)


def test_noise_has_the_size_that_it_promises() -> None:
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(100_003, generator=generator)
    for noise, size in (
        (lambda copy: relative_noise(copy, generator), 1e-6),
        (
            lambda copy: block_noise(copy, generator, error=FORMATS["int4"].gaussian_error),
            FORMATS["int4"].gaussian_error,
        ),
    ):
        copy = values.clone()
        noise(copy)
        # The spread of 100,003 values' norm is 0.3 %; fp32 rounds a relative change of 1e-6 to steps of 1e-7.
        assert ((copy - values).norm() / values.norm()).item() == pytest.approx(size, rel=0.05)


def test_a_text_of_a_package_that_is_not_installed_names_the_package(tmp_path: Path) -> None:
    text = Text(tmp_path / "absent.dz", "*.txt", "a text", package="dict-gcide")
    with pytest.raises(DataError, match="apt-get install dict-gcide, or give the text with --input"):
        text.prepared(tmp_path / "data", 512, 1.0)


@pytest.mark.full
@pytest.mark.timeout(900)  # six trainings, each of which starts four ranks
def test_the_grid_trains_every_cell_once_and_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = tmp_path / "runs.csv"
    words = ["--tiny", "--models", "llama,moe-ep2", "--texts", "python", "--seeds", "1", "--iterations", "8"]
    words += ["--interval", "2", "--evaluations", "1", "--rows", str(rows), "--output", str(tmp_path / "out")]
    assert main([*words, "--variants", "vanilla"]) == 0
    before = rows.read_text()
    assert main([*words, "--variants", "vanilla,balanced,noise-1e-6"]) == 0
    assert rows.read_text().startswith(before) and len(read_rows(rows, COLUMNS)) == 6
    assert all(bool(row["load"]) == (row["variant"] != "noise-1e-6") for row in read_rows(rows, COLUMNS)
               if row["model"] != "llama")  # fmt: skip
    assert len({row["settings"] for row in read_rows(rows, COLUMNS)}) == 2, "one for each model"
    for each in read_rows(rows, COLUMNS):
        assert math.isfinite(float(each["loss"])) and len(each["validations"].split()) == 4
        assert (float(each["bytes"]) < 0.6) == (each["variant"] == "balanced")


@pytest.mark.full
@pytest.mark.timeout(900)  # six trainings, each of which starts four ranks
def test_controls_of_experts_change_what_their_names_say(tmp_path: Path) -> None:
    rows = tmp_path / "runs.csv"
    words = ["--tiny", "--texts", "python", "--seeds", "1", "--iterations", "8", "--interval", "2"]
    words += ["--evaluations", "1", "--rows", str(rows), "--output", str(tmp_path / "out")]
    controls = "vanilla,experts,noise-on-rows,experts-coded-validation"
    assert main([*words, "--models", "moe-ep2", "--variants", controls]) == 0
    assert main([*words, "--models", "moe-bias-ep2", "--variants", "vanilla,experts"]) == 0
    found = {(row["model"], row["variant"]): row for row in read_rows(rows, COLUMNS)}
    vanilla, experts, noise, coded = (found["moe-ep2", name] for name in controls.split(","))
    assert len({row["loss"] for row in (vanilla, experts, noise, coded)}) == 4
    assert experts["load"] == coded["load"] != vanilla["load"], "the weights are those of coded training"
    # fp32 rounds a relative change of 1e-6 to steps of 1e-7, and after 8 iterations losses are far less than 1 % apart.
    assert float(noise["loss"]) == pytest.approx(float(vanilla["loss"]), rel=1e-3)
    assert float(experts["bytes"]) < float(vanilla["bytes"]) == float(noise["bytes"])
    assert float(found["moe-bias-ep2", "vanilla"]["load"]) >= 1
