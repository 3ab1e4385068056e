"""build_image.sbatch: its steps for each builder, and the image that it leaves; the builders here only print."""

from pathlib import Path

import pytest

from tests.shell_scripts import ROOT
from tests.slurm.test_submit import Run, run

__all__ = ["run"]  # the fixture that the tests use


@pytest.mark.parametrize("name", ["optimus-cc.sqsh", "optimus-cc.tar"])
def test_an_image_rebuilt_takes_the_place_of_the_old_one(name: str, run: Run, tmp_path: Path) -> None:
    image = tmp_path / "work" / name
    image.write_text("old")
    ended = run("build_image.sbatch", OPTIMUS_CC_ROOT=str(ROOT), OUTPUT=name, BUILDER="buildah", SPACE_GB="0")
    assert ended.code == 0, ended.errors
    assert image.read_text() == "new\n" and list(image.parent.iterdir()) == [image]


@pytest.mark.parametrize(
    "builder, output", [("buildah", "x.sif"), ("podman", "x.sqsh"), ("podman", "x.tar"), ("apptainer", "x.sif")]
)
def test_the_steps_of_a_build_can_be_pasted(builder: str, output: str, run: Run, tmp_path: Path) -> None:
    settings = {"OPTIMUS_CC_ROOT": str(ROOT), "OUTPUT": output, "BUILDER": builder, "SPACE_GB": "0", "EXTRAS": ""}
    printed = run("build_image.sbatch", **settings, DRY_RUN="yes")
    assert printed.code == 0 and list((tmp_path / "work").iterdir()) == [], printed.errors
    (tmp_path / "bin/podman").write_text('#!/bin/sh\ntest "$1" != save || echo new > "$3"; echo podman "$@"\n')
    done = run(*_pasted(printed.output, tmp_path))
    assert done.code == 0 and (tmp_path / "work" / output).read_text() == "new\n", done.errors
    assert ("EXTRAS=" in done.output.split()) or "export EXTRAS='' " in done.output, "empty: no extras"
    (tmp_path / "work" / output).unlink()
    (tmp_path / "bin" / ("apptainer" if output == "x.sif" else "mksquashfs")).unlink()
    if output != "x.tar":
        assert "which 'x.s" in run("build_image.sbatch", **settings, DRY_RUN="yes").errors, "missing here"


def _pasted(lines: str, folder: Path) -> tuple[str]:
    (folder / "pasted").write_text(f"#!/bin/bash\nset -e\n{lines}")
    (folder / "pasted").chmod(0o755)
    return (str(folder / "pasted"),)


def test_an_image_that_could_not_be_made_leaves_the_old_one(run: Run, tmp_path: Path) -> None:
    image = tmp_path / "work/optimus-cc.sqsh"
    image.write_text("old")
    (tmp_path / "bin/enroot").write_text("#!/bin/sh\necho half > $3\nexit 1\n")
    settings = {"OPTIMUS_CC_ROOT": str(ROOT), "BUILDER": "buildah", "SPACE_GB": "0"}
    assert run("build_image.sbatch", **settings, OUTPUT="optimus-cc.sqsh").code == 1
    assert image.read_text() == "old" and list(image.parent.iterdir()) == [image]
    for program, output in (("apptainer", "optimus-cc.sif"), ("mksquashfs", "optimus-cc.sqsh")):
        if not Path(f"/usr/bin/{program}").exists():
            (tmp_path / "bin" / program).unlink()
            ended = run("build_image.sbatch", **settings, OUTPUT=output)
            assert ended.code == 2 and f"takes {program} with buildah, which is not on PATH" in ended.errors
            assert ended.output == ""
    ended = run("build_image.sbatch", **settings | {"SPACE_GB": "99999999"}, OUTPUT="optimus-cc.tar")
    assert ended.code == 2 and "GB are free in its folder, and a build takes 99999999" in ended.errors


def test_without_a_builder_pyxis_saves_and_apptainer_builds_what_the_one_install_script_made(
    run: Run, tmp_path: Path
) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "pretrain_gpt.py").touch()
    settings = {"OPTIMUS_CC_ROOT": str(ROOT), "SPACE_GB": "0", "MEGATRON_LM": str(checkout), "EXTRAS": "report,wandb"}
    settings["BASE_IMAGE"] = "registry.example/team/pytorch:26.06@sha256:abc"
    (tmp_path / "bin/srun").write_text(
        '#!/bin/sh\nfor word; do case "$word" in --container-save=*) echo new > "${word#*=}";; esac; done\n'
        'printf "%s\\n" "$@"\n'
    )
    saved = run("build_image.sbatch", **settings, BUILDER="pyxis", OUTPUT="optimus-cc.sqsh")
    assert saved.code == 0, saved.errors
    words = saved.output.splitlines()
    assert "--container-image=registry.example#team/pytorch:26.06" in words and "--container-remap-root" in words
    assert f"--container-mounts={ROOT}:/tmp/repository:ro,{checkout}:/tmp/checkout:ro" in words
    assert "the digest sha256:abc was not checked" in saved.errors
    ported = run("build_image.sbatch", **settings | {"BASE_IMAGE": "host:5000/x"}, BUILDER="pyxis", OUTPUT="x.sqsh")
    assert "--container-image=host:5000#x" in ported.output.splitlines()
    built = run("build_image.sbatch", **settings, BUILDER="apptainer", OUTPUT="optimus-cc.sif")
    assert built.code == 0, built.errors
    definition = built.output
    assert "Bootstrap: docker\nFrom: registry.example/team/pytorch@sha256:abc\n" in definition
    assert (
        f"    {ROOT}/scripts /tmp/repository/scripts\n" in definition
        and f"    {checkout} /tmp/checkout\n" in definition
    )
    for inside in (saved.output, definition):
        assert "export EXTRAS='report,wandb'" in inside
        for step_of_install in ("dependencies", "package", "megatron /tmp/checkout"):
            assert f"scripts/image/install.sh {step_of_install}\n" in inside
    # After the builds only the two images are left in the folder.
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"optimus-cc.sqsh", "optimus-cc.sif", "x.sqsh"}
    refused = run("build_image.sbatch", **settings, BUILDER="pyxis", OUTPUT="optimus-cc.sif")
    assert refused.code == 2 and "'optimus-cc.sif' is not what Pyxis saves" in refused.errors
