"""Bad input through the launcher: exit status 2, a message with flag, reason and cure, and nothing written.

Each case is one forked rank of four that do not exist (PP2 x DP2 unless said), stopped after validation.
"""

import os
import shlex
import socket
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks import distrib_optimizer
from optimus_cc_ext.hooks.registry import UNSUPPORTED_MEGATRON_VARIABLE
from tests.forked_ranks import run_ranks
from tests.launches import Launch, launch
from tests.megatron import interventions
from tests.megatron_runs import TINY_GPT

PP1, PP2, PP4 = (f"--pipeline-model-parallel-size {stages} " for stages in (1, 2, 4))
CB, FE, SC, ALL = "--compressed-backprop ", "--fused-embedding-sync ", "--dp-compression ", "--optimus-cc "


@pytest.fixture
def outputs(tmp_path: Path) -> list[str]:
    """Flags that name folders which a run would create."""
    flags = ("--save", "--tensorboard-dir", "--data-cache-path")
    folders = [part for flag in flags for part in (flag, str(tmp_path / flag.strip("-")))]
    return [*folders, "--save-interval", "1024"]


def assert_refused(line: str, outputs: list[str], flag: str, *says: str, **kwargs: object) -> Launch:
    """Assert that the command line ends with status 2, and that the last line names the flag and contains the rest."""
    found = launch([*shlex.split(line), *outputs], **kwargs)  # type: ignore[arg-type]
    assert found.code == 2, found.output[-2000:]
    last = found.output.splitlines()[-1]
    assert last.startswith("optimus-cc: error: ") and f"{flag}: " in last, last
    assert all(part in last for part in says), last
    assert "Traceback" not in found.output
    assert not list(Path(outputs[1]).parent.iterdir()), "something was written"
    return found


GATHER, SHARDED = "--param-gather-format int4 ", "--use-distributed-optimizer "
FORWARD = "--pipeline-forward-format int8 "
EP_OVERLAP = (
    "--num-experts 2 --expert-model-parallel-size 2 --overlap-moe-expert-parallel-comm --bf16 "
    "--moe-token-dispatcher-type alltoall --num-layers-per-virtual-pipeline-stage 1 "
)

TOKENS = "--expert-dispatch-format int8 "
EP2 = "--num-experts 2 --expert-model-parallel-size 2 "
ALL_TO_ALL = EP2 + "--moe-token-dispatcher-type alltoall "


