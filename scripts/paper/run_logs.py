"""What the experiments wrote: RESULTS/<experiment>/<model>-<variant>/log*.txt, read line by line."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the package beside this script, installed or not

from optimus_cc_ext.report.log_lines import parse_progress

__all__ = ["MODELS", "Run", "read_run", "read_runs"]

MODELS = {"335m": "GPT-335M", "2.5b": "GPT-2.5B", "8.3b": "GPT-8.3B"}
_ORDER = ("baseline", "cb-no-lep", "cb", "cb-lep", "cb-all", "cb-fe", "cb-fe-sc")
_NAMES = {
    "baseline": "Baseline",
    "cb": "CB",
    "cb-no-lep": "CB without LEP",
    "cb-lep": "CB+LEP",
    "cb-all": "CB, all messages",
    "cb-fe": "CB+FE",
    "cb-fe-sc": "CB+FE+SC",
}

_TRAFFIC = "optimus-cc traffic per iteration | "
_COMPRESSION = "optimus-cc compression | "
_STATISTICS = "optimus-cc errors against activation differences | "
_TRAFFIC_PART = re.compile(r"(?P<name>[^|:]+): (?P<sent>[\d.]+) of (?P<raw>[\d.]+) MB")
_COMPRESSION_PART = re.compile(r"(?P<name>CB|SC): error (?P<error>\S+) %, residual norm \S+, (?P<ms>[\d.]+) ms")
_STATISTICS_PART = re.compile(
    r"stage (?P<stage>\d+): cosine (?P<cosine>\S+), mean error (?P<error>\S+), "
    r"mean activation difference (?P<difference>[^\s|]+)"
)
# Ranks write to one log: a line can begin in the middle of another.
_ALLOCATED = re.compile(r"\[Rank (?P<rank>\d+)\] \(.{1,60}\) memory \(MB\) .{1,60}?max allocated: (?P<mb>[\d.]+)")
_RESIDENT = re.compile(r"\[Rank (?P<rank>\d+)\] peak resident memory \(MB\) \| (?P<mb>[\d.]+)")
_STATE = re.compile(r"optimus-cc: compressor state in \w+: up to (?P<mb>[\d.]+) MB on a rank")


@dataclass
class Run:
    """One experiment's log. By iteration unless said otherwise; of an iteration run twice, the later."""

    model: str
    variant: str
    losses: dict[int, float] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    validation: dict[int, float] = field(default_factory=dict)
    traffic: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)
    """Class to (sent, raw) in MB, all ranks together."""

    compression_ms: dict[int, dict[str, float]] = field(default_factory=dict)
    """Technique, CB or SC, to milliseconds on the stage where it takes longest."""

    statistics: dict[int, dict[int, tuple[float, float, float]]] = field(default_factory=dict)
    """Stage to (cosine, mean error, mean activation difference)."""

    allocated: dict[int, float] = field(default_factory=dict)
    """Rank to the MB of GPU memory allocated at most."""

    resident: dict[int, float] = field(default_factory=dict)
    """Rank to the MB of the machine's memory taken at most."""

    state: float = 0.0
    """MB of the compressors' state, on the rank where it is largest."""

    @property
    def name(self) -> str:
        """The variant, as the paper calls it."""
        return _NAMES.get(self.variant, self.variant)

    @property
    def typical_seconds(self) -> float | None:
        """Median over the iterations, the first, which sets things up, left out; None without any."""
        later = [seconds for iteration, seconds in self.seconds.items() if iteration > 1]
        return median(later) if later else None

    @property
    def typical_compression_ms(self) -> dict[str, float]:
        """Technique, CB or SC, to the median of their milliseconds, the first iteration left out."""
        later = [parts for iteration, parts in self.compression_ms.items() if iteration > 1]
        names = {name for parts in later for name in parts}
        return {name: median(parts[name] for parts in later if name in parts) for name in sorted(names)}

    @property
    def last_traffic(self) -> dict[str, tuple[float, float]]:
        """Class to (sent, raw) MB of the last iteration that was logged."""
        return self.traffic[max(self.traffic)] if self.traffic else {}


def read_runs(results: Path, experiment: str) -> list[Run]:
    """All runs of `experiment` that have a log with an iteration in it, in the paper's order."""
    runs = []
    for model in MODELS:
        folders = {
            folder.name.removeprefix(model + "-"): folder for folder in (results / experiment).glob(f"{model}-*")
        }
        places = {name: place for place, name in enumerate(_ORDER)}
        for variant in sorted(folders, key=lambda name: (places.get(name, len(places)), name)):
            run = read_run(folders[variant], model, variant)
            if run.losses:
                runs.append(run)
    return runs


def read_run(folder: Path, model: str = "", variant: str = "") -> Run:
    """Read every node's log in `folder`, the one written to last at the end."""
    run = Run(model, variant)
    for log in sorted(folder.glob("log*.txt"), key=lambda path: path.stat().st_mtime):
        iteration = 0
        with log.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                iteration = _take(run, line.rstrip("\n"), iteration)
    return run


def _take(run: Run, line: str, iteration: int) -> int:
    """Put what `line` says into `run`; `iteration` is the last one logged, and the new one is returned."""
    if progress := parse_progress(line):
        if progress.seconds is not None:
            run.losses[progress.iteration], run.seconds[progress.iteration] = progress.loss, progress.seconds
            return progress.iteration
        # After training Megatron evaluates again, on other samples and on the test set.
        if " on test set" not in line:
            run.validation.setdefault(progress.iteration, progress.loss)
    elif _TRAFFIC in line:
        run.traffic[iteration] = {
            part["name"].strip(): (float(part["sent"]), float(part["raw"]))
            for part in _TRAFFIC_PART.finditer(line.split(_TRAFFIC)[1])
        }
    elif _COMPRESSION in line:
        run.compression_ms[iteration] = {
            part["name"]: float(part["ms"]) for part in _COMPRESSION_PART.finditer(line.split(_COMPRESSION)[1])
        }
    elif _STATISTICS in line:
        run.statistics[iteration] = {
            int(part["stage"]): (float(part["cosine"]), float(part["error"]), float(part["difference"]))
            for part in _STATISTICS_PART.finditer(line.split(_STATISTICS)[1])
        }
    for pattern, peaks in ((_ALLOCATED, run.allocated), (_RESIDENT, run.resident)):
        for match in pattern.finditer(line):
            peaks[int(match["rank"])] = max(float(match["mb"]), peaks.get(int(match["rank"]), 0.0))
    if state := _STATE.search(line):
        run.state = float(state["mb"])
    return iteration
