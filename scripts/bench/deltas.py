"""Benchmark of deltas of weights beside XOR and zstd: bytes, and seconds of one core.

    pip install 'optimus_cc_ext[bench]'
    python -m scripts.bench.deltas                                      # simulated weights
    python -m scripts.bench.deltas --pair results/differences/gpt.pt    # those of `python -m scripts.study.differences`

Each contender makes bytes of the change and the new weights of the bytes, in turns; times are medians of the thread's
seconds. A pair is a file of torch: the weights before and after a step, as two lists.
"""

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from optimus_cc_ext import deltas
from optimus_cc_ext.errors import require_extra, run_command
from optimus_cc_ext.tools.report.table import Table

Weights = list[Tensor]
Contender = tuple[Callable[[Weights, Weights], bytes], Callable[[Weights, bytes], Weights]]


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m scripts.bench.deltas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pair", type=Path, help="file of the weights before and after a step")
    parser.add_argument("--repeats", type=int, default=5, help="turns of every contender (%(default)s)")
    parser.add_argument("--numel", type=int, default=1 << 23, help="simulated weights (%(default)s)")
    options = parser.parse_args(argv)
    return run_command(lambda: compare(options), "nothing was written")


def compare(options: argparse.Namespace) -> int:
    """Time all contenders on the same weights, and print the table."""
    require_extra("bench", "zstandard")
    torch.set_num_threads(1)
    old, new = torch.load(options.pair, weights_only=True) if options.pair else simulated(options.numel)
    contenders = {"deltas": (deltas.encode, deltas.apply), "XOR, zstd -1": zstd(1), "XOR, zstd -3": zstd(3)}
    nbytes = sum(each.nbytes for each in old)
    sizes: dict[str, int] = {}
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(options.repeats):
        for name, (encode, apply) in contenders.items():
            started = time.thread_time()
            message = encode(old, new)
            encoded = time.thread_time()
            found = apply(old, message)
            seconds[name, 0].append(encoded - started)
            seconds[name, 1].append(time.thread_time() - encoded)
            sizes[name] = len(message)
            if any(not torch.equal(bits(one), bits(other)) for one, other in zip(found, new, strict=True)):
                raise SystemExit(f"{name}: the weights did not come through")
    rows = [
        (name, sizes[name], f"{nbytes / sizes[name]:.1f}",
         *(f"{statistics.median(seconds[name, way]):.4f}" for way in (0, 1)))
        for name in contenders
    ]  # fmt: skip
    title = f"A step of {nbytes / 1e6:.1f} MB of weights"
    print(Table(("way", "bytes", "times fewer", "encode, s", "apply, s"), rows, title).markdown())
    return 0


def simulated(numel: int) -> tuple[Weights, Weights]:
    """Return bf16 weights with a standard deviation of 0.02, before and after an Adam step with learning rate 1e-6."""
    generator = torch.Generator().manual_seed(1)
    master = torch.randn(numel, generator=generator) * 0.02
    step = 0.2e-6 * torch.randn(numel, generator=generator)
    return [master.bfloat16()], [(master - step).bfloat16()]


def zstd(level: int) -> Contender:
    """Return the way that compresses the XOR of the bytes with zstd."""
    import zstandard

    def encode(old: Weights, new: Weights) -> bytes:
        changes = (bits(one).bitwise_xor(bits(other)) for one, other in zip(old, new, strict=True))
        return zstandard.ZstdCompressor(level=level).compress(torch.cat(list(changes)).numpy().tobytes())

    def apply(old: Weights, message: bytes) -> Weights:
        change = torch.frombuffer(bytearray(zstandard.ZstdDecompressor().decompress(message)), dtype=torch.uint8)
        parts = change.split([each.nbytes for each in old])
        return [
            bits(each).bitwise_xor(part).view(each.dtype).view(each.shape)
            for each, part in zip(old, parts, strict=True)
        ]

    return encode, apply


def bits(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
