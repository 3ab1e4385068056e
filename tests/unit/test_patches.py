"""patches/ holds what is inserted into each tag's file; the lines load us at the start of a script, or say why not."""

import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from optimus_cc_ext import startup
from optimus_cc_ext.tools.patch.block import BLOCK
from tests.launches import Launch, call, launch

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parents[2]
PATCHES = ROOT / "patches"
TAGS = sorted(folder.name for folder in PATCHES.iterdir() if folder.is_dir())


@pytest.mark.parametrize("tag", TAGS)
def test_every_patch_inserts_the_block_and_nothing_else(tag: str) -> None:
    names, (hunk, *body) = (lines := (PATCHES / tag / "pretrain_gpt.patch").read_text().splitlines())[:2], lines[2:]
    assert names == ["--- a/pretrain_gpt.py", "+++ b/pretrain_gpt.py"]
    after, first, count = map(int, re.fullmatch(r"@@ -(\d+),0 \+(\d+),(\d+) @@", hunk).groups())  # type: ignore[union-attr]
    assert first == after + 1 and count == len(body)
    assert body == [f"+{line}" for line in BLOCK.splitlines()]


# -- what the block does ------------------------------------------------------------------------------------------


def run_the_block(folder: str, run_name: str, times: int = 1) -> bool:
    """Return whether Megatron's parser knows our flags after the block has run; called in a forked rank."""
    import argparse

    from megatron.training import arguments

    # This rank has imported Megatron. A script has not when its block runs, and imports it then.
    core = sys.modules.pop("megatron.core")
    for _ in range(times):
        runpy.run_path(f"{folder}/pretrain_gpt.py", run_name=run_name)
    sys.modules["megatron.core"] = core
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return "--optimus-cc" in parser._option_string_actions


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "pretrain_gpt.py"
    path.write_text(BLOCK)
    return path


@pytest.mark.parametrize("times", [1, 2])
def test_as_a_script_the_block_loads_us_and_says_so_once(script: Path, times: int) -> None:
    """A shim runs its block, and then that of the script that it starts."""
    found = call(run_the_block, str(script.parent), "__main__", times)
    assert found.code is True, found.output
    assert [line.split(" from ")[0] for line in found.ours] == [
        "optimus-cc: running on CPU over gloo (OPTIMUS_CC_DEVICE=cpu)",
        "optimus-cc: Megatron",
    ]


def test_imported_by_another_script_the_block_does_nothing(script: Path) -> None:
    assert call(run_the_block, str(script.parent), "pretrain_gpt") == Launch(False, "")


def started(script: Path, *flags: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, *flags, script], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stderr


def test_without_our_package_the_block_says_what_to_install(script: Path) -> None:
    # Under -I -S Python searches neither the current folder nor site-packages.
    status, said = started(script, "-I", "-S")
    last = said.splitlines()[-1]
    assert status == 1 and last.startswith("ImportError: ") and "optimus_cc_ext, which is not installed" in last
    assert "pip install" in last and "delete the lines from `# >>> optimus-cc`" in last


@pytest.mark.parametrize(
    ("ahead", "importer"),
    [("from gpt_builders import built", "gpt_builders ({folder}/gpt_builders.py)"),
     pytest.param("import megatron.core", "__main__ ({script})", marks=pytest.mark.ci)],
)  # fmt: skip
def test_a_block_that_comes_too_late_names_who_imported_megatron(script: Path, ahead: str, importer: str) -> None:
    core = script.parent / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text("def build():\n    pass\n")
    (script.parent / "gpt_builders.py").write_text("from megatron.core import build\nbuilt = 1\n")
    script.write_text(f"{ahead}\n{BLOCK}print('trains')\n")
    status, said = started(script)
    assert status == 2
    assert said.startswith("optimus-cc: error: megatron.core was imported ahead of Optimus-CC's block, by ")
    assert importer.format(folder=script.parent, script=script) in said
    assert "move the block" in said and f"optimus-cc patch {script} --undo" in said


# -- one Megatron -------------------------------------------------------------------------------------------------


@pytest.fixture
def other_megatron(tmp_path: Path) -> Path:
    core = tmp_path / "other" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    return tmp_path / "other"


def refusal(found: Launch, other: Path) -> None:
    assert found.code == 2, found.output
    [said] = [line for line in found.ours if "error" in line]
    assert re.search(r"megatron\.core was imported from \S+/megatron/core, but the script has changed sys\.path", said)
    assert f"would import it from {other}/megatron/core. Let both see the same: PYTHONPATH={other}" in said


