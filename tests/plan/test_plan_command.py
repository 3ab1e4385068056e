"""`optimus-cc plan` as a user runs it: its output and files, its refusals, and that it needs no torch."""

import csv
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optimus_cc_ext import cli
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.plan.variants import VARIANTS

LAYOUT = ["--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "8",
          "--global-batch-size", "512"]  # fmt: skip
PLAN = ["--cluster", "paper", "--nodes", "16", "--model", "8.3b"]


def main(arguments: list[str]) -> int:
    return cli.main(["plan", *arguments])


def test_every_block_format_of_every_class_is_planned_alone() -> None:
    for traffic in CLASSES:
        for format in traffic.block_formats:
            assert f"{traffic.format_flag} {format}" in VARIANTS.values(), f"{traffic.name} in {format}"


def test_the_planner_imports_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, pkgutil, importlib, optimus_cc_ext.plan as plan\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(plan.__path__, 'optimus_cc_ext.plan.')]\n"
        "print([m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_it_says_seconds_gains_and_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--", *LAYOUT]) == 0
    said = capsys.readouterr().out
    assert "8.3B parameters on 128 x A100" in said and "nearest published run: " in said
    assert "use: --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4" in said
    for part in ("| vanilla |", "| paper |", "| DP int4 |", "| FE int8 |", "| pipeline backward |", "| optimizer |"):
        assert part in said
    assert "gemm_efficiency 0.799: fitted" in said and "No public run tests the compression terms" in said


