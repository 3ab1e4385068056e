"""Old names: the published artifact's flags mean what they meant, and flags of its Megatron that are gone are named."""

import argparse
import shlex
from typing import Any

import pytest

from optimus_cc_ext.config.artifact import ARTIFACT_DEFAULTS, REMOVED_FLAGS, add_removed_flags, take_notes
from optimus_cc_ext.config.flags import Request, add_flags, request_from
from optimus_cc_ext.errors import FlagError

# Each pair has an option of the published artifact and one of ours for the same setting.
SAME_OPTION = [
    ("--inter_grad_comp", "--compressed-backprop"),
    ("--inter_grad_comp", "--no-compressed-backprop"),
    ("--inter_grad_comp_rank 8", "--compressed-backprop-rank 8"),
    ("--inter_grad_comp_epilogue_only", "--compressed-backprop-messages epilogue"),
    ("--inter_grad_comp_epilogue_only", "--compressed-backprop-messages all"),
    ("--use_error_feedback", "--lazy-error-propagation"),
    ("--use_error_feedback", "--no-lazy-error-propagation"),
    ("--use_error_feedback", "--dp-error-feedback"),
    ("--use_error_feedback", "--no-dp-error-feedback"),
    ("--emb_comm_opt", "--fused-embedding-sync"),
    ("--grad_comp", "--dp-compression"),
    ("--grad_comp_rank 8", "--dp-compression-rank 16"),
    ("--grad_comp_warm_up 0.1", "--dp-compression-warmup 0.1"),
    ("--selective_grad_comp", "--dp-compression-stages 2"),
    ("--selective_grad_comp_way 2", "--dp-compression-stages all"),
    ("--comp_seed 1", "--compression-seed 1"),
    ("--inter_grad_comp_warm_up 0.1", "--compressed-backprop-warmup 0.1"),
]


def parse(line: str) -> Request:
    return request_from(add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(shlex.split(line)))


def refused(line: str) -> str:
    with pytest.raises(FlagError) as caught:
        parse(line)
    return str(caught.value)


def test_the_defaults_are_the_artifacts() -> None:
    assert ARTIFACT_DEFAULTS == {
        "compressed_backprop_rank": 12,
        "compressed_backprop_messages": "all",
        "lazy_error_propagation": False,
        "residual_across_iterations": "carry",
        "dp_error_feedback": False,
        "dp_compression_rank": 4,
        "dp_compression_warmup": 0.1,
        "compression_seed": 714,
    }


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("--inter_grad_comp", {"compressed_backprop": True}),
        ("--inter_grad_comp_rank 16", {"compressed_backprop_rank": 16}),
        ("--inter_grad_comp_epilogue_only", {"compressed_backprop_messages": "epilogue"}),
        ("--use_error_feedback", {"lazy_error_propagation": True, "dp_error_feedback": True}),
        ("--emb_comm_opt", {"fused_embedding_sync": True}),
        ("--grad_comp", {"dp_compression": True}),
        ("--grad_comp_rank 128", {"dp_compression_rank": 128}),
        ("--grad_comp_warm_up 0.0", {"dp_compression_warmup": 0.0}),
        ("--selective_grad_comp", {"dp_compression_stages": 2}),
        ("--selective_grad_comp --selective_grad_comp_way 3", {"dp_compression_stages": 3}),
        ("--selective_grad_comp_way 3", {}),  # the artifact ignores this number without its switch
        ("--comp_seed 5", {"compression_seed": 5}),
        ("--inter_grad_comp_warm_up 0.2", {"compressed_backprop_warmup": 0.2}),
        (
            "--inter_grad_comp --compressed-backprop-rank 8 --grad_comp_rank 64",
            {"compressed_backprop": True, "compressed_backprop_rank": 8, "dp_compression_rank": 64},
        ),
    ],
)
def test_each_of_the_artifacts_names_means_what_it_meant_also_beside_ours(line: str, fields: dict[str, Any]) -> None:
    request = parse(line)
    assert request.artifact and not request.preset
    assert request.explicit == {**ARTIFACT_DEFAULTS, **fields}
    for name in fields:
        assert request.spelling[name] in line.split()


@pytest.mark.parametrize("order", [1, -1], ids=["artifact's first", "ours first"])
@pytest.mark.parametrize(("artifact", "ours"), SAME_OPTION)
def test_both_spellings_of_one_option_are_refused(artifact: str, ours: str, order: int) -> None:
    said = refused(" ".join([artifact, ours][::order]))
    assert said.startswith(artifact.split()[0] + ": ")
    assert ours.split()[0].replace("--no-", "--") in said
    assert "Give one of the two" in said


@pytest.mark.parametrize("artifact", ["--grad_comp", "--comp_seed 3", "--selective_grad_comp_way 2"])
def test_the_preset_with_the_artifacts_names_is_refused(artifact: str) -> None:
    said = refused(f"--optimus-cc {artifact}")
    assert said.startswith("--optimus-cc: ") and artifact.split()[0] in said
    assert "Give either the preset or the artifact's flags" in said


