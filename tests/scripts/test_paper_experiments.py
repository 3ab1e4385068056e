"""scripts/paper: every experiment's command line against the paper's facts, and through our parser."""

import argparse
import contextlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS, PIPELINE_BACKWARD
from optimus_cc_ext.config.flags import request_from
from optimus_cc_ext.config.presets import resolve
from tests.forked_ranks import run_ranks
from tests.shell_scripts import ROOT, Launch, run_script

pytestmark = pytest.mark.ci

EXPERIMENTS = sorted(
    path.relative_to(ROOT / "scripts/paper").with_suffix("").as_posix()
    for path in (ROOT / "scripts/paper").glob("*/*.sh")
)

# The published artifact's scripts have these sizes; 335M is its functionality check on one machine of 8 GPUs.
SHAPES = {"335m": (24, 1024, 16), "2.5b": (52, 1920, 24), "8.3b": (72, 3072, 24)}
LAYOUTS = {"335m": (2, 2, 8), "2.5b": (8, 4, 128), "8.3b": (8, 4, 128)}
"""Tensor parallel size, pipeline parallel size, processes, by model."""

ITERATIONS = {"table2": 230_000, "figure10": 10, "figure11": 1000, "figure12": 10}
EVERYWHERE = {
    "seq-length": 1024, "max-position-embeddings": 1024, "micro-batch-size": 8, "global-batch-size": 512,
    "lr": 1.5e-4, "min-lr": 1e-5, "lr-decay-iters": 320_000, "lr-warmup-fraction": 0.01, "weight-decay": 0.01,
    "clip-grad": 1.0, "log-interval": 1, "eval-interval": 100, "eval-iters": 10,
}  # fmt: skip
WORDS = {
    "lr-decay-style": "cosine", "split": "949,50,1", "tokenizer-type": "GPT2BPETokenizer",
    "recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": "1",
}  # fmt: skip

PRETRAINING = ("baseline", "cb", "cb-fe", "cb-fe-sc")
COMPLETE = (
    {f"table2/{model}-{variant}" for model in SHAPES for variant in PRETRAINING}
    | {f"figure10/{model}-{variant}" for model in SHAPES for variant in PRETRAINING}
    | {f"figure12/{model}-{variant}" for model in ("2.5b", "8.3b") for variant in ("baseline", "cb", "cb-lep")}
    | {"table2/2.5b-cb-no-lep", "figure11/8.3b-cb-all"}
)


@dataclass(frozen=True)
class Techniques:
    """Techniques that an experiment of the paper switches on."""

    cb: bool = False
    lep: bool = True
    messages: str = "epilogue"
    fe: bool = False
    sc: bool = False
    statistics: bool = False


def techniques_of(experiment: str) -> Techniques:
    """Return the techniques by the experiment's name: only in figure 12, CB is without lazy error propagation."""
    figure, _, rest = experiment.partition("/")
    match rest.partition("-")[2]:
        case "baseline":
            return Techniques()
        case "cb":
            return Techniques(cb=True, lep=figure != "figure12")
        case "cb-no-lep":
            return Techniques(cb=True, lep=False)
        case "cb-lep":
            return Techniques(cb=True)
        case "cb-all":
            return Techniques(cb=True, messages="all", statistics=True)
        case "cb-fe":
            return Techniques(cb=True, fe=True)
        case "cb-fe-sc":
            return Techniques(cb=True, fe=True, sc=True)
    raise AssertionError(f"{experiment}: no such variant in the paper")


def model_of(experiment: str) -> str:
    return experiment.partition("/")[2].partition("-")[0]


def dry_run(experiment: str, *arguments: str, **env: str) -> Launch:
    return run_script(f"paper/{experiment}.sh", "--dry-run", *arguments, env=env).launch


def test_every_experiment_of_the_paper_has_its_file() -> None:
    assert set(EXPERIMENTS) == COMPLETE


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_command_has_the_papers_model_layout_and_schedule(experiment: str) -> None:
    launch, model = dry_run(experiment), model_of(experiment)
    shape = tuple(int(launch.value(f"--{name}")) for name in ("num-layers", "hidden-size", "num-attention-heads"))
    assert shape == SHAPES[model]
    tensor, pipeline, processes = LAYOUTS[model]
    assert int(launch.value("--tensor-model-parallel-size")) == tensor
    assert int(launch.value("--pipeline-model-parallel-size")) == pipeline
    nodes = int(launch.torchrun[launch.torchrun.index("--nnodes") + 1]) if "--nnodes" in launch.torchrun else 1
    assert launch.torchrun[:2] == ["--nproc-per-node", "8"] and nodes * 8 == processes
    assert int(launch.value("--train-iters")) == ITERATIONS[experiment.partition("/")[0]]
    assert {name: float(launch.value(f"--{name}")) for name in EVERYWHERE} == EVERYWHERE
    assert {name: launch.value(f"--{name}") for name in WORDS} == WORDS
    assert not {"--bf16", "--fp16"} & set(launch.flags), "the paper trained in fp32"
    assert ("--save" in launch.flags) == experiment.startswith("table2/"), "the others time a few first iterations"


