"""Doctor tells the truth: on each command line its exit status is what training ends with before its first iteration.

Training is the launcher in one forked rank, with the package's own entry, up to its call of `pretrain()`.
"""

import argparse
import os
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.forked_ranks import run_ranks
from tests.launches import Launch, _Accepted, _captured, call
from tests.megatron_runs import TINY_GPT

pytestmark = pytest.mark.ci

TINY = shlex.join(TINY_GPT)
PP2 = f"{TINY} --pipeline-model-parallel-size 2 "
GPT_8_3B = """
    --num-layers 72 --hidden-size 3072 --num-attention-heads 24 --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 4 --micro-batch-size 8 --global-batch-size 512 --seq-length 1024
    --max-position-embeddings 1024 --train-iters 230000 --lr-decay-iters 320000 --lr 0.00015 --min-lr 1.0e-5
    --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --split 949,50,1
    --eval-iters 10 --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-path text_document
    --save-interval 100
"""
ARTIFACT = """
    --data-impl mmap --DDP-impl local --activations-checkpoint-method uniform --experiment_name N
    --grad_comp --grad_comp_rank 128 --grad_comp_warm_up 0.0 --selective_grad_comp --selective_grad_comp_way 3
    --inter_grad_comp --inter_grad_comp_rank 16 --inter_grad_comp_epilogue_only --emb_comm_opt --use_error_feedback
"""
BY_SAMPLES = PP2.replace("--train-iters 4", "--train-samples 160")

GOOD = [
    (PP2 + "--optimus-cc", 4),
    (PP2, 4),
    (GPT_8_3B + "--optimus-cc", 128),
    (GPT_8_3B + ARTIFACT, 128),
    (PP2 + "--optimus-cc balanced --dp-compression-stages auto --bf16", 8),
    (PP2 + "--optimus-cc --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", 4),
    (PP2 + "--optimus-cc --num-layers-per-virtual-pipeline-stage 1", 4),
    (BY_SAMPLES + "--optimus-cc --compressed-backprop-warmup 0.1 --dp-compression-warmup 0.1", 4),
    (TINY + " --optimus-cc", 1),
    (PP2 + "--compressed-backprop --sequence-parallel --tensor-model-parallel-size 2", 8),
]
BAD = [
    # Megatron's own validation ends the process on these command lines, by exit() or an assertion.
    (GPT_8_3B + "--optimus-cc --checkpoint-activations", 128, "--checkpoint-activations is no longer valid"),
    (PP2 + "--optimus-cc", 3, "world size (3) is not divisible"),
    (GPT_8_3B + "--optimus-cc", 30, "world size (30) is not divisible"),
    (PP2 + "--optimus-cc", 0, ""),
    (PP2 + "--optimus-cc", -1, "world size (-1) is not divisible"),
    (GPT_8_3B + "--optimus-cc --global-batch-size 127", 128, "global_batch_size (127) must be divisible"),
    (PP2 + "--optimus-cc --num-layers 3", 4, ""),
    (PP2 + "--optimus-cc --tensor-model-parallel-size 2 --num-attention-heads 5", 8, ""),
    ("--pipeline-model-parallel-size 2 --optimus-cc", 4, "args.micro_batch_size is not None"),
    (PP2 + "--optimus-cc --batch-size 4", 4, "--micro-batch-size instead"),
    # Megatron refuses this command line while it builds objects from its validated arguments.
    (PP2 + "--optimus-cc --use-precision-aware-optimizer --use-distributed-optimizer --bf16", 4, "TransformerEngine"),
    # Optimus-CC refuses these command lines.
    (PP2 + "--optimus-cc --yaml-cfg a.yaml", 4, "--yaml-cfg: Optimus-CC cannot be set up from a YAML file"),
    (TINY + " --compressed-backprop", 4, "--compressed-backprop: there is nothing to compress"),
    (PP2 + "--dp-compression", 2, "--dp-compression: there is nothing to compress"),
    (PP2 + "--optimus-cc --grad_comp", 4, "Give either the preset or the artifact's flags"),
    (PP2 + "--compressed-backprop --compressed-backprop-rank 0", 4, "a rank of 0"),
    # The parser refuses these command lines.
    (PP2 + "--optimus-cc balanced ' '", 4, "unrecognized arguments:  an empty word. Remove blanks behind backslashes"),
    (PP2 + "--optimus-c", 4, "--optimus-c: did you mean --optimus-cc"),
    (PP2 + "--optimus-cc --compressed-backprop-rnak 8", 4, "did you mean --compressed-backprop-rank"),
    (PP2 + "--optimus-cc --dp-compression-stages most", 4, "--dp-compression-stages"),
]


