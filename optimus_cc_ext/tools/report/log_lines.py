"""Parsers of single log lines: Megatron's, those of our metrics, and torchrun's."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from optimus_cc_ext.config.classes import CLASSES

_COLOUR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
# What is written in front of a program's lines. torch's own "[rank0]: " stays, because it names the rank that failed.
_PREFIX = re.compile(
    "(?:"
    r"\s*\d+:(?: |$)|"  # srun --label, padded to one width
    r"\[(?!rank\d)[A-Za-z_][\w-]*\d+\]: ?|"  # torchrun --tee
    r"(?:\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})?(?:\[[^][\s]*\d,\d+\])?<std(?:out|err)>: ?|"  # mpirun
    rf"\[?{_STAMP}\]?(?: std(?:out|err) [FP])? |"  # kubectl logs --timestamps, containers' log files
    r"\[(?:\d+|pod/[^]\s]+)\] |"  # mpiexec -prepend-rank, kubectl logs --prefix
    r"\((?:\S+ )?pid=\d+[^()]*\) |"  # ray
    r"[a-z][a-z0-9.-]*\d[a-z0-9.-]*(?:: | +\| )"  # pdsh, docker compose
    ")+"
)
_ITERATION = re.compile(
    r"iteration\s+(?P<iteration>\d+)/\s*(?P<total>\d+) \|.*?"
    r"elapsed time per iteration \(ms\): (?P<milliseconds>[\d.]+) \|.*?lm loss: (?P<loss>\S+) \|"
)
_TIMED = re.compile(r"iteration\s+\d+/\s*\d+ \|.*?elapsed time per iteration")
_NORM = re.compile(r"grad norm: (\S+) \|")
_VALIDATION = re.compile(r"validation loss at iteration (?P<iteration>\d+)\b.*?lm loss value: (?P<loss>\S+) \|")
_TECHNIQUES = re.compile(r"^optimus-cc: (?P<techniques>.+) on megatron-core \S+$")
_LEFT_DENSE = re.compile(r"^optimus-cc: left dense, because nothing of it leaves a node: (?P<classes>.+)$")
_SECONDS = r"([\d.e+-]+) s \(([\d.e+-]+) to ([\d.e+-]+)\)"
_TRIAL = re.compile(rf"^optimus-cc: iterations \d+ to \d+: dense {_SECONDS}, \w+ {_SECONDS}: ")
_FALLBACK = re.compile(r"optimus-cc compressed by torch \| (?P<reason>.+)$")
OLD_NAMES = {
    "forward": "pipeline forward", "CB": "pipeline backward", "FE": "embedding", "SC": "DP gradients",
    "gather": "parameter gather", "dispatch": "expert dispatch",
}  # fmt: skip
"""Names of classes of traffic in the line about errors and times of earlier versions, with those of today."""
_TITLE = rf"\b({'|'.join([*(traffic.tag for traffic in CLASSES), *OLD_NAMES])})[\w -]*"
# Maps a tag to the pattern of its values. Patterns are not anchored: all ranks write to one log, so that a line can
# begin in the middle of another one.
_SCALARS = {
    "optimus-cc/{} sent bytes": re.compile(r"\| ([^|:]+): ([\d.]+) of [\d.]+ MB"),
    "optimus-cc/{} raw bytes": re.compile(r"\| ([^|:]+): [\d.]+ of ([\d.]+) MB"),
    "optimus-cc/{} milliseconds": re.compile(
        rf"{_TITLE}: error \S+ %(?: of [^|]*?)?(?:, residual norm \S+)?, ([\d.]+) ms"
    ),
    "optimus-cc/{} relative error": re.compile(rf"{_TITLE}: error (\S+) %"),
    "optimus-cc/error cosine/stage {}": re.compile(r"stage (\d+): cosine ([^\s,]+)"),
    "optimus-cc/error mean/stage {}": re.compile(r"stage (\d+): cosine \S+ mean error ([^\s,]+)"),
    "optimus-cc/activation difference mean/stage {}": re.compile(
        r"stage (\d+): cosine \S+ mean error \S+ mean activation difference ([^\s|]+)"
    ),
    "max allocated MB/rank {}": re.compile(r"\[Rank (\d+)\] \(.{1,60}\) memory \(MB\) .{1,60}?max allocated: ([\d.]+)"),
    "max resident MB{}": re.compile(r"()peak resident memory \(MB\) \| ([\d.]+)"),
    "compression state MB{}": re.compile(r"optimus-cc: compress(?:or|ion) state in \w+:() up to ([\d.]+) MB on a rank"),
}

_REFUSAL = re.compile(r"(?:^|[\w.]+: )error: (?P<reason>.+)$")
_EXCEPTION = re.compile(
    r"^(?:\[rank(?P<rank>\d+)\]: )?(?P<reason>(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Disagree|Megatron)\b.*)$"
)
_ROOT_CAUSE = "Root Cause (first observed failure):"
_RANK = re.compile(r"^\s*rank\s*: (?P<rank>\d+)")
_SIGNAL = re.compile(r"^\s*traceback : (?P<signal>Signal \d+ \(\w+\)) received")
_TORCHRUNS_OWN = "torch.distributed.elastic"


@dataclass(frozen=True)
class Progress:
    """One training iteration, or one validation (`seconds` is None)."""

    iteration: int
    loss: float
    seconds: float | None = None
    gradient_norm: float | None = None


def log_files(path: Path) -> list[Path]:
    """Return the logs of a run: `path` itself, or the `*.txt`, `*.log` and `*.out` files of a folder, by name."""
    if not path.is_dir():
        return [path]
    return [each for end in ("txt", "log", "out") for each in sorted(path.glob(f"*.{end}"))]


def without_prefix(line: str) -> str:
    """Return a line of a log as the program printed it: without what launchers and containers write in front, colours,
    and the rest of a line's end.
    """
    plain = _COLOUR.sub("", line.lstrip("\ufeff").rstrip("\r\n"))
    match = _PREFIX.match(plain)
    return plain[match.end() :] if match else plain


def parse_progress(line: str) -> Progress | None:
    """Read an iteration or a validation from one line of Megatron's log; None for any other line."""
    if match := _ITERATION.search(line):
        norm = _NORM.search(line, match.end())
        loss, milliseconds = _number(match["loss"]), _number(match["milliseconds"])
        if loss is None or milliseconds is None:
            return None
        return Progress(int(match["iteration"]), loss, milliseconds / 1e3, _number(norm[1]) if norm else None)
    if (match := _VALIDATION.search(line)) and (loss := _number(match["loss"])) is not None:
        return Progress(int(match["iteration"]), loss)
    return None


