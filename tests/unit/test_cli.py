"""`optimus-cc`: doctor's report on this machine (on flags: tests/megatron/test_doctor.py), and the other commands."""

import os
import re
import subprocess
import sys

import pytest
import triton

from optimus_cc_ext import __version__
from optimus_cc_ext.hooks.registry import SUPPORTED_MEGATRON, UNSUPPORTED_MEGATRON_VARIABLE
from optimus_cc_ext.tools import cli
from tests.launches import Launch, call
from tests.shell_scripts import ROOT

pytestmark = pytest.mark.ci

SEAMS = [
    "megatron.core.transformer.moe.token_dispatcher:all_to_all",
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
    "megatron.training.training:setup_model_and_optimizer",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params",
    "megatron.training.training:train_step",
    "megatron.training.training:training_log",
    "megatron.training.training:checkpoint_and_decide_exit",
    "megatron.training.checkpointing:save_checkpoint",
    "megatron.training.training:save_checkpoint",
    "megatron.training.checkpointing:get_checkpoint_tracker_filename",
    "megatron.training.checkpointing:schedule_async_save",
    "megatron.training.training:maybe_finalize_async_save",
    "megatron.training.checkpointing:load_checkpoint",
    "megatron.training.training:load_checkpoint",
    "megatron.training.checkpointing:_load_base_checkpoint",
]


def doctor_where_a_seam_has_moved() -> int:
    from megatron.core.pipeline_parallel import p2p_communication

    del p2p_communication._p2p_ops
    return cli.main(["doctor"])


def doctor_on_another_megatron() -> int:
    from megatron.core import package_info

    package_info.__version__ = "0.99.0"
    return cli.main(["doctor"])


@pytest.mark.full
def test_on_this_machine_everything_holds() -> None:
    """This test starts the one real process, as a person does."""
    command = [sys.executable, "-m", "optimus_cc_ext.tools.cli", "doctor"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.startswith("ok   this machine") and found.stderr == "", "the verdict comes first"
    lines = found.stdout.splitlines()
    assert len(lines) <= 10 and max(map(len, lines)) <= 120, "a person reads all of it"
    assert f"{len(SEAMS)} functions of Megatron to wrap are as expected (--json lists them)" in found.stdout
    said = "\n".join(re.sub(" +", " ", line) for line in found.stdout.splitlines())
    assert f"optimus_cc_ext {__version__}" in said
    assert f"megatron-core {SUPPORTED_MEGATRON[-1]}" in said
    assert f"megatron version {SUPPORTED_MEGATRON[-1]} is supported" in said
    assert "ok device " in said


def test_a_seam_that_has_moved_fails_by_name() -> None:
    found = call(doctor_where_a_seam_has_moved)
    assert found.code == 1
    assert found.output.startswith("FAIL"), "the verdict comes first"
    failed = [line for line in found.output.splitlines() if line.startswith("FAIL")]
    assert len(failed) == 1
    assert "p2p_communication:_p2p_ops is missing" in failed[0] and SUPPORTED_MEGATRON[-1] in failed[0]


def doctor_where_an_attribute_is_gone() -> int:
    from megatron.core.optimizer.optimizer_config import OptimizerConfig

    del OptimizerConfig.clip_grad, OptimizerConfig.__annotations__["clip_grad"]
    return cli.main(["doctor"])


def test_an_attribute_that_is_gone_fails_by_name() -> None:
    found = call(doctor_where_an_attribute_is_gone)
    assert found.code == 1
    [failed] = [line for line in found.output.splitlines() if line.startswith("FAIL")]
    assert "optimizer_config:OptimizerConfig has no clip_grad. Install megatron-core==0.19.2" in failed


def test_an_unsupported_megatron_fails_by_version() -> None:
    found = call(doctor_on_another_megatron)
    assert found.code == 1
    assert "megatron-core 0.99.0 is not supported" in found.output


def doctor_that_tries_another_megatron() -> int:
    os.environ[UNSUPPORTED_MEGATRON_VARIABLE] = "1"
    return doctor_on_another_megatron()


def test_an_unsupported_megatron_that_the_variable_lets_pass_is_not_called_supported() -> None:
    found = call(doctor_that_tries_another_megatron)
    assert found.code == 0
    [line] = [line for line in found.output.splitlines() if "megatron version" in line]
    assert line.startswith("warn") and "megatron-core 0.99.0 was not tested" in line


def doctor_with_the_triton_of_torch_2_9() -> int:
    import importlib
    import importlib.metadata

    import triton

    from optimus_cc_ext.compressors.triton import launches

    triton.__version__ = "3.5.1"
    importlib.metadata.version = lambda name, ask=importlib.metadata.version: (
        triton.__version__ if name == "triton" else ask(name)
    )
    importlib.reload(launches)
    return cli.main(["doctor"])


def test_doctor_says_whether_tritons_kernels_run_and_from_which_torch_on() -> None:
    def said(found: Launch) -> str:
        [line] = [line for line in found.output.splitlines() if "Triton's kernels" in line]
        return re.sub(" +", " ", line)

    here = said(call(cli.main, ["doctor"]))
    assert here.startswith(f"ok Triton's kernels Triton {triton.__version__} ") == (triton.__version__ >= "3.6")
    old = call(doctor_with_the_triton_of_torch_2_9)
    assert old.code == 0, "it is no reason not to train"
    assert said(old) == (
        "warn Triton's kernels torch operators replace them on GPUs. Triton 3.5.1 is too old: "
        "the kernels need Triton 3.6 or newer. Install torch 2.10 or newer, which brings it"
    )


def test_version_usage_and_where_scripts_and_patches_are() -> None:
    assert call(cli.main, ["--version"]).output.strip() == f"optimus-cc {__version__}"
    found = call(cli.main, [])
    assert found.code == 2 and "usage: optimus-cc" in found.output
    found = call(cli.main, ["files"])
    assert found.code == 0 and found.output.strip() == str(ROOT)


@pytest.mark.parametrize("printed", [10, 10**6])
def test_a_command_whose_reader_has_ended_says_nothing(printed: int) -> None:
    code = (
        f"import sys; from optimus_cc_ext import errors; sys.exit(errors.run_command(lambda: print('x' * {printed})))"
    )
    read, write = os.pipe()
    os.close(read)
    ended = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (141, "")
