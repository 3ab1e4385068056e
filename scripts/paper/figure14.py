"""Figure 14: throughput of compressing and decompressing gradients of the paper's models, at ranks 8, 12, ..., 40.

    python -m scripts.paper.figure14 [--scale paper|tiny] [--device cpu|cuda] [--results FOLDER]

Writes RESULTS/figure14/throughput.csv, which scripts.paper.collect draws. A slice is one tensor-parallel rank's part of
the gradient of a micro-batch of 8 at TP8: sequence x hidden. Compression is all work of the sender for a message: add
the residual, factorise, reconstruct what arrives, keep the difference, prepare the next step's factor. Decompression is
the work of the receiver. Throughput counts the bits of the slice, not of its factors.
"""

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.benchmark import Timer

from optimus_cc_ext.compressors.fast import fast_compressor
from optimus_cc_ext.compressors.low_rank import LowRank, ReferenceLowRank, initial_q, next_warm_start, packed_numel
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.tools.report.table import Table

RANKS = range(8, 41, 4)
SLICES = {"2.5b": (1024, 1920), "8.3b": (1024, 3072), "175b": (2048, 12288)}
"""(rows, columns) of a slice, by model."""

COMPRESSORS: dict[str, Callable[[], LowRank]] = {"fast": fast_compressor, "reference": ReferenceLowRank}
_TINY_DIVISOR = 8
COLUMNS = (
    "model", "rows", "columns", "rank", "compressor", "device", "times smaller", "compress, Gbit/s",
    "decompress, Gbit/s",
)  # fmt: skip
"""Columns of the table. Throughputs are medians; "times smaller" is the slice's size over its factors'."""


class Message:
    """Gradient (1, rows, columns), fp32, with the state and buffers of one end of a link."""

    def __init__(self, compressor: LowRank, gradient: torch.Tensor, compression_rank: int) -> None:
        _, rows, columns = gradient.shape
        self._compressor, self._gradient = compressor, gradient
        generator = private_generator(714, "figure 14", device="cpu")
        self._fresh = initial_q(1, columns, compression_rank, generator=generator, device=gradient.device)
        self._start = self._fresh.clone()
        self._scratch = Scratch()
        self.p, self.q = gradient.new_empty(1, rows, compression_rank), torch.empty_like(self._start)
        self.residual, self.arrives = torch.zeros_like(gradient), torch.empty_like(gradient)

    @torch.no_grad()
    def compress(self) -> None:
        """Compress the gradient, as a message's sender does."""
        total = self.residual
        self._compressor.project_sum(self._gradient, self.residual, self._start, total=total, out=self.p)
        self._compressor.orthogonalize(self.p, out=self.p)
        self._compressor.back_project(total, self.p, out=self.q)
        self._compressor.subtract_reconstruction(total, self.p, self.q)
        next_warm_start(self.q, self._fresh, self._compressor, out=self._start, scratch=self._scratch)

    @torch.no_grad()
    def decompress(self) -> None:
        """Decompress the message, as its receiver does."""
        self._compressor.reconstruct(self.p, self.q, out=self.arrives)


def check(compressor: LowRank, rows: int, columns: int, compression_rank: int, device: torch.device) -> None:
    """Check a compressor before it is timed: it restores a matrix of this rank, and approximates noise as the reference
    does.

    Raises:
        SystemExit: it does not.
    """
    generator = private_generator(714, "figure 14 check", device="cpu")
    left = torch.randn(1, rows, compression_rank, generator=generator)
    right = torch.randn(1, compression_rank, columns, generator=generator)
    exact = Message(compressor, (left @ right).to(device), compression_rank)
    exact.compress()
    # The random start may almost miss a direction, which fp32 then rounds off; the warm start of this second step does
    # not.
    exact.residual.zero_()
    exact.compress()
    exact.decompress()
    lost = float(exact.residual.norm() / exact.arrives.norm())
    # fp32 products of `columns` terms lose less than 1e-4; TF32, which is off by default, would lose 1e-3.
    subject = f"figure14.py: rank {compression_rank} of {rows} x {columns}"
    if not lost < 1e-4:
        raise SystemExit(f"{subject}: {lost:.1e} of a matrix of this rank is lost")
    noise = torch.randn(1, rows, columns, generator=generator).to(device)
    ours, oracle = Message(compressor, noise, compression_rank), Message(ReferenceLowRank(), noise, compression_rank)
    for message in (ours, oracle):
        message.compress()
        message.decompress()
    apart = float((ours.arrives - oracle.arrives).norm() / oracle.arrives.norm())
    if not apart < 1e-3:
        raise SystemExit(f"{subject}: {apart:.1e} off the reference")


def median_seconds(work: Callable[[], None], repeats: int) -> float:
    """Return the median seconds of `work`; the timer warms up and synchronises with the device."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return statistics.median(timer.timeit(1).mean for _ in range(repeats))


def measure(
    model: str, shape: tuple[int, int], compression_rank: int, name: str, device: torch.device, repeats: int
) -> tuple[str | int | float, ...]:
    """Check, then time one compressor at one rank on one slice; return a row of `COLUMNS`."""
    compressor = COMPRESSORS[name]()
    check(compressor, *shape, compression_rank, device)
    gradient = torch.randn(1, *shape, generator=private_generator(714, model, device="cpu")).to(device)
    message = Message(compressor, gradient, compression_rank)
    gbit = gradient.numel() * gradient.element_size() * 8 / 1e9
    device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    smaller = gradient.numel() / packed_numel(*shape, compression_rank)
    throughput = (gbit / median_seconds(work, repeats) for work in (message.compress, message.decompress))
    return model, *shape, compression_rank, name, device_name, smaller, *throughput


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("paper", "tiny"), default="paper", help="tiny: an eighth of each dimension")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9, help="repetitions, whose median is taken (9)")
    parser.add_argument("--results", type=Path, help="folder of all results (results/paper, or results/paper-tiny)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: at least one repetition is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device. Give --device cpu")
    device = torch.device(options.device)
    divisor = _TINY_DIVISOR if options.scale == "tiny" else 1
    results = options.results or Path("results", "paper" if options.scale == "paper" else "paper-tiny")
    measured = []
    for model, (rows, columns) in SLICES.items():
        shape = (rows // divisor, columns // divisor)
        for name in COMPRESSORS:
            for compression_rank in RANKS:
                measured.append(measure(model, shape, compression_rank, name, device, options.repeats))
            *_, compress, decompress = measured[-1]
            speeds = f"compress {compress:.1f} Gbit/s, decompress {decompress:.1f} Gbit/s"
            print(f"{model}: {shape[0]} x {shape[1]}, {name}, rank {RANKS[-1]}: {speeds}", flush=True)
    path = results / "figure14" / "throughput.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    Table(COLUMNS, measured).write_csv(path)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
