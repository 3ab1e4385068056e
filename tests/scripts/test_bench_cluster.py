"""scripts/bench/cluster.py: its models, its plans of rates, its arithmetic and its tables."""

import dataclasses
import json
import math
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT

BENCH = ROOT / "scripts/bench"
sys.path.insert(0, str(BENCH))  # its modules import each other by name, as a script's do

import cluster  # noqa: E402
import cluster_network  # noqa: E402
from cluster_bound import _rank, bound_share, chosen_stages, config_of  # noqa: E402
from cluster_model import MODELS, PAPER, Layout, parse_layout, proportions, variant_flags  # noqa: E402
from cluster_network import Counters, bits_per_second, tbf_options  # noqa: E402
from cluster_plan import FindRate, Plan, Sweep, next_guess, plans, rate_list  # noqa: E402
from cluster_report import LossRun, load, save  # noqa: E402
from cluster_results import drift, losses_agree, rows, share_recovered  # noqa: E402
from cluster_run import Iteration, Run, parse_traffic  # noqa: E402

from optimus_cc_ext.config import OptimusConfig  # noqa: E402
from optimus_cc_ext.forecast.probe import Rate  # noqa: E402

SMALL_RUN = {"DP gradients": 50.811, "pipeline forward": 3.146, "embedding": 8.389}


# Proportions


@pytest.mark.parametrize("layout", [Layout(1, 2, 2), Layout(1, 4, 2)], ids=str)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "tiny"])
def test_the_models_have_the_papers_proportions(name: str, layout: Layout) -> None:
    found = proportions(MODELS[name], layout)
    # A micro-batch more or less is 1 part in 6.
    assert found.dp_to_forward == pytest.approx(PAPER.dp_to_forward, rel=0.1)
    assert found.embedding_share <= 0.10


def test_proportions_follow_from_the_layers_and_the_tokens() -> None:
    found = proportions(MODELS["small"], Layout(1, 2, 4))
    assert found.dp == 12 * 256**2 * 4 * 1.5, "a ring over 4 sends 2 x 3/4 of the gradients"
    assert found.forward == found.backward == 128 * 2 * 6 * 256
    assert found.embedding == 1024 * 256
    halved = proportions(MODELS["small"], Layout(2, 2, 4))
    assert (halved.dp, halved.forward, halved.embedding) == (found.dp / 2, found.forward, found.embedding / 2)
    assert proportions(MODELS["small"], Layout(1, 2, 1)).dp == 0
    assert math.isnan(proportions(MODELS["small"], Layout(1, 1, 2)).dp_to_forward)


def test_a_layout_is_read_and_a_single_host_refused() -> None:
    assert parse_layout("pp4dp2") == Layout(1, 4, 2) and parse_layout("tp2pp2dp2") == Layout(2, 2, 2)
    assert str(parse_layout("tp2pp2dp2")) == "tp2pp2dp2" and parse_layout("tp2pp2dp2").hosts == 4
    for text in ("pp1dp1", "dp2pp2", "pp0dp2", "tp2pp1dp1"):
        with pytest.raises(ValueError, match=text):
            parse_layout(text)


def test_vanilla_has_no_flags_of_ours_and_what_is_added_comes_last() -> None:
    assert variant_flags("vanilla", Layout(1, 2, 2), (2, 11), ["--no-compression-metrics"]) == []
    flags = variant_flags("sc", Layout(1, 4, 2), (2, 11), ["--dp-compression-rank", "7"])
    assert flags[flags.index("--dp-compression-stages") + 1] == "3", "three quarters of four"
    assert flags[-2:] == ["--dp-compression-rank", "7"]


# Log lines and counters


def test_the_metrics_line_is_read_as_bytes() -> None:
    line = "  optimus-cc traffic per iteration | pipeline backward: 0.099 of 0.131 MB (75.3 %)"
    line += " | DP gradients: 1.500 of 12.000 MB (12.5 %)"
    assert parse_traffic(line) == {
        "pipeline backward": (pytest.approx(99e3), pytest.approx(131e3)),
        "DP gradients": (pytest.approx(1.5e6), pytest.approx(12e6)),
    }
    assert parse_traffic("  optimus-cc traffic per iteration | none") == {}
    assert parse_traffic(" [2026-01-01] iteration 3/ 8 | lm loss: 6.1 |") is None


