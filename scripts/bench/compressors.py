"""How fast the compressors are: against the paper-literal reference, PyTorch's hook, and what the machine allows.

    scripts/bench/compressors.py --device cpu|cuda [--threads 2] [--results FOLDER] [--only SECTION ...] [--scale tiny]
    scripts/bench/compressors.py --device cpu --only slices --case "8.3b, 1024 x 3072, rank 16"

Sections:
    slices             a pipeline message of the paper's models (figure 14), compressed and decompressed
    orthogonalization  batches of P alone
    bucket             the local work on one gradient bucket of an 8.3B stage at TP8, rank 128
    layers             a bucket's reduction over one process, for 8 to 64 layers: time and operators
    capture            CUDA only: no synchronisation, and a CUDA graph's results and time

What is timed is checked first, on inputs of its own; a wrong result ends the script. Medians and quartiles of
repetitions that alternate between the contestants. Writes compressors-<device>.json, .md and pictures.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "paper")]  # the package and figure14, installed or not

import torch  # noqa: E402
from compressors_report import Row, write_report  # noqa: E402
from compressors_sections import SECTIONS, Setting  # noqa: E402


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, default=2, help="of torch on a CPU (2)")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "bench", help="folder (results/bench)")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--case", default="", metavar="TEXT", help="only slices whose case contains this")
    parser.add_argument("--all-ranks", action="store_true", help="reference and hook at all ranks, not at 8, 16, 40")
    parser.add_argument("--scale", choices=("paper", "tiny"), default="paper", help="tiny: seconds, and no figures")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions of everything but the bucket's third (9)")
    parser.add_argument(
        "--cold", action="store_true", help="caches emptied before each repetition (CPU; not for layers)"
    )
    options = parser.parse_args()
    for name, value in (("--threads", options.threads), ("--repeats", options.repeats)):
        if value < 1:
            parser.error(f"{name} {value}: at least 1 is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device. Give --device cpu")
    if options.device == "cuda" and options.cold:
        parser.error("--cold: it empties the caches of a CPU. Leave it out, or give --device cpu")
    if options.case and options.only != ["slices"]:
        parser.error(f"--case {options.case}: only slices have such cases. Give --only slices with it")
    if options.device == "cpu" and options.only == ["capture"]:
        parser.error("--only capture: a CUDA graph needs a GPU. Give --device cuda")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    setting = Setting(
        torch.device(options.device), options.scale == "tiny", options.all_ranks, options.repeats, options.cold,
        options.case,
    )  # fmt: skip
    on_gpu = options.device == "cuda"
    machine = {
        "device": torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.backends.cpu.get_cpu_capability()}",
        "threads": options.threads,
        "torch": torch.__version__,
        "scale": options.scale,
        "caches": "emptied before each repetition, but for layers and floors" if options.cold else "warm",
    }
    options.results.mkdir(parents=True, exist_ok=True)
    stem = options.results / f"compressors-{options.device}"
    rows: list[Row] = []
    for name in options.only or SECTIONS:
        if name == "capture" and not on_gpu:
            continue
        for row in SECTIONS[name](setting):
            rows.append(row)
            print(row.line(), flush=True)
        if not rows:
            parser.error(f"--case {options.case}: no slice's case contains it. They read '8.3b, 1024 x 3072, rank 16'")
        # After each section: what fails in a later one leaves the figures of those before it.
        _write(machine, rows, stem)
    print(f"written: {stem}.json, .md and pictures")


def _write(machine: dict[str, Any], rows: list[Row], stem: Path) -> None:
    text = json.dumps({"machine": machine, "rows": [asdict(row) for row in rows]}, indent=1)
    stem.with_suffix(".json").write_text(text + "\n", encoding="utf-8")
    write_report(machine, rows, stem)


if __name__ == "__main__":
    main()
