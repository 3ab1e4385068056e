"""The planner and shaped hosts, on invented runs: the numbers that it is given, and those that it has to find."""

from dataclasses import replace
from pathlib import Path

import pytest

from scripts.bench.cluster import page, predicted
from scripts.bench.cluster.predicted import job_in, planned, ratios
from scripts.bench.cluster.run import Iteration, Run
from scripts.experiments.models import MODELS, Layout, Training
from scripts.experiments.variants import VANILLA
from scripts.hosts.network import UNSHAPED

INT8 = ["--compressed-backprop-format", "int8"]


def small(layout: str) -> Training:
    return Training(model=MODELS["small"], layout=Layout.parsed(layout))


def run(layout: str, variant: str, flags: list[str], seconds: dict[str, float]) -> Run:
    iterations = [
        Iteration(number, rate, True, value, 1.0, [0], 0) for number, (rate, value) in enumerate(seconds.items(), 1)
    ]
    return Run("small", layout, variant, 1, flags, iterations=iterations)


def test_the_job_is_what_the_benchmark_trains() -> None:
    job = job_in(small("tp2pp2dp2"))
    assert (job.gpus, job.tp, job.pp, job.dp, job.micro_batches) == (8, 2, 2, 2, MODELS["small"].micro_batches)
    assert job.value_bytes == job.gradient_bytes == 4


def test_on_fast_lines_the_ratio_is_that_of_the_unshaped_seconds_and_on_slow_ones_that_of_the_bytes() -> None:
    training = small("pp1dp2")
    config = training.config_of(["--dp-compression-format", "int8"])
    assert planned(training, config, 1e15, 2.0, 2.2) == pytest.approx(1.1, rel=0.01)
    # int8 replaces fp32 in both directions; the embedding stays dense.
    slow = planned(training, config, 1e4, 2.0, 2.2)
    assert 0.25 < slow < 0.40


def test_a_ratio_wants_vanilla_at_its_rate_and_both_on_unshaped_links() -> None:
    ours = run("pp2dp1", "cb-int8", INT8, {UNSHAPED: 2.1, "20mbit": 4.0, "50mbit": 3.0})
    vanilla = run("pp2dp1", VANILLA, [], {UNSHAPED: 2.0, "20mbit": 6.0})
    (ratio,) = ratios([vanilla, ours])
    assert (ratio.rate, ratio.measured, ratio.judged) == ("20mbit", pytest.approx(4.0 / 6.0), True)
    assert ratios([ours]) == []


def test_the_order_is_asked_of_pairs_that_differ_by_more_than_their_spread() -> None:
    layout = Layout.parsed("pp2dp1")
    found = [
        predicted.Ratio("small", layout, name, "20mbit", 0, measured, plan, spread)
        for name, measured, plan, spread in (("a", 0.5, 0.6, 0.01), ("b", 0.55, 0.5, 0.1), ("c", 0.8, 0.55, 0.01))
    ]
    assert predicted.order(found) == (1, 2)
    assert predicted.order([found[0], replace(found[2], planned=0.4)]) == (0, 1)
    assert predicted.order([found[0], replace(found[2], rate="50mbit")]) == (0, 0)


def test_a_variant_that_chose_otherwise_on_unshaped_links_is_left_out() -> None:
    flags, said = ["--optimus-cc", "balanced"], "iterations 3 to 8: dense 2 s (2 to 2), balanced 1 s (1 to 1): "
    vanilla = run("pp1dp2", VANILLA, [], {UNSHAPED: 2.0, "20mbit": 6.0})
    shaped = replace(run("pp1dp2", "trial", flags, {"20mbit": 3.0}), trial=[f"{said}balanced stays on"])
    for free, count in (("balanced stays on", 1), ("dense from now on", 0)):
        unshaped = replace(run("pp1dp2", "trial", flags, {UNSHAPED: 2.1}), trial=[f"{said}{free}"])
        found = ratios([vanilla, shaped, unshaped])
        assert len(found) == count and all(ratio.planned < 0.9 for ratio in found)


@pytest.mark.full
def test_the_command_judges_two_hosts_and_prints_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def ratio(layout: str) -> float:
        config = small(layout).config_of(INT8)
        return planned(small(layout), config, 20e6, 2.0, 2.1)

    def runs(layout: str, off: float) -> list[Run]:
        seconds = {UNSHAPED: 2.1, "20mbit": 6.0 * ratio(layout) * off}
        return [run(layout, VANILLA, [], {UNSHAPED: 2.0, "20mbit": 6.0}), run(layout, "cb-int8", INT8, seconds)]

    page.write(tmp_path, {}, runs("pp2dp1", 1.0) + runs("pp2dp2", 2.0))
    assert predicted.main([str(tmp_path)]) == 0
    assert "judged: 1, median 0.0%" in capsys.readouterr().out
    page.write(tmp_path, {}, runs("pp2dp1", 1.3))
    assert predicted.main([str(tmp_path)]) == 1
    page.write(tmp_path, {}, runs("pp2dp2", 1.0))
    assert predicted.main([str(tmp_path)]) == 1
    assert "nothing to judge" in capsys.readouterr().err
    assert predicted.main([str(tmp_path / "none")]) == 2
