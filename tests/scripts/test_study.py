"""The study of the formats' costs: it refuses bad input, pairs differences, and does not repeat finished runs."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING, PIPELINE_BACKWARD, PIPELINE_FORWARD
from optimus_cc_ext.tools.report.document import Picture
from optimus_cc_ext.tools.report.table import Table
from scripts.experiments.models import Training
from scripts.experiments.variants import GRADIENTS, STUDY
from scripts.study import gradients
from scripts.study.__main__ import NAMES, main, words_of
from scripts.study.results import (
    CONTROLS,
    Results,
    draw_prices,
    extent_of,
    losses,
    move_apart,
    prices,
    spread,
    traffic,
)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--variants", "vanilla,magic"], "'magic' is none of"),
        (["--variants", "vanilla,mine"], "belong together"),
        (["--", "--dp-compression"], "belong together"),
        (["--seeds", "one"], "give whole numbers"),
        (["--iterations", "1"], "2 iterations"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert reason in capsys.readouterr().err


def test_a_flag_that_cannot_work_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ["--variants", "vanilla,mine", "--output", str(tmp_path / "out")]
    assert main([*output, "--", "--dp-compression-stages", "9"]) == 2
    assert "--dp-compression-stages: 9 stages" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def run(loss: float, sent: float) -> dict[str, Any]:
    return {"validation loss": loss, "seconds": 1.0, "bytes": {"all traffic": [100.0, sent]}}


RESULTS: Results = {
    ("vanilla", 1): run(5.0, 100.0), ("vanilla", 2): run(4.0, 100.0), ("vanilla", 3): run(3.0, 100.0),
    ("paper", 1): run(5.05, 30.0), ("paper", 2): run(4.12, 30.0), ("balanced", 3): run(3.0, 20.0),
    ("one-ulp", 1): run(5.15, 100.0), ("one-ulp", 2): run(3.84, 100.0),
}  # fmt: skip


def test_differences_are_of_the_same_seed_and_a_run_that_is_missing_leaves_the_others() -> None:
    table = losses(RESULTS, ["vanilla", "paper"], [1, 2, 3], "", "").where(variant="paper")
    assert table.column("over vanilla, %") == [pytest.approx(2.0)], "of 1 and 3 %"
    assert table.column("standard error") == [pytest.approx(1.0)], "a deviation of sqrt(2), over sqrt(2)"
    assert table.column("each, %") == ["+1.000, +3.000"] and table.column("seed 3") == [None]
    assert traffic(RESULTS, ["paper"], [1, 2, 3]).column("all traffic") == [0.3]


def test_the_picture_is_of_price_over_bytes_with_vanillas_own_spread_as_a_band(tmp_path: Path) -> None:
    table, bands = prices(RESULTS, list(NAMES), [1, 2, 3]), spread(RESULTS, [1, 2, 3])
    assert [row[:3] for row in table.rows] == [("paper", 30.0, pytest.approx(2.0)), ("balanced", 20.0, 0.0)]
    assert bands == {"one-ulp": pytest.approx(math.sqrt((3**2 + 4**2) / 2))}, "no run of another order is there"
    Picture("prices", draw_prices(table, bands, "title"), "in words").save(tmp_path)
    drawn = (tmp_path / "prices.svg").read_text()
    assert "paper" in drawn and "one ulp away (3.5 %)" in drawn


def test_labels_cover_neither_each_other_nor_a_point() -> None:
    axes = Figure().subplots()
    points = {"a": (0.5, 0.5), "b": (0.5, 0.5), "c": (0.5, 0.5), "where a's label would be": (0.53, 0.525)}
    labels = [axes.annotate(name, at, xytext=(8, 4), textcoords="offset points") for name, at in points.items()]
    move_apart(labels)
    extents = [extent_of(label) for label in labels]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(extents, 2))
    assert not any(extent.contains(*axes.transData.transform(at)) for extent in extents for at in points.values())


def test_every_variant_is_a_command_line_that_works_on_the_quickstarts_layout() -> None:
    training = Training()
    found = {name: training.config_of(words_of(name, training)) for name in STUDY}
    assert {name: config.any_technique for name, config in found.items()} == {name: name != "vanilla" for name in STUDY}
    weight = torch.tensor(training.model.hidden**-0.5)
    [_, deviation] = words_of("one-ulp", training)
    assert torch.nextafter(weight, torch.tensor(1.0)) == torch.tensor(float(deviation)), "that of the weights"


def test_gradients_are_compared_by_stage_and_errors_of_opposite_signs_cancel_in_the_sum() -> None:
    exact = torch.tensor([3.0, 4.0])
    dense = {(iteration, stage): exact for iteration in (1, 2) for stage in (0, 1)}
    ours = dense | {(1, 0): exact + torch.tensor([0.0, 1.0]), (2, 0): exact - torch.tensor([0.0, 1.0])}
    found = gradients.compare(ours, dense)
    assert found["error"] == [pytest.approx(0.2), 0.0] and found["error of sum"] == [0.0, 0.0]
    each = 29 / (5 * math.sqrt(34)), 21 / (5 * math.sqrt(18))
    assert found["cosine"] == [pytest.approx(sum(each) / 2), pytest.approx(1.0)]
    steps = [1 / 4 / math.sqrt(2), 0.0]
    assert found["error of steps"] == pytest.approx(steps), "Adam divides the second value, which is 1 off, by 4"
    with pytest.raises(ValueError, match="the same iterations"):
        gradients.compare({}, dense)


def test_every_block_format_is_trained_and_its_gradients_are_compared() -> None:
    for each in (PIPELINE_FORWARD, PIPELINE_BACKWARD, DP_GRADIENTS, EMBEDDING):
        for format in each.block_formats:
            flags = f"{each.format_flag} {format}"
            assert flags in STUDY.values(), flags
            assert each is EMBEDDING or flags in GRADIENTS[each.tag].values(), flags


def test_people_read_a_setting_a_row_with_all_points_and_stages_side_by_side() -> None:
    found = {"error": [0.774, 0.051], "cosine": [0.636, 0.999], "error of sum": [1.02, 0.004], "error of steps": [1, 2]}
    names = [f"{kind}, stage {stage}" for kind in gradients.KINDS for stage in range(4)]
    rows = [(point, "DP gradients", "int4", 19.0, *gradients._cells(found)) for point in (20, 80)]
    del found["error of steps"]  # results of older commits lack this entry
    rows.append((80, "DP gradients", "int8", 26.0, *gradients._cells(found)))
    table = gradients.by_setting(Table(("weights of", "class", "setting", "sent, %", *names), rows))
    cells = ("77, 5.1", "0.636, 0.999", "102, 0.4", "100, 200")
    assert table.rows == [
        ("DP gradients", "int4", 19.0, *cells, *cells), ("DP gradients", "int8", 26.0, *[None] * 4, *cells[:3], None)
    ]  # fmt: skip
    assert table.columns[3:5] == ("after 20: error, %", "after 20: cosine")


@pytest.mark.full
def test_a_run_that_dies_is_marked_the_others_go_on_and_retrying_is_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["--tiny", "--iterations", "2", "--max-mb", "1", "--output", str(tmp_path / "out"), "--timeout", "0.001"]
    command += ["--variants", "vanilla,other-order", "--seeds", "1"]
    said = []
    for retry in ([], [], ["--retry"]):
        assert main([*command, *retry]) == 1
        said.append(capsys.readouterr())
    for first in (said[0], said[2]):
        assert "vanilla-seed1 ..." in first.out and "other-order-seed1 ..." in first.out
        assert first.err.count("failed: the run was not finished in time") == 2
    assert " ..." not in said[1].out and said[1].err.count("it failed before (--retry trains it again)") == 2


@pytest.mark.full
def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--tiny", "--iterations", "2", "--evaluations", "1", "--output", str(tmp_path / "out"), "--max-mb", "1"]
    command += ["--seeds", "1", "--variants", f"vanilla,balanced,{','.join(CONTROLS)}"]
    assert main(command) == 0
    first = capsys.readouterr().out
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "balanced-seed1 ..." in first and "balanced-seed1 ..." not in again
    assert first[first.index("##") :] == again[again.index("##") :]
    lines = 3 + len(CONTROLS)  # titles, vanilla, balanced
    assert (tmp_path / "out" / "losses.csv").read_text().count("\n") == lines
    assert (tmp_path / "out" / "prices.svg").exists()


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_study_of_gradients_compares_what_is_asked_for_at_each_point(tmp_path: Path) -> None:
    command = ["--tiny", "--points", "1,2", "--iterations", "1", "--max-mb", "1", "--output", str(tmp_path / "out")]
    assert gradients.main([*command, "--match", "int8, not rotated"]) == 0
    table = (tmp_path / "out" / "gradients.csv").read_text().splitlines()
    assert len(table) == 1 + 2 * 3, "at two points: of each class"
