"""scripts/setup_env.sh: which Python it takes, and when it takes .venv for finished.

Nothing is downloaded here: the interpreter that is found writes down how it was called. The real one is set up by
the run that these tests belong to.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = "awk bash cat chmod cp cut df dirname env flock mkdir mv rm sha256sum sleep sort touch"
CONDA_ROOTS = ("/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3")

# Answers setup_env.sh's questions, makes a "virtual environment" that holds itself, logs installations.
RECORDER = """#!/usr/bin/env bash
case "$1 $2" in
  "-I -c") echo "{answer}" ;;
  "-I -S") echo "3.12 (recorder)" ;;
  "-m venv") echo venv >>"$RECORDER_LOG"; rm -rf "$4"
    mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip") echo "pip $*" >>"$RECORDER_LOG"; sleep "${{RECORDER_SLEEP:-0}}"; exit "${{RECORDER_EXIT:-0}}" ;;
  *) exit 99 ;;
esac
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """As much of the repository as the set-up reads."""
    root = tmp_path / "clone"
    files = "scripts/setup_env.sh pyproject.toml setup.py requirements.lock optimus_cc_ext/_version.py"
    for name in files.split():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    return root


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A PATH with a shell's tools and no Python, and an empty home."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS.split():
        found = shutil.which(name)
        assert found is not None, name
        (tools / name).symlink_to(found)
    (tmp_path / "home").mkdir()
    return {"PATH": str(tools), "HOME": str(tmp_path / "home"), "RECORDER_LOG": str(tmp_path / "log")}


