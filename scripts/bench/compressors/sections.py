"""Sections of the compressors' benchmark, each of which checks results before it times them."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils.benchmark import Measurement

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.fast import fast_codec, fast_compressor
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.compressors.low_rank import FastLowRank, LowRank, ReferenceLowRank, packed_numel
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.tools.report.table import Cell
from scripts.bench.compressors.bucket import Bucket, hook, one_process, reducer, step
from scripts.bench.compressors.codecs import cases, compile_variants
from scripts.bench.compressors.kernels import contenders
from scripts.bench.compressors.timing import Work, captured, in_turn
from scripts.paper.figure14 import RANKS, SLICES, Message, check

__all__ = ["SECTIONS", "Row", "Setting", "check_basis", "check_bucket", "check_format"]

COMPARED_RANKS = (8, 16, 40)
"""Compression ranks at which reference and hook are timed, too."""

STAGE_8_3B: tuple[tuple[int, int], ...] = ((1152, 3072), (3072, 384), (1536, 3072), (3072, 1536))
"""(rows, columns) of a layer's matrices at TP8: QKV, projection, and the MLP's two. 3072 hidden, 24 heads."""

STAGE_LAYERS, STAGE_VECTOR = 18, 4 * 3072 + 1152 + 3072 + 1536 + 3072


@dataclass(frozen=True)
class Setting:
    """Choices of the command line."""

    device: torch.device
    tiny: bool
    repeats: int
    case: str = ""
    """Only cases whose names contain this text are timed (sections "slices" and "codecs")."""

    variants: bool = False
    """True if the section "codecs" times other choices for the compiler, too."""

    def in_turn(self, works: Mapping[str, Work], once: bool = False) -> dict[str, Measurement]:
        """Time each work in `repeats` turns, each of a tenth of a second, or of a single repetition."""
        return in_turn(works, self.repeats, 0.0 if once else 1e-4 if self.tiny else 0.1)

    def bandwidth(self, values: int) -> float:
        """Return the bytes per second, read and written together, of copying a tensor of `values` fp32 values."""
        source = torch.zeros(values, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.in_turn({"copy": lambda: target.copy_(source)})["copy"].median

    def product_rate(self) -> float:
        """Return the operations per second of a large product in fp32."""
        size = 128 if self.tiny else 2048
        a = torch.ones(size, size, device=self.device)
        out = torch.empty_like(a)
        return 2 * size**3 / self.in_turn({"mm": lambda: torch.mm(a, a, out=out)})["mm"].median


Row = dict[str, Cell]
"""Cells of one piece of work that was timed, by column. Pieces of one case are compared."""


def row(case: str, work: str, taken: Measurement, floor: float | None = None, **more: Cell) -> Row:
    """Make a row from the timer's measurement; `floor` is the least seconds that the machine allows."""
    median, iqr = 1e3 * taken.median, 1e3 * taken.iqr
    found: Row = {"case": case, "work": work, "ms": median, "IQR, ms": iqr, "measurements": len(taken.times)}
    if floor:
        found |= {"floor, ms": 1e3 * floor, "over floor": taken.median / floor}
    return found | more


