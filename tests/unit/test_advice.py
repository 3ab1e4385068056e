"""Advice: a line in the log says what a command line does without showing it."""

import argparse
import shlex

import pytest

from optimus_cc_ext.config.flags import add_flags, request_from
from optimus_cc_ext.config.presets import Layout, resolve

LAYOUT = Layout(stages=4, data_parallel=4, tied_embeddings=True, train_iters=100)


def notes(line: str) -> tuple[str, ...]:
    args = add_flags(argparse.ArgumentParser(allow_abbrev=False)).parse_args(shlex.split(line))
    return resolve(request_from(args), LAYOUT).notes


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--compressed-backprop-rank 16", ["--compressed-backprop-rank: no effect: --compressed-backprop is off"]),
        ("--dp-compression --compressed-backprop-messages all", ["--compressed-backprop-messages: no effect: "
                                                                 "--compressed-backprop is off"]),
        ("--compressed-backprop --dp-compression-stages 1", ["--dp-compression-stages: no effect: "
                                                             "--dp-compression is off"]),
        ("--compressed-backprop --no-lazy-error-propagation --residual-across-iterations carry",
         ["--residual-across-iterations: no effect: --lazy-error-propagation is off"]),
        ("--optimus-cc --compressed-backprop-rank 8", []),
        ("--compressed-backprop --residual-across-iterations carry", []),
        ("--compression-state-dtype bf16", []),
    ],
)  # fmt: skip
def test_a_flag_without_effect_is_named(line: str, says: list[str]) -> None:
    assert list(notes(line)) == says


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--grad_comp", "--dp-compression-rank 4, --dp-compression-warmup 0.1, --compression-seed 714, "
                        "--no-dp-error-feedback"),
        ("--grad_comp --grad_comp_rank 128 --grad_comp_warm_up 0 --use_error_feedback --comp_seed 1", None),
        ("--inter_grad_comp --inter_grad_comp_rank 16 --inter_grad_comp_epilogue_only",
         "--no-lazy-error-propagation, --compression-seed 714"),
    ],
)  # fmt: skip
def test_what_the_artifacts_spelling_inherits_is_named(line: str, says: str | None) -> None:
    said = [note for note in notes(line) if note.startswith("the published artifact's defaults: ")]
    if says is None:
        assert said == []
    else:
        assert sorted(said[0].partition(": ")[2].split(", ")) == sorted(says.split(", "))