def resolve_all(command_lines: list[tuple[int, list[str]]]) -> list[OptimusConfig]:
    """Resolve each command line through Megatron's parser and validation, and through ours, in a rank that holds
    Megatron.
    """
    from megatron.training import arguments

    from optimus_cc_ext.hooks.arguments import prepare_parser
    from optimus_cc_ext.hooks.facts import layout_from
    from optimus_cc_ext.tools.cpu import cpu_runtime

    cpu_runtime.activate()
    parser = prepare_parser(arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
    configs = []
    for world_size, flags in command_lines:
        os.environ["WORLD_SIZE"] = str(world_size)
        args = parser.parse_args(flags)
        args.rank, args.world_size = 0, world_size
        with contextlib.redirect_stdout(io.StringIO()):
            arguments.validate_args(args)
        resolution = resolve(request_from(args), layout_from(args), args)
        assert resolution.notes == ()
        configs.append(resolution.config)
    return configs


@pytest.mark.full
def test_every_command_is_accepted_and_means_the_papers_techniques() -> None:
    command_lines = [(LAYOUTS[model_of(name)][2], dry_run(name).flags) for name in EXPERIMENTS]
    command_lines += [(4, dry_run(name, "--scale", "tiny").flags) for name in EXPERIMENTS]
    [configs] = run_ranks(1, resolve_all, command_lines, timeout=120, env={"OPTIMUS_CC_DEVICE": "cpu"})
    paper, tiny = configs[: len(EXPERIMENTS)], configs[len(EXPERIMENTS) :]
    for experiment, config, small in zip(EXPERIMENTS, paper, tiny, strict=True):
        wanted = techniques_of(experiment)
        for resolved, ranks in ((config, (16, 128)), (small, (4, 16))):
            assert facts(resolved) == expected(wanted, model_of(experiment), ranks, resolved is small), experiment


def facts(config: OptimusConfig) -> dict[str, Any]:
    """Return the settings of a configuration that have an effect."""
    known: dict[str, Any] = {"cb": config.is_on(PIPELINE_BACKWARD), "fe": config.fused_embedding_sync}
    known |= {"sc": config.is_on(DP_GRADIENTS), "statistics": config.compression_error_statistics}
    if known["cb"]:
        known |= {"cb rank": config.compressed_backprop_rank, "messages": config.compressed_backprop_messages}
        known |= {"lep": config.lazy_error_propagation, "residual": config.residual_across_iterations}
    if known["sc"]:
        known |= {"sc rank": config.dp_compression_rank, "stages": config.dp_compression_stages}
        known |= {"feedback": config.dp_error_feedback, "warm-up": config.dp_compression_warmup}
    return known


def expected(wanted: Techniques, model: str, ranks: tuple[int, int], tiny: bool) -> dict[str, Any]:
    known: dict[str, Any] = {"cb": wanted.cb, "fe": wanted.fe, "sc": wanted.sc, "statistics": wanted.statistics}
    if wanted.cb:
        known |= {
            "cb rank": ranks[0],
            "messages": wanted.messages,
            "lep": wanted.lep,
            "residual": "carry" if wanted.lep else "drop",
        }
    if wanted.sc:
        # The first 75 % of 4 stages are 3, of 2 stages both.
        stages = 2 if tiny or model == "335m" else 3
        known |= {"sc rank": ranks[1], "stages": stages, "feedback": True, "warm-up": 0.0}
    return known


def test_variables_and_flags_win_over_the_papers_values() -> None:
    launch = dry_run(
        "figure10/335m-cb-fe-sc", "--bf16", "--lr-decay-iters=5",
        TENSOR_PARALLEL="8", PIPELINE_PARALLEL="4", NODE_LIST="a b c d", NODE_RANK="2", MASTER_PORT="7",
    )  # fmt: skip
    assert launch.flags[-2:] == ["--bf16", "--lr-decay-iters=5"]
    assert launch.value("--dp-compression-stages") == "3", "the artifact's 335M scripts of figure 10 have 4 stages"
    assert launch.torchrun[2:6] == ["--nnodes", "4", "--node-rank", "2"]


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["--scale", "huge"], {}, "--scale: 'huge' is not known. Give paper or tiny."),
        (["--scale"], {}, "--scale: it needs a value. Give paper or tiny."),
        ([], {"SCALE": "huge"}, "--scale: 'huge' is not known"),
        ([], {"NODES": "two"}, "NODES: 'two' is not a whole number"),
        ([], {}, "MASTER_ADDR: it is not set, and there are 16 nodes"),
    ],
)
def test_a_bad_value_is_refused_before_a_folder_is_made(
    arguments: list[str], env: dict[str, str], message: str, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    ended = run_script("paper/table2/2.5b-cb.sh", *arguments, env={"RESULTS": str(results), **env})
    assert ended.code == 2 and message in ended.errors
    assert not results.exists()


def test_all_sh_runs_every_experiment_and_figure_14() -> None:
    ended = run_script("paper/all.sh", "--scale", "tiny", "--dry-run", "--only", "figure1[124]*")
    assert ended.code == 0, ended.errors
    named = [line.removeprefix("== ") for line in ended.errors.splitlines() if line.startswith("== ")]
    assert sorted(named) == [name for name in EXPERIMENTS if name[:8] in ("figure11", "figure12")] + ["figure14"]
    assert ended.output.count("torch.distributed.run") == 7 and "scripts.paper.figure14" in ended.output
    refused = run_script("paper/all.sh", "--dry-run", "--only", "figure13*")
    assert refused.code == 2 and "no experiment fits 'figure13*'" in refused.errors