def test_framing_is_taken_off_once_per_packet() -> None:
    before, after = Counters(10_000, 20, 1), Counters(10_000 + 3 * 1514 + 5 * 66, 28, 4)
    sent = after.since(before)
    assert sent == Counters(3 * 1514 + 5 * 66, 8, 3)
    assert sent.payload == 3 * 1448, "five acknowledgements carry nothing"


def test_a_rate_is_read_and_nonsense_refused() -> None:
    assert bits_per_second("50mbit") == 50e6 and bits_per_second("2.5gbit") == 2.5e9
    assert bits_per_second("none") == math.inf
    for text in ("50", "50mb", "0mbit", "-1mbit", "10kbit", "unlimited"):
        with pytest.raises(ValueError, match=text):
            bits_per_second(text)
    rate, burst = (tbf_options("100mbit")[place] for place in (1, 3))
    assert rate == "100000000bit" and float(burst) == 100e6 / 8 * 2e-3


# Which rate when


def test_a_run_goes_through_all_rates_and_back_and_counts_no_iteration_in_which_it_switched() -> None:
    assert rate_list(["a", "b"], each=2, cycles=2, warm_up=1) == ["none", *"aaa", *"bbb", *"bb", *"aaa"]
    assert rate_list(["none"], each=3, cycles=1, warm_up=2) == ["none"] * 5
    plan = Sweep(["8mbit", "none"], each=2, warm_up=2)
    counted = _counted(plan, lambda rate: 1.0)
    assert counted == ["8mbit"] * 2 + ["none"] * 4 + ["8mbit"] * 2


def test_what_chooses_by_the_links_when_it_starts_gets_a_run_for_each_rate() -> None:
    much = {"each": 3, "cycles": 2, "warm_up": 1}
    [run] = plans(["8mbit", "none"], chooses=False, **much)
    assert run.initial == "none" and run.rates == ["8mbit", "none"]
    chosen = plans(["8mbit", "none"], chooses=True, **much)
    assert [(run.initial, run.iterations) for run in chosen] == [("8mbit", 7), ("none", 7)]
    assert _counted(chosen[0], lambda rate: 1.0) == ["8mbit"] * 6


def test_the_search_finds_the_rate_at_which_half_is_exposed() -> None:
    plan = FindRate("10mbit", each=2, steps=4)
    # 2 s of computation, 100 Mbit that nothing hides.
    _counted(plan, lambda rate: 2 + (0 if rate == "none" else 100e6 / bits_per_second(rate)))
    assert plan.tried[0] == plan.tried[-1] == ("none", 2) and len(plan.tried) == 6
    assert plan.best[0] == "50.0mbit" and plan.best[1] == pytest.approx(4)


def test_a_step_of_the_search_is_bounded_where_nothing_is_exposed() -> None:
    assert next_guess(80e6, seconds=1.9, unshaped=2) == 20e6
    assert next_guess(80e6, seconds=50, unshaped=2) == 320e6


def _counted(plan: Plan, seconds: Callable[[str], float]) -> list[str]:
    """The rate of each iteration that counts, as a run goes through them."""
    rate, switched, counted = plan.initial, False, []
    for iteration in range(1, plan.iterations + 1):
        measured = iteration > plan.warm_up and not switched
        if measured:
            counted.append(rate)
        following = plan.after(iteration, seconds(rate), measured=measured)
        rate, switched = following, following != rate
    return counted


# Shares


def test_the_share_recovered_is_of_what_vanilla_loses() -> None:
    assert share_recovered(10, 6, 5) == pytest.approx(0.8)
    assert share_recovered(10, 11, 5) == pytest.approx(-0.2), "ours can be slower"
    assert share_recovered(5, 5, 5) is None


