"""Parser of a launch line: finds the script, its flags, and the number of processes. It only reads text."""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import Any

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.tools.doctor.target import KNOWN_VARIABLES

_LAUNCHER_MODULES = ("torch.distributed.run", "torch.distributed.launch", "torch.distributed.launcher")
_OURS = "optimus_cc_ext"

_SLURM = {
    "-N": "nodes", "--nodes": "nodes", "--nnodes": "nodes",
    "-n": "tasks", "--ntasks": "tasks", "--ntasks-per-node": "tasks per node", "--tasks-per-node": "tasks per node",
}  # fmt: skip
_MPI = {"-n": "tasks", "-np": "tasks", "--np": "tasks"} | dict.fromkeys(
    ("-N", "-npernode", "--npernode", "-ppn", "--ppn", "-perhost"), "tasks per node"
)
_SCHEDULERS = {"srun": _SLURM, "sbatch": _SLURM, "salloc": _SLURM, "flux": _SLURM, "mpirun": _MPI, "mpiexec": _MPI}
"""Launchers of several processes, with those of their options that give numbers of nodes or processes."""

_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
_BEGINNINGS = (
    *_SCHEDULERS, "torchrun", "python", "python3", "bash", "sh", "uv", "timeout", "numactl", "nice", "nohup", "time",
    "taskset", "sudo", "conda", "apptainer", "singularity", "docker", "kubectl", "nsys", "ssh", "pdsh",
)  # fmt: skip

_OTHER_LAUNCHERS = ("accelerate", "colossalai", "composer", "deepspeed", "horovodrun", "ray", "torchx")

_FLAGS_ALONE = "Give the flags that Megatron's parser gets, with --world-size N"

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

    uncounted: FlagError | None = None
    """The reason why the number of processes is unknown; None: there is no reason."""

    ours: bool = True
    """True if `python -m optimus_cc_ext` starts the script."""

    launched: bool = True
    """False if the line gives flags only, and nothing says which script takes them."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables in front of the launch line."""


def read_command_line(words: Sequence[str]) -> CommandLine:
    """Parse `[env NAME=VALUE ...] [srun ...] [torchrun ...] [-m optimus_cc_ext] [script.py] <flags>`.

    The line may stand in a shell's command (`bash -c "cd x && A=1 torchrun ... 2>&1 | tee log"`).

    Raises:
        FlagError: the line runs a shell script, whose flags cannot be seen, or no training of Megatron's, or a word
            after `env` is not a variable.
    """
    environment, words = _simple_command(words)
    own, words = _environment(words)
    return replace(_launch_line(words), environment=environment | own)


_SEPARATORS = re.compile(r"[\n;()]|&&?|\|[|&]?")
_REDIRECTION = re.compile(r"(?:\d*>>?&?|&>>?)(?P<file>.*)|<")


