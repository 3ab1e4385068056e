"""Real Megatron-LM checkouts, patched: plain `torchrun pretrain_gpt.py` trains with us, and undoing leaves no change.

    MEGATRON_LM_CHECKOUTS=/path/to/one:/path/to/another scripts/test.sh tests/megatron/test_patched_checkouts.py

Each is cloned first, so that none is changed. Each has to be at a tag that patches/ knows.
"""

import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.megatron.test_launcher import ROOT, Ended, logged_losses, mark, processes_of, torchrun
from tests.megatron_runs import TINY_GPT

__all__ = ["mark"]  # a fixture

VARIABLE = "MEGATRON_LM_CHECKOUTS"
CHECKOUTS = [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
NONE_GIVEN = pytest.mark.skip(reason=f"{VARIABLE} names no checkout of Megatron-LM")
VERSIONS = {"core_v0.17.1": "0.17.1", "core_v0.18.2": "0.18.2", "core_v0.19.0": "0.19.1"}
"""Version that Megatron reports at each tag."""

FLAGS = [*TINY_GPT, "--pipeline-model-parallel-size", "2", "--train-iters", "3"]
TECHNIQUES = ["--optimus-cc", "--compressed-backprop-rank", "4", "--dp-compression-rank", "8"]


def output_of(*command: str | Path, cwd: Path) -> str:
    return subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.PIPE, text=True).stdout


@pytest.fixture
def checkout(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Clone a checkout, with the dataset helper that Megatron would otherwise compile: its source is the same at every
    tag.
    """
    clone = tmp_path / "Megatron-LM"
    output_of("git", "clone", "--quiet", request.param, clone, cwd=tmp_path)
    helper = find_spec("megatron.core.datasets.helpers_cpp")
    assert helper is not None and helper.origin is not None
    (clone / "megatron/core/datasets" / Path(helper.origin).name).symlink_to(helper.origin)
    return clone


def train(checkout: Path, mark: str, program: list[str]) -> Ended:
    ended = torchrun([*FLAGS, *TECHNIQUES], checkout, mark, ranks=4, program=program)
    assert ended.code == 0, ended.output[-3000:]
    assert processes_of(mark) == []
    return ended


@pytest.mark.parametrize(
    "checkout", CHECKOUTS or [pytest.param(None, marks=NONE_GIVEN)], indirect=True, ids=lambda path: path and path.name
)
def test_a_patched_checkout_trains_as_with_the_launcher_and_undone_it_is_clean(checkout: Path, mark: str) -> None:
    apply = ROOT / "patches" / "apply.sh"
    launched = train(checkout, mark, ["-m", "optimus_cc_ext", "pretrain_gpt.py"])

    said = output_of(apply, ".", cwd=checkout)
    tag = re.fullmatch(r"\./pretrain_gpt\.py: (\S+), patched\n", said)[1]
    assert output_of("git", "status", "--porcelain", cwd=checkout) == " M pretrain_gpt.py\n"
    plain = train(checkout, mark, ["pretrain_gpt.py"])

    for ended in (launched, plain):
        assert ended.output.count(f"optimus-cc: Megatron from {checkout / 'megatron'}") == 1
        assert re.search(rf"optimus-cc: compressed backpropagation .* on megatron-core {VERSIONS[tag]}\n", ended.output)
        assert len(re.findall(r"traffic per iteration \| .*DP gradients: .* MB \([1-9]\d?\.\d %\)", ended.output)) == 3
    assert len(logged_losses(plain.output)) == 3
    assert logged_losses(plain.output) == logged_losses(launched.output)

    assert output_of(apply, ".", "--undo", cwd=checkout) == f"./pretrain_gpt.py: {tag}, original\n"
    assert output_of("git", "status", "--porcelain", cwd=checkout) == ""