def train_until_pretrain(argv: list[str]) -> Launch:
    """Call the launcher with the package's own entry; the files of a tokenizer need not exist."""
    from megatron.training import global_vars

    from optimus_cc_ext import startup
    from optimus_cc_ext.tools import pretrain_gpt

    def pretrain(*_: Any) -> NoReturn:
        raise _Accepted(argparse.Namespace())

    def no_tokenizer(args: argparse.Namespace) -> None:
        args.padded_vocab_size = 50304

    pretrain_gpt.pretrain = pretrain
    global_vars._build_tokenizer = no_tokenizer
    return _captured(startup.launch, (argv,))


def ask_doctor(line: str, world_size: int | None, *options: str) -> Launch:
    from optimus_cc_ext.tools import cli

    count = [] if world_size is None else ["--world-size", str(world_size)]
    return call(cli.main, ["doctor", *count, *options, "--", *shlex.split(line)])


def ask_both(line: str, world_size: int) -> tuple[Launch, Launch]:
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    [training] = run_ranks(1, train_until_pretrain, shlex.split(line), timeout=60, env=env)
    return ask_doctor(line, world_size, "--target", "here"), training


def one_in(count: int, rows: list[Any]) -> list[Any]:
    return [pytest.param(*row, marks=pytest.mark.full if n % count else ()) for n, row in enumerate(rows)]


@pytest.mark.parametrize(("line", "world_size"), one_in(3, GOOD))
def test_what_trains_is_said_to_train(line: str, world_size: int) -> None:
    doctor, training = ask_both(line, world_size)
    assert training.accepted, training.output[-2000:]
    assert doctor.code == 0, doctor.output[-2000:]
    assert doctor.output.startswith("ok ") and "memory per rank" in doctor.output
    assert "FAIL" not in doctor.output


@pytest.mark.parametrize(("line", "world_size", "says"), one_in(4, BAD))
def test_what_does_not_train_is_refused_with_trainings_own_status(line: str, world_size: int, says: str) -> None:
    doctor, training = ask_both(line, world_size)
    assert not training.accepted
    assert doctor.code == training.code != 0, (training.code, training.output[-2000:], doctor.output[-2000:])
    verdict = doctor.output.splitlines()[0]
    assert verdict.startswith("FAIL here ") and says in verdict
    assert says in training.output
    assert "Traceback" not in doctor.output and "usage:" not in doctor.output


def test_a_whole_launch_line_says_how_many_ranks_there_are() -> None:
    flags = PP2 + "--optimus-cc"
    for launch in (
        "torchrun --nproc-per-node 4 -m optimus_cc_ext",
        "srun -N 2 torchrun --nnodes 2 --nproc-per-node 2 train.py",
    ):
        found = ask_doctor(f"{launch} {flags}", None)
        assert found.code == 0 and "4 ranks: pipeline 2 x data 2" in found.output, found.output
    assert "train.py is not on this machine" in found.output
    own = ask_doctor(f"torchrun --nproc-per-node 4 train.py {flags} --a-flag-of-its-own 1", None)
    assert own.code == 2 and "may have flags of its own" in own.output
    alone = ask_doctor(flags, None)
    assert alone.code == 1 and "give --world-size N, or the whole torchrun or srun line" in alone.output


def test_a_script_that_is_not_patched_is_not_said_to_know_our_flags(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("from megatron.training import pretrain\n")
    found = ask_doctor(f"torchrun --nproc-per-node 4 {script} {PP2} --optimus-cc", None)
    assert (
        found.code == 2
        and "the script is not patched" in found.output
        and f"-m optimus_cc_ext {script}" in found.output
    )
    assert ask_doctor(f"torchrun --nproc-per-node 4 -m optimus_cc_ext {script} {PP2} --optimus-cc", None).code == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--compressed-backprop-rank 16", "--compressed-backprop-rank: no effect: --compressed-backprop is off"),
        ("--dp-error-feedback", "--dp-error-feedback: no effect: --dp-compression is off"),
        ("--compressed-backprop --dp-compression-rank 8", "--dp-compression-rank: no effect"),
        ("--dp-compression --dp-compression-rank 4000", "--dp-compression-rank 4000: saves nothing on this model"),
        ("--compressed-backprop --compressed-backprop-rank 900", "--compressed-backprop-rank 900: saves nothing"),
    ],
)
def test_what_has_no_effect_is_warned_of(flags: str, says: str) -> None:
    found = ask_doctor(PP2 + flags, 4)
    assert found.code == 0 and says in found.output, found.output


MOE = (
    "--num-experts 4 --moe-grouped-gemm --moe-permute-fusion --disable-bias-linear "
    "--transformer-impl transformer_engine"
)


