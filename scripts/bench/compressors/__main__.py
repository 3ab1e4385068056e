"""Benchmark of the compressors: against the paper-literal reference, PyTorch's hook, and the machine's own limits.

    python -m scripts.bench.compressors --device cpu|cuda [--threads 2] [--results FOLDER] [--only SECTION ...]
        [--scale tiny]
    python -m scripts.bench.compressors --device cpu --only slices --case "8.3b, 1024 x 3072, rank 16"

Sections:
    kernels            each of Triton's kernels beside torch, eager and compiled; without a GPU only eager
    projections        the same on whole buckets: all matrices of a shape in an 8.3B stage at TP8
    codecs             the block formats' kernels beside a copy and torch, wherever a shard begins, in GB/s; --variants:
                       also with other choices for the compiler
    slices             a pipeline message of the paper's models (figure 14), compressed and decompressed
    orthogonalization  batches of P at ranks 16, 64 and 128, without the rest of a step
    bucket             a gradient bucket of an 8.3B stage at TP8, rank 128, reduced over one process
    formats            such a bucket (1 GB) in every block format: encoded, and decoded and added
    capture            CUDA only: no synchronisation, and a CUDA graph's results and time

Every result is checked before it is timed; a wrong result ends the script. The figures are medians and interquartile
ranges of `torch.utils.benchmark`, in turns that alternate between the contenders. Writes compressors-<device>.json, .md
and pictures.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from optimus_cc_ext.tools.report.document import machine
from scripts.bench.compressors.page import write
from scripts.bench.compressors.sections import SECTIONS, Row, Setting


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.compressors", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--device", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--threads", type=int, default=2, help="number of torch's threads on a CPU (2)")
    parser.add_argument("--results", type=Path, default=Path("results/bench"), help="folder to write (%(default)s)")
    parser.add_argument("--only", nargs="+", choices=tuple(SECTIONS), metavar="SECTION", help=", ".join(SECTIONS))
    parser.add_argument("--case", default="", metavar="TEXT", help="time only cases that contain this text")
    parser.add_argument(
        "--scale", choices=("paper", "tiny"), default="paper", help="tiny takes seconds and gives no figures of use"
    )
    parser.add_argument("--variants", action="store_true", help="codecs: also with other choices for the compiler")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every contender (%(default)s)")
    options = parser.parse_args(argv)
    for name, value in (("--threads", options.threads), ("--repeats", options.repeats)):
        if value < 1:
            parser.error(f"{name} {value}: at least 1 is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device. Give --device cpu")
    if options.case and not {*(options.only or SECTIONS)} <= {"slices", "codecs"}:
        parser.error(f"--case {options.case}: only slices and codecs have such cases. Give --only with one of them")
    if options.device == "cpu" and options.only == ["capture"]:
        parser.error("--only capture: a CUDA graph needs a GPU. Give --device cuda")
    torch.set_num_threads(options.threads)
    setting = Setting(
        torch.device(options.device), options.scale == "tiny", options.repeats, options.case, options.variants
    )
    on_gpu = options.device == "cuda"
    processor = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.backends.cpu.get_cpu_capability()}"
    about = machine() | {"device": processor, "threads": str(options.threads), "scale": options.scale}
    options.results.mkdir(parents=True, exist_ok=True)
    stem = options.results / f"compressors-{options.device}"
    measured: dict[str, list[Row]] = {}
    for name in options.only or SECTIONS:
        if name == "capture" and not on_gpu:
            continue
        measured[name] = []
        for row in SECTIONS[name](setting):
            measured[name].append(row)
            taken = "missing" if row["ms"] is None else f"{row['ms']:.3f} ms (IQR {row['IQR, ms']:.3f})"
            print(f"{name}: {row['case']}: {row['work']}: {taken}", flush=True)
        if not measured[name]:
            parser.error(
                f"--case {options.case}: no case of {name} contains it. They read '8.3b, 1024 x 3072, rank 16' or"
                " 'int8, encode, bfloat16, shards at multiples of 16'"
            )
        # The results are written after each section, so that a later section that fails leaves the figures of the
        # earlier ones.
        write(about, measured, stem)
    print(f"written: {stem}.json, .md and pictures")
    if lacking := [name for name, rows in measured.items() if any(row["ms"] is None for row in rows)]:
        words = f"--device cuda --only {' '.join(lacking)}{' --variants' * options.variants}"
        print(f"missing, because it needs a GPU: python -m scripts.bench.compressors {words}")


if __name__ == "__main__":
    main()
