"""The planner's closed forms have the shapes of the model that Megatron builds for doctor."""

import json

import pytest

from optimus_cc_ext.tools.plan.flags import job_of
from optimus_cc_ext.tools.plan.hardware import CLUSTERS
from optimus_cc_ext.tools.plan.iteration import rank_costs
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.traffic import DENSE
from tests.megatron.test_doctor import ask_doctor
from tests.plan.test_plan_bytes import planned

pytestmark = pytest.mark.ci

TRAINING = (
    "--seq-length 512 --max-position-embeddings 512 --micro-batch-size 1 --tokenizer-type NullTokenizer "
    "--vocab-size 32000 --bf16 --lr 1e-4 --train-iters 10 --mock-data --use-distributed-optimizer "
)
LLAMA = (
    "--disable-bias-linear --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--untie-embeddings-and-output-weights "
)
QWEN = f"{LLAMA} --qk-layernorm --group-query-attention --num-query-groups 4 --kv-channels 128 "
MODELS = {
    "a tied GPT": (
        8,
        "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --pipeline-model-parallel-size 2 "
        "--global-batch-size 16",
    ),
    "grouped queries and context parallelism": (
        16,
        f"{LLAMA} --num-layers 4 --hidden-size 1024 --ffn-hidden-size 2816 --num-attention-heads 16 "
        "--group-query-attention --num-query-groups 4 --pipeline-model-parallel-size 2 --context-parallel-size 2 "
        "--global-batch-size 16",
    ),
    "experts of a Qwen3": (
        8,
        f"{QWEN} --num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 8 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 256 --expert-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        "--moe-token-dispatcher-type alltoall --global-batch-size 16",
    ),
    "experts on ranks of half a layer": (
        8,
        f"{QWEN} --num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 8 --moe-router-topk 2 "
        "--moe-ffn-hidden-size 256 --expert-model-parallel-size 4 --tensor-model-parallel-size 2 --sequence-parallel "
        "--expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall --global-batch-size 16",
    ),
    "MLA, shared experts, a dense layer and MTP, as DeepSeek-V3": (
        8,
        f"{LLAMA} --qk-layernorm --num-layers 4 --hidden-size 512 --num-attention-heads 8 --multi-latent-attention "
        "--q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 32 --qk-pos-emb-head-dim 16 --v-head-dim 32 "
        "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --moe-shared-expert-intermediate-size 128 "
        "--moe-layer-freq [0]*1+[1]*3 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall "
        "--mtp-num-layers 1 --global-batch-size 16",
    ),
    "two instances of the optimizer": (
        8,
        f"{QWEN} --num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-distributed-optimizer-instances 2 "
        "--global-batch-size 16",
    ),
    "an embedding and a loss that count as layers": (
        8,
        f"{QWEN} --add-qkv-bias --num-layers 6 --hidden-size 512 --num-attention-heads 8 "
        "--pipeline-model-parallel-size 4 --account-for-embedding-in-pipeline-split "
        "--account-for-loss-in-pipeline-split --global-batch-size 16",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_planner_and_doctor_count_the_same_parameters_and_bytes(name: str) -> None:
    ranks, flags = MODELS[name]
    found = ask_doctor(TRAINING + flags, ranks, "--json")
    assert found.code == 0, found.output[-2000:]
    doctor = json.loads(found.output[found.output.index("{") :])
    job, _ = job_of((TRAINING + flags).split(), ranks)
    by_stage = [
        job.parameters_on(stage) + job.embeddings_on(stage) + job.routed_on(stage) for stage in range(job.pp)
    ]  # fmt: skip
    # Each of two tensor-parallel ranks holds whole norms and routers; the planner counts halves.
    close = 0.0 if job.tp == 1 else 0.005
    assert by_stage == [pytest.approx(count, rel=close) for count in doctor["parameters_by_stage"]]
    bytes_of = {tag: each["raw"] for tag, each in doctor["bytes_per_iteration"].items()}
    ours = planned(job, DENSE)
    assert ours["forward"] == bytes_of.get("pipeline forward", 0)
    assert ours["backward"] == bytes_of.get("pipeline backward", 0)
    theirs = bytes_of["DP gradients"] + bytes_of.get("embedding", 0)
    assert ours["gradients"] == pytest.approx(theirs, rel=0.005)
    # Doctor also counts the probability that is sent with each token: 2 bytes beside 1,024.
    for tag in ("expert dispatch", "expert gradient"):
        assert tokens(job, tag) == pytest.approx(bytes_of.get(tag, 0), rel=0.005), tag


def tokens(job: Job, tag: str) -> float:
    """Return the bytes of all ranks in one iteration for a class of experts' tokens."""
    ranks = rank_costs(CLUSTERS["paper"], job)
    sent = sum(cost.dense.nbytes for rank in ranks for cost in rank.classes if cost.name == tag)
    return sent * job.vpp * job.micro_batches * job.gpus / job.pp