def slices(setting: Setting) -> Iterator[Row]:
    """Time figure 14's messages, by rank, against their floor: the bytes that must move, at a copy's bandwidth."""
    with one_process(setting.device):
        for model, shape in SLICES.items():
            n, m = (size // (8 if setting.tiny else 1) for size in shape)
            cases = {rank: f"{model}, {n} x {m}, rank {rank}" for rank in RANKS}
            cases = {rank: case for rank, case in cases.items() if setting.case in case}
            bandwidth = setting.bandwidth(n * m) if cases else 0.0
            for rank, case in cases.items():
                nbytes, factors = 4 * n * m, 4 * packed_numel(n, m, rank)
                # At the least, compression reads gradient and residual, writes their sum, multiplying it twice
                # meanwhile, then reads the sum and writes the residual.
                floors = {"compress": (5 * nbytes + factors) / bandwidth, "decompress": (nbytes + factors) / bandwidth}
                for work, taken in setting.in_turn(_slice(model, n, m, rank, setting.device)).items():
                    more: Row = {"model": model, "rank": rank, "Gbit/s": nbytes * 8e-9 / taken.median}
                    yield row(case, work, taken, floors.get(work.split(", ")[1]), **more)


def _slice(model: str, n: int, m: int, compression_rank: int, device: torch.device) -> dict[str, Work]:
    generator = private_generator(714, model, device="cpu")
    gradient = torch.randn(1, n, m, generator=generator).to(device)
    compressors: dict[str, Callable[[], LowRank]] = {"ours": fast_compressor}
    if compared := compression_rank in COMPARED_RANKS:
        compressors["reference"] = ReferenceLowRank
    works: dict[str, Work] = {}
    for name, compressor in compressors.items():
        check(compressor(), n, m, compression_rank, device)
        message = Message(compressor(), gradient, compression_rank)
        works |= {f"{name}, compress": message.compress, f"{name}, decompress": message.decompress}
    if compared:
        alone = Bucket(gradient.flatten().clone(), 1, ((n, m),))
        works["hook, compress and decompress"] = hook(alone, compression_rank, batched=False)
    return works


def orthogonalization(setting: Setting) -> Iterator[Row]:
    """Time the orthogonalisation of batches of P, against two triangular products: a Gram matrix and a change of basis.

    The hook's and LAPACK's time does not depend on the values; ours does, on a CPU.
    """
    layers, ranks = (2, (32,)) if setting.tiny else (STAGE_LAYERS, (16, 64, 128))
    rate, ours = setting.product_rate(), fast_compressor()
    for n, r in itertools.product((384,) if setting.tiny else (3072, 1152), ranks):
        for kind in ("Gaussian", "warm-started", "condition 1e5"):
            case = f"{kind}, {layers} x {n} x {r}"
            p = to_orthogonalize(kind, layers, n, r).to(setting.device)
            check_basis(p, ours.orthogonalize(p), case)
            bases: dict[str, Callable[[], torch.Tensor]] = {
                "ours": partial(ours.orthogonalize, p, out=torch.empty_like(p)),
                "ours in fp64": lambda p=p: ours.orthogonalize(p.double()),  # type: ignore[misc]
                "hook's _orthogonalize": partial(_orthogonalized_by_hook, p.clone()),
                "LAPACK or cuSOLVER QR": lambda p=p: torch.linalg.qr(p).Q,  # type: ignore[misc]
            }
            off = {name: off_orthonormal(work()) for name, work in bases.items()}
            for name, taken in setting.in_turn(bases).items():
                yield row(case, name, taken, 2 * layers * n * r * r / rate, **{"off orthonormal": off[name]})


def _orthogonalized_by_hook(p: torch.Tensor) -> torch.Tensor:
    powerSGD_hook._orthogonalize(p)
    return p


def to_orthogonalize(kind: str, layers: int, n: int, r: int) -> torch.Tensor:
    """Make a batch of P (layers, n, r), fp32, with an easy, a usual, or a hard spectrum."""
    generator = private_generator(3, "bench orthogonalization", n, device="cpu")
    gaussian = torch.randn(layers, n, r, generator=generator)
    if kind == "Gaussian":
        return gaussian
    if kind == "warm-started":
        # P = M Q of a warm-started Q has nearly orthogonal columns, whose lengths fall tenfold.
        mixed = torch.eye(r) + 0.03 * torch.randn(layers, r, r, generator=generator) / r**0.5
        return torch.linalg.qr(gaussian).Q @ mixed * torch.logspace(0, -1, r)
    rotation = torch.linalg.qr(torch.randn(r, r, generator=generator)).Q
    return gaussian * torch.logspace(0, -5, r) @ rotation


def off_orthonormal(basis: torch.Tensor) -> float:
    """Return the largest entry of P^T P - 1 over a batch (B, n, r)."""
    basis = basis.double()
    identity = torch.eye(basis.shape[2], dtype=basis.dtype, device=basis.device)
    return float((basis.mT @ basis - identity).abs().max())


def check_basis(p: torch.Tensor, basis: torch.Tensor, subject: str) -> None:
    """Check that a basis has orthonormal columns that span those of p.

    Raises:
        SystemExit: it does not.
    """
    off, p, basis = off_orthonormal(basis), p.double(), basis.double()
    missed = float((p - basis @ (basis.mT @ p)).norm() / p.norm())
    if not (off < 3e-6 and missed < 3e-6):
        raise SystemExit(f"orthogonalisation of {subject}: {off:.1e} off, {missed:.1e} missed")


def _stage(setting: Setting, seed: int) -> tuple[Bucket, int]:
    """Return a stage's bucket and its compression rank."""
    if not setting.tiny:
        return Bucket.random(STAGE_LAYERS, STAGE_8_3B, STAGE_VECTOR, setting.device, seed), 128
    shapes = [(n // 16, m // 16) for n, m in STAGE_8_3B]
    return Bucket.random(2, shapes, STAGE_VECTOR // 16, setting.device, seed), 8


def _described(gradients: Bucket) -> str:
    return f"{gradients.layers} layers, {gradients.flat.nbytes / 1e9:.2f} GB"


def bucket(setting: Setting) -> Iterator[Row]:
    """Time a whole gradient bucket of a stage, against the time of its products at the rate of a large product here."""
    gradients, r = _stage(setting, seed=1)
    with one_process(setting.device) as group:
        check_bucket(fast_compressor(), gradients.shapes, setting.device, r, group)
        ways = {"ours": fast_compressor()} | ({} if setting.device.type == "cpu" else {"ours, by torch": FastLowRank()})
        works: dict[str, Work] = {
            **{
                name: partial(step, reducer(own, r, way, group), own)
                for name, way in ways.items()
                for own in [gradients.copy()]
            },
            "hook, batched": hook(gradients.copy(), r, batched=True),
            "hook, as by default": hook(gradients.copy(), r, batched=False),
        }
        taken = setting.in_turn(works, once=setting.device.type == "cpu")
    floor = gradients.flops(r) / setting.product_rate()
    for name, measurement in taken.items():
        yield row(f"{_described(gradients)}, rank {r}", name, measurement, floor)


def check_bucket(
    compressor: LowRank, shapes: tuple[tuple[int, int], ...], device: torch.device, compression_rank: int,
    group: dist.ProcessGroup,
) -> None:  # fmt: skip
    """Check over two steps on two layers that our reducer loses no gradient, and approximates like the hook.

    Raises:
        SystemExit: it does not.
    """
    original = Bucket.random(2, shapes, 40, device, seed=2)
    mine, theirs = original.copy(), original.copy()
    ours = reducer(mine, compression_rank, compressor, group)
    other = hook(theirs, compression_rank, batched=True, starts=[state.warm_start.value for state in ours.states])
    for _ in range(2):
        step(ours, mine)
        other()
    for shape, kept in zip(shapes, ours.states.residuals(), strict=True):
        was, sent, expected = (each.stacked(shape) for each in (original, mine, theirs))
        lost = float((sent + kept - was).norm() / was.norm())
        apart = float((sent - expected).norm() / expected.norm())
        # Only fp32 rounding is lost. The two reducers differ by the same rounding, amplified over the steps by the
        # condition of the factors.
        if not (lost < 1e-5 and apart < 1e-3):
            raise SystemExit(f"bucket of {shape}: {lost:.1e} lost, {apart:.1e} off the hook")


FORMAT_CASES: dict[str, tuple[str, bool, float]] = {
    f"{name}, rotated" if rotated else name: (name, rotated, row.gaussian_error)
    for name, row in FORMATS.items()
    for rotated in ((False, True) if row.rotated else (False,))
    if row.largest is not None
}
"""Formats with rounding errors, by name: format, rotated, and the relative error of Gaussian values."""


def formats(setting: Setting) -> Iterator[Row]:
    """Time a stage's bucket encoded, and decoded and added, in every format, against a copy's bandwidth."""
    gradients, _ = _stage(setting, seed=4)
    values, out = gradients.flat, torch.empty_like(gradients.flat)
    layout, bandwidth = BlockLayout.of_one(values.numel()), setting.bandwidth(min(values.numel(), 1 << 26))
    works: dict[str, Work] = {}
    floors = {}
    for name, (format, rotated, expected) in FORMAT_CASES.items():
        codec = fast_codec(format, seed=1, rotated=rotated)
        check_format(codec, values[: 1 << 20], expected, name)
        nbytes = codec.message_bytes(layout, values.dtype)
        message = torch.empty(1, nbytes, dtype=torch.uint8, device=setting.device)
        works[f"{name}, encode"] = partial(codec.encode, values, layout, message)
        works[f"{name}, decode and add"] = partial(codec.decode_add, message, layout, 0, out)
        # Encoding and decoding each read and write the values and the message once.
        floors[name] = (values.nbytes + nbytes) / bandwidth
    for name, taken in setting.in_turn(works, once=setting.device.type == "cpu" and not setting.tiny).items():
        yield row(_described(gradients), name, taken, floors[name.rsplit(", ", 1)[0]])


def check_format(codec: Codec, values: torch.Tensor, expected: float, subject: str) -> None:
    """Check that the relative error of Gaussian `values` is within 10 % of `expected`.

    Raises:
        SystemExit: it is not.
    """
    layout, out = BlockLayout.of_one(values.numel()), torch.empty_like(values)
    nbytes = codec.message_bytes(layout, values.dtype)
    message = torch.empty(1, nbytes, dtype=torch.uint8, device=values.device)
    codec.encode(values, layout, message)
    codec.decode(message, layout, out)
    error = float((out - values).norm() / values.norm())
    if not abs(error / expected - 1) < 0.1:
        raise SystemExit(f"{subject}: an error of {error:.4f}, not of {expected}")


def projections(setting: Setting) -> Iterator[Row]:
    """Time the kernels as `kernels` does, on all matrices of a shape in a stage's bucket at once."""
    for shape in STAGE_8_3B[: 1 if setting.tiny else None]:
        yield from kernels(setting, (STAGE_LAYERS, *shape))


def kernels(setting: Setting, shape: tuple[int, int, int] = (1, 1024, 3072)) -> Iterator[Row]:
    """Time each kernel beside torch's own way; without a GPU, the columns of kernels and of compiled torch stay
    empty.
    """
    for case, works in contenders(setting.device, (2, 64, 96) if setting.tiny else shape):
        taken = setting.in_turn({name: work for name, work in works.items() if work is not None})
        for name in works:
            yield row(case, name, taken[name]) if name in taken else {"case": case, "work": name, "ms": None}


def codecs(setting: Setting) -> Iterator[Row]:
    """Time the block formats' kernels at each alignment of a shard, in GB/s, next to a copy's bandwidth."""
    numel = 1 << (13 if setting.tiny else 26)
    if setting.variants and setting.device.type == "cuda":
        compile_variants()
    bandwidth = setting.bandwidth(numel)
    for case, nbytes, works in cases(setting.device, numel, setting.case, setting.variants):
        possible = {name: work for name, work in works.items() if work is not None}
        taken = setting.in_turn(possible) if possible else {}
        for name in works:
            rate: Row = {"GB/s": nbytes * 1e-9 / taken[name].median if name in taken else None}
            rate["GB/s of a copy"] = bandwidth * 1e-9
            floor = nbytes / bandwidth
            missing: Row = {"case": case, "work": name, "ms": None}
            yield row(case, name, taken[name], floor, **rate) if name in taken else missing | rate


CAPTURED_RANKS = (16, 64, 128)


def capture(setting: Setting) -> Iterator[Row]:
    """Time a step on a GPU without synchronisation, and as a CUDA graph with the same result."""
    for (model, shape), rank in itertools.product(SLICES.items(), CAPTURED_RANKS):
        n, m = (size // (8 if setting.tiny else 1) for size in shape)
        gradient = torch.randn(1, n, m, generator=private_generator(8, model, device="cpu")).to(setting.device)
        eager, graphed = (Message(fast_compressor(), gradient, rank) for _ in range(2))
        for _ in range(4):  # `captured` runs the step three times before it captures it, and its replay is the fourth
            eager.compress()
        replay = captured(graphed.compress)
        replay()
        torch.cuda.synchronize()
        pairs = ((eager.p, graphed.p), (eager.q, graphed.q), (eager.residual, graphed.residual))
        if not all(torch.equal(one, other) for one, other in pairs):
            raise SystemExit(f"{model}, rank {rank}: the graph's results differ from those without it")
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.compress()
            eager.decompress()
        except RuntimeError as error:
            raise SystemExit(f"{model}, rank {rank}: it waits for the device: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for name, taken in setting.in_turn({"ours": eager.compress, "graph": replay}).items():
            yield row(f"{model}, rank {rank}, compress: equal bits, no synchronisation", name, taken)


SECTIONS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "kernels": kernels,
    "projections": projections,
    "codecs": codecs,
    "slices": slices,
    "orthogonalization": orthogonalization,
    "bucket": bucket,
    "formats": formats,
    "capture": capture,
}
