"""From launch to plot: real tiny runs of an experiment, its tables and pictures; figure 14; peak memory."""

import csv
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from optimus_cc_ext.compressors.low_rank import FastLowRank
from scripts.paper import figure14
from scripts.paper.collect import collect
from tests.shell_scripts import ROOT, Ended, run_script

pytestmark = pytest.mark.ci

EXPERIMENT = "table2/335m-cb-fe-sc"
PEAK_MEMORY = (sys.executable, str(ROOT / "scripts/paper/peak_memory.py"))


@dataclass(frozen=True)
class TinyRuns:
    """Runs of an experiment of 3 iterations that was stopped after 2, and started again."""

    results: Path
    first: Ended
    second: Ended


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyRuns]:
    results = tmp_path_factory.mktemp("paper") / "results with a blank"

    def run(*further: str) -> Ended:
        env = {"RESULTS": str(results), "TRAIN_ITERS": "3", "SCALE": "tiny"}
        return run_script(f"paper/{EXPERIMENT}.sh", "--eval-interval", "1", *further, env=env, limit=240)

    yield TinyRuns(results, run("--exit-interval", "2"), run())
    shutil.rmtree(results)


@pytest.fixture(scope="module")
def report(tiny: TinyRuns) -> Path:
    """Make the report, with figure 14 in it; return its folder."""
    for command in (["figure14", "--scale", "tiny", "--device", "cpu", "--repeats", "1"], ["collect"]):
        ended = run_module(*command, "--results", str(tiny.results))
        assert ended.returncode == 0, ended.stderr
    assert "not run, left out: figure10, figure11-summary, figure12" in ended.stdout
    return tiny.results / "report"


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"scripts.paper.{name}", *arguments]
    return subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=120)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def iterations_in(output: str) -> list[int]:
    return [int(number) for number in re.findall(r"iteration +(\d+)/ +\d+ \|", output)]


@pytest.mark.full
def test_a_second_start_goes_on_where_the_first_one_ended(tiny: TinyRuns) -> None:
    for ended in (tiny.first, tiny.second):
        assert ended.code == 0, ended.output[-3000:] + ended.errors
    assert iterations_in(tiny.first.output) == [1, 2] and "resuming" not in tiny.first.output
    assert "could not find the metadata file" in tiny.first.output
    assert "pretrain_gpt.sh: resuming after iteration 2 from" in tiny.second.output
    assert iterations_in(tiny.second.output) == [3]
    folder = tiny.results / EXPERIMENT
    assert (folder / "checkpoints/latest_checkpointed_iteration.txt").read_text() == "3"
    assert iterations_in((folder / "log.txt").read_text()) == [1, 2, 3], "one log of both"


@pytest.mark.full
def test_the_table_says_what_the_logs_said(tiny: TinyRuns, report: Path) -> None:
    [row] = rows_of(report / "table2.csv")
    assert (row["model"], row["variant"], row["iterations"]) == ("GPT-335M", "CB+FE+SC", "3")
    validation = re.findall(r"validation loss at iteration (\d) \| lm loss value: (\S+)", tiny.first.output)
    validation += re.findall(r"validation loss at iteration (\d) \| lm loss value: (\S+)", tiny.second.output)
    assert [iteration for iteration, _ in validation] == ["1", "2", "3"]
    assert float(row["validation loss"]) == float(validation[-1][1])
    traffic = re.findall(r"optimus-cc traffic per iteration \| (.*)", tiny.second.output)[-1]
    sent, raw = (sum(map(float, numbers)) for numbers in zip(*re.findall(r"(\S+) of (\S+) MB", traffic), strict=True))
    assert float(row["traffic sent, %"]) == pytest.approx(100 * sent / raw)
    assert 20 < 100 * sent / raw < 80, "it compressed"
    curve = rows_of(report / "figure9.csv")
    assert [(point["iteration"], float(point["validation loss"])) for point in curve] == [
        (iteration, float(loss)) for iteration, loss in validation
    ]
    assert float(curve[2]["training hours"]) > float(curve[0]["training hours"]) > 0


