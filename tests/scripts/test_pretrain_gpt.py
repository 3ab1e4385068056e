"""scripts/pretrain_gpt.sh: the command that it would run. These tests start nothing."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT, Ended, run_script

pytestmark = pytest.mark.ci


def dry_run(*flags: str, cwd: Path = ROOT, **env: str) -> Ended:
    return run_script("pretrain_gpt.sh", "--dry-run", *flags, env=env, cwd=cwd)


def test_without_any_variable_it_is_one_process_on_made_up_tokens() -> None:
    ended = dry_run()
    launch = ended.launch
    assert launch.torchrun == ["--nproc-per-node", "1", "--standalone"]
    assert launch.program == ["-m", "optimus_cc_ext"]
    assert [launch.value(f"--{name}") for name in ("num-layers", "hidden-size", "num-attention-heads")] == [
        "12", "768", "12",
    ]  # fmt: skip
    assert "--mock-data" in launch.flags and "made-up tokens" in ended.errors
    assert launch.value("--save") == launch.value("--load") == str(ROOT / "checkpoints/gpt-125m-vanilla")


def test_variables_choose_the_model_the_layout_and_the_data() -> None:
    launch = dry_run(
        MODEL="2.5b", NUM_LAYERS="26", TENSOR_PARALLEL="2", PIPELINE_PARALLEL="2", PROCESSES_PER_NODE="8",
        SEQ_LENGTH="2048", MICRO_BATCH_SIZE="4", GLOBAL_BATCH_SIZE="64", TRAIN_ITERS="77", LR="3e-4",
        DATA_PATH="0.3 /data/a 0.7 /data/b", TOKENIZER_MODEL="/data/tokenizer",
        CHECKPOINT_DIR="/runs/one", SAVE_INTERVAL="5",
    ).launch  # fmt: skip
    expected = {
        "num-layers": "26", "hidden-size": "1920", "num-attention-heads": "24", "seq-length": "2048",
        "max-position-embeddings": "2048", "tensor-model-parallel-size": "2", "pipeline-model-parallel-size": "2",
        "micro-batch-size": "4", "global-batch-size": "64", "train-iters": "77", "lr": "3e-4",
        "tokenizer-type": "HuggingFaceTokenizer", "tokenizer-model": "/data/tokenizer",
        "save": "/runs/one", "load": "/runs/one", "save-interval": "5",
    }  # fmt: skip
    assert {name: launch.value(f"--{name}") for name in expected} == expected
    blend = launch.flags.index("--data-path")
    assert launch.flags[blend + 1 : blend + 5] == ["0.3", "/data/a", "0.7", "/data/b"]
    assert launch.torchrun[:2] == ["--nproc-per-node", "8"]


def test_gpt2_vocabulary_files_choose_its_tokenizer_and_without_checkpoints_nothing_is_saved() -> None:
    launch = dry_run(DATA_PATH="/data/a", VOCAB_FILE="/v.json", MERGE_FILE="/m.txt", CHECKPOINT_DIR="none").launch
    assert launch.value("--tokenizer-type") == "GPT2BPETokenizer"
    assert (launch.value("--vocab-file"), launch.value("--merge-file")) == ("/v.json", "/m.txt")
    assert not {"--save", "--load", "--save-interval"} & set(launch.flags)


def test_flags_are_passed_on_unchanged_and_win_over_variables_and_defaults() -> None:
    flags = "--optimus-cc --lr=1e-2 --lr-warmup-iters 3 --train-samples 9 --note"
    given = [*flags.split(" "), "a b'c\"d $(e)*"]
    launch = dry_run(*given, LR="5", TRAIN_ITERS="6").launch
    assert launch.flags[-len(given) :] == given
    for default in ("--lr", "--lr-warmup-fraction", "--train-iters"):
        assert default not in launch.flags


def test_the_printed_line_can_be_pasted_into_a_shell() -> None:
    """A stand-in for python prints its arguments, which must be those of the printed line."""
    ended = dry_run("--note", "a b'c\"d $(e)\n*")
    line = ended.output.strip().replace(f"{ROOT}/.venv/bin/python", "python")
    shown = subprocess.run(
        ["bash", "-c", 'python() { printf "%s\\0" "$@"; }; env() { shift 2; "${@/#*\\/python/python}"; }; ' + line],
        text=True, capture_output=True, check=True,
    ).stdout  # fmt: skip
    assert shown.split("\0")[-3:-1] == ["--note", "a b'c\"d $(e)\n*"]


def test_a_checkouts_own_script_is_run_where_one_is_named(tmp_path: Path) -> None:
    checkout = tmp_path / "Megatron LM"
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    program = dry_run(MEGATRON_LM=str(checkout)).launch.program
    assert program == ["-m", "optimus_cc_ext", f"{checkout}/pretrain_gpt.py"]


@pytest.mark.parametrize("separator", [" ", ",", ", ", "\n"])
def test_a_list_of_nodes_gives_their_number_the_master_and_this_hosts_rank(separator: str) -> None:
    nodes = separator.join(["first.example", platform.node(), "third"])
    launch = dry_run(NODE_LIST=nodes, PROCESSES_PER_NODE="8", GLOBAL_BATCH_SIZE="192").launch
    assert launch.torchrun == [
        "--nproc-per-node", "8", "--nnodes", "3", "--node-rank", "1",
        "--master-addr", "first.example", "--master-port", "6000",
    ]  # fmt: skip


def test_nodes_without_a_rank_get_theirs_from_torchruns_rendezvous() -> None:
    launch = dry_run(NODES="2", MASTER_ADDR="first", MASTER_PORT="7000").launch
    assert launch.torchrun[2:] == [
        "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "first:7000", "--rdzv-id", "optimus-cc",
    ]  # fmt: skip


def test_visible_gpus_are_counted_and_without_any_one_replica_is_run() -> None:
    on_gpus = {"OPTIMUS_CC_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": "0,3"}
    assert dry_run(**on_gpus).launch.torchrun[:2] == ["--nproc-per-node", "2"]
    hidden = {"OPTIMUS_CC_DEVICE": "cuda", "CUDA_VISIBLE_DEVICES": ""}
    for none in (hidden, {}):
        launch = dry_run(PIPELINE_PARALLEL="2", TENSOR_PARALLEL="2", **none).launch
        assert launch.torchrun[:2] == ["--nproc-per-node", "4"]


BAD = {
    "MODEL=3b": "MODEL: '3b' is not known. Give tiny,",
    "NUM_LAYERS=": None,
    "NUM_LAYERS=twelve": "NUM_LAYERS: 'twelve' is not a whole number. Give one, such as NUM_LAYERS=1.",
    "TRAIN_ITERS=0": "TRAIN_ITERS: 0 is too small. Give at least 1.",
    "NUM_HEADS=7": "NUM_HEADS: 7 heads do not divide HIDDEN_SIZE=768. Give a divisor.",
    "LR=fast": "LR: 'fast' is not a positive number.",
    "PROCESSES_PER_NODE=4;TENSOR_PARALLEL=3": "PROCESSES_PER_NODE: 1 x 4 processes cannot hold replicas of 3 x 1 each.",
    "GLOBAL_BATCH_SIZE=100": "GLOBAL_BATCH_SIZE: 100 is not a multiple of 1 replicas x MICRO_BATCH_SIZE=8.",
    "NODES=2": "MASTER_ADDR: it is not set, and there are 2 nodes. Give the first node's name, or NODE_LIST.",
    "NODES=-1": "NODES: '-1' is not a whole number.",
    "NODES=2;NODE_LIST=a b c": "NODES: it is 2, but NODE_LIST names 3. Leave one of the two out.",
    "NODE_RANK=1": "NODE_RANK: it is '1', but there is one node.",
    "NODES=2;MASTER_ADDR=a;NODE_RANK=2": "NODE_RANK: 2 is too large. Give at most 1.",
    "MASTER_PORT=99999": "MASTER_PORT: 99999 is too large. Give at most 65535.",
    "MEGATRON_LM=/nowhere": "MEGATRON_LM: there is no pretrain_gpt.py in '/nowhere'. Give a Megatron-LM checkout,",
    "DATA_PATH=/data/a": "TOKENIZER_MODEL: DATA_PATH is set, but no tokenizer. Give it, or VOCAB_FILE and MERGE_FILE",
    "CHECKPOINT_DIR=setup.py": "CHECKPOINT_DIR: 'setup.py' is not a folder.",
    "NODE_LIST=a:8,b:8": "NODE_LIST: 'a:8' is not the name of a host. Give names alone;",
    "NODE_LIST=a b a": "NODE_LIST: it names 'a' more than once. Give each node once.",
    "NODE_LIST=gpu[01-04]": "NODE_LIST: 'gpu[01-04]' is Slurm's short form, and scontrol does not expand it here. "
    "Give what `scontrol show hostnames 'gpu[01-04]'` prints",
    "PROFILER=nsys;PROFILED_RANK=1": "PROFILED_RANK: 1 is too large. Give at most 0.",
    "SAVE_INTERVAL=1.5": "SAVE_INTERVAL: '1.5' is not a whole number.",
}


SET_ELSEWHERE = {
    "WORLD_SIZE=16": "WORLD_SIZE: it is '16', but NODES is not set. Set NODES (1: this machine alone)",
    "NODES=2;MASTER_ADDR=a;WORLD_SIZE=3": "WORLD_SIZE: it is '3', but 2 x 1 processes are started. Set NODES",
    "NUM_PROCESSES=16": "NUM_PROCESSES: it is '16', but 1 x 1 processes are started. Set NODES",
    "MASTER_ADDR=10.0.0.1": "MASTER_ADDR: it is '10.0.0.1', but NODES is not set.",
    "SLURM_NNODES=2": "SLURM_NNODES: it is '2', but NODES is not set.",
    "SLURM_STEP_NUM_TASKS=8": "SLURM_STEP_NUM_TASKS: this script was started 8 times, but NODES is 1",
    "OMPI_COMM_WORLD_SIZE=16": "OMPI_COMM_WORLD_SIZE: this script was started 16 times, but NODES is 1",
    "LOCAL_RANK=0": "LOCAL_RANK: a launcher of ranks started this script",
    "DP=4": "DP: it is '4', but the layout leaves 1 replicas. Change the layout, or unset DP.",
}


@pytest.mark.parametrize(("given", "message"), (BAD | SET_ELSEWHERE).items(), ids=list(BAD | SET_ELSEWHERE))
def test_a_bad_value_is_refused_with_the_variable_the_reason_and_the_cure(given: str, message: str | None) -> None:
    ended = dry_run(**dict(pair.split("=", 1) for pair in given.split(";")))
    if message is None:  # an empty value counts as not set
        assert ended.code == 0
        return
    assert ended.code == 2 and ended.output == ""
    assert message in ended.errors and ended.errors.count("error: ") == 1


OTHER_NAMES = [
    line.split()
    for line in re.findall(r"^other_names='(.*?)'", (ROOT / "scripts/other_names.sh").read_text(), re.S | re.M)[
        0
    ].splitlines()
]


@pytest.mark.parametrize(
    ("ours", "others"), [(row[0], row[1:]) for row in OTHER_NAMES], ids=[r[1] for r in OTHER_NAMES]
)
def test_a_name_that_other_launchers_use_is_refused_with_ours_unless_it_says_the_same(
    ours: str, others: list[str]
) -> None:
    name, variable = others[0], ours.split("/")[0]
    ended = dry_run(**{name: "77"})
    assert ended.code == 2 and ended.output == ""
    assert f"error: {name}: it is '77', but {variable} is " in ended.errors
    assert f"Give {variable}=77, or unset {name}." in ended.errors


def test_names_of_other_launchers_that_say_what_is_started_are_no_error() -> None:
    same = {
        "NNODES": "1",
        "RANK": "0",
        "NODE_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "TP": "2",
        "PP": "1",
    }
    same |= {"CP": "1", "DP": "1", "GPUS_PER_NODE": "2", "MBS": "8", "GBS": "512", "LAYERS": "12"}
    assert dry_run(TENSOR_PARALLEL="2", **same).code == 0
    assert dry_run("--tensor-model-parallel-size=2", PROCESSES_PER_NODE="2", **same).code == 0
    refused = dry_run("--tensor-model-parallel-size", "4", PROCESSES_PER_NODE="2", **same)
    assert "TP: it is '2', but TENSOR_PARALLEL is 4." in refused.errors
    cloud = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    given = {"NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a", "PROCESSES_PER_NODE": "8", "NUM_PROCESSES": "16"}
    assert dry_run(**cloud, **given).code == 0
    allocation = {"SLURM_NNODES": "2", "SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "2"}
    assert dry_run(NODES="2", MASTER_ADDR="a", **allocation).code == 0


@pytest.mark.skipif(shutil.which("scontrol") is None, reason="Slurm is not installed")
def test_slurms_short_form_of_a_list_of_nodes_is_expanded_by_slurm(tmp_path: Path) -> None:
    (tmp_path / "slurm.conf").write_text("ClusterName=c\nSlurmctldHost=h\n")
    launch = dry_run(
        NODE_LIST=f"gpu[01-03], {platform.node()}", SLURM_CONF=str(tmp_path / "slurm.conf"), PROCESSES_PER_NODE="8"
    ).launch
    assert launch.torchrun[2:] == [
        "--nnodes", "4", "--node-rank", "3", "--master-addr", "gpu01", "--master-port", "6000",
    ]  # fmt: skip


def test_data_that_is_not_there_stops_a_start_but_not_a_look_at_the_command() -> None:
    env = {"DATA_PATH": "/data/a", "TOKENIZER_MODEL": "/data/tokenizer"}
    assert "DATA_PATH: /data/a.idx does not exist" in dry_run(**env).errors and dry_run(**env).code == 0
    ended = run_script("pretrain_gpt.sh", env=env)
    assert ended.code == 2 and "error: DATA_PATH: /data/a.idx does not exist. Give an existing one" in ended.errors


def test_a_host_that_the_list_of_nodes_lacks_stops_a_start_but_not_a_look_at_the_command() -> None:
    ended = run_script("pretrain_gpt.sh", "--check", env={"NODE_LIST": "a b"})
    assert ended.code == 2 and "is not in it. Add it, or set NODE_RANK." in ended.errors
    assert "--rdzv-endpoint" in dry_run(NODE_LIST="a b").launch.torchrun


def test_the_launcher_says_which_groups_stay_inside_nodes() -> None:
    env = {
        "NODES": "4",
        "MASTER_ADDR": "a",
        "PROCESSES_PER_NODE": "8",
        "TENSOR_PARALLEL": "2",
        "PIPELINE_PARALLEL": "4",
    }
    assert "data-parallel groups stay inside nodes, 3 of 3 pipeline hops cross nodes" in dry_run(**env).errors
    other = run_script("pretrain_gpt.sh", "--dry-run", "--use-tp-pp-dp-mapping", env=env)
    assert "data-parallel groups span nodes, 0 of 3 pipeline hops cross nodes" in other.errors


def test_a_profiler_stands_in_front_of_one_rank() -> None:
    words = dry_run(PROFILER="nsys profile").output.split()
    place = words.index("--no-python")
    assert words[place + 1].endswith("scripts/profiled.sh") and words[place + 3 : place + 6] == [
        "-u",
        "-m",
        "optimus_cc_ext",
    ]
    for rank, said in (("0", "nsys profile echo x"), ("1", "x")):
        done = run_script("profiled.sh", "echo", "x", env={"PROFILER": "echo nsys profile", "RANK": rank})
        assert done.output.strip() == said, done.errors


def test_a_rendezvous_has_the_name_that_it_is_given() -> None:
    env = {"NODES": "2", "MASTER_ADDR": "a"}
    for name, expected in ((None, "optimus-cc"), ("17.2", "17.2")):
        launch = dry_run(**env, **({"RUN_ID": name} if name else {})).launch
        assert launch.torchrun[launch.torchrun.index("--rdzv-id") + 1] == expected


def test_what_is_nearly_an_option_or_a_variable_is_refused_with_what_was_meant() -> None:
    for wrong, right in {"--dryrun": "--dry-run", "--dry_run=yes": "--dry-run", "--hlep": "--help"}.items():
        ended = run_script("pretrain_gpt.sh", wrong)
        assert ended.code == 2 and f"error: {wrong.split('=')[0]}: it is not an option" in ended.errors
        assert ended.output == "" and f"Write {right}." in ended.errors
    for wrong, right in {
        "PIPELINE_PARRALEL": "PIPELINE_PARALLEL",
        "TRAIN_ITER": "TRAIN_ITERS",
        "MODLE": "MODEL",
    }.items():
        ended = dry_run(**{wrong: "2"})
        assert ended.code == 2 and f"error: {wrong}: it is not a variable" in ended.errors
        assert ended.output == "" and f"Write {right}, or unset {wrong}." in ended.errors
    # Variables with these names may belong to another program.
    assert dry_run(NODE="a", MODELS="b", MODE="c", LS="d", JAVA_PATH="e", CUDA_PATH="f").code == 0


def test_a_check_prints_nothing_and_refuses_what_a_start_would() -> None:
    ended = run_script("pretrain_gpt.sh", "--check", "--bf16", env={"MODEL": "335m"})
    assert (ended.code, ended.output) == (0, "")
    ended = run_script("pretrain_gpt.sh", "--check", env={"DATA_PATH": "/data/a", "TOKENIZER_MODEL": "/data/tokenizer"})
    assert ended.code == 2 and "error: DATA_PATH: /data/a.idx does not exist" in ended.errors


def test_help_names_every_variable_and_a_script_in_the_place_of_a_flag_is_refused_by_one() -> None:
    ended = run_script("pretrain_gpt.sh", "pretrain_gpt.py")
    assert ended.code == 2 and "MEGATRON_LM=/path/to/checkout" in ended.errors
    shown = run_script("pretrain_gpt.sh", "--help")
    assert shown.code == 0
    for variable in {pair.split("=")[0] for given in BAD for pair in given.split(";")} | {"VOCAB_FILE", "MERGE_FILE"}:
        assert variable in shown.output, variable


@pytest.mark.parametrize(
    "flags, preset",
    [("", "vanilla"), ("--optimus-cc", "paper"), ("--optimus-cc balanced", "balanced"),
     ("--optimus-cc --bf16", "paper"), ("--num-experts 4 --expert-model-parallel-size 2", "vanilla"),
     ("--inter_grad_comp", "compressed"),
     ("--dp-compression-format int4", "compressed")],
)  # fmt: skip
def test_each_preset_has_a_folder_of_checkpoints(flags: str, preset: str, tmp_path: Path) -> None:
    launch = run_script("pretrain_gpt.sh", "--dry-run", *flags.split(), env={}, cwd=tmp_path).launch
    assert launch.value("--save") == str(tmp_path / f"checkpoints/gpt-125m-{preset}")


@pytest.mark.parametrize("other", ["gpt-125m", "gpt-125m-vanilla"])
def test_switching_the_preset_does_not_start_anew_in_silence(other: str, tmp_path: Path) -> None:
    held = tmp_path / "checkpoints" / other
    held.mkdir(parents=True)
    (held / "latest_checkpointed_iteration.txt").write_text("4")
    mine = tmp_path / "checkpoints/gpt-125m-balanced"

    def asked(**variables: str) -> Ended:
        return run_script("pretrain_gpt.sh", "--check", "--optimus-cc", "balanced", env=variables, cwd=tmp_path)

    refused = asked()
    assert refused.code == 2 and f"'{mine}' holds no checkpoint, and '{held}' does" in refused.errors
    assert f"CHECKPOINT_DIR={held} CONTINUE=yes goes on from it, CHECKPOINT_DIR={mine} starts anew" in refused.errors
    assert asked(CHECKPOINT_DIR=str(held)).code == asked(CHECKPOINT_DIR=str(mine)).code == 0
    mine.mkdir()
    (mine / "latest_checkpointed_iteration.txt").write_text("2")
    assert asked().code == 0, "its own is there"


def test_a_checkpoint_of_another_shape_or_compression_goes_on_only_if_told_to(tmp_path: Path) -> None:
    # Beside this copy there is no .venv, so Python is a stand-in, which ends at once.
    shutil.copytree(
        ROOT / "scripts", tmp_path / "scripts", ignore=lambda folder, _: [] if folder.endswith("scripts") else _
    )
    programs, folder = tmp_path / "bin", tmp_path / "run"
    programs.mkdir()
    (programs / "python").write_text("#!/bin/sh\n")
    (programs / "python").chmod(0o755)
    settings = {"MODEL": "tiny", "CHECKPOINT_DIR": str(folder), "PATH": f"{programs}:/usr/bin:/bin"}

    def run(*flags: str, **variables: str) -> Ended:
        return run_script(str(tmp_path / "scripts/pretrain_gpt.sh"), *flags, env=settings | variables, cwd=tmp_path)

    compressed = ["--optimus-cc", "balanced", "--compression-seed=7"]
    assert run(*compressed).code == 0
    assert run("--check").code == 0, "nothing was saved"
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    for same in ([], ["--lr", "1", "--bf16", "--compression-metrics"]):
        assert run("--check", *compressed, *same, TRAIN_ITERS="9", NODES="2", MASTER_ADDR="n").code == 0
    other = run("--check", *compressed, NUM_LAYERS="8")
    assert (
        other.code == 2
        and "with other flags: now --num-layers 8;then --num-layers 4. Give another folder" in other.errors
    )
    vanilla = run("--check")
    assert vanilla.code == 2 and "then --compression-seed 7;then --optimus-cc balanced. Give" in vanilla.errors
    assert run(CONTINUE="yes").code == 0 and run("--check").code == 0, "it is a run of this kind now"
    assert run("--check", *compressed).code == 2
