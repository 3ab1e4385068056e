"""`optimus-cc report` on what people have: folders with odd names, mixed lines, and values that no line can join."""

import random
import re
from math import inf, nan
from pathlib import Path

import pytest

from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.report.pictures import curves, loss_curves, loss_difference, marked
from optimus_cc_ext.tools.report.record import Curve, read_run
from tests.unit.test_report_command import write_run

pytestmark = pytest.mark.ci

ODD_NAMES = ("_vanilla", "Ba$$in", r"a$\frac$b", "a$x$b", '50% <b> & "more"', "llama3_8b_" * 12, "größe 模型", "-x")


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_run_with_an_odd_name_is_named_in_every_picture(
    name: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    figures = [
        loss_curves("Loss", {name: Curve((1, 2), (8.0, 7.0)), "other": Curve((1, 2), (8.0, 7.5))}),
        loss_difference("Loss", {name: Curve((1, 2), (8.0, 7.0)), f"{name}, b": Curve((1, 2), (8.0, 7.5))}, 0.001),
        curves("Seconds", "s", {name: Curve((1, 2), (8.0, 7.0))}),
    ]
    for figure in figures:
        (axes,) = figure.axes
        figure.savefig(tmp_path / "drawn.svg")
        legend = axes.get_legend()
        named = [text.get_text() for text in legend.get_texts()]
        assert any(plain(name) in plain(each) for each in named), named
        inside, paper = legend.get_window_extent(), figure.bbox
        assert inside.x0 >= paper.x0 and inside.x1 <= paper.x1, "the legend is wider than the picture"
        assert "$" not in name or "$" in (tmp_path / "drawn.svg").read_text()


def plain(text: str) -> str:
    return re.sub(r"[\s\\\u200b]", "", text)


def test_two_runs_with_odd_names_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (tmp_path / name for name in ("_a$x$", "b <i>"))
    write_run(first / "tensorboard")
    write_run(second / "tensorboard", loss=9.0)
    assert cli.main(["report", str(first), str(second), "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "index.html").read_text()
    assert "_a$x$" in page and "b &lt;i&gt;" in page and "b <i>" not in page
    assert "| final training loss |" in capsys.readouterr().out


def test_a_value_between_two_that_are_missing_is_marked() -> None:
    every_second = [nan if place % 2 else 1.0 for place in range(40)]
    assert marked(every_second) == list(range(0, 40, 2))
    assert marked([1.0, 1.0, inf, 1.0, -inf, *[1.0] * 40]) == [3]
    assert marked([1.0] * 40) == [] and marked([1.0] * 3) == [0, 1, 2]
    (axes,) = curves("Seconds", "s", {"a": Curve(tuple(range(40)), tuple(every_second))}).axes
    (line,) = axes.get_lines()
    assert line.get_marker() == "o" and line.get_markevery() == list(range(0, 40, 2))


LINE = (
    " [2026-11-25 12:00:00] iteration {i:8}/      30 | consumed samples:            8 | elapsed time per iteration "
    "(ms): 500.0 | learning rate: 1.0E-03 | lm loss: 8.0E+00 | loss scale: 1.0 | grad norm: 1.0 |\n"
    "  optimus-cc traffic per iteration | DP gradients: 1.000 of 4.000 MB (25.0 %)\n"
    "  optimus-cc compression | DP gradients int8: error 1.00 %, 3.00 ms\n"
    " validation loss at iteration {i} | lm loss value: 8.1E+00 | lm loss PPL: 3.3E+03 |\n"
)


@pytest.mark.parametrize("seed", range(40))
def test_a_log_whose_lines_were_cut_or_mixed_is_read_as_far_as_it_can_be(seed: int, tmp_path: Path) -> None:
    chance, text = random.Random(seed), "".join(LINE.format(i=i) for i in range(1, 31))
    for _ in range(12):
        at, other = sorted(chance.sample(range(len(text)), 2))
        piece = text[other : other + chance.randrange(1, 120)]
        how = chance.choice(("cut", "mixed", "twice", "changed"))
        text = {
            "cut": text[:at] + text[at + len(piece) :], "mixed": text[:at] + piece + text[at:],
            "twice": text[:at] + text[at : at + len(piece)] + text[at:],
            "changed": text[:at] + chance.choice("0e.-|: \n\0\x1bx") + text[at + 1 :],
        }[how]  # fmt: skip
    (tmp_path / "log.txt").write_text(text)
    assert len(read_run(tmp_path).training.values) >= 10


def test_a_number_into_which_another_rank_has_written_is_left_out(tmp_path: Path) -> None:
    mixed = LINE.replace("8.0E+00 |", "8.0E+00[rank1]: |").replace("25.0 %", "25.0.1 %").replace("1.000 of", "1.0.0 of")
    (tmp_path / "log.txt").write_text(LINE.format(i=1) + mixed.format(i=2) + LINE.format(i=3))
    record = read_run(tmp_path)
    assert record.training.iterations == (1, 3) and record.sent("DP gradients").iterations == (1, 3)