def test_the_bound_is_what_the_schedule_recovers_with_these_bytes_at_no_cost() -> None:
    model, layout = MODELS["small"], parse_layout("pp2dp2")

    def bound(flags: str, auto: frozenset[int] = frozenset()) -> float:
        share = bound_share(model, layout, config_of(flags.split(), layout), auto, bits=50e6, unshaped=1.0)
        assert share is not None
        return share

    assert bound("") == 0
    sc, everything = bound("--dp-compression --dp-compression-rank 11"), bound("--optimus-cc --dp-compression-rank 11")
    # DP gradients are most of what is exposed, and 6 % of them are left.
    assert 0.6 < sc < everything < 1
    assert bound("--optimus-cc --dp-compression-rank 11 --compressed-backprop-messages all") > everything
    auto = "--optimus-cc --dp-compression-rank 11 --dp-compression-stages auto"
    assert bound(auto, frozenset({0, 1})) == everything and bound(auto) < sc
    assert chosen_stages(["forecast: x", "--dp-compression-stages auto: of 4 stages compressed: 0, 2"]) == {0, 2}
    assert chosen_stages(["--dp-compression-stages auto: of 4 stages compressed: none"]) == frozenset()


def test_the_bound_goes_by_the_bytes_that_training_counts() -> None:
    # What the metrics of a run of `small` on pp2dp2 said, in MB an iteration of all ranks: gradients, one direction of
    # activations, and the embedding.
    model, layout = MODELS["small"], parse_layout("pp2dp2")
    ranks = [_rank(model, layout, OptimusConfig(), stage, Rate(0.0, 1.0), 1.0) for stage in (0, 1)]
    assert 2 * sum(rank.dense_bytes for rank in ranks) / 1e6 == pytest.approx(SMALL_RUN["DP gradients"], rel=1e-3)
    messages = layout.replicas * model.micro_batches * ranks[0].message_bytes
    assert messages / 1e6 == pytest.approx(SMALL_RUN["pipeline forward"], rel=1e-3)
    embedding = 2 * sum(rank.embedding.with_replicas + rank.embedding.with_pair for rank in ranks)
    assert embedding / 1e6 == pytest.approx(SMALL_RUN["embedding"], rel=1e-3)


