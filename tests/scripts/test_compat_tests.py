"""scripts/compat_tests.sh on a small folder of tests in the place of Megatron-LM's."""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TESTS = """
import os
import time

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig
from optimus_cc_ext.hooks import handle
from optimus_cc_ext.errors import FlagError

refused = []

def test_passes():
    pass

def test_fails_on_one_rank():
    assert os.environ["RANK"] == "0"

def test_hangs_on_one_rank():
    time.sleep(1000 * int(os.environ["RANK"]))

def test_fails_everywhere():
    assert False, "no such luck"

def test_cannot_be_repeated_after_a_refusal():
    build()
    sessions = list(handle._shared[0]) if handle._shared else []
    if sessions and sessions[0].config.param_gather_format != "dense":
        refused.append(sessions[0])
        raise FlagError("--param-gather-format", "it is refused", "Leave it out")
    time.sleep(1000 * len(refused))

def build():
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl")
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    config = TransformerConfig(num_layers=1, num_attention_heads=1, hidden_size=128)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(128, 128).cuda())

def test_sums_gradients():
    model = build()
    weight = model.module.weight
    weight.main_grad.fill_(torch.distributed.get_rank() + 1)
    model.finish_grad_sync()
    assert weight.main_grad.eq(1.5).all()
    parallel_state.destroy_model_parallel()
"""


@pytest.mark.full
def test_failures_and_hangs_of_single_ranks_end_their_test_only_and_a_refusal_leaves_nothing_behind(tmp_path):
    checkout, results = tmp_path / "checkout", tmp_path / "results"
    (checkout / "tests" / "unit_tests").mkdir(parents=True)
    (checkout / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (checkout / "tests" / "unit_tests" / "test_optimizer.py").write_text(TESTS)
    command = [ROOT / "scripts" / "compat_tests.sh", checkout, "--only", "test_optimizer", "--ranks", "2"]
    command += ["--limit", "40", "--results", results]
    how = {"env": os.environ | {"OPTIMUS_CC_DEVICE": "cpu"}, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(command, **how, timeout=420)
    assert done.returncode == 0, done.stderr

    found = [json.loads(line) for line in (results / "outcomes.jsonl").read_text().splitlines()]
    by_name = {(each["mode"], each["test"].partition("::test_")[2]): each for each in found}
    vanilla = {name: (each["outcome"], each["reason"]) for (mode, name), each in by_name.items() if mode == "vanilla"}
    passing = {"passes", "cannot_be_repeated_after_a_refusal", "sums_gradients"}
    assert all(vanilla[name] == ("passed", "") for name in passing)
    assert vanilla["fails_on_one_rank"][0] == "failed" and vanilla["fails_on_one_rank"][1].startswith("rank 1: ")
    assert vanilla["hangs_on_one_rank"] == ("failed", "no answer, or a rank died")
    assert vanilla["fails_everywhere"][0] == "failed" and "no such luck" in vanilla["fails_everywhere"][1]
    for mode in ("off", "lossless"):  # a test that fails in vanilla is not run in the other modes
        passed = {name for (where, name), each in by_name.items() if where == mode and each["outcome"] == "passed"}
        assert passed == passing
    assert by_name["lossless", "cannot_be_repeated_after_a_refusal"]["left_out"] == ["param_gather"]
    assert by_name["lossless", "sums_gradients"]["sent"] > 0 == by_name["off", "sums_gradients"]["sent"]
    assert "| all | 3 | 3 | 3 | 1 |" in done.stdout

    again = subprocess.run(command, **how, timeout=240)
    assert again.stdout == done.stdout and len((results / "outcomes.jsonl").read_text().splitlines()) == len(found)
