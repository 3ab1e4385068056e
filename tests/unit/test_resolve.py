"""Resolution of flags on a layout: the preset, flags that override it, flags that are refused, values that are
clamped.
"""

import argparse
import math
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES, DP_GRADIENTS, PIPELINE_BACKWARD
from optimus_cc_ext.config.flags import add_flags, request_from
from optimus_cc_ext.config.presets import Layout, Resolution, resolve
from optimus_cc_ext.errors import FlagError

FOUR_BY_FOUR = Layout(stages=4, data_parallel=4, tied_embeddings=True, train_iters=100, seed=99)
SHARDED = replace(FOUR_BY_FOUR, distributed_optimizer=True, master_copies=True)
PAPER = OptimusConfig(
    compressed_backprop_format="low-rank",
    compressed_backprop_rank=16,
    compressed_backprop_messages="epilogue",
    lazy_error_propagation=True,
    residual_across_iterations="drop",
    fused_embedding_sync=True,
    dp_compression_format="low-rank",
    dp_compression_rank=128,
    dp_compression_warmup=0.0,
    dp_error_feedback=True,
    dp_compression_stages=3,
    compression_seed=99,
    compression_metrics=True,
)
BALANCED = OptimusConfig(
    pipeline_forward_format="int8",
    compressed_backprop_format="int8",
    compressed_backprop_messages="all",
    fused_embedding_sync=True,
    fused_embedding_sync_format="int8",
    dp_compression_format="int8",
    dp_compression_stages="all",
    compression_seed=99,
)


def layout(stages: int = 4, replicas: int = 4, tied: bool = True, train_iters: int | None = 100) -> Layout:
    return Layout(stages=stages, data_parallel=replicas, tied_embeddings=tied, train_iters=train_iters, seed=99)


def with_nodes(line: str, on: Layout = FOUR_BY_FOUR) -> Resolution:
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    return resolve(request_from(parser.parse_args(shlex.split(line))), on)


def resolved(line: str, on: Layout = FOUR_BY_FOUR) -> Resolution:
    """Resolve a line; the classes that are compressed only between nodes have a test of their own."""
    found = with_nodes(line, on)
    return Resolution(found.config.replace(only_between_nodes="", chosen_preset=""), found.notes)


def refused(line: str, on: Layout = FOUR_BY_FOUR) -> str:
    with pytest.raises(FlagError) as caught:
        resolved(line, on)
    return str(caught.value)


PIPELINES, SUMS = ("pipeline_forward", "compressed_backprop"), ("dp_compression", "fused_embedding_sync")


@pytest.mark.parametrize(
    "line, classes",
    [
        ("", ()),
        ("--optimus-cc", ()),
        ("--dp-compression-format int4", ()),
        ("--optimus-cc balanced", (*PIPELINES, *SUMS, "param_gather")),
        ("--optimus-cc balanced --dp-compression-format int8 --param-gather-format int8", (*PIPELINES, SUMS[1])),
        ("--optimus-cc balanced --compressed-backprop", (PIPELINES[0], *SUMS, "param_gather")),
        ("--optimus-cc balanced --dp-compression-stages all", (*PIPELINES, *SUMS, "param_gather")),
        ("--optimus-cc balanced --dp-compression-levels one", (*PIPELINES, SUMS[1], "param_gather")),
        ("--optimus-cc balanced --dp-compression-levels two", (*PIPELINES, *SUMS, "param_gather")),
    ],
)
def test_a_class_is_left_dense_inside_a_node_if_balanced_alone_asks_for_it(line: str, classes: tuple[str]) -> None:
    config = with_nodes(line, SHARDED).config
    assert [each.name for each in CLASSES if config.is_dense_inside(each)] == [
        each.name for each in CLASSES if each.name in classes
    ]


def test_without_flags_everything_is_off_and_a_preset_is_what_it_is_said_to_be() -> None:
    assert resolved("") == Resolution(OptimusConfig(compression_seed=99))
    assert resolved("--optimus-cc") == resolved("--optimus-cc paper") == Resolution(PAPER)
    assert resolved("--optimus-cc balanced") == Resolution(BALANCED)


