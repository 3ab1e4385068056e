"""docs/api.md is up to date: scripts/api_reference.sh was run after the last change of a public name or argument."""

import inspect
from pathlib import Path

import optimus_cc_ext
from optimus_cc_ext import api

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def test_every_public_function_is_there_with_its_arguments_and_its_first_line() -> None:
    for name in api.__all__:
        assert getattr(optimus_cc_ext, name) is getattr(api, name)
        function = getattr(api, name)
        section = PAGE.split(f"### `optimus_cc_ext.api.{name}`\n")[1].split("\n### ")[0]
        assert (inspect.getdoc(function) or "").splitlines()[0] in section
        for parameter in inspect.signature(function).parameters:
            assert parameter in section, f"{name}({parameter})"
