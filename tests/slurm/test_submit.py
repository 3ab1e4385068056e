"""submit.sh: its refusals, its calls of sbatch, and the steps that jobs start; Slurm's programs here only print."""

import itertools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.shell_scripts import ROOT, Ended, run_script

PYXIS = 'test "$1" != --help || { echo "  --container-image=..."; exit; }; '
PROGRAMS = {
    "squeue": 'case "$*" in *" 41 "*) echo RUNNING ;; *) exit 1 ;; esac',
    "sinfo": 'case "$*" in *debug,main*) printf "%s 99\\n" "debug 2:00:00" "main* infinite" ;;'
    ' *debug*) echo debug 2:00:00 4 ;; *) echo "main* infinite 99" ;; esac',
    "sbatch": 'printf "%s\\n" sbatch "$@"',
    "srun": PYXIS + 'printf "%s\\n" "cpus per task: $SRUN_CPUS_PER_TASK" srun "$@" "$OPTIMUS_CC_DEVICE"',
    "buildah": 'case "$1" in push) echo new > "$(echo "$3" | cut -d: -f2)" ;; esac; echo buildah "$@"',
    "podman": 'echo podman "$@"', "jq": "exit 0", "mksquashfs": "exit 0",
    "apptainer": 'test "$1" != build || { cat "$3"; echo new > "$2"; }; echo apptainer "$@"',
    # Like the real enroot, this one refuses to write over a file.
    "enroot": 'test ! -e "$3" || { echo "File already exists: $3" >&2; exit 1; }; echo new > "$3"; echo enroot "$@"',
}  # fmt: skip
JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "MASTER_ADDR": "n1",
    "SLURM_JOB_CPUS_PER_NODE": "64(x3),32", "PROCESSES_PER_NODE": "8", "OPTIMUS_CC_ROOT": str(ROOT),
}  # fmt: skip


Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run a script of scripts/slurm in a folder of its own, with the stand-ins `programs` first on PATH."""
    programs = tmp_path / "bin"
    folder = tmp_path / "work"
    programs.mkdir()
    folder.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)

    def in_folder(script: str, *arguments: str, limit: float = 30, **env: str) -> Ended:
        path = f"{programs}:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        settings = {"PATH": path, "DOCTOR": "no", **env}
        return run_script(str(Path("slurm", script)), *arguments, env=settings, cwd=folder, limit=limit)

    return in_folder


def submit(run: Run, *words: str, **env: Any) -> Ended:
    """Call submit.sh as a person does: `submit.sh JOB ...`."""
    return run("submit.sh", *words, **env)


REFUSED = {
    "pretrain TENSOR_PARALEL=8 --gpus-per-node=8": (
        "submit.sh: error: TENSOR_PARALEL: it is not a variable of this job. Write TENSOR_PARALLEL; --help lists them."
    ),
    "pretrain UNHEARD_OF=8 --gpus-per-node=8": "UNHEARD_OF: it is not a variable of this job. --help lists them.",
    "pretrain CHECKPOINT=x --gpus-per-node=8": "CHECKPOINT: it is not a variable of this job.",
    "pretrain MODEL=7b --gpus-per-node=8": "MODEL: '7b' is not known. Give tiny, 125m",
    "pretrain": "PROCESSES_PER_NODE: neither it nor --gpus-per-node is given.",
    "pretrain --gpus-per-node=8 -- --dryrun": "--dryrun: it is not an option of this script. Write --dry-run.",
    "pretrain --gpus-per-node=8 -- --nodes=16": "--nodes=16: it is an option of sbatch's",
    "pretrain --nodes=3 --gres=gpu:h100:8": "GLOBAL_BATCH_SIZE: 512 is not a multiple of 24 replicas",
    "pretrain -N 3 --gpus-per-node h100:8": "GLOBAL_BATCH_SIZE: 512 is not a multiple of 24 replicas",
    "pretrain -N 3 -G 24": "GLOBAL_BATCH_SIZE: 512 is not a multiple of 24 replicas",
    "pretrain --gpus-per-node=8 IMAGE=optimus-cc.sqsh": "IMAGE: there is no 'optimus-cc.sqsh'.",
    "pretrain --gpus-per-node=8 IMAGE=host#name:tag CHECKPOINT_DIR=/nowhere/x": (
        "CHECKPOINT_DIR: no folder above '/nowhere/x' exists."
    ),
    "pretrain --gpus-per-node=8 DATA_PATH=/nowhere/x TOKENIZER_MODEL=.": "DATA_PATH: /nowhere/x.idx does not exist.",
    "pretrain --nodes=3 --gpus=16": "--gpus: 16 GPUs are not the same number on each of 3 nodes. Give a multiple",
    "pretrain TENSOR_PARALLEL=8 PROCESSES_PER_NODE=4 --nodes=4": "TENSOR_PARALLEL: groups of 8 ranks cross nodes of 4",
    "pretrain -N3 -G24": "GLOBAL_BATCH_SIZE: 512 is not a multiple of 24 replicas",
    "pretrain -N16 --gpus-per-task=1": "--gpus-per-task=1: the layout is --nodes and --gpus-per-node. Give these",
    "pretrain -n8 --gpus-per-node=8": "-n: the layout is --nodes and --gpus-per-node. Give these",
    "preflight --ntasks 8 --gpus-per-node=8": "--ntasks: the layout is --nodes and --gpus-per-node. Give these",
    "preflight TENSOR_PARALLEL=8 PROCESSES_PER_NODE=4 --nodes=4": "TENSOR_PARALLEL: groups of 8 ranks cross nodes of 4",
    "pretrain --gpus-per-node=8 --time=soon": "--time: 'soon' is no time of Slurm's. Give minutes, or hours:minutes:",
    "pretrain --gpus-per-node=8 --time=3:00:00 -p debug": "is more than 2:00:00, the limit of partition debug.",
    "pretrain --gpus-per-node=8 CHECKPOINT_DIR=/proc/no/folder": "CHECKPOINT_DIR: '/proc/no/folder' cannot be made",
    "pretrain --nodes=100 --gpus-per-node=8": "--nodes: 100 is more than the 99 of the default partition. Give",
    "preflight -N5 -p debug --gpus-per-node=8": "--nodes: 5 is more than the 4 of partition debug. Give --nodes=4",
    "pretrain --gpus-per-node=8 --export=NONE": "--export=NONE: the job would not get its variables. Leave it out, or",
    "pretrain --gpus-per-node=8 --export NONE": "--export: the job would not get its variables. Leave it out, or give",
    "pretrain --gpus-per-node=8 --chdir=/tmp": "--chdir=/tmp: the job runs in the folder where it was checked. Call",
    "compare --gpus-per-node=8 -D/tmp": "-D: the job runs in the folder where it was checked. Call submit.sh in that",
    "pretrain --gpus-per-node=8 --output=logs/%j.log": "logs/%j.log: the job's log cannot be written: 'logs' is not a",
    "prepare_data -e no/log -- --input x": "no/log: the job's log cannot be written: 'no' is not a folder where",
    "pretrain --gpus-per-node=8 model=2.5b": "submit.sh: error: model: it is not a variable of this job. Write MODEL.",
    "pretrain --gpus-per-node=8 --optimus-cc balanced": "--optimus-cc: it is a flag of the program among the options",
    "pretrain --gpus-per-node=8 NETWORK_INTERFACE=^lo,docker0": "NETWORK_INTERFACE: '^lo,docker0' is not a name, and",
    "preflight --gpus-per-node=8 NETWORK_INTERFACE==ib0": "NETWORK_INTERFACE: '=ib0' is not a name, and gloo takes no",
    "pretrain --gpus-per-node=8 SBATCH_ARRAY_INX=1-10%1": "SBATCH_ARRAY_INX: all tasks would train in one folder of",
    "pretrain --gpus-per-node=8 -a1-10": "-a: all tasks would train in one folder of checkpoints. Submit one job,",
    "paper collect": "paper.sbatch: error: RESULTS: there is no '",
    "pretrain RESTARTS=often --gpus-per-node=8": "RESTARTS: 'often' is not a whole number.",
    "paper table2/7b --gpus-per-node=8": "table2/7b: it is no experiment of scripts/paper. Give one, such as table2/",
    "paper --gpus-per-node=8": "paper: it is no experiment of scripts/paper.",
    "paper table2/2.5b-cb DATA_PATH=mock": "PROCESSES_PER_NODE: neither it nor --gpus-per-node is given.",
    "build_image BUILDER=pyxis OUTPUT=x.sif": "OUTPUT: 'x.sif' is not what Pyxis saves.",
    "prepare_data -- --output x": "--input: it is not given. Give a file or a folder of text, after --.",
    "evaluate CHECKPOINT=. MODEL_OUTPUT=/proc/x": "MODEL_OUTPUT: '/proc/x' cannot be made: /proc takes no new",
    "preflight OUTPUT=/proc/x.json --gpus-per-node=8": "OUTPUT: '/proc/x.json' cannot be made: /proc takes no",
    "compare RESULTS=/proc/x --gpus-per-node=8": "RESULTS: '/proc/x' cannot be made: /proc takes no new folder.",
    "evaluate": "CHECKPOINT: it is not set.",
    "evaluate CHECKPOINT=. MODEL_OUTPUT=model": "CHECKPOINT: there is no checkpoint in '.'.",
    "evaluate CHECKPOINT=. MODEL_OUTPUT=. TEXT=x": "TEXT: there is no 'x'.",
    "evaluate CHECKPOINT=. MODEL_OUTPUT=. TASKS=paper": "IMAGE: it is not set, and lm-evaluation-harness is not in",
    "build_image OUTPUT=optimus-cc.img": "OUTPUT: 'optimus-cc.img' has another ending. Give a name that ends in .sif,",
    "build_image OUTPUT=nowhere/optimus-cc.sqsh": "OUTPUT: the folder of 'nowhere/optimus-cc.sqsh' is not there",
    "build_image MEGATRON_LM=.": "MEGATRON_LM: there is no pretrain_gpt.py in '.'.",
    "build_image BUILDER=make": "BUILDER: 'make' is not known.",
}


@pytest.mark.parametrize(("line", "message"), REFUSED.items(), ids=list(REFUSED))
def test_what_cannot_work_is_refused_on_the_login_node(line: str, message: str, run: Run) -> None:
    ended = submit(run, *line.split())
    assert ended.code == 2 and ended.output == "", ended.errors
    assert message in ended.errors and ended.errors.count("error: ") == 1


def test_a_misspelt_variable_in_the_environment_is_refused_and_a_strange_one_is_not(run: Run) -> None:
    ended = submit(run, "pretrain", "--gpus-per-node=8", CHECKPOINT_DIRS="x", FOLDER="y")
    assert ended.code == 2 and ended.output == ""
    assert "CHECKPOINT_DIRS: it is not a variable of this job. Write CHECKPOINT_DIR, or unset" in ended.errors
    ended = submit(run, "pretrain", "--gpus-per-node=8", SBATCH_PARTITON="big")
    assert ended.code == 2 and "Write SBATCH_PARTITION" in ended.errors
    assert submit(run, "pretrain", "--gpus-per-node=8", FOLDER="y", NODE="z").code == 0


def test_what_is_good_goes_to_sbatch_with_its_variables_options_and_flags(run: Run) -> None:
    words = "pretrain MODEL=2.5b NCCL_DEBUG=INFO --nodes=16 --gpus-per-node=8 --time=1:00:00 -- --bf16 --lr 3e-4"
    ended = submit(run, *words.split(), SBATCH_ACCOUNT="chemistry", MICRO_BATCH_SIZE="2")
    assert ended.code == 0, ended.errors
    file = str(ROOT / "scripts/slurm/pretrain.sbatch")
    options = ["--export=ALL", "--signal=USR1@600", "--nodes=16", "--gpus-per-node=8", "--time=1:00:00"]
    assert ended.output.splitlines() == ["sbatch", *options, file, "--bf16", "--lr", "3e-4"]
    assert ended.errors.endswith("submit.sh: pretrain was submitted as checked here, to the default partition\n")
    ended = submit(run, "pretrain", "--gpus-per-node=8", "--partition=nope", SBATCH_PARTITION="big")
    assert ended.errors.endswith("to partition nope\n")
    longest = submit(run, "pretrain", "--gpus-per-node=8", "-pdebug,main", "--time=3:00:00", "--nodes=8")
    assert longest.code == 0, longest.errors
    others = ["--export=ALL,LC_ALL=C", "--output=%x/%j.log", "-e", "/dev/null", "--comment", "team=1", "--no-requeue"]
    assert "".join(others) in submit(run, "pretrain", "--gpus-per-node=8", *others).output.replace("\n", "")


@pytest.mark.full
def test_the_flags_behind_the_dashes_are_checked_by_doctor_last_of_all(run: Run) -> None:
    words = ["pretrain", "--gpus-per-node=8", "--dry-run", "--", "--bf16", "--optimus-cc", "balenced"]
    assert "GLOBAL_BATCH_SIZE" in submit(run, *words, DOCTOR="", GLOBAL_BATCH_SIZE="3").errors, "not asked yet"
    refused = submit(run, *words, DOCTOR="", limit=200)
    assert refused.code == 2 and refused.output.count("\n") == 1, "the line of sbatch alone"
    assert "--: doctor says: h100 " in refused.errors and "'balenced'" in refused.errors
    assert refused.errors.endswith("Mend the flags, or give DOCTOR=no.\n")
    assert submit(run, *words, DOCTOR="no").code == 0


@pytest.mark.parametrize("words", ["--dry-run --nodes=2 -- --bf16", "--nodes=2 -- --bf16 --dry-run"])
def test_a_dry_run_prints_the_lines_of_sbatch_srun_and_torchrun_and_submits_nothing(words: str, run: Run) -> None:
    job = "pretrain MODEL=2.5b TENSOR_PARALLEL=8 --gpus-per-node=8"
    looked_at = submit(run, *job.split(), *words.split())
    assert looked_at.code == 0, looked_at.errors
    sbatch, srun, torchrun = map(shlex.split, looked_at.output.splitlines())
    # The stand-ins of sbatch and srun print their arguments, one word a line.
    submitted = submit(run, *job.split(), *(word for word in words.split() if word != "--dry-run"))
    assert sorted(sbatch) == sorted(submitted.output.splitlines())
    started = run(
        "pretrain.sbatch", "--bf16", **JOB, SLURM_GPUS_ON_NODE="8", MODEL="2.5b", TENSOR_PARALLEL="8"
    ).output.splitlines()
    received = started[started.index("srun") : -1]
    assert [word.replace("interrupted-0", "interrupted-7") for word in srun] == received
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == "8"
    assert torchrun[torchrun.index("--rdzv-endpoint") + 1].startswith("FIRST_NODE:")
    assert torchrun[-2:] == ["--bf16", "--exit-signal-handler"]


def test_an_experiment_of_the_paper_is_a_job_with_its_own_cache_and_few_checkpoints(run: Run, tmp_path: Path) -> None:
    for name in ("gpt2.idx", "vocab", "merges"):
        (tmp_path / name).touch()
    data = {"DATA_PATH": f"{tmp_path}/gpt2", "VOCAB_FILE": f"{tmp_path}/vocab", "MERGE_FILE": f"{tmp_path}/merges"}
    ended = submit(run, "paper", "table2/2.5b-cb", "--dry-run", "--gpus-per-node=8", **data)
    assert ended.code == 0, ended.errors
    sbatch, srun, torchrun = map(shlex.split, ended.output.splitlines())
    assert sbatch[-2:] == [str(ROOT / "scripts/slurm/paper.sbatch"), "table2/2.5b-cb"]
    assert srun[-2:] == [str(ROOT / "scripts/paper/table2/2.5b-cb.sh"), "--exit-signal-handler"]
    flags = dict(itertools.pairwise(torchrun))
    folder = str(tmp_path / "work/results/paper/table2/2.5b-cb")
    assert (flags["--nnodes"], flags["--nproc-per-node"], flags["--train-iters"]) == ("16", "8", "230000")
    assert (flags["--save"], flags["--data-cache-path"]) == (f"{folder}/checkpoints", f"{folder}/data-cache")
    assert (flags["--save-interval"], flags["--save-retain-interval"]) == ("1000", "10000")
    assert "a checkpoint of every 10000 iterations is kept: 24 of about 29 GB, 0.7 TB in all" in ended.errors
    assert "--exit-signal-handler" in torchrun
    of_335m = submit(run, "paper", "table2/335m-baseline", "--dry-run", "DATA_PATH=mock", "--gpus-per-node=8")
    assert "--nodes=1" in of_335m.output and "--standalone" in of_335m.output, of_335m.errors


def test_every_job_can_be_looked_at_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    for words in ("build_image OUTPUT=optimus-cc.tar SPACE_GB=0", "prepare_data -- --input x"):
        ended = submit(run, *words.split()[:1], "--dry-run", *words.split()[1:])
        assert ended.code == 0 and ended.output.startswith("sbatch --export=ALL "), ended.errors
        programs = [shlex.split(line)[0] for line in ended.output.splitlines()]
        assert programs == ["sbatch", *(["buildah", "buildah", "mv"] if words.startswith("build") else ["srun"])]
    assert list((tmp_path / "work").iterdir()) == []


def test_every_job_has_a_help_that_lists_its_variables(run: Run) -> None:
    for job, variable in {
        "build_image": "OUTPUT", "prepare_data": "IMAGE", "pretrain": "NETWORK_INTERFACE", "evaluate": "TASKS"
    }.items():  # fmt: skip
        for ended in (submit(run, job, "--help"), run(f"{job}.sbatch", "--help", OPTIMUS_CC_ROOT=str(ROOT))):
            assert ended.code == 0 and f"\n  {variable} " in ended.output and "#" not in ended.output, ended.errors
    assert submit(run, "train").code == 2


def test_outside_of_slurm_a_training_job_says_how_it_is_submitted(run: Run) -> None:
    ended = run("pretrain.sbatch", OPTIMUS_CC_ROOT=str(ROOT))
    assert ended.code == 2 and "this is not a job of Slurm's. Use scripts/slurm/submit.sh." in ended.errors


def step(ended: Ended) -> dict[str, str]:
    """Return the options of the started step by name, with its program under `program`."""
    assert ended.code == 0, ended.errors
    [cpus, _, *words] = ended.output[ended.output.index("cpus per task: ") :].splitlines()
    options = [word for word in words if word.startswith("--")]
    if "env" in words:  # The command unsets variables that an image must not inherit before it names the program.
        end = words.index("PYTHONNOUSERSITE=1")
        words[words.index("env") : end + 1] = []
    program = next(word for word in words if not word.startswith("--"))
    return {"cpus": cpus.removeprefix("cpus per task: "), "program": program} | {
        name.lstrip("-"): value for name, _, value in (option.partition("=") for option in options)
    }


def test_a_step_has_the_cpus_and_the_memory_of_its_job(run: Run) -> None:
    ended = step(run("pretrain.sbatch", **JOB))
    assert (ended["cpus"], ended["mem"], ended["nodes"]) == ("32", "0", "2")
    chosen = step(run("pretrain.sbatch", **JOB, SLURM_MEM_PER_CPU="2000"))
    assert chosen["cpus"] == "32" and "mem" not in chosen


def test_nothing_of_an_enclosing_allocation_reaches_the_job(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\nenv | grep -E '^S(LURM|RUN)_' | sort\n")
    around = {"SLURM_CPUS_PER_TASK": "1", "SRUN_CPUS_PER_TASK": "1", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    kept = {"SLURM_CONF": "/etc/slurm.conf", "SLURM_CLUSTERS": "big"}
    ended = submit(run, "pretrain", "--gpus-per-node=8", **around, **kept)
    assert ended.code == 0, ended.errors
    assert ended.output.splitlines() == ["SLURM_CLUSTERS=big", "SLURM_CONF=/etc/slurm.conf"]
    # Plain sbatch passes them on, and Slurm sets the number of CPUs of the job's nodes.
    assert step(run("pretrain.sbatch", **JOB, SLURM_CPUS_PER_TASK="1", SRUN_CPUS_PER_TASK="1"))["cpus"] == "32"


def test_the_number_of_gpus_that_was_checked_is_the_number_that_is_used(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bin/sbatch").write_text('#!/bin/sh\necho "$PROCESSES_PER_NODE" "$@"\n')
    ended = submit(run, "pretrain", "--nodes=2", "--gpus=8", "GLOBAL_BATCH_SIZE=64")
    assert ended.output.startswith("4 ") and "--gpus-per-node=4 " in ended.output and "--gpus=8" not in ended.output
    assert submit(run, "preflight", "--gpus-per-node=2").output.startswith("2 ")
    # A whole node of 4 gives the batch script all of its GPUs, and the step those that were asked for.
    job = {name: value for name, value in JOB.items() if name != "PROCESSES_PER_NODE"}
    asked = {"SLURM_GPUS_PER_NODE": "h100:2", "SLURM_GPUS_ON_NODE": "4", "OPTIMUS_CC_DEVICE": "cpu"}
    ended = run("preflight.sbatch", **job, **asked)
    words = ended.output.splitlines()
    assert words[words.index("--nproc-per-node") + 1] == "2", ended.errors
    refused = run("pretrain.sbatch", **job, SLURM_GPUS="4", SLURM_GPUS_ON_NODE="3")
    assert refused.code == 2 and "--gpus: nodes may get unequal numbers of them. Give --gpus-per-node" in refused.errors


@pytest.mark.parametrize(
    "given, lead, warned",
    [
        ("", 600, False),
        ("-t 0-0:14:30", 290, True),
        *(
            pytest.param(*case, marks=pytest.mark.ci)
            for case in (
                ("--time=12", 240, True), ("--time=2", 40, True), ("--time=20:00", 400, False),
                ("--time=1-0", 600, False), ("--time=UNLIMITED", 600, False),
            )
        ),
    ],
)  # fmt: skip
def test_the_signal_leads_the_limit_by_a_third_of_it_at_most_ten_minutes(
    given: str, lead: int, warned: bool, run: Run
) -> None:
    ended = submit(run, "pretrain", "--gpus-per-node=8", *given.split())
    assert f"--signal=USR1@{lead}" in ended.output.splitlines(), ended.errors
    assert ("less than 15 minutes" in ended.errors) == warned
    own = submit(run, "pretrain", "--gpus-per-node=8", *given.split(), "--signal=USR1@90")
    assert [word for word in own.output.splitlines() if "--signal" in word] == ["--signal=USR1@90"]


@pytest.mark.parametrize("gpus, asked, device", [("8", "", "cuda"), ("8", "cpu", "cpu"), ("", "", "")])
def test_a_job_with_gpus_trains_on_them_or_not_at_all(run: Run, gpus: str, asked: str, device: str) -> None:
    ended = run("pretrain.sbatch", **JOB, SLURM_GPUS_ON_NODE=gpus, OPTIMUS_CC_DEVICE=asked)
    assert ended.code == 0 and ended.output.splitlines()[-1] == device, ended.errors
    checked = run("preflight.sbatch", **JOB, SLURM_GPUS_ON_NODE=gpus, OPTIMUS_CC_DEVICE=asked)
    assert checked.code == 0 and checked.output.splitlines()[-1] == device, checked.errors


def test_an_image_is_named_absolutely_with_what_it_needs_mounted_and_what_was_set_outside(
    run: Run, tmp_path: Path
) -> None:
    data, runs, work = tmp_path / "data", tmp_path / "runs", tmp_path / "work"
    (data / "deep").mkdir(parents=True)
    for path in (work / "optimus-cc.sqsh", data / "deep/a.idx", data / "b.idx", data / "merges.txt", data / "v.json"):
        path.touch()
    runs.mkdir()
    (data / "pretrain_gpt.py").touch()
    settings = {
        "IMAGE": "optimus-cc.sqsh", "DATA_PATH": f"0.5 {data}/deep/a 0.5 {data}/b", "CHECKPOINT_DIR": f"{runs}/new/one",
        "VOCAB_FILE": f"{data}/v.json", "MERGE_FILE": f"{data}/merges.txt", "MEGATRON_LM": str(data),
        "NCCL_DEBUG": "INFO", "STRANGE": "x", "CUDA_HOME": "/usr/local/cuda",
    }  # fmt: skip
    boards = tmp_path / "boards"
    boards.mkdir()
    started = step(
        run("pretrain.sbatch", "--tensorboard-dir", f"{boards}/run1", **JOB, **settings, IMAGE_MOUNTS="/opt")
    )
    assert started["container-image"] == f"{work}/optimus-cc.sqsh"
    mounted = started["container-mounts"].split(",")
    assert mounted == [f"{path}:{path}" for path in (work, runs, data, boards, "/tmp", "/opt")]
    outside = started["container-env"].split(",")
    assert {"MEGATRON_LM", "DATA_PATH", "NCCL_DEBUG", "OPTIMUS_CC_DEVICE"} <= set(outside)
    assert not {"STRANGE", "CUDA_HOME"} & set(outside)
    assert started["program"] == "/opt/optimus-cc/scripts/slurm/on_node.sh"


@pytest.mark.parametrize("image", ["optimus-cc.sqsh", "optimus-cc.sif"])
def test_inside_an_image_nothing_of_the_users_own_python_and_compilers_holds(
    image: str, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "work" / image).touch()
    ended = run("pretrain.sbatch", **JOB, IMAGE=image, IMAGE_ENV="CC,MY_SETTING", MY_SETTING="1", NODE_CACHE="/opt")
    words = ended.output.splitlines()
    clean = words[words.index("env") : words.index("PYTHONNOUSERSITE=1")]
    assert clean == ["env", "-u", "PYTHONPATH", "-u", "PYTHONHOME", "-u", "CXX", "-u", "LD_PRELOAD"]
    if image.endswith(".sqsh"):
        started = step(ended)
        assert {"MY_SETTING", "NVIDIA_VISIBLE_DEVICES"} <= set(started["container-env"].split(","))
        assert "/opt:/opt" in started["container-mounts"].split(",")


def test_with_an_image_a_dry_run_prints_the_line_that_the_image_runs(run: Run, tmp_path: Path) -> None:
    (tmp_path / "work/optimus-cc.sif").touch()
    words = ["pretrain", "--gpus-per-node=8", "--dry-run", "IMAGE=optimus-cc.sif"]
    torchrun = submit(run, *words, PYTHONPATH="/mine").output.splitlines()[-1]
    assert torchrun.startswith(
        "env PYTHONPATH=/opt/optimus-cc CUDA_DEVICE_MAX_CONNECTIONS=1 python -m torch.distributed"
    )
    assert " -m optimus_cc_ext /opt/megatron-lm/pretrain_gpt.py --" in torchrun
    (tmp_path / "pretrain_gpt.py").touch()
    torchrun = submit(run, *words, f"MEGATRON_LM={tmp_path}").output.splitlines()[-1]
    assert f" -m optimus_cc_ext {tmp_path}/pretrain_gpt.py --" in torchrun


def test_without_an_image_the_users_environment_stays(run: Run) -> None:
    assert "env" not in run("pretrain.sbatch", **JOB).output.splitlines()


def test_a_folder_of_links_is_mounted_with_what_they_lead_to(run: Run, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/1"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / "abc").touch()
    (snapshot / "tokenizer.json").symlink_to("../../blobs/abc")
    (tmp_path / "work/optimus-cc.sqsh").touch()
    (tmp_path / "data.idx").touch()
    ended = run(
        "pretrain.sbatch", **JOB, IMAGE="optimus-cc.sqsh", DATA_PATH=str(tmp_path / "data"),
        TOKENIZER_MODEL=str(snapshot), HF_HOME=str(tmp_path / "hub/home"), NODE_CACHE=str(tmp_path / "work"),
    )  # fmt: skip
    mounted = {pair.split(":")[0] for pair in step(ended)["container-mounts"].split(",")}
    assert any(str(blobs).startswith(folder) for folder in mounted) and str(snapshot) in mounted


def test_an_image_for_apptainer_is_bound_alike_and_without_pyxis_another_is_refused(run: Run, tmp_path: Path) -> None:
    (tmp_path / "work/optimus-cc.sif").touch()
    ended = run("pretrain.sbatch", **JOB, IMAGE="optimus-cc.sif", IMAGE_MOUNTS="/opt:/mnt")
    work = tmp_path / "work"
    words = ended.output.splitlines()
    start = words.index("apptainer")
    expected = ["exec", "--nv", "--pwd", str(work), "--bind", f"{work},/tmp,/opt:/mnt", f"{work}/optimus-cc.sif"]
    assert words[start + 1 : start + 8] == expected
    (tmp_path / "bin/srun").write_text("#!/bin/sh\n")
    ended = submit(run, "pretrain", "--gpus-per-node=8", "IMAGE=host#name:tag")
    assert ended.code == 2 and "Pyxis is not installed" in ended.errors


def test_data_and_evaluation_run_in_the_image_too(run: Run, tmp_path: Path) -> None:
    (tmp_path / "work/optimus-cc.sqsh").touch()
    (tmp_path / "work/latest_checkpointed_iteration.txt").touch()
    prepared = run("prepare_data.sbatch", "--input", "/opt", **JOB, IMAGE="./optimus-cc.sqsh")
    assert step(prepared)["program"] == "python" and f"{tmp_path}/work:{tmp_path}/work,/opt:/opt" in prepared.output
    evaluated = run("evaluate.sbatch", **JOB, IMAGE="./optimus-cc.sqsh", CHECKPOINT=".", MODEL_OUTPUT="model")
    assert step(evaluated)["program"] == "/opt/optimus-cc/scripts/eval/convert.sh"


def test_without_a_python_preparing_data_says_so(run: Run, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "scripts").symlink_to(ROOT / "scripts")
    path = tmp_path / "no-python"
    path.mkdir()
    for name in ("bash", "sh", "sed", "tr", "awk", "dirname", "paste", "grep", "env", "cut"):
        (path / name).symlink_to(Path("/usr/bin") / name)
    ended = run("prepare_data.sbatch", "--input", "x", OPTIMUS_CC_ROOT=str(package), PATH=str(path))
    assert ended.code == 2 and "PATH: there is no 'python' on it" in ended.errors


def test_a_folder_of_checkpoints_belongs_to_one_job_that_is_queued_or_runs(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    folder.mkdir()
    words = ["pretrain", "--gpus-per-node=8", f"CHECKPOINT_DIR={folder}"]
    owner = folder / "owner-job.txt"
    owner.write_text("41\n")
    refused = submit(run, *words)
    assert refused.code == 2 and refused.output == ""
    assert f"CHECKPOINT_DIR: job 41, which is RUNNING, trains in '{folder}'. Give another folder" in refused.errors
    for waits in ("--dependency=afterany:41", "-d singleton"):
        assert submit(run, *words, *waits.split()).code == 0
    assert submit(run, *words, "--dependency=afterany:411").code == 2
    # On the node the claim is made, whatever was seen before: here job 7 begins while 41 runs, and after it has ended.
    started = run("pretrain.sbatch", **JOB, CHECKPOINT_DIR=str(folder))
    assert started.code == 2 and "job 41, which is RUNNING" in started.errors and "srun" not in started.output
    owner.write_text("40\n")
    assert run("pretrain.sbatch", **JOB, CHECKPOINT_DIR=str(folder)).code == 0
    assert owner.read_text() == "7\n" and sorted(path.name for path in folder.iterdir()) == ["owner-job.txt"]
    assert run("pretrain.sbatch", **JOB, CHECKPOINT_DIR=str(folder)).code == 0, "its own requeue"
    assert submit(run, *words, "--dry-run").code == 0 and owner.read_text() == "7\n"
