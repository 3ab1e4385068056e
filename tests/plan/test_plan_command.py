"""`optimus-cc plan` as a user runs it: its output and files, its refusals, and that it needs no torch."""

import csv
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from optimus_cc_ext.config.classes import (
    CLASSES,
    DP_GRADIENTS,
    EXPERT_DISPATCH,
    EXPERT_GRADIENT,
    PIPELINE_FORWARD,
    TrafficClass,
)
from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.plan.variants import VARIANTS
from scripts.planned import __main__ as planned

pytestmark = pytest.mark.ci

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
        "import sys, pkgutil, importlib, optimus_cc_ext.tools.plan as plan\n"
        "[importlib.import_module(m.name) for m in pkgutil.iter_modules(plan.__path__, 'optimus_cc_ext.tools.plan.')]\n"
        "print([m for m in ('torch', 'megatron') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_it_says_seconds_gains_and_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--", *LAYOUT]) == 0
    said = capsys.readouterr().out
    assert "8.3B parameters on 128 x A100" in said and "nearest published run: " in said
    assert "use: --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4" in said
    for part in (
        "| vanilla |",
        "| paper |",
        "| gradients int4 |",
        "| embedding int8 |",
        "| pipeline backward |",
        "| optimizer |",
    ):
        assert part in said
    assert "gemm_efficiency" not in said and "No public run tests the compression terms" in said
    main([*PLAN, "--constants", "--", *LAYOUT])
    said = capsys.readouterr().out
    assert "gemm_efficiency 0.799 of the peak: fitted" in said
    assert "node_rate 2.4e+10 bytes/s: measured, nccl-tests: 8 x HDR200 reach 192 of 200 GB/s" in said


def test_the_answer_comes_first_then_the_flags_then_the_breakdown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--", *LAYOUT]) == 0
    lines = capsys.readouterr().out.splitlines()
    tags = [traffic.tag for traffic in CLASSES]
    assert re.fullmatch(r"yes: \d+ % less time with --optimus-cc balanced \(\d+ to \d+ %\)", lines[0])
    assert [line.split(":")[0] for line in lines[2 : 2 + len(tags)]] == tags
    answer = dict(zip(tags, lines[2:], strict=False))
    assert re.match(r"DP gradients: yes, int8 saves 0\.\d+ s an iteration beside the others \(", answer["DP gradients"])
    assert answer["parameter gather"].startswith("parameter gather: no, there is nothing to compress")
    use = lines[1]
    assert use.startswith("use: ") and "of loss for a GPT of 7 million parameters (docs/evidence.md)" in use
    # All four classes pay, so the flags are the preset's. Low rank and int4 gradients cost more loss than is allowed.
    assert " --optimus-cc balanced  " in use and "int4" not in use
    assert lines[2 + len(tags)].startswith("left out for its loss, +0.045 %")
    narrow = next(line for line in lines if line.startswith("vanilla with --grad-reduce-in-bf16: "))
    assert "; with the flags above " in narrow
    assert lines.index("## Where the seconds go, unhidden") < lines.index("## Seconds per iteration")
    main([*PLAN, "--", *LAYOUT, "--grad-reduce-in-bf16"])
    assert "vanilla with --grad-reduce-in-bf16" not in capsys.readouterr().out


def test_a_class_that_saves_less_than_it_is_worth_is_left_dense(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1",
              "--global-batch-size", "256", "--sequence-parallel", "--use-distributed-optimizer",
              "--overlap-grad-reduce", "--overlap-param-gather", "--grad-reduce-in-bf16"]  # fmt: skip
    assert main(["--cluster", "h100-hdr1", "--nodes", "8", "--model", "llama3-8b", "--", *layout]) == 0
    said = capsys.readouterr().out
    assert "pipeline backward: no, int8 " in said and ": it does not surely save 0.25 %" in said
    use = next(line for line in said.splitlines() if line.startswith("use: "))
    assert "--dp-compression-format int8" in use and "--compressed-backprop" not in use
    one_node = ["--cluster", "h100-ndr400", "--nodes", "1", "--model", "2.5b"]
    assert main([*one_node, "--", "--tensor-model-parallel-size", "4"]) == 0
    assert capsys.readouterr().out.startswith(
        "no: compression saves less than 2.5 % of an iteration here. Most seconds go to computation ("
    )