@pytest.mark.parametrize(
    ("line", "flag", "says"),
    [
        (PP2 + TOKENS, "--expert-dispatch-format", ("no token is sent", "give --num-experts")),
        (PP2 + "--expert-gradient-format int8", "--expert-gradient-format", ("no token is sent", "give --num-experts")),
        (PP2 + TOKENS + "--num-experts 2", "--expert-dispatch-format", ("--expert-model-parallel-size 2 or more",)),
        (PP2 + ALL_TO_ALL + TOKENS, "--expert-dispatch-format", ("do not divide into blocks of 128", "--hidden-size")),
        (
            PP2 + EP2 + TOKENS + "--hidden-size 128",
            "--expert-dispatch-format",
            ("(--moe-token-dispatcher-type)", "Use --moe-token-dispatcher-type alltoall"),
        ),
        (PP2 + CB + "--compressed-backprop-rank 0", "--compressed-backprop-rank", ("a rank of 0", "at least 1")),
        (PP2 + SC + "--dp-compression-rank -4", "--dp-compression-rank", ("a rank of -4", "at least 1")),
        (PP2 + "--compressed-backprop-rank 0", "--compressed-backprop-rank", ("a rank of 0", "at least 1")),
        (PP2 + SC + "--dp-compression-stages 3", "--dp-compression-stages", ("only 2", "up to 2")),
        (
            PP2 + SC + "--dp-compression-stages 0",
            "--dp-compression-stages",
            ("does not name pipeline stages", "at least 1"),
        ),
        (PP2 + SC + "--dp-compression-warmup 1.5", "--dp-compression-warmup", ("1.5 is not a fraction", "0 to 1")),
        (PP2 + SC + "--dp-compression-warmup -0.1", "--dp-compression-warmup", ("-0.1 is not", "0 to 1")),
        (PP2 + SC + "--dp-compression-warmup nan", "--dp-compression-warmup", ("nan is not", "0 to 1")),
        (PP1 + CB, "--compressed-backprop", ("nothing to compress", "one pipeline stage", "2 or more")),
        (PP1 + FE, "--fused-embedding-sync", ("nothing to fuse", "one pipeline stage", "2 or more")),
        (
            PP2 + FE + "--untie-embeddings-and-output-weights",
            "--fused-embedding-sync",
            ("not tied", "leave out --untie-embeddings-and-output-weights"),
        ),
        (PP4 + SC, "--dp-compression", ("nothing to compress", "one data-parallel replica", "more replicas")),
        (PP2 + GATHER, "--param-gather-format", ("only the distributed optimizer", "--use-distributed-optimizer")),
        (PP2 + GATHER + SHARDED, "--param-gather-format", ("an fp32 copy", "--bf16")),
        (
            PP2 + GATHER + SHARDED + "--bf16 --use-precision-aware-optimizer",
            "--param-gather-format",
            ("an fp32 copy", "without --use-precision-aware-optimizer"),
        ),
        (PP2 + "--grad_comp --dp-compression", "--grad_comp", ("--dp-compression", "one of the two")),
        (
            PP2 + "--use_error_feedback --no-dp-error-feedback",
            "--use_error_feedback",
            ("--dp-error-feedback", "one of the two"),
        ),
        (PP2 + ALL + "--grad_comp", "--optimus-cc", ("--grad_comp", "Give either the preset or the artifact's flags")),
        (PP2 + "--inter_grad_comp --inter_grad_comp_rank 0", "--inter_grad_comp_rank", ("a rank of 0",)),
        (PP1 + "--inter_grad_comp", "--inter_grad_comp", ("nothing to compress",)),
        (PP2 + ALL + "--yaml-cfg a.yaml", "--yaml-cfg", ("YAML file", "Use flags")),
        (PP2 + "--yaml-cfg=a.yaml", "--yaml-cfg", ("YAML file", "Use flags")),
    ],
)
def test_bad_input_is_refused_with_reason_and_cure(
    line: str, flag: str, says: tuple[str, ...], outputs: list[str]
) -> None:
    assert_refused(line, outputs, flag, *says)


@pytest.mark.parametrize(
    "line",
    [
        PP2 + CB + "--compressed-backprop-rank many",
        PP2 + SC + "--dp-compression-stages most",
        PP2 + CB + "--residual-across-iterations keep",
        PP2 + "--grad_comp --grad_comp_type TopK",
        PP2 + "--data-impl lazy",
    ],
)
def test_what_is_no_value_of_a_flag_is_refused_by_the_parser(line: str, outputs: list[str]) -> None:
    found = launch([*shlex.split(line), *outputs])
    assert found.code == 2
    flag, value = line.split()[-2:]
    last = found.output.splitlines()[-1]
    assert flag in last and value in last and "Traceback" not in found.output
    assert not list(Path(outputs[1]).parent.iterdir())


def test_in_a_custom_loop_a_precision_aware_optimizer_is_refused_before_it_has_copied_anything() -> None:
    bucket, copied, compressed = object(), list[object](), list[object]()
    gather = types.SimpleNamespace(
        of=lambda buckets: [each for each in buckets if each is bucket],
        update=lambda buckets, write: [compressed.append(buckets)][:0],
    )
    [(_, wrap)] = distrib_optimizer.wraps([types.SimpleNamespace(parameters=gather)])  # type: ignore[arg-type]
    optimizer = types.SimpleNamespace(
        config=types.SimpleNamespace(use_precision_aware_optimizer=True),
        buffers=[types.SimpleNamespace(buckets=[bucket])], _get_model_param_range_map=None,
        shard_fp32_from_float16_groups=[], model_float16_groups=[],
    )  # fmt: skip
    with pytest.raises(FlagError, match=r"--param-gather-format: a precision-aware optimizer"):
        wrap(copied.append)(optimizer)
    assert not copied
    optimizer.config.use_precision_aware_optimizer = False
    wrap(copied.append)(optimizer)
    assert copied == [optimizer] and compressed == [[bucket]]


