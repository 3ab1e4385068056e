"""A resumed run equals, to the bit, the run that never stopped; if that is impossible, a message or a refusal says
so.
"""

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext.hooks import start
from tests.megatron import interventions
from tests.megatron import runs as table
from tests.megatron.runs import resumed
from tests.megatron.specs import Run, full, in_ci, uses
from tests.megatron_runs import run_megatron

PARTS = ("losses", "grad_norms", "random_states", "steps")


def assert_goes_on(run: Run, whole: Run, iteration: int) -> None:
    """Assert that a run that was resumed after `iteration` iterations equals the rest of the whole run, to the bit."""
    for number, (mine, its) in enumerate(zip(run.ranks, whole.ranks, strict=True)):
        for part in PARTS:
            assert getattr(mine, part) == getattr(its, part)[iteration:], f"{part} of rank {number} from {iteration} on"
        assert mine.weights == its.weights, f"weights of rank {number}, resumed at {iteration}"
        assert mine.ours.remembered == its.ours.remembered, f"state of rank {number}, resumed at {iteration}"


# -- the same run -----------------------------------------------------------------------------------------------------


@uses(
    (table.SAVED, resumed(table.SAVED, 4)),
    full(table.SAVED_SHARDED, resumed(table.SAVED_SHARDED, 4)),
    full(table.SAVED_IN_BACKGROUND, resumed(table.SAVED_IN_BACKGROUND, 4)),
    *(full(run, *(resumed(run, iteration) for iteration in (2, 4, 6))) for run in table.SAVED_OFTEN),
)
def test_a_resumed_run_is_the_rest_of_the_run_that_never_stopped(runs):
    whole, *parts = runs
    remembered = [rank.ours.remembered for rank in whole.ranks]
    if "--dp-compression " in whole.spec.ours:
        assert all(facts["dp_compression"]["states"] for facts in remembered)
    assert any(facts.get("compressed_backprop", {}).get("states") for facts in remembered)
    saved = range(2, 9, 2) if "--save-interval 2" in whole.spec.flags else (4, 8)
    assert_files_come_first(whole.ranks[0].saves, [*saved], in_background="--async-save" in whole.spec.flags)
    assert_described(whole.folder, 4, ranks=len(whole.ranks))
    for part in parts:
        assert_goes_on(part, whole, int(part.spec.name.split()[-1]))
        assert not [line for line in part.said if "warning" in line]
        restored = f"is restored from iteration {part.spec.name.split()[-1]}"
        assert len([line for line in part.said if line.endswith(restored)]) == 1


# Megatron adds a folder to what --save says, in whatever way that is spelled.
NOT_PERSISTENT = table.saving(
    "not persistent", "--ckpt-format torch_dist --non-persistent-ckpt-type global --non-persistent-save-interval 6",
    table.CB4, layout=table.PP2,
).but("not persistent, in a subfolder", flags="--save {here}/.")  # fmt: skip


@uses(full(NOT_PERSISTENT, resumed(NOT_PERSISTENT, 4)))
def test_a_run_goes_on_from_a_newer_checkpoint_that_is_not_persistent(runs):
    whole, part = runs
    assert_goes_on(part, whole, 6)
    assert [line for line in part.said if line.endswith("is restored from iteration 6")]


def assert_files_come_first(saves: list[dict[str, Any]], saved: list[int], *, in_background: bool) -> None:
    """Assert that our files are complete before the tracker names the iteration.

    In the background, they must be complete only after training has gone on.
    """
    names = [f"iter_{iteration:07d}" for iteration in saved]
    turns, scheduled, finished = (
        [save[moment] for save in saves if moment in save] for moment in ("tracker's turn", "background", "finished")
    )
    assert len(scheduled) == (len(saved) if in_background else 0), "not saved in the background"
    # The first rank asks for the tracker file's name in other places, too; the first question of each save counts.
    for count, iteration in enumerate(saved, start=1):
        turn = next(turn for turn in (finished if in_background else turns) if turn["whole"] == names[:count])
        assert turn["tracker"] != str(iteration)
    for count, save in enumerate(scheduled):
        assert save["whole"] == names[:count] and save["tracker"] in (None, *map(str, saved[:count]))


def assert_described(folder: Path, iteration: int, *, ranks: int) -> None:
    files = folder / f"iter_{iteration:07d}" / "optimus_cc"
    expected = [*(f"rank_0000{rank}.pt" for rank in range(ranks)), "topology.json"]
    assert sorted(path.name for path in files.iterdir()) == expected
    described = json.loads((files / "topology.json").read_text())
    assert described["iteration"] == iteration and described["ranks"] == ranks
    assert described["topology"]["--pipeline-model-parallel-size"] == 2
    assert [file["size"] for file in described["files"]] == [p.stat().st_size for p in sorted(files.glob("*.pt"))]
    assert not list(folder.glob(".optimus*")), "what is written first is moved, not copied"


