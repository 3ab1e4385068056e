"""Check of a GPU machine (`scripts/gpu_check.sh`): do GPU, driver, compiler and NCCL give what Optimus-CC relies on?

Each check runs in a process of its own, for a limited time. Its measurements go into one JSON and one page.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optimus_cc_ext.tools.doctor.gpu import examine_gpu
from optimus_cc_ext.tools.report.document import Box, Part, ReportDocument, machine
from optimus_cc_ext.tools.report.table import Table
from scripts.gpu_check.checks import CHECKS, TOTAL, Setting

COMMAND = "scripts/gpu_check.sh"
CPU_IS_SLOWER = 6
"""Factor of all limits in a dry run."""


@dataclass
class Result:
    """Result of one check."""

    name: str
    claim: str
    failure: str = ""
    seconds: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Measured values by column. None means that the value needs a GPU."""


def main(argv: Sequence[str]) -> int:
    """Run the checks. Returns the exit status: 0; 1: a check failed; 2: bad input, or a machine that cannot run
    them.
    """
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("results/gpu_check"), metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=tuple(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument(
        "--long", action="store_true", help="also the check study, which takes up to an hour and a half"
    )
    parser.add_argument("--dry-run-on-cpu", action="store_true", help="run all that needs no GPU, without its figures")
    parser.add_argument("--in-this-process", choices=tuple(CHECKS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    deadline = time.monotonic() + TOTAL * (CPU_IS_SLOWER if options.dry_run_on_cpu else 1)
    if options.in_this_process:
        rows: list[dict[str, Any]] = []
        try:
            for row in CHECKS[options.in_this_process].run(Setting(options.dry_run_on_cpu, options.output)):
                rows.append(row)
        finally:  # what a check measured before it failed is kept
            (options.output / f"{options.in_this_process}.json").write_text(json.dumps(rows))
        return 0
    if not options.dry_run_on_cpu:
        report = examine_gpu()
        print(*report.lines(), sep="\n", flush=True)
        if report.exit_code:
            print(f"error: {report.verdict.state} (or {COMMAND} --dry-run-on-cpu)", file=sys.stderr)
            return report.exit_code
    options.output.mkdir(parents=True, exist_ok=True)
    names = options.only or [name for name, check in CHECKS.items() if options.long or not check.long]
    results = [_run(name, options.output, options.dry_run_on_cpu, deadline) for name in names]
    write(results, options.output, dry=options.dry_run_on_cpu)
    print(f"written: {options.output / 'gpu_check.json'} and .md")
    if failed := [result.name for result in results if result.failure]:
        print(f"again: {COMMAND} --only {' '.join(failed)}")
    return 1 if failed else 0


def _run(name: str, output: Path, dry: bool, deadline: float) -> Result:
    check, started = CHECKS[name], time.monotonic()
    left, limit = int(deadline - started), check.limit * (CPU_IS_SLOWER if dry else 1)
    limit = limit if check.long else max(0, min(limit, left))
    result, measured, log = Result(name, check.claim), output / f"{name}.json", output / f"{name}.log"
    measured.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "scripts.gpu_check", "--output", str(output), "--in-this-process", name]
    searched = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, searched))}
    if dry:
        command.append("--dry-run-on-cpu")
        environment |= {"OPTIMUS_CC_DEVICE": "cpu"} | ({"TRITON_INTERPRET": "1"} if check.interpreted else {})
    try:
        with log.open("w") as stream:
            ended = subprocess.run(command, env=environment, stdout=stream, stderr=stream, timeout=limit)
        if ended.returncode:
            lines = log.read_text(errors="replace").splitlines() or ["nothing was printed"]
            result.failure = f"{lines[-1]} ({log})"
    except subprocess.TimeoutExpired:
        result.failure = f"not finished after {limit} s ({log})"
    result.rows = json.loads(measured.read_text()) if measured.exists() else []
    result.seconds = time.monotonic() - started
    missing = sum(value is None for row in result.rows for value in row.values())
    outcome = result.failure or f"{len(result.rows)} rows" + (f", {missing} figures missing" if missing else "")
    spent = f"{result.seconds:.0f} s, {left - result.seconds:.0f} left"
    print(f"{'FAIL' if result.failure else 'ok':<4} {name}: {outcome} ({spent})", flush=True)
    return result


def write(results: Sequence[Result], output: Path, *, dry: bool) -> None:
    """Write gpu_check.json and gpu_check.md."""
    about = machine() | {"run": "dry, on a CPU" if dry else "on a GPU"}
    text = json.dumps({"machine": about, "checks": [asdict(result) for result in results]}, indent=1)
    (output / "gpu_check.json").write_text(text + "\n")
    parts: list[Part] = [f"Figures shown as `missing` need a GPU: `{COMMAND}` gives them."] * dry
    for result in results:
        columns = tuple(dict.fromkeys(name for row in result.rows for name in row))
        cells = [tuple("missing" if name in row and row[name] is None else row.get(name, "") for name in columns)
                 for row in result.rows]  # fmt: skip
        texts: list[Part] = [text for text in (result.claim, result.failure) if text]
        table = [Table(columns, cells)] if columns else []
        parts.append(Box(f"{result.name}: {'FAILED' if result.failure else 'holds'}", [*texts, *table]))
    lead = f"{', '.join(f'{name}: {value}' for name, value in about.items())}."
    ReportDocument("GPU check", lead, parts).write(output, markdown="gpu_check.md")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
