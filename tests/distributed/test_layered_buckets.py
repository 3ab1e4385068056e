"""Buckets of many layers: a fixed number of kernels and collectives, whatever the number of layers."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.techniques import low_rank_gradients
from tests.allocations import Watch
from tests.distributed.buckets import Bucket, of_layers, reduce
from tests.forked_ranks import run_ranks

pytestmark = pytest.mark.ci

RANK = 2


def fill(bucket: Bucket, seed: int) -> None:
    bucket.flat.copy_(torch.randn(bucket.flat.shape, generator=torch.Generator().manual_seed(seed)))


def _calls(dtype: torch.dtype, sharded: bool, error_feedback: bool) -> list[int]:
    dist.init_process_group("gloo")
    calls = []
    for layers in (2, 8, 32):
        bucket = Bucket(of_layers(layers), parts=2, dtype=dtype)
        shard = bucket.flat.view(2, -1)[0] if sharded else None
        reducer = bucket.reducer(FastLowRank(), RANK, shard, dp_error_feedback=error_feedback)
        fill(bucket, 1)
        reducer.reduce(bucket.flat)
        with Watch() as watch:
            reducer.reduce(bucket.flat)
        calls.append(watch.calls)
    return calls


@pytest.mark.parametrize("error_feedback", [True, False], ids=["error feedback", "without"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_number_of_torch_calls_does_not_grow_with_the_layers(dtype, sharded, error_feedback):
    (calls,) = run_ranks(1, _calls, dtype, sharded, error_feedback)
    if sharded:
        # A shard that ends in the middle of a matrix rebuilds up to two parts of matrices by themselves, in a few calls
        # each.
        assert max(calls) - min(calls) <= 30
        assert calls[2] <= calls[1] + 10
    else:
        assert calls[0] == calls[1] == calls[2]


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

    begin = low_rank_gradients.start_sum

    def recorded_sum(tensor: torch.Tensor, group: Any, purpose: str) -> Any:
        log.append(purpose.removeprefix("compressed gradient reduction "))
        return begin(tensor, group, purpose)

    low_rank_gradients.start_sum = recorded_sum
    results = []
    logs = []
    for least in (low_rank_gradients.PACK_AT_LEAST_BYTES, 1):
        low_rank_gradients.PACK_AT_LEAST_BYTES = least
        bucket = Bucket(of_layers(3), parts=2)
        reducer = bucket.reducer(Recorded(), RANK)
        for step in range(3):
            log.clear()
            fill(bucket, 10 * step + dist.get_rank())
            reduce(reducer, bucket)
        results.append([bucket.flat.clone(), *(r.clone() for r in reducer.states.residuals())])
        logs.append(list(log))
    equal = all(torch.equal(one, other) for one, other in zip(*results, strict=True))
    return [equal, *logs]


def test_while_one_pack_is_summed_the_next_is_computed_and_the_results_are_the_same():
    for equal, at_once, in_packs in run_ranks(2, _in_packs):
        assert equal, "bit for bit"
        phases = [what for what, _ in itertools.groupby(at_once)]
        assert phases == ["project", "(P)", "back-project", "(Q)"], "a small model needs no packs"
        assert 2 <= in_packs.count("(P)") == in_packs.count("(Q)") <= low_rank_gradients.MOST_PACKS
        assert in_packs.index("(P)") < max(i for i, what in enumerate(in_packs) if what == "project")
        assert in_packs.index("(Q)") < max(i for i, what in enumerate(in_packs) if what == "back-project")
