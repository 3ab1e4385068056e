"""The compression state beside a checkpoint, saved and restored by real ranks, without Megatron."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.loading import FoundCheckpoint, Resume
from optimus_cc_ext.checkpoint.saving import Save, on_all_ranks, rehearse
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.ci

SETTINGS: dict[str, dict[str, Any]] = {"dp_compression": {"--dp-compression-rank": 4}}
TOPOLOGY = {"the number of ranks": 2}
RESTORED = ["the state of DP gradients is restored from iteration 7"]


class Remembering:
    """Session whose state is one tensor."""

    config = OptimusConfig(dp_compression_format="low-rank", dp_compression_rank=4)
    trial = None

    def __init__(self, value: float, misfit: str | None = None) -> None:
        self.tensor, self.misfit = torch.full((3,), value), misfit

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": 7, "dp_compression": {"tensor": self.tensor}}

    def load_state_dict(self, state: Any) -> None:
        self.tensor = state["dp_compression"]["tensor"] if "dp_compression" in state else self.tensor

    def mismatches(self, state: Any) -> dict[str, str]:
        return {"dp_compression": self.misfit} if self.misfit and "dp_compression" in state else {}


def start() -> int:
    dist.init_process_group("gloo")
    return dist.get_rank()


def saved(folder: Path, session: Remembering, iteration: int = 7) -> tuple[Path, str]:
    """Save a checkpoint with the state of `session`; return its folder, and the mark of the save."""
    save, iteration_folder = Save(folder, iteration, SETTINGS, TOPOLOGY), folder / f"iter_{iteration:07d}"
    iteration_folder.mkdir(parents=True, exist_ok=True)
    save.stage(session)
    save.finish_writing()
    assert not (iteration_folder / state_files.FOLDER).exists(), "nothing is in the checkpoint before it is published"
    dist.barrier()
    save.publish(iteration_folder)
    dist.barrier()
    return iteration_folder, save.mark


def restored(session: Remembering, folder: Path, mark: str | None, **given: Any) -> list[str]:
    found = FoundCheckpoint(folder, given.pop("iteration", 7), mark)
    return Resume(found, given.pop("settings", SETTINGS), TOPOLOGY, **given).restore(session)


def save_and_restore(folder: Path) -> tuple[float, list[str], list[str]]:
    rank = start()
    checkpoint, mark = saved(folder, Remembering(1.0 + rank))
    session = Remembering(0.0)
    lines = restored(session, checkpoint, mark)
    return float(session.tensor[0]), lines, sorted(file.name for file in (checkpoint / "optimus_cc").iterdir())


def test_each_rank_gets_its_own_state_back(tmp_path: Path) -> None:
    names = ["rank_00000.pt", "rank_00001.pt", "topology.json"]
    found = run_ranks(2, save_and_restore, tmp_path, timeout=60)
    assert found == [(1.0, RESTORED, names), (2.0, RESTORED, names)]


def save_in_background(folder: Path) -> float:
    rank = start()
    session, thread = Remembering(1.0 + rank), ThreadPoolExecutor(1)
    save = Save(folder, 7, SETTINGS, TOPOLOGY)
    save.stage(session, copied=True)
    session.tensor.zero_()  # training goes on
    save.start_writing(thread)
    while not save.is_written():
        pass
    save.finish_writing()
    (folder / "iter_0000007").mkdir(exist_ok=True)
    save.publish(folder / "iter_0000007")
    dist.barrier()
    restored(session, folder / "iter_0000007", save.mark)
    return float(session.tensor[0])


def test_a_thread_writes_the_state_as_it_was(tmp_path: Path) -> None:
    assert run_ranks(2, save_in_background, tmp_path, timeout=60) == [1.0, 2.0]


def a_rank_cannot_write(folder: Path) -> tuple[str, bool]:
    rank = start()
    save = Save(folder, 7, SETTINGS, TOPOLOGY)
    save.stage(Remembering(0.0))
    if rank == 1:
        save._save_folder = folder / "gone"
    with pytest.raises(OptimusError) as failed:
        save.finish_writing()
    return str(failed.value), (folder / state_files.MANIFEST).exists()


def test_a_rank_that_cannot_write_is_named_on_all_ranks_and_nothing_is_described(tmp_path: Path) -> None:
    for said, described in run_ranks(2, a_rank_cannot_write, tmp_path, timeout=60):
        assert said.startswith("rank 1: writing the compression state failed: ") and "gone" in said
        assert not described


def restore_otherwise(folder: Path) -> dict[str, tuple[str, float]]:
    """Return the error, and the state after it, for each way in which the files can be wrong."""
    rank = start()
    checkpoint, mark = saved(folder, Remembering(1.0 + rank))
    other = checkpoint if rank == 0 else saved_alone(folder / "elsewhere", mark)
    tries: dict[str, dict[str, Any]] = {
        "unwanted": {"unwanted": "--finetune"},
        "one misfit": {"misfit": "bucket 0 has another shape" if rank == 1 else None},
        "other settings": {"settings": {"dp_compression": {"--dp-compression-rank": 8}}},
        "without us": {"mark": None},
        "another iteration": {"iteration": 8},
        "another save": {"mark": "another"},
        "another save for one rank": {"mark": "another" if rank == 1 else mark},
        "other files": {"folder": other},
        "off": {"settings": {}},
    }
    answers = {}
    for name, given in tries.items():
        session = Remembering(0.0, given.pop("misfit", None))
        try:
            said = " ".join(restored(session, given.pop("folder", checkpoint), given.pop("mark", mark), **given))
        except OptimusError as error:
            said = str(error)
        answers[name] = (said, float(session.tensor[0]))
    return answers


def saved_alone(folder: Path, mark: str) -> Path:
    """Write files of another save, on this rank's disk only."""
    state_files.start_staging(folder, mark)
    staging = state_files.staging_folder(folder, mark)
    file = state_files.write_rank_file(staging, 0, 7, {})
    manifest = state_files.Manifest(
        iteration=7, checkpoint="of rank 1 alone", topology={}, techniques={}, files=(file, file)
    )
    state_files.write_manifest(staging, manifest)
    (folder / "iter_0000007").mkdir()
    state_files.publish(staging, folder / "iter_0000007")
    return folder / "iter_0000007"