UNTOUCHED = dict.fromkeys(
    (
        "recompute_granularity", "recompute_method", "recompute_num_layers", "distribute_saved_activations",
        "layernorm_epsilon", "override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler",
    )
)  # fmt: skip


def parse_gone(line: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of Megatron's own fields after parsing, and the lines to print."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in UNTOUCHED:
        parser.add_argument(f"--todays-{name}", dest=name, default=None)
    add_removed_flags(parser)
    args = parser.parse_args(shlex.split(line))
    notes = take_notes(args)
    return vars(args), notes


@pytest.mark.parametrize(
    ("line", "done", "because"),
    [
        ("--data-impl mmap", "dropped", "memory-mapped dataset"),
        ("--data-impl infer", "dropped", "memory-mapped dataset"),
        ("--DDP-impl local", "dropped", "its own DDP"),
        ("--experiment_name a-name", "dropped", "this label"),
        ("--save_json_log", "dropped", "--tensorboard-dir"),
        ("--save_json_path somewhere", "dropped", "--tensorboard-dir"),
        ("--grad_comp_type PowerSGD", "dropped", "PowerSGD"),
        ("--inter_grad_comp_type PowerSGD", "dropped", "PowerSGD"),
        ("--activations-checkpoint-method uniform", "translated", "--recompute-method"),
        ("--activations-checkpoint-method block", "translated", "--recompute-method"),
    ],
)
def test_what_is_gone_is_dropped_or_translated_and_said(line: str, done: str, because: str) -> None:
    fields, notes = parse_gone(line)
    translated = {"recompute_granularity": "full", "recompute_method": line.split()[-1], "recompute_num_layers": 1}
    assert fields == (UNTOUCHED if done == "dropped" else UNTOUCHED | translated)
    assert len(notes) == 1
    assert notes[0].startswith(f"{line}: {done}: ") and because in notes[0]


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("--layernorm-epsilon 0.001", "layernorm_epsilon", 1e-3),
        ("--checkpoint-num-layers 2", "recompute_num_layers", 2),
        ("--distribute-checkpointed-activations", "distribute_saved_activations", True),
        ("--override-lr-scheduler", "override_opt_param_scheduler", True),
        ("--use-checkpoint-lr-scheduler", "use_checkpoint_opt_param_scheduler", True),
    ],
)
def test_what_has_another_name_today_is_given_it(line: str, field: str, value: Any) -> None:
    fields, notes = parse_gone(line)
    assert fields == UNTOUCHED | {field: value}
    assert len(notes) == 1 and notes[0].startswith(f"{line}: translated: --")


@pytest.mark.parametrize("order", [1, -1], ids=["method first", "number first"])
def test_the_number_of_layers_wins_over_the_one_that_the_method_implies(order: int) -> None:
    flags = ["--activations-checkpoint-method uniform", "--activations-checkpoint-num-layers 3"]
    fields, notes = parse_gone(" ".join(flags[::order]))
    meant = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
    assert fields == UNTOUCHED | meant
    assert len(notes) == 2 and all(": translated: " in note for note in notes)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--data-impl lazy", "Megatron no longer has 'lazy'"),
        ("--data-impl cached", "Megatron no longer has 'cached'"),
        ("--DDP-impl torch", "Megatron no longer has 'torch'"),
        ("--activations-checkpoint-method some", "Megatron no longer has 'some'"),
        ("--emb_grad_comp", "compressing the embedding's gradient costs more than it saves"),
        ("--mp_grad_comp", "tensor-parallel traffic stays within a node"),
        ("--mp_acti_comp", "tensor-parallel traffic stays within a node"),
        ("--inter_acti_comp", "the artifact itself says 'We do not support' it"),
        ("--get_val_ppls", "checkpoints are evaluated by another program"),
        ("--pipeline-model-parallel-split-rank 1", "Megatron no longer trains encoder-decoder models"),
        ("--grad_comp_type TopK", "Megatron no longer has 'TopK'"),
        ("--inter_grad_comp_type TopK", "Megatron no longer has 'TopK'"),
        ("--compression-debug", "settings of ranks are compared when training begins. Leave it out"),
        ("--low-rank-wire int8", "low-rank factors are sent in the gradients' data type. Leave it out, or give"),
        ("--activations-checkpoint-num-layers many", ""),
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_can(
    line: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_gone(line)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert f"{line.split()[0]}: {says}" in said
    assert not says.startswith("Megatron no longer has") or "Leave the flag out, or give " in said


def test_every_gone_flag_of_the_table_is_said_in_one_line_and_nothing_else() -> None:
    assert parse_gone("") == (UNTOUCHED, [])
    gone = [flag for flag in REMOVED_FLAGS if not flag.cure]
    lines = [f"{flag.spelling} {'' if flag.const else (flag.accepts or ('3',))[0]}".strip() for flag in gone]
    _, notes = parse_gone(" ".join(lines))
    assert all("\n" not in note for note in notes)
    assert [note.split(": ")[0] for note in notes] == lines


def test_a_flag_that_megatron_knows_is_left_to_megatron() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-impl", dest="megatrons")
    add_removed_flags(parser)
    args = parser.parse_args(["--data-impl", "anything"])
    assert args.megatrons == "anything" and take_notes(args) == []
