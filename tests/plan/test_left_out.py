"""Options that no plan contains: named with a bound, or refused if the bound exceeds the plan's own error."""

import re

import pytest

from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.plan.flags import job_of, used_words
from optimus_cc_ext.tools.plan.hardware import CLUSTERS
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.left_out import BOUNDS
from optimus_cc_ext.tools.plan.memory import activation_bytes
from optimus_cc_ext.tools.plan.model import Job

pytestmark = pytest.mark.ci

PLAN = ["plan", "--cluster", "h100-ndr400", "--nodes", "32", "--model", "qwen3-235b", "--",
        "--tensor-model-parallel-size", "2", "--sequence-parallel", "--pipeline-model-parallel-size", "8",
        "--expert-model-parallel-size", "16", "--expert-tensor-parallel-size", "1", "--global-batch-size", "1024",
        "--use-distributed-optimizer", "--moe-token-dispatcher-type", "alltoall", "--overlap-grad-reduce",
        "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"]  # fmt: skip
WORDS = {
    "--window-size": ["128,0"], "--moe-expert-capacity-factor": ["1.0"], "--moe-latent-size": ["3968"],
}  # fmt: skip
REFUSED = {
    "--moe-latent-size": ["1024"], "--moe-expert-capacity-factor": ["1.5"],
    "--moe-layer-recompute": [],
}  # fmt: skip


@pytest.mark.parametrize("flag", [flag for flag in BOUNDS if flag not in REFUSED or flag in WORDS])
def test_an_option_within_the_plans_error_is_named_with_its_bound(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*PLAN, flag, *WORDS.get(flag, []), "--weight-decay", "0.1"]) == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith(f"left out: {flag}"))
    assert float(re.search(r"at most ([\d.]+) % of vanilla's seconds", line)[1]) <= 12  # type: ignore[index]
    assert "Not part of a plan: --weight-decay 0.1" in said


@pytest.mark.parametrize("flag", REFUSED)
def test_an_option_beyond_the_plans_error_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, flag, *REFUSED[flag]]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {flag}") and "more than the plan's own error of 12 %" in said
    assert said.endswith(f"Plan without {flag}\n") and said.count("\n") == 1


def test_recomputed_modules_keep_less_memory() -> None:
    def used(*modules: str) -> float:
        flags = ["--recompute-granularity", "selective", "--recompute-modules", *modules] if modules else []
        return activation_bytes(job_of([*PLAN[PLAN.index("--") + 1 :], *flags], 256, "qwen3-235b")[0])

    assert used("core_attn") == used()  # fused attention keeps no scores
    saved = {module: used() - used(module) for module in ("layernorm", "moe_act", "moe")}
    assert 0 < saved["layernorm"] < saved["moe_act"] < saved["moe"] < used()
    assert used("layernorm", "moe_act") == pytest.approx(used() - saved["layernorm"] - saved["moe_act"])


def test_full_recomputation_of_a_block_counts_its_layers() -> None:
    def planned(*flags: str) -> Job:
        return job_of([*PLAN[PLAN.index("--") + 1 :], *flags], 256, "qwen3-235b")[0]

    def costs(job: Job) -> tuple[float, float]:
        return activation_bytes(job), iteration(CLUSTERS["h100-ndr400"], job).seconds

    full = ("--recompute-granularity", "full", "--recompute-method")
    none, everything = planned(), planned(*full, "uniform", "--recompute-num-layers", "1")
    some = [planned(*full, "block", "--recompute-num-layers", str(layers)) for layers in (1, 2, 500)]
    assert costs(some[-1]) == costs(everything), "no stage has more layers"
    least, half, most = (costs(job) for job in some)
    assert costs(none)[0] > least[0] > half[0] > most[0] and costs(none)[1] < least[1] < half[1] < most[1]
    block = [*full, "block", "--recompute-num-layers", "2"]
    assert used_words(block, some[1])[: len(block)] == block


def test_a_latent_size_that_does_not_divide_into_blocks_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--moe-latent-size", "4000"]) == 2
    assert "--moe-latent-size 4000: no multiple of 128" in capsys.readouterr().err


def test_a_value_that_is_no_number_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--moe-latent-size", "small"]) == 2
    assert "--moe-latent-size small: not a number" in capsys.readouterr().err


MODEL = ["--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "8", "--pipeline-model-parallel-size"]


@pytest.mark.parametrize(
    ("words", "layers", "chunks"),
    [
        (["4", "--decoder-first-pipeline-num-layers", "1", "--decoder-last-pipeline-num-layers", "1"], (1, 3, 3, 1), 1),
        (["4", "--decoder-last-pipeline-num-layers", "2"], (2, 2, 2, 2), 1),
        (["2", "--pipeline-model-parallel-layout", "Et|(tt|)*2,t*3L"], (3, 5), 2),
        (["2", "--pipeline-model-parallel-layout", "Et*3|t*5L"], (3, 5), 1),
    ],
)
def test_layers_that_are_dealt_out_unevenly_are_planned(words: list[str], layers: tuple[int, ...], chunks: int) -> None:
    job, unread = job_of([*MODEL, *words], 4)
    assert [job.layers_on(stage) for stage in range(job.pp)] == list(layers) and job.vpp == chunks
    assert not unread and used_words([*MODEL, *words], job)[: len(MODEL) + len(words)] == [*MODEL, *words]
