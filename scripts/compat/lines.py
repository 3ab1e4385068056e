"""Megatron-LM's functional test cases as launch lines with mock data."""

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Line", "training_lines"]

_FOLDERS = ("gpt", "moe", "mixtral", "hybrid", "deepseek")
_DATA = ("--data-path", "--vocab-file", "--merge-file", "--tokenizer-model", "--tokenizer-type", "--mock-data")


@dataclass(frozen=True)
class Line:
    """One training run of Megatron-LM's functional tests."""

    case: str
    """Folder and name of the test case."""

    script: str
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    ranks: int
    """The smallest of 8, 16, 32, ... ranks that hold two replicas, or the least that the parallelism divides."""

    @property
    def words(self) -> list[str]:
        """The launch line, variables and launcher included; our flags can follow."""
        variables = [f"{name}={value}" for name, value in self.environment]
        torchrun = ["torchrun", "--nnodes", str(self.ranks), "--nproc-per-node", "1", "-m", "optimus_cc_ext"]
        return ["env", *variables, *torchrun, self.script, *self.flags]

    @property
    def distinct(self) -> tuple[Any, ...]:
        """The part of the line that tells it from others; equal for the same flags in another order."""
        return self.script, frozenset(zip(self.flags, (*self.flags[1:], ""), strict=True))


def training_lines(checkout: Path) -> list[Line]:
    """Return the training runs among the functional test cases of a Megatron-LM checkout."""
    tests = checkout / "tests" / "functional_tests" / "test_cases"
    files = sorted(path for folder in _FOLDERS for path in tests.glob(f"{folder}/*/model_config.yaml"))
    return [line for path in files if (line := _line(checkout, path)) is not None]


def _line(checkout: Path, path: Path) -> Line | None:
    # BaseLoader keeps every value as the text that the runner passes on.
    case = yaml.load(path.read_text(), yaml.BaseLoader)
    arguments = case.get("MODEL_ARGS") or {}
    trains = case.get("MODE", "pretraining") == "pretraining" and "--skip-train" not in arguments
    if not trains or arguments.keys().isdisjoint(("--train-iters", "--train-samples")):
        return None
    flags = tuple(_flags(arguments))
    script = "pretrain_hybrid.py" if path.parent.parent.name == "hybrid" else "pretrain_gpt.py"
    environment = tuple((name, str(value)) for name, value in (case.get("ENV_VARS") or {}).items())
    return Line(
        f"{path.parent.parent.name}/{path.parent.name}", str(checkout / script), flags, environment, _ranks(arguments)
    )


def _flags(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the words of a case, without its files; brackets are stripped as Megatron's own runner strips them."""
    for flag, value in arguments.items():
        text = " ".join(value) if isinstance(value, list) else str(value)
        if flag in _DATA or "${" in text:
            continue
        yield flag
        if text.startswith("["):
            yield from shlex.split(text.removeprefix("[").removesuffix("]"))
        elif isinstance(value, list):
            yield from shlex.split(text)
        elif text != "true":
            yield text.strip("'\"")
    # Megatron has no mock data for fill-in-the-middle; nothing is opened before training starts.
    yield from ["--data-path", "text_document"] if "--fim-data" in arguments else ["--mock-data"]
    yield from ("--tokenizer-type", "NullTokenizer")
    if "--vocab-size" not in arguments:
        yield from ("--vocab-size", "50257")


def _ranks(arguments: Mapping[str, Any]) -> int:
    def size(name: str, default: int = 1) -> int:
        return int(arguments.get(f"--{name}", default))

    tensor, stages = size("tensor-model-parallel-size"), size("pipeline-model-parallel-size")
    model = tensor * stages * size("context-parallel-size")
    experts = size("expert-tensor-parallel-size", tensor) * size("expert-model-parallel-size") * stages
    instances = size("num-distributed-optimizer-instances")
    unit = model
    while unit % experts or (unit // model) % instances:
        unit += model
    ranks = unit
    while ranks < 8 or ranks // (tensor * stages) < 2:
        ranks += unit
    return ranks
