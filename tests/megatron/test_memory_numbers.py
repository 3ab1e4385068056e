"""Law: one number for memory. Doctor and planner print the same for models of any size."""

import json
import shlex

import pytest

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.announce import COMPRESSION_STATE, MESSAGE_BUFFERS
from optimus_cc_ext.tools.plan.flags import job_of
from optimus_cc_ext.tools.plan.memory import memory
from tests.megatron.test_doctor import ask_doctor

pytestmark = pytest.mark.ci

_TODAYS = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --no-rope-fusion"
)
_SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
_MODELS = {
    "llama3-8b": "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    f"--group-query-attention --num-query-groups 8 --seq-length 8192 --vocab-size 128256 {_TODAYS} {_SHARDED}",
    "llama3-70b": "--num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 "
    f"--group-query-attention --num-query-groups 8 --seq-length 8192 --vocab-size 128256 {_TODAYS} {_SHARDED}",
    "gpt-8.3b": "--num-layers 72 --hidden-size 3072 --num-attention-heads 24 --seq-length 1024 --vocab-size 51200",
    "gpt-175b": "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 "
    f"{_SHARDED}",
    "qwen3-30b": "--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 "
    "--group-query-attention --num-query-groups 4 --qk-layernorm --num-experts 128 --moe-router-topk 8 "
    "--moe-ffn-hidden-size 768 --moe-token-dispatcher-type alltoall --seq-length 4096 --vocab-size 151936 "
    f"{_TODAYS} {_SHARDED}",
    "deepseek": "--num-layers 64 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    "--v-head-dim 128 --qk-layernorm --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 "
    "--moe-shared-expert-intermediate-size 2048 --moe-token-dispatcher-type alltoall --seq-length 4096 "
    f"--vocab-size 129280 {_TODAYS} {_SHARDED}",
}
_LAYOUTS = [
    ("llama3-8b", 16, 1, 1, 128, "--optimus-cc balanced"),
    ("llama3-8b", 64, 4, 2, 128, "--dp-compression-format int8 --param-gather-format exact"),
    ("llama3-70b", 128, 8, 4, 128, "--optimus-cc balanced"),
    ("llama3-70b", 256, 8, 8, 256, "--dp-compression-format int8 --param-gather-format int4"),
    (
        "llama3-8b",
        64,
        2,
        2,
        128,
        "--optimus-cc balanced --grad-reduce-in-bf16 --message-memory 64 --ddp-reduce-scatter-with-fp32-accumulation",
    ),
    ("gpt-8.3b", 128, 8, 4, 512, "--optimus-cc balanced"),
    ("gpt-8.3b", 128, 8, 4, 512, "--optimus-cc paper"),
    ("gpt-8.3b", 64, 4, 2, 512, f"--optimus-cc balanced {_SHARDED}"),
    (
        "llama3-70b",
        64,
        8,
        1,
        128,
        "--optimus-cc balanced --recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    ),
    ("gpt-175b", 512, 8, 16, 1536, "--optimus-cc balanced"),
    ("gpt-175b", 256, 8, 8, 1536, "--dp-compression-format int8 --param-gather-format exact"),
    ("qwen3-30b", 32, 1, 1, 256, "--optimus-cc balanced --expert-model-parallel-size 8"),
    ("qwen3-30b", 64, 2, 1, 256, "--optimus-cc balanced --expert-model-parallel-size 32"),
    ("qwen3-30b", 64, 1, 2, 256, "--optimus-cc balanced --expert-model-parallel-size 8"),
    ("deepseek", 1024, 1, 16, 4096, "--optimus-cc balanced --expert-model-parallel-size 64"),
    ("deepseek", 1024, 2, 8, 4096, "--optimus-cc balanced --expert-model-parallel-size 32"),
    ("deepseek", 2048, 1, 16, 8192, "--optimus-cc balanced --expert-model-parallel-size 64"),
]


@pytest.mark.parametrize(("model", "ranks", "tp", "pp", "batch", "more"), _LAYOUTS)
def test_planner_and_doctor_say_the_same(model: str, ranks: int, tp: int, pp: int, batch: int, more: str) -> None:
    words = _MODELS[model].split()
    line = (
        f"{_MODELS[model]} --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} --micro-batch-size 1 "
        f"--global-batch-size {batch} {'--sequence-parallel' if tp > 1 else ''} {more} --train-iters 100 "
        f"--lr 1e-4 --bf16 --mock-data --max-position-embeddings {words[words.index('--seq-length') + 1]} "
        "--tokenizer-type NullTokenizer --make-vocab-size-divisible-by 1"
    )
    said = ask_doctor(f"env CUDA_DEVICE_MAX_CONNECTIONS=1 {line}", ranks, "--json", "--target", "h100").output
    answer = json.loads(said[said.index("{") :])
    job, _ = job_of(shlex.split(line), ranks)
    fields = OptimusConfig.__dataclass_fields__
    config = OptimusConfig(**{name: value for name, value in answer["config"].items() if name in fields})
    planned, doctors = memory(job, config), answer["memory_per_rank"]
    assert doctors[MESSAGE_BUFFERS] > 0
    for kind in (COMPRESSION_STATE, MESSAGE_BUFFERS):
        assert planned[kind] == pytest.approx(doctors[kind], rel=0.01), kind