def test_our_flags_are_planned_as_they_are_and_megatrons_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    # The word 1 is the value of one of our flags, and of a flag that no plan reads.
    ours = ["--optimus-cc", "--dp-compression-stages", "1", "--lr", "0.1", "--save-interval", "1"]
    assert main([*PLAN, "--format", "csv", "--", *LAYOUT, *ours]) == 0
    rows = {row["variant"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert rows["yours"]["DP stages"] == "0" and rows["paper"]["DP stages"] == "0,1,2"
    assert rows["int8"]["DP stages"] == "all"
    assert rows["yours"]["flags"] == "--optimus-cc --dp-compression-stages 1"
    main([*PLAN, "--", *LAYOUT, *ours])
    assert "Not part of a plan: --lr 0.1 --save-interval 1" in capsys.readouterr().out


def test_where_links_are_fast_nothing_pays_and_where_they_are_slow_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    def verdicts(cluster: str) -> dict[str, str]:
        main(["--cluster", cluster, "--nodes", "16", "--model", "8.3b", "--format", "json", "--", *LAYOUT])
        rows = json.loads(capsys.readouterr().out)["Seconds per iteration"]
        assert all(row["from %"] <= row["gain %"] <= row["to %"] for row in rows)
        return {row["variant"]: row[""] for row in rows}

    assert verdicts("a100-hdr200")["CB int8"] == "does not pay"
    assert set(verdicts("10gbe").values()) - {""} == {"pays"}


def test_one_stage_and_one_replica_leave_out_what_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--cluster", "a100-hdr200", "--nodes", "1", "--model", "2.5b", "--format", "json", "--"]
    assert main([*args, "--tensor-model-parallel-size", "4"]) == 0
    names = [row["variant"] for row in json.loads(capsys.readouterr().out)["Seconds per iteration"]]
    assert not [name for name in names if name.startswith(("CB", "FE", "forward"))] and "DP int8" in names


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nodes", "2"], "give --cluster"),
        (["--cluster", "paper"], "give --nodes"),
        (["--cluster", "h100-ndr", "--nodes", "2"], "did you mean h100-ndr400"),
        (["--cluster", "paper", "--nodes", "0"], "--nodes: 0 is not a positive number"),
        (["--cluster", "paper", "--nodes", "2"], "no layers, hidden, heads: give --model"),
        (["--cluster", "paper", "--nodes", "2", "--model", "9b"], "unknown model '9b'"),
        ([*PLAN, "--", "--pipeline-model-parallel-size", "5"], "128 GPUs do not divide among 5 tensor x pipeline"),
        ([*PLAN, "--", "--tensor-model-parallel-size", "-2"], "--tensor-model-parallel-size: -2 is not a positive"),
        ([*PLAN, "--", "--tensor-model-parallel-size", "x"], "invalid _whole value: 'x'"),
        ([*PLAN, "--", "--num-experts", "8"], "--num-experts: not modelled"),
        ([*PLAN, "--", "--micro-batch-size", "64"], "GB more than the A100 has"),
        ([*PLAN, "--", *LAYOUT, "--compressed-backprop-rank", "0"], "--compressed-backprop-rank"),
        ([*PLAN, "--sweep", "nodes=8..x", "--", *LAYOUT], "nodes=8..x"),
        ([*PLAN, "--sweep", "speed=1", "--", *LAYOUT], "unknown speed"),
        ([*PLAN, "--sweep", "link=hdr9x", "--", *LAYOUT], "unknown network 'hdr9x'"),
        ([*PLAN, "--sweep", "layout=some", "--", *LAYOUT], "layout=some: give one of given, all, best"),
        ([*PLAN, "--sweep", "nodes=7", "--", *LAYOUT], "nothing is left to plan: 56 GPUs do not divide"),
    ],
)
def test_bad_input_is_refused_with_the_reason(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert complaint in said and said.startswith("error: ") and said.count("\n") == 1


def test_the_page_the_tables_and_the_traces_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--output", str(tmp_path / "out"), "--", *LAYOUT]) == 0
    out = tmp_path / "out"
    page = (out / "index.html").read_text()
    assert page.count("data:image/svg+xml") == 2 and "Predicted, not measured" in page
    rows = {row["variant"] for row in csv.DictReader((out / "plan.csv").open())}
    # Without the distributed optimizer no parameter is gathered, and without experts no token is sent to them.
    nothing_to_send = {name for name in VARIANTS if name.split()[0] in ("gather", "dispatch", "expert")}
    assert len(nothing_to_send) == 2 + 3 + 3
    assert rows == {"vanilla", *VARIANTS} - nothing_to_send and "balanced" in rows
    assert {"lines", "Seconds per iteration", "Memory"} <= json.loads((out / "plan.json").read_text()).keys()
    for name in ("vanilla", "best"):
        assert json.loads((out / f"trace_{name}.json").read_text())["traceEvents"]


def test_a_sweep_goes_over_nodes_links_and_all_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = "nodes=2..8,link=hdr8+10gbe,layout=all,batch=weak"
    arguments = ["--cluster", "paper", "--nodes", "2", "--model", "2.5b", "--format", "json", "--sweep", sweep]
    assert main([*arguments, "--output", str(tmp_path), "--", "--global-batch-size", "64"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert {(row["nodes"], row["link"]) for row in rows} == {(n, link) for n in (2, 4, 8) for link in ("hdr8", "10gbe")}
    assert {row["batch"] for row in rows if row["nodes"] == 8} == {256} and len(rows) > 100
    assert all(row["GB a rank"] <= 80 for row in rows)
    one = [row["vanilla s"] for row in rows if (row["nodes"], row["link"]) == (4, "hdr8")]
    assert one == sorted(one)
    assert "data:image/svg+xml" in (tmp_path / "index.html").read_text()
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == len(rows)


def test_a_sweep_of_the_best_layouts_shows_the_fastest_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    def rows(layout: str) -> list[dict[str, float]]:
        sweep = f"nodes=2+4,layout={layout}"
        main(["--cluster", "paper", "--nodes", "2", "--model", "2.5b", "--format", "json", "--sweep", sweep, "--",
              "--global-batch-size", "64"])  # fmt: skip
        (found,) = json.loads(capsys.readouterr().out).values()
        return found

    everything, best = rows("all"), rows("best")
    assert best == [next(row for row in everything if row["nodes"] == nodes) for nodes in (2, 4)]


def test_ten_thousand_gpus_and_a_trillion_parameters_are_planned_in_five_seconds() -> None:
    model = ["--num-layers", "125", "--hidden-size", "25600", "--num-attention-heads", "160", "--seq-length", "2048",
             "--padded-vocab-size", "51200", "--tensor-model-parallel-size", "8", "--pipeline-model-parallel-size",
             "25", "--global-batch-size", "3200", "--recompute-granularity", "full"]  # fmt: skip
    begin = time.process_time()
    assert main(["--cluster", "h100-ndr400", "--nodes", "1250", "--", *model, "--use-distributed-optimizer"]) == 0
    assert time.process_time() - begin < 5.0


def test_the_order_of_ranks_changes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", "--global-batch-size", "64"]
    words = ["--cluster", "a100-100gbe", "--nodes", "4", "--model", "2.5b", "--", *layout]
    assert main(words) == 0
    usual = capsys.readouterr().out
    assert main([*words, "--use-tp-pp-dp-mapping"]) == 0
    other = capsys.readouterr().out
    assert usual != other and "--use-tp-pp-dp-mapping" in other and "--use-tp-pp-dp-mapping" not in usual
