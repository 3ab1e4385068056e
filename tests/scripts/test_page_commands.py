"""Every command of the pages is run here or by a test that this file names, or has options that its program takes.

`python -m tests.scripts.test_page_commands` prints what is done with each command.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

ELSEWHERE = {
    "docs/cluster.md: ": "tests/slurm/test_cluster_page.py",
    "docs/does-it-help.md: (optimus-cc plan .* --sweep|for FILE)": "tests/plan/test_does_it_help.py",
    r"docs/does-it-help.md: .* --nccl-tests": "tests/plan/test_measured.py",
    r".*: (\./)?scripts/(setup_env|quickstart)\.sh": "tests/megatron/test_quickstart_runs.py",
    r".*: pip install": "tests/megatron/test_wheel.py",
    r"docs/paper.md: scripts/eval/": "tests/megatron/test_evaluation.py",
    r"docs/paper.md: scripts/paper/(?!.*--dry-run)": "tests/scripts/test_paper_experiments.py",
    r".*: (PYTHONPATH=\S+ )?torchrun|docs/start.md: PYTHONPATH=": "tests/megatron/test_launcher.py",
}
"""Commands that another test runs, with a model, a cluster's output or a checkout of its own in the reader's place."""

LONG = (
    r".*: (\./scripts/test\.sh|all_reduce_perf|export )"
    r"|.*(scripts\.study|scripts\.bench|scripts\.paper|: cluster |: grid |\$GRID )(?!.*--show)"
)
"""Commands that take more than a minute, or a program of a cluster. Those of our programs must have known options."""

FORMS = (
    r"RUN|CLASS|BEFORE|VANILLA|INPUT|TEXT|<launch|doctor --gpu|preflight\.json|--record"
    r"|^optimus-cc (plan$|report$|traffic|compression)"
)
"""Forms of commands and names in sentences, which are no commands, and commands that take a GPU."""

FLAGS = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 1 --global-batch-size 64 --train-iters 10 --lr 1e-4 --mock-data --tokenizer-type NullTokenizer "
    "--vocab-size 512"
)
PLACEHOLDERS = {
    "<your flags>": FLAGS, "torchrun ...": "torchrun --nproc-per-node 8 -m optimus_cc_ext", " pretrain_gpt.py": "",
}  # fmt: skip
"""Examples of the words that a reader fills in."""


ASSIGNED = re.compile(r"([A-Za-z]\w*=(\"[^\"]*\"|\S+)\s*)+")
"""A line of a block that only sets variables."""


class Command(NamedTuple):
    """A command of a page, with the assignments and functions that stand before it in its block."""

    page: str
    line: str
    before: str = ""

    @property
    def name(self) -> str:
        """Page and command."""
        return f"{self.page}: {self.line}"


def commands() -> list[Command]:
    """Return each command of the bash blocks, and those of `optimus-cc` and `python -m` in the sentences."""
    found = []
    for page in PAGES:
        text, name = page.read_text(), page.relative_to(ROOT).as_posix()
        for block in re.findall(r"^ *```bash\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
            before, loop = "", []
            for line in re.sub(r"\\\n", " ", block).splitlines():
                words = line.split("  #")[0].strip()
                if words.startswith("for ") or loop:
                    loop.append(words)
                    if words != "done":
                        continue
                    words, loop = "\n".join(loop), []
                if ASSIGNED.fullmatch(words) or re.match(r"[a-z]+\(\) ", words):
                    before += words + "\n"
                elif words and not words.startswith("#"):
                    found.append(Command(name, words, before))
        prose = re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)
        inline = re.findall(r"`((?:optimus-cc|python -m|scripts/api_reference\.sh) [^`]*)`", " ".join(prose.split()))
        found += [Command(name, line) for line in dict.fromkeys(inline)]
    return found


def is_elsewhere(command: Command) -> bool:
    return any(re.match(pattern, command.name) for pattern in ELSEWHERE)


def is_long(command: Command) -> bool:
    return re.match(LONG, command.name) is not None


def is_form(command: Command) -> bool:
    return re.search(FORMS, command.line) is not None


TO_RUN = list(
    {each.line: each for each in commands() if not (is_elsewhere(each) or is_long(each) or is_form(each))}.values()
)
"""Commands that are run here, each once if several pages have it."""


def run(command: Command, folder: Path) -> str:
    """Run a command as a reader would, with the environment's programs on PATH."""
    line = command.line.replace(".venv/bin/python", sys.executable).replace("sh FILE", f"sh {folder / 'file'}")
    line = re.sub(r"^(?=scripts/)", f"{ROOT}/", line)
    for words, example in PLACEHOLDERS.items():
        line = line.replace(words, example)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OPTIMUS_CC_DEVICE": "cpu"}
    ended = subprocess.run(
        ["bash", "-c", command.before.replace(".venv/bin/python", sys.executable) + line],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, f"{line}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended.stdout


def test_every_command_is_run_or_has_its_test() -> None:
    known = commands()
    assert len(known) > 60 and len(TO_RUN) >= 10
    for pattern, test in ELSEWHERE.items():
        assert (ROOT / test).exists() and any(re.match(pattern, each.name) for each in known), pattern


@pytest.mark.full
@pytest.mark.parametrize("command", TO_RUN, ids=lambda command: command.name[:60])
def test_a_command_of_a_page_does_what_the_page_says(command: Command, tmp_path: Path) -> None:
    run(command, tmp_path)


def test_a_pasted_command_leaves_no_quote_open() -> None:
    for command in commands():
        assert shlex.split(command.line), command.name


def test_the_readmes_plan_runs_as_it_stands(tmp_path: Path) -> None:
    (plan,) = [each for each in commands() if each.page == "README.md" and " plan " in each.line]
    assert not re.search("|".join(map(re.escape, PLACEHOLDERS)), plan.line)
    assert "use: --tensor-model-parallel-size 8" in run(plan, tmp_path)


def program_of(command: Command) -> str | None:
    """Return the module of a long command, with the functions of its block replaced."""
    whole = command.line
    for name, words in re.findall(r"^(\w+)\(\) \{ (.*?) \"\$@\"; \}|^", command.before, re.MULTILINE):
        whole = re.sub(rf"^{name} ", f"{words} ", whole) if name else whole
    for name, words in re.findall(r"^(\w+)=\"([^\n]*)\"$", command.before, re.MULTILINE):
        whole = whole.replace(f"${name}", words)
    found = re.search(r"python -m (scripts[\w.]+)", whole)
    return found[1] if found else None


PROGRAMS = sorted({program for each in commands() if is_long(each) and (program := program_of(each))})


@pytest.mark.full
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_long_command_has_options_that_its_program_takes(program: str) -> None:
    shown = subprocess.run([sys.executable, "-m", program, "--help"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    for command in commands():
        if is_long(command) and program_of(command) == program:
            options = re.findall(r"(?<!\S)--[a-z][a-z-]*", re.sub(r'"[^"]*"', "", command.line).partition(" -- ")[0])
            assert [option for option in options if option not in shown.stdout] == [], command.line


if __name__ == "__main__":
    for each in commands():
        kind = "elsewhere" if is_elsewhere(each) else "long" if is_long(each) else "form" if is_form(each) else "RUN"
        print(f"{kind:10}{each.name[:150]!r}")
    print(PROGRAMS)
