"""Checkouts of other versions and forks of Megatron-LM: off is vanilla to the bit, and both presets train.

    MEGATRON_LM_OTHERS=/path/to/one:/path/to/another scripts/test.sh --full tests/megatron/test_other_checkouts.py

Give core_v0.16.0, core_v0.16.1, the main branch, and the forks to be tried.
"""

import os

import pytest

from tests.shell_scripts import run_script

VARIABLE = "MEGATRON_LM_OTHERS"
CHECKOUTS = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
NONE_GIVEN = pytest.mark.skip(reason=f"{VARIABLE} names no checkout of Megatron-LM")


@pytest.mark.full
@pytest.mark.parametrize("checkout", CHECKOUTS or [pytest.param("", marks=NONE_GIVEN)])
def test_a_checkout_trains_as_vanilla_with_everything_off_and_compressed(checkout: str) -> None:
    ended = run_script("compat_entries.sh", checkout, limit=900)
    assert ended.code == 0, ended.errors
    vanilla, *others = ended.output.splitlines()[-1].strip("| ").split(" | ")[2:]
    assert vanilla.endswith(" (w)") and len(others) == 3, ended.output
    off, *presets = others
    assert off == vanilla and all(len(preset.split()) == 4 for preset in presets), ended.output
