"""The picture of the screen: prices over squared errors, with a line that the control does not move."""

from pathlib import Path

import pytest

from optimus_cc_ext.compressors.formats import FORMATS
from scripts.experiments.runs import add_row
from scripts.study.cells import Cell
from scripts.study.grid import COLUMNS
from scripts.study.in_formats import ROWS
from scripts.study.screen import FORMAT_OF, main, prices, slope


def test_the_line_is_fitted_to_the_formats_and_not_to_the_control() -> None:
    errors = {variant: {**FORMATS, **ROWS}[form].gaussian_error for variant, form in FORMAT_OF.items()}
    cells = [
        Cell("llama", "python", "pp2dp2", 160, variant, (9.0, 9.0) if variant == "noise-int4" else (7 * error**2,) * 2)
        for variant, error in errors.items()
    ]
    table = prices(cells)
    assert table.column("variant") == list(FORMAT_OF)
    assert slope(table) == pytest.approx(7e-4), "of percent, by squared percent"


def test_the_screen_draws_the_pairs_that_are_there_and_names_a_cell_without_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = dict.fromkeys(COLUMNS, "") | {"model": "llama", "layout": "pp2dp2", "text": "python", "iterations": "160"}
    for seed in ("1", "2"):
        for variant, loss in (("vanilla", "5.0"), ("int5", f"5.00{seed}"), ("int8", "5.0")):
            add_row(
                tmp_path / "runs.csv", row | {"seed": seed, "settings": seed, "variant": variant, "loss": loss}, COLUMNS
            )
    words = ["--rows", str(tmp_path / "runs.csv"), "--output", str(tmp_path / "out")]
    assert main(words) == 0
    assert "int5" in capsys.readouterr().out and (tmp_path / "out" / "screen.png").exists()
    assert main([*words, "--iterations", "400"]) == 2
    assert "no pair of llama, python, pp2dp2, 400. Run scripts.study.grid" in capsys.readouterr().err