def test_a_line_is_judged_for_its_target_and_not_for_the_machine_that_doctor_runs_on() -> None:
    line = f"torchrun --nproc-per-node 4 -m optimus_cc_ext {PP2} {MOE} --optimus-cc balanced"
    found = ask_doctor(line, None)
    assert found.code == 0, found.output[-2000:]
    first, second = found.output.splitlines()[:2]
    assert first.startswith("ok   h100 ")
    assert "training would start: nothing is compressed, because nothing leaves a node" in first
    assert "formats" in second and "pipeline forward dense (inside nodes)" in second and "int8" not in second
    assert "needed on the machine that trains: transformer-engine (" in found.output and " assumed)" in found.output
    aware = ask_doctor(line + " --bf16 --use-distributed-optimizer --use-precision-aware-optimizer", None)
    assert aware.code == 0, aware.output[-2000:]
    here = ask_doctor(line, None, "--target", "here")
    assert here.code == 1 and "capability for GroupedGEMM" in here.output.splitlines()[0]


def test_the_verdict_names_the_formats_of_what_leaves_a_node_and_of_nothing_else() -> None:
    found = ask_doctor(f"torchrun --nnodes 2 --nproc-per-node 2 -m optimus_cc_ext {PP2} --optimus-cc balanced", None)
    assert found.code == 0, found.output[-2000:]
    first, second = found.output.splitlines()[:2]
    assert "training would start: pipeline forward (int8)" in first and "DP gradients" not in first
    assert "pipeline forward int8, pipeline backward int8" in second and "DP gradients dense (inside nodes)" in second


def test_a_variable_in_front_of_the_line_counts_and_one_that_is_not_given_is_named() -> None:
    line = f"torchrun --nproc-per-node 4 -m optimus_cc_ext {TINY} --tensor-model-parallel-size 2 --optimus-cc"
    unknown = ask_doctor(line, None)
    assert unknown.code == 0 and "h100 needs the environment variables CUDA_DEVICE_MAX_CONNECTIONS=1" in unknown.output
    for target, connections, code in (("h100", "1", 0), ("h100", "8", 1), ("b200", "8", 0)):
        found = ask_doctor(f"env CUDA_DEVICE_MAX_CONNECTIONS={connections} {line}", None, "--target", target)
        assert found.code == code, found.output[-2000:]
        assert "needs the environment variables" not in found.output
    wrong = ask_doctor(f"env CUDA_DEVICE_MAX_CONNECTIONS {line}", None)
    assert wrong.code == 2 and "neither a variable nor the beginning of a launch line" in wrong.output
    assert "NAME=VALUE" in wrong.output and "NVTE_CPU_OFFLOAD_V1=1" in wrong.output


def test_an_unknown_target_is_refused_with_the_known_ones() -> None:
    from optimus_cc_ext.tools.doctor import examine

    diagnosis = examine(["--optimus-cc"], target="h200")
    assert diagnosis.exit_code == 2
    assert diagnosis.verdict.state == "'h200' is not the name of a target; known are here, a100, h100, b200"


def test_flags_alone_are_judged_for_a_checkouts_script_and_a_line_says_what_the_built_in_entry_cannot() -> None:
    flags = PP2 + "--optimus-cc --check-for-spiky-loss "
    found = ask_doctor(flags, 4)
    assert found.code == 0 and "--check-for-spiky-loss: the built-in entry cannot run this line" in found.output
    [training] = run_ranks(1, train_until_pretrain, shlex.split(flags), timeout=60, env={"WORLD_SIZE": "4"})
    launched = ask_doctor(f"torchrun --nproc-per-node 4 -m optimus_cc_ext {flags}", None, "--target", "here")
    assert (
        launched.code == training.code == 2
        and "--check-for-spiky-loss: not supported by the built-in" in launched.output
    )


def test_a_package_that_is_missing_ends_training_here_and_is_listed_for_another_machine() -> None:
    line = PP2 + "--optimus-cc balanced --optimizer muon"
    here = ask_doctor(line, 4, "--target", "here")
    assert here.code == 1 and "emerging-optimizers: not installed" in here.output.splitlines()[0]
    there = ask_doctor(line, 4, "--target", "a100")
    assert there.code == 0 and "trains: emerging-optimizers (0.3.0 assumed)" in there.output


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--ddp-average-in-collective --calculate-per-token-loss", "Cannot average in collective"),
        ("--use-distributed-optimizer --optimizer sgd", "--use-distributed-optimizer: only Adam"),
        ("--num-experts 4 --moe-shared-expert-intermediate-size 64", "bias is not supported in the shared experts"),
        ("--multi-latent-attention", "--multi-latent-attention: the local DotProductAttention"),
        (
            "--num-experts 8 --expert-model-parallel-size 8 --disable-bias-linear",
            "world_size (4) is not divisible by expert_tensor_model_pipeline_parallel size (16)",
        ),
    ],
)
@pytest.mark.parametrize("target", ["here", pytest.param("h100", marks=pytest.mark.full)])
def test_what_megatron_refuses_when_it_builds_the_model_is_foreseen(target: str, flags: str, says: str) -> None:
    found = ask_doctor(f"{PP2} {flags} --optimus-cc balanced", 4, "--target", target)
    assert found.code == 1 and says in found.output.splitlines()[0], found.output[-2000:]


