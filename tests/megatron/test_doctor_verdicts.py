"""Doctor gives a verdict or a sentence on every line: on random layouts, on models that are built nowhere here, and on
lines whose sizes are in a checkpoint.
"""

import functools
import random
import shlex
import subprocess
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch

from tests.forked_ranks import run_ranks
from tests.megatron.test_doctor import PP2, TINY, ask_doctor

pytestmark = pytest.mark.ci

GPT = (
    "--train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 500 --seq-length 64 "
    "--max-position-embeddings 64 --bf16 --eval-iters 0"
)
SIZES: dict[str, tuple[str, float]] = {
    "num-layers": ("4 8 8 3", 1), "hidden-size": ("128 128 128 100", 1), "num-attention-heads": ("8 8 8 8 3", 1),
    "micro-batch-size": ("1 1 2 3", 1), "global-batch-size": ("768 768 768 64 12", 1),
    "tensor-model-parallel-size": ("2 2 4 3", 0.5), "pipeline-model-parallel-size": ("2 2 4 3", 0.6),
    "context-parallel-size": ("2 3", 0.1), "num-layers-per-virtual-pipeline-stage": ("1 2 3", 0.1),
    "num-experts": ("8 8 4 6", 0.5), "expert-model-parallel-size": ("2 2 4 3", 0.3),
    "expert-tensor-parallel-size": ("1 2 4", 0.1), "moe-router-topk": ("1 2 4", 0.3),
    "moe-token-dispatcher-type": ("alltoall allgather flex", 0.4), "moe-layer-freq": ("1 2 ([0]*1+[1]*3)", 0.1),
    "moe-ffn-hidden-size": ("64 100", 0.2), "moe-shared-expert-intermediate-size": ("64", 0.1),
    "moe-latent-size": ("64 128", 0.1), "num-query-groups": ("2 2 4 3", 0.2), "kv-channels": ("16 32", 0.1),
    "num-distributed-optimizer-instances": ("2 3 4", 0.1), "ffn-hidden-size": ("100 128 256", 0.2),
    "decoder-first-pipeline-num-layers": ("1 2", 0.1), "decoder-last-pipeline-num-layers": ("1 2", 0.1),
    "mtp-num-layers": ("1", 0.1), "recompute-granularity": ("full selective", 0.1), "cp-comm-type": ("p2p a2a", 0.05),
    "recompute-method": ("uniform block", 0.1), "recompute-num-layers": ("1 2 5", 0.1),
    "optimus-cc": ("balanced paper", 0.8),
}  # fmt: skip
SWITCHES = (
    "use-distributed-optimizer", "overlap-grad-reduce", "sequence-parallel", "disable-bias-linear", "swiglu",
    "untie-embeddings-and-output-weights", "use-tp-pp-dp-mapping", "group-query-attention", "apply-layernorm-1p",
)  # fmt: skip


def random_line(seed: int) -> tuple[list[str], int]:
    draw, words = random.Random(seed), GPT.split()
    for flag, (values, likely) in SIZES.items():
        words += [f"--{flag}", draw.choice(values.split())] if draw.random() < likely else []
    words += [f"--{flag}" for flag in SWITCHES if draw.random() < 0.3]
    both = {"--use-distributed-optimizer", "--overlap-grad-reduce"} <= {*words}
    words += ["--overlap-param-gather"] if both else []
    grid = (f"--{name}-parallel-size" for name in ("tensor-model", "pipeline-model", "context"))
    ranks = prod(int(words[words.index(flag) + 1]) for flag in grid if flag in words)
    return words, draw.choice([ranks, 2 * ranks, 4 * ranks, 8 * ranks, 6])


def verdicts(seeds: range) -> list[tuple[int, str, list[str]]]:
    """Return doctor's exit status, verdict and failed estimates of many lines, all in this process."""
    from megatron.training import argument_utils

    from optimus_cc_ext.hooks import launched
    from optimus_cc_ext.tools import doctor

    # Each line gets Megatron's parser anew, which reads the docstrings of its fields from sources.
    argument_utils.ArgumentGroupFactory._get_field_docstrings = functools.cache(
        argument_utils.ArgumentGroupFactory._get_field_docstrings
    )
    doctor.seams = doctor.packages = list  # they are the same for all lines
    found = []
    for seed in seeds:
        if (launch := launched()) is not None:
            launch.remove()
        words, world_size = random_line(seed)
        said = doctor.examine(words, world_size, target="h100")
        none = [each.state for each in said.findings if each.subject == "estimates" or "not estimated" in each.state]
        found.append((said.exit_code, said.verdict.state, none))
    return found


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 200), marks=pytest.mark.full)], ids=["ten lines", "the others"]
)
def test_a_random_layout_gets_a_verdict_or_a_sentence(seeds: range) -> None:
    [found] = run_ranks(1, verdicts, seeds, timeout=280, env={"OPTIMUS_CC_DEVICE": "cpu"})
    for seed, (code, said, none) in zip(seeds, found, strict=True):
        line = f"seed {seed}: {said}"
        assert code in (0, 1, 2) and len(said) > 20, line
        assert ("training would start" in said) == (code == 0) and none == [], (line, none)
        assert not any(name in said for name in ("ZeroDivision", "KeyError", "IndexError", "TypeError")), line
    print(Counter(code for code, *_ in found))
    assert len(seeds) < 100 or {code for code, *_ in found} >= {0, 1}, "these lines are all alike"


