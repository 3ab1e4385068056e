"""What happens to the state where a checkpoint is not the one that this run would have written: said, or refused."""

import functools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks
from tests.megatron.checkpoint_runs import CB_FE_SC, SHORT, Tee, install_and_watch, run
from tests.megatron_runs import TINY_GPT, MegatronRun, run_megatron

PP2 = ["--pipeline-model-parallel-size", "2"]
ON_FOUR = (4, PP2)
# The runs differ in their number of iterations, on which Megatron's schedules insist otherwise.
TORCH_DIST = ["--ckpt-format", "torch_dist", "--override-opt-param-scheduler"]
STEPS = 2
"""Iterations of the run that saves; the ones that load it make one more."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a run with all three techniques, after its last iteration."""
    folder = tmp_path_factory.mktemp("saved")
    run([*CB_FE_SC, *TORCH_DIST, "--train-iters", str(STEPS), "--save", str(folder), "--save-interval", str(STEPS)])
    return folder


def resumed(folder: Path, flags: Sequence[str], *, layout: Any = ON_FOUR, step: int = STEPS) -> list[str]:
    """What a run that loads iteration `step` of `folder` says about the state, after it has trained on."""
    here = ["--load", str(folder), "--ckpt-step", str(step), "--train-iters", str(step + 1)]
    runs = run([*TORCH_DIST, *flags, *here], layout)
    assert all(len(r.losses) == (step + 1 if "--finetune" in flags else 1) for r in runs)
    return about_state(runs)


def about_state(runs: Sequence[MegatronRun]) -> list[str]:
    said = [line for line in runs[0].probed["ours"] if "afresh" in line or "ignored" in line]
    assert not [line for r in runs[1:] for line in r.probed["ours"] if "afresh" in line], "one rank speaks for all"
    return said


def test_another_topology_starts_afresh_and_trains_on(saved: Path) -> None:
    line, ignored = resumed(saved, ["--compressed-backprop"], layout=(4, ["--pipeline-model-parallel-size", "4"]))
    assert ignored == "the checkpoint's state of data-parallel compression is ignored: switched off in this run"
    assert "--pipeline-model-parallel-size is 4 here and 2 in the checkpoint" in line


def test_another_rank_resets_one_technique_and_leaves_the_other(saved: Path) -> None:
    (line,) = resumed(saved, [*CB_FE_SC, "--compressed-backprop-rank", "8"])
    assert "compressed backpropagation starts afresh" in line and "data-parallel" not in line


def test_other_gradient_buckets_reset_data_parallel_compression_on_all_ranks(saved: Path) -> None:
    # Several buckets on the first stage only: the other ranks have to hear of it.
    (line,) = resumed(saved, [*CB_FE_SC, "--overlap-grad-reduce", "--ddp-num-buckets", "2"])
    assert "the state of data-parallel compression starts afresh" in line and "bucket" in line


@pytest.mark.parametrize("flag", ["--finetune", "--no-load-optim"])
def test_what_resets_the_optimizer_resets_us_and_is_said(flag: str, saved: Path) -> None:
    (line,) = resumed(saved, [*CB_FE_SC, flag])
    assert line.endswith(f": {flag}")


