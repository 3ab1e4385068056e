"""The reference of the Python API, which scripts/api_reference.sh writes, has every public function."""

import inspect
import subprocess
from pathlib import Path

import pytest

import optimus_cc_ext
from optimus_cc_ext import api

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "api_reference.sh"


@pytest.mark.full
def test_every_public_function_is_there_with_its_arguments_and_its_first_line(tmp_path: Path) -> None:
    page = tmp_path / "api.md"
    subprocess.run([SCRIPT, page], check=True, cwd=tmp_path)
    text = page.read_text()
    for name in api.__all__:
        assert getattr(optimus_cc_ext, name) is getattr(api, name)
        function = getattr(api, name)
        section = text.split(f"\n### `optimus_cc_ext.api.{name}`\n")[1].split("\n### ")[0]
        assert (inspect.getdoc(function) or "").splitlines()[0] in section
        for parameter in inspect.signature(function).parameters:
            assert parameter in section, f"{name}({parameter})"


def test_without_a_file_the_script_says_what_it_needs() -> None:
    ended = subprocess.run([SCRIPT], capture_output=True, text=True)
    assert ended.returncode == 2 and "scripts/api_reference.sh FILE" in ended.stderr
