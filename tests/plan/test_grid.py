"""A grid of plans: its page shows what `optimus-cc plan` prints for the same point, and loads nothing."""

import csv
import io
import json
import random
import re
import shlex
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.tools import cli
from scripts.planned import __main__ as planner
from scripts.planned.grid import LOSSES

JOB = ["--use-distributed-optimizer", "--pipeline-model-parallel-size", "2", "--micro-batch-size", "1",
       "--tensor-model-parallel-size", "8", "--global-batch-size", "64"]  # fmt: skip
ASKED = ["--cluster", "h100-ndr400", "--nodes", "4", "--model", "8.3b"]


def numbers_of(page: Path) -> list[dict[str, Any]]:
    """Return the numbers inside a page, for each of its models."""
    found = re.search(r'<script type="application/json" id="numbers">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found
    numbers: list[dict[str, Any]] = json.loads(found[1])
    return numbers


def points_of(grid: dict[str, Any]) -> dict[str, Any]:
    """Return each point, or the reason for which it has no plan, by network, replicas, batch and format."""
    places = product(*grid["axes"].values())
    found = (grid["reasons"][point] if isinstance(point, int) else point for point in grid["points"])
    return {"|".join(place): point for place, point in zip(places, found, strict=True)}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("grid") / "grid.html"
    own = ["--dp-compression-format", "int4", "--weight-decay", "1"]  # the planner reads no --weight-decay
    assert planner.main([*ASKED, "--output", str(path), "--", *JOB, *own]) == 0
    return path


def planned(command: str, capsys: pytest.CaptureFixture[str]) -> list[float]:
    """Return vanilla's seconds, and gain, least and most in percent, that a point's command prints."""
    program, *words = shlex.split(command)
    assert program == "optimus-cc"
    place = words.index("--")
    capsys.readouterr()
    assert cli.main([*words[:place], "--format", "csv", *words[place:]]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    return [float(row[name]) for name in ("vanilla s", "yours: gain %", "yours: from %", "yours: to %")]


@pytest.mark.full
def test_twenty_random_points_of_the_page_are_what_plan_prints(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (found,) = numbers_of(page)
    points = {key: value for key, value in points_of(found).items() if not isinstance(value, str)}
    # Every number of replicas on a node, and every network, has a plan for some batch.
    assert len(points) > 200
    for key in random.Random(43).sample(sorted(points), 20):
        network, replicas, batch, form = key.split("|")
        vanilla, *gain, word, ours = points[key]
        flags = found["flags"][ours]
        command = f"{found['typed']}{found['link'][network]} -- {found['megatron'][f'{replicas}|{batch}']} {flags}"
        printed = planned(command, capsys)
        assert [vanilla, *gain] == [float(f"{printed[0]:.5g}"), *printed[1:]], command
        assert word == ("no" if gain[0] < 2.5 else "yes" if gain[1] > 1 else "maybe")
        assert form != "yours" or flags == "--dp-compression-format int4"


@pytest.mark.full
def test_the_page_loads_nothing(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r"""https?:|\bsrc=|\bhref="(?!#)|@import|url\(|fetch\(|XMLHttpRequest""", text)
    assert text.count("<script") == 2 and text.count("</script>") == 2


@pytest.mark.full
def test_a_point_that_cannot_be_planned_has_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "grid.html"
    assert planner.main([*ASKED, "--output", str(path), "--", *JOB, "--global-batch-size", "32"]) == 0
    points = points_of(numbers_of(path)[0])
    assert "does not divide among 16 replicas" in points["hdr8|8|8|balanced"]
    assert isinstance(points["hdr8|8|32|balanced"], list)


@pytest.mark.full
def test_the_same_grid_is_a_table_and_a_picture(page: Path, tmp_path: Path) -> None:
    for name in ("grid.csv", "grid.svg"):
        assert planner.main([*ASKED, "--output", str(tmp_path / name), "--", *JOB]) == 0
    assert (tmp_path / "grid.svg").read_text().startswith("<?xml")
    rows = list(csv.DictReader((tmp_path / "grid.csv").open()))
    points = points_of(numbers_of(page)[0])
    assert len(rows) == 8 * 4 * 3 * 3 and {row["model"] for row in rows} == {"8.3b"}
    for row in rows:
        point = points["|".join(row[name] for name in ("network", "replicas on a node", "batch", "format"))]
        assert row["command or reason"] == point if isinstance(point, str) else point[1] == float(row["gain %"])


@pytest.mark.full
def test_jobs_beside_the_first_one_have_its_flags_but_those_that_they_change(tmp_path: Path) -> None:
    path = tmp_path / "grid.html"
    mixture = ["--nodes 4 --model qwen3-30b -- --expert-model-parallel-size 8", "--tensor-model-parallel-size 1",
               "--pipeline-model-parallel-size 1"]  # fmt: skip
    words = [*ASKED, "--beside", " ".join(mixture), "--output", str(path), "--", *JOB]
    assert planner.main(words) == 0
    first, second = numbers_of(path)
    assert (first["title"], second["title"]) == ("GPT 8.3B on 32 H100s", "Qwen3 30B on 32 H100s")
    flags = second["megatron"]["8|64"].split()
    assert flags.count("--pipeline-model-parallel-size") == 1 and "--use-distributed-optimizer" in flags
    assert flags[flags.index("--pipeline-model-parallel-size") + 1] == "1"
    assert [*second["axes"]["replicas"]] == ["8"] and second["losses"]["balanced"].startswith("undecided")


def test_the_losses_on_the_page_are_rows_of_the_evidence() -> None:
    evidence = (Path(planner.__file__).parents[2] / "docs" / "evidence.md").read_text()
    kinds = {"balanced": "`balanced`", "DP gradients int4": "gradients in int4 alone", "paper": "`paper`"}
    for form, kind in kinds.items():
        mean, parameters = re.findall(r"^(\S+) % .* (\d[\d.]*) million", LOSSES[form])[0]
        model = evidence[evidence.index(f"{parameters} million |") :]
        assert re.search(rf"\| {kind}[^|]*\| {re.escape(mean)} \|", model.partition("\n\n")[0])


def test_a_file_of_another_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main([*ASKED, "--output", "grid.pdf", "--", *JOB]) == 2
    assert "--output grid.pdf: give a folder, or a file that ends in .html, .csv, .svg, .png" in capsys.readouterr().err
