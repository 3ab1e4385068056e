"""Buckets of many layers: a fixed number of kernels and collectives, and the arithmetic of one matrix at a time."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from optimus_cc_ext.compressors import FastLowRank, ReferenceLowRank
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques import bucket_reducer
from optimus_cc_ext.techniques.bucket_reducer import BucketReducer
from tests.forked_ranks import run_ranks

HIDDEN, RANK = 8, 2


def layer(hidden: int) -> list[tuple[int, ...]]:
    """A transformer layer's parameters in the order of a bucket: matrices between norms and biases."""
    h = hidden
    return [(h,), (h, 4 * h), (4 * h,), (4 * h, h), (h,), (h,), (3 * h,), (3 * h, h), (h,), (h, h), (h,), (h,)]


class Bucket:
    """`layers` layers one after the other, before them a matrix that is shaped like one of theirs."""

    def __init__(self, layers: int, dtype: torch.dtype = torch.float32, hidden: int = HIDDEN) -> None:
        shapes = [(hidden, hidden), (3,), *layer(hidden) * layers]
        self.flat = torch.zeros(sum(math.prod(shape) for shape in shapes), dtype=dtype)
        self.flat = torch.nn.functional.pad(self.flat, (0, self.flat.numel() % 2))
        self.views, start = [], 0
        for shape in shapes:
            self.views.append(self.flat[start : start + math.prod(shape)].view(shape))
            start += math.prod(shape)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.flat.copy_(torch.randn(self.flat.shape, generator=generator))

    def reducer(self, compressor: Any, sharded: bool = False, **config: Any) -> BucketReducer:
        return BucketReducer(
            [view for view in self.views if view.dim() == 2],
            [view for view in self.views if view.dim() == 1],
            shard=self.flat.view(2, -1)[0] if sharded else None,
            group=dist.group.WORLD,
            compressor=compressor,
            config=DataParallelCompressionConfig(dp_compression=True, dp_compression_rank=RANK, **config),
            seed=1,
            salt="test",
        )


class Counting(TorchDispatchMode):
    """Counts the operators that do something: views cost no kernel, but Python's time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def _calls(layers: int, dtype: torch.dtype, sharded: bool, error_feedback: bool) -> int:
    bucket = Bucket(layers, dtype)
    reducer = bucket.reducer(FastLowRank(), sharded, dp_error_feedback=error_feedback)
    bucket.fill(1)
    reducer.reduce()
    with Counting() as counting:
        reducer.reduce()
    return counting.calls


def _calls_of_all(dtype: torch.dtype, sharded: bool, error_feedback: bool) -> list[int]:
    dist.init_process_group("gloo")
    return [_calls(layers, dtype, sharded, error_feedback) for layers in (2, 8, 32)]


@pytest.mark.parametrize("error_feedback", [True, False], ids=["error feedback", "without"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_torch_calls_does_not_grow_with_the_layers(dtype, sharded, error_feedback):
    (calls,) = run_ranks(1, _calls_of_all, dtype, sharded, error_feedback)
    if sharded:
        # Where a shard ends in the midst of a matrix, up to two pieces are rebuilt by themselves, in a few calls each.
        assert max(calls) - min(calls) <= 30
        assert calls[2] <= calls[1] + 10
    else:
        assert calls[0] == calls[1] == calls[2]


def _against_a_loop(compressor: Any) -> float:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours, theirs = Bucket(3), Bucket(3)
    reducer, reference = ours.reducer(compressor), ReferenceLowRank()
    matrices = [view for view in theirs.views if view.dim() == 2]
    by_shape: dict[torch.Size, list[int]] = {}
    for index, view in enumerate(matrices):
        by_shape.setdefault(view.shape, []).append(index)
    # The reducer's batches are in the order of the bucket.
    order = {
        index: (group, place) for group, indices in enumerate(by_shape.values()) for place, index in enumerate(indices)
    }
    q = {i: [*reducer.states][group].warm_start.value[place : place + 1].clone() for i, (group, place) in order.items()}
    residual = {i: torch.zeros(1, *view.shape) for i, view in enumerate(matrices)}
    worst = 0.0
    for step in range(4):
        for bucket in (ours, theirs):
            bucket.fill(10 * step + rank)
        reducer.reduce()
        reducer.states.commit({})
        for i, view in enumerate(matrices):
            m = view + residual[i]
            p = reference.project(m, q[i])
            dist.all_reduce(p)
            p = reference.orthogonalize(p)
            new_q = reference.back_project(m, p)
            dist.all_reduce(new_q)
            view.copy_(reference.reconstruct(p, new_q)[0])
            residual[i] = m - view / ranks
            q[i] = reference.orthogonalize(new_q)
        for view in theirs.views:
            if view.dim() == 1:
                total = view.clone()
                dist.all_reduce(total)
                view.copy_(total)
        worst = max(worst, float((ours.flat - theirs.flat).abs().max() / theirs.flat.abs().max()))
    return worst


@pytest.mark.parametrize("compressor", [FastLowRank(), ReferenceLowRank()], ids=["fast", "reference"])
def test_a_bucket_of_layers_gets_what_a_loop_over_its_matrices_gives(compressor):
    # Four steps of fp32 through two orthogonalisations, fed back.
    assert max(run_ranks(2, _against_a_loop, compressor)) < 1e-4


def _in_packs() -> list[Any]:
    dist.init_process_group("gloo")
    log: list[str] = []

    class Recorded(FastLowRank):
        def project_sum(self, *args: Any, **kwargs: Any) -> None:
            log.append("project")
            super().project_sum(*args, **kwargs)

        def back_project(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            log.append("back-project")
            return super().back_project(*args, **kwargs)

    begin = bucket_reducer.PendingSum

    def recorded_sum(tensor: torch.Tensor, group: Any, purpose: str) -> Any:
        log.append(purpose.removeprefix("compressed gradient reduction "))
        return begin(tensor, group, purpose)

    bucket_reducer.PendingSum = recorded_sum
    results = []
    logs = []
    for least in (bucket_reducer.PACK_AT_LEAST_BYTES, 1):
        bucket_reducer.PACK_AT_LEAST_BYTES = least
        bucket = Bucket(3)
        reducer = bucket.reducer(Recorded())
        for step in range(3):
            log.clear()
            bucket.fill(10 * step + dist.get_rank())
            reducer.reduce()
            reducer.states.commit({})
        results.append([bucket.flat.clone(), *(r.clone() for r in reducer.states.residuals())])
        logs.append(list(log))
    equal = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return [equal, *logs]


def test_while_one_pack_is_summed_the_next_is_computed_and_the_results_are_the_same():
    for equal, at_once, in_packs in run_ranks(2, _in_packs):
        assert equal, "bit for bit"
        phases = [what for what, _ in itertools.groupby(at_once)]
        assert phases == ["project", "(P)", "back-project", "(Q)"], "a small model needs no packs"
        assert 2 <= in_packs.count("(P)") == in_packs.count("(Q)") <= bucket_reducer.MOST_PACKS
        assert in_packs.index("(P)") < max(i for i, what in enumerate(in_packs) if what == "project")
        assert in_packs.index("(Q)") < max(i for i, what in enumerate(in_packs) if what == "back-project")
