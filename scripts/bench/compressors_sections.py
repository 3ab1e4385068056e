"""The sections of the compressors' benchmark: what is checked, and then timed."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from compressors_contenders import Contender, alternate
from compressors_report import Row
from compressors_timing import Sample, Work, captured, copy_bandwidth, gemm_rate, in_turn
from compressors_work import Bucket, HookWork, OurWork
from figure14 import RANKS, SLICES, Message, check
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.utils._python_dispatch import TorchDispatchMode

from optimus_cc_ext.compressors import (
    LowRank,
    ReferenceLowRank,
    Scratch,
    fast_compressor,
    packed_numel,
    private_generator,
)
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
    cold: bool = False
    """Whether the caches hold something else when a repetition begins."""

    case: str = ""
    """What a slice's case has to contain."""

    def alternate(
        self, contenders: dict[str, Contender], *, rounds: int | None = None, in_a_row: int = 3, processes: int = 1
    ) -> dict[str, Sample]:
        """`compressors_contenders.alternate` in this setting: `repeats` repetitions, unless `rounds` says otherwise."""
        processes = 1 if self.tiny or self.device.type == "cuda" else processes
        rounds = rounds or -(-self.repeats // (in_a_row * processes))
        warm_up = 0.0 if self.tiny else 0.2
        return alternate(
            contenders, self.device, rounds,
            in_a_row=in_a_row, warm_up=warm_up, cold=self.cold, processes=processes, attempts=1 if self.tiny else 8,
        )  # fmt: skip


_PROCESSES_OF_A_SLICE, _PROCESSES_OF_A_BATCH = 7, 3
"""Of each contender, on a CPU."""


def slices(setting: Setting) -> Iterator[Row]:
    """Figure 14's messages, by rank; against their floor: the bytes that must move at a copy's bandwidth."""
    divisor = 8 if setting.tiny else 1
    for model, (rows, columns) in SLICES.items():
        rows, columns = rows // divisor, columns // divisor
        nbytes = 4 * rows * columns
        cases = {rank: f"{model}, {rows} x {columns}, rank {rank}" for rank in RANKS}
        cases = {rank: case for rank, case in cases.items() if setting.case in case}
        bandwidth = copy_bandwidth(rows * columns, setting.device, setting.repeats) if cases else 0.0
        for compression_rank, case in cases.items():
            one = (model, rows, columns, compression_rank, setting.device)
            contenders: dict[str, Contender] = {"ours": partial(_message, fast_compressor, *one)}
            if setting.all_ranks or compression_rank in COMPARED_RANKS:
                contenders["reference"] = partial(_message, ReferenceLowRank, *one)
                contenders["hook"] = partial(_hook_message, *one)
            factors = 4 * packed_numel(rows, columns, compression_rank)
            # Read gradient and residual, write the sum, multiply it twice meanwhile; read it and write the residual.
            floors = {"compress": (5 * nbytes + factors) / bandwidth, "decompress": (nbytes + factors) / bandwidth}
            # The reference's temporaries cost twice as much in one process as in another.
            processes = 1 if len(contenders) == 1 else _PROCESSES_OF_A_SLICE
            for name, sample in setting.alternate(contenders, processes=processes).items():
                what = name.split(", ")[1]
                yield Row("slices", case, name, sample, floors.get(what), {"gbit": nbytes * 8 / 1e9})


def _gradient(model: str, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    generator = private_generator(714, model, device="cpu")
    return torch.randn(1, rows, columns, generator=generator).to(device)


def _message(
    compressor: Callable[[], LowRank], model: str, rows: int, columns: int, compression_rank: int, device: torch.device
) -> dict[str, Work]:
    check(compressor(), rows, columns, compression_rank, device)
    message = Message(compressor(), _gradient(model, rows, columns, device), compression_rank)
    works: dict[str, Work] = {"compress": message.compress, "decompress": message.decompress}
    if device.type == "cuda" and compressor is fast_compressor:
        works |= {f"{name}, graph": captured(work) for name, work in works.items()}
    return works


def _hook_message(
    model: str, rows: int, columns: int, compression_rank: int, device: torch.device
) -> dict[str, Work]:  # fmt: skip
    alone = Bucket(_gradient(model, rows, columns, device).view(-1), 1, ((rows, columns),), 0)
    return {"compress and decompress": HookWork(alone, compression_rank, batched=False).step}


def orthogonalization(setting: Setting) -> Iterator[Row]:
    """Batches of P alone; against the time of the two products of one pass, a triangle of each: a Gram matrix and a
    change of basis.

    The hook's and LAPACK's time does not depend on the values; ours does, on a CPU.
    """
    layers, r = (2, 32) if setting.tiny else (STAGE_LAYERS, 128)
    rate = gemm_rate(128 if setting.tiny else 2048, setting.device, setting.repeats)
    for n in (384,) if setting.tiny else (3072, 1152):
        for kind in ("Gaussian", "warm-started", "condition 1e5"):
            p = to_orthogonalize(kind, layers, n, r).to(setting.device)
            out, theirs = torch.empty_like(p), p.clone()
            powerSGD_hook._orthogonalize(theirs)
            off = {
                "ours": off_orthonormal(fast_compressor().orthogonalize(p, out=out)),
                "hook's _orthogonalize": off_orthonormal(theirs),
                "LAPACK or cuSOLVER QR": off_orthonormal(torch.linalg.qr(p).Q),
                "CholeskyQR2 in fp64": off_orthonormal(_two_passes(p, torch.float64, Scratch())[0]),
            }
            contenders = {name: partial(_orthogonalization, name, kind, layers, n, r, setting.device) for name in off}
            for name, sample in setting.alternate(contenders, processes=_PROCESSES_OF_A_BATCH).items():
                more = {"off orthonormal": off[name]}
                floor = 2 * layers * n * r * r / rate
                yield Row("orthogonalization", f"{kind}, {layers} x {n} x {r}", name, sample, floor, more)


def to_orthogonalize(kind: str, layers: int, n: int, r: int) -> torch.Tensor:
    """A batch of P (layers, n, r), fp32, with an easy, a usual, or a hard spectrum."""
    generator = private_generator(3, "bench orthogonalization", n, device="cpu")
    gaussian = torch.randn(layers, n, r, generator=generator)
    if kind == "Gaussian":
        return gaussian
    if kind == "warm-started":
        # As P = M Q comes from a warm-started Q: nearly orthogonal columns, lengths that fall tenfold.
        mixed = torch.eye(r) + 0.03 * torch.randn(layers, r, r, generator=generator) / r**0.5
        return torch.linalg.qr(gaussian).Q @ mixed * torch.logspace(0, -1, r)
    turn = torch.linalg.qr(torch.randn(r, r, generator=generator)).Q
    return gaussian * torch.logspace(0, -5, r) @ turn


def _orthogonalization(name: str, kind: str, layers: int, n: int, r: int, device: torch.device) -> dict[str, Work]:
    p = to_orthogonalize(kind, layers, n, r).to(device)
    out, scratch, fast = torch.empty_like(p), Scratch(), fast_compressor()
    if name == "ours":
        check_basis(p, fast.orthogonalize(p, out=out), f"{kind}, {layers} x {n} x {r}")
        return {"": lambda: fast.orthogonalize(p, out=out)}
    if name == "hook's _orthogonalize":
        return {"": lambda: powerSGD_hook._orthogonalize(p)}
    if name == "CholeskyQR2 in fp64":
        return {"": lambda: _two_passes(p, torch.float64, scratch)}
    return {"": lambda: torch.linalg.qr(p)}


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
    size = 128 if setting.tiny else 2048
    rate = gemm_rate(size, setting.device, setting.repeats)
    one = (layers, shapes, vectors, r, setting.device)
    names = ("ours", "hook, batched", "hook, as by default")
    contenders = {name: partial(_bucket_step, name, *one) for name in names}
    gradients = Bucket(torch.empty(layers * (sum(n * m for n, m in shapes) + vectors)), layers, shapes, vectors)
    bandwidth = copy_bandwidth(min(gradients.flat.numel(), 1 << 26), setting.device, setting.repeats)
    rounds = max(1, setting.repeats // 3) if setting.device.type == "cpu" else setting.repeats
    # A gigabyte leaves nothing in the caches: there is nothing to warm up.
    samples = setting.alternate(contenders, rounds=rounds, in_a_row=1)
    # Once more: a floor of a bad moment would flatter everybody.
    rate = max(rate, gemm_rate(size, setting.device, setting.repeats))
    flops = gradients.gemm_flops(r)
    more = {
        "gflop": flops / 1e9, "bytes_floor_seconds": gradients.floor_bytes() / bandwidth,
        "gflops": rate / 1e9,
    }  # fmt: skip
    case = f"{layers} layers, {gradients.flat.nbytes / 1e9:.2f} GB, rank {r}"
    for name, sample in samples.items():
        yield Row("bucket", case, name, sample, flops / rate, more)


def _bucket_step(
    name: str, layers: int, shapes: tuple[tuple[int, int], ...], vectors: int, r: int, device: torch.device
) -> dict[str, Work]:  # fmt: skip
    gradients = Bucket.random(layers, shapes, vectors, device, seed=1)
    if name != "ours":
        return {"": HookWork(gradients, r, batched=name == "hook, batched").step}
    check_bucket(fast_compressor, shapes, device, r)
    works: dict[str, Work] = {"": OurWork(fast_compressor(), gradients, r).step}
    if device.type == "cuda":
        copy = gradients.like(gradients.flat.clone())
        works["graph"] = captured(OurWork(fast_compressor(), copy, r).step)
    return works


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
            reducers.items(), in_turn(works, setting.device, 2 * setting.repeats).values(), strict=True
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
        for name, sample in in_turn(works, setting.device, setting.repeats).items():
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