@given(
    preset=st.sampled_from(["--optimus-cc", "--optimus-cc balanced"]),
    stages=st.integers(1, 64), replicas=st.integers(1, 64), tied=st.booleans(),
)  # fmt: skip
def test_a_preset_switches_on_what_the_layout_allows_and_says_what_it_left_out(
    preset: str, stages: int, replicas: int, tied: bool
) -> None:
    balanced = preset.endswith("balanced")
    config, notes = vars(resolved(preset, layout(stages, replicas, tied))).values()
    assert (config.pipeline_forward_format == "int8") == (balanced and stages > 1)
    assert config.is_on(PIPELINE_BACKWARD) == (stages > 1)
    assert config.fused_embedding_sync == (stages > 1 and tied)
    assert config.is_on(DP_GRADIENTS) == (replicas > 1)
    if replicas > 1:
        assert config.dp_compression_stages == ("all" if balanced else math.ceil(3 * stages / 4))
    left_out = {
        "pipeline forward: one pipeline stage": stages == 1 and balanced,
        "pipeline backward: one pipeline stage": stages == 1,
        "embedding: one pipeline stage": stages == 1,
        "embedding: the embeddings are not tied": stages > 1 and not tied,
        "DP gradients: one data-parallel replica": replicas == 1,
    }
    assert sorted(notes) == sorted(f"{preset} leaves out {what}" for what, is_left in left_out.items() if is_left)


def test_the_balanced_preset_gathers_parameters_to_the_bit_where_there_are_fp32_copies_and_says_where_not() -> None:
    assert resolved("--optimus-cc balanced", SHARDED) == Resolution(BALANCED.replace(param_gather_format="exact"))
    dense = resolved("--optimus-cc balanced", replace(SHARDED, master_copies=False))
    said = "--optimus-cc balanced leaves out parameter gather: no fp32 copies of parameters"
    assert dense == Resolution(BALANCED, (said,))
    assert resolved("--optimus-cc", SHARDED) == Resolution(PAPER)
    assert resolved("--optimus-cc balanced --param-gather-format dense", SHARDED) == Resolution(BALANCED)


MUON = replace(FOUR_BY_FOUR, optimizer="muon")


@pytest.mark.parametrize("preset", ["--optimus-cc", "--optimus-cc balanced"])
def test_presets_send_gradients_in_int8_to_an_optimizer_that_amplifies_errors(preset: str) -> None:
    config, notes = vars(resolved(preset, MUON)).values()
    assert config.dp_compression_format == "int8"
    assert config.dp_compression_stages == (3 if preset == "--optimus-cc" else "all")
    said = "--optimus-cc sends DP gradients in int8: --optimizer muon amplifies coarser errors"
    assert notes == ((said,) if preset == "--optimus-cc" else ()), "balanced sends int8 beside every optimizer"
    none = resolved(f"{preset} --no-dp-compression", MUON)
    assert none.config.dp_compression_format == "dense" and none.notes == ()


@pytest.mark.parametrize("format", ["int4", "low-rank"])
def test_a_coarser_format_that_is_asked_for_works_with_a_warning(format: str) -> None:
    for line in (
        f"--dp-compression-format {format} --dp-compression",
        f"--optimus-cc --dp-compression-format {format}",
    ):
        config, notes = vars(resolved(line, MUON)).values()
        assert config.dp_compression_format == format
        assert [note for note in notes if "amplifies its error" in note and format in note]
        assert not [note for note in resolved(line).notes if "amplifies" in note]
    low_rank = resolved("--optimus-cc --dp-compression-rank 8", MUON).config
    assert (low_rank.dp_compression_format, low_rank.dp_compression_rank) == ("low-rank", 8)


def test_what_the_user_switched_off_is_not_reported_as_left_out() -> None:
    one_rank = layout(stages=1, replicas=1)
    off = "--no-compressed-backprop --no-fused-embedding-sync --no-dp-compression"
    assert len(resolved("--optimus-cc", one_rank).notes) == 3
    assert resolved(f"--optimus-cc {off}", one_rank).notes == ()
    dense = off.replace("--no-", "--").replace(" ", "-format dense ") + "-format dense --pipeline-forward-format dense"
    assert resolved(f"--optimus-cc balanced {dense}", one_rank).notes == ()


@pytest.mark.parametrize(
    ("changes", "becomes"),
    [
        ("--no-compressed-backprop", BALANCED.replace(compressed_backprop_format="dense")),
        ("--compressed-backprop", BALANCED),
        ("--fused-embedding-sync-format dense", BALANCED.replace(fused_embedding_sync_format="dense")),
        ("--dp-compression-format low-rank --dp-compression-rank 8", BALANCED.replace(
            dp_compression_format="low-rank", dp_compression_rank=8
        )),
        ("--pipeline-forward-format dense --dp-compression-stages all", BALANCED.replace(
            pipeline_forward_format="dense", dp_compression_stages="all"
        )),
    ],
)  # fmt: skip
def test_what_is_given_one_by_one_wins_over_the_balanced_preset(changes: str, becomes: OptimusConfig) -> None:
    assert resolved(f"--optimus-cc balanced {changes}") == Resolution(becomes)


