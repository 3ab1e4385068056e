"""Flags of the artifact's Megatron that today's does not know: translated, dropped or refused, each in a line."""

import argparse
import shlex
from typing import Any

import pytest

from optimus_cc_ext.gone_flags import GONE_FLAGS, add_gone_flags, take_notes

UNTOUCHED = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}


def parse(line: str) -> tuple[dict[str, Any], list[str]]:
    """(what Megatron's own fields hold afterwards, the lines to say)."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name in UNTOUCHED:
        parser.add_argument("--" + name.replace("_", "-"), default=None)
    add_gone_flags(parser)
    args = parser.parse_args(shlex.split(line))
    notes = take_notes(args)
    return vars(args), notes


@pytest.mark.parametrize(
    ("line", "because"),
    [
        ("--data-impl mmap", "memory-mapped dataset"),
        ("--data-impl infer", "memory-mapped dataset"),
        ("--DDP-impl local", "Megatron's own DDP"),
        ("--experiment_name a-name", "a label"),
        ("--save_json_log", "--tensorboard-dir"),
        ("--save_json_path somewhere", "--tensorboard-dir"),
        ("--grad_comp_type PowerSGD", "PowerSGD"),
        ("--inter_grad_comp_type PowerSGD", "PowerSGD"),
    ],
)
def test_what_is_the_only_behaviour_left_is_dropped_and_said(line: str, because: str) -> None:
    fields, notes = parse(line)
    assert fields == UNTOUCHED
    assert len(notes) == 1
    assert notes[0].startswith(f"{line}: dropped: ") and because in notes[0]


@pytest.mark.parametrize("method", ["uniform", "block"])
def test_the_checkpointing_method_is_translated_and_said(method: str) -> None:
    fields, notes = parse(f"--activations-checkpoint-method {method}")
    assert fields == {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": 1}
    assert len(notes) == 1
    assert notes[0].startswith(f"--activations-checkpoint-method {method}: translated: ")
    assert "--recompute-method" in notes[0]


@pytest.mark.parametrize("order", [1, -1], ids=["method first", "number first"])
def test_the_number_of_layers_wins_over_the_one_that_the_method_implies(order: int) -> None:
    flags = ["--activations-checkpoint-method uniform", "--activations-checkpoint-num-layers 3"]
    fields, notes = parse(" ".join(flags[::order]))
    assert fields == {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 3}
    assert len(notes) == 2 and all(": translated: " in note for note in notes)


@pytest.mark.parametrize(
    "line",
    [
        "--data-impl lazy",
        "--data-impl cached",
        "--DDP-impl torch",
        "--activations-checkpoint-method some",
        "--grad_comp_type TopK",
        "--inter_grad_comp_type TopK",
    ],
)
def test_what_cannot_be_honoured_is_refused_with_what_can(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line)
    assert ended.value.code == 2
    flag, value = line.split()
    said = capsys.readouterr().err
    assert f"{flag}: '{value}' is gone" in said and "Leave the flag out, or give " in said


def test_a_number_of_layers_that_is_none_is_refused_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse("--activations-checkpoint-num-layers many")
    assert ended.value.code == 2
    assert "--activations-checkpoint-num-layers" in capsys.readouterr().err


def test_every_flag_of_the_table_is_said_in_one_line() -> None:
    lines = [f"{gone.spelling} {'' if gone.switch else (gone.accepts or ('3',))[0]}".strip() for gone in GONE_FLAGS]
    _, notes = parse(" ".join(lines))
    assert len(notes) == len(GONE_FLAGS)
    assert all("\n" not in note for note in notes)
    assert [note.split(": ")[0] for note in notes] == lines


def test_nothing_is_said_where_nothing_is_gone() -> None:
    assert parse("") == (UNTOUCHED, [])


def test_a_flag_that_megatron_knows_is_left_to_megatron() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-impl", dest="megatrons")
    add_gone_flags(parser)
    args = parser.parse_args(["--data-impl", "anything"])
    assert args.megatrons == "anything" and take_notes(args) == []