INSTANCES = (
    f"{TINY} --tensor-model-parallel-size 2 --num-experts 8 --expert-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --num-distributed-optimizer-instances 2 --moe-token-dispatcher-type alltoall "
    "--disable-bias-linear --expert-tensor-parallel-size 1"
)


@pytest.mark.parametrize(
    ("line", "world_size", "says"),
    [
        (f"{INSTANCES} --optimus-cc balanced", 2, "Data parallel size should be divisible by"),
        pytest.param(
            f"{PP2} --rerun-mode report_stats", 4, "--rerun-mode: 'report_stats' is not", marks=pytest.mark.ci
        ),
    ],
)
def test_what_ends_training_while_groups_are_made_is_foreseen(line: str, world_size: int, says: str) -> None:
    found = ask_doctor(line, world_size, "--target", "h100")
    assert found.code == 1 and found.output.startswith("FAIL") and says in found.output, found.output[-2000:]


NORM_1P = "--normalization RMSNorm --apply-layernorm-1p"


@pytest.mark.ci
def test_a_norm_that_this_machine_lacks_takes_no_estimate_away_and_ends_training_here() -> None:
    def numbers(more: str) -> list[str]:
        found = ask_doctor(f"{PP2} --optimus-cc balanced --normalization RMSNorm {more}", 8, "--target", "h100")
        assert found.code == 0, found.output
        return [line for line in found.output.splitlines() if "bytes per iteration" in line or "memory" in line]

    assert numbers("--apply-layernorm-1p") == numbers("") and len(numbers("")) > 2
    here = ask_doctor(f"{PP2} {NORM_1P}", 8, "--target", "here")
    assert here.code == 1 and here.output.startswith("FAIL here"), here.output


@pytest.mark.ci
def test_a_launcher_that_doctor_does_not_know_is_named_and_the_number_of_ranks_helps() -> None:
    line = f"deepspeed --num_gpus 8 --num_nodes 8 -m optimus_cc_ext {PP2} --optimus-cc"
    found = ask_doctor(line, None)
    assert found.code == 2 and "deepspeed: doctor does not know how many processes" in found.output
    assert ask_doctor(line, 8).code == 0


def checkpoint_with(folder: Path, line: str) -> None:
    """Write the part of a checkpoint of `--ckpt-format torch` from which Megatron takes arguments."""
    from megatron.training.arguments import parse_args

    args = parse_args()
    args.padded_vocab_size = 512
    file = folder / "iter_0000002" / "mp_rank_00" / "model_optim_rng.pt"
    file.parent.mkdir(parents=True)
    torch.save({"args": args, "iteration": 2, "checkpoint_version": 3.0}, file)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")


def doctor_with_checkpoint(folder: str, saved: str, line: str, target: str) -> int:
    import sys

    from optimus_cc_ext.tools import cli

    if saved:
        sys.argv = ["pretrain_gpt.py", *shlex.split(saved)]
        checkpoint_with(Path(folder), saved)
    return cli.main(["doctor", "--world-size", "4", "--target", target, "--", *shlex.split(line)])


@pytest.mark.parametrize("target", ["h100", pytest.param("here", marks=pytest.mark.ci)])
def test_sizes_in_a_checkpoint_are_those_that_training_takes(tmp_path: Path, target: str) -> None:
    from tests.launches import call

    bare = f"--use-checkpoint-args --use-mp-args-from-checkpoint-args --load {tmp_path} {GPT} --micro-batch-size 2 "
    saved = f"{PP2} --ckpt-format torch"
    line = f"{bare} --global-batch-size 16 --ckpt-format torch --optimus-cc --transformer-impl local"
    found = call(doctor_with_checkpoint, str(tmp_path), saved, line, target)
    assert found.code == 0 and "4 ranks: pipeline 2 x data 2" in found.output, found.output[-3000:]


def test_sizes_in_a_checkpoint_that_is_not_here_give_no_verdict(tmp_path: Path) -> None:
    line = f"{PP2} --use-checkpoint-args --load {tmp_path / 'elsewhere'} --optimus-cc"
    found = ask_doctor(line, 4, "--target", "h100")
    assert found.code == 2 and found.output.startswith("warn h100"), found.output
    assert "no verdict: with --use-checkpoint-args" in found.output and "elsewhere" in found.output


# -- the folder of checkpoints ----------------------------------------------------------------------------------------


def test_it_says_what_it_sees_of_the_folder_to_which_ranks_save_their_state(small_disk: Path) -> None:
    paper = f"{PP2} --optimus-cc --dp-compression-rank 4 --save-interval 2 --save {small_disk}/gpt"

    def about_saves(line: str, *options: str) -> list[str]:
        output = ask_doctor(line, 4, "--target", "here", *options).output
        return [text for text in output.splitlines() if " saves " in text or "--save" in text]

    (room,) = about_saves(paper)
    assert room.startswith("warn saves") and f"0.066 MB are free in {small_disk}, and the state takes at most" in room
    shared, _ = about_saves(paper, "--ranks-per-node", "2")
    assert f"all nodes have to see {small_disk}/gpt: each rank writes its state there" in shared
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    refused = ask_doctor(paper, 4, "--target", "here")
    assert refused.code == 2 and refused.output.startswith("FAIL here")
    assert f"--save: {small_disk} cannot be written, and low rank has a state to save" in refused.output
    assert ask_doctor(paper, 4).code == 0, "another machine, whose folder it is"
    assert about_saves(paper.replace("--optimus-cc --dp-compression-rank 4", "--optimus-cc balanced")) == []