def test_a_rank_beside_the_balanced_preset_is_refused_with_the_format_that_takes_one() -> None:
    said = refused("--optimus-cc balanced --compressed-backprop-rank 8")
    assert "--compressed-backprop-rank: it has no effect on --compressed-backprop-format int8" in said
    assert "--compressed-backprop-format low-rank" in said


@pytest.mark.parametrize("preset", ["", "--optimus-cc "], ids=["alone", "with the preset"])
@pytest.mark.parametrize(
    ("line", "on", "says"),
    [
        ("--compressed-backprop", layout(stages=1), ("nothing to compress", "--pipeline-model-parallel-size 2")),
        ("--fused-embedding-sync", layout(stages=1), ("nothing to fuse", "--pipeline-model-parallel-size 2")),
        ("--fused-embedding-sync", layout(tied=False), ("not tied", "--untie-embeddings-and-output-weights")),
        ("--dp-compression", layout(replicas=1), ("nothing to compress", "more replicas")),
        ("--dp-compression-stages 5", layout(), ("5 stages", "only 4", "up to 4")),
    ],
)
def test_an_individual_flag_that_cannot_work_is_refused(
    preset: str, line: str, on: Layout, says: tuple[str, ...]
) -> None:
    said = refused(preset + line, on)
    assert said.startswith(line.split()[0] + ": ")
    assert all(part in said for part in says), said


@pytest.mark.parametrize(
    ("line", "on", "says"),
    [
        ("--pipeline-forward-format int8", layout(stages=1), "no activation is sent"),
        ("--compressed-backprop-format int8", layout(stages=1), "nothing to compress"),
        ("--dp-compression-format int4", layout(replicas=1), "nothing to compress"),
        ("--fused-embedding-sync-format int8", layout(tied=False), "not tied"),
        ("--dp-compression-format int4 --no-dp-compression", layout(), "contradicts"),
        ("--param-gather-format int8", layout(replicas=1), "no parameter is gathered"),
        ("--param-gather-format int8", layout(), "--use-distributed-optimizer"),
        ("--param-gather-format int8", replace(SHARDED, master_copies=False), "an fp32 copy"),
    ],
)
def test_a_format_that_cannot_work_is_refused_by_its_own_flag(line: str, on: Layout, says: str) -> None:
    said = refused(line, on)
    assert said.startswith(line.split()[0] + ": ") and says in said


@pytest.mark.parametrize(
    ("line", "flag"),
    [
        ("--compressed-backprop-format int8 --compressed-backprop-rank 4", "--compressed-backprop-rank"),
        ("--compressed-backprop-format int4 --residual-across-iterations drop", "--residual-across-iterations"),
        ("--dp-compression-format int4 --dp-compression-rank 8", "--dp-compression-rank"),
        ("--dp-compression-format int4 --dp-error-feedback", "--dp-error-feedback"),
    ],
)
def test_a_flag_of_low_rank_is_refused_with_a_format_that_has_none(line: str, flag: str) -> None:
    assert refused(line).startswith(f"{flag}: ")


def test_dense_turns_its_class_off_beside_whatever_a_run_had_before() -> None:
    before = "--optimus-cc --dp-compression --dp-compression-rank 8 --dp-error-feedback --compressed-backprop"
    config = resolved(f"{before} --dp-compression-format dense").config
    assert (config.compressed_backprop_format, config.dp_compression_format) == ("low-rank", "dense")
    assert not resolved(f"{before} --compressed-backprop-format dense").config.is_on(PIPELINE_BACKWARD)


@pytest.mark.parametrize("technique", ["--dp-compression", "--compressed-backprop"])
def test_a_warmup_without_a_number_of_iterations_is_refused(technique: str) -> None:
    said = refused(f"{technique} {technique}-warmup 0.1", layout(train_iters=None))
    assert said.startswith(f"{technique}-warmup: ") and "--train-iters" in said
    resolved(technique, layout(train_iters=None))