def _refused_by_the_entry() -> str:
    from argparse import Namespace

    from optimus_cc_ext.tools.pretrain_gpt import refuse_unsupported

    with pytest.raises(FlagError) as refusal:
        refuse_unsupported(Namespace(sft=True))
    return str(refusal.value)


def test_what_the_built_in_entry_cannot_do_is_refused_by_name() -> None:
    (message,) = run_ranks(1, _refused_by_the_entry)
    assert message.startswith("--sft: not supported by the built-in pretrain_gpt. Leave out, or give the script")


@pytest.mark.parametrize(
    "line",
    [
        # Without a technique no option of Megatron's is refused: off means off.
        "--use-distributed-optimizer --overlap-grad-reduce --bf16",
        "--num-virtual-stages-per-pipeline-rank 2",
        "--fp16",
        # Each technique is refused only with options that it does not work with.
        SC + FE + EP_OVERLAP,
        ALL + "--overlap-grad-reduce --calculate-per-token-loss --bf16 --grad-reduce-in-bf16",
        CB + SC + FE + "--optimizer muon",
        FE + SC + "--use-ring-exchange-p2p",
        FE + SC + "--mtp-num-layers 1 --position-embedding-type rope",
        FE + "--mtp-num-layers 1 --position-embedding-type rope --untie-embeddings-and-output-weights",
        # Two context-parallel ranks of one stage are replicas of its gradients.
        CB + SC + "--context-parallel-size 2",
        ALL + "--bf16 --compression-state-dtype bf16",
        ALL + "--fp16",
        ALL + "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-average-in-collective",
        ALL + "--num-experts 2 --expert-model-parallel-size 2",
        ALL + ALL_TO_ALL + TOKENS + "--hidden-size 128",
        ALL + "--num-layers-per-virtual-pipeline-stage 1",
    ],
)
def test_what_works_is_not_refused(line: str) -> None:
    found = launch(shlex.split(PP2 + line))
    assert found.accepted, found.output[-2000:]


def another_megatron() -> None:
    from megatron.core import package_info

    package_info.__version__ = "0.99.0"


def test_an_unsupported_megatron_is_refused_by_name_and_version(outputs: list[str]) -> None:
    found = launch([*shlex.split(PP2 + ALL), *outputs], before=another_megatron)
    assert found.code == 2
    assert found.output.splitlines() == found.ours and len(found.ours) == 1, "one line, before Megatron starts"
    for part in (
        "megatron-core 0.99.0 is not supported",
        "0.18.2, 0.19.0, 0.19.1, 0.19.2",
        "Install megatron-core==0.19.2",
    ):
        assert part in found.output
    assert not list(Path(outputs[1]).parent.iterdir())


def test_an_unsupported_megatron_can_be_tried_on_ones_own_account() -> None:
    env = {UNSUPPORTED_MEGATRON_VARIABLE: "1"}
    found = launch(shlex.split(PP2 + ALL), before=another_megatron, env=env)
    assert found.accepted
    assert "on megatron-core 0.99.0" in found.ours[-1]


def moved_seam() -> None:
    from megatron.training import arguments

    del arguments.validate_args


def test_a_megatron_whose_seam_has_moved_is_refused_by_name_and_version() -> None:
    found = launch(shlex.split(PP2 + ALL), before=moved_seam)
    assert found.code == 2
    assert "megatron-core 0.19.2: megatron.training.arguments:validate_args is missing" in found.output


def attribute_gone() -> None:
    import inspect

    from optimus_cc_ext.hooks import parts

    source = inspect.getsource
    parts.inspect.getsource = lambda each: source(each).replace("self.grad_reduce_handle", "self.handle")