def put_into_path(place: int, folder: str) -> None:
    sys.path.insert(place, folder)


def test_a_script_that_leads_to_another_megatron_is_refused_with_every_technique_off(other_megatron: Path) -> None:
    refusal(launch([], before=partial(put_into_path, 0, str(other_megatron))), other_megatron)
    last = launch([], before=partial(put_into_path, 1000, str(other_megatron)))
    assert last.accepted, "the imported one comes first"


def test_so_it_is_if_what_it_imports_does_not_fit(other_megatron: Path, script: Path) -> None:
    script.write_text(f"import sys\nsys.path.insert(0, {str(other_megatron)!r})\nfrom megatron.core import absent\n")
    refusal(call(startup.launch, [str(script)]), other_megatron)
    script.write_text("from megatron.core import absent\n")
    assert "ImportError: cannot import name 'absent'" in call(startup.launch, [str(script)]).output


# -- the face for a checkout --------------------------------------------------------------------------------------


def run_apply(*arguments: str | Path, **more: Any) -> tuple[int, str]:
    ended = subprocess.run(
        ["bash", PATCHES / "apply.sh", *arguments], text=True, timeout=60, check=False, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, **more,
    )  # fmt: skip
    return ended.returncode, ended.stdout


def test_apply_patches_the_scripts_of_a_checkout_and_undoes_it(tmp_path: Path) -> None:
    checkout = tmp_path / "their checkout"
    scripts = [checkout / "pretrain_gpt.py", checkout / "examples" / "train.py"]
    scripts[1].parent.mkdir(parents=True)
    for script in scripts:
        script.write_text("import megatron.core\n")
    assert run_apply(checkout) == (0, f"{scripts[0]}: patched at line 1 ahead of the import megatron.core\n")
    assert scripts[1].read_text() == "import megatron.core\n"
    status, said = run_apply(checkout, "--undo", "pretrain_gpt.py", "examples/train.py")
    assert (status, said) == (0, f"{scripts[0]}: undone, the block stood at line 1\n{scripts[1]}: not patched\n")
    assert scripts[0].read_text() == "import megatron.core\n"
    status, said = run_apply(checkout, "absent.py")
    assert status == 2 and f"{checkout}/absent.py is no file" in said


@pytest.mark.parametrize("arguments", [(), ("--check",), (".", "--frog"), (".", "--check", "--undo")])
def test_a_wrong_call_shows_how_to_call_it(arguments: tuple[str, ...]) -> None:
    status, said = run_apply(*arguments)
    assert status == 2 and ("patches/apply.sh DIR [SCRIPT ...] --undo" in said or "usage: optimus-cc" in said)


# -- what --check says of the Megatron that a script finds --------------------------------------------------------


def removed_then_checked(script: str, lacking: str) -> int:
    """Run --check in a rank that has this Megatron, without one function."""
    from megatron.training import training

    from optimus_cc_ext.tools.cli import main

    if lacking:
        delattr(training, lacking)
    return main(["patch", script, "--check"])


@pytest.mark.parametrize("lacking", ["", "train_step"])
def test_check_prints_megatron_its_version_seams_and_attributes(script: Path, lacking: str) -> None:
    script.write_text("import megatron.core\n")
    ended = call(removed_then_checked, str(script), lacking)
    said = ended.output
    assert ended.code == int(bool(lacking)), "the status says whether training would start"
    assert said.startswith(
        f"{script}: not patched; the block would stand at line 1 ahead of the import megatron.core\n"
    )
    assert re.search(r"^megatron\.core from: \S+/megatron/core$", said, re.MULTILINE)
    [(held, seams)] = re.findall(r"^seams: (\d+) of (\d+) are as expected$", said, re.MULTILINE)
    assert int(held) == int(seams) - bool(lacking) > 20
    assert (f"\nseam megatron.training.training:{lacking}: " in said) == bool(lacking)
    if not lacking:
        assert re.search(r"^megatron version: \d+\.\d+\.\d+ is supported$", said, re.MULTILINE)


def checked_without_megatron(script: str) -> int:
    """Run --check in a rank that finds no Megatron."""
    from optimus_cc_ext.tools.cli import main

    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules["megatron"] = None  # type: ignore[assignment]  # So Python refuses the import.
    return main(["patch", script, "--check"])


def test_check_says_where_no_megatron_is_found(script: Path) -> None:
    script.write_text("import megatron.core\n")
    ended = call(checked_without_megatron, str(script))
    assert ended.code == 2 and "error: megatron.core cannot be imported here. Install megatron-core" in ended.output
