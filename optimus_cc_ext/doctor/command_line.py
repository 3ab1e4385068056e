"""Parser of a launch line: finds the script, its flags, and the number of processes. It only reads text."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from optimus_cc_ext.doctor.target import KNOWN_VARIABLES
from optimus_cc_ext.errors import FlagError

__all__ = ["CommandLine", "read_command_line"]

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher")
_OURS = "optimus_cc_ext"

_SCHEDULER_COUNTS = {
    "-N": "nodes", "--nodes": "nodes", "--nnodes": "nodes",
    "-n": "tasks", "--ntasks": "tasks", "-np": "tasks", "--np": "tasks",
    "--ntasks-per-node": "tasks per node", "--tasks-per-node": "tasks per node",
}  # fmt: skip
"""Options of srun and mpirun that give numbers of nodes or processes."""

_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_BEGINNINGS = ("torchrun", "srun", "mpirun", "mpiexec", "python", "python3", "bash", "sh", "uv", "timeout", "numactl")

_TORCHRUN_COUNTS = {"--nnodes": "nodes", "--nproc-per-node": "per node"}


@dataclass(frozen=True)
class CommandLine:
    """The parts of one launch line."""

    flags: tuple[str, ...]
    """The words that Megatron's parser gets."""

    script: str | None = None
    """The training script; None: the package's own entry."""

    world_size: int | None = None
    """Number of processes that the line starts; None: the line does not give it."""

    ranks_per_node: int | None = None
    """Number of processes that the line starts on each node; None: the line does not give it."""

    ours: bool = True
    """True if `python -m optimus_cc_ext` starts the script."""

    launched: bool = True
    """False if the line gives flags only, and nothing says which script takes them."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables in front of the launch line."""


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Parse `[env NAME=VALUE ...] [srun ...] [torchrun ...] [-m optimus_cc_ext] [script.py] <flags>`.

    Raises:
        FlagError: the line runs a shell script, whose flags cannot be seen, a count is not a number, or a word after
            `env` is not a variable.
    """
    environment, words = _environment(_unquoted(words))
    return replace(_launch_line(words), environment=environment)


def _environment(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Split the variables in front of a launch line, with or without `env`, from the line."""
    after_env = bool(words) and PurePath(words[0]).name == "env"
    start = int(after_env)
    variables = {}
    while start < len(words) and (found := _VARIABLE.fullmatch(words[start])):
        variables[found["name"]] = found["value"]
        start += 1
    line = words[start:]
    begins = bool(line) and (line[0].startswith("--") or PurePath(line[0]).name in _BEGINNINGS)
    if after_env and line and not begins and not line[0].endswith((".py", ".sh", ".sbatch")):
        known = ", ".join(f"{name}={value}" for name, value in KNOWN_VARIABLES.items())
        cure = (
            f"Give NAME=VALUE in front of torchrun, srun or python. Megatron's validation reads, for example, {known}"
        )
        raise FlagError(line[0], "this word after env is neither a variable nor the beginning of a launch line", cure)
    return variables, line


def _launch_line(words: list[str]) -> CommandLine:
    if not words or words[0].startswith("--"):
        return CommandLine(tuple(words), launched=False)
    for start, word in enumerate(words):
        if PurePath(word).name == "torchrun" or word in _LAUNCHER_MODULES:
            line, options = _program(words[start + 1 :])
            counts = _counts(options, _TORCHRUN_COUNTS)
            nodes = counts.get("nodes") or _counts(words[:start], _SCHEDULER_COUNTS).get("nodes", 1)
            # torchrun and torch.distributed.launch start one process per node by default.
            per_node = counts.get("per node", 1)
            return replace(line, world_size=nodes * per_node, ranks_per_node=per_node)
        starts_launcher = word == "-m" and words[start + 1 : start + 2] in ([name] for name in _LAUNCHER_MODULES)
        if (word == "-m" and not starts_launcher) or word.endswith(".py"):
            line, _ = _program(words[start:])
            counts = _counts(words[:start], _SCHEDULER_COUNTS)
            return replace(line, world_size=_tasks(counts), ranks_per_node=_tasks_per_node(counts))
        if PurePath(word).suffix in (".sh", ".sbatch"):
            cure = "Give the script's launch line (scripts/pretrain_gpt.sh --dry-run ... prints it), or only the flags"
            raise FlagError(word, "doctor cannot see the flags inside a shell script", cure)
    cure = "Give flags, or torchrun ... pretrain_gpt.py <flags>"
    raise FlagError(words[0], "this word begins neither flags nor a launch line", cure)


def _unquoted(words: Sequence[str]) -> list[str]:
    """Return the words, with the words inside `bash -c "torchrun ..."` split."""
    opened: list[str] = []
    for word in words:
        opened += (
            shlex.split(word) if ("torchrun " in word or ".py " in word) and "=" not in word.split(" ")[0] else [word]
        )
    return opened


def _program(words: Sequence[str]) -> tuple[CommandLine, Sequence[str]]:
    """Return the program that a launcher starts, with its flags, and the launcher's own options before it."""
    for position, word in enumerate(words):
        options, following = words[:position], words[position + 1 :]
        if word.endswith(".py"):
            return CommandLine(tuple(following), script=word, ours=False), options
        if word == "-m" and following[:1] == [_OURS]:
            has_script = len(following) > 1 and not following[1].startswith("-")
            script = following[1] if has_script else None
            return CommandLine(tuple(following[1 + has_script :]), script=script), options
    cure = "Give a script (pretrain_gpt.py) or -m optimus_cc_ext before the flags"
    raise FlagError(words[0] if words else "torchrun", "the line names no training script", cure)


def _counts(options: Sequence[str], names: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers that `options` give, by the kind of count that `names` assigns to each option."""
    counts = {}
    for position, word in enumerate(options):
        name, has_value, value = word.partition("=")
        dashed = name.replace("_", "-")
        if dashed not in names and name[:2] in names and name[2:].isdigit():  # srun's short form: -N4
            dashed, has_value, value = name[:2], "=", name[2:]
        if dashed in names:
            text = value if has_value else (options[position + 1] if position + 1 < len(options) else "")
            counts[names[dashed]] = _number(dashed, text)
    return counts


def _number(option: str, text: str) -> int:
    try:
        # Elastic runs give MIN:MAX, srun gives MIN-MAX.
        return int(text.replace("-", ":").split(":")[-1]) if not text.startswith("-") else int(text)
    except ValueError:
        reason = f"{text!r} is not a number of processes"
        raise FlagError(option, reason, "Give --world-size N, or a number instead of a variable") from None


def _tasks(counts: Mapping[str, int]) -> int | None:
    if "tasks" in counts:
        return counts["tasks"]
    if "tasks per node" in counts:
        return counts.get("nodes", 1) * counts["tasks per node"]
    return counts.get("nodes")


def _tasks_per_node(counts: Mapping[str, int]) -> int | None:
    if "tasks per node" in counts:
        return counts["tasks per node"]
    return counts["tasks"] // counts["nodes"] if {"tasks", "nodes"} <= counts.keys() else None
