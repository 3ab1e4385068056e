"""Check of training over NCCL: four ranks share the machine's GPUs, and train one configuration after the other.

Each is compared with another one: to the bit, or by its last loss.
"""

import json
import shutil
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.hosts.launch import RunFailed, run

MOST_APART = 0.5
"""Largest allowed difference, in percent, between the final losses of vanilla and of `balanced`. On an H200 the
difference was 0.001 %. A faulty gather, which lost part of each step, caused 0.2 % within 4 iterations.
"""

_RANKS, _SECONDS, _SCRIPT = 4, 200, str(Path(__file__).with_name("configurations.py"))


@dataclass(frozen=True)
class Configuration:
    """Training of a small GPT on four ranks, as in nccl.toml."""

    flags: str
    ours: str | None = None
    beside: int = 1
    like: str = ""
    exact: bool = False
    long: bool = False


_TABLE = tomllib.loads(Path(__file__).with_name("nccl.toml").read_text(encoding="utf-8"))
WORDS: dict[str, str] = _TABLE["words"]
CONFIGURATIONS = {name: Configuration(**each) for name, each in _TABLE["trainings"].items()}


def check(folder: Path, *, tiny: bool) -> Iterator[dict[str, Any]]:
    """Train all configurations; tiny ones on the CPU over gloo."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    words = [_SCRIPT, str(folder), *(["--tiny"] if tiny else [])]
    deadline = time.monotonic() + (1200 if tiny else _SECONDS)
    failures = []
    try:
        run(words, folder, lambda line: None, deadline, ranks=_RANKS, device="cpu" if tiny else "shared-gpu")
    except RunFailed as failure:
        failures = [f"{failure} ({failure.log})"]
    done = {name: folder / f"{name}.json" for name in CONFIGURATIONS if (folder / f"{name}.json").exists()}
    read = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in done.items()}
    found = {name: each for name, each in read.items() if each["losses"]}
    failures += [f"{name}: it has trained nothing" for name in CONFIGURATIONS if name not in found]
    losses, weights = ({name: each[what] for name, each in found.items()} for what in ("losses", "weights"))
    for name in found:
        configuration, ours, other = CONFIGURATIONS[name], losses[name], CONFIGURATIONS[name].like
        row = {"training": name, "loss": ours[-1], "seconds": None if tiny else found[name]["seconds"]}
        if other:  # an earlier one
            like, spread = losses[other][-len(ours) :], _apart(losses["vanilla"], losses["vanilla again"])
            same, gap = ours == like and weights[name] == weights[other], 100 * (ours[-1] / like[-1] - 1)
            row |= {"compared with": other, "bits": "equal" if same else "", "difference, %": gap}
            if why := verdict(configuration, same=same, apart=_apart(ours, like), spread=spread, gap=gap):
                failures.append(f"{name}: {why}")
        yield row
    if failures:
        raise SystemExit("; ".join(failures))


def verdict(configuration: Configuration, *, same: bool, apart: float, spread: float, gap: float) -> str:
    """Return why a configuration failed, from its largest difference of a loss, that of two equal trainings, and the
    gap of the last losses in percent; empty if it holds.
    """
    if configuration.exact:
        # Where two equal trainings of vanilla differ, a third one may lie on either side of both.
        fails = not (same or 0 < apart <= 2 * spread)
        return f"its bits are not those of {configuration.like}; losses are {apart:g} apart" if fails else ""
    # `not <` is also true for NaN.
    return f"its last loss is {gap:.3f} % from that of {configuration.like}" if not abs(gap) < MOST_APART else ""


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
