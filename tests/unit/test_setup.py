"""scripts/setup_env.sh: which Python it takes, and when it considers .venv finished.

Nothing is downloaded: the interpreter that the script finds records its calls. The session that runs these tests has
set up the real environment.
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

from tests.shell_scripts import ROOT, Ended

TOOLS = "awk bash cat chmod cp cut df dirname env flock mkdir mv rm sha256sum sleep sort touch"
READ = "scripts/setup_env.sh pyproject.toml setup.py requirements.lock optimus_cc_ext/_version.py"
CONDA_ROOTS = ("/opt/conda", "/opt/miniforge3", "/opt/miniconda3", "/opt/anaconda3")

# This Python answers setup_env.sh's questions, makes a "virtual environment" that holds itself, and logs installations.
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


class Setup:
    """The parts of the repository that the set-up reads, a PATH with a shell's tools and no Python, and an empty
    home.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.clone = folder, folder / "clone"
        for name in READ.split():
            (self.clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.clone / name)
        for place in ("bin", "home"):
            (folder / place).mkdir()
        for name in TOOLS.split():
            found = shutil.which(name)
            assert found is not None, name
            (folder / "bin" / name).symlink_to(found)

    def python(self, place: str = "bin/python3.12", content: str = RECORDER.format(answer="ok $0")) -> Path:
        path = self.folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
        path.chmod(0o755)
        return path

    def start(self, *flags: str, **environment: str) -> subprocess.Popen[str]:
        known = {"PATH": f"{self.folder}/bin", "HOME": f"{self.folder}/home", "RECORDER_LOG": f"{self.folder}/log"}
        return subprocess.Popen(
            ["bash", str(self.clone / "scripts" / "setup_env.sh"), *flags],
            env=known | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *flags: str, **environment: str) -> Ended:
        process = self.start(*flags, **environment)
        output, errors = process.communicate(timeout=60)
        return Ended(process.returncode, output, errors)

    @property
    def log(self) -> list[str]:
        path = self.folder / "log"
        return path.read_text().splitlines() if path.exists() else []

    @property
    def builds(self) -> int:
        return self.log.count("venv")

    def append_line(self, name: str) -> None:
        with (self.clone / name).open("a") as stream:
            stream.write("# changed\n")

    def move(self) -> None:
        self.clone = self.clone.rename(self.folder / "moved")


@pytest.fixture
def setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path)


@pytest.fixture
def ready(setup: Setup) -> Setup:
    """Run setup_env.sh once, so that .venv is finished; return the `Setup`."""
    setup.python()
    result = setup.run()
    assert result.code == 0, result.errors
    assert setup.builds == 1
    return setup


@pytest.mark.skipif(any(map(os.path.exists, CONDA_ROOTS)), reason="this machine has a conda for all users")
def test_without_a_fitting_python_the_message_says_what_to_install(setup: Setup) -> None:
    old = setup.python("bin/python3", RECORDER.format(answer="is Python 3.9"))
    bare = setup.python("home/.pyenv/versions/3.12.1/bin/python3", RECORDER.format(answer="lacks: ssl"))
    result = setup.run()
    assert result.code == 1
    assert "no usable Python 3.12 or 3.13" in result.errors
    assert "apt install python3.12 python3.12-venv" in result.errors
    # The message names each interpreter and its fault: a Debian user without python3-venv finds the reason here.
    assert f"{old} is Python 3.9" in result.errors and f"{bare} lacks: ssl" in result.errors
    assert not (setup.clone / ".venv").exists()


