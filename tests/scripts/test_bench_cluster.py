"""The cluster benchmark: its models, its plans of rates, its arithmetic and its tables."""

import argparse
import dataclasses
import json
import math
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.tools.report.log_lines import parse_trial, stays_dense
from optimus_cc_ext.tools.report.table import Cell, Table
from scripts.bench.cluster import __main__ as cluster
from scripts.bench.cluster import free_coding, page, saved
from scripts.bench.cluster.model import PAPER, proportions
from scripts.bench.cluster.rates import Plan, plans, rate_list
from scripts.bench.cluster.results import losses_agree, paired, share_recovered, times, traffic
from scripts.bench.cluster.run import Iteration, Run
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.variants import CLUSTER, flags_of
from scripts.hosts.network import Counters, bits_per_second, seconds_of_delay, tbf_options
from tests.shaped_links import needs_namespaces, without_namespaces
from tests.shell_scripts import ROOT

PP2DP2 = Layout(1, 2, 2)


# Models, layouts, variants


@pytest.mark.parametrize("layout", [PP2DP2, Layout(1, 4, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in cluster.TRAINED if name not in ("tiny", "experts", "experts-top8")])
def test_the_models_have_the_papers_proportions(name: str, layout: Layout) -> None:
    found = proportions(MODELS[name], layout)
    # Micro-batches are whole: one more or less changes this ratio by 1 part in 6.
    assert found.dp_to_forward == pytest.approx(PAPER.dp_to_forward, rel=0.1)
    assert found.embedding_share <= 0.10


def test_proportions_follow_from_the_layers_and_the_tokens() -> None:
    found = proportions(MODELS["small"], Layout(1, 2, 4))
    assert found.dp == 12 * 256**2 * 4 * 1.5, "a ring over 4 sends 2 x 3/4 of the gradients"
    assert found.forward == 128 * 2 * 6 * 256
    assert found.embedding == 1024 * 256
    halved = proportions(MODELS["small"], Layout(2, 2, 4))
    assert (halved.dp, halved.forward, halved.embedding) == (found.dp / 2, found.forward, found.embedding / 2)
    assert proportions(MODELS["small"], Layout(1, 2, 1)).dp == 0
    assert math.isnan(proportions(MODELS["small"], Layout(1, 1, 2)).dp_to_forward)


def test_a_layout_is_read_and_a_single_host_refused() -> None:
    assert Layout.parsed("pp4dp2") == Layout(1, 4, 2) and Layout.parsed("tp2pp2dp2") == Layout(2, 2, 2)
    two_beside = Layout.parsed("pp1dp4z1n2")
    assert two_beside == Layout(1, 1, 4, True, 2) and str(two_beside) == "pp1dp4z1n2"
    assert (two_beside.hosts, two_beside.ranks_per_host) == (2, 2)
    assert str(Layout.parsed("tp2pp2dp2")) == "tp2pp2dp2" and Layout.parsed("tp2pp2dp2").hosts == 4
    for text in ("pp1dp1", "dp2pp2", "pp0dp2", "tp2pp1dp1"):
        with pytest.raises(ValueError, match=re.escape(text)):
            Layout.parsed(text)


def test_vanilla_has_no_flags_of_ours_and_what_is_added_comes_last() -> None:
    assert flags_of(CLUSTER["vanilla"], PP2DP2, (2, 11), ["--no-compression-metrics"]) == []
    flags = flags_of(CLUSTER["sc"], Layout(1, 4, 2), (2, 11), ["--dp-compression-rank", "7"])
    assert flags[flags.index("--dp-compression-stages") + 1] == "3", "three quarters of four"
    assert flags[-2:] == ["--dp-compression-rank", "7"]


# Rates and counters


def test_framing_is_taken_off_once_per_packet_and_a_rate_is_read_or_refused() -> None:
    before, after = Counters(10_000, 20, 1), Counters(10_000 + 3 * 1514 + 5 * 66, 28, 4)
    sent = after.since(before)
    assert sent == Counters(3 * 1514 + 5 * 66, 8, 3)
    assert sent.payload == 3 * 1448, "five acknowledgements carry nothing"
    assert bits_per_second("50mbit") == 50e6 and bits_per_second("2.5gbit") == 2.5e9
    assert bits_per_second("none") == math.inf
    for text in ("50", "50mb", "0mbit", "-1mbit", "10kbit", "unlimited", "50mbit+20", "none+20ms"):
        with pytest.raises(ValueError, match=re.escape(text)):
            bits_per_second(text)
    assert tbf_options("100mbit") == "rate 100000000bit burst 25000 limit 16000000", "2 ms of the rate leave at once"
    assert bits_per_second("50mbit+20ms") == 50e6 and seconds_of_delay("50mbit+20ms") == 0.02
    assert seconds_of_delay("50mbit") == seconds_of_delay("none") == 0


def test_a_run_goes_through_all_rates_and_back_and_counts_no_iteration_in_which_it_switched() -> None:
    assert rate_list(["a", "b"], each=2, cycles=2, warm_up=1) == ["none", *"aaa", *"bbb", *"bb", *"aaa"]
    assert rate_list(["none"], each=3, cycles=1, warm_up=2) == ["none"] * 5
    [plan] = plans(["8mbit", "none"], chooses=False, each=2, cycles=2, warm_up=2)
    assert _counted(plan) == ["8mbit"] * 2 + ["none"] * 4 + ["8mbit"] * 2


def test_what_chooses_by_the_links_when_it_starts_gets_a_run_for_each_rate() -> None:
    chosen = plans(["8mbit", "none"], chooses=True, each=3, cycles=2, warm_up=1)
    assert [plan.rates for plan in chosen] == [["8mbit"] * 20, ["none"] * 20], "a trial may take 14 iterations"
    assert _counted(chosen[0]) == ["8mbit"] * 6


def _counted(plan: Plan) -> list[str]:
    """Return the rate of each iteration that counts, in the order of a run."""
    rate, switched, counted = plan.rates[0], False, []
    for iteration in range(1, len(plan.rates) + 1):
        measured = iteration > plan.warm_up and not switched
        if measured:
            counted.append(rate)
        following = plan.after(iteration)
        rate, switched = following, following != rate
    return counted


def test_the_choice_of_a_trial_is_read() -> None:
    seconds = "iterations 3 to 8: dense 2.22 s (2.2 to 2.24), balanced 1.06 s (1.05 to 1.07): "
    assert not stays_dense(f"{seconds}balanced stays on")
    assert stays_dense(f"{seconds}dense from now on (--no-compression-trial compresses all the same)")
    assert parse_trial(f"optimus-cc: {seconds}balanced stays on") == (2.22, 2.2, 2.24)


def test_variants_leave_out_what_a_layout_does_not_have() -> None:
    assert flags_of(CLUSTER["dp-int4"], Layout.parsed("pp4dp1"), (2, 11)) == ["--fused-embedding-sync"]
    assert flags_of(CLUSTER["dp-int4"], Layout.parsed("pp1dp2"), (2, 11)) == ["--dp-compression-format", "int4"]
    sharded = Layout.parsed("pp2dp2z1")
    assert str(sharded) == "pp2dp2z1" and sharded.sharded
    training = Training(layout=sharded)
    for name, format in (("balanced-int4", "exact"), ("dp-int4", "dense")):
        assert training.config_of(flags_of(CLUSTER[name], sharded, (2, 11))).param_gather_format == format


# The bound


def test_the_bound_is_vanilla_on_links_as_much_faster_as_the_bytes_of_each_run_are_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = {"vanilla": 0.0, "balanced": 0.5, "trial": 0.2}

    def train(_: cluster.Bench, name: str, layout: Layout, variant: str, plan: Plan, label: str, block: int) -> Run:
        """Compute 2 s, and send 100 Mbit that nothing hides, compressed to a quarter; by `trial` at 25 Mbit/s only."""
        ratio = 4 if variant == "balanced" or (variant == "trial" and plan.rates[-1] == "25mbit") else 1
        seconds = {rate: 2 + work[variant] + 100e6 / bits_per_second(rate) / ratio for rate in plan.rates}
        flags = flags_of(CLUSTER[variant], layout, (2, 11))
        return dataclasses.replace(_run(variant, block, seconds, 400 // ratio), flags=flags)

    monkeypatch.setattr(cluster.Bench, "_train", train)
    monkeypatch.setattr(cluster, "write", lambda *_: "")
    command = ["--output", str(tmp_path / "out"), "--rates", "25mbit,50mbit,none"]
    command += ["--variants", "vanilla,balanced,trial"]
    bench = cluster.Bench(
        cluster.build_parser().parse_args([*command, "--blocks", "1", "--warm-up", "1", "--bound"]), []
    )
    bench.sweep("small", PP2DP2)
    table = times(bench.runs)
    assert table.distinct("variant") == ["vanilla", "balanced", "trial"] and traffic(bench.runs).column("kernel, MB")
    of_trial, of_blocks = {"25mbit": 0.75, "50mbit": 0.0}, {"25mbit": 0.75, "50mbit": 0.75}
    expected = [("trial", *each) for each in of_trial.items()] + [("balanced", *each) for each in of_blocks.items()]
    for variant, rate, bound in expected:
        [found], [recovered] = (table.where(variant=variant, rate=rate).column(name) for name in ("bound", "recovered"))
        assert found == pytest.approx(bound)
        assert recovered == pytest.approx(bound - work[variant] * bits_per_second(rate) / 100e6)


def test_the_bound_of_free_coding_trains_each_variant_twice_with_the_same_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(
        _: cluster.Bench, name: str, layout: Layout, variant: str, plan: Plan, label: str, block: int, script=()
    ) -> Run:
        """Return a run that computes for 2 s, sends for 4 s or compressed for 1 s, and codes for 0.5 s if it must."""
        work = {"vanilla": 0.0, "balanced": 0.0 if script else 0.5}[variant]
        sent = 4 if variant == "vanilla" else 1
        return _run(variant, block, {rate: 2 + work + sent * (rate != "none") for rate in plan.rates}, 100 * sent)

    monkeypatch.setattr(cluster.Bench, "_train", train)
    monkeypatch.setattr(cluster, "write", lambda *_: "")
    command = ["--output", str(tmp_path / "out"), "--rates", "25mbit,none", "--variants", "vanilla,balanced"]
    bench = cluster.Bench(cluster.build_parser().parse_args([*command, "--blocks", "2", "--bound", "coding"]), [])
    bench.sweep("small", PP2DP2)
    assert [run.variant for run in bench.runs] == [
        "vanilla", "balanced", "bound of balanced", "balanced", "bound of balanced", "vanilla",
    ]  # fmt: skip
    script, shares = cluster.free_coding()
    assert Path(ROOT, script).exists() and shares == "1"
    found = times(bench.runs).where(variant="balanced", rate="25mbit", block="all")
    assert found.column("bound") == [0.75] and found.column("recovered of bound") == pytest.approx([0.625 / 0.75])


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_free_coding_has_the_messages_of_the_format_and_loses_the_values(format: str, dtype: torch.dtype) -> None:
    codec, free = Codec(format), Codec(format)
    coding = {name for name in vars(Codec) if name.startswith(("encode", "decode"))}
    assert {function.__name__ for function in free_coding.FREE} == coding
    for function in free_coding.FREE:
        setattr(free, function.__name__, function.__get__(free))
    rows = torch.arange(3 * 256, dtype=dtype).view(3, 256)
    message = free.encode_rows(rows)
    assert message.shape == codec.encode_rows(rows).shape and message.dtype == torch.uint8
    decoded = free.decode_rows(message, dtype)
    assert decoded.shape == rows.shape and decoded.dtype == dtype
    assert torch.equal(decoded[:, :32], rows[:, :32]) and not torch.equal(decoded, rows)
    assert free.decode_rows(free.encode_rows(rows[:0]), dtype).shape == (0, 256)

    layout = BlockLayout.of_one(256)
    buffers = [torch.empty(1, codec.message_bytes(layout, dtype), dtype=torch.uint8) for _ in range(2)]
    for each, buffer in zip((codec, free), buffers, strict=True):
        each.encode(rows[0], layout, buffer)
    for decode in (free.decode, lambda *args: free.decode_add(*args[:2], 0, args[2])):
        out = torch.ones(256, dtype=dtype)
        decode(buffers[1], layout, out)
        assert not out.any()


def test_free_coding_of_exact_messages_has_the_bytes_of_the_run_with_coding(monkeypatch: pytest.MonkeyPatch) -> None:
    iterations = _run("exact", 0, {"25mbit": 1.0}, 1).iterations * 3
    counts = ({"parameter gather": (32.0, 32.0)}, {"parameter gather": (8.0, 32.0)}, {})
    coded = [dataclasses.replace(each, traffic=traffic) for each, traffic in zip(iterations, counts, strict=False)]
    assert cluster.free_coding(coded)[1] == "1.00000,0.25000", "the log of a run's last iteration may be missing"
    encode, values = free_coding.exact_encode([1.0, 0.25]), torch.zeros(800, dtype=torch.bfloat16)
    for iteration, nbytes in ((0, exact.raw_bytes(800)), (1, 400), (2, 400)):
        monkeypatch.setattr("megatron.training.get_args", lambda at=iteration: argparse.Namespace(curr_iteration=at))
        assert encode(values, values, torch.zeros(600, dtype=torch.uint8)) == nbytes
    assert free_coding.exact_decode(torch.zeros(16, dtype=torch.uint8), values, raw=False)


# Tables


def test_saved_seconds_are_compared_with_those_of_the_saved_bytes_block_by_block() -> None:
    # A link of 8 Mbit/s sends 1 MB in a second; the variant saves 2 MB on the busiest host.
    runs = [
        _run(variant, block, {"8mbit": seconds + block, "none": 1.0}, payload)
        for block in (0, 1)
        for variant, seconds, payload in (
            ("vanilla", 4.0, 3_000_000), ("gather-exact", 3.0, 1_000_000), ("bound of gather-exact", 2.5, 1_000_000),
        )
    ]  # fmt: skip
    table = saved.table(runs)
    assert table.column("block") == [0, 1, "median"] and table.distinct("rate") == ["8mbit"]
    assert table.column("saved, MB") == pytest.approx([2, 2, 2])
    assert table.column("ratio") == pytest.approx([0.75, 0.75, 0.75])


def test_the_tables_say_what_the_runs_say_and_losses_that_differ_are_noticed() -> None:
    assert share_recovered(10, 6, 5) == pytest.approx(0.8), "of what vanilla loses"
    assert share_recovered(10, 11, 5) == pytest.approx(-0.2), "ours can be slower"
    assert share_recovered(5, 5, 5) is None
    runs = _paired()
    table = times(runs)
    assert [_of(table, block, "recovered") for block in ("all", 0, 1)] == pytest.approx([0.625, 0.5, 0.75])
    assert _of(table, "all", "exposed") == pytest.approx(1.5) and _of(table, "all", "bound") is None
    assert _of(table, "all", "over vanilla", rate="none") == pytest.approx(1.05)
    assert _of(table, "all", "recovered", rate="none") is None
    # On the kernel's counters the payload is 40 on each of two hosts, in the metrics 80; traffic before the first
    # measured iteration is not compared.
    for run in runs:
        run.iterations.insert(0, dataclasses.replace(run.iterations[0], measured=False, payload=[9999, 9999]))
    assert traffic(runs).where(variant="trial").column("kernel over metrics") == pytest.approx([1])
    assert _of(times(runs), "all", "measured") == 4
    assert losses_agree(_paired())
    runs = _paired()
    runs[0].iterations[0].loss += 1e-6
    assert not losses_agree(runs), "losses that differ between blocks are noticed"


def test_variants_are_compared_block_by_block_and_an_interval_takes_six_blocks() -> None:
    [row] = paired(_paired()).where(rate="50mbit").records()
    assert (row["variant"], row["over"], row["blocks"], row["95 % from"], row["95 % to"]) == (
        "trial", "vanilla", 2, None, None,
    )  # fmt: skip
    assert row["ratio"] == pytest.approx((4 / 6 + 3 / 6) / 2)
    slower = [1.0, 1.3, 0.9, 1.1, 1.02, 0.97, 1.01, 1.05, 1.0]
    runs = [
        _run(name, block, {"50mbit": speed * (10 + block)}, 100)
        for block, each in enumerate(slower)
        for name, speed in (("balanced", 1.0), ("balanced-sliced", each))
    ]
    [row] = paired(runs).records()
    assert row["blocks"] == 9 and row["ratio"] == pytest.approx(1.01)
    # The median lies outside of the range of all but the two outer ones of nine values in 3.9 % of cases.
    assert (row["95 % from"], row["95 % to"]) == pytest.approx((0.97, 1.1))
    [row] = paired(runs[:12]).records()
    assert (row["95 % from"], row["95 % to"]) == pytest.approx((0.9, 1.3)) and row["blocks"] == 6


def test_what_is_written_is_read_again_but_not_mixed_with_another_model(tmp_path: Path) -> None:
    runs = _paired()
    assert "| 50mbit | trial | 1 |" in page.write(tmp_path, {"seed": 1}, runs)
    pictures = {f"{name}_small_pp2dp2.{suffix}" for name in ("time", "recovered") for suffix in ("png", "svg", "pdf")}
    assert {path.name for path in tmp_path.iterdir()} == {"cluster.json", "cluster.md", *pictures}
    assert page.load(tmp_path) == ({"seed": 1}, runs)
    content = json.loads((tmp_path / "cluster.json").read_text())
    content["models"]["small"]["hidden"] += 1
    (tmp_path / "cluster.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its model 'small' is another one"):
        page.load(tmp_path)


def test_results_are_neither_overwritten_nor_mixed_with_those_of_another_seed(tmp_path: Path) -> None:
    def bench(*words: str) -> cluster.Bench:
        return cluster.Bench(cluster.build_parser().parse_args(["--output", str(tmp_path / "out"), *words]), [])

    first = bench()
    with pytest.raises(ValueError, match="another process"):
        bench()
    page.write(tmp_path / "out", first.arguments(), [_run("vanilla", 0, {"none": 1}, 100)])
    del first
    with pytest.raises(ValueError, match="--append"):
        bench()
    bench("--append").check_comparable("small", PP2DP2)
    with pytest.raises(ValueError, match="another seed"):
        bench("--append", "--seed", "7").check_comparable("small", PP2DP2)
    with pytest.raises(ValueError, match="another text"):
        bench("--append", "--max-mb", "1")


def _paired() -> list[Run]:
    """Make runs of vanilla and of ours in two blocks."""
    return [
        _run("vanilla", 0, {"none": 2, "50mbit": 6}, 100), _run("trial", 0, {"none": 2.1, "50mbit": 4}, 40),
        _run("trial", 1, {"none": 2.1, "50mbit": 3}, 40), _run("vanilla", 1, {"none": 2, "50mbit": 6}, 100),
    ]  # fmt: skip


def _run(variant: str, block: int, seconds: dict[str, float], payload: int) -> Run:
    """Make a run with two iterations at each rate on two hosts."""
    rates: Sequence[tuple[str, float]] = [pair for pair in seconds.items() for _ in range(2)]
    iterations = [
        Iteration(number, rate, True, each, 6.0, [payload] * 2, 0, {"DP gradients": (2.0 * payload, 200.0)})
        for number, (rate, each) in enumerate(rates, start=1)
    ]
    return Run("small", "pp2dp2", variant, block, [], iterations=iterations)


def _of(table: Table, block: Cell, column: str, rate: str = "50mbit") -> Any:
    """Return the value of `column` for the variant `trial`."""
    [value] = table.where(variant="trial", rate=rate, block=block).column(column)
    return value


# The command line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rates", "fast"], "'fast' is not a rate"),
        (["--variants", "vanilla,magic"], "'magic' is none of"),
        (["--layouts", "pp2"], "'pp2' is not a layout"),
        (["--blocks", "0"], "give 1 or more"),
        (["--bound", "--variants", "paper"], "--bound: it trains vanilla again"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cluster.main(arguments)
    assert reason in capsys.readouterr().err


@pytest.mark.full
@needs_namespaces
def test_where_namespaces_are_forbidden_it_says_so_and_ends_with_status_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.bench.cluster", "--output", str(tmp_path / "out")]
    done = subprocess.run(without_namespaces(command), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "this user cannot make namespaces: unshare: unshare failed" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