def test_the_placement_is_that_of_the_launch_line_or_of_the_nodes_that_are_named() -> None:
    hops = "1 of 1 pipeline hops cross nodes"
    assert hops in ask_doctor(f"torchrun --nnodes 2 --nproc-per-node 2 -m optimus_cc_ext {PP2}", None).output
    assert "0 of 1 pipeline hops" in ask_doctor(PP2, 4).output
    inside = ask_doctor(f"{PP2} --optimus-cc balanced", 4).output
    assert "the whole job fits one node: nothing leaves it" in inside and "left dense" in inside
    levels = ask_doctor(f"{PP2} --dp-compression-format int8", 8, "--ranks-per-node", "2").output
    assert "two levels: 2 replicas on each of 2 nodes" in levels and "between nodes: " in levels
    refused = ask_doctor(f"{PP2} --dp-compression-format int8 --dp-compression-levels two", 4, "--ranks-per-node", "1")
    assert refused.code == 2 and "two levels are not possible: no node holds two replicas" in refused.output
    assert hops in ask_doctor(PP2, 4, "--ranks-per-node", "2").output


def no_megatron() -> int:
    import importlib.util
    import sys

    from optimus_cc_ext.tools import cli

    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    importlib.util.find_spec.__globals__["_find_spec"] = lambda *_: None
    return cli.main(["doctor", "--", *TINY_GPT])


def test_a_missing_megatron_is_one_sentence_with_the_cure() -> None:
    found = call(no_megatron)
    assert found.code == 2 and "Traceback" not in found.output
    first = found.output.splitlines()[0]
    assert first.startswith("FAIL this machine") and "megatron.core cannot be imported here" in first
    assert "PYTHONPATH=PATH/TO/Megatron-LM" in first


def the_checkout_here(folder: str) -> list[str]:
    import sys

    from optimus_cc_ext.tools.doctor.machine import find_checkout

    os.chdir(folder)
    find_checkout(None)
    return sys.path[:1]


def test_a_checkout_in_the_current_folder_is_found(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    [found] = run_ranks(1, the_checkout_here, str(tmp_path))
    assert found == [str(tmp_path)]


def test_between_nodes_it_names_the_dispatcher_whose_tokens_can_be_compressed_and_says_what_it_assumes() -> None:
    experts = f"{PP2} --hidden-size 128 --num-experts 8 --moe-router-topk 2 --expert-model-parallel-size 4"
    default = ask_doctor(experts, 8, "--ranks-per-node", "2").output
    assert "--moe-token-dispatcher-type allgather, Megatron's default, sends every token to all ranks" in default
    assert "expert dispatch: " not in default and "neither doctor nor the log counts the bytes of tokens" in default
    assert "sends every token to all ranks" not in ask_doctor(experts, 8, "--ranks-per-node", "4").output
    refused = ask_doctor(f"{experts} --expert-exchange once-a-node", 8, "--ranks-per-node", "2")
    assert refused.code == 2 and "only the tokens of the dispatcher alltoall can be compressed" in refused.output
    assert "Rows that leave a node for each token, on one way: 1.5 with allgather, 0.8 with alltoall" in refused.output
    tokens = f"{experts} --moe-token-dispatcher-type alltoall --expert-dispatch-format int8"
    shared = "--moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap --disable-bias-linear"
    once = ask_doctor(f"{tokens} {shared} --expert-exchange once-a-node", 8, "--ranks-per-node", "2").output
    assert "with CUDA_DEVICE_MAX_CONNECTIONS=1 the second hop of a token waits for the first one" in once
    # Of 64 x 2 x 2 copies in fp32, 0.79 go between two nodes: both hops hold at most 1 + 3 x 0.79 times as much.
    assert f"takes {256 * 512 * (1 + 3 * 11 / 14) / 1e6:.1f} MB on a rank for the rows of both hops" in once
    assert "The second hop, inside a node, counts as sent, too" in once
    said = ask_doctor(
        f"{tokens} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", 8
    ).output
    assert "compressed as asked for, although nothing of it leaves a node: expert dispatch" in said
    assert "counted as if every expert got equally many" in said
    assert "recomputation sends the tokens of the forward pass twice" in said
    # 64 x 2 tokens of 2 experts each: two messages of 130 bytes and 128 values in fp32
    assert "an exchange of experts' tokens takes 0.2 MB on a rank" in said