MIXTURE = ["--num-experts", "16", "--expert-model-parallel-size", "16", "--expert-tensor-parallel-size", "1",
           "--moe-token-dispatcher-type", "alltoall", "--use-distributed-optimizer"]  # fmt: skip


def answer_of(traffic: TrafficClass, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the sentence about a class in the answer of a plan."""
    assert main(arguments) == 0
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith(f"{traffic.tag}: "))


def test_only_gradients_of_tokens_have_a_price_in_loss_and_are_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--cluster", "a100-100gbe", "--nodes", "4", "--model", "2.5b", "--", *MIXTURE]
    for traffic in (EXPERT_DISPATCH, EXPERT_GRADIENT):
        sentence = answer_of(traffic, words, capsys)
        priced = traffic is EXPERT_GRADIENT
        said = f": {'yes' if priced else 'no'}, int8 saves [\\d.]+ s an iteration beside the others \\("
        assert re.search(said, sentence), sentence
        without = "six seeds cannot rule out a price of 0.05 % of loss (docs/evidence.md)"
        assert sentence.endswith(without) != priced
        flex = answer_of(traffic, [*words, "--moe-token-dispatcher-type", "flex"], capsys)
        assert "only the tokens of the dispatcher alltoall can be compressed" in flex
    for backend, name in (("deepep", "DeepEP"), ("ncclep", "NCCL EP"), ("hybridep", None)):
        assert main([*words, "--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", backend]) == 0
        said = capsys.readouterr().out
        assert (" is planned as HybridEP" in said) == (name is not None)
        assert name is None or f"left out: {name} is planned as HybridEP" in said
    assert main([*words, "--expert-dispatch-format", "int8", "--expert-gradient-format", "int4"]) == 0
    said = capsys.readouterr().out
    rows = {line.split(" | ")[0].strip("| "): line for line in said.splitlines() if line.startswith("| ")}
    assert "| yours |" in said and "--expert-dispatch-format" not in said.split("use: ")[1].split("\n")[0]
    parts = [float(cell) for cell in rows["expert dispatch"].split("|")[2:4]]
    assert parts[1] < 0.6 * parts[0], "int8 sends half of bf16's bytes"


def test_what_overlap_of_experts_forbids_is_not_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "a100-100gbe", "--nodes", "4", "--model", "2.5b", "--", *MIXTURE,
             "--pipeline-model-parallel-size", "2", "--overlap-moe-expert-parallel-comm"]  # fmt: skip
    assert "it changes the 1F1B schedule" in answer_of(PIPELINE_FORWARD, words, capsys)


def test_instances_of_the_optimizer_are_summed_in_blocks_between_them(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "a100-100gbe", "--nodes", "4", "--model", "2.5b", "--", "--use-distributed-optimizer"]
    several = [*words, "--num-distributed-optimizer-instances", "4"]
    assert re.match(r"DP gradients: yes, int8 saves", answer_of(DP_GRADIENTS, several, capsys))
    assert main(several) == 0
    said = capsys.readouterr().out
    assert "not validated: 4 instances of the distributed optimizer, which no public run has" in said
    assert "--num-distributed-optimizer-instances 4" in said and "| gradients low-rank |" not in said


def test_a_class_is_explained_with_its_bytes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--why", "DP gradients", "--", *LAYOUT]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("DP gradients: yes, int8 saves ")
    assert said[1] == "  vanilla sends it by all-reduce or reduce-scatter among replicas"
    assert said[2].startswith("  exposed in vanilla's iteration, which nothing hides: 0.5")
    dense, int8 = (float(re.search(r"([\d.]+) MB of a rank", line)[1]) for line in said[3:])  # type: ignore[index]
    # Ring all-reduce of fp32, and two phases of 8.125 bits.
    assert int8 / dense == pytest.approx(8.125 / 32, rel=0.25)
    assert main([*PLAN, "--why", "parameter-gather", "--", *LAYOUT]) == 0
    assert "no, there is nothing to compress" in capsys.readouterr().out


def test_our_flags_are_planned_as_they_are_and_megatrons_others_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    # The word 1 is the value of one of our flags, and of a flag that no plan reads.
    ours = ["--optimus-cc", "--dp-compression-stages", "1", "--weight-decay", "0.1", "--save-interval", "1"]
    assert main([*PLAN, "--format", "csv", "--", *LAYOUT, *ours]) == 0
    rows = {row["variant"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert rows["yours"]["DP stages"] == "0" and rows["paper"]["DP stages"] == "0,1,2"
    assert rows["balanced"]["DP stages"] == "all"
    assert rows["yours"]["flags"] == "--optimus-cc --dp-compression-stages 1"
    main([*PLAN, "--", *LAYOUT, *ours])
    assert "Not part of a plan: --weight-decay 0.1 --save-interval 1" in capsys.readouterr().out


def test_where_links_are_fast_nothing_pays_and_where_they_are_slow_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    def verdicts(cluster: str) -> dict[str, str]:
        main(["--cluster", cluster, "--nodes", "16", "--model", "8.3b", "--format", "json", "--", *LAYOUT])
        rows = json.loads(capsys.readouterr().out)["Seconds per iteration"]
        assert all(row["from %"] <= row["gain %"] <= row["to %"] for row in rows)
        return {row["variant"]: row[""] for row in rows}

    assert verdicts("a100-hdr200")["backward int8"] == "does not pay"
    assert set(verdicts("10gbe").values()) - {""} == {"pays"}


def test_one_stage_and_one_replica_leave_out_what_cannot_work(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--cluster", "a100-hdr200", "--nodes", "1", "--model", "2.5b", "--format", "json", "--"]
    assert main([*args, "--tensor-model-parallel-size", "4"]) == 0
    names = [row["variant"] for row in json.loads(capsys.readouterr().out)["Seconds per iteration"]]
    assert (
        not [name for name in names if name.startswith(("backward", "embedding", "forward"))]
        and "gradients int8" in names
    )


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nodes", "2"], "give --cluster"),
        (["--cluster", "paper"], "give --nodes"),
        (["--cluster", "h100-ndr", "--nodes", "2"], "--cluster h100-ndr: unknown network 'ndr': did you mean ndr8"),
        (["--cluster", "paper", "--nodes", "0"], "--nodes: 0 is not a positive number"),
        (["--cluster", "paper", "--nodes", "2"], "no layers, hidden, heads: give --model"),
        (["--cluster", "paper", "--nodes", "2", "--model", "9b"], "unknown model '9b'"),
        ([*PLAN, "--", "--pipeline-model-parallel-size", "5"], "128 GPUs do not divide among 5 tensor x pipeline"),
        ([*PLAN, "--", "--tensor-model-parallel-size", "-2"], "--tensor-model-parallel-size: -2 is not a positive"),
        (
            [*PLAN, "--", "--tensor-model-parallel-size", "x"],
            "x is not a positive whole number",
        ),
        (
            [*PLAN, "--", "--hybrid-layer-pattern", "M*-M"],
            "--hybrid-layer-pattern: the seconds of Mamba layers are not modelled",
        ),
        ([*PLAN, "--", "--use-megatron-fsdp"], "--use-megatron-fsdp: not modelled"),
        ([*PLAN, "--", *LAYOUT, "--num-distributed-optimizer-instances", "2"], "give --use-distributed-optimizer"),
        (
            [*PLAN, "--", *LAYOUT, "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "3"],
            "4 replicas do not divide among 3 instances of the distributed optimizer",
        ),
        (
            [*PLAN, "--", *LAYOUT, "--decoder-first-pipeline-num-layers", "70"],
            "2 layers do not divide among the other 3",
        ),
        ([*PLAN, "--", *LAYOUT, "--pipeline-model-parallel-layout", "Et*9|t*9L"], "2 parts of E, t, m and L do not"),
        ([*PLAN, "--", *LAYOUT, "--pipeline-model-parallel-layout", "Et|t|t|tL"], "4 layers on 4 stages are laid out"),
        ([*PLAN, "--", *LAYOUT, "--expert-model-parallel-size", "2"], "a model with experts: give --num-experts"),
        ([*PLAN, "--", *LAYOUT, "--num-experts", "6", "--expert-model-parallel-size", "4"], "6 experts do not divide"),
        ([*PLAN, "--", *LAYOUT, "--num-experts", "8", "--moe-layer-freq", "[1]*5"], "list of 0 and 1 for 72 layers"),
        ([*PLAN, "--", *LAYOUT, "--context-parallel-size", "3"], "128 GPUs do not divide among 96 tensor x context"),
        ([*PLAN, "--", *LAYOUT, "--cp-comm-type", "p2p", "a2a"], "one way for all layers is modelled"),
        ([*PLAN, "--", "--micro-batch-size", "64"], "GB more than the A100 has"),
        ([*PLAN, "--", *LAYOUT, "--compressed-backprop-rank", "0"], "--compressed-backprop-rank"),
        ([*PLAN, "--why", "tensor", "--", *LAYOUT], "--why: unknown class 'tensor': there are pipeline forward"),
        ([*PLAN, "--output", "page", "--", *LAYOUT], "--output: `python -m scripts.planned` does this"),
        ([*PLAN, "--validate"], "--validate: `python -m scripts.planned.validate` does this"),
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


@pytest.mark.full
def test_the_page_and_the_tables_are_written(tmp_path: Path) -> None:
    assert planned.main([*PLAN, "--output", str(tmp_path / "out"), "--", *LAYOUT]) == 0
    out = tmp_path / "out"
    page = (out / "index.html").read_text()
    assert page.count("<svg role=") == 2 and "Predicted, not measured" in page
    answer, _, folded = page.partition("<details>")
    assert "8.3B parameters on 128 x A100" in answer and "gemm_efficiency" in folded and "gemm_eff" not in answer
    rows = {row["variant"] for row in csv.DictReader((out / "plan.csv").open())}
    # Without the distributed optimizer no parameter is gathered, and without experts no token is sent to them.
    nothing_to_send = {name for name in VARIANTS if name.split()[0] in ("gather", "dispatch", "expert")}
    assert len(nothing_to_send) == 3 + 2 + 2
    assert rows == {"vanilla", "recommended", *VARIANTS} - nothing_to_send and "balanced" in rows
    assert {"lines", "Seconds per iteration", "Memory"} <= json.loads((out / "plan.json").read_text()).keys()


@pytest.mark.full
def test_a_sweep_goes_over_nodes_links_and_all_layouts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = "nodes=2..8,link=hdr8+10gbe,layout=all,batch=weak"
    arguments = ["--cluster", "paper", "--nodes", "2", "--model", "2.5b", "--format", "json", "--sweep", sweep]
    assert main([*arguments, "--", "--global-batch-size", "64"]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert {(row["nodes"], row["link"]) for row in rows} == {(n, link) for n in (2, 4, 8) for link in ("hdr8", "10gbe")}
    assert {row["batch"] for row in rows if row["nodes"] == 8} == {256} and len(rows) > 100
    assert all(row["GB a rank"] <= 80 for row in rows)
    one = [row["vanilla s"] for row in rows if (row["nodes"], row["link"]) == (4, "hdr8")]
    assert one == sorted(one)
    assert planned.main([*arguments, "--output", str(tmp_path), "--", "--global-batch-size", "64"]) == 0
    assert "<svg role=" in (tmp_path / "index.html").read_text()
    assert len(list(csv.DictReader((tmp_path / "sweep.csv").open()))) == len(rows)


@pytest.mark.full
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


def test_what_no_public_run_has_is_named_beside_the_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    experts = ["--num-experts", "16", "--expert-model-parallel-size", "8", "--moe-token-dispatcher-type", "alltoall"]
    deep = [*experts, "--multi-latent-attention", "--mtp-num-layers", "1", "--moe-layer-freq", "[0]*2+[1]*50",
            "--expert-tensor-parallel-size", "1", "--pipeline-model-parallel-size", "2"]  # fmt: skip
    words = ["--cluster", "h100-ndr400", "--nodes", "8", "--model", "2.5b", "--", "--use-distributed-optimizer"]
    assert main([*words, *deep]) == 0
    said = capsys.readouterr().out
    assert "; not validated: MLA, MTP, which no public run has" in said
    assert "left out: every stage is planned with equally many dense layers" in said
    assert "experts 16 (2 a token) on 8 ranks, 4 replicas of each" in said and "| expert dispatch |" in said
    assert main([*words, *experts]) == 0
    assert "not validated" not in capsys.readouterr().out


def test_the_order_of_ranks_changes_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", "--global-batch-size", "64"]
    words = ["--cluster", "a100-100gbe", "--nodes", "4", "--model", "2.5b", "--", *layout]
    assert main(words) == 0
    usual = capsys.readouterr().out
    assert main([*words, "--use-tp-pp-dp-mapping"]) == 0
    other = capsys.readouterr().out
    assert usual != other and "--use-tp-pp-dp-mapping" in other and "--use-tp-pp-dp-mapping" not in usual