def test_the_table_says_what_the_runs_say(tmp_path: Path) -> None:
    runs = [_run("vanilla", 0, {"none": 2, "50mbit": 6}, 100), _run("auto", 0, {"none": 2.1, "50mbit": 4}, 40)]
    runs += [_run("auto", 1, {"none": 2.1, "50mbit": 3}, 40), _run("vanilla", 1, {"none": 2, "50mbit": 6}, 100)]
    table = {(row.variant, row.rate): row for row in rows(runs)}
    ours = table["auto", "50mbit"]
    assert ours.recovered_by_block == {0: pytest.approx(0.5), 1: pytest.approx(0.75)}
    assert ours.recovered == pytest.approx(0.625)
    assert ours.bound is not None
    assert ours.exposed == pytest.approx(1.5)
    assert table["auto", "none"].to_vanilla == pytest.approx(1.05) and table["auto", "none"].recovered is None
    # 40 of payload on each of two hosts, 80 by the metrics; what is sent before is not compared.
    for run in runs:
        run.iterations.insert(0, dataclasses.replace(run.iterations[0], measured=False, payload=[9999, 9999]))
    ours = {(row.variant, row.rate): row for row in rows(runs)}["auto", "50mbit"]
    assert ours.kernel_to_metrics == pytest.approx(1) and ours.seconds.count == 4
    assert losses_agree(runs) and drift(runs[0]) == {"none": 0, "50mbit": 0}

    vanilla = LossRun("small", "pp2dp2", "vanilla", None, 9, 5.0, 4.0)
    auto = LossRun("small", "pp2dp2", "auto", (2, 11), 9, 5.0, 4.1)
    another = [dataclasses.replace(auto, seed=7), dataclasses.replace(vanilla, seed=7, validation_loss=4.05)]
    losses = [vanilla, auto, *another]
    text = save(tmp_path, {"seed": 1}, runs, losses)
    assert "62.5% (50.0%, 75.0%)" in text and "| 2:11 | 9 | 1234 | 5.0000 | 4.1000 | +2.50% |" in text
    assert "| 2:11 | 9 | 7 | 5.0000 | 4.1000 | +1.23% |" in text
    assert {path.name for path in tmp_path.glob("*.png")} == {
        f"{name}_small_pp2dp2.png" for name in ("time", "recovered", "bytes")
    }
    assert load(tmp_path)[:3] == ({"seed": 1}, runs, losses)
    # Drawn again on another machine it says where it was measured, and runs of another model are not mixed in.
    save(tmp_path, {"seed": 1}, runs, losses, {**load(tmp_path)[3], "cores": 77})
    assert load(tmp_path)[3]["cores"] == 77
    content = json.loads((tmp_path / "cluster.json").read_text())
    content["models"]["small"]["hidden"] += 1
    (tmp_path / "cluster.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="another model called 'small'"):
        load(tmp_path)


def test_results_are_neither_overwritten_nor_mixed_with_those_of_another_seed(tmp_path: Path) -> None:
    def bench(*words: str) -> cluster._Bench:
        return cluster._Bench(cluster.build_parser().parse_args(["--output", str(tmp_path), *words]), [])

    save(tmp_path, bench()._said(), [_run("vanilla", 0, {"none": 1}, 100)], [])
    with pytest.raises(ValueError, match="--append"):
        bench()
    bench("--append")._check_comparable("small", Layout(1, 2, 2))
    with pytest.raises(ValueError, match="another seed"):
        bench("--append", "--seed", "7")._check_comparable("small", Layout(1, 2, 2))
    with pytest.raises(ValueError, match="another text"):
        bench("--append", "--max-mb", "1")


def test_the_bound_of_a_variant_that_chooses_is_that_of_what_each_run_has_chosen() -> None:
    chosen = [["--dp-compression-stages auto: of 2 stages compressed: 0"], ["--dp-compression-stages auto: of 2 stages compressed: 0, 1"]]  # fmt: skip # noqa: E501
    flags = ["--optimus-cc", "--dp-compression-stages", "auto", "--dp-compression-rank", "11"]
    vanilla = [_run("vanilla", block, {"none": 1, "50mbit": 4}, 100) for block in (0, 1)]
    auto = [dataclasses.replace(_run("auto", b, {"50mbit": 2}, 50), flags=flags, forecast=chosen[b]) for b in (0, 1)]

    def bound(*ours: Run) -> float:
        found = {(row.variant, row.rate): row.bound for row in rows([*vanilla, *ours])}["auto", "50mbit"]
        assert found is not None
        return found

    first, second = bound(auto[0]), bound(auto[1])
    assert 0 < first < second
    assert bound(*auto) == pytest.approx((first + second) / 2)


def test_losses_that_differ_between_blocks_are_noticed() -> None:
    runs = [_run("vanilla", block, {"none": 2}, 100) for block in (0, 1)]
    runs[1].iterations[0].loss += 1e-6
    assert not losses_agree(runs)


def _run(variant: str, block: int, seconds: dict[str, float], payload: int) -> Run:
    """Two iterations at each rate on two hosts."""
    counted = {"sent": [payload + 66] * 2, "packets": [1, 1], "payload": [payload] * 2, "retransmitted": 0}
    iterations = [
        Iteration(number, rate, True, each, 6.0, **counted, traffic={"DP gradients": (2.0 * payload, 200.0)})
        for number, (rate, each) in enumerate((pair for pair in seconds.items() for _ in range(2)), start=1)
    ]
    return Run("small", "pp2dp2", variant, block, [], iterations=iterations)


# The command line


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--rates", "fast"], "'fast' is not a rate"),
        (["--variants", "vanilla,magic"], "'magic' is none of"),
        (["--layouts", "pp2"], "'pp2' is not a layout"),
        (["--hosts", "3"], "an even number of hosts"),
        (["--ranks-of-interest", "2"], "not a pair of ranks"),
        (["--blocks", "0"], "give 1 or more"),
    ],
)
def test_bad_input_ends_with_status_2_and_the_reason(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import cluster

    with pytest.raises(SystemExit, match="2"):
        cluster.main(arguments)
    assert reason in capsys.readouterr().err


def test_without_root_it_says_so_and_ends_with_status_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import cluster

    monkeypatch.setattr(cluster_network.shutil, "which", lambda command: f"/sbin/{command}")
    monkeypatch.setattr(cluster_network.os, "geteuid", lambda: 1000)
    handlers = [(signum, signal.getsignal(signum)) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    try:
        assert cluster.main(["--output", str(tmp_path / "out")]) == 2
    finally:
        for signum, handler in handlers:
            signal.signal(signum, handler)
    assert "take root" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