@pytest.mark.parametrize("flags", [ALL, ""])
def test_a_megatron_without_an_attribute_that_we_read_is_refused_by_name_before_training(flags: str) -> None:
    found = launch(shlex.split(PP2 + flags), before=attribute_gone)
    assert found.code == 2 and len(found.ours) == 1
    assert "param_and_grad_buffer:_ParamAndGradBucketGroup has no grad_reduce_handle" in found.ours[0]
    assert "Traceback" not in found.output


def replaced_after_the_check() -> None:
    """Let another extension replace a function between our start and the parsing of flags, with other parameters."""
    from megatron.training import arguments, training

    validate = arguments.validate_args

    def theirs(args: Any, *rest: Any, **more: Any) -> Any:
        training.train_step = lambda *everything: None
        return validate(args, *rest, **more)

    arguments.validate_args = theirs


def test_a_function_that_was_replaced_after_the_check_is_refused_in_a_sentence() -> None:
    found = launch(shlex.split(PP2 + ALL), before=replaced_after_the_check)
    assert found.code == 2 and "Traceback" not in found.output
    assert "training:train_step has no parameter optimizer" in found.ours[-1]
    assert "has replaced it: let the replacement keep the signature" in found.ours[-1]


def test_a_script_that_is_not_there_is_refused() -> None:
    found = launch(["no/such/pretrain_gpt.py", *TINY_GPT], tiny=False)
    assert found.code == 2
    assert "no/such/pretrain_gpt.py: no such script" in found.ours[-1]
    assert "or no script at all" in found.ours[-1]


def test_a_device_that_is_none_is_refused() -> None:
    found = launch([], before=no_runtime, env={"OPTIMUS_CC_DEVICE": "abacus"})
    assert found.code == 2
    assert "OPTIMUS_CC_DEVICE='abacus' is not a device" in found.ours[-1]


def no_runtime() -> None:
    from optimus_cc_ext.tools.cpu import cpu_runtime

    cpu_runtime.deactivate()


def test_only_the_first_rank_of_a_node_speaks(outputs: list[str]) -> None:
    line = [*shlex.split(PP1 + CB), *outputs]
    first, third = (launch(line, rank=rank, before=interventions.impatient) for rank in (0, 3))
    assert (first.code, third.code) == (2, 2)
    assert first.output.count("optimus-cc: error: ") == 1
    assert third.ours == []


def broken_gpu() -> None:
    """Make GPUs that PyTorch sees and cannot use; the launcher ends no other rank, because the others' GPUs work."""
    import torch

    from optimus_cc_ext import errors
    from optimus_cc_ext.tools.cpu import cpu_runtime

    cpu_runtime.deactivate()
    errors.time.sleep = lambda seconds: None  # type: ignore[attr-defined]
    torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 8

    def set_device(number: int) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be ...")

    torch.cuda.set_device = set_device


def test_a_rank_whose_gpu_is_broken_says_so_whichever_it_is() -> None:
    found = launch([], rank=3, before=broken_gpu, env={"OPTIMUS_CC_DEVICE": "cuda"})
    assert found.code == 2
    (line,) = found.ours
    assert line.startswith(f"optimus-cc: error: rank 3 on {socket.gethostname()}: GPU 3, of 8 that PyTorch sees here, ")
    assert "(CUDA error: uncorrectable ECC error encountered): look at nvidia-smi" in line


@pytest.mark.ci
def test_a_real_process_ends_with_status_2(outputs: list[str]) -> None:
    """This is the one case without a fork: as a person starts it, up to the shell's exit status."""
    command = [sys.executable, "-m", "optimus_cc_ext", *TINY_GPT, "--compressed-backprop", *outputs]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "4", "OPTIMUS_CC_DEVICE": "cpu"}
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **place}, check=False
    )
    assert ended.returncode == 2
    assert "optimus-cc: error: --compressed-backprop: there is nothing to compress" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not list(Path(outputs[1]).parent.iterdir())
