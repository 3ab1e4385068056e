"""Build of the Dockerfile without a daemon, and runs inside the image: needs root, buildah and debootstrap.

    MEGATRON_LM=/path/to/Megatron-LM scripts/test.sh --full tests/image

MEGATRON_LM is the checkout (core_v0.19.0) whose scripts go into the image. Without it they are left out, as are the
tests of them: this test does not reach for GitHub.
"""

import json
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.shell_scripts import ROOT, SYSTEM_PATH, why_not_as_root

CHECKOUT = os.environ.get("MEGATRON_LM", "")
WHY_NOT = why_not_as_root("buildah", "debootstrap")
pytestmark = [pytest.mark.full, pytest.mark.timeout(3000), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")]


@dataclass(frozen=True)
class Image:
    """Image that was built, in a storage of its own."""

    environment: dict[str, str]
    last_lines: list[str]
    """Last lines that the build printed."""

    checkout: str

    def buildah(self, *arguments: str) -> str:
        done = subprocess.run(
            ["buildah", *arguments], env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == 0, f"{arguments}:\n{done.stdout[-4000:]}"
        return done.stdout

    def run(self, *command: str, **environment: str) -> str:
        """Run a command in a fresh container, as the image's user; return its output."""
        container = self.buildah("from", "--pull-never", "optimus-cc").strip()
        settings = [f"--env={name}={value}" for name, value in {"OMP_NUM_THREADS": "1", **environment}.items()]
        try:
            # The container's host name has to resolve, because torchrun's ranks meet under it. Container engines add
            # the name themselves.
            host = ("--hostname", "localhost")
            return self.buildah("run", "--isolation", "chroot", *host, *settings, container, "--", *command)
        finally:
            self.buildah("rm", container)


def _storage(folder: Path, driver: str) -> dict[str, str]:
    config = folder / "storage.conf"
    config.write_text(f'[storage]\ndriver = "{driver}"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n')
    return {**os.environ, "CONTAINERS_STORAGE_CONF": str(config), "PATH": SYSTEM_PATH}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    folder = tmp_path_factory.mktemp("image")
    environment = _storage(folder, "overlay")
    if subprocess.run(["buildah", "images"], env=environment, capture_output=True).returncode != 0:
        shutil.rmtree(folder / "storage", ignore_errors=True)
        environment = _storage(folder, "vfs")  # the driver vfs copies all files for every layer, but runs everywhere
    checkout = Path(CHECKOUT)
    if not CHECKOUT:
        checkout = folder / "no-checkout"
        (checkout / "tools").mkdir(parents=True)
        for name in ("LICENSE", "pretrain_gpt.py", "tools/README.md"):
            (checkout / name).touch()
    try:
        base = [ROOT / "tests/image/make_base.sh", "localhost/base", ROOT / "requirements.lock", folder]
        subprocess.run(base, env=environment, check=True)
        built = subprocess.run(
            [
                *("bash", ROOT / "scripts/slurm/build_image.sbatch"),
                *("--isolation", "chroot", "--build-arg", "BASE_IMAGE=localhost/base"),
            ],
            # Debian has neither Transformer Engine nor Apex.
            env={**environment, "BUILDER": "buildah", "ALLOW_MISSING": "all", "SPACE_GB": "10"}
            | {"MEGATRON_LM": str(checkout), "OPTIMUS_CC_ROOT": str(ROOT)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert built.returncode == 0, built.stdout[-4000:]
        yield Image(environment, built.stdout.splitlines()[-5:], str(checkout))
    finally:
        subprocess.run(["buildah", "rm", "--all"], env=environment, capture_output=True)
        subprocess.run(["buildah", "rmi", "--all", "--force"], env=environment, capture_output=True)
        shutil.rmtree(folder, ignore_errors=True)


def test_an_image_rebuilt_over_an_old_one_is_the_new_one(tmp_path: Path) -> None:
    """A Dockerfile that copies one file is enough for this test."""
    root, output = tmp_path / "root", tmp_path / "optimus-cc.tar"
    settings = {"BUILDER": "buildah", "OUTPUT": output.name, "OPTIMUS_CC_ROOT": str(root)}
    root.mkdir()
    (root / "scripts").symlink_to(ROOT / "scripts")
    (root / "Dockerfile").write_text("FROM scratch\nCOPY content /\n")
    for content in ("old", "new"):
        (root / "content").write_text(content)
        subprocess.run(
            ["bash", ROOT / "scripts/slurm/build_image.sbatch"], check=True, cwd=tmp_path,
            env={**_storage(tmp_path, "vfs"), **settings},
        )  # fmt: skip
        print(*(f"{path.name}: {path.stat().st_size} bytes" for path in tmp_path.glob("*.tar")))
        with tarfile.open(output) as image:
            [layer] = [file for file in image if file.isfile() and file.name.endswith(".tar")]
            with tarfile.open(fileobj=image.extractfile(layer)) as files:
                assert files.extractfile("content").read().decode() == content
        assert list(tmp_path.glob("*.tar")) == [output]


def test_the_build_leaves_labels_a_health_check_and_a_user_who_is_not_root(image: Image) -> None:
    print(*image.last_lines, image.buildah("images"), sep="\n")
    config = json.loads(image.buildah("inspect", "--type", "image", "optimus-cc"))["Docker"]["config"]
    assert config["User"] == "10001" and config["WorkingDir"] == "/workspace"
    assert config["Healthcheck"]["Test"] == ["CMD", "optimus-cc", "doctor"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert labels["org.opencontainers.image.base.name"] == "localhost/base"
    assert re.fullmatch("[0-9a-f]{40}(-dirty)?", labels["org.opencontainers.image.revision"])


def test_constraints_of_the_base_hold_and_an_old_package_comes_in_its_locked_version(image: Image) -> None:
    frozen = image.run("cat", "/opt/optimus-cc.freeze.txt").splitlines()
    locked = (ROOT / "requirements.lock").read_text().splitlines()
    assert "matplotlib==3.10.8" in frozen and "matplotlib==3.10.8" not in locked
    assert next(line for line in locked if line.startswith("transformers==")) in frozen


def test_a_base_without_transformer_engine_is_refused_by_name(image: Image, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", ROOT / "scripts/slurm/build_image.sbatch", "--isolation", "chroot"], cwd=tmp_path,
        env={**image.environment, "BUILDER": "buildah", "BASE_IMAGE": "localhost/base", "OPTIMUS_CC_ROOT": str(ROOT)}
        | {"MEGATRON_LM": image.checkout, "SPACE_GB": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode != 0 and "transformer_engine: the base image lacks it" in done.stdout


def test_the_doctor_finds_the_locked_megatron_and_every_seam(image: Image) -> None:
    report = image.run("sh", "-c", "id -u; pwd; optimus-cc doctor")
    print(report)
    assert report.startswith("10001\n/workspace\n")
    locked = next(line for line in (ROOT / "requirements.lock").read_text().splitlines() if "megatron-core" in line)
    assert f"{locked.partition('==')[2]} is supported" in report
    assert "FAIL" not in report


def test_what_runs_is_what_was_installed(image: Image) -> None:
    where = image.run("python", "-c", "import optimus_cc_ext; print(optimus_cc_ext.__file__)").strip()
    assert "site-packages" in where


def test_the_quickstart_runs_inside(image: Image) -> None:
    command = "cd /opt/optimus-cc && python -m scripts.quickstart --tiny --max-mb 1 --output /workspace/quickstart"
    output = image.run("sh", "-c", command)
    print(output)
    assert "final validation loss" in output and "index.html" in output


@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM names no checkout of Megatron-LM")
def test_megatron_lms_own_script_trains_inside_on_the_installed_megatron(image: Image) -> None:
    output = image.run(
        "/opt/optimus-cc/scripts/pretrain_gpt.sh", "--optimus-cc", "--transformer-impl", "local",
        *("--distributed-backend", "gloo", "--eval-iters", "0", "--no-gradient-accumulation-fusion"),
        *("--no-masked-softmax-fusion", "--no-persist-layer-norm", "--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
        MODEL="tiny", TRAIN_ITERS="2", PIPELINE_PARALLEL="2", CHECKPOINT_DIR="none",
    )  # fmt: skip
    print(*output.splitlines()[-12:], sep="\n")
    assert "iteration        2/       2" in output
