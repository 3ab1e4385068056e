"""Options of Megatron that a class of traffic does not work with: dense under a preset, refused on its own."""

import argparse
import shlex
import sys
import types
from enum import Enum
from typing import Any

import pytest

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.refusals import REFUSALS, conflicts, refuse_unsupported, remarks
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks import checkpointing
from tests.forked_ranks import run_ranks
from tests.launches import launch
from tests.megatron.test_bad_input import (
    ALL,
    CB,
    EP_OVERLAP,
    FE,
    FORWARD,
    GATHER,
    PP1,
    PP2,
    SC,
    assert_refused,
    outputs,
)

pytestmark = pytest.mark.ci

__all__ = ["outputs"]  # a fixture

FP8 = "--use-distributed-optimizer --bf16 --transformer-impl transformer_engine "
BALANCED, EXACT = "--optimus-cc balanced", "--param-gather-format exact "
INT4, INT8_FE = "--dp-compression-format int4 ", "--fused-embedding-sync-format int8 "
# Each option of the table is written so that Megatron's own validation accepts it. A case has the layout, Megatron's
# flags, and for each class with which the option conflicts, the flag that switches the class on.
REFUSED: dict[str, list[tuple[str, str, list[str]]]] = {
    "--use-megatron-fsdp": [(PP1, "--use-megatron-fsdp --ckpt-format fsdp_dtensor", [SC])],
    "--use-torch-fsdp2": [
        (PP1, "--use-torch-fsdp2 --untie-embeddings-and-output-weights --ckpt-format torch_dist", [SC])
    ],
    "--save-wgrads-interval": [
        (
            PP1,
            "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --save-wgrads-interval 2 --save here "
            "--save-interval 9",
            [SC, INT4],
        )
    ],
    "--ddp-param-name-patterns-for-fp32-local-accumulation": [
        (PP2, "--bf16 --grad-reduce-in-bf16 --ddp-param-name-patterns-for-fp32-local-accumulation all", [SC, INT8_FE])
    ],
    "--fp8-param-gather": [(PP2, FP8 + "--fp8-format hybrid --fp8-param-gather", [GATHER])],
    "--fp4-param-gather": [(PP2, FP8 + "--fp4-format e2m1 --fp4-param-gather", [GATHER])],
    "--tensor-parallel-num-weight-shards": [(PP2, "--tensor-parallel-num-weight-shards 2", [FE])],
    "--expert-tensor-parallel-num-weight-shards": [
        (PP2, "--num-experts 2 --expert-tensor-parallel-num-weight-shards 2", [SC])
    ],
    "--overlap-moe-expert-parallel-comm": [(PP2, EP_OVERLAP, [CB, FORWARD])],
    "--ddp-reduce-scatter-with-fp32-accumulation": [
        (PP2, "--use-distributed-optimizer --ddp-reduce-scatter-with-fp32-accumulation", [SC])
    ],
    "--optimizer": [
        (PP2, f"--optimizer {name} --use-distributed-optimizer --bf16", [GATHER])
        for name in ("muon", "dist_muon", "soap")
    ],
    "--qk-clip": [(PP2, "--use-distributed-optimizer --bf16 --qk-clip", [EXACT])],
    "--overlap-param-gather-with-optimizer-step": [
        (
            PP2,
            "--use-distributed-optimizer --bf16 --overlap-grad-reduce --overlap-param-gather --ckpt-format torch "
            "--num-layers-per-virtual-pipeline-stage 1 --overlap-param-gather-with-optimizer-step",
            [EXACT],
        )
    ],
    "--cuda-graph-impl": [
        (PP2, "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad", [CB]),
        (PP2, "--cuda-graph-impl local --cuda-graph-modules full_iteration --no-check-for-nan-in-loss-and-grad", [CB]),
    ],
    "--use-ring-exchange-p2p": [(PP2, "--use-ring-exchange-p2p", [CB, FORWARD])],
    "--non-persistent-ckpt-type": [
        (PP2, "--non-persistent-ckpt-type local --non-persistent-local-ckpt-dir nowhere", [SC, CB])
    ],
    "--enable-msc": [(PP2, "--enable-msc --load msc://a/b", [SC, CB])],
    "--perform-rl-step": [(PP2, "--perform-rl-step", [SC, CB])],
}
WHOLE_RUN = {
    "--inprocess-restart": PP2 + ALL + "--inprocess-restart",
    "--compression-error-statistics": PP2 + CB + "--compression-error-statistics "
    "--num-layers-per-virtual-pipeline-stage 1",
    "--ckpt-convert-format": PP2 + "--optimus-cc --load here --ckpt-convert-format torch --ckpt-convert-save there",
}
# FSDP wants more than one connection; tensor parallelism wants one, so the CPU runtime presets that.
FSDP_CONNECTIONS = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def everything_is_installed() -> None:
    """Pretend that the packages that Megatron's validation looks for are installed; refusals must not depend on
    them.
    """
    from megatron.core import msc_utils
    from megatron.training import arguments

    arguments.is_te_min_version = lambda *version, **rest: True
    msc_utils.msc = types.ModuleType("multistorageclient")
    manager = types.ModuleType("local_manager")
    manager.LocalCheckpointManager = None  # type: ignore[attr-defined]
    sys.modules["nvidia_resiliency_ext.checkpointing.local.ckpt_managers.local_manager"] = manager


