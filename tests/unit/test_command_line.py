"""doctor's reading of a launch line: script, flags and number of processes."""

import shlex

import pytest

from optimus_cc_ext.doctor.command_line import read_command_line
from optimus_cc_ext.errors import FlagError

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
        ("srun -N 4 --ntasks-per-node=1 torchrun --nproc-per-node 8 -m optimus_cc_ext", None, 32, True),
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


def test_a_line_within_quotes_is_opened() -> None:
    line = read_command_line(["srun", "-N", "2", "bash", "-c", f"torchrun --nproc-per-node 4 pretrain_gpt.py {FLAGS}"])
    assert (line.script, line.world_size, line.flags) == ("pretrain_gpt.py", 8, tuple(FLAGS.split()))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("scripts/pretrain_gpt.sh --optimus-cc", "scripts/pretrain_gpt.sh: doctor cannot see the flags"),
        ("sbatch scripts/slurm/pretrain.sbatch", "--dry-run"),
        ("torchrun --nproc-per-node gpu -m optimus_cc_ext", "--nproc-per-node: 'gpu' is not a number of processes"),
        ("torchrun --nproc-per-node", "--nproc-per-node"),
        ("torchrun --nproc-per-node 8", "names no training script"),
        ("train --num-layers 4", "train: this word begins neither flags nor a launch line"),
    ],
)
def test_what_is_no_launch_line_is_refused(line: str, says: str) -> None:
    with pytest.raises(FlagError) as refused:
        read_command_line(shlex.split(line))
    assert says in str(refused.value)
