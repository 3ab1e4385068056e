"""Reader of a compare job's logs: one line of medians and losses, and a row of each run in compare.csv.

The rows have the columns of scripts/bench/cluster's, so that measurements of both can be read together.
"""

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from optimus_cc_ext.errors import OptimusError, run_command
from optimus_cc_ext.tools.report.log_lines import Progress, parse_progress, parse_scalars
from scripts.bench.cluster.on_gpu import COLUMNS
from scripts.experiments.runs import add_row, commit

WARM_UP = 10
"""Iterations at the start of a run that are not measured."""


def iterations(log: Path) -> list[Progress]:
    """Return the iterations in a run's log.

    Raises:
        OptimusError: the log has too few of them.
    """
    lines = log.read_text("utf-8", "replace").splitlines()
    found = [each for line in lines if (each := parse_progress(line)) and each.seconds is not None]
    if len(found) <= WARM_UP:
        raise OptimusError(f"{log}: {len(found)} iterations are logged, more than {WARM_UP} are needed")
    return found


def row(log: Path) -> dict[str, Any]:
    """Return the measurements in a log, by the columns of compare.csv."""
    found = iterations(log)
    ms = [round(1e3 * (each.seconds or 0.0), 1) for each in found[WARM_UP:]]
    sent = [
        sum(value for tag, value in parse_scalars(line).items() if tag.endswith("sent bytes"))
        for line in log.read_text("utf-8", "replace").splitlines()
        if "traffic per iteration" in line
    ]
    return {
        "variant": log.stem, "iterations": len(ms), "median ms": round(statistics.median(ms), 1), "fastest ms": min(ms),
        "slowest ms": max(ms), "loss": found[-1].loss, "after iterations": found[-1].iteration,
        "log MB": round(statistics.median(sent) / 1e6, 1) if sent else "",
    }  # fmt: skip


def line(rows: Sequence[dict[str, Any]]) -> str:
    """Return the one line that answers: medians, their ratio, and losses."""

    def of(name: str, column: str) -> list[float]:
        return [float(each[column]) for each in rows if each["variant"].endswith(name)]

    vanilla, ours = (statistics.median(of(name, "median ms")) for name in ("vanilla", "compressed"))
    medians = {name: ", ".join(f"{ms:.1f}" for ms in of(name, "median ms")) for name in ("vanilla", "compressed")}
    losses = {name: ", ".join(f"{loss:.6f}" for loss in of(name, "loss")) for name in ("vanilla", "compressed")}
    said = f"vanilla {vanilla:.1f} ms ({medians['vanilla']}), compressed {ours:.1f} ms ({medians['compressed']})"
    return (
        f"compare: {said}: {ours / vanilla:.2f} of vanilla's time; loss after {rows[0]['after iterations']} "
        f"iterations: vanilla {losses['vanilla']}, compressed {losses['compressed']}"
    )


def machine() -> dict[str, str]:
    """Return the columns about GPU and libraries."""
    if not torch.cuda.is_available() or os.environ.get("OPTIMUS_CC_DEVICE") == "cpu":
        return {"gpu": "CPU", "torch": torch.__version__}
    asked = ["nvidia-smi", "--id=0", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    name, driver = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip().split(", ")
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"gpu": name, "driver": driver, "nccl": nccl, "torch": torch.__version__}


def _compare(options: argparse.Namespace) -> None:
    rows = [row(log) for log in sorted(options.folder.glob("*.log"))]
    about = machine() | {
        "model": options.model, "layout": options.layout, "rate": "unshaped", "at the same time": "yes",
        "queues": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1"), "commit": commit(), "command": options.command,
    }  # fmt: skip
    for each in rows:
        flags = options.flags if each["variant"].endswith("compressed") else ""
        add_row(options.folder.parent / "compare.csv", about | each | {"flags": flags}, COLUMNS)
    print(line(rows), flush=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of the runs' logs")
    for name in ("model", "layout", "flags", "command"):
        parser.add_argument(f"--{name}", default="")
    options = parser.parse_args()
    return run_command(lambda: _compare(options))


if __name__ == "__main__":
    sys.exit(main())
