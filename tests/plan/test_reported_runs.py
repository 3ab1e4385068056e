"""Runs that users reported, and what they planned with: clusters by name and by file, DeepSeek-V3, hybrids."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from optimus_cc_ext.tools import cli
from optimus_cc_ext.tools.plan import PlanError
from optimus_cc_ext.tools.plan.flags import job_of
from optimus_cc_ext.tools.plan.hardware import CLUSTERS, GPUS, Cluster, Constant, cluster_of
from optimus_cc_ext.tools.plan.iteration import iteration
from optimus_cc_ext.tools.plan.memory import check_memory
from optimus_cc_ext.tools.plan.published import LARGE_MIXTURE_BAND, MIXTURE_BAND, band_of
from optimus_cc_ext.tools.plan.shapes import MODELS
from optimus_cc_ext.tools.plan.tables import constants
from scripts.planned.recipes import configurations

pytestmark = pytest.mark.ci

MIXTURE = (
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --moe-token-dispatcher-type alltoall \
--expert-tensor-parallel-size 1 --expert-model-parallel-size 8"
)
QWEN_235B = f"{MIXTURE} --sequence-parallel --seq-length 4096 --pipeline-model-parallel-size 32 \
--num-virtual-stages-per-pipeline-rank 3 --account-for-embedding-in-pipeline-split \
--account-for-loss-in-pipeline-split --global-batch-size 4096"
QWEN_30B = f"{MIXTURE} --seq-length 8192 --micro-batch-size 1 --moe-expert-capacity-factor 1.0"
FULL = "--micro-batch-size 4 --recompute-granularity full"
REPORTED = {
    # Seconds of an iteration on H800s, whose NVLink is assumed to be the H100's: Pai-Megatron-Patch 658 and 643.
    ("qwen3-235b", 256, f"{QWEN_235B} {FULL}"): 42.537,
    ("qwen3-235b", 256, f"{QWEN_235B} {FULL} --tensor-model-parallel-size 2"): 43.495,
    ("qwen3-235b", 256, f"{QWEN_235B} --tensor-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 2048 "
     "--recompute-granularity selective --recompute-modules moe_act layernorm"): 22.42,
    ("qwen3-30b", 16, f"{QWEN_30B} --pipeline-model-parallel-size 2 --global-batch-size 128"): 10.361,
    ("qwen3-30b", 16, f"{QWEN_30B} --pipeline-model-parallel-size 4 --expert-model-parallel-size 4 "
     "--global-batch-size 256"): 20.992,
}  # fmt: skip
H100 = CLUSTERS["h100-ndr400"]


@pytest.mark.parametrize(("run", "seconds"), REPORTED.items(), ids=[f"{run[0]}-{s}" for run, s in REPORTED.items()])
def test_a_reported_run_fits_and_is_planned_within_its_band(run: tuple[str, int, str], seconds: float) -> None:
    model, gpus, flags = run
    job, _ = job_of(flags.split(), gpus, model)
    band = band_of(H100.gpu, job)
    assert band == (MIXTURE_BAND if job.micro_batch == 1 else LARGE_MIXTURE_BAND)
    assert check_memory(H100, job) and abs(iteration(H100, job).seconds / seconds - 1) <= band


def test_why_qwen3_235b_in_micro_batches_of_4_is_planned_a_third_too_slow() -> None:
    """The runs behind `mixture_efficiency` have micro-batches of 1. If what it holds for a share of the kernels' speed
    is a fixed time of each layer, the three runs of 235B are planned within 2 %; but then the fitted ones are off by up
    to 11 %, so that neither form is right for all.
    """
    gpu = replace(
        H100.gpu, mixture_efficiency=Constant(1.0, "assumed", "trial"),
        layer_overhead=Constant(H100.gpu.layer_overhead + 1.2e-3, "assumed", "trial"),
    )  # fmt: skip
    fixed = replace(H100, gpu=gpu)
    errors = [
        iteration(fixed, job_of(flags.split(), gpus, model)[0]).seconds / seconds - 1
        for (model, gpus, flags), seconds in REPORTED.items()
        if model == "qwen3-235b"
    ]
    assert max(map(abs, errors)) < 0.02
    fitted = [row for row in configurations()[0] if row.job.model.mixture and row.modelled]
    assert max(abs(iteration(fixed, row.job).seconds / row.published - 1) for row in fitted) > 0.1


CLUSTER_FIELDS = sorted(
    {*vars(GPUS["H100"]), *vars(H100.network), "gpus_per_node", "software_scale", "coding_scale"}
    - {"name", "rdma", "scatters_twice"}
)


@pytest.mark.parametrize("field", CLUSTER_FIELDS)
def test_every_field_of_a_cluster_file_changes_the_plan(
    field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.json"
    before = {**vars(H100), **vars(H100.gpu), **vars(H100.network)}[field]
    value = 2 * before
    path.write_text(json.dumps({"gpu": "H100", "network": "ndr8", field: value}))
    found = cluster_of(str(path))
    after = {**vars(found), **vars(found.gpu), **vars(found.network)}[field]
    assert after == value and type(after) is type(before)
    words = ["plan", "--cluster", str(path), "--nodes", "2", "--model", "2.5b", "--constants", "--format", "json"]
    assert cli.main([*words, "--", "--micro-batch-size", "1", "--global-batch-size", "64"]) == 0, capsys.readouterr()
    assert all(" : " not in line for line in constants(found))
    path.write_text(json.dumps({"gpu": "H100", "network": "ndr8", field: -1}))
    with pytest.raises(PlanError, match=f"{field}: -1 is not a positive number"):
        cluster_of(str(path))


@pytest.mark.parametrize("field", ["processors", "gpus_per_node"])
def test_half_a_processor_is_refused(field: str, tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"gpu": "MI300X", "network": "roce400x8", field: 7.5}))
    with pytest.raises(PlanError, match=f"{field}: 7.5 is not a whole number"):
        cluster_of(str(path))


@pytest.mark.parametrize(
    ("name", "per_node", "node_rate"),
    [
        ("h200-ndr8", 8, 376e9), ("b200-200gbe", 8, 20e9), ("gb200-ndr4", 4, 188e9), ("mi300x-roce400x8", 8, 384e9),
        ("gb10-40gbe", 1, 4.5e9), ("h100-efa32", 8, 320e9), ("a100-1gbe", 8, 0.1175e9), ("a100-efa4", 8, 40e9),
    ],
)  # fmt: skip
def test_gpus_and_networks_of_users_have_names(name: str, per_node: int, node_rate: float) -> None:
    found = cluster_of(name)
    assert found.gpus_per_node == per_node and found.network.node_rate == pytest.approx(node_rate)
    job, _ = job_of(["--micro-batch-size", "1", "--global-batch-size", "64"], 2 * per_node, "2.5b")
    assert iteration(found, job).seconds > 0 and found.gpu.bf16 <= found.gpu.fp8
    assert (band_of(found.gpu, job) == 0.25) == (found.gpu.name not in ("A100", "H100"))


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("gb300-ndr8", "--cluster gb300-ndr8: unknown GPU 'GB300': did you mean GB200"),
        ("h100-efa", "--cluster h100-efa: unknown network 'efa': did you mean efa8"),
        ("h100", "unknown cluster 'h100': did you mean h100-ndr400"),
    ],
)
def test_an_unknown_name_says_which_half_is_unknown(name: str, complaint: str) -> None:
    with pytest.raises(PlanError, match=complaint):
        cluster_of(name)


DEEPSEEK = "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 \
--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --num-experts 256 --moe-router-topk 8 \
--moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 --moe-layer-freq ([0]*3+[1]*58) \
--mtp-num-layers 1 --vocab-size 129280 --seq-length 4096 --swiglu --normalization RMSNorm --qk-layernorm \
--position-embedding-type rope --untie-embeddings-and-output-weights --disable-bias-linear"
ON_1024 = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 8 \
--pipeline-model-parallel-layout Et*3|(tt|)*29m|L --expert-model-parallel-size 64 --expert-tensor-parallel-size 1 \
--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep --micro-batch-size 1 --global-batch-size 8192 \
--fp8-format hybrid --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
--recompute-granularity selective --recompute-modules mla_up_proj mlp"


def test_deepseek_v3_is_planned_by_its_name_and_by_its_flags(capsys: pytest.CaptureFixture[str]) -> None:
    model, cluster = MODELS["deepseek-v3"], ["plan", "--cluster", "h100-ndr400", "--nodes", "128"]
    predicted = model.predictor_parameters + model.routed_parameters // 58
    assert round((model.parameters - predicted) / 1e9, 1) == 671.0  # of its model card
    said = []
    for words in (["--model", "deepseek-v3", "--"], ["--", *DEEPSEEK.split()]):
        assert cli.main([*cluster, *words, *ON_1024.split()]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "not validated: MLA, MTP, --recompute-modules" in said[0]


def test_a_module_that_is_computed_once_more_takes_its_forward_pass() -> None:
    def seconds(*modules: str) -> float:
        words = ON_1024.split()
        words[words.index("--recompute-modules") + 1 :] = modules
        return iteration(H100, job_of(words, 1024, "deepseek-v3")[0]).seconds

    none = seconds("nothing")
    small = {each: seconds(each) - none for each in ("layernorm", "moe_act", "mla_up_proj", "mlp", "shared_experts")}
    assert all(0 < each < 0.1 * none for each in small.values()), small
    assert seconds("moe") - none > max(small.values())
    assert seconds("mla_up_proj", "mlp") - none == pytest.approx(small["mla_up_proj"] + small["mlp"], rel=0.05)


def test_a_hybrid_with_mamba_layers_is_told_the_bytes_of_its_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--hybrid-override-pattern M-*- --hidden-size 1024 --num-attention-heads 16 --tensor-model-parallel-size 2 \
--pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64 --seq-length 2048"
    assert cli.main(["plan", "--cluster", "h100-100gbe", "--nodes", "4", "--", *words.split()]) == 2
    said = capsys.readouterr().err
    # Mamba: 1024 (2 x 2048 + 2048 + 32) in, 5 (2048 + 2048) convolution, 2048 (1024 + 1) out, 96 scalars. Attention: 4
    # matrices of 1024 x 1024 with biases; two MLPs of 8 million.
    parameters = 1024 * (4096 + 2048 + 32) + 5 * 4096 + 2048 * 1025 + 96 + 4 * 1024 * 1025 + 2 * 8 * 1024**2
    gradients = 4 * (parameters / 4) * 2 * 7 / 8
    assert f"DP gradients {gradients / 1e9:.3g} GB" in said and "Mamba layers are not modelled" in said
    assert f"pipeline forward and pipeline backward each {8 * 2048 * 1024 * 2 / 1e9:.3g} GB" in said


def test_memory_within_the_estimates_error_is_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    flags = next(each for each in REPORTED if each[0] == "qwen3-30b")[2].split()
    words = ["plan", "--cluster", "h100-ndr400", "--nodes", "2", "--model", "qwen3-30b", "--", *flags]
    assert cli.main(words) == 0
    assert "vanilla may not fit: 84.1 GB are planned on a rank, the H100 has 80;" in capsys.readouterr().out
    small: Cluster = replace(H100, gpu=replace(H100.gpu, memory=Constant(70e9, "assumed", "trial")))
    with pytest.raises(PlanError, match=r"14\.1 GB more than the H100 has"):
        check_memory(small, job_of(flags, 16, "qwen3-30b")[0])