def test_real_interpreter_is_judged_by_its_version_and_modules(setup: Setup) -> None:
    real = Path(sys.executable).resolve()
    found = setup.run("--find-python", OPTIMUS_CC_PYTHON=str(real))
    assert found.code == 0, found.errors
    assert Path(found.output.strip()).resolve() == real
    without_ssl = "import sys; sys.modules['ssl'] = None"
    broken = setup.python("broken/python", f'#!/usr/bin/env bash\nexec {real} -I -c "{without_ssl}\n$3"\n')
    refused = setup.run("--find-python", OPTIMUS_CC_PYTHON=str(broken))
    assert refused.code == 1
    assert "lacks the modules: ssl" in refused.errors


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
def test_python_is_found_wherever_it_is(place: str, setup: Setup) -> None:
    python = setup.python(place)
    setup.python(content=RECORDER.format(answer="lacks: ensurepip"))
    result = setup.run("--find-python")
    assert result.output.strip() == str(python), result.errors


def test_python_asked_for_by_name_is_not_replaced_silently(setup: Setup) -> None:
    setup.python()
    result = setup.run(OPTIMUS_CC_PYTHON="/absent")
    assert result.code == 1
    assert "OPTIMUS_CC_PYTHON=/absent cannot be used: it does not run" in result.errors


def test_second_run_does_nothing_in_under_a_second(ready: Setup) -> None:
    start = time.monotonic()
    assert ready.run() == Ended(0, "", "")
    assert time.monotonic() - start < 1
    assert ready.builds == 1


CHANGES: dict[str, Callable[[Setup], object]] = {
    "lock": lambda ready: ready.append_line("requirements.lock"),
    "pyproject.toml": lambda ready: ready.append_line("pyproject.toml"),
    "setup.py": lambda ready: ready.append_line("setup.py"),
    "stamp": lambda ready: ready.append_line(".venv/.optimus_cc_stamp"),
    "interpreter gone": lambda ready: (ready.clone / ".venv/bin/python").unlink(),
    "another interpreter": lambda ready: (ready.clone / ".venv/bin/python").write_text(
        RECORDER.format(answer="").replace("3.12 (", "3.13 (")
    ),
    "moved repository": Setup.move,
}


@pytest.mark.parametrize("change", CHANGES)
def test_change_makes_the_environment_anew(change: str, ready: Setup) -> None:
    CHANGES[change](ready)
    for _ in range(2):
        assert ready.run().code == 0
        assert ready.builds == 2


def test_environment_behind_a_link_is_not_deleted(setup: Setup) -> None:
    setup.python()
    other = setup.folder / "other" / "bin"
    other.mkdir(parents=True)
    (setup.clone / ".venv").symlink_to(other.parent)
    result = setup.run()
    assert result.code == 1 and ".venv is a link" in result.errors and "Remove the link" in result.errors
    assert other.exists() and setup.builds == 0
    (setup.clone / ".venv").unlink()
    assert setup.run().code == 0 and setup.builds == 1


def test_failed_installation_is_said_and_not_taken_for_finished(setup: Setup) -> None:
    setup.python()
    result = setup.run(RECORDER_EXIT="1")
    assert result.code == 1
    assert "installing requirements.lock failed" in result.errors
    assert setup.run().code == 0
    assert setup.builds == 2


def test_killed_installation_is_not_taken_for_finished(setup: Setup) -> None:
    setup.python()
    with setup.start(RECORDER_SLEEP="60") as process:
        try:
            deadline = time.monotonic() + 20
            while not any("pip" in line for line in setup.log):
                assert time.monotonic() < deadline
                time.sleep(0.02)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    assert (setup.clone / ".venv" / "bin" / "python").exists()
    assert setup.run().code == 0
    assert setup.builds == 2


def test_two_runs_at_once_make_it_once(setup: Setup) -> None:
    setup.python()
    runs = [setup.start(RECORDER_SLEEP="0.5") for _ in range(3)]
    errors = [run.communicate(timeout=60)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], errors
    assert setup.builds == 1
    assert sum("waiting for it" in error for error in errors) == 2


def test_lock_file_pins_every_package_and_names_no_index() -> None:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    packages = [line for line in lines if not line.startswith("#")]
    assert all(line.count("==") == 1 and " " not in line for line in packages)
    assert {"torch==2.13.0", "megatron-core==0.19.2"} <= set(packages)
    assert not any("://" in line or line.startswith("-") for line in lines)
