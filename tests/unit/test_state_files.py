"""The files of a checkpoint: whole or not at all, and a damaged one is an error with file, reason and cure."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from optimus_cc_ext.state_files import (
    FOLDER,
    DamagedState,
    Manifest,
    publish,
    read_manifest,
    read_rank_file,
    staging_folder,
    start_staging,
    write_manifest,
    write_rank_file,
)

RANKS = 2


def state(rank: int, iteration: int = 4) -> dict:
    return {"iteration": iteration, "compressed_backprop": {"states": [{"chunk": rank, "residual": torch.ones(3, 5)}]}}


def save(folder: Path, iteration: int = 4) -> Path:
    """What a run of two ranks does; the folder of the iteration."""
    start_staging(folder)
    staging = staging_folder(folder)
    files = tuple(write_rank_file(staging, rank, iteration, state(rank, iteration)) for rank in range(RANKS))
    described = {"iteration": iteration, "checkpoint": "mark", "topology": {"ranks": RANKS}, "techniques": {"a": {}}}
    write_manifest(staging, Manifest(files=files, **described))
    iteration_folder = folder / f"iter_{iteration:07d}"
    iteration_folder.mkdir(exist_ok=True)  # Megatron's part
    publish(staging, iteration_folder)
    return iteration_folder


def load(iteration_folder: Path, rank: int) -> dict:
    manifest = read_manifest(iteration_folder)
    assert manifest is not None
    return read_rank_file(iteration_folder, manifest, rank)


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    folder = save(tmp_path)
    for rank in range(RANKS):
        found = load(folder, rank)
        assert found["iteration"] == 4
        assert found["compressed_backprop"]["states"][0]["chunk"] == rank
        assert torch.equal(found["compressed_backprop"]["states"][0]["residual"], torch.ones(3, 5))


def test_a_checkpoint_without_our_folder_has_no_state(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


def test_a_run_that_was_killed_while_writing_leaves_the_checkpoint_before_as_it_was(tmp_path: Path) -> None:
    folder = save(tmp_path)
    start_staging(tmp_path)
    write_rank_file(staging_folder(tmp_path), 0, 4, state(0))
    assert load(folder, 1)["iteration"] == 4
    # The next save clears away what is left, a file of a rank that does not exist any more included.
    (staging_folder(tmp_path) / "rank_00007.pt").touch()
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


def edited(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def swap_for_another_iteration(files: Path) -> None:
    """A whole file of the same run, two iterations later, described as if it belonged here."""
    later = save(files.parent.parent, 6) / FOLDER
    (later / "rank_00001.pt").replace(files / "rank_00001.pt")
    of_later = read_manifest(later.parent)
    assert of_later is not None
    described = json.loads((files / "topology.json").read_text())
    described["files"][1] = dataclasses.asdict(of_later.files[1])
    (files / "topology.json").write_text(json.dumps(described))


DAMAGES = {
    "rank_00001.pt: the file is missing": lambda files: (files / "rank_00001.pt").unlink(),
    "bytes and was written with": lambda files: (files / "rank_00001.pt").write_bytes(b"short"),
    "another sha256": lambda files: flip_a_byte(files / "rank_00001.pt"),
    "it is the state of rank 1 at iteration 6": swap_for_another_iteration,
    "topology.json: the file is missing": lambda files: (files / "topology.json").unlink(),
    "topology.json: the file cannot be read": lambda files: (files / "topology.json").write_text('{"format": 1, '),
    "cannot be read (KeyError: 'checkpoint')": lambda files: without(files / "topology.json", "checkpoint"),
    "format 2, and this version reads format 1": lambda files: edited(files / "topology.json", format=2),
    "it names 2 files of 3 ranks": lambda files: edited(files / "topology.json", ranks=3),
}


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def without(path: Path, key: str) -> None:
    described = json.loads(path.read_text())
    del described[key]
    path.write_text(json.dumps(described))


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

    start_staging(tmp_path)
    file = write_rank_file(staging_folder(tmp_path), 1, 4, {"trap": Trap()})
    manifest = read_manifest(folder)
    assert manifest is not None
    (staging_folder(tmp_path) / "rank_00001.pt").replace(folder / FOLDER / "rank_00001.pt")
    with pytest.raises(DamagedState, match="cannot be read"):
        read_rank_file(folder, dataclasses.replace(manifest, files=(manifest.files[0], file)), 1)
    assert not ran.exists()