def test_what_does_not_fit_on_one_rank_is_restored_on_none(tmp_path: Path) -> None:
    for answers in run_ranks(2, restore_otherwise, tmp_path, timeout=60):
        assert {state for _, state in answers.values()} == {0.0}
        says = {
            "unwanted": "is reset (empty residuals, new factors): --finetune",
            "one misfit": "bucket 0 has another shape",
            "other settings": "--dp-compression-rank is 8 here and 4 in the checkpoint",
            "without us": "overwritten without Optimus-CC",
            "another iteration": "contains the state of another save (iteration 7)",
            "another save": "contains the state of another save (iteration 7)",
            "another save for one rank": "contains the state of another save (iteration 7)",
            "other files": "ranks find different files in",
            "off": "no technique that keeps state is on",
        }
        for name, expected in says.items():
            assert expected in answers[name][0], name


def a_folder_that_is_gone(folder: Path) -> str:
    start()
    save = Save(folder, 7, SETTINGS, TOPOLOGY)
    save.stage(Remembering(0.0))
    save.finish_writing()
    with pytest.raises(OptimusError) as failed:
        save.publish(folder / "iter_0000007")
    return str(failed.value)


def test_a_state_that_cannot_be_put_into_its_checkpoint_is_an_error_of_all_ranks(tmp_path: Path) -> None:
    said = f"rank 0: {tmp_path}/iter_0000007/optimus_cc cannot be put into the checkpoint: No such file or directory. "
    for line in run_ranks(2, a_folder_that_is_gone, tmp_path, timeout=60):
        assert line.startswith(f"{said}Give all ranks one shared folder of checkpoints")


def one_of_two_runs(folder: Path, saves: int) -> str:
    """Save one iteration again and again, in a run of one rank; return the mark of the last save."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(saves):
        save = Save(folder, 7, SETTINGS, TOPOLOGY)
        save.stage(Remembering(1.0))
        save.finish_writing()
        save.publish(folder / "iter_0000007")
    return save.mark


def test_two_runs_that_save_one_iteration_into_one_folder_at_the_same_time_both_end(tmp_path: Path) -> None:
    (tmp_path / "iter_0000007").mkdir()
    marks = run_ranks(2, one_of_two_runs, tmp_path, 100, timeout=60)
    manifest = state_files.read_manifest(tmp_path / "iter_0000007")
    assert manifest is not None and manifest.checkpoint in marks
    assert "dp_compression" in state_files.read_rank_file(tmp_path / "iter_0000007", manifest, 0)
    assert [path.name for path in tmp_path.rglob("*") if path.is_dir()] == ["iter_0000007", "optimus_cc"]


def rehearsed(folders: list[Path], numbers: int) -> str:
    session = Remembering(0.0)
    session.tensor = torch.zeros(numbers)
    dist.init_process_group("gloo")
    try:
        rehearse(session, [folders[dist.get_rank()]])
    except OptimusError as error:
        return str(error)
    return ""


def test_ranks_that_see_different_folders_are_refused_before_the_first_save(tmp_path: Path) -> None:
    there = [tmp_path / "node 0", tmp_path / "node 1"]
    for said in run_ranks(2, rehearsed, there, 3, timeout=60):
        assert said.startswith("rank 1: --save: low rank has a state to save on each rank")
        assert f"{there[1]}/.optimus_cc_incomplete_" in said and "No such file or directory. Give all ranks one" in said
    assert [*there[0].iterdir()] == [], "the trial leaves nothing"


def test_a_shared_folder_and_a_state_without_tensors_on_disks_of_the_nodes_are_accepted(tmp_path: Path) -> None:
    shared, apart = [tmp_path / "shared"] * 2, [tmp_path / "0", tmp_path / "1"]
    assert run_ranks(2, rehearsed, shared, 3, timeout=60) == run_ranks(2, rehearsed, apart, 0, timeout=60) == ["", ""]
    assert [path.name for path in tmp_path.rglob("*")] == ["shared"]


def test_a_folder_without_room_for_all_states_or_that_cannot_be_written_is_refused(
    small_disk: Path,
) -> None:
    for said in run_ranks(2, rehearsed, [small_disk] * 2, 16_000, timeout=60):
        assert said.startswith("rank 0: --save: low rank has a state") and "No space left on device. Make room" in said
        assert f"{small_disk} cannot be filled with a state of 0.128 MB, as 0.066 MB are free" in said
    assert [*small_disk.iterdir()] == []
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for said in run_ranks(2, rehearsed, [small_disk] * 2, 3, timeout=60):
        assert "cannot be made: Read-only file system. Mount the file system for writing" in said


def one_rank_fails() -> str:
    rank = start()

    def work() -> int:
        if rank == 1:
            raise OSError("no space left")
        return rank

    with pytest.raises(OptimusError) as failed:
        on_all_ranks(work, "packing failed: ")
    assert on_all_ranks(lambda: rank, "") == [0, 1]
    return str(failed.value)


def test_what_fails_on_one_rank_fails_on_all() -> None:
    assert run_ranks(2, one_rank_fails, timeout=60) == ["rank 1: packing failed: no space left"] * 2
