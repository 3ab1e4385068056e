"""Bucket of gradients that is reduced over a group of one process: by our reducer, and by PyTorch's PowerSGD hook.

Both leave in the bucket the result of a reduction over one replica, and keep its error as their residual. So the next
reduction sees the same sums again, and any number of reductions can be timed without filling the bucket anew.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.compressors.numerics import private_generator
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan, LowRankReducer, LowRankTools
from optimus_cc_ext.techniques.state import FactorStates
from scripts.bench.compressors.timing import Work

__all__ = ["Bucket", "hook", "one_process", "reducer", "step"]


@dataclass(frozen=True)
class Bucket:
    """Gradients of equal layers, fp32, in one flat buffer: layer by layer, its matrices, then its vector."""

    flat: torch.Tensor
    layers: int
    shapes: tuple[tuple[int, int], ...]

    @classmethod
    def random(
        cls, layers: int, shapes: Sequence[tuple[int, int]], vector: int, device: torch.device, seed: int
    ) -> "Bucket":
        """Make a bucket of Gaussian numbers from `seed`; `vector` is the number of values per layer that belong to no
        matrix.
        """
        values = layers * (sum(n * m for n, m in shapes) + vector)
        generator = private_generator(seed, "bench bucket", device=device)
        return cls(torch.randn(values, generator=generator, device=device), layers, tuple(shapes))

    def copy(self) -> "Bucket":
        """Copy the gradients to another buffer."""
        return Bucket(self.flat.clone(), self.layers, self.shapes)

    def gradients(self) -> list[torch.Tensor]:
        """Return views of the gradients, in their order in the buffer."""
        sizes, views = [n * m for n, m in self.shapes], []
        for layer in self.flat.view(self.layers, -1):
            *matrices, vector = layer.split([*sizes, len(layer) - sum(sizes)])
            views += [matrix.view(shape) for matrix, shape in zip(matrices, self.shapes, strict=True)]
            views += [vector] * bool(len(vector))
        return views

    def stacked(self, shape: tuple[int, int]) -> torch.Tensor:
        """Return all matrices of one shape, (layers, rows, columns)."""
        return torch.stack([gradient for gradient in self.gradients() if gradient.shape == shape])

    def flops(self, compression_rank: int) -> float:
        """Return the operations of the products that the algorithm needs.

        These are P, Q' and P Q'^T, and two orthogonalisations, with a triangle each for a Gram matrix and a change of
        basis.
        """
        r = compression_rank
        return self.layers * sum(3 * 2 * n * m * min(n, m, r) + 2 * (n + m) * min(n, m, r) ** 2 for n, m in self.shapes)

    # The hook calls these methods of a `dist.GradBucket`, which only DDP can make.
    def buffer(self) -> torch.Tensor:
        return self.flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def reducer(bucket: Bucket, compression_rank: int, compressor: LowRank, group: dist.ProcessGroup) -> LowRankReducer:
    """Make our reducer over `group`. In a group of one rank, where nothing is sent, it is forced to compress."""
    parameters = [
        ParameterRecord(shape=tuple(gradient.shape), start=int(gradient.storage_offset()))
        for gradient in bucket.gradients()
    ]
    record = BucketRecord(numel=bucket.flat.numel(), dtype=torch.float32, parameters=parameters)
    rules = BucketRules(ranks=group.size(), format="low-rank", rank=compression_rank, force=True)
    plan = GroupPlan.of([record], rules).buckets[0].compressed
    assert isinstance(plan, LowRankPlan)
    config = DataParallelCompressionConfig(dp_compression_format="low-rank", dp_compression_rank=compression_rank)
    return plan.bind(Groups(group), LowRankTools(
        device=bucket.flat.device, compressor=compressor, config=config, states=FactorStates(compression_rank),
        name="bucket 0", seed=1, salt="bench",
    ))  # fmt: skip


def step(reducer: LowRankReducer, bucket: Bucket) -> None:
    """Reduce a bucket once, and commit the state as after an applied step."""
    before = reducer.encoded
    reducer.reduce(bucket.flat)
    assert reducer.encoded == before + reducer.plan.matrices > before, "a group of one rank was not coded"
    reducer.states.commit({})


def hook(bucket: Bucket, compression_rank: int, *, batched: bool, starts: Sequence[torch.Tensor] = ()) -> Work:
    """Make the work of `powerSGD_hook` over the default group.

    Args:
        batched: the hook's `batch_tensors_with_same_shape`, which is off by default.
        starts: the first Q of every shape, (layers, columns, rank), in place of the hook's own random ones.
    """
    state = PowerSGDState(
        None, compression_rank, start_powerSGD_iter=2, min_compression_rate=1, batch_tensors_with_same_shape=batched
    )
    state.iter = state.start_powerSGD_iter  # PowerSGD's hook sums the gradients of earlier iterations uncompressed
    if starts:
        state.q_memory_dict[0] = torch.cat([start.flatten() for start in starts])
        sizes = [bucket.layers * n * start.shape[2] for (n, _), start in zip(bucket.shapes, starts, strict=True)]
        state.p_memory_dict[0] = torch.empty(sum(sizes), device=bucket.flat.device)
    return lambda: powerSGD_hook(state, cast(Any, bucket)).wait()


_KEPT: list[dist.ProcessGroup] = []
"""The groups of `one_process`, until the process ends. The hook's last step holds its group, and gloo runs that step on
a thread of the group's. If that thread dropped the last reference, it would wait for its own end, which aborts the
process.
"""


@contextmanager
def one_process(device: torch.device) -> Iterator[dist.ProcessGroup]:
    """Make a default process group of this process only."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, 1, is_master=True)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        assert dist.group.WORLD is not None
        _KEPT.append(dist.group.WORLD)
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
