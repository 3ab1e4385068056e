"""Seconds that a GPU computes: GEMMs by the tiles that fill its processors, everything else by the bytes it moves.

Operations and bytes are counted after Narayanan et al. 2021 (arXiv 2104.04473, appendix) and Korthikanti et al. 2022
(arXiv 2205.05198, section 4); a GEMM's waves after NVIDIA's "Matrix Multiplication Background" guide.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from optimus_cc_ext.plan.hardware import Gpu
from optimus_cc_ext.plan.model import Job

__all__ = ["OPTIMIZER_BYTES", "Seconds", "gemm", "head", "layer", "moved"]

TILES = ((256, 128, 1.0), (128, 128, 0.9), (128, 64, 0.7))
"""Rows, columns and relative speed of cuBLAS's tiles; assumed, after the guide's figures."""

OPTIMIZER_BYTES = 48
"""Moved per parameter and step: Adam reads weights, both moments and the gradient and writes the first three and 16-bit
weights (30); unscaling and copying gradients, their norm and clipping (18)."""


@dataclass(frozen=True)
class Seconds:
    """Of one micro-batch."""

    forward: float
    backward: float
    """Recomputation included."""

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, factor: float) -> "Seconds":
        return Seconds(self.forward * factor, self.backward * factor)


@lru_cache(maxsize=65536)
def gemm(gpu: Gpu, m: int, n: int, k: int, count: int = 1, fp8: bool = False) -> float:
    """`count` products of (m, k) and (k, n) in one launch: whole waves of tiles, or the time of their bytes."""
    waves = min(
        ceil(ceil(m / rows) * ceil(n / columns) * count / gpu.processors) * rows * columns / speed
        for rows, columns, speed in TILES
    )
    peak = gpu.fp8 if fp8 else gpu.bf16
    operations = 2.0 * waves * gpu.processors * k / (peak * gpu.gemm_efficiency)
    value = 1 if fp8 else 2
    return max(operations, moved(gpu, count * (value * (m + n) * k + 2 * m * n)))


def moved(gpu: Gpu, nbytes: float) -> float:
    """Seconds in which so many bytes are read or written."""
    return nbytes / (gpu.memory_rate * gpu.memory_efficiency)


def _linear(gpu: Gpu, rows: int, inputs: int, outputs: int, fp8: bool) -> Seconds:
    """Forward; gradients of input and weight."""
    forward = gemm(gpu, rows, outputs, inputs, 1, fp8)
    return Seconds(forward, gemm(gpu, rows, inputs, outputs, 1, fp8) + gemm(gpu, inputs, outputs, rows, 1, fp8))


def _attention(gpu: Gpu, job: Job) -> Seconds:
    """Scores, softmax, dropout and their product with the values, of this rank's heads."""
    model = job.model
    heads, s, width = job.micro_batch * model.heads // job.tp, model.sequence, model.hidden // model.heads
    scores, product = gemm(gpu, s, s, width, heads), gemm(gpu, s, width, s, heads)
    if job.flash:
        # Half of the scores by causality; backward computes five products for two. Fused kernels reach about two
        # thirds of a GEMM's speed (FlashAttention-2, arXiv 2307.08691, figures 4 to 6: 50 to 73 % of the peak).
        once = 0.5 * 2 * 2 * heads * s * s * width / (gpu.bf16 * gpu.gemm_efficiency * 2 / 3)
        return Seconds(once, 2.5 * once)
    values = heads * s * s
    # Forward: softmax reads and writes, dropout reads, writes, and writes its mask. Backward: dropout 5, softmax 6.
    return Seconds(
        scores + product + moved(gpu, (4 + 5) * values), 2 * (scores + product) + moved(gpu, (5 + 6) * values)
    )


@lru_cache(maxsize=4096)
def layer(gpu: Gpu, job: Job) -> Seconds:
    """One transformer layer on one rank, without its transfers."""
    model, tp, rows, fp8 = job.model, job.tp, job.rows, job.precision == "fp8"
    (_, qkv), _, (_, up), (inner, _) = model.layer_matrices
    linear = (
        _linear(gpu, rows, model.hidden, qkv // tp, fp8)
        + _linear(gpu, rows, model.hidden // tp, model.hidden, fp8)
        + _linear(gpu, rows, model.hidden, up // tp, fp8)
        + _linear(gpu, rows, inner // tp, model.hidden, fp8)
    )
    split = tp if job.sequence_parallel else 1
    # Norms and dropout with residual work on the whole hidden state, the activation on the rank's share of the MLP.
    forward = 2 * (4 + 7) * rows * model.hidden / split + 2 * (up + inner) * rows / tp
    backward = 2 * (8 + 5) * rows * model.hidden / split + 2 * (2 * up + inner) * rows / tp
    if not job.flash:
        # The unfused path transposes Q, K, V and its result.
        forward += 4 * (qkv + model.hidden) * rows / tp
        backward += 4 * (qkv + model.hidden) * rows / tp
    if fp8:
        # Each GEMM's input, and the gradient of its output, is read in 16 bits and written in 8, twice.
        forward += 4 * rows * (2 * model.hidden + (model.hidden + inner) / tp)
        backward += 4 * rows * (2 * model.hidden + (qkv + up) / tp)
    # Each micro-batch's gradient is added to the buffer, read and written; a kernel of its own reads it once more; one
    # that casts it before (DeepSpeed's BF16_Optimizer, `update_hp_grads`) writes and reads the copy as well.
    besides = {"fused": 0, "added": 2, "cast": 2 + 2 * job.gradient_bytes}[job.accumulation]
    backward += (2 * job.gradient_bytes + besides) * model.layer_parameters / tp
    around = Seconds(moved(gpu, forward) + gpu.layer_overhead, moved(gpu, backward) + 2 * gpu.layer_overhead)
    attention = _attention(gpu, job)
    total = linear + attention + around
    again = {"full": total.forward, "sel": 0.0 if job.flash else attention.forward, "none": 0.0}[job.recompute]
    return Seconds(total.forward, total.backward + again)


@lru_cache(maxsize=4096)
def head(gpu: Gpu, job: Job) -> Seconds:
    """Logits and loss, on the last stage. Cross entropy is fp32: about 24 bytes a logit forward, 10 backward."""
    share = job.model.vocabulary // job.tp
    logits = _linear(gpu, job.rows, job.model.hidden, share, False)
    return logits + Seconds(moved(gpu, 24 * job.rows * share), moved(gpu, 10 * job.rows * share))
