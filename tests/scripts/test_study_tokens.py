"""The study of the formats of experts' tokens: errors and changed assignments, on one batch with equal weights."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.config.classes import EXPERT_DISPATCH
from scripts.study.tokens import SETTINGS, WAYS, changed, error
from tests.shell_scripts import ROOT


def test_errors_are_relative_to_the_dense_gradients_that_are_named() -> None:
    exact = {"0.experts.w": torch.tensor([3.0, 4.0]), "attention.w": torch.tensor([12.0])}
    ours = exact | {"0.experts.w": torch.tensor([3.0, 5.0])}
    assert error(ours, exact, "") == pytest.approx(1 / 13) and error(ours, exact, ".experts.") == pytest.approx(1 / 5)


def test_an_assignment_is_changed_if_the_dense_run_does_not_have_it() -> None:
    exact = [[torch.tensor([[True, True, False], [False, True, True]])]]
    ours = [[torch.tensor([[True, False, True], [False, True, True]])]]
    assert changed(ours, exact) == 1 / 4 and changed(exact, exact) == 0


def test_every_format_is_studied_on_every_way_and_on_all() -> None:
    for format in EXPERT_DISPATCH.block_formats:
        assert {ways for form, ways in SETTINGS.values() if form == format} >= {*WAYS, ",".join(WAYS)}


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_study_runs_and_a_dense_way_changes_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.study.tokens", "--tiny", "--points", "1", "--max-mb", "0.5"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "out")], cwd=ROOT, capture_output=True, text=True, timeout=560
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [line for line in done.stdout.splitlines() if "int8, dispatch-forward" in line]
    _, _, of_all, of_experts, first, _ = (cell.strip() for cell in row.split("|")[1:-1])
    assert 0 < float(of_all) < 10 and 0 < float(of_experts) < 20
    assert float(first) == 0, "the first layer's router sees no coded token"
