"""The compressors' benchmark at a tiny scale, and that it times nothing that is wrong."""

import importlib
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from optimus_cc_ext.compressors import FastLowRank
from tests.shell_scripts import ROOT

BENCH = ROOT / "scripts/bench"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH / "compressors.py"), *arguments]
    return subprocess.run(command, text=True, capture_output=True, timeout=200)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("bench") / "with a blank"
    ended = run("--device", "cpu", "--scale", "tiny", "--threads", "1", "--repeats", "1", "--results", str(results))
    assert ended.returncode == 0, ended.stderr
    return results


def test_every_section_is_measured_against_all_that_it_names(measured: Path) -> None:
    found = json.loads((measured / "compressors-cpu.json").read_text())
    rows = found["rows"]
    assert found["machine"]["scale"] == "tiny" and found["machine"]["threads"] == 1
    assert {row["section"] for row in rows} == {"slices", "orthogonalization", "bucket", "layers"}
    works = {name: {row["work"] for row in rows if row["section"] == name} for name in ("slices", "bucket")}
    assert works["slices"] == {
        "ours, compress", "ours, decompress", "reference, compress", "reference, decompress",
        "hook, compress and decompress",
    }  # fmt: skip
    assert works["bucket"] == {"ours", "hook, batched", "hook, as by default"}
    ours = [row for row in rows if row["work"] == "ours, compress"]
    ranks = [int(row["case"].rsplit(" ", 1)[1]) for row in ours]
    assert ranks == 3 * list(range(8, 41, 4))
    assert all(row["floor_seconds"] > 0 and row["sample"]["median"] > 0 for row in ours)
    assert all(row["more"]["operators"] > 0 for row in rows if row["section"] == "layers")


def test_the_page_says_what_was_not_measured(measured: Path) -> None:
    page = (measured / "compressors-cpu.md").read_text()
    assert "## capture\n\nnot measured" in page
    on_gpu = [line for line in page.splitlines() if line.startswith("| cuda |")]
    assert on_gpu and all("| not measured |" in line for line in on_gpu)
    for section in ("slices", "bucket", "layers"):
        assert f"![{section}](compressors-cpu-{section}.png)" in page
        assert (measured / f"compressors-cpu-{section}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--device", "cpu", "--repeats", "0"], "--repeats 0: at least 1 is needed"),
        (["--device", "cpu", "--threads", "-1"], "--threads -1: at least 1 is needed"),
        (["--device", "cpu", "--only", "capture"], "a CUDA graph needs a GPU. Give --device cuda"),
        (["--device", "cpu", "--only", "everything"], "invalid choice: 'everything'"),
        (["--device", "cpu", "--case", "8.3b"], "--case 8.3b: only slices have such cases. Give --only slices with it"),
        (["--device", "cpu", "--only", "slices", "--case", "9b"], "--case 9b: no slice's case contains it"),
        ([], "--device"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], reason: str) -> None:
    ended = run(*arguments)
    assert ended.returncode == 2 and reason in ended.stderr


def test_one_slice_can_be_asked_for(tmp_path: Path) -> None:
    ended = run(
        "--device", "cpu", "--scale", "tiny", "--threads", "1", "--repeats", "1", "--results", str(tmp_path),
        "--only", "slices", "--case", "8.3b, 128 x 384, rank 16",
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = json.loads((tmp_path / "compressors-cpu.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {"8.3b, 128 x 384, rank 16"} and len(rows) == 5


@pytest.fixture
def sections(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in (ROOT / "scripts/paper", BENCH):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module("compressors_sections")


def test_a_bucket_that_loses_gradient_is_not_timed(sections: ModuleType) -> None:
    class Forgetful(FastLowRank):
        def project_sum(self, matrices: torch.Tensor, *others: Any, total: torch.Tensor, out: torch.Tensor) -> None:
            super().project_sum(matrices, *others, total=total, out=out)
            total.mul_(0.99)

    class Blind(FastLowRank):
        def back_project(self, matrices: torch.Tensor, p: torch.Tensor, out: Any = None) -> torch.Tensor:
            return super().back_project(matrices, p, out=out).mul_(0.99)

    shapes, cpu = ((24, 32), (40, 16)), torch.device("cpu")
    sections.check_bucket(FastLowRank, shapes, cpu, 4)
    with pytest.raises(SystemExit, match=r"bucket of \(24, 32\): 2\.0e-02 lost"):
        sections.check_bucket(Forgetful, shapes, cpu, 4)
    with pytest.raises(SystemExit, match="off the hook"):
        sections.check_bucket(Blind, shapes, cpu, 4)


def test_contenders_work_in_processes_of_their_own_and_say_why_they_cannot(sections: ModuleType) -> None:
    alternate, cpu = sections.alternate, torch.device("cpu")
    message = partial(sections._message, FastLowRank, "8.3b", 24, 32, 4, cpu)
    samples = alternate({"one": message, "other": message}, cpu, 2, in_a_row=3, warm_up=0.0, cold=True)
    assert {*samples} == {"one, compress", "one, decompress", "other, compress", "other, decompress"}
    assert all(sample.repetitions == 6 and sample.median > 0 for sample in samples.values())
    again = alternate({"one": message}, cpu, 2, in_a_row=3, warm_up=0.0, processes=3)
    assert all(sample.repetitions == 18 for sample in again.values())
    with pytest.raises(SystemExit, match="it is wrong"):
        alternate({"one": message, "other": partial(sys.exit, "it is wrong")}, cpu, 1)
    with pytest.raises(SystemExit, match="process of 'other' ended"):
        alternate({"one": message, "other": partial(os._exit, 3)}, cpu, 1)


@pytest.mark.parametrize("one, apart", [(1.9, True), (1.6, True), (1.4, False), (1.0, False)])
def test_two_threads_that_are_hardly_faster_than_one_share_a_core(sections, monkeypatch, one, apart) -> None:
    timing = importlib.import_module("compressors_timing")
    monkeypatch.setattr(timing, "_fastest_small_product", lambda: {1: one, 2: 1.0}[torch.get_num_threads()])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert timing.have_cores_of_their_own() == apart
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("answers, tried, crowded", [("yy", 1, 0), ("ynyy", 2, 0), ("nyy", 2, 0), ("yn" * 3, 3, 1)])
def test_a_turn_on_a_shared_core_is_taken_again_and_counted_if_it_stays_so(
    sections, monkeypatch, answers, tried, crowded
) -> None:
    contenders = importlib.import_module("compressors_contenders")
    asked, turns = iter(answers), []
    monkeypatch.setattr(contenders, "have_cores_of_their_own", lambda: next(asked) == "y")
    monkeypatch.setattr(contenders.time, "sleep", lambda _: None)
    how = contenders._How(in_a_row=1, warm_up=0.0, cold=False, attempts=3)
    turn = contenders._turn(lambda: turns.append(1), how, torch.zeros(0))
    assert (len(turns), turn.crowded, len(turn.seconds)) == (tried, crowded, 1)
    assert next(asked, None) is None


def test_a_basis_that_is_none_is_not_timed(sections: ModuleType) -> None:
    p = torch.randn(2, 30, 4, generator=torch.Generator().manual_seed(1))
    basis = torch.linalg.qr(p).Q
    sections.check_basis(p, basis, "p")
    for wrong in (basis * (1 + 1e-5), torch.linalg.qr(p + 1e-4).Q, torch.full_like(p, torch.nan)):
        with pytest.raises(SystemExit, match="orthogonalisation of p"):
            sections.check_basis(p, wrong, "p")