def _number(text: str) -> float | None:
    """Return a number; None if another rank has written into it."""
    try:
        return float(text)
    except ValueError:
        return None


def lacks_loss(line: str) -> bool:
    """Return whether a line is one of iterations without a loss, as Megatron logs them if all were skipped."""
    return _TIMED.search(line) is not None and " loss: " not in line


def parse_techniques(line: str) -> str | None:
    """Read the techniques that are on from the line in which the hooks list them; None for any other line."""
    match = _TECHNIQUES.match(without_prefix(line))
    return match["techniques"] if match else None


def parse_left_dense(line: str) -> str | None:
    """Read the classes that are left dense because nothing of them leaves a node; None for any other line."""
    match = _LEFT_DENSE.match(without_prefix(line))
    return match["classes"] if match else None


def parse_trial(line: str) -> tuple[float, float, float] | None:
    """Read the median, smallest and largest seconds of the dense iterations of a trial; None for any other line."""
    match = _TRIAL.match(without_prefix(line))
    return (float(match[1]), float(match[2]), float(match[3])) if match else None


def stays_dense(line: str) -> bool:
    """Return whether a line says that a trial chose dense."""
    return "dense from now on" in line


def parse_fallback(line: str) -> str | None:
    """Read the reason why torch compresses in place of Triton's kernels from one line; None for any other line."""
    match = _FALLBACK.search(line)
    return match["reason"] if match else None


def parse_scalars(line: str) -> dict[str, float]:
    """Read the scalars of our metrics and of memory reports in one line, by the tags that event files use.

    Bytes are per iteration and summed over all ranks; errors are over all stages; milliseconds are of the slowest
    stage. Event files have errors and milliseconds for each stage.
    """
    found: dict[str, float] = {}
    if "optimus-cc" in line or "memory (MB)" in line:
        for tag, pattern in _SCALARS.items():
            # The log prints MB and percent, the record holds bytes and shares.
            scale = 1e6 if tag.endswith("bytes") else 1e-2 if tag.endswith("relative error") else 1.0
            for name, value in pattern.findall(line):
                if (number := _number(value)) is not None:
                    found[tag.format(OLD_NAMES.get(name, name))] = scale * number
    return found


def failure_reason(lines: Sequence[str]) -> str | None:
    """Return the reason why a run under torchrun failed: a refusal, or the error or signal of the rank that failed
    first.
    """
    for line in lines:
        if match := _REFUSAL.search(line):
            return match["reason"]
    rank, signal = _root_cause(lines)
    if signal is not None:
        return f"rank {rank} was ended by {signal}"
    errors = [match for match in map(_EXCEPTION.match, lines) if match and _TORCHRUNS_OWN not in match["reason"]]
    first_failed = [match for match in errors if rank is not None and match["rank"] == rank]
    # The last error of a chained traceback is the one that ended the process.
    for match in reversed(first_failed or errors):
        return f"rank {match['rank'] or rank}: {match['reason']}" if match["rank"] or rank else match["reason"]
    return None if rank is None else f"rank {rank} failed"


def _root_cause(lines: Sequence[str]) -> tuple[str | None, str | None]:
    """Return (rank, signal) of the first failure from the last block of torchrun's report; None for a rank or a signal
    that the block does not name.
    """
    starts = [index for index, line in enumerate(lines) if _ROOT_CAUSE in line]
    rank = signal = None
    for line in lines[starts[-1] :] if starts else ():
        if match := _RANK.match(line):
            rank = match["rank"]
        if match := _SIGNAL.match(line):
            signal = match["signal"]
    return rank, signal