def test_every_refusal_of_the_table_has_a_case_here() -> None:
    # Presets do not compress tokens; test_expert_refusals.py has the cases of their flags.
    refused = {True: WHOLE_RUN.keys(), False: REFUSED.keys() | {"--moe-token-dispatcher-type"}}
    for whole_run, flags in refused.items():
        assert {refusal.flag for refusal in REFUSALS if refusal.whole_run is whole_run} == flags


def _prepared(line: str) -> dict[str, Any]:
    installed = any(name in line for name in ("fp4", "local-ckpt", "msc", "overlap-moe", "qk-clip"))
    return {
        "env": FSDP_CONNECTIONS if "fsdp" in line else {"CUDA_DEVICE_MAX_CONNECTIONS": "32"} if "moe" in line else None,
        "before": everything_is_installed if installed else None,
    }


CONFLICTS = [(flag, *case) for flag, cases in REFUSED.items() for case in cases]


@pytest.mark.parametrize(
    ("flag", "layout", "line", "ours"),
    [pytest.param(*case, marks=pytest.mark.ci if n % 2 else ()) for n, case in enumerate(CONFLICTS)],
)
def test_a_class_that_its_own_flag_switches_on_is_refused_with_what_it_does_not_work_with(
    flag: str, layout: str, line: str, ours: list[str], outputs: list[str]
) -> None:
    refusal = next(refusal for refusal in REFUSALS if refusal.flag == flag)
    for asked in ours:
        says = f"{refusal.reason} ({flag})", refusal.cure
        assert_refused(layout + asked + line, outputs, asked.split()[0], *says, **_prepared(line))


@pytest.mark.parametrize(("flag", "layout", "line", "ours"), CONFLICTS)
def test_a_preset_leaves_dense_what_conflicts_and_says_why(flag: str, layout: str, line: str, ours: list[str]) -> None:
    refusal = next(refusal for refusal in REFUSALS if refusal.flag == flag)
    # Low rank is the preset `paper`'s; blocks work with fp32 accumulation, and have no state to save.
    of_low_rank = "--ddp-reduce-scatter-with-fp32-accumulation", "--non-persistent-ckpt-type", "--enable-msc"
    preset = "--optimus-cc" if flag in of_low_rank else "--optimus-cc exact" if ours == [EXACT] else BALANCED
    found = launch(shlex.split(f"{layout} {preset} {line}"), **_prepared(line))
    assert found.accepted, found.output[-2000:]
    left_out = [note for note in found.ours if f": {refusal.reason} ({flag})" in note]
    assert left_out and all(f" {preset} leaves out " in note for note in left_out), found.ours
    named = {traffic for traffic in refusal.classes if any(f" {traffic.tag}: " in note for note in left_out)}
    on = found.ours[-1].partition(" on megatron-core")[0]
    assert not [traffic.name for traffic in named if traffic.tag in on]


@pytest.mark.parametrize("line", WHOLE_RUN.values())
def test_a_run_that_would_be_wrong_with_every_class_dense_is_refused_whole(line: str, outputs: list[str]) -> None:
    refusal = next(refusal for refusal in REFUSALS if line == WHOLE_RUN.get(refusal.flag))
    assert_refused(line, outputs, refusal.flag, refusal.reason, refusal.cure)


@pytest.mark.parametrize("option, reason", [("nccl_ub", "compress"), ("use_sharp", "8 or 4 bits")])
def test_an_option_that_does_less_beside_compression_is_named(option: str, reason: str) -> None:
    args = argparse.Namespace(**{option: True})
    [line] = remarks(args, OptimusConfig(dp_compression_format="int4"))
    assert line.startswith("--use-") and reason in line
    assert (
        remarks(args, OptimusConfig())
        == remarks(argparse.Namespace(), OptimusConfig(dp_compression_format="low-rank"))
        == []
    )