@pytest.mark.full
def test_pictures_and_a_page_are_there(report: Path) -> None:
    for name in ("figure9.png", "figure14.png"):
        assert (report / name).read_bytes().startswith(b"\x89PNG") and (report / name).stat().st_size > 10_000
    text = (report / "report.md").read_text()
    assert "## Table 2" in text and "## Figure 14" in text and "](figure9.svg)" in text
    assert "![GPT-335M, CB+FE+SC: iteration 1 to 3, training hours " in text
    page = (report / "index.html").read_text()
    assert "Table 2" in page and "Figure 14" in page and page.count("<svg role=") == 2


@pytest.mark.full
def test_figure_14_has_every_rank_on_every_slice_for_both_compressors(report: Path) -> None:
    rows = rows_of(report / "figure14.csv")
    ranks = [str(number) for number in range(8, 41, 4)]
    for model, shape in {"2.5b": ("128", "240"), "8.3b": ("128", "384"), "175b": ("256", "1536")}.items():
        for compressor in ("fast", "reference"):
            mine = [row for row in rows if (row["model"], row["compressor"]) == (model, compressor)]
            assert [row["rank"] for row in mine] == ranks
            assert {(row["rows"], row["columns"]) for row in mine} == {shape}
            assert all(float(row[f"{what}, Gbit/s"]) > 0 for row in mine for what in ("compress", "decompress"))


def test_figure_14_times_no_compressor_that_computes_something_else() -> None:
    class Forgetful(FastLowRank):
        def back_project(
            self, matrices: torch.Tensor, p: torch.Tensor, out: torch.Tensor | None = None
        ) -> torch.Tensor:
            return super().back_project(matrices, p, out=out).mul_(0.99)

    with pytest.raises(SystemExit, match=r"rank 8 of 64 x 96: 1\.0e-02 of a matrix of this rank is lost"):
        figure14.check(Forgetful(), 64, 96, 8, torch.device("cpu"))
    figure14.check(FastLowRank(), 64, 96, 8, torch.device("cpu"))


LOG = """\
optimus-cc: compression state in fp32: up to 12.5 MB on a rank (2.5 MB pipeline link, 10.0 MB gradient buckets)
[Rank 4] (after 1 iterations) memory (MB) | allocated: 90.00 | max allocated: 100.00 | reserved: 1.00 | max reserved: \
1.00[Rank 0] (after 1 iterations) memory (MB) | allocated: 1.00 | max allocated: 80.00 | reserved: 1.00 |
 [2026-01-01 00:00:00] iteration        1/      10 | consumed samples: 16 | elapsed time per iteration (ms): 9000.0 | \
learning rate: 1E-04 | global batch size:    16 | lm loss: 6.0E+00 | loss scale: 1.0 |
 [2026-01-01 00:00:00] iteration        2/      10 | consumed samples: 32 | elapsed time per iteration (ms): {ms} | \
learning rate: 1E-04 | global batch size:    16 | lm loss: 5.5E+00 | loss scale: 1.0 |
[Rank 4] (after 2 iterations) memory (MB) | allocated: 90.00 | max allocated: {mb} | reserved: 1.00 | max reserved: 1
  optimus-cc traffic per iteration | pipeline backward: 1.000 of 4.000 MB (25.0 %) | embedding: 0.500 of 0.500 MB
  optimus-cc compression | CB: error 86.69 %, residual norm 1.574e-01, 14.91 ms | SC: error 5.00 %, residual norm \
1e-1, 3.50 ms
  optimus-cc errors against activation differences | stage 1: cosine -0.0034, mean error +2.18e-12, mean activation \
difference +7.89e-05 | stage 2: cosine +0.5000, mean error -2.00e-13, mean activation difference +1.09e-04
peak resident memory (MB) | 900.50
"""