def others(notes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the notes without the line about inherited defaults (tests/unit/test_advice.py)."""
    return tuple(note for note in notes if not note.startswith("the published artifact's defaults: "))


def test_a_residual_that_the_artifacts_spelling_carries_across_iterations_is_said() -> None:
    line = "--inter_grad_comp --use_error_feedback"
    config, notes = vars(resolved(line)).values()
    assert config.residual_across_iterations == "carry"
    [note] = others(notes)
    assert "--residual-across-iterations drop" in note
    for quiet in ("--inter_grad_comp", "--grad_comp --use_error_feedback", f"{line} --residual-across-iterations drop"):
        assert others(resolved(quiet).notes) == ()


def test_too_many_stages_are_clamped_with_a_note_in_the_artifacts_spelling() -> None:
    line = "--grad_comp --selective_grad_comp --selective_grad_comp_way 3"
    config, notes = vars(resolved(line, layout(stages=2))).values()
    assert config.dp_compression_stages == 2
    assert others(notes) == ("--selective_grad_comp_way 3: clamped to the model's 2 stages",)
    assert others(resolved(line, layout(stages=3)).notes) == ()
    # Without a number the artifact compresses two stages.
    config, notes = vars(resolved("--grad_comp --selective_grad_comp", layout(stages=1))).values()
    assert config.dp_compression_stages == 1 and len(others(notes)) == 1


def test_too_many_stages_in_our_spelling_are_refused_even_beside_the_artifacts_names() -> None:
    assert refused("--grad_comp --dp-compression-stages 3", layout(stages=2)).startswith("--dp-compression-stages: ")


@pytest.mark.parametrize(
    ("line", "on", "says"),
    [
        ("--inter_grad_comp", layout(stages=1), "nothing to compress"),
        ("--emb_comm_opt", layout(tied=False), "not tied"),
        ("--grad_comp", layout(replicas=1), "nothing to compress"),
        ("--inter_grad_comp_rank 0", layout(), "sends nothing"),
        ("--grad_comp_rank -1", layout(), "sends nothing"),
        ("--grad_comp_warm_up 2", layout(), "not a fraction"),
        ("--selective_grad_comp --selective_grad_comp_way 0", layout(), "does not name pipeline stages"),
    ],
)
def test_a_refusal_names_the_flag_that_the_user_wrote(line: str, on: Layout, says: str) -> None:
    said = refused(line, on)
    assert said.startswith(line.split()[-2 if line[-1].isdigit() else -1] + ": ") and says in said
    assert "--dp-" not in said and "--compressed-" not in said and "--fused-" not in said


@pytest.mark.parametrize(
    "master_copies, megatron, reason",
    [
        (False, {}, "fp32 cop"),  # fp32 parameters, or --use-precision-aware-optimizer
        (True, {"fp8_param_gather": True}, "--fp8-param-gather"),  # mxfp8's gather needs this flag, too
        (True, {"fp4_param_gather": True}, "--fp4-param-gather"),
        (True, {"optimizer": "muon"}, "--optimizer"),
        (True, {"qk_clip": True}, "--qk-clip"),
        (True, {"overlap_param_gather_with_optimizer_step": True}, "--overlap-param-gather-with-optimizer-step"),
    ],
)
def test_what_has_no_exact_gather_is_dense_with_a_line_by_preset_and_refused_by_flag(
    master_copies: bool, megatron: dict[str, object], reason: str
) -> None:
    parser = add_flags(argparse.ArgumentParser(allow_abbrev=False))
    on, args = replace(SHARDED, master_copies=master_copies), argparse.Namespace(**megatron)
    found = resolve(request_from(parser.parse_args(["--optimus-cc", "exact"])), on, args)
    assert found.config.param_gather_format == "dense" and found.config.fused_embedding_sync
    said = [line for line in found.notes if "leaves out parameter gather" in line]
    assert len(said) == 1 and reason in said[0]
    with pytest.raises(FlagError, match=reason) as caught:
        resolve(request_from(parser.parse_args(["--param-gather-format", "exact"])), on, args)
    assert caught.value.flag == "--param-gather-format"
    allowed = resolve(request_from(parser.parse_args(["--optimus-cc", "exact"])), SHARDED, argparse.Namespace())
    assert allowed.config.param_gather_format == "exact" and not allowed.notes
    known = replace(SHARDED, exact_bits=(2.24, 2.81))
    said = resolve(request_from(parser.parse_args(["--optimus-cc", "exact"])), known).notes
    assert said == ("parameter gather exact: 2.2 bits a value expected, 2.8 at the highest learning rate",)