def _simple_command(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the command that launches, among those that a shell would run, without redirections and with the words of
    `bash -c "..."` in the place of that string; and the variables that commands before it export.
    """
    commands, exported = _commands(words), dict[str, str]()
    for command in commands:
        opened = next((found for found in (_opened(command, place) for place in range(len(command))) if found), None)
        if opened is not None:
            return exported | opened[0], opened[1]
        if _launches(command):
            return exported, command
        given = [_VARIABLE.fullmatch(word) for word in (command[1:] if command[:1] == ["export"] else command)]
        if all(given):
            exported |= {found["name"]: found["value"] for found in given if found}
    scripts = (each for each in commands if each[0] not in ("source", ".", "cd") and _shell_script(each))
    return exported, next(scripts, commands[0] if commands else [])


def _opened(command: Sequence[str], place: int) -> tuple[dict[str, str], list[str]] | None:
    """Return the variables and the command if the word at `place` is a shell's command that starts a program."""
    text = command[place]
    if not re.search(r"\s", text.strip()) or _launches(command[:place]):
        return None
    # A shell drops a backslash with the end of its line. The output of $(...) is unknown, and is named as a variable.
    text = re.sub(r"(?<=\s)\d+(?=[<>])", "", re.sub(r"\$\([^()]*\)", "$OUTPUT", re.sub(r"\\\r?\n", " ", text)))
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";&|<>()\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    try:
        exported, inner = _simple_command(list(lexer))
    except ValueError:  # an apostrophe in a text that is no command
        return None
    own, line = _environment(inner)
    return (exported | own, [*command[:place], *line]) if _launches(line) or _shell_script(line) else None


def _commands(words: Sequence[str]) -> list[list[str]]:
    """Return the commands between a shell's operators, without redirections."""
    found: list[list[str]] = [[]]
    skipped = False
    for word in words:
        redirection = _REDIRECTION.fullmatch(word)
        if skipped or redirection:
            # The file stands in the next word, unless it is joined to the operator, as in 2>&1.
            skipped = not skipped and redirection is not None and not redirection["file"]
        elif word and not _SEPARATORS.sub("", word):
            found.append([])
        else:
            found[-1].append(word)
    return [command for command in found if command]


def _launches(words: Sequence[str]) -> bool:
    """Return whether these words start a program with flags, or are flags only."""
    return bool(words) and (
        words[0].startswith("--") or any(_is_torchrun(word) or word == "-m" or word.endswith(".py") for word in words)
    )


def _is_torchrun(word: str) -> bool:
    return PurePath(word).name == "torchrun" or word in _LAUNCHER_MODULES


def _shell_script(words: Sequence[str]) -> str | None:
    return next((word for word in words if PurePath(word).suffix in (".sh", ".sbatch")), None)


def _environment(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the variables in front of a launch line, with or without `env`, from the line."""
    after_env = bool(words) and PurePath(words[0]).name == "env"
    start = int(after_env)
    variables = {}
    while start < len(words) and (found := _VARIABLE.fullmatch(words[start])):
        variables[found["name"]] = found["value"]
        start += 1
    line = list(words[start:])
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
    script = next((place for place, word in enumerate(words) if word.endswith(".py")), len(words))
    for start, word in enumerate(words[:script]):
        if _is_torchrun(word):
            line, options = _program(words[start + 1 :])
            return replace(line, **_processes(words[:start], options))
    for start, word in enumerate(words):
        if word == "-m" or word.endswith(".py"):
            line, _ = _program(words[start:])
            return replace(line, **_processes(words[:start]))
        if _shell_script([word]):
            cure = "Give the script's launch line (scripts/pretrain_gpt.sh --dry-run ... prints it), or only the flags"
            raise FlagError(word, "doctor cannot see the flags inside a shell script", cure)
    reason = "this word begins neither flags nor a launch line of Megatron's training"
    raise FlagError(words[0], reason, f"{_FLAGS_ALONE}, or torchrun ... pretrain_gpt.py <flags>")


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
    if words[:1] == ["-m"] and len(words) > 1:
        raise FlagError(words[1], "this module is none of Megatron's, and doctor does not know its flags", _FLAGS_ALONE)
    cure = "Give a script (pretrain_gpt.py) or -m optimus_cc_ext before the flags"
    raise FlagError(words[0] if words else "torchrun", "the line names no training script", cure)


def _processes(before: Sequence[str], torchrun: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse a launcher's words, before the program, into the fields of `CommandLine` that describe processes."""
    other = next((PurePath(word).name for word in before if PurePath(word).name in _OTHER_LAUNCHERS), None)
    if torchrun is None and before and not _begins(before[0]):
        other = other or PurePath(before[0]).name
    if other is not None:
        reason = "doctor does not know how many processes this launcher starts: it reads torchrun, srun and mpirun"
        return {"uncounted": FlagError(other, reason, "Give --world-size N")}
    try:
        scheduled = _scheduled(before)
        if torchrun is None:
            return {"world_size": _tasks(scheduled), "ranks_per_node": _tasks_per_node(scheduled)}
        # torchrun and torch.distributed.launch start one process on one node by default.
        counts = {"nodes": 1, "per node": 1} | (given := _counts(torchrun, _TORCHRUN_COUNTS))
        if "nodes" not in given and (alone := _tasks(scheduled) or 1) > 1:
            reason = f"without --nnodes, each of {alone} trains alone, into the same checkpoints"
            raise FlagError("torchrun", reason, f"Give torchrun --nnodes {alone}, or doctor --world-size N")
        return {"world_size": counts["nodes"] * counts["per node"], "ranks_per_node": counts["per node"]}
    except FlagError as error:
        return {"uncounted": error}


def _begins(word: str) -> bool:
    return PurePath(word).name in _BEGINNINGS or PurePath(word).name.startswith("python")


def _scheduled(before: Sequence[str]) -> dict[str, int]:
    """Return the numbers that schedulers and MPI give; options of other programs, such as `nice -n 5`, give none."""
    programs: list[tuple[str, list[str]]] = []
    for word in before:
        if _begins(word):
            programs.append((PurePath(word).name, []))
        elif programs:
            programs[-1][1].append(word)
    counts: dict[str, int] = {}
    # What sbatch runs is started once, unless a launcher in it starts more.
    if any(name in _SCHEDULERS and name not in ("sbatch", "salloc") for name, _ in programs):
        for name, options in programs:
            counts |= _counts(options, _SCHEDULERS.get(name, {}))
    return counts


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
    if "tasks per node" in counts:  # without a number of nodes, those of the allocation
        return counts["nodes"] * counts["tasks per node"] if "nodes" in counts else None
    return counts.get("nodes")


def _tasks_per_node(counts: Mapping[str, int]) -> int | None:
    if "tasks per node" in counts:
        return counts["tasks per node"]
    return counts["tasks"] // counts["nodes"] if {"tasks", "nodes"} <= counts.keys() else None
