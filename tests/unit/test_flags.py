"""Flags of the group "Optimus-CC": their values, the configuration that they give, and that the documents agree."""

import argparse
import re
import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.config import default_of, flag_of, literals_of, type_of
from optimus_cc_ext.config.artifact import ARTIFACT_FLAGS
from optimus_cc_ext.config.flags import Request, add_flags, flag_fields, request_from
from tests.launches import launch

FLAGS_MD = (Path(__file__).resolve().parents[2] / "docs" / "flags.md").read_text()
FIELDS = [field for field in flag_fields() if field.metadata["help"]]


def parse(line: str) -> Request:
    return request_from(add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(shlex.split(line)))


def test_megatrons_help_shows_every_flag_with_its_default_and_the_artifacts_names() -> None:
    shown = launch(["--help"], tiny=False, world_size=1)
    assert shown.code == 0
    assert "--pipeline-model-parallel-size" in shown.output, "Megatron's own flags"
    text = " ".join(shown.output.split("\nOptimus-CC:\n")[1].split())
    for field in FIELDS:
        switch = f", --no-{flag_of(field.name)[2:]} " if type_of(field) is bool else " "
        assert re.search(f"{flag_of(field.name)}{switch}.*? \\(default: {default_of(field)}\\)", text), field.name
    assert all(f" {flag.spelling} " in text for flag in ARTIFACT_FLAGS)
    assert "--force-compression" not in text, "a test's knob is no user's flag"


def test_every_field_has_a_flag_of_its_name_and_a_row_with_values_default_and_the_artifacts_name() -> None:
    actions = add_flags(argparse.ArgumentParser())._option_string_actions
    table = FLAGS_MD.replace("`--seed`", "--seed").splitlines()
    for field in flag_fields():
        action = actions[flag_of(field.name)]
        assert action.default is None, "given and not given must be told apart"
        if type_of(field) is bool:
            assert actions["--no-" + flag_of(field.name)[2:]] is action
        if field not in FIELDS:
            continue
        values = action.metavar or (f"{{{','.join(action.choices)}}}" if action.choices else "")
        row = f"| `{flag_of(field.name)} {values}".rstrip() + f"` | {default_of(field)} |"
        rows = [line for line in table if line.startswith(row)]
        assert len(rows) == 1, row
        assert all(flag.spelling in rows[0] for flag in ARTIFACT_FLAGS if field.name in flag.fields), rows[0]


@pytest.mark.parametrize("field", [field.name for field in FIELDS if "int8" in literals_of(field.type)])
def test_the_format_fp8_is_refused_by_name_with_what_to_use(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"{flag_of(field)} fp8")
    said = (
        f"argument {flag_of(field)}: fp8 is gone, because int8 has a fourth of its error in as many bytes. Give int8."
    )
    assert said in capsys.readouterr().err


def test_only_what_was_given_is_explicit_with_its_spelling() -> None:
    assert parse("") == Request(explicit={}, spelling={})
    assert parse("--optimus-cc") == parse("--optimus-cc paper") == Request(explicit={}, spelling={}, preset="paper")
    assert parse("--optimus-cc balanced").preset == "balanced"
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
    "line",
    [
        "--dp-compression-stages some",
        "--compressed-backprop-rank 1.5",
        "--compressed-backprop-messages few",
        "--optimus-cc balansed",
    ],
)
def test_what_is_no_value_of_a_flag_is_refused_by_the_parser(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    flag, value = line.split()
    said = capsys.readouterr().err
    assert flag in said and value in said and "Traceback" not in said
