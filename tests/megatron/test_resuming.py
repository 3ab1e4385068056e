"""A run that was resumed is the run that never stopped, to the bit: weights, losses, residuals and factors."""

import json
from pathlib import Path

import pytest

from tests.megatron.checkpoint_runs import CB_FE_SC, SAVE_EVERY, assert_goes_on, only, run

SHARDED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
INTERLEAVED = ["--num-layers-per-virtual-pipeline-stage", "1"]
IN_BACKGROUND = ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]


@pytest.mark.parametrize(
    ("ckpt_format", "flags"),
    [
        ("torch", ["--deterministic-mode", "--use-distributed-optimizer"]),
        ("torch", ["--bf16", "--use-distributed-optimizer", *INTERLEAVED]),
        pytest.param("torch_dist", INTERLEAVED, marks=pytest.mark.full),
        ("torch_dist", ["--bf16", *SHARDED]),
        ("torch_dist", [*IN_BACKGROUND, *SHARDED, *INTERLEAVED]),
        ("torch_dist", [*IN_BACKGROUND, "--bf16", "--compression-state-dtype", "bf16"]),
    ],
    ids=[
        "torch, fp32, deterministic, distributed optimizer",
        "torch, bf16, distributed optimizer, interleaved",
        "torch_dist, fp32, interleaved",
        "torch_dist, bf16, distributed optimizer, overlapped",
        "async, fp32, distributed optimizer, overlapped, interleaved",
        "async, bf16, bf16 state",
    ],
)
def test_a_resumed_run_is_the_rest_of_the_run_that_never_stopped(
    ckpt_format: str, flags: list[str], tmp_path: Path
) -> None:
    argv = [*CB_FE_SC, *flags, "--ckpt-format", ckpt_format]
    in_background = "--async-save" in flags
    folder = tmp_path / "whole"
    whole = run([*argv, "--save", str(folder), "--save-interval", str(SAVE_EVERY)])
    remembered = [run.probed["remembered"] for run in whole]
    assert all(facts["dp_compression"]["buckets"] for facts in remembered)
    assert any(facts.get("compressed_backprop", {}).get("states") for facts in remembered)
    assert_files_come_first(whole[0].probed["saves"], in_background=in_background)
    assert_described(folder, 4)

    # What only loads needs no writer in the background, whose start takes longer than the run.
    argv = [flag for flag in argv if flag not in IN_BACKGROUND]
    for iteration in (2, 4, 6):
        resumed = run([*argv, "--load", str(only(folder, iteration, tmp_path / str(iteration)))])
        assert_goes_on(resumed, whole, iteration)
        assert not [line for line in resumed[0].probed["ours"] if "warning" in line]


def assert_files_come_first(saves: list[dict], *, in_background: bool) -> None:
    """Our files are whole before the tracker names the iteration, and before the background writer has them."""
    names = [f"iter_{iteration:07d}" for iteration in (2, 4, 6, 8)]
    turns = [save["tracker's turn"] for save in saves if "tracker's turn" in save]
    # The first rank asks for the tracker's name again in other places; each save's first time counts.
    for count, name in enumerate(names, start=1):
        turn = next(turn for turn in turns if turn["whole"] == names[:count])
        assert turn["tracker"] != str(int(name.removeprefix("iter_")))
    scheduled = [save["background"] for save in saves if "background" in save]
    assert len(scheduled) == (4 if in_background else 0), "not saved in the background"
    for count, save in enumerate(scheduled, start=1):
        assert save["whole"] == names[:count] and save["tracker"] in (None, *map(str, (2, 4, 6)[: count - 1]))


def assert_described(folder: Path, iteration: int) -> None:
    files = folder / f"iter_{iteration:07d}" / "optimus_cc"
    assert sorted(path.name for path in files.iterdir()) == [f"rank_0000{r}.pt" for r in range(4)] + ["topology.json"]
    described = json.loads((files / "topology.json").read_text())
    assert described["iteration"] == iteration and described["ranks"] == 4
    assert described["topology"]["--pipeline-model-parallel-size"] == 2
    assert [file["size"] for file in described["files"]] == [p.stat().st_size for p in sorted(files.glob("*.pt"))]
    assert not list(folder.glob(".optimus*")), "what is written first is moved, not copied"
