"""State from which a resumed run goes on, and state that it starts afresh with a log line."""

from typing import Any

import pytest

from optimus_cc_ext.checkpoint.resuming import decide, settings_of
from optimus_cc_ext.checkpoint.state_files import Manifest
from optimus_cc_ext.config import OptimusConfig

MESSAGES = {"--micro-batch-size": 2}
TOPOLOGY = {"the number of ranks": 4, "--pipeline-model-parallel-size": 2}
BOTH = OptimusConfig(compressed_backprop_format="low-rank", dp_compression_format="low-rank", fused_embedding_sync=True)
CB, SC = "compressed_backprop", "dp_compression"


def decided(now: OptimusConfig = BOTH, saved: OptimusConfig | None = BOTH, **changes: Any) -> Any:
    manifest = None
    if saved is not None:
        manifest = Manifest(
            iteration=4,
            checkpoint="mark",
            topology=TOPOLOGY,
            techniques=settings_of(saved, changes.pop("saved_messages", MESSAGES)),
            files=(),
        )
    given = {"checkpoint": "mark", "iteration": 4, "unwanted": None, "topology": TOPOLOGY} | changes
    return decide(settings_of(now, MESSAGES), given.pop("topology"), manifest, **given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"unwanted": "--finetune"}, "--finetune"),
        ({"saved": None}, "the checkpoint does not contain it"),
        ({"checkpoint": None}, "overwritten without Optimus-CC"),
        ({"checkpoint": "another mark"}, "contains the state of another save (iteration 4)"),
        ({"iteration": 6}, "contains the state of another save (iteration 4)"),
        (
            {"topology": TOPOLOGY | {"--pipeline-model-parallel-size": 4}},
            "--pipeline-model-parallel-size is 4 here and 2 in the checkpoint",
        ),
    ],
)
def test_what_concerns_the_whole_checkpoint_resets_everything_in_one_line(changes: dict[str, Any], says: str) -> None:
    found = decided(**changes)
    (line,) = found.lines()
    assert line.startswith("warning: the state of pipeline backward and DP gradients is reset")
    assert says in line and found.restored == ()


@pytest.mark.parametrize(
    ("changes", "kept", "says"),
    [
        ({"saved_messages": {"--micro-batch-size": 4}}, SC, "--micro-batch-size is 2 here and 4 in the checkpoint"),
        ({"compressed_backprop_rank": 8}, SC, "--compressed-backprop-rank is 8 here and 16 in the checkpoint"),
        ({"compressed_backprop_messages": "all"}, SC, "--compressed-backprop-messages is all here and epilogue"),
        ({"lazy_error_propagation": False}, SC, "--lazy-error-propagation is False here and True"),
        ({"dp_compression_rank": 8}, CB, "--dp-compression-rank is 8 here and 128"),
        ({"dp_compression_stages": 1}, CB, "--dp-compression-stages is 1 here and all"),
        ({"dp_error_feedback": False}, CB, "--dp-error-feedback is False here and True"),
    ],
)
def test_what_concerns_one_technique_resets_that_one(changes: dict[str, Any], kept: str, says: str) -> None:
    found = decided(**changes) if "saved_messages" in changes else decided(now=BOTH.replace(**changes))
    restored, line = found.lines()
    assert found.restored == (kept,) and says in line
    assert restored.startswith("the state of") and restored.endswith("is restored from iteration 4")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compression_seed": 5},
        {"dp_compression_warmup": 0.5},
        {"residual_across_iterations": "drop"},
        {"compression_state_dtype": "bf16"},
        {"fused_embedding_sync": False},
        {"compression_metrics": False},
    ],
)
def test_the_same_run_goes_on_from_everything_also_where_what_the_state_does_not_depend_on_has_changed(
    changes: dict[str, Any],
) -> None:
    found = decided(now=BOTH.replace(**changes))
    both = "the state of pipeline backward and DP gradients is restored from iteration 4"
    assert found.restored == (CB, SC) and found.lines() == [both]


def test_a_technique_that_is_newly_on_starts_afresh_and_one_that_is_off_is_ignored() -> None:
    newly = decided(saved=BOTH.replace(dp_compression_format="dense"))
    assert newly.restored == (CB,)
    _, line = newly.lines()
    assert "the state of DP gradients is reset" in line and "does not contain it" in line
    off = decided(now=BOTH.replace(dp_compression_format="dense"))
    assert off.restored == (CB,)
    ignored = "the checkpoint's state of DP gradients is ignored: this run does not use it"
    assert off.lines()[1:] == [ignored]


def test_a_format_that_remembers_nothing_neither_asks_for_state_nor_warns() -> None:
    blocks = OptimusConfig(compressed_backprop_format="int8", dp_compression_format="int4")
    assert settings_of(blocks, MESSAGES) == {}
    (line,) = decided(now=blocks).lines()
    assert line.startswith("the checkpoint's state of") and "warning" not in line
    assert decided(saved=blocks, now=blocks).lines() == []


def test_what_a_rank_finds_out_later_resets_as_well() -> None:
    found = decided().without({SC: "other buckets"})
    assert found.restored == (CB,) and found.lines()[1].endswith(": other buckets")