def test_the_refusal_prints_the_flags_that_keep_the_other_classes(outputs: list[str]) -> None:
    option = "--ddp-param-name-patterns-for-fp32-local-accumulation"
    megatron = f"--bf16 --grad-reduce-in-bf16 {option} all "
    line = f"{PP2} {megatron} --optimus-cc balanced --dp-compression-format int4"
    off = "--no-fused-embedding-sync --dp-compression-format dense"
    kept = f"or give {off}, which keeps pipeline forward and pipeline backward"
    found = assert_refused(line, outputs, "--dp-compression-format", f"({option})", kept)
    assert found.code == 2
    kept_on = launch(shlex.split(line.replace("--dp-compression-format int4", off)))
    said = kept_on.ours[-1]
    assert kept_on.accepted and "pipeline forward (int8)" in said and "gradients" not in said, kept_on.ours
    # If no class stays on, the refusal lists none.
    alone = launch(shlex.split(PP2 + SC + megatron))
    assert "which keeps" not in alone.output and "Leave out one of the two" in alone.output


def test_a_graph_of_the_whole_iteration_is_refused_as_megatron_0_17_spells_it() -> None:
    scopes = Enum("CudaGraphScope", ["full_iteration", "attn"])
    layers, everything = (
        argparse.Namespace(cuda_graph_impl="local", cuda_graph_scope=[scope])
        for scope in (scopes.attn, scopes.full_iteration)
    )
    refuse_unsupported(layers, OptimusConfig(compressed_backprop_format="low-rank"))
    with pytest.raises(FlagError, match=r"--compressed-backprop: .* \(--cuda-graph-impl\)"):
        refuse_unsupported(everything, OptimusConfig(compressed_backprop_format="low-rank"))


@pytest.mark.parametrize("overlapped", [False, True])
def test_with_a_graph_of_the_whole_iteration_no_class_is_compressed_not_even_a_gather_outside_of_it(overlapped) -> None:
    """Replays begin no step of ours, to which a gather in the optimizer's step could belong."""
    formats = ("pipeline_forward", "expert_dispatch", "expert_gradient", "param_gather")
    everything = OptimusConfig(
        compressed_backprop_format="low-rank", dp_compression_format="low-rank", fused_embedding_sync=True,
        **{f"{name}_format": "int8" for name in formats},
    )  # fmt: skip
    graph = argparse.Namespace(cuda_graph_impl="full_iteration", overlap_param_gather=overlapped)
    assert conflicts(graph, everything).keys() == set(CLASSES)
    assert conflicts(argparse.Namespace(cuda_graph_impl="none"), everything) == {}


@pytest.mark.parametrize(
    "megatron, said",
    [
        ({"enable_msc": True, "save": "msc://a/b"}, r"--dp-compression: .* \(--enable-msc\)"),
        ({"ckpt_convert_format": "torch"}, "--ckpt-convert-format: "),
    ],
)
def test_what_would_lose_state_is_refused_only_where_there_is_state(megatron: dict[str, Any], said: str) -> None:
    args = argparse.Namespace(**megatron)
    refuse_unsupported(args, OptimusConfig(compressed_backprop_format="int8", dp_compression_format="int4"))
    refuse_unsupported(args, OptimusConfig(dp_compression_format="int4", dp_compression_stages="auto"))
    with pytest.raises(FlagError, match=said):
        refuse_unsupported(args, OptimusConfig(dp_compression_format="low-rank"))


def save_locally() -> list[tuple[int, bool]]:
    from megatron import training

    saved = []

    def save_checkpoint(iteration: int, non_persistent_ckpt: bool = False, release: bool = False) -> None:
        saved.append((iteration, non_persistent_ckpt))

    local = argparse.Namespace(non_persistent_ckpt_type="local", save=None)
    training.get_args = lambda: local
    # A save that is not local would ask this session for its state.
    session = types.SimpleNamespace(config=OptimusConfig(dp_compression_format="low-rank"))
    _, wrap = checkpointing.wraps(session)[0]  # type: ignore[arg-type]
    wrap(save_checkpoint)(7, non_persistent_ckpt=True)
    return saved


def test_a_local_checkpoint_is_megatrons_alone() -> None:
    assert run_ranks(1, save_locally) == [[(7, True)]]
