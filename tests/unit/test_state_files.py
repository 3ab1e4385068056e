"""Files of a checkpoint: complete or absent; a damaged file gives an error with file, reason and cure."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.checkpoint import state_files
from optimus_cc_ext.checkpoint.state_files import (
    FOLDER,
    DamagedState,
    Manifest,
    new_mark,
    publish,
    read_manifest,
    read_rank_file,
    staging_folder,
    start_staging,
    write_manifest,
    write_rank_file,
)
from tests.forked_ranks import run_ranks
from tests.system_calls import AVAILABLE, Call, Watch, watched_by

RANKS = 2


def state(rank: int, iteration: int = 4) -> dict:
    return {"iteration": iteration, "compressed_backprop": {"states": [{"chunk": rank, "residual": torch.ones(3, 5)}]}}


def save(folder: Path, iteration: int = 4) -> Path:
    """Save as a run of two ranks does; return the folder of the iteration."""
    mark = new_mark()
    start_staging(folder, mark)
    staging = staging_folder(folder, mark)
    files = tuple(write_rank_file(staging, rank, iteration, state(rank, iteration)) for rank in range(RANKS))
    described = {
        "iteration": iteration,
        "checkpoint": mark,
        "topology": {"ranks": RANKS},
        "techniques": {"dp_compression": {}},
    }
    write_manifest(staging, Manifest(files=files, **described))
    iteration_folder = folder / f"iter_{iteration:07d}"
    iteration_folder.mkdir(exist_ok=True)  # Megatron's own part of the checkpoint
    publish(staging, iteration_folder)
    return iteration_folder


def load(iteration_folder: Path, rank: int) -> dict:
    manifest = read_manifest(iteration_folder)
    assert manifest is not None
    return read_rank_file(iteration_folder, manifest, rank)


def test_what_was_written_is_read_again_and_without_our_folder_there_is_no_state(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    folder = save(tmp_path)
    for rank in range(RANKS):
        found = load(folder, rank)
        assert found["iteration"] == 4
        assert found["compressed_backprop"]["states"][0]["chunk"] == rank
        assert torch.equal(found["compressed_backprop"]["states"][0]["residual"], torch.ones(3, 5))


def test_a_run_that_was_killed_while_writing_leaves_the_checkpoint_before_as_it_was(tmp_path: Path) -> None:
    folder = save(tmp_path)
    start_staging(tmp_path, "mark")
    write_rank_file(staging_folder(tmp_path, "mark"), 0, 4, state(0))
    assert load(folder, 1)["iteration"] == 4
    # The next save's folder has no file of a rank that does not exist any more.
    (staging_folder(tmp_path, "mark") / "rank_00007.pt").touch()
    folder = save(tmp_path, 6)
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == [
        "rank_00000.pt",
        "rank_00001.pt",
        "topology.json",
    ]


def test_an_iteration_that_is_saved_again_has_the_new_state_only(tmp_path: Path) -> None:
    folder = save(tmp_path)
    (folder / FOLDER / "rank_00007.pt").touch()
    assert not (save(tmp_path) / FOLDER / "rank_00007.pt").exists()
    publish(None, folder)
    assert read_manifest(folder) is None, "saved again with nothing to remember"


def test_no_two_saves_have_one_staging_folder(tmp_path: Path) -> None:
    """A client of a network file system may still resolve the name of an earlier folder, which has been renamed."""
    assert staging_folder(tmp_path, new_mark()) != staging_folder(tmp_path, new_mark())


STAGE = """
import sys
from pathlib import Path
from optimus_cc_ext.checkpoint.state_files import new_mark, start_staging
start_staging(Path(sys.argv[1]), new_mark())
print("staged", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[subprocess.Popen]:
    """Another process that has begun a save into `tmp_path`, and lives until its standard input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", STAGE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None and run.stdout.readline() == "staged\n"
        yield run
        run.kill()


def staged(folder: Path) -> list[Path]:
    return list(folder.glob(".optimus_cc_incomplete*"))


def test_a_save_leaves_the_staged_files_of_a_living_run_and_removes_those_of_a_dead_one(
    other_run: subprocess.Popen, tmp_path: Path
) -> None:
    (theirs,) = staged(tmp_path)
    save(tmp_path)
    assert staged(tmp_path) == [theirs], "another run still writes there"
    other_run.communicate("")
    save(tmp_path, 6)
    assert staged(tmp_path) == []


@pytest.mark.parametrize("place", [".", "iter_0000004"])
def test_staged_files_whose_run_is_unknown_are_removed_after_a_day(place: str, tmp_path: Path) -> None:
    """The names are those of an earlier version, of another host, and of a process whose number has been given away."""
    here = new_mark().split("-")[0]
    folder = save(tmp_path)
    leftovers = [
        tmp_path / place / f".optimus_cc_incomplete{end}" for end in ("_0f3a", "_0badcafe-7-0f", f"_{here}-1-0")
    ]
    for leftover in leftovers:
        leftover.mkdir()
        (leftover / "rank_00000.pt").touch()
    save(tmp_path)
    assert all(leftover.exists() for leftover in leftovers), "a run on another host may still write there"
    for leftover in leftovers:
        for path in (leftover / "rank_00000.pt", leftover):
            os.utime(path, (0, path.stat().st_mtime - 25 * 3600))
    (leftovers[0] / "rank_00001.pt").touch()
    os.utime(leftovers[0], (0, 0))
    save(tmp_path)
    assert [leftover.exists() for leftover in leftovers] == [True, False, False], "rank 1 of the first has just written"
    assert load(folder, 1)["iteration"] == 4


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system."""
    if not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm is no other file system here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def test_an_iteration_that_is_a_link_to_another_file_system_is_saved_again(elsewhere: Path, tmp_path: Path) -> None:
    (tmp_path / "iter_0000004").symlink_to(elsewhere)
    for _ in range(2):
        folder = save(tmp_path)
        assert load(folder, 1)["iteration"] == 4
        assert [path.name for path in elsewhere.iterdir()] == [FOLDER] and staged(tmp_path) == []


def test_state_that_is_a_link_to_another_file_system_is_replaced_and_its_archive_stays(
    elsewhere: Path, tmp_path: Path
) -> None:
    folder = save(tmp_path)
    archive = elsewhere / "archive"
    shutil.copytree(folder / FOLDER, archive)
    shutil.rmtree(folder / FOLDER)
    (folder / FOLDER).symlink_to(archive)
    assert load(save(tmp_path), 1)["iteration"] == 4
    assert not (folder / FOLDER).is_symlink() and (archive / "topology.json").exists() and staged(folder) == []


def save_twice(address: str, folder: Path) -> None:
    watched_by(address)
    for _ in range(2):
        assert load(save(folder), 1)["iteration"] == 4
    publish(None, folder / "iter_0000006")


@pytest.mark.skipif(not AVAILABLE, reason="needs x86-64 and a kernel that lets a held call go on (5.5)")
def test_on_a_mounted_store_of_objects_which_renames_no_folders_state_is_replaced(tmp_path: Path) -> None:
    older = save(tmp_path, 6)
    errors = cycle([errno.ENOSYS, errno.ENOTSUP, errno.EMFILE])
    with Watch(tmp_path, lambda call: next(errors) if call.name.startswith("rename") else None) as watch:
        run_ranks(1, save_twice, watch.address, tmp_path)
    folder = tmp_path / "iter_0000004"
    assert load(folder, 0)["iteration"] == 4 and list(older.iterdir()) == []
    assert staged(tmp_path) == staged(folder) == []


def save_once(address: str, folder: Path) -> None:
    watched_by(address)
    save(folder)


@pytest.mark.skipif(not AVAILABLE, reason="needs x86-64 and a kernel that lets a held call go on (5.5)")
@pytest.mark.parametrize("then_taken", [False, True])
def test_what_another_run_puts_in_place_or_takes_between_two_calls_of_ours_is_replaced(
    then_taken: bool, tmp_path: Path
) -> None:
    theirs, place = save(tmp_path, 2) / FOLDER, tmp_path / "iter_0000004" / FOLDER
    ours: list[bool] = []

    def other_run(call: Call) -> None:
        if call.name == "rename" and call.path.startswith("iter_0000004/.optimus_cc_incomplete"):
            ours.append(True)
            if len(ours) < (2 if then_taken else 10):
                shutil.copytree(theirs, place)
        elif call.name == "rename" and call.path == "iter_0000004/optimus_cc" and then_taken:
            shutil.rmtree(place)

    with Watch(tmp_path, other_run) as watch:
        run_ranks(1, save_once, watch.address, tmp_path)
    assert len(ours) == (2 if then_taken else 10)
    assert load(place.parent, 1)["iteration"] == 4 and [*place.parent.iterdir()] == [place]


@pytest.mark.parametrize("fault", ["deleted", "below a file"])
def test_the_old_state_stays_if_the_new_one_cannot_be_put_in_its_place(fault: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    staging = tmp_path / ".optimus_cc_incomplete_mark"
    if fault == "below a file":
        staging.write_text("a file in place of the folder")
        staging = staging / "below"
    with pytest.raises(OSError) as failed:
        publish(staging, folder)
    reason = {"deleted": "No such file or directory", "below a file": "Not a directory"}[fault]
    assert str(failed.value).startswith(
        f"{folder / FOLDER} cannot be put into the checkpoint: {reason}. Give all ranks"
    )
    assert load(folder, 1)["iteration"] == 4


CURES = {
    "Make room": {errno.ENOSPC},
    "Make room, or let the quota be raised": {errno.EDQUOT},
    "Let the user of this job write there": {errno.EACCES, errno.EPERM},
    "Mount the file system for writing": {errno.EROFS},
    "Raise the limit of a file's size (ulimit -f)": {errno.EFBIG},
    "Give all ranks one shared folder of checkpoints, in which no other program deletes": {errno.ENOENT, errno.ENOTDIR},
}


def test_each_error_of_a_file_system_is_one_sentence_with_path_reason_and_its_own_cure() -> None:
    for number in errno.errorcode:
        cure = next((cure for cure, numbers in CURES.items() if number in numbers), "Mend the disk or its mount")
        said = f"place cannot be written: {os.strerror(number)}. {cure}, then resume: earlier checkpoints are whole"
        with pytest.raises(OSError) as failed, state_files._naming(Path("place"), "written"):
            raise OSError(number, os.strerror(number), "place")
        assert str(failed.value) == said


@pytest.mark.parametrize("values", [1, 1 << 18])
def test_a_full_disk_is_named_with_file_and_cure(values: int, tmp_path: Path) -> None:
    """The test writes to /dev/full, the kernel's full disk: few values fail in the last flush, many in torch's
    writer.
    """
    start_staging(tmp_path, "mark")
    path = staging_folder(tmp_path, "mark") / "rank_00000.pt"
    path.symlink_to("/dev/full")
    with pytest.raises(OSError) as failed:
        write_rank_file(path.parent, 0, 4, {"residual": torch.ones(values)})
    assert str(failed.value).startswith(f"{path} cannot be written: No space left on device. Make room")


def test_the_hash_of_what_is_written_is_that_of_the_file(tmp_path: Path) -> None:
    start_staging(tmp_path, "mark")
    path = staging_folder(tmp_path, "mark") / "rank_00000.pt"
    written = write_rank_file(path.parent, 0, 4, {"residual": torch.ones(1 << 18), "odd": torch.ones(3)})
    assert written.size == path.stat().st_size
    assert written.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def swap_for_another_iteration(files: Path) -> None:
    """Swap in rank 1's file from the save two iterations later, and describe it as a file of the checkpoint."""
    later = save(files.parent.parent, 6) / FOLDER
    (later / "rank_00001.pt").replace(files / "rank_00001.pt")
    of_later = read_manifest(later.parent)
    assert of_later is not None
    described = json.loads((files / "topology.json").read_text())
    described["files"][1] = dataclasses.asdict(of_later.files[1])
    (files / "topology.json").write_text(json.dumps(described))


def flip_a_byte(files: Path) -> None:
    content = bytearray((files / "rank_00001.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (files / "rank_00001.pt").write_bytes(content)


def edit_manifest(files: Path, **changes: object) -> None:
    """Change fields of the manifest by name; a field that becomes None is removed."""
    described = json.loads((files / "topology.json").read_text()) | changes
    kept = {name: value for name, value in described.items() if value is not None or name not in changes}
    (files / "topology.json").write_text(json.dumps(kept))


DAMAGES = {
    "rank_00001.pt: the file is missing": lambda files: (files / "rank_00001.pt").unlink(),
    "bytes, but": lambda files: (files / "rank_00001.pt").write_bytes(b"short"),
    "another sha256": flip_a_byte,
    "it is the state of rank 1 at iteration 6": swap_for_another_iteration,
    "topology.json: the file is missing": lambda files: (files / "topology.json").unlink(),
    "topology.json: the file cannot be read": lambda files: (files / "topology.json").write_text('{"format": 1, '),
    "cannot be read (KeyError: 'checkpoint')": lambda files: edit_manifest(files, checkpoint=None),
    "format 2, and this version reads format 3": lambda files: edit_manifest(files, format=2),
    "'experts' is not the name of a class of traffic; known are pipeline_forward, compressed_backprop, ": (
        lambda files: edit_manifest(files, techniques={"experts": {}})
    ),
    "'int5' is not the name of a format for DP gradients; known are low-rank, int8, ": (
        lambda files: edit_manifest(files, techniques={"dp_compression": {"--dp-compression-format": "int5"}})
    ),
    "it lists 2 files for 3 ranks": lambda files: edit_manifest(files, ranks=3),
}


@pytest.mark.parametrize("reason", DAMAGES)
def test_what_is_damaged_is_an_error_with_file_reason_and_cure(reason: str, tmp_path: Path) -> None:
    folder = save(tmp_path)
    DAMAGES[reason](folder / FOLDER)
    with pytest.raises(DamagedState) as damage:
        load(folder, 1)
    message = str(damage.value)
    assert message.startswith(str(folder / FOLDER)) and reason in message
    assert "--ckpt-step" in message and f"remove {folder / FOLDER}" in message


def test_a_file_that_would_run_code_is_not_unpickled(tmp_path: Path) -> None:
    folder, ran = save(tmp_path), tmp_path / "ran"

    class Trap:
        def __reduce__(self) -> tuple:
            return Path.touch, (ran,)

    start_staging(tmp_path, "mark")
    file = write_rank_file(staging_folder(tmp_path, "mark"), 1, 4, {"trap": Trap()})
    manifest = read_manifest(folder)
    assert manifest is not None
    (staging_folder(tmp_path, "mark") / "rank_00001.pt").replace(folder / FOLDER / "rank_00001.pt")
    with pytest.raises(DamagedState, match="cannot be read"):
        read_rank_file(folder, dataclasses.replace(manifest, files=(manifest.files[0], file)), 1)
    assert not ran.exists()
