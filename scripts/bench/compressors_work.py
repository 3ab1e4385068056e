"""What the compressors' benchmark times on a bucket of gradients: our local work, and that of PyTorch's PowerSGD hook.

Both leave in the bucket what a reduction over one replica would, and in their memory what that lacks. So the next step
finds the same sums again, and any number of steps can be timed without filling the bucket anew.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from optimus_cc_ext.compressors import LowRank, Scratch, initial_q, next_warm_start, private_generator

__all__ = ["Bucket", "HookWork", "OurWork"]


@dataclass(frozen=True)
class Bucket:
    """The gradients of equal layers, fp32, in one flat buffer: layer by layer, its matrices, then its vectors."""

    flat: torch.Tensor
    layers: int
    shapes: tuple[tuple[int, int], ...]
    vectors: int
    """Values per layer that are no matrix's."""

    @classmethod
    def random(
        cls, layers: int, shapes: Sequence[tuple[int, int]], vectors: int, device: torch.device, seed: int
    ) -> "Bucket":
        """Filled with Gaussian numbers of `seed`."""
        per_layer = sum(n * m for n, m in shapes) + vectors
        generator = private_generator(seed, "bench bucket", device=device)
        flat = torch.randn(layers * per_layer, generator=generator, device=device)
        return cls(flat, layers, tuple(shapes), vectors)

    def like(self, flat: torch.Tensor) -> "Bucket":
        """The same layout over another buffer."""
        return Bucket(flat, self.layers, self.shapes, self.vectors)

    def batches(self) -> list[torch.Tensor]:
        """Per matrix of a layer, a view (layers, n, m) of all layers' ones."""
        per_layer, views, first = self.flat.numel() // self.layers, [], 0
        for n, m in self.shapes:
            views.append(self.flat.as_strided((self.layers, n, m), (per_layer, m, 1), first))
            first += n * m
        return views

    def rest(self) -> torch.Tensor:
        """A view (layers, vectors)."""
        return self.flat.view(self.layers, -1)[:, self.flat.numel() // self.layers - self.vectors :]

    def gemm_flops(self, compression_rank: int) -> float:
        """Of the products that the algorithm needs: P, Q', P Q'^T; two orthogonalisations, of a Gram matrix and of the
        change of basis a triangle each."""
        r = compression_rank
        return self.layers * sum(3 * 2 * n * m * min(n, m, r) + 2 * (n + m) * min(n, m, r) ** 2 for n, m in self.shapes)

    def floor_bytes(self) -> int:
        """That must move: read the gradient and the residual, write their sum; read the sum; read it again and write
        both the residual and the result."""
        return 7 * self.flat.nbytes


def starts(bucket: Bucket, compression_rank: int) -> list[torch.Tensor]:
    """The first Q (layers, m, r) of every shape: the same for both sides."""
    generator = private_generator(714, "bench starts", device="cpu")
    return [
        initial_q(
            bucket.layers, m, min(n, m, compression_rank), generator=generator, device=bucket.flat.device
        )
        for n, m in bucket.shapes
    ]  # fmt: skip


class OurWork:
    """One step of `compressor` on a bucket, in the calls of `techniques.selective_stage_compression`."""

    def __init__(self, compressor: LowRank, bucket: Bucket, compression_rank: int) -> None:
        self._compressor, self._bucket, self._scratch = compressor, bucket, Scratch()
        self._fresh = starts(bucket, compression_rank)
        self._q = [q.clone() for q in self._fresh]
        self._new_q = [torch.empty_like(q) for q in self._q]
        self._p = [g.new_empty(*g.shape[:2], q.shape[2]) for g, q in zip(bucket.batches(), self._q, strict=True)]
        self.residuals = [torch.zeros_like(g, memory_format=torch.contiguous_format) for g in bucket.batches()]
        self._packed = torch.empty_like(bucket.rest(), memory_format=torch.contiguous_format)

    def step(self) -> None:
        """Bucket and residuals in, bucket and residuals out."""
        do, batches = self._compressor, self._bucket.batches()
        self._packed.copy_(self._bucket.rest())
        for gradient, total, q, p in zip(batches, self.residuals, self._q, self._p, strict=True):
            do.project_sum(gradient, total, q, total=total, out=p)
        # Here P and the vectors would be summed over the replicas, and below Q.
        for total, p, new_q in zip(self.residuals, self._p, self._new_q, strict=True):
            do.orthogonalize(p, out=p)
            do.back_project(total, p, out=new_q)
        for gradient, total, p, new_q in zip(batches, self.residuals, self._p, self._new_q, strict=True):
            do.reconstruct(p, new_q, out=gradient)
            total.sub_(gradient)
        for q, new_q, fresh in zip(self._q, self._new_q, self._fresh, strict=True):
            next_warm_start(new_q, fresh, do, out=q, scratch=self._scratch)
        self._bucket.rest().copy_(self._packed)


class HookWork:
    """`powerSGD_hook.powerSGD_hook` without its communication: its own `_orthogonalize`, the rest as it does it.

    Args:
        batched: the hook's `batch_tensors_with_same_shape`, which is off by default.
    """

    def __init__(self, bucket: Bucket, compression_rank: int, batched: bool) -> None:
        self._bucket, self._batched = bucket, batched
        self.error = torch.zeros_like(bucket.flat)
        by_shape: dict[torch.Size, list[torch.Tensor]] = defaultdict(list)
        self._qs = []
        for gradients, q in zip(bucket.batches(), starts(bucket, compression_rank), strict=True):
            by_shape[gradients.shape[1:]].extend(gradients)
            self._qs.append(q) if batched else self._qs.extend(one.unsqueeze(0) for one in q)
        # Two kinds of a layer's matrices of one shape would be one batch in the hook; there are none.
        self._groups = list(by_shape.values()) if batched else [[g] for group in by_shape.values() for g in group]
        self._ps = [
            q.new_empty(len(group), group[0].shape[0], q.shape[2])
            for group, q in zip(self._groups, self._qs, strict=True)
        ]

    def step(self) -> None:
        """Bucket and errors in, bucket and errors out."""
        flat = self._bucket.flat
        flat.add_(self.error)
        copy = flat.detach().clone()
        dense = torch.cat([vector.view(-1) for vector in self._bucket.rest()])
        tensors = [torch.stack(group) if self._batched else group[0].unsqueeze(0) for group in self._groups]
        for q in self._qs:
            powerSGD_hook._orthogonalize(q)
        for tensor, q, p in zip(tensors, self._qs, self._ps, strict=True):
            torch.bmm(tensor, q, out=p)
        for vector, reduced in zip(self._bucket.rest(), dense.view(self._bucket.layers, -1), strict=True):
            vector.copy_(reduced)
        for p in self._ps:
            powerSGD_hook._orthogonalize(p)
        for tensor, p, q in zip(tensors, self._ps, self._qs, strict=True):
            torch.bmm(tensor.transpose(1, 2), p, out=q)
        for tensor, p, q in zip(tensors, self._ps, self._qs, strict=True):
            torch.bmm(p, q.transpose(1, 2), out=tensor)
        if self._batched:
            for group, tensor in zip(self._groups, tensors, strict=True):
                for gradient, reduced in zip(group, tensor, strict=True):
                    gradient.copy_(reduced)
        self.error = copy - flat