def test_compression_is_switched_off_and_on_again_between_checkpoints(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(saved, folder)
    again = ["--save", str(folder), "--save-interval", "1"]

    # Off, with us installed: the state is ignored, and the next checkpoint has none.
    (line,) = resumed(folder, again)
    assert "is ignored" in line
    assert not (folder / "iter_0000003" / "optimus_cc").exists()
    (line,) = resumed(folder, CB_FE_SC, step=3)
    assert "the checkpoint has no state of it" in line

    # Off, without us: vanilla Megatron writes the same iteration again, and leaves our files in its folder.
    plain = [*TORCH_DIST, "--train-iters", str(STEPS), "--save", str(folder), "--save-interval", str(STEPS)]
    run_megatron(4, [*PP2, *SHORT, *plain])
    assert (folder / "iter_0000002" / "optimus_cc").exists()
    (line,) = resumed(folder, CB_FE_SC)
    assert "written again without Optimus-CC" in line


def _refused(argv: list[str], on_rank_1: Callable[[], list[str]] | None = None) -> tuple[Any, list[str], int]:
    """How a rank ends: its exit status or our error, our lines, and how many steps it made.

    `on_rank_1` spoils something there, and returns further flags.
    """
    import os
    import sys

    from megatron.training import training

    from optimus_cc_ext import pretrain_gpt

    steps: list[int] = []
    train_step = training.train_step

    @functools.wraps(train_step)
    def counting(*args: Any, **kwargs: Any) -> Any:
        steps.append(1)
        return train_step(*args, **kwargs)

    training.train_step = counting
    sys.argv = ["pretrain_gpt.py", *TINY_GPT, *argv]
    if on_rank_1 is not None and os.environ["RANK"] == "1":
        sys.argv += on_rank_1()
    install_and_watch()
    sys.stderr = sys.stdout
    code: Any = None
    try:
        pretrain_gpt.main()
    except SystemExit as ended:
        code = ended.code
    except OptimusError as error:
        code = str(error)
    return code, [line for line in Tee.printed if line.startswith("optimus-cc: error")], len(steps)


def test_a_damaged_file_of_one_rank_ends_all_ranks_before_any_uses_its_state(saved: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    shutil.copytree(saved, folder)
    damaged = folder / "iter_0000002" / "optimus_cc" / "rank_00002.pt"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    flags = [*PP2, *SHORT, *CB_FE_SC, *TORCH_DIST, "--load", str(folder), "--train-iters", str(STEPS + 1)]
    ended = run_ranks(4, _refused, flags, timeout=60)
    assert [(code, steps) for code, _, steps in ended] == [(2, 0)] * 4
    (line,) = [line for _, lines, _ in ended for line in lines]
    assert f"rank 2: {damaged}: it has" in line and f"remove {damaged.parent}" in line

    # The cure that it names.
    shutil.rmtree(damaged.parent)
    (line,) = resumed(folder, CB_FE_SC)
    assert "the checkpoint has no state of it" in line


def test_ranks_that_see_different_folders_all_end_before_any_uses_its_state(saved: Path, tmp_path: Path) -> None:
    # Each folder is right by itself: another save of the same run, as a node sees it that did not mount the shared one.
    run([*CB_FE_SC, *TORCH_DIST, "--train-iters", str(STEPS), "--save", str(tmp_path), "--save-interval", str(STEPS)])
    flags = [*PP2, *SHORT, *CB_FE_SC, *TORCH_DIST, "--load", str(saved), "--train-iters", str(STEPS + 1)]
    ended = run_ranks(4, _refused, flags, functools.partial(list, ["--load", str(tmp_path)]), timeout=60)
    assert [(code, steps) for code, _, steps in ended] == [(2, 0)] * 4
    (line,) = [line for _, lines, _ in ended for line in lines]
    assert "ranks find different files" in line


def _no_large_files() -> list[str]:
    import resource
    import signal

    # As on a full disk: the first large file that this rank writes is its share of the state.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    return []


def test_where_one_rank_cannot_write_its_state_all_end_and_no_checkpoint_counts(tmp_path: Path) -> None:
    flags = [
        *PP2,
        *SHORT,
        *CB_FE_SC,
        *TORCH_DIST,
        "--train-iters",
        "1",
        "--save",
        str(tmp_path),
        "--save-interval",
        "1",
    ]
    ended = run_ranks(4, _refused, flags, _no_large_files, timeout=60)
    for error, _, steps in ended:
        assert steps == 1
        assert "rank 1: writing the state of compression failed: " in str(error)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    assert not list(tmp_path.glob("iter_*/*.distcp"))
