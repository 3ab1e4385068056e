"""The sections of the compressors' benchmark: what is checked, and then timed."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from compressors_report import Row
from compressors_timing import Work, alternate, captured, copy_bandwidth, gemm_rate
from compressors_work import Bucket, HookWork, OurWork
from figure14 import RANKS, SLICES, Message, check
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils._python_dispatch import TorchDispatchMode

from optimus_cc_ext.compressors import ReferenceLowRank, Scratch, fast_compressor, packed_numel, private_generator
from optimus_cc_ext.compressors.orthogonalize import _two_passes
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.selective_stage_compression import BucketReducer

__all__ = ["SECTIONS", "Setting", "check_basis", "check_bucket"]

COMPARED_RANKS = (8, 16, 40)
"""At which reference and hook are timed too, unless all ranks are asked for."""

STAGE_8_3B = ((1152, 3072), (3072, 384), (1536, 3072), (3072, 1536))
"""(rows, columns) of a layer's matrices at TP8: QKV, projection, and the MLP's two. 3072 hidden, 24 heads."""

STAGE_LAYERS, STAGE_VECTORS = 18, 4 * 3072 + 1152 + 3072 + 1536 + 3072


@dataclass(frozen=True)
class Setting:
    """What the command line chose."""

    device: torch.device
    tiny: bool
    all_ranks: bool
    repeats: int


def slices(setting: Setting) -> Iterator[Row]:
    """Figure 14's messages, by rank; against their floor: the bytes that must move at a copy's bandwidth."""
    divisor = 8 if setting.tiny else 1
    for model, (rows, columns) in SLICES.items():
        rows, columns = rows // divisor, columns // divisor
        nbytes = 4 * rows * columns
        bandwidth = copy_bandwidth(rows * columns, setting.device, setting.repeats)
        for compression_rank in RANKS:
            generator = private_generator(714, model, device="cpu")
            gradient = torch.randn(1, rows, columns, generator=generator).to(setting.device)
            compared = setting.all_ranks or compression_rank in COMPARED_RANKS
            works: dict[str, Work] = {}
            for name, kind in (("ours", fast_compressor), ("reference", ReferenceLowRank))[: 2 if compared else 1]:
                check(kind(), rows, columns, compression_rank, setting.device)
                message = Message(kind(), gradient, compression_rank)
                works[f"{name}, compress"], works[f"{name}, decompress"] = message.compress, message.decompress
                if setting.device.type == "cuda" and name == "ours":
                    works["ours, compress, graph"] = captured(message.compress)
                    works["ours, decompress, graph"] = captured(message.decompress)
            if compared:
                alone = Bucket(gradient.clone().view(-1), 1, ((rows, columns),), 0)
                works["hook, compress and decompress"] = HookWork(alone, compression_rank, batched=False).step
            factors = 4 * packed_numel(rows, columns, compression_rank)
            # Read gradient and residual, write the sum; read it for Q; read it again and write the residual.
            floors = {"compress": (6 * nbytes + factors) / bandwidth, "decompress": (nbytes + factors) / bandwidth}
            for name, sample in alternate(works, setting.device, setting.repeats).items():
                what = name.split(", ")[1]
                case = f"{model}, {rows} x {columns}, rank {compression_rank}"
                yield Row("slices", case, name, sample, floors.get(what), {"gbit": nbytes * 8 / 1e9})


def orthogonalization(setting: Setting) -> Iterator[Row]:
    """Batches of P alone. The hook's and LAPACK's time does not depend on the values; ours does, on a CPU."""
    layers, r = (2, 32) if setting.tiny else (STAGE_LAYERS, 128)
    for n in (384,) if setting.tiny else (3072, 1152):
        generator = private_generator(3, "bench orthogonalization", n, device="cpu")
        gaussian = torch.randn(layers, n, r, generator=generator)
        # As P = M Q comes from a warm-started Q: nearly orthogonal columns, lengths that fall tenfold.
        basis = torch.linalg.qr(gaussian).Q
        mixed = torch.eye(r) + 0.03 * torch.randn(layers, r, r, generator=generator) / r**0.5
        warm = basis @ mixed * torch.logspace(0, -1, r)
        turn = torch.linalg.qr(torch.randn(r, r, generator=generator)).Q
        cold = gaussian * torch.logspace(0, -5, r) @ turn
        for kind, p in (("Gaussian", gaussian), ("warm-started", warm), ("condition 1e5", cold)):
            p = p.to(setting.device)
            out, other, theirs = torch.empty_like(p), torch.empty_like(p), p.clone()
            scratch, fast = Scratch(), fast_compressor()
            check_basis(p, fast.orthogonalize(p, out=out), f"{kind}, {layers} x {n} x {r}")
            works: dict[str, Callable[[], Any]] = {
                "ours": lambda fast=fast, p=p, out=out: fast.orthogonalize(p, out=out),
                "hook's _orthogonalize": lambda theirs=theirs: powerSGD_hook._orthogonalize(theirs),
                "LAPACK or cuSOLVER QR": lambda p=p: torch.linalg.qr(p),
                "CholeskyQR2 in fp64": lambda p=p, other=other, scratch=scratch: _two_passes(p, other, scratch),
            }
            bases = {name: work() for name, work in works.items()}
            bases |= {"hook's _orthogonalize": theirs, "LAPACK or cuSOLVER QR": torch.linalg.qr(p).Q}
            off = {name: off_orthonormal(basis) for name, basis in bases.items()}
            for name, sample in alternate(works, setting.device, setting.repeats).items():
                more = {"off orthonormal": off[name]}
                yield Row("orthogonalization", f"{kind}, {layers} x {n} x {r}", name, sample, None, more)


def off_orthonormal(basis: torch.Tensor) -> float:
    """The largest entry of P^T P - 1 over a batch (B, n, r)."""
    basis = basis.double()
    identity = torch.eye(basis.shape[2], dtype=basis.dtype, device=basis.device)
    return float((basis.mT @ basis - identity).abs().max())


def check_basis(p: torch.Tensor, basis: torch.Tensor, subject: str) -> None:
    """Orthonormal columns that span those of p.

    Raises:
        SystemExit: they do not.
    """
    off, p, basis = off_orthonormal(basis), p.double(), basis.double()
    missed = float((p - basis @ (basis.mT @ p)).norm() / p.norm())
    if not (off < 3e-6 and missed < 3e-6):
        raise SystemExit(f"compressors.py: orthogonalisation of {subject}: {off:.1e} off, {missed:.1e} missed")


def bucket(setting: Setting) -> Iterator[Row]:
    """The local work on a whole gradient bucket of a stage; against the time of its products at the best rate here."""
    shapes, layers, vectors, r = STAGE_8_3B, STAGE_LAYERS, STAGE_VECTORS, 128
    if setting.tiny:
        shapes, layers, vectors, r = tuple((n // 16, m // 16) for n, m in shapes), 2, vectors // 16, 8
    check_bucket(fast_compressor, shapes, setting.device, r)
    repeats = max(1, setting.repeats // 3) if setting.device.type == "cpu" else setting.repeats
    rates = gemm_rate(128 if setting.tiny else 2048, setting.device, setting.repeats)
    gradients = Bucket.random(layers, shapes, vectors, setting.device, seed=1)

    def copy() -> Bucket:
        return gradients.like(gradients.flat.clone())

    works: dict[str, Work] = {
        "ours": OurWork(fast_compressor(), gradients, r).step,
        "hook, batched": HookWork(copy(), r, batched=True).step,
        "hook, as by default": HookWork(copy(), r, batched=False).step,
    }
    if setting.device.type == "cuda":
        works["ours, graph"] = captured(OurWork(fast_compressor(), copy(), r).step)
    flops, best = gradients.gemm_flops(r), max(rates.values())
    bandwidth = copy_bandwidth(min(gradients.flat.numel(), 1 << 26), setting.device, setting.repeats)
    more = {
        "gflop": flops / 1e9, "bytes_floor_seconds": gradients.floor_bytes() / bandwidth,
        **{f"gflops_{name}": rate / 1e9 for name, rate in rates.items()},
    }  # fmt: skip
    case = f"{layers} layers, {gradients.flat.nbytes / 1e9:.2f} GB, rank {r}"
    for name, sample in alternate(works, setting.device, repeats).items():
        yield Row("bucket", case, name, sample, flops / best, more)


def check_bucket(
    compressor: Callable[[], Any], shapes: tuple[tuple[int, int], ...], device: torch.device, compression_rank: int
) -> None:
    """Ours loses no gradient, and approximates like the hook, over two steps on two layers.

    Raises:
        SystemExit: it does not.
    """
    original = Bucket.random(2, shapes, 40, device, seed=2)
    mine, theirs = (original.like(original.flat.clone()) for _ in range(2))
    ours, hook = OurWork(compressor(), mine, compression_rank), HookWork(theirs, compression_rank, batched=True)
    for _ in range(2):
        ours.step()
        hook.step()
    for shape, was, sent, expected, kept in zip(
        shapes, original.batches(), mine.batches(), theirs.batches(), ours.residuals, strict=True
    ):
        lost = float((sent + kept - was).norm() / was.norm())
        apart = float((sent - expected).norm() / expected.norm())
        # fp32 rounding; between the two over as many steps amplified by the factors' condition.
        if not (lost < 1e-5 and apart < 1e-3):
            raise SystemExit(f"compressors.py: bucket of {shape}: {lost:.1e} lost, {apart:.1e} off the hook")


def layers(setting: Setting) -> Iterator[Row]:
    """`BucketReducer.reduce` over a group of one process: seconds and operators by the number of layers."""
    hidden, r, counts = (64, 4, (2, 4)) if setting.tiny else (256, 8, (8, 16, 32, 64))
    shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    config = DataParallelCompressionConfig(dp_compression=True, dp_compression_rank=r)
    with _one_process(setting.device) as group:
        reducers: dict[int, BucketReducer] = {}
        for count in counts:
            gradients = Bucket.random(count, shapes, 0, setting.device, seed=3)
            matrices = [matrix for batch in gradients.batches() for matrix in batch]
            matrices.sort(key=lambda view: view.storage_offset())  # layer by layer, as a bucket has them
            reducers[count] = BucketReducer(
                matrices, [], group=group, compressor=fast_compressor(), config=config, seed=1, salt="bench"
            )
            was = gradients.flat.clone()
            reducers[count].reduce()
            kept = torch.cat([residual.flatten() for residual in reducers[count].residuals()]).norm() ** 2
            lost = abs(float((gradients.flat.norm() ** 2 + kept) / was.norm() ** 2) - 1)
            if not lost < 1e-3:  # what is sent is a projection: its square and the rest's add up
                raise SystemExit(f"compressors.py: layers, {count}: {lost:.1e} of the gradient's square is missing")
        launches = {count: _operators(reducer.reduce) for count, reducer in reducers.items()}
        works: dict[str, Work] = {f"{count} layers": reducer.reduce for count, reducer in reducers.items()}
        for (count, reducer), sample in zip(
            reducers.items(), alternate(works, setting.device, 2 * setting.repeats).values(), strict=True
        ):
            nbytes = 4 * sum(residual.numel() for residual in reducer.residuals())
            more = {"layers": count, "operators": launches[count], "megabytes": nbytes / 1e6}
            yield Row("layers", f"hidden {hidden}, rank {r}", f"{count} layers", sample, None, more)


def capture(setting: Setting) -> Iterator[Row]:
    """On a GPU: a step without synchronisation, and as a graph with the same result."""
    divisor = 8 if setting.tiny else 1
    for model, (rows, columns) in SLICES.items():
        shape = (1, rows // divisor, columns // divisor)
        gradient = torch.randn(shape, generator=private_generator(8, model, device="cpu")).to(setting.device)
        eager, graphed = (Message(fast_compressor(), gradient, 16) for _ in range(2))
        for _ in range(4):  # as many as `captured` runs before it captures, and one for its replay
            eager.compress()
        replay = captured(graphed.compress)
        replay()
        torch.cuda.synchronize()
        pairs = ((eager.p, graphed.p), (eager.q, graphed.q), (eager.residual, graphed.residual))
        if not all(torch.equal(one, other) for one, other in pairs):
            raise SystemExit(f"compressors.py: {model}: the graph's results differ from those without it")
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.compress()
            eager.decompress()
        except RuntimeError as error:
            raise SystemExit(f"compressors.py: {model}: it waits for the device: {error}") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
        works: dict[str, Work] = {"eager": eager.compress, "graph": replay}
        for name, sample in alternate(works, setting.device, setting.repeats).items():
            yield Row("capture", f"{model}, rank 16, compress: equal bits, no synchronisation", name, sample)


class _Counter(TorchDispatchMode):
    """Counts the operators that compute; views launch nothing."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += not func.is_view
        return func(*args, **(kwargs or {}))


def _operators(work: Work) -> int:
    with _Counter() as counter:
        work()
    return counter.calls


@contextlib.contextmanager
def _one_process(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """A process group of this process alone."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


SECTIONS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "slices": slices,
    "orthogonalization": orthogonalization,
    "bucket": bucket,
    "layers": layers,
    "capture": capture,
}
