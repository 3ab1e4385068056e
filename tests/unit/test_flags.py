"""The group "Optimus-CC": what can be written, in which spelling, and what is read out of it."""

import argparse
import dataclasses
import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.flags import ARTIFACT_DEFAULTS, Request, add_flags, request_from
from tests.launches import launch

# Each option of the published artifact, and one of ours for the same thing.
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
]
ARTIFACT_NAMES = sorted({artifact.split()[0] for artifact, _ in SAME_OPTION})
OUR_NAMES = [
    "--optimus-cc",
    "--compressed-backprop",
    "--compressed-backprop-rank",
    "--compressed-backprop-messages",
    "--compressed-backprop-warmup",
    "--lazy-error-propagation",
    "--no-lazy-error-propagation",
    "--residual-across-iterations",
    "--fused-embedding-sync",
    "--dp-compression",
    "--dp-compression-rank",
    "--dp-compression-warmup",
    "--dp-error-feedback",
    "--no-dp-error-feedback",
    "--dp-compression-stages",
    "--compression-seed",
    "--compression-metrics",
]


def parse(line: str) -> Request:
    return request_from(add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(shlex.split(line)))


def refused(line: str) -> str:
    with pytest.raises(FlagError) as caught:
        parse(line)
    return str(caught.value)


def test_megatrons_help_shows_the_group_with_the_artifacts_names() -> None:
    shown = launch(["--help"], tiny=False, world_size=1)
    assert shown.code == 0
    assert "--pipeline-model-parallel-size" in shown.output, "Megatron's own flags"
    group = shown.output.split("\nOptimus-CC:\n")[1]
    first_words = {line.split()[0].rstrip(",") for line in group.splitlines() if line.startswith("  --")}
    for name in (*OUR_NAMES, *ARTIFACT_NAMES):
        assert name in first_words or f"{name}\n" in group or f", {name}" in group, name
    assert "--force-compression" not in group, "a test's knob is no user's flag"


def test_every_field_has_a_flag_of_its_name() -> None:
    actions = add_flags(argparse.ArgumentParser())._option_string_actions
    for field in dataclasses.fields(OptimusConfig):
        action = actions["--" + field.name.replace("_", "-")]
        assert action.default is None, "given and not given must be told apart"
        if field.type is bool and field.name != "force_compression":
            assert "--no-" + field.name.replace("_", "-") in actions


def test_nothing_given_asks_for_nothing() -> None:
    assert parse("") == Request(explicit={}, spelling={})


def test_the_preset_by_itself_names_no_field() -> None:
    assert parse("--optimus-cc") == Request(explicit={}, spelling={}, preset=True)


def test_only_what_was_given_is_explicit_with_its_spelling() -> None:
    request = parse("--optimus-cc --no-compressed-backprop --dp-compression-stages 3")
    assert request.preset and not request.artifact
    assert request.explicit == {"compressed_backprop": False, "dp_compression_stages": 3}
    assert request.spelling == {
        "compressed_backprop": "--compressed-backprop",
        "dp_compression_stages": "--dp-compression-stages",
    }


@given(rank=st.integers(), fraction=st.floats(allow_nan=False, allow_infinity=False), seed=st.integers())
def test_numbers_arrive_as_they_were_written(rank: int, fraction: float, seed: int) -> None:
    line = f"--compressed-backprop-rank={rank} --dp-compression-warmup={fraction} --compression-seed={seed}"
    assert parse(line).explicit == {
        "compressed_backprop_rank": rank,
        "dp_compression_warmup": fraction,
        "compression_seed": seed,
    }


@pytest.mark.parametrize(("written", "means"), [("all", "all"), ("auto", "auto"), ("3", 3), ("-1", -1)])
def test_stages_are_a_word_or_a_number(written: str, means: object) -> None:
    assert parse(f"--dp-compression-stages={written}").explicit == {"dp_compression_stages": means}


@pytest.mark.parametrize(
    "line", ["--dp-compression-stages some", "--compressed-backprop-rank 1.5", "--compressed-backprop-messages few"]
)
def test_what_is_no_value_of_a_flag_is_refused_by_the_parser(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    flag, value = line.split()
    said = capsys.readouterr().err
    assert flag in said and value in said and "Traceback" not in said


def test_the_artifacts_names_bring_the_artifacts_defaults() -> None:
    request = parse("--inter_grad_comp")
    assert request.artifact and not request.preset
    assert request.explicit == {**ARTIFACT_DEFAULTS, "compressed_backprop": True}
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
        ("--inter_grad_comp_rank 16", {"compressed_backprop_rank": 16}),
        ("--inter_grad_comp_epilogue_only", {"compressed_backprop_messages": "epilogue"}),
        ("--use_error_feedback", {"lazy_error_propagation": True, "dp_error_feedback": True}),
        ("--emb_comm_opt", {"fused_embedding_sync": True}),
        ("--grad_comp", {"dp_compression": True}),
        ("--grad_comp_rank 128", {"dp_compression_rank": 128}),
        ("--grad_comp_warm_up 0.0", {"dp_compression_warmup": 0.0}),
        ("--selective_grad_comp", {"dp_compression_stages": 2}),
        ("--selective_grad_comp --selective_grad_comp_way 3", {"dp_compression_stages": 3}),
        ("--selective_grad_comp_way 3", {}),  # there, the number meant nothing without the switch
        ("--comp_seed 5", {"compression_seed": 5}),
    ],
)
def test_each_of_the_artifacts_names_means_what_it_meant(line: str, fields: dict[str, object]) -> None:
    request = parse(line)
    assert request.explicit == {**ARTIFACT_DEFAULTS, **fields}
    for name in fields:
        assert request.spelling[name] in ARTIFACT_NAMES


@pytest.mark.parametrize("order", [1, -1], ids=["artifact's first", "ours first"])
@pytest.mark.parametrize(("artifact", "ours"), SAME_OPTION)
def test_both_spellings_of_one_option_are_refused(artifact: str, ours: str, order: int) -> None:
    said = refused(" ".join([artifact, ours][::order]))
    assert said.startswith(artifact.split()[0] + ": ")
    assert ours.split()[0].replace("--no-", "--") in said
    assert "Give one of the two" in said


def test_different_options_may_be_written_in_different_spellings() -> None:
    request = parse("--inter_grad_comp --compressed-backprop-rank 8 --grad_comp_rank 64 --fused-embedding-sync")
    assert request.artifact
    assert request.explicit == {
        **ARTIFACT_DEFAULTS,
        "compressed_backprop": True,
        "compressed_backprop_rank": 8,
        "dp_compression_rank": 64,
        "fused_embedding_sync": True,
    }
    assert request.spelling["compressed_backprop_rank"] == "--compressed-backprop-rank"
    assert request.spelling["dp_compression_rank"] == "--grad_comp_rank"


@pytest.mark.parametrize("artifact", ["--grad_comp", "--comp_seed 3", "--selective_grad_comp_way 2"])
def test_the_preset_with_the_artifacts_names_is_refused(artifact: str) -> None:
    said = refused(f"--optimus-cc {artifact}")
    assert said.startswith("--optimus-cc: ") and artifact.split()[0] in said
    assert "one spelling" in said
