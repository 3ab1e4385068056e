"""Real checkouts of Megatron-LM and of its forks, patched: every entry script takes the block and gives it back, and
plain `torchrun pretrain_gpt.py` trains with us.

    MEGATRON_LM_CHECKOUTS=/path/to/one:/path/to/another scripts/test.sh tests/megatron/test_patched_checkouts.py

Each is cloned first, so that none is changed.
"""

import ast
import os
import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from optimus_cc_ext.tools.patch.block import BLOCK
from tests.megatron.test_launcher import ROOT, Ended, logged_losses, mark, processes_of, torchrun
from tests.megatron_runs import TINY_GPT

__all__ = ["mark"]  # a fixture

VARIABLE = "MEGATRON_LM_CHECKOUTS"
CHECKOUTS = [Path(path) for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
NONE_GIVEN = pytest.mark.skip(reason=f"{VARIABLE} names no checkout of Megatron-LM")
EACH_CHECKOUT = pytest.mark.parametrize(
    "checkout", CHECKOUTS or [pytest.param(None, marks=NONE_GIVEN)], indirect=True, ids=lambda path: path and path.name
)

APPLY = ROOT / "patches" / "apply.sh"
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


@EACH_CHECKOUT
def test_every_entry_script_takes_the_block_and_gives_it_back(checkout: Path) -> None:
    sources = {path: path.read_bytes() for path in checkout.rglob("*.py") if "tests" not in path.parts}
    scripts = {
        path: source
        for path, source in sources.items()
        if re.search(rb"^ +pretrain\(", source, re.MULTILINE) or re.match(r"(pretrain_|train).*\.py", path.name)
        if path.relative_to(checkout).parts[0] != "megatron"
    }
    assert len(scripts) >= 4
    names = [path.relative_to(checkout) for path in scripts]
    print(output_of(APPLY, ".", *names, cwd=checkout))
    for path, source in scripts.items():
        patched = path.read_bytes()
        assert len(ast.parse(patched).body) == len(ast.parse(source).body) + 1
        assert patched.replace(BLOCK.encode(), b"") == source
    print(output_of(APPLY, ".", *names, "--undo", cwd=checkout))
    assert output_of("git", "status", "--porcelain", cwd=checkout) == ""


@EACH_CHECKOUT
def test_a_patched_checkout_trains_as_with_the_launcher_and_undone_it_is_clean(
    checkout: Path, mark: str, request: pytest.FixtureRequest
) -> None:
    launched = train(checkout, mark, ["-m", "optimus_cc_ext", "pretrain_gpt.py"])
    said = output_of(APPLY, ".", cwd=checkout)
    assert re.fullmatch(r"\./pretrain_gpt\.py: patched at line \d+ ahead of the import .*\n", said)
    assert output_of("git", "status", "--porcelain", cwd=checkout) == " M pretrain_gpt.py\n"
    known = ROOT / "patches" / request.node.callspec.params["checkout"].name / "pretrain_gpt.patch"
    if known.is_file():
        inserted = output_of("git", "diff", "--unified=0", cwd=checkout).splitlines()[-1 - BLOCK.count("\n") :]
        assert [line.split(" @@")[0] for line in inserted] == [
            x.split(" @@")[0] for x in known.read_text().splitlines()[2:]
        ]
    plain = train(checkout, mark, ["pretrain_gpt.py"])

    for ended in (launched, plain):
        assert ended.output.count(f"optimus-cc: Megatron from {checkout / 'megatron'}") == 1
        assert len(re.findall(r"traffic per iteration \| .*DP gradients: .* MB \([1-9]\d?\.\d %\)", ended.output)) == 3
    assert len(logged_losses(plain.output)) == 3
    assert logged_losses(plain.output) == logged_losses(launched.output)

    assert ": undone, the block stood at line" in output_of(APPLY, ".", "--undo", cwd=checkout)
    assert output_of("git", "status", "--porcelain", cwd=checkout) == ""
