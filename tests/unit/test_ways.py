"""The rule of the trial, without ranks: which way a step takes, which steps count, and what they decide."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, DP_GRADIENTS, EMBEDDING, PARAM_GATHER, PIPELINE_BACKWARD
from optimus_cc_ext.config.presets import Layout, config_of
from optimus_cc_ext.config.trials import on_trial
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.techniques.technique import Technique
from optimus_cc_ext.techniques.trial import Trial, WaysByTurns, choice_of_8b301ab, verdict

LAYOUT = Layout(stages=2, data_parallel=2, tied_embeddings=True, distributed_optimizer=True, master_copies=True)
ALL = {"pipeline_forward", "compressed_backprop", "dp_compression", "fused_embedding_sync", "param_gather"}


def letters(ways: WaysByTurns, ends: Iterable[str]) -> tuple[str, str, str]:
    """Take steps that end as `ends` says: + applied, s skipped, u unlike the others. Return the way of each step, that
    of the parameters that its end encodes, and whether it counts.
    """
    taken, gathered, counted = "", "", ""
    for end in ends:
        taken += "AD"[ways.dense]
        gathered += "AD"[ways.gathers_dense]
        counted += ".+"[ways.ended(applied=end != "s", alike=end != "u")]
    return taken, gathered, counted


def test_two_steps_warm_up_and_six_of_both_ways_count_in_an_order_that_no_drift_favours() -> None:
    taken, gathered, counted = letters(WaysByTurns(), "+" * 14)
    assert taken == "DA" + "DAADDA" + "ADDAAD" == gathered
    assert counted == ".." + "+" * 12


def test_a_gather_that_the_next_step_waits_for_takes_the_way_of_the_next_step() -> None:
    ways = WaysByTurns(ahead=True)
    taken, gathered, counted = letters(ways, "+" * 8)
    assert (taken, counted) == ("DADAADDA", "..++++++")
    assert gathered == taken[1:] + "D", "at the end of a round nothing is encoded: the choice may be dense"
    assert letters(ways, "+" * 7) == ("A" + "ADDAAD", "A" + "DDAAD" + "D", "." + "+" * 6), "its gather was dense"


def test_a_step_that_is_skipped_or_unlike_is_made_again_in_its_way() -> None:
    assert letters(WaysByTurns(), "ss+s+")[0] == "DDDAA", "only applied steps count"
    taken, _, counted = letters(WaysByTurns(), "++" + "+su+" + "++++")
    assert (taken[2:], counted[2:]) == ("DAAAADDA", "+..+" + "++++")


def test_the_step_after_a_skipped_one_waits_for_vanillas_gather_and_does_not_count_with_gathers_ahead() -> None:
    taken, gathered, counted = letters(WaysByTurns(ahead=True), "+++s+++")
    assert (taken[2:], counted[2:]) == ("DAAAA", "+..++")
    assert gathered[2:] == "AAAAD"


def test_cuda_graphs_put_the_timed_steps_off() -> None:
    assert letters(WaysByTurns(untimed=4), "+" * 10) == ("DAAA" + "DAADDA",) * 2 + ("...." + "+" * 6,)


@pytest.mark.parametrize(
    ("dense", "compressed", "stays"),
    [
        ((1.0, 1.1, 1.2), (0.5, 0.6, 0.7), True),
        ((1.0, 1.1, 1.2), (1.3, 1.4, 1.5), False),
        ((1.0, 1.0, 1.0), (0.98, 0.98, 0.98), False),
        ((1.0, 1.0, 1.0), (0.975, 0.975, 0.975), True),
        ((1.0, 1.1, 1.2), (0.5, 0.6, 1.0), None),
        ((0.9, 1.1, 1.2), (1.0, 1.4, 1.5), None),
    ],
)
def test_a_way_wins_by_its_median_once_the_ranges_lie_apart_and_compression_has_to_save_a_fortieth(
    dense: tuple[float, ...], compressed: tuple[float, ...], stays: bool | None
) -> None:
    d, a = iter(dense), iter(compressed)
    seconds = [next(d) if letter == "D" else next(a) for letter in "DAADDA"]
    choice, said = verdict(seconds, "balanced")
    assert choice is stays
    assert said.startswith(f"dense {sorted(dense)[1]:.3g} s ({min(dense):.3g} to {max(dense):.3g}), balanced ")
    if stays is None:
        twice, _ = verdict([*seconds, *(1.0 if letter == "D" else 0.5 for letter in "ADDAAD")], "balanced")
        assert twice is not None, "a second round decides in any case"


def test_after_two_rounds_medians_decide_and_not_the_luckiest_step() -> None:
    lucky = iter([1.0, *[2.0] * 5])
    choice, _ = verdict([next(lucky) if letter == "D" else 1.5 for letter in "DAADDAADDAAD"], "balanced")
    assert choice is True


def preset(flags: str = "", **changes: Any) -> OptimusConfig:
    return config_of(f"--optimus-cc balanced {flags}".split(), LAYOUT).replace(**changes)


def tried(config: OptimusConfig, inside: Any = ()) -> set[str]:
    return {traffic.name for traffic in on_trial(config, inside)}


def test_what_a_preset_alone_asks_for_is_tried_and_what_leaves_no_node_is_not() -> None:
    assert tried(preset()) == ALL
    assert tried(preset(), [PIPELINE_BACKWARD]) == ALL - {"compressed_backprop"}
    assert tried(preset(), CLASSES) == set()
    assert tried(preset("--param-gather-format int8")) == ALL - {"param_gather"}
    assert tried(preset("--fused-embedding-sync-format int4")) == ALL - {"fused_embedding_sync"}
    # The reducers of such gradients leave the tied embedding out, so that it is compressed in both ways, too.
    assert tried(preset("--dp-compression-format int4")) == ALL - {"dp_compression", "fused_embedding_sync"}
    assert tried(preset("--dp-compression-format int4 --dp-compression-stages auto")) == ALL


def test_there_is_no_trial_with_low_rank_without_a_preset_or_where_the_user_says_so() -> None:
    assert tried(preset("--no-compression-trial")) == set()
    assert tried(preset("--compressed-backprop-format low-rank")) == set()
    assert tried(config_of(["--optimus-cc"], LAYOUT)) == set()
    assert tried(OptimusConfig(dp_compression_format="int8", pipeline_forward_format="int8")) == set()
    asked = " ".join(f"{traffic.format_flag} int8" for traffic in CLASSES if "balanced" in traffic.presets)
    assert tried(config_of(f"--optimus-cc balanced {asked}".replace(
        "--expert-gradient-format int8", "").split(), LAYOUT)) == set()  # fmt: skip
    assert tried(OptimusConfig(dp_compression_format="int8", dp_compression_stages="auto")) == {"dp_compression"}
    with pytest.raises(FlagError, match="Give all or N; `optimus-cc plan` says which"):
        config_of(["--dp-compression", "--dp-compression-stages", "auto"], LAYOUT)


def test_a_choice_of_8b301ab_is_one_if_it_was_all_stages_or_none() -> None:
    def old(stages: list[int], **more: Any) -> bool | None:
        return choice_of_8b301ab({"dp_compression": {"states": {}, "stages": stages, **more}}, 3)

    assert old([0, 1, 2]) is old([0, 1, 2], one_level=True) is True
    assert old([]) is False and old([0, 1]) is None
    assert choice_of_8b301ab({"dp_compression": {"states": {}}}, 3) is choice_of_8b301ab({}, 3) is None


class Alone:
    """A grid of one rank, whose seconds are the largest."""

    is_first, stages = True, 2

    def __init__(self) -> None:
        self.asked = 0

    def largest(self, tensor: torch.Tensor) -> None:
        self.asked += 1


class Noting(Technique):
    released = False

    def release(self) -> None:
        self.released = True


def a_trial(*durations: float, ahead: bool = False) -> Trial:
    """Return a trial whose timed steps take these seconds in turn."""
    made = Trial(
        classes=on_trial(preset()), grid=Alone(), device=torch.device("cpu"), place=(2, 4), name="balanced",  # type: ignore[arg-type]
        techniques=[Noting(OptimusConfig(), each) for each in CLASSES],
        ways=WaysByTurns(ahead=ahead),
    )  # fmt: skip
    sent = [0, 0]

    def counters() -> tuple[int, int]:
        return sent[0], sent[1]

    made.counters, made.memory = counters, lambda: 319_000_000
    made.sent = sent  # type: ignore[attr-defined]
    taken = iter(durations)
    seconds: dict[str, float] = {}

    def total(name: str) -> float:
        if name not in seconds:
            seconds[name] = next(taken)
        return seconds[name]

    made._stopwatch.total = total  # type: ignore[method-assign]
    return made


def take(trial: Trial, steps: str, work: str = "1F1B") -> list[set[str]]:
    """Take steps, which end as in `letters`; return the classes that are dense in each."""
    dense = []
    for number, end in enumerate(steps, start=1):
        trial.begin()
        dense.append({each.name for each in trial.techniques if each.dense})
        trial.sent[0] += 8_000_000  # type: ignore[attr-defined]
        trial.sent[1] += 8_000_000 if dense[-1] else 2_000_000  # type: ignore[attr-defined]
        applied = end != "s"
        trial.end(work, number, applied=applied, alike=not trial.is_unusual("other" if end == "u" else work))
    return dense


def released(trial: Trial) -> set[str]:
    return {each.name for each in trial.techniques if each.released}  # type: ignore[attr-defined]


def test_a_trial_switches_its_classes_alone_and_says_in_a_line_what_it_chose(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "optimus_cc_ext")
    trial = a_trial(2.2, 1.05, 1.06, 2.22, 2.24, 1.07)
    assert take(trial, "+" * 9) == [ALL, set(), ALL, set(), set(), ALL, ALL, set(), set()]
    assert caplog.messages == [
        "optimus-cc: iterations 3 to 8: dense 2.22 s (2.2 to 2.24), balanced 1.06 s (1.05 to 1.07): balanced stays on; "
        "balanced: up to 2.0 of 8.0 MB (25.0 %) sent in an iteration, and 319.0 MB of memory, on a rank"
    ]
    assert trial.compared == ("balanced", 2.22, 1.06, True)
    assert trial.compressed is True and released(trial) == set() and trial.grid.asked == 1  # type: ignore[attr-defined]


def test_dense_lasts_and_drops_the_memory_of_everything_that_was_tried(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "optimus_cc_ext")
    trial = a_trial(1.0, 1.05, 1.06, 1.01, 1.02, 1.07)
    assert take(trial, "+" * 9)[-1] == ALL == released(trial)
    assert (
        "dense from now on (no_compression_trial compresses all the same); balanced: up to 2.0 " in caplog.messages[0]
    )
    assert trial.compared is not None and not trial.compared.stays


def test_ranges_that_overlap_ask_for_six_more_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "optimus_cc_ext")
    trial = a_trial(2.0, 1.0, 2.1, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0)
    take(trial, "+" * 13)
    assert trial.open and caplog.messages == []
    take(trial, "+")
    assert trial.compressed is True and trial.grid.asked == 2  # type: ignore[attr-defined]


def test_twenty_steps_that_do_not_give_six_end_the_trial_with_a_reason(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "optimus_cc_ext")
    trial = a_trial(1.0)
    take(trial, "++" + "+" + "su" * 9)
    assert trial.open
    take(trial, "s")
    assert trial.compressed is True and "20 steps have not given 6" in caplog.messages[0]
    assert trial.state is None, "nothing was measured, so that a resumed run tries again"
    assert trial.grid.asked == 0 and released(trial) == set()  # type: ignore[attr-defined]


def test_a_second_round_has_twenty_steps_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    trial = a_trial(2.0, 1.0, 2.1, 2.0, 2.0, 1.0, 1.0, 2.0, 2.0, 1.0, 1.0, 2.0)
    take(trial, "++" + "+" + "s" * 13 + "+" * 5 + "s" * 13 + "+" * 5)
    assert trial.open
    take(trial, "+")
    assert trial.compressed is True and trial.state is not None, "it was measured"


def test_only_the_parameter_gather_looks_ahead() -> None:
    trial = a_trial(ahead=True)
    assert take(trial, "+") == [ALL - {PARAM_GATHER.name}]
    assert {DP_GRADIENTS.name, EMBEDDING.name} < take(trial, "+")[0] | ALL


def test_a_choice_is_taken_over_on_as_many_nodes_and_ranks_with_the_same_classes() -> None:
    first = a_trial(1.0, 1.05, 1.06, 1.01, 1.02, 1.07)
    take(first, "+" * 8)
    assert first.state == {"compressed": False, "classes": sorted(ALL), "place": [2, 4]}
    kept = a_trial()
    kept.resume(first.state, {})
    assert kept.compressed is False and released(kept) == ALL
    for other in ({"classes": ["dp_compression"]}, {"place": [1, 4]}, {"place": [2, 8]}):
        anew = a_trial()
        anew.resume({**first.state, **other}, {})
        assert anew.open
    anew.resume(None, {})
    assert anew.open
    anew.resume(None, {"dp_compression": {"states": {}, "stages": [0, 1]}})
    assert anew.compressed is True
    anew.resume(first.state, {})
    assert anew.compressed is True, "there is no second choice in a process"


def test_a_choice_that_is_loaded_while_a_gather_waits_leaves_its_memory() -> None:
    trial = a_trial(ahead=True)
    take(trial, "+")
    trial.resume({"compressed": False, "classes": sorted(ALL), "place": [2, 4]}, {})
    assert (
        released(trial) == ALL - {PARAM_GATHER.name} and {each.name for each in trial.techniques if each.dense} == ALL
    )