def write_recorder(path: Path, answer: str = "ok $0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECORDER.format(answer=answer))
    path.chmod(0o755)
    return path


def run_setup(clone: Path, environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(clone / "scripts" / "setup_env.sh"), *flags],
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def count_builds(environment: dict[str, str]) -> int:
    log = Path(environment["RECORDER_LOG"])
    return log.read_text().splitlines().count("venv") if log.exists() else 0


@pytest.mark.skipif(any(map(os.path.exists, CONDA_ROOTS)), reason="this machine has a conda for all users")
def test_without_a_fitting_python_the_message_says_what_to_install(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    write_recorder(tmp_path / "bin" / "python3", answer="is Python 3.9")
    write_recorder(tmp_path / "home" / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3", answer="lacks: ssl")
    result = run_setup(clone, environment)
    assert result.returncode == 1
    assert "no usable Python 3.12 or 3.13" in result.stderr
    assert "apt install python3.12 python3.12-venv" in result.stderr
    # What was seen and why it will not do: a Debian user without python3-venv finds the reason here.
    assert f"{tmp_path}/bin/python3 is Python 3.9" in result.stderr
    assert ".pyenv/versions/3.12.1/bin/python3 lacks: ssl" in result.stderr
    assert not (clone / ".venv").exists()


def test_real_interpreter_is_judged_by_its_version_and_modules(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    real = Path(sys.executable).resolve()
    found = run_setup(clone, {**environment, "OPTIMUS_CC_PYTHON": str(real)}, "--find-python")
    assert found.returncode == 0, found.stderr
    assert Path(found.stdout.strip()).resolve() == real
    broken = tmp_path / "broken" / "python"
    broken.parent.mkdir()
    without_ssl = "import sys; sys.modules['ssl'] = None"
    broken.write_text(f'#!/usr/bin/env bash\nexec {real} -I -c "{without_ssl}\n$3"\n')
    broken.chmod(0o755)
    refused = run_setup(clone, {**environment, "OPTIMUS_CC_PYTHON": str(broken)}, "--find-python")
    assert refused.returncode == 1
    assert "lacks the modules: ssl" in refused.stderr


@pytest.mark.parametrize(
    "place",
    [
        "bin/python3.13",
        "bin/python3",
        "home/.pyenv/versions/3.13.0/bin/python3",
        "home/miniforge3/bin/python3",
        "home/miniconda3/envs/work/bin/python3",
    ],
)
def test_python_is_found_wherever_it_is(place: str, clone: Path, environment: dict[str, str], tmp_path: Path) -> None:
    recorder = write_recorder(tmp_path / place)
    write_recorder(tmp_path / "bin" / "python3.12", answer="lacks: ensurepip")
    result = run_setup(clone, environment, "--find-python")
    assert result.stdout.strip() == str(recorder), result.stderr


def test_python_asked_for_by_name_is_not_replaced_silently(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    write_recorder(tmp_path / "bin" / "python3.12")
    result = run_setup(clone, {**environment, "OPTIMUS_CC_PYTHON": str(tmp_path / "absent")})
    assert result.returncode == 1
    assert f"OPTIMUS_CC_PYTHON={tmp_path}/absent cannot be used: it does not run" in result.stderr


@pytest.fixture
def ready(clone: Path, environment: dict[str, str], tmp_path: Path) -> Path:
    """A clone whose set-up has been done once."""
    write_recorder(tmp_path / "bin" / "python3.12")
    result = run_setup(clone, environment)
    assert result.returncode == 0, result.stderr
    assert count_builds(environment) == 1
    return clone


def test_second_run_does_nothing_in_under_a_second(ready: Path, environment: dict[str, str]) -> None:
    start = time.monotonic()
    result = run_setup(ready, environment)
    assert time.monotonic() - start < 1
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert count_builds(environment) == 1


def append_line(path: Path) -> None:
    with path.open("a") as stream:
        stream.write("# changed\n")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda root: append_line(root / "requirements.lock"), id="lock"),
        pytest.param(lambda root: append_line(root / "pyproject.toml"), id="pyproject.toml"),
        pytest.param(lambda root: append_line(root / "setup.py"), id="setup.py"),
        pytest.param(lambda root: append_line(root / ".venv" / ".optimus_cc_stamp"), id="stamp"),
        pytest.param(lambda root: (root / ".venv" / "bin" / "python").unlink(), id="interpreter gone"),
        pytest.param(
            lambda root: (root / ".venv/bin/python").write_text(RECORDER.format(answer="").replace("3.12 (", "3.13 (")),
            id="another interpreter",
        ),
    ],
)
def test_change_makes_the_environment_anew(
    change: Callable[[Path], object], ready: Path, environment: dict[str, str]
) -> None:
    change(ready)
    assert run_setup(ready, environment).returncode == 0
    assert count_builds(environment) == 2
    assert run_setup(ready, environment).returncode == 0
    assert count_builds(environment) == 2


def test_moved_repository_makes_the_environment_anew(ready: Path, environment: dict[str, str]) -> None:
    moved = ready.rename(ready.with_name("moved"))
    assert run_setup(moved, environment).returncode == 0
    assert count_builds(environment) == 2


def test_failed_installation_is_said_and_not_taken_for_finished(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    write_recorder(tmp_path / "bin" / "python3.12")
    result = run_setup(clone, {**environment, "RECORDER_EXIT": "1"})
    assert result.returncode == 1
    assert "installing requirements.lock failed" in result.stderr
    assert run_setup(clone, environment).returncode == 0
    assert count_builds(environment) == 2


def test_killed_installation_is_not_taken_for_finished(
    clone: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    write_recorder(tmp_path / "bin" / "python3.12")
    process = subprocess.Popen(
        ["bash", str(clone / "scripts" / "setup_env.sh")],
        env={**environment, "RECORDER_SLEEP": "60"},
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while "pip" not in (Path(environment["RECORDER_LOG"]).read_text() if count_builds(environment) else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (clone / ".venv" / "bin" / "python").exists()
    assert run_setup(clone, environment).returncode == 0
    assert count_builds(environment) == 2


def test_two_runs_at_once_make_it_once(clone: Path, environment: dict[str, str], tmp_path: Path) -> None:
    write_recorder(tmp_path / "bin" / "python3.12")
    slow = {**environment, "RECORDER_SLEEP": "0.5"}
    command = ["bash", str(clone / "scripts" / "setup_env.sh")]
    runs = [
        subprocess.Popen(command, env=slow, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], errors
    assert count_builds(environment) == 1
    assert sum("waiting for it" in error for error in errors) == 2


def test_lock_file_pins_every_package_and_names_no_index() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 and " " not in line for line in packages)
    assert {"torch==2.13.0", "megatron-core==0.19.2"} <= set(packages)
    assert not any("://" in line or line.startswith("-") for line in lines)
