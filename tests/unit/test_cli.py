"""`optimus-cc doctor`: what it says about this machine, and about flags."""

import re
import shlex
import subprocess
import sys

import pytest

from optimus_cc_ext import __version__, cli
from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON
from tests.launches import Launch, call
from tests.megatron_runs import TINY_GPT
from tests.shell_scripts import ROOT

SEAMS = [
    "megatron.training.arguments:add_megatron_arguments",
    "megatron.training.arguments:parse_args",
    "megatron.training.arguments:validate_args",
    "megatron.core.pipeline_parallel.p2p_communication:_batched_p2p_ops",
    "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops",
    "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
    "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
    "megatron.core.pipeline_parallel.schedules:forward_step",
    "megatron.core.pipeline_parallel.schedules:backward_step",
    "megatron.core.distributed.finalize_model_grads:_allreduce_word_embedding_grads",
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
    "megatron.training.training:train_step",
    "megatron.training.training:training_log",
    "megatron.training.checkpointing:save_checkpoint",
    "megatron.training.training:save_checkpoint",
    "megatron.training.checkpointing:get_checkpoint_tracker_filename",
    "megatron.training.checkpointing:load_checkpoint",
    "megatron.training.training:load_checkpoint",
    "megatron.training.checkpointing:_load_base_checkpoint",
]


def doctor(line: str = "", world_size: int = 4) -> Launch:
    argv = ["doctor", "--world-size", str(world_size), "--", *shlex.split(line)] if line else ["doctor"]
    return call(cli.main, argv)


def doctor_where_a_seam_has_moved() -> int:
    from megatron.core.pipeline_parallel import p2p_communication

    del p2p_communication._p2p_ops
    return cli.main(["doctor"])


def doctor_on_another_megatron() -> int:
    from megatron.core import package_info

    package_info.__version__ = "0.99.0"
    return cli.main(["doctor"])


def test_on_this_machine_everything_holds() -> None:
    """The one real process: what a person starts."""
    command = [sys.executable, "-m", "optimus_cc_ext.cli", "doctor"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    lines = [line.split(maxsplit=1) for line in found.stdout.splitlines()]
    assert not [line for line in lines if line[0] == "FAIL"]
    holding = [rest.split()[1] for mark, rest in lines if mark == "ok" and rest.startswith("seam ")]
    assert sorted(holding) == sorted(SEAMS)
    said = "\n".join(re.sub(" +", " ", line) for line in found.stdout.splitlines())
    assert f"optimus_cc_ext {__version__}" in said
    assert f"megatron-core {SUPPORTED_MEGATRON[-1]}" in said
    assert f"megatron version {SUPPORTED_MEGATRON[-1]} is supported" in said
    assert "ok device " in said


def test_a_seam_that_has_moved_fails_by_name() -> None:
    found = call(doctor_where_a_seam_has_moved)
    assert found.code == 1
    failed = [line for line in found.output.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert "p2p_communication:_p2p_ops is missing" in failed[0] and SUPPORTED_MEGATRON[-1] in failed[0]


def test_an_unsupported_megatron_fails_by_version() -> None:
    found = call(doctor_on_another_megatron)
    assert found.code == 1
    assert "megatron-core 0.99.0 is not supported" in found.output


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (
            "--pipeline-model-parallel-size 2 --optimus-cc --compressed-backprop-rank 4",
            0,
            (
                "compressed backpropagation (rank 4, epilogue messages, with lazy error propagation)",
                "fused embedding sync",
                "data-parallel compression (rank 128, the first 2 stages)",
            ),
        ),
        (
            "--pipeline-model-parallel-size 2 --DDP-impl local --train-iters 10 --grad_comp --selective_grad_comp "
            "--selective_grad_comp_way 3",
            0,
            ("--DDP-impl local: dropped", "--selective_grad_comp_way 3: clamped to the 2 stages"),
        ),
        ("--compressed-backprop", 1, ("--compressed-backprop: there is nothing to compress",)),
        (
            "--pipeline-model-parallel-size 4 --dp-compression",
            1,
            ("--dp-compression: there is nothing to compress",),
        ),
        (
            "--pipeline-model-parallel-size 2 --optimus-cc --context-parallel-size 2",
            1,
            ("--context-parallel-size: context parallelism is not supported",),
        ),
        (
            "--grad_comp --dp-compression",
            1,
            ("--grad_comp: it is the published artifact's name of --dp-compression",),
        ),
        ("--no-such-flag", 2, ("--no-such-flag",)),
    ],
)
def test_flags_are_described_with_their_notes_or_end_with_the_refusal(
    line: str, code: int, says: tuple[str, ...]
) -> None:
    found = doctor(line)
    assert found.code == code, found.output
    assert all(said in found.output for said in says), found.output


def test_a_line_that_megatron_would_not_take_is_said_to_be_incomplete() -> None:
    flags = "--pipeline-model-parallel-size 2 --optimus-cc --num-layers-per-virtual-pipeline-stage 1"
    found = doctor(f"{shlex.join(TINY_GPT)} {flags}")
    assert found.code == 0
    assert "not a complete command line" not in found.output
    assert "not a complete command line" in doctor(flags).output


def test_version_usage_and_where_scripts_and_patches_are() -> None:
    assert call(cli.main, ["--version"]).output.strip() == f"optimus-cc {__version__}"
    found = call(cli.main, [])
    assert found.code == 2 and "usage: optimus-cc" in found.output
    found = call(cli.main, ["files"])
    assert found.code == 0 and found.output.strip() == str(ROOT)
