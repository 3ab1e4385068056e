"""scripts/test.sh --megatron VERSION and --torch VERSION: the packages that are fetched, once, and the tests that then
run.

Nothing is downloaded: the Python that the script finds records its calls, and makes pip's folder.
"""

import shutil
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT, run_script

RECORDER = """#!/usr/bin/env bash
echo "$* | $PYTHONPATH | ${OPTIMUS_CC_TEST_MEGATRON:-}${OPTIMUS_CC_TEST_TORCH:-}" >>"$RECORDER_LOG"
[[ "$2" != pip ]] || { while [[ "$1" != --target ]]; do shift; done; mkdir -p "$2"; exit "${RECORDER_EXIT:-0}"; }
"""


class Clone:
    """Clone whose environment exists already, with a Python that only records its arguments."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        for name in ("scripts/test.sh", "scripts/setup_env.sh"):
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        (folder / "scripts/setup_env.sh").write_text("#!/usr/bin/env bash\n")
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(RECORDER)
        python.chmod(0o755)

    def test(self, *arguments: str, **environment: str) -> tuple[int, str, list[list[str]]]:
        """Return exit code, errors, and each call of Python: arguments, PYTHONPATH and the version that tests see."""
        self.log.unlink(missing_ok=True)
        script = str(self.folder / "scripts/test.sh")
        ended = run_script(script, *arguments, env={"RECORDER_LOG": str(self.log), **environment})
        calls = self.log.read_text().splitlines() if self.log.exists() else []
        return ended.code, ended.errors, [[part.strip() for part in call.split("|")] for call in calls]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


PACKAGES = [("megatron", "0.18.2", "--no-deps megatron-core==0.18.2"), ("torch", "2.9.1", "torch==2.9.1")]


@pytest.mark.parametrize("package, version, fetched", PACKAGES)
def test_a_version_is_fetched_once_and_put_before_the_environment(
    package: str, version: str, fetched: str, clone: Clone
) -> None:
    folder = clone.folder / f".{package}" / version
    code, _, [pip, tests] = clone.test(f"--{package}", version)
    assert code == 0 and folder.is_dir()
    assert pip[0].startswith("-m pip install") and pip[0].endswith(f"--target .{package}/{version}.partial {fetched}")
    assert ("--no-deps" in pip[0]) == (package == "megatron"), (
        "Megatron's torch is .venv's; torch brings its own Triton"
    )
    assert tests[0].startswith("-m pytest") and tests[0].endswith(" tests/megatron/test_versions.py")
    assert tests[1:] == [str(folder), version]
    code, _, calls = clone.test(f"--{package}", version, "tests/unit", PYTHONPATH="/mine")
    assert code == 0 and len(calls) == 1, "what is there is not fetched again"
    assert calls[0][0].endswith(" tests/megatron/test_versions.py tests/unit")
    assert calls[0][1] == f"{folder}:/mine"


@pytest.mark.parametrize("package, version, fetched", PACKAGES)
def test_what_could_not_be_fetched_is_not_taken_for_whole(
    package: str, version: str, fetched: str, clone: Clone
) -> None:
    code, errors, _ = clone.test(f"--{package}", version, RECORDER_EXIT="1")
    assert code == 2 and f"error: {package} {version} could not be fetched" in errors
    assert not (clone.folder / f".{package}" / version).exists()
    code, _, calls = clone.test(f"--{package}", version)
    assert code == 0 and len(calls) == 2


@pytest.mark.parametrize("arguments", [["--torch"], ["--torch", "latest"], ["--megatron", "0.19"]])
def test_what_is_no_version_is_refused_with_an_example(arguments: list[str], clone: Clone) -> None:
    code, errors, calls = clone.test(*arguments)
    assert (code, calls) == (2, [])
    assert errors == f"error: {arguments[0]} needs a version, such as 0.18.2 of Megatron or 2.9.1 of torch\n"


def test_an_older_python_on_path_is_named_in_a_sentence(tmp_path: Path) -> None:
    for name in ("compat_versions.sh", "find_python.sh"):
        (tmp_path / "scripts").mkdir(exist_ok=True)
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts" / name)
    older = tmp_path / "bin/python"
    older.parent.mkdir()
    older.write_text("#!/bin/sh\nexit 1\n")
    older.chmod(0o755)
    ended = run_script(str(tmp_path / "scripts/compat_versions.sh"), env={"PATH": f"{older.parent}:/usr/bin:/bin"})
    assert ended.code == 2
    assert ended.errors.startswith("error: python on PATH is older than 3.12. Activate the environment")


@pytest.mark.ci
def test_a_module_that_a_checkout_lacks_is_named_instead_of_missing_functions(tmp_path: Path) -> None:
    (tmp_path / "megatron/core").mkdir(parents=True)
    (tmp_path / "megatron/core/__init__.py").write_text("import no_such_module\n")
    ended = run_script("compat_versions.sh", str(tmp_path), limit=120)
    assert ended.code == 0 and ended.output.splitlines()[-1].endswith(
        "| no | - | - | cannot be imported here: ModuleNotFoundError: No module named 'no_such_module' |"
    )
