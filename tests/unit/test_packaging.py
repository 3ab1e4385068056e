"""The wheel: its requirements, and scripts/ and patches/ inside it, which run from where they are installed."""

import importlib.metadata
import os
import re
import shlex
import stat
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email.parser import BytesParser
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from optimus_cc_ext.errors import MissingExtra, require_extra
from optimus_cc_ext.tools.cli import shared_folder
from optimus_cc_ext.tools.data import __main__ as data
from scripts.eval import harness
from tests.shell_scripts import ROOT

SHARED = ("scripts", "patches")
LINE = shlex.split(
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 4 --train-iters 1 --lr 1e-4 --vocab-size 128 --mock-data "
    "--tokenizer-type NullTokenizer --optimus-cc"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def files_in(folder: Path) -> set[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {name for name in found if "__pycache__" not in name}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel's optimus_cc_ext as pip unpacks it: executable files stay executable."""
    source: Path = tmp_path_factory.mktemp("source")
    for path in ROOT.iterdir():
        # The copy consists of links: nothing is built into the repository, and nothing built there earlier gets into
        # the wheel.
        if path.name not in ("build", ".git", ".venv") and not path.name.endswith(".egg-info"):
            (source / path.name).symlink_to(path)
    target: Path = tmp_path_factory.mktemp("site-packages")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(target)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True, timeout=120)
    [wheel] = target.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for entry in archive.infolist():
            unpacked = Path(archive.extract(entry, target))
            if entry.external_attr >> 16 & stat.S_IXUSR:
                unpacked.chmod(0o755)
    return target / "optimus_cc_ext"


def run_installed(script: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        [script, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, env={**os.environ, "PATH": path}
    )


def test_training_needs_no_more_than_torch_megatron_numpy_and_psutil() -> None:
    needed = [requirement.split(">")[0] for requirement in PROJECT["dependencies"]]
    assert needed == ["megatron-core", "torch", "numpy", "psutil"]
    assert set(PROJECT["optional-dependencies"]) == {"data", "report", "eval", "gpu", "wandb", "bench", "dev"}


def test_the_wheel_holds_every_script_and_patch_and_nothing_made_from_them(installed: Path) -> None:
    assert {path.name for path in (installed / "share").iterdir()} == set(SHARED)
    for folder in SHARED:
        assert files_in(installed / "share" / folder) == files_in(ROOT / folder)
        for path in (ROOT / folder).rglob("*.sh"):
            copy = installed / "share" / path.relative_to(ROOT)
            assert os.access(copy, os.X_OK) == os.access(path, os.X_OK), path
    assert (installed / "py.typed").is_file()
    assert not [path for path in installed.parent.rglob("*") if path.name in ("tests", "__pycache__")]


def test_the_files_are_found_in_a_checkout_and_in_an_installed_package(installed: Path) -> None:
    assert shared_folder() == ROOT
    assert shared_folder(installed) == installed / "share"


def test_installed_scripts_take_the_python_on_path_and_write_nothing_beside_them(
    installed: Path, tmp_path: Path
) -> None:
    share = installed / "share"
    before = sorted(share.rglob("*"))
    shown = run_installed(f"{share}/patches/apply.sh", cwd=tmp_path)
    assert shown.returncode == 2 and "apply.sh DIR [SCRIPT ...] --undo" in shown.stderr
    experiment = f"{share}/scripts/paper/table2/335m-cb-fe-sc.sh"
    printed = run_installed(experiment, "--scale", "tiny", "--dry-run", cwd=tmp_path)
    assert printed.returncode == 0, printed.stderr
    assert f"{Path(sys.executable).parent}/python -m torch.distributed.run" in printed.stdout
    assert f"--save {tmp_path}/results/paper-tiny/table2/335m-cb-fe-sc/checkpoints" in printed.stdout
    assert run_installed(f"{share}/scripts/setup_env.sh", cwd=tmp_path).returncode == 0
    assert sorted(share.rglob("*")) == before


def test_the_page_of_an_index_has_no_link_that_leads_nowhere(installed: Path) -> None:
    [metadata] = installed.parent.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "Content-Type: text/markdown" in text.replace("Description-", "")
    assert "](http" in text and not re.findall(r"\]\((?!https?:|#)", text)


def test_the_page_of_an_index_leads_to_the_repository_where_that_is_known() -> None:
    names: dict[str, Any] = {"__file__": str(ROOT / "setup.py")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("setuptools.setup", lambda **_: None)
        exec((ROOT / "setup.py").read_text(), names)
    readme = "![a](docs/a.png) [b](docs/b.md#c) [d](https://e) [f](#g)"
    there = "https://host/project/blob/main"
    assert names["page_for_an_index"](readme, there) == (
        f"![a]({there}/docs/a.png) [b]({there}/docs/b.md#c) [d](https://e) [f](#g)"
    )
    assert names["page_for_an_index"](readme, None) == " b [d](https://e) [f](#g)"


def test_what_an_extra_installs_is_named_with_the_way_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    require_extra("data", "json")
    with pytest.raises(MissingExtra, match=r"not installed: no_such_module\. .*pip install 'optimus_cc_ext\[data\]'"):
        require_extra("data", "json", "no_such_module")
    monkeypatch.setattr("optimus_cc_ext.errors.find_spec", lambda module: None)
    cure = "Install the extra that provides it: pip install 'optimus_cc_ext"
    assert data.main(["--input", str(ROOT / "docs"), "--output", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err == f"error: not installed: tokenizers, tqdm. {cure}[data]'\n"
    assert harness.main(["--model", str(tmp_path)]) == 2
    assert f"not installed: lm_eval, transformers. {cure}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def needed_by(requirements: Iterable[str], found: frozenset[str] = frozenset()) -> frozenset[str]:
    """Return the installed distributions that requirements lead to, without any extra; Megatron's own pull in none."""
    for requirement in map(Requirement, requirements):
        name = canonicalize_name(requirement.name)
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found = needed_by(importlib.metadata.requires(name) or (), found | {name})
    return found


@pytest.fixture(scope="module")
def without_extras(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment that holds the wheel, and of this one's packages only those that the wheel
    requires.
    """
    folder = tmp_path_factory.mktemp("without-extras")
    venv.create(folder)
    site_packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    site_packages.joinpath("wheel.pth").write_text(str(installed.parent))
    [metadata] = installed.parent.glob("*.dist-info/METADATA")
    for name in needed_by(BytesParser().parsebytes(metadata.read_bytes()).get_all("Requires-Dist", [])):
        files = importlib.metadata.files(name)
        assert files is not None, name
        for top in {path.parts[0] for path in files} - {"..", "__pycache__"}:
            if not (site_packages / top).exists():
                (site_packages / top).symlink_to(Path(sysconfig.get_path("purelib")) / top)
    return folder / "bin/python"


def answer_without_extras(python: Path, *words: str | Path) -> tuple[int, str]:
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [python, "-m", "optimus_cc_ext.tools.cli", *words], cwd=python.parent, env=variables, text=True, timeout=120,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert "Traceback" not in done.stdout, done.stdout
    return done.returncode, done.stdout


PLAN = ("plan", "--cluster", "h100-100gbe", "--nodes", "2", "--model", "2.5b")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--help",), "usage: optimus-cc"),
        (("files",), "share"),
        (PLAN, "Seconds per iteration"),
        pytest.param(("doctor",), "training would start", marks=pytest.mark.full),
        pytest.param(("doctor", "--", *LINE), "memory per rank", marks=pytest.mark.full),
    ],
    ids=lambda words: " ".join(words[:2]) if isinstance(words, tuple) else "",
)
def test_a_command_that_needs_no_extra_runs_without_any(
    without_extras: Path, words: tuple[str, ...], said: str
) -> None:
    code, text = answer_without_extras(without_extras, *words)
    assert (code, said in text) == (0, True), text


@pytest.mark.parametrize(
    "words",
    [("report", "."), (*PLAN, "--sweep", "nodes=2..4")],
    ids=lambda words: f"{words[0]} {words[-2]}",
)
def test_a_command_that_needs_an_extra_names_it_before_it_begins(without_extras: Path, words: tuple[str, ...]) -> None:
    assert answer_without_extras(without_extras, *words) == (
        2,
        "error: not installed: matplotlib, rich, tensorboard. Install the extra that provides it: "
        "pip install 'optimus_cc_ext[report]'\n",
    )
    assert not (without_extras.parent / words[-1]).is_dir() or words[-1] == "."