@uses(full(table.SAVED_IN_BACKGROUND, table.FAILED_IN_BACKGROUND, table.AFTER_FAILURE))
def test_a_background_writer_that_fails_ends_all_ranks_and_the_checkpoint_before_counts(runs):
    whole, failed, resumed = runs
    assert {rank.ended for rank in failed.ranks} == {2}
    assert "rank 1: writing the compression state failed: the disk is full" in the_error(failed)
    assert (failed.folder / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert list(failed.folder.glob("iter_*8/*.distcp")) and not (failed.folder / "iter_0000008" / "optimus_cc").exists()
    assert_goes_on(resumed, whole, 4)


@pytest.mark.full
@pytest.mark.parametrize(
    "function, done, ours",
    [
        ("write_rank_file", True, False),
        ("publish", False, False),
        ("publish", True, True),
    ],
    ids=["when written", "before it is moved", "before the tracker file"],
)
@uses(table.SAVED_IN_BACKGROUND)
def test_a_kill_while_a_background_save_ends_leaves_all_or_none_and_the_run_goes_on(
    runs: Run, tmp_path: Path, function: str, done: bool, ours: bool
) -> None:
    killed, spec = tmp_path / "killed", runs.spec
    argv = shlex.split(f"{spec.layout[1]} {spec.flags} {spec.ours}".format(here=killed))
    before = partial(_prepare, partial(interventions.kill_in_the_last_save, function, done=done))
    with pytest.raises(
        AssertionError, match=r"died without an answer|Connection"
    ):  # The surviving rank ends with an error of its connection.
        run_megatron(2, argv, before=before)
    assert (killed / "latest_checkpointed_iteration.txt").read_text() == "4"
    assert (killed / "iter_0000008").exists() and (killed / "iter_0000008" / "optimus_cc").exists() == ours
    resumed = run_megatron(2, [*argv, "--load", str(killed)], before=_prepare)
    assert_goes_on(Run(spec, resumed, killed), runs, 4)
    assert (killed / "iter_0000008" / "optimus_cc").exists() and not list(killed.glob(".optimus*"))


def _prepare(intervention: Callable[[], None] = lambda: None) -> None:
    intervention()
    start()


# -- another run ------------------------------------------------------------------------------------------------------


def about_state(run: Run) -> list[str]:
    """Return the lines about the state that a loading run prints after it has trained on."""
    iterations = {"--finetune": 8, "--ckpt-step 5": 3, "--exit-interval 5": 1}
    expected = next((n for flag, n in iterations.items() if flag in run.spec.flags), 4)
    assert all(len(rank.losses) == expected for rank in run.ranks)
    assert not [line for rank in run.ranks[1:] for line in rank.said if " is reset " in line], "one rank speaks for all"
    return [line for line in run.said if " is reset " in line or "ignored" in line]


@uses(full(table.IN_FOUR_STAGES))
def test_another_topology_starts_afresh_and_trains_on(runs):
    line, ignored = about_state(runs)
    assert ignored == "the checkpoint's state of DP gradients is ignored: this run does not use it"
    assert "--pipeline-model-parallel-size is 4 here and 2 in the checkpoint" in line


@uses(full(table.AT_ANOTHER_RANK))
def test_another_rank_resets_one_technique_and_leaves_the_other(runs):
    (line,) = about_state(runs)
    assert "pipeline backward is reset" in line and "data-parallel" not in line


@uses(full(table.IN_OTHER_BUCKETS))
def test_other_gradient_buckets_reset_data_parallel_compression_on_all_ranks(runs):
    # Only the first stage has several buckets, and the other ranks have to learn of them.
    (line,) = about_state(runs)
    assert "the state of DP gradients is reset" in line and "bucket" in line


@uses(*map(full, (table.FINETUNED, table.WITHOUT_OPTIMIZER)))
def test_what_resets_the_optimizer_resets_us_and_is_said(runs):
    (line,) = about_state(runs)
    assert line.endswith(f": {runs.spec.flags.split()[-1]}")


@uses(full(table.SWITCHED_OFF, table.SWITCHED_ON))
def test_switched_off_the_state_is_ignored_and_the_next_checkpoint_has_none(runs):
    off, on = runs
    (line,) = about_state(off)
    assert "is ignored" in line
    assert (off.folder / "iter_0000005").exists() and not (off.folder / "iter_0000005" / "optimus_cc").exists()
    (line,) = about_state(on)
    assert "the checkpoint does not contain it" in line


@uses(full(table.OVERWRITTEN, table.AFTER_VANILLA))
def test_state_beside_a_checkpoint_that_vanilla_wrote_again_is_not_taken(runs):
    overwritten, loaded = runs
    assert (overwritten.folder / "iter_0000004" / "optimus_cc").exists(), "vanilla leaves our files in its folder"
    (line,) = about_state(loaded)
    assert "overwritten without Optimus-CC" in line


def the_error(run: Run) -> str:
    """Return the one line in which a run said why it ended."""
    (line,) = [line for rank in run.ranks for line in rank.said if line.startswith("error")]
    return line


def assert_all_ended_before_the_first_step(run: Run) -> str:
    """Assert that all ranks ended with status 2 before the first step; return the one line that one of them printed."""
    assert [(rank.ended, len(rank.losses)) for rank in run.ranks] == [(2, 0)] * 4
    return the_error(run)


@uses(in_ci(table.DAMAGED, table.CURED))
def test_a_damaged_file_of_one_rank_ends_all_ranks_before_any_uses_its_state(runs):
    damaged, cured = runs
    file = damaged.folder / "iter_0000004" / "optimus_cc" / "rank_00002.pt"
    line = assert_all_ended_before_the_first_step(damaged)
    assert f"rank 2: {file}: it has" in line and f"remove {file.parent}" in line
    (line,) = about_state(cured)
    assert "the checkpoint does not contain it" in line


@uses(full(table.ELSEWHERE))
def test_ranks_that_see_different_folders_all_end_before_any_uses_its_state(runs):
    # Each folder is valid by itself: one of them is another save of the same run, as a node that did not mount the
    # shared folder sees it.
    assert "ranks find different files" in assert_all_ended_before_the_first_step(runs)


# -- other disks ------------------------------------------------------------------------------------------------------

ON_LOCAL_DISKS = table.saving(
    "balanced on disks of the nodes", "--ckpt-format torch --fp16 --initial-loss-scale 1024",
    "--optimus-cc balanced",
    before=(partial(interventions.nodes_of, 2), partial(interventions.disks_of_nodes, 2)),
)  # fmt: skip
FROM_LOCAL_DISKS = replace(
    resumed(ON_LOCAL_DISKS, 4),
    spoil=interventions.go_back_on_both_disks,
    flags=f"{ON_LOCAL_DISKS.flags} --load {{here}}",
)
NOT_SHARED = replace(
    ON_LOCAL_DISKS, name="low rank on disks of the nodes", ours=table.ALL_MESSAGES, ends=True,
    before=(*ON_LOCAL_DISKS.before, interventions.impatient),
)  # fmt: skip
THROUGH_A_LINK = replace(resumed(table.SAVED, 4), name="saved through a link", spoil=interventions.archive_the_last)
CLEANED = replace(
    table.SAVED_IN_BACKGROUND, name="async, cleaned from outside", ends=True,
    before=(interventions.clean_up_before_publishing, interventions.impatient),
)  # fmt: skip
CLEANED_AT_ONCE = replace(
    table.saving("sync, cleaned from outside", "--ckpt-format torch", table.CB4, layout=table.PP2), ends=True,
    before=(*CLEANED.before, interventions.hang_up),
)  # fmt: skip


@uses(full(ON_LOCAL_DISKS, FROM_LOCAL_DISKS))
def test_balanced_goes_on_where_each_node_has_a_disk_of_its_own(runs):
    whole, resumed = runs
    assert not list(whole.folder.glob("node_*/iter_0000004/optimus_cc/*")), "blocks have no state"
    assert_goes_on(resumed, whole, 4)


@uses(NOT_SHARED)
def test_low_rank_on_disks_of_the_nodes_is_refused_before_the_first_step(runs):
    line = assert_all_ended_before_the_first_step(runs)
    assert "rank 2: --save: low rank has a state" in line and "Give all ranks one shared folder of checkpoints" in line


@uses(full(table.SAVED, THROUGH_A_LINK))
def test_a_checkpoint_that_is_a_link_to_another_file_system_is_saved_again(runs):
    whole, resumed = runs
    link = resumed.folder / "iter_0000008"
    assert link.is_symlink()
    assert_goes_on(resumed, whole, 4)
    assert_described(resumed.folder, 8, ranks=4)
    shutil.rmtree(link.resolve().parent)


@uses(full(CLEANED), full(CLEANED_AT_ONCE))
def test_staged_files_that_another_program_deletes_end_all_ranks_with_a_sentence_and_no_checkpoint_counts(runs):
    assert {rank.ended for rank in runs.ranks} == {2}
    line = the_error(runs)
    assert line.startswith(
        f"error: rank 0: {runs.folder}/iter_0000004/optimus_cc cannot be put into the checkpoint: No such"
    )
    assert "in which no other program deletes" in line
    assert not (runs.folder / "latest_checkpointed_iteration.txt").exists()


@uses(full(table.saving("weights only", "--ckpt-format torch_dist --no-save-optim", table.CB4, layout=table.PP2)))
def test_a_checkpoint_without_the_optimizers_state_has_none_of_ours(runs):
    assert (runs.folder / "iter_0000008").exists() and not list(runs.folder.glob("**/optimus_cc*"))


@uses(table.DISK_FULL)
def test_where_one_rank_cannot_write_its_state_all_end_and_no_checkpoint_counts(runs):
    assert [(rank.ended, len(rank.losses)) for rank in runs.ranks] == [(2, 1)] * len(runs.ranks)
    line = the_error(runs)
    assert "rank 1: writing the compression state failed: " in line
    assert "rank_00001.pt cannot be written: File too large" in line, "the limit that stands for a full disk"
    assert not (runs.folder / "latest_checkpointed_iteration.txt").exists()
    assert not list(runs.folder.glob("iter_*/*.distcp"))
