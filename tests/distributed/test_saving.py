"""The compression state beside a checkpoint, saved and restored by real ranks, without Megatron."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.loading import FoundCheckpoint, Resume
from optimus_cc_ext.checkpoint.saving import Save, on_all_ranks
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import OptimusError
from tests.forked_ranks import run_ranks

SETTINGS: dict[str, dict[str, Any]] = {"dp_compression": {"--dp-compression-rank": 4}}
TOPOLOGY = {"the number of ranks": 2}


class Remembering:
    """Session whose state is one tensor."""

    config = OptimusConfig(dp_compression=True, dp_compression_rank=4)

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
    assert run_ranks(2, save_and_restore, tmp_path, timeout=60) == [(1.0, [], names), (2.0, [], names)]


class Choosing(Remembering):
    """A session that remembers the stages which `auto` chose, and no tensor."""

    def __init__(self, stages: list[int]) -> None:
        super().__init__(0.0)
        self.stages = stages

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": 7, "dp_compression": {"states": {}, "stages": self.stages}}

    def load_state_dict(self, state: Any) -> None:
        self.stages = state["dp_compression"]["stages"]


def choose_and_restore(folder: Path, *, alike: bool, background: bool) -> tuple[list[int], list[str]]:
    stages = [0, 2] if alike else [start(), 2]
    if alike:
        start()
    save, checkpoint = Save(folder, 7, SETTINGS, TOPOLOGY), folder / "iter_0000007"
    checkpoint.mkdir(parents=True, exist_ok=True)
    save.stage(Choosing(stages), copied=background)
    if background:
        save.start_writing(ThreadPoolExecutor(1))
    save.finish_writing()
    save.publish(checkpoint)
    dist.barrier()
    session = Choosing([])
    assert restored(session, checkpoint, save.mark) == []
    return session.stages, sorted(file.name for file in (checkpoint / "optimus_cc").iterdir())


@pytest.mark.parametrize("background", [False, True])
def test_a_state_without_tensors_that_all_ranks_share_takes_one_file(background: bool, tmp_path: Path) -> None:
    found = run_ranks(2, partial(choose_and_restore, alike=True, background=background), tmp_path, timeout=60)
    assert found == [([0, 2], ["topology.json"])] * 2


def test_a_state_without_tensors_that_differs_is_kept_by_each_rank(tmp_path: Path) -> None:
    names = ["rank_00000.pt", "rank_00001.pt", "topology.json"]
    found = run_ranks(2, partial(choose_and_restore, alike=False, background=False), tmp_path, timeout=60)
    assert found == [([0, 2], names), ([1, 2], names)]


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
            "another iteration": "the file belongs to another save (iteration 7) than the checkpoint (iteration 8)",
            "another save": "the file belongs to another save",
            "other files": "ranks find different files in",
            "off": "no technique that keeps state is on",
        }
        for name, expected in says.items():
            assert expected in answers[name][0], name


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