@pytest.mark.full
def test_breakdown_statistics_and_memory_come_out_of_the_lines_that_say_them(tmp_path: Path) -> None:
    for experiment in ("figure10", "figure11", "figure12"):
        for variant, ms, mb in (("baseline", "300.0", "200.00"), ("cb-lep", "200.0", "250.00")):
            folder = tmp_path / experiment / f"8.3b-{variant}"
            folder.mkdir(parents=True)
            (folder / "log.txt").write_text(LOG.replace("{ms}", ms).replace("{mb}", mb))
    (tmp_path / "figure12/8.3b-cb-lep/log.txt").write_text("it ended before its first iteration\n")
    assert collect(tmp_path, tmp_path / "report") == ["figure10", "figure11-summary", "figure12"]
    base, compressed = rows_of(tmp_path / "report/figure10.csv")
    assert (base["ms per iteration"], base["speedup"]) == ("300.0", "1.0"), "the first iteration is left out"
    assert compressed["ms per iteration"] == "200.0" and float(compressed["speedup"]) == pytest.approx(1.5)
    assert (compressed["CB, ms"], compressed["SC, ms"], compressed["pipeline backward, MB"]) == ("14.91", "3.5", "1.0")
    statistics = rows_of(tmp_path / "report/figure11.csv")
    assert [(row["stage"], row["cosine"]) for row in statistics[:2]] == [("1", "-0.0034"), ("2", "0.5")]
    assert statistics[0]["mean error"] == "2.18e-12"
    [memory] = rows_of(tmp_path / "report/figure12.csv")
    assert (memory["variant"], memory["peak, MB"], memory["measured"]) == ("Baseline", "200.0", "GPU memory allocated")
    assert memory["compression state, MB"] == "12.5"
    # Without a GPU Megatron reports zeros.
    on_cpu = re.sub(r"allocated: [\d.]+", "allocated: 0.00", LOG.replace("{mb}", "0.00")).replace("{ms}", "1.0")
    (tmp_path / "figure12/8.3b-baseline/log.txt").write_text(on_cpu)
    collect(tmp_path, tmp_path / "report")
    [memory] = rows_of(tmp_path / "report/figure12.csv")
    assert memory["peak, MB"] == "900.5" and memory["measured"].startswith("CPU: resident memory")


def test_runs_that_never_validated_are_a_table_without_a_picture(tmp_path: Path) -> None:
    folder = tmp_path / "table2" / "2.5b-baseline"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text(LOG.replace("{ms}", "300.0").replace("{mb}", "200.00"))
    assert collect(tmp_path, tmp_path / "report") == ["table2"]
    assert len(rows_of(tmp_path / "report/table2.csv")) == 1
    assert not (tmp_path / "report/figure9.png").exists()


def test_nothing_to_collect_is_said(tmp_path: Path) -> None:
    for results, reason in ((tmp_path / "none", "no such folder"), (tmp_path, "no log with an iteration in it")):
        ended = run_module("collect", "--results", str(results))
        assert ended.returncode == 2 and reason in ended.stderr


HUNGRY = "import mmap, time; unused = mmap.mmap(-1, 500 << 20); bytearray({mb} << 20); raise SystemExit(7)"
"""Program that asks for 500 MB that it never touches, and returns `mb` at once."""


def test_peak_memory_is_that_of_the_largest_rank_and_the_exit_status_is_the_commands() -> None:
    peaks = []
    for sizes in ((60, 10), (10, 160)):
        ranks = [f"{sys.executable} -c '{HUNGRY.format(mb=mb)}' & ranks+=($!)" for mb in sizes]
        command = [*PEAK_MEMORY, "bash", "-c", "\n".join([*ranks, 'wait "${ranks[0]}"; wait "${ranks[1]}"'])]
        ended = subprocess.run(command, text=True, capture_output=True, timeout=60)
        assert ended.returncode == 7
        peaks += [float(mb) for mb in re.findall(r"^peak resident memory \(MB\) \| (\S+)", ended.stdout)]
    assert peaks[1] - peaks[0] == pytest.approx(100, abs=5), "two interpreters, alike but for what they held"
    assert peaks[0] < 60 + 100, "an interpreter without anything takes about 10 MB"


def test_a_signal_to_the_watcher_ends_what_it_watches() -> None:
    command = [*PEAK_MEMORY, sys.executable, "-c", "import time; time.sleep(60)"]
    watcher = psutil.Popen(command)
    deadline = time.monotonic() + 20
    while not (children := watcher.children()) and time.monotonic() < deadline:
        time.sleep(0.05)
    [child] = children
    time.sleep(0.5)  # the program sets its signal handlers right after its start
    watcher.send_signal(signal.SIGTERM)
    assert watcher.wait(20) == 128 + signal.SIGTERM
    assert not child.is_running()
