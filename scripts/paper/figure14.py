"""Figure 14: how fast gradients of the paper's models are compressed and decompressed, at ranks 8, 12, ..., 40.

    scripts/paper/figure14.py [--scale paper|tiny] [--device cpu|cuda] [--results FOLDER]

Writes RESULTS/figure14/throughput.csv, which scripts/paper/collect.py draws. A slice is one tensor-parallel rank's part
of the gradient of a micro-batch of 8 at TP8: sequence x hidden. Compression is all that the sender does for a message:
add the residual, factorise, reconstruct what arrives, keep the difference, prepare the next step's factor.
Decompression is what the receiver does. Throughput counts the bits of the slice, not of its factors.
"""

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKSPACE = ROOT if (ROOT / "setup.py").is_file() else Path.cwd()  # nothing is written into an installed package
sys.path.insert(0, str(ROOT))  # the package beside this script, installed or not

import torch  # noqa: E402

from optimus_cc_ext.compressors import (  # noqa: E402
    LowRank,
    ReferenceLowRank,
    Scratch,
    fast_compressor,
    initial_q,
    next_warm_start,
    packed_numel,
    private_generator,
)

RANKS = range(8, 41, 4)
SLICES = {"2.5b": (1024, 1920), "8.3b": (1024, 3072), "175b": (2048, 12288)}
"""Model to (rows, columns)."""

COMPRESSORS: dict[str, Callable[[], LowRank]] = {"fast": fast_compressor, "reference": ReferenceLowRank}
_TINY_DIVISOR = 8


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One line of the CSV; the seconds are medians."""

    model: str
    rows: int
    columns: int
    compression_rank: int
    compressor: str
    device: str
    smaller: float
    """The slice's size over its factors'."""

    compress_seconds: float
    decompress_seconds: float
    compress_gbit_per_second: float
    decompress_gbit_per_second: float


class Message:
    """A gradient (1, rows, columns), fp32, and all that one end of a link keeps for it."""

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
        """What the sender does."""
        total = self.residual
        self._compressor.project_sum(self._gradient, self.residual, self._start, total=total, out=self.p)
        self._compressor.orthogonalize(self.p, out=self.p)
        self._compressor.back_project(total, self.p, out=self.q)
        self._compressor.subtract_reconstruction(total, self.p, self.q)
        next_warm_start(self.q, self._fresh, self._compressor, out=self._start, scratch=self._scratch)

    @torch.no_grad()
    def decompress(self) -> None:
        """What the receiver does."""
        self._compressor.reconstruct(self.p, self.q, out=self.arrives)


def check(compressor: LowRank, rows: int, columns: int, compression_rank: int, device: torch.device) -> None:
    """What is timed has to be right: a matrix of this rank comes back, and of any other the best is not missed by far.

    Raises:
        SystemExit: if not.
    """
    generator = private_generator(714, "figure 14 check", device="cpu")
    left = torch.randn(1, rows, compression_rank, generator=generator)
    right = torch.randn(1, compression_rank, columns, generator=generator)
    exact = Message(compressor, (left @ right).to(device), compression_rank)
    exact.compress()
    # The random start may be nearly blind to a direction, which fp32 then rounds off; the warm start is not.
    exact.residual.zero_()
    exact.compress()
    exact.decompress()
    lost = float(exact.residual.norm() / exact.arrives.norm())
    # fp32 products of `columns` terms; TF32, which is off by default, would give 1e-3.
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


def median_seconds(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Seconds that `work` takes, after a first time that does not count."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    work()
    seconds = []
    for _ in range(repeats):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(
    model: str, shape: tuple[int, int], compression_rank: int, name: str, device: torch.device, repeats: int
) -> Measurement:
    """Check, then time one compressor at one rank on one slice."""
    rows, columns = shape
    compressor = COMPRESSORS[name]()
    check(compressor, rows, columns, compression_rank, device)
    gradient = torch.randn(1, rows, columns, generator=private_generator(714, model, device="cpu")).to(device)
    message = Message(compressor, gradient, compression_rank)
    compress = median_seconds(message.compress, device, repeats)
    decompress = median_seconds(message.decompress, device, repeats)
    gbit = gradient.numel() * gradient.element_size() * 8 / 1e9
    return Measurement(
        model=model, rows=rows, columns=columns, compression_rank=compression_rank, compressor=name,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        smaller=rows * columns / packed_numel(rows, columns, compression_rank),
        compress_seconds=compress, decompress_seconds=decompress,
        compress_gbit_per_second=gbit / compress, decompress_gbit_per_second=gbit / decompress,
    )  # fmt: skip


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("paper", "tiny"), default="paper", help="tiny: an eighth of each dimension")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=9, help="of which the median is taken (9)")
    parser.add_argument("--results", type=Path, help="folder of all results (results/paper, or results/paper-tiny)")
    options = parser.parse_args()
    if options.repeats < 1:
        parser.error("--repeats: at least one repetition is needed")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device. Give --device cpu")
    device = torch.device(options.device)
    divisor = _TINY_DIVISOR if options.scale == "tiny" else 1
    results = options.results or WORKSPACE / "results" / ("paper" if options.scale == "paper" else "paper-tiny")
    measured = []
    for model, (rows, columns) in SLICES.items():
        for name in COMPRESSORS:
            for compression_rank in RANKS:
                shape = (rows // divisor, columns // divisor)
                measured.append(measure(model, shape, compression_rank, name, device, options.repeats))
            last = measured[-1]
            print(
                f"{model}: {last.rows} x {last.columns}, {name}, rank {last.compression_rank}: compress"
                f" {last.compress_gbit_per_second:.1f} Gbit/s, decompress {last.decompress_gbit_per_second:.1f} Gbit/s",
                flush=True,
            )
    path = results / "figure14" / "throughput.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, [field.name for field in fields(Measurement)])
        writer.writeheader()
        writer.writerows(asdict(measurement) for measurement in measured)
    print(f"written: {path}")


if __name__ == "__main__":
    main()
