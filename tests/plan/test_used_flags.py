"""The line `use:` of a plan has every flag with which the plan was computed, so that whoever copies it trains that."""

import random
import shlex
from pathlib import Path

import pytest

from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.plan.flags import job_of, parsed_flags
from tests.plan.test_measured import log

pytestmark = pytest.mark.ci

SIZES = ["--num-layers", "32", "--hidden-size", "4096", "--num-attention-heads", "32", "--seq-length", "4096",
         "--vocab-size", "32000", "--untie-embeddings-and-output-weights"]  # fmt: skip
LAYOUT = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4", "--micro-batch-size", "1",
          "--global-batch-size", "256"]  # fmt: skip
FURTHER = {
    "--grad-reduce-in-bf16": "", "--sequence-parallel": "", "--use-distributed-optimizer": "", "--fp8-format": "hybrid",
    "--overlap-grad-reduce": "", "--no-gradient-accumulation-fusion": "", "--attention-backend": "unfused",
    "--swiglu": "", "--normalization": "RMSNorm", "--context-parallel-size": "2", "--cp-comm-type": "a2a",
    "--num-virtual-stages-per-pipeline-rank": "2", "--recompute-granularity": "selective",
    "--recompute-modules": "core_attn mlp", "--group-query-attention": "", "--num-query-groups": "8",
    "--tp-comm-overlap": "", "--use-tp-pp-dp-mapping": "", "--fp16": "", "--lr": "1e-4",
}  # fmt: skip


OURS = {"--optimus-cc", *(traffic.format_flag for traffic in CLASSES)}


def used(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return Megatron's flags in the line `use:`, which stand before our own flags."""
    assert cli.main(["plan", *words]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("use: "))
    found = shlex.split(line.removeprefix("use: ").partition("   (")[0])
    return found[: next(place for place, word in enumerate(found) if word in OURS)]


@pytest.mark.parametrize("seed", range(12))
def test_the_flags_to_use_give_the_same_job(seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    chance = random.Random(seed)
    some = chance.sample(list(FURTHER), 7)
    flags = [*SIZES, *LAYOUT, *(word for flag in some for word in (flag, *FURTHER[flag].split()))]
    found = used(["--cluster", "a100-10gbe", "--nodes", "8", "--", *flags, "--weight-decay", "0.1"], capsys)
    assert job_of(found, 64)[0] == job_of(flags, 64)[0] and "--weight-decay" not in found


def test_what_the_plan_assumed_is_among_the_flags_to_use(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--cluster", "a100-10gbe", "--nodes", "4", "--model", "2.5b"]
    full = ["--recompute-granularity", "full"]
    found = used([*words, "--", *full], capsys)
    job, _ = job_of(full, 32, "2.5b")
    assert job_of(found, 32, "2.5b")[0] == job and ["--global-batch-size", str(job.batch)] == found[4:6]
    # Without --bf16 Megatron trains in fp32. It has no default micro-batch, and full recomputation needs a method.
    assert found == [*full, "--micro-batch-size", "1", "--global-batch-size", str(job.batch), "--bf16",
                     "--recompute-method", "uniform", "--recompute-num-layers", "1"]  # fmt: skip
    assert "--bf16" not in used([*words, "--", "--fp16"], capsys)


def test_a_layout_with_bars_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["--pipeline-model-parallel-layout", "Et*8|t*8|t*8|t*8L"]
    assert used(["--cluster", "a100-10gbe", "--nodes", "8", "--", *SIZES, *LAYOUT, *layout], capsys)[-3:-1] == layout


def test_the_flags_of_a_log_stay_and_are_changed_by_those_that_were_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = log(tmp_path, window_size="(128, 0)")
    words = ["--cluster", "a100-100gbe", "--from", str(path), "--nodes", "8", "--", "--weight-decay", "0.1"]
    assert used([*words, "--grad-reduce-in-bf16"], capsys) == [*f"the flags of {path} and".split(),
                                                                "--grad-reduce-in-bf16"]  # fmt: skip


def test_bf16_sums_win_over_fp32_sums_as_in_megatron() -> None:
    both = [*SIZES, *LAYOUT, "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"]
    assert job_of([*both, "--bf16"], 64)[0].gradient_bytes == 2
    assert job_of([*both, "--fp16"], 64)[0].gradient_bytes == 4
    assert job_of([*SIZES, *LAYOUT, "--fp16"], 64)[0].gradient_bytes == 2


def test_every_flag_that_a_plan_reads_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    switches = [f"--{flag}" for flag, switch, _ in parsed_flags() if switch and flag != "multi-latent-attention"]
    flags = [*SIZES, *LAYOUT, *switches]
    found = used(["--cluster", "a100-10gbe", "--nodes", "8", "--", *flags, "--num-layers", "30"], capsys)
    assert set(switches) <= set(found) and job_of(found, 64)[0] == job_of([*flags, "--num-layers", "30"], 64)[0]
