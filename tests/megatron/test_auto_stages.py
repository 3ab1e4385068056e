"""`--dp-compression-stages auto` in Megatron's own loop: dense until it is decided, then as measured; and resumed so.

The rates of the links are given here, slow or fast, so that the decision is known; `scripts/bench/cluster` measures
them on links that are slow.
"""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.megatron.checkpoint_runs import SHORT, Tee, assert_goes_on, install_and_watch, only, run, saving_facts
from tests.megatron.optimus_runs import PP2_DP2
from tests.megatron_runs import last_stage_losses, run_megatron

AUTO = ["--dp-compression", "--dp-compression-rank", "4", "--dp-compression-stages", "auto"]
FIRST_COMPRESSED = 2
"""Iterations that are over when the stages are chosen."""


def on_links_of(bytes_per_second: float) -> None:
    from optimus_cc_ext.forecast import forecaster
    from optimus_cc_ext.forecast.probe import Rate

    install_and_watch()
    forecaster.probe_link = lambda group, device: Rate(0.0, bytes_per_second)
    forecaster.probe_collective = lambda group, device, scattered: Rate(0.0, bytes_per_second)


def facts(model: list[torch.nn.Module], optimizer: Any) -> dict[str, Any]:
    import optimus_cc_ext

    session = optimus_cc_ext.current_session()
    assert session is not None
    return saving_facts(model, optimizer) | {
        "matrices": sum(reducer.matrices for reducer in session.gradients.reducers),
        "printed": list(Tee.printed),
    }


def test_on_slow_links_it_is_vanilla_until_it_compresses_and_a_resumed_run_keeps_the_choice(tmp_path: Path) -> None:
    vanilla = run_megatron(4, [*PP2_DP2[1], *SHORT])
    slow, fast = partial(on_links_of, 1e5), partial(on_links_of, 1e12)
    whole = run([*AUTO, "--save", str(tmp_path / "whole"), "--save-interval", "4"], before=slow, probe=facts)
    assert all(rank.probed["matrices"] > 0 for rank in whole)
    assert "--dp-compression-stages auto: of 2 stages compressed: 0, 1" in whole[0].probed["ours"]
    memory = [line for line in whole[0].probed["ours"] if line.startswith("compressor state in")]
    assert len(memory) == 2, "before the first iteration, and once the stages are known"
    assert "0.0 MB gradient buckets" in memory[0] and "0.0 MB gradient buckets" not in memory[1]
    expected, losses = last_stage_losses(vanilla), last_stage_losses(whole)
    # The loss of an iteration shows the updates before it.
    assert losses[: FIRST_COMPRESSED + 1] == expected[: FIRST_COMPRESSED + 1]
    assert losses[FIRST_COMPRESSED + 1] != expected[FIRST_COMPRESSED + 1]

    resumed = run([*AUTO, "--load", str(only(tmp_path / "whole", 4, tmp_path / "4"))], before=fast, probe=facts)
    assert_goes_on(resumed, whole, 4)


def test_on_fast_links_it_stays_vanilla_to_the_bit_and_says_so() -> None:
    vanilla = run_megatron(4, [*PP2_DP2[1], *SHORT, "--use-distributed-optimizer"])
    runs = run([*AUTO, "--use-distributed-optimizer"], before=partial(on_links_of, 1e12), probe=facts)
    assert last_stage_losses(runs) == last_stage_losses(vanilla)
    assert [rank.probed["matrices"] for rank in runs] == [0] * 4
    assert "forecast: DP gradients, compressed: no stage's reduction is worth compressing" in runs[0].probed["ours"]
    assert "--dp-compression-stages auto: of 2 stages compressed: none" in runs[0].probed["ours"]


def test_a_stage_without_parameters_takes_part_in_what_all_ranks_measure() -> None:
    # 2, 1, none and 1 of 4 layers; nobody may wait for the stage that has nothing to sum.
    layout = (4, ("--pipeline-model-parallel-size", "4", "--pipeline-model-parallel-layout", "Ett|t||tL"))
    flags = ["--compressed-backprop", "--compressed-backprop-rank", "4", "--train-iters", "4", "--compression-forecast"]
    runs = run(flags, layout, probe=facts)
    assert [line for line in runs[0].probed["ours"] if line.startswith("forecast from measured times")]


def test_links_are_measured_once_and_what_gains_or_loses_is_said_by_the_first_rank_only() -> None:
    runs = run(["--optimus-cc", "--dp-compression-rank", "4", "--compression-forecast"], probe=facts)
    lines = [[line for line in rank.probed["ours"] if "forecast" in line] for rank in runs]
    assert len(lines[0]) == 4, "the links, and a line for each class"
    assert not any(lines[1:])
    silent = run(["--optimus-cc", "--dp-compression-rank", "4", "--no-compression-forecast"], probe=facts)
    assert not [line for line in silent[0].probed["ours"] if "forecast" in line]
    assert last_stage_losses(silent) == last_stage_losses(runs), "measuring changes nothing that is computed"
