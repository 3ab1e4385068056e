"""doctor's reading of a launch line: script, flags and number of processes."""

import argparse
import shlex

import pytest

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.doctor.command_line import read_command_line
from optimus_cc_ext.tools.doctor.target import missing

FLAGS = "--num-layers 4 --optimus-cc"


@pytest.mark.parametrize(
    ("launch", "script", "world_size", "ours"),
    [
        ("", None, None, True),
        ("torchrun --nproc-per-node 8 -m optimus_cc_ext pretrain_gpt.py", "pretrain_gpt.py", 8, True),
        ("torchrun --nproc_per_node=8 --nnodes=4 -m optimus_cc_ext", None, 32, True),
        ("/opt/bin/torchrun --nnodes 2 --nproc-per-node 4 M/pretrain_gpt.py", "M/pretrain_gpt.py", 8, False),
        ("torchrun --standalone pretrain_gpt.py", "pretrain_gpt.py", 1, False),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 pretrain_gpt.py", "pretrain_gpt.py", 32, False),
        ("python -m torch.distributed.launch --nproc_per_node 8 --nnodes 16 ../pretrain_gpt.py", "../pretrain_gpt.py",
         128, False),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 python3 -m torch.distributed.run --nproc-per-node 2 -m optimus_cc_ext", None,
         2, True),
        ("srun -N 1 --ntasks-per-node=1 torchrun --nproc-per-node 8 -m optimus_cc_ext", None, 8, True),
        ("srun -N4 torchrun --nnodes 4 --nproc-per-node 8 -m optimus_cc_ext", None, 32, True),
        ("srun --nodes=4 --ntasks-per-node=8 python -m optimus_cc_ext pretrain_gpt.py", "pretrain_gpt.py", 32, True),
        ("srun -n 16 python pretrain_gpt.py", "pretrain_gpt.py", 16, False),
        ("srun python -u pretrain_gpt.py", "pretrain_gpt.py", None, False),
        ("mpirun -np 8 python -m optimus_cc_ext", None, 8, True),
    ],
)  # fmt: skip
def test_a_launch_line_says_its_script_and_its_processes(
    launch: str, script: str | None, world_size: int | None, ours: bool
) -> None:
    line = read_command_line(shlex.split(f"{launch} {FLAGS}"))
    assert (line.script, line.world_size, line.ours) == (script, world_size, ours)
    assert line.flags == tuple(FLAGS.split())


@pytest.mark.parametrize(
    ("before", "script", "ranks", "a_node"),
    [
        ("srun -N 4 numactl -N 0", "", 4, None),
        ("srun -n 32 --ntasks-per-node=8 nice -n 5", "", 32, 8),
        ("nice -n 5", "", None, None),
        ("timeout -k 5 900 numactl -N 0 torchrun --nproc-per-node 8", "", 8, 8),
        ("conda run -n mega torchrun --nproc-per-node 8", "", 8, 8),
        ("kubectl exec -n team pod-0 -- torchrun --nproc-per-node 8", "", 8, 8),
        ("srun -N 4 -n 32 apptainer exec --nv -N image.sif", "", 32, 8),
        ("mpirun -np 32 -N 8 -H a:8,b:8,c:8,d:8", "", 32, 8),
        ("mpiexec -n 32 -ppn 8", "", 32, 8),
        ("mpirun --hostfile hosts -npernode 8", "", None, 8),
        ("srun --ntasks-per-node=8", "", None, 8),
        ("sbatch -N 4 --ntasks-per-node=8 --wrap", "srun", 32, 8),
        ("sbatch -N 4 --ntasks-per-node=8 --wrap", "srun -n 16", 16, 8),
        ("sbatch -N 4 --wrap", "torchrun --nproc-per-node 8", 8, 8),
        ("salloc -N 4 srun --ntasks-per-node 8", "", 32, 8),
    ],
)
def test_processes_are_counted_by_the_options_of_their_launcher_alone(
    before: str, script: str, ranks: int | None, a_node: int | None
) -> None:
    program = f"{'' if 'torchrun' in before + script else 'python '}-m optimus_cc_ext pretrain_gpt.py {FLAGS}"
    words = [*shlex.split(before), f"{script} {program}"] if script else shlex.split(f"{before} {program}")
    line = read_command_line(words)
    assert (line.world_size, line.ranks_per_node, line.uncounted) == (ranks, a_node, None)


def test_a_line_within_quotes_is_opened() -> None:
    line = read_command_line(["srun", "-N", "2", "bash", "-c", f"torchrun --nnodes 2 --nproc-per-node 4 x.py {FLAGS}"])
    assert (line.script, line.world_size, line.flags) == ("x.py", 8, tuple(FLAGS.split()))


LAUNCH = "torchrun --nnodes 4 --nproc-per-node 8 -m optimus_cc_ext pretrain_gpt.py"


