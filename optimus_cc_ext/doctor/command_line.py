"""What a launch line says: the script, its flags, and how many processes it starts. Text only; nothing is started."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from optimus_cc_ext.errors import FlagError

__all__ = ["CommandLine", "read_command_line"]

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher")
_OURS = "optimus_cc_ext"

_SCHEDULER_COUNTS = {
    "-N": "nodes", "--nodes": "nodes", "--nnodes": "nodes",
    "-n": "tasks", "--ntasks": "tasks", "-np": "tasks", "--np": "tasks",
    "--ntasks-per-node": "tasks per node", "--tasks-per-node": "tasks per node",
}  # fmt: skip
"""Options of srun and mpirun that count processes."""

_TORCHRUN_COUNTS = {"--nnodes": "nodes", "--nproc-per-node": "per node"}


@dataclass(frozen=True)
class CommandLine:
    """One launch line, taken apart."""

    flags: tuple[str, ...]
    """What Megatron's parser gets."""

    script: str | None = None
    """The training script; None: the package's own."""

    world_size: int | None = None
    """Processes that it starts; None: it does not say."""

    ranks_per_node: int | None = None
    """Processes that it starts on each node; None: it does not say."""

    ours: bool = True
    """Whether `python -m optimus_cc_ext` is what starts the script."""


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Take `[srun ...] [torchrun ...] [-m optimus_cc_ext] [script.py] <flags>` apart.

    Raises:
        FlagError: a shell script, whose flags cannot be seen, or a count that is no number.
    """
    words = _unquoted(words)
    if not words or words[0].startswith("--"):
        return CommandLine(tuple(words))
    for start, word in enumerate(words):
        if PurePath(word).name == "torchrun" or word in _LAUNCHER_MODULES:
            line, options = _program(words[start + 1 :])
            counts = _counts(options, _TORCHRUN_COUNTS)
            nodes = counts.get("nodes") or _counts(words[:start], _SCHEDULER_COUNTS).get("nodes", 1)
            # torchrun starts one process a node where it is not told; the old launcher, too.
            per_node = counts.get("per node", 1)
            return replace(line, world_size=nodes * per_node, ranks_per_node=per_node)
        starts_launcher = word == "-m" and words[start + 1 : start + 2] in ([name] for name in _LAUNCHER_MODULES)
        if (word == "-m" and not starts_launcher) or word.endswith(".py"):
            line, _ = _program(words[start:])
            counts = _counts(words[:start], _SCHEDULER_COUNTS)
            return replace(line, world_size=_tasks(counts), ranks_per_node=_tasks_per_node(counts))
        if PurePath(word).suffix in (".sh", ".sbatch"):
            cure = "Give the line that it runs (scripts/pretrain_gpt.sh --dry-run ... prints it), or the flags alone"
            raise FlagError(word, "doctor cannot see the flags that a shell script gives", cure)
    raise FlagError(words[0], "neither a flag nor a launch line", "Give flags, or torchrun ... pretrain_gpt.py <flags>")


def _unquoted(words: Sequence[str]) -> list[str]:
    """The words, with `bash -c "torchrun ..."` opened."""
    opened: list[str] = []
    for word in words:
        opened += shlex.split(word) if "torchrun " in word or ".py " in word else [word]
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
    """By what it counts: the number that an option gives."""
    counts = {}
    for position, word in enumerate(options):
        name, has_value, value = word.partition("=")
        dashed = name.replace("_", "-")
        if dashed not in names and name[:2] in names and name[2:].isdigit():  # -N4
            dashed, has_value, value = name[:2], "=", name[2:]
        if dashed in names:
            text = value if has_value else (options[position + 1] if position + 1 < len(options) else "")
            counts[names[dashed]] = _number(dashed, text)
    return counts


def _number(option: str, text: str) -> int:
    try:
        # Elastic runs give MIN:MAX, srun MIN-MAX.
        return int(text.replace("-", ":").split(":")[-1]) if not text.startswith("-") else int(text)
    except ValueError:
        reason = f"{text!r} is not a number of processes"
        raise FlagError(option, reason, "Give --world-size N, or write the number out") from None


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