@pytest.mark.parametrize(
    ("command", "variables"),
    [
        (f"{LAUNCH} {FLAGS}", {}),
        ("\n" + f"{LAUNCH} {FLAGS}".replace(" --", " \\\n  --"), {}),
        (f"{LAUNCH} {FLAGS}".replace(" --", " \\\r\n  --"), {}),
        (f"A=1 B='x y' {LAUNCH} {FLAGS}", {"A": "1", "B": "x y"}),
        (f"env A=1 {LAUNCH} {FLAGS}", {"A": "1"}),
        (f"export A=1; export B=2 C=3; {LAUNCH} {FLAGS}", {"A": "1", "B": "2", "C": "3"}),
        (f"cd /workspace && source env.sh && {LAUNCH} {FLAGS}", {}),
        (f"set -e\ncd x\nA=1\n{LAUNCH} \\\n {FLAGS}\n", {"A": "1"}),
        (f"{LAUNCH} {FLAGS} 2>&1 | tee log.txt", {}),
        (f"{LAUNCH} {FLAGS} >log 2> errors </dev/null &", {}),
        (f"({LAUNCH} {FLAGS}) >> log", {}),
        (f"bash -c 'A=1 {LAUNCH} {FLAGS}' || exit 1", {"A": "1"}),
        (f"echo $(date) && {LAUNCH} {FLAGS} &> log", {}),
    ],
)
@pytest.mark.parametrize("around", [("bash", "-c"), ("srun", "-N", "4", "--ntasks-per-node=1", "bash", "-lc"), ()])
def test_a_shells_command_within_quotes_is_read_as_the_shell_reads_it(
    around: tuple[str, ...], command: str, variables: dict[str, str]
) -> None:
    line = read_command_line([*around, command])
    assert (line.script, line.world_size, line.uncounted) == ("pretrain_gpt.py", 32, None)
    assert line.flags == tuple(FLAGS.split()) and line.environment == variables


def test_operators_that_a_user_quoted_end_the_line_and_values_like_operators_stay() -> None:
    layout = (
        "--pipeline-model-parallel-layout",
        "Et*3|(tt|)*29,m|L",
        "--special-token",
        "<pad>",
        "--name",
        "a > b.py c",
    )
    for end in ("2>&1 | tee log", "> log", ">log 2>errors", "&& echo done", "| tee log", "&", ";"):
        line = read_command_line([*LAUNCH.split(), *FLAGS.split(), *layout, *end.split()])
        assert line.flags == (*FLAGS.split(), *layout), end


@pytest.mark.parametrize(
    ("launch", "says"),
    [
        ("torchrun --nproc-per-node gpu -m optimus_cc_ext", "--nproc-per-node: 'gpu' is not a number of processes"),
        ("srun bash -c 'torchrun --nnodes $SLURM_NNODES pretrain_gpt.py'", "--nnodes: '$SLURM_NNODES' is not a number"),
        ("bash -c 'torchrun --nnodes $(wc -l < hosts) pretrain_gpt.py'", "--nnodes: '$OUTPUT' is not a number"),
        (
            "deepspeed --num_gpus 8 --num_nodes 8 -m optimus_cc_ext",
            "deepspeed: doctor does not know how many processes",
        ),
        ("accelerate launch --num_processes 64 pretrain_gpt.py", "accelerate: doctor does not know how many"),
        ("torchx run dist.ddp -j 4x8 --script pretrain_gpt.py", "torchx: doctor does not know how many"),
        ("jsrun -n 4 -a 8 -g 8 python pretrain_gpt.py", "jsrun: doctor does not know how many"),
        ("ray job submit -- python pretrain_gpt.py", "ray: doctor does not know how many"),
        ("mylauncher -j 4 pretrain_gpt.py", "mylauncher: doctor does not know how many"),
        ("srun -N 4 torchrun --nproc-per-node 8 pretrain_gpt.py", "torchrun: without --nnodes, each of 4 trains alone"),
        ("srun -n 4 torchrun --standalone pretrain_gpt.py", "torchrun: without --nnodes, each of 4 trains alone"),
        ("mpirun -np 4 -N 1 torchrun pretrain_gpt.py", "torchrun: without --nnodes, each of 4 trains alone"),
    ],
)
def test_a_number_of_processes_that_cannot_be_read_says_why_and_the_flags_are_read(launch: str, says: str) -> None:
    line = read_command_line(shlex.split(launch))
    assert line.world_size is None and says in str(line.uncounted) and "--world-size N" in str(line.uncounted)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("scripts/pretrain_gpt.sh --optimus-cc", "scripts/pretrain_gpt.sh: doctor cannot see the flags"),
        ("sbatch scripts/slurm/pretrain.sbatch", "--dry-run"),
        ("torchrun --nproc-per-node", "--nproc-per-node"),
        ("torchrun --nproc-per-node 8", "names no training script"),
        ("train --num-layers 4", "train: this word begins neither flags nor a launch line of Megatron's"),
        ("nemo llm pretrain --factory llama3_8b", "nemo: this word begins neither"),
        ("megatron sft --load L --tensor_model_parallel_size 2", "megatron: this word begins neither"),
        ("model_config.yaml", "model_config.yaml: this word begins neither"),
        ("python3 -m verl.trainer.main_ppo actor.size=2", "verl.trainer.main_ppo: this module is none of Megatron's"),
        ("bash -c 'cd x && bash launch.sh --a | tee y'", "launch.sh: doctor cannot see the flags"),
    ],
)
def test_what_is_no_launch_line_is_refused(line: str, says: str) -> None:
    with pytest.raises(FlagError) as refused:
        read_command_line(shlex.split(line))
    assert says in str(refused.value)


def test_the_storage_client_is_needed_for_its_own_paths_only() -> None:
    # Megatron 0.17 has --enable-msc on by default.
    line = argparse.Namespace(transformer_impl="local", enable_msc=True, data_path=["a"], save=None)
    assert "multi-storage-client" not in missing(line)
    for remote in ({"save": "msc://store/a"}, {"data_path": ["1.0", "msc://store/b"]}):
        assert "multi-storage-client" in missing(argparse.Namespace(**vars(line) | remote))
