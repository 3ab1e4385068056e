"""Selective stage compression against PyTorch's own PowerSGD hook, and its behaviour on several ranks."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook_module

from optimus_cc_ext.collectives import calls
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import bytes_of
from optimus_cc_ext.collectives.reducers import SideStream
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS
from optimus_cc_ext.techniques.bucket import Bucket as MegatronBucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.low_rank_gradients import LowRankReducer
from optimus_cc_ext.techniques.selective_stage_compression import SelectiveStageCompression
from tests.allocations import Watch
from tests.distributed.buckets import Bucket, Shapes, of_layers, reduce
from tests.forked_ranks import run_ranks
from tests.low_rank_steps import BOTH

SHAPES = [(48, 32), (96, 32), (48, 32), (32,), (32, 64), (48,)]
RANK, PLAIN_STEPS, COMPRESSED_STEPS = 4, 2, 5


def empty(dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES) -> Bucket:
    return Bucket(shapes, parts=6, dtype=dtype)  # with 6 parts, two or three replicas own equal shares


def gradients(rank: int, step: int, shapes: Shapes = SHAPES) -> Bucket:
    """Make gradients with decaying spectra plus noise, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    bucket = empty(shapes=shapes)
    for view in bucket.views:
        view.normal_(generator=generator)
    for view in bucket.matrices:
        left, right = (torch.randn(size, 8, generator=generator) for size in view.shape)
        view.mul_(0.01).add_((left * torch.logspace(0, -2, 8)) @ right.T)
    return bucket


def warm_starts(reducer: LowRankReducer) -> list[torch.Tensor]:
    """Return the Q that the next step starts from, group by group."""
    return [state.warm_start.value for state in reducer.states]


def _against_the_hook(compressor, shapes: Shapes) -> float:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    drawn: list[torch.Tensor] = []
    orthogonalize = hook_module._orthogonalize

    def recording(matrices, epsilon=0):
        orthogonalize(matrices, epsilon)
        drawn.append(matrices.clone())

    hook_module._orthogonalize = recording
    state = hook_module.PowerSGDState(
        process_group=None, matrix_approximation_rank=RANK, start_powerSGD_iter=PLAIN_STEPS,
        min_compression_rate=1, use_error_feedback=True, warm_start=True, batch_tensors_with_same_shape=True,
    )  # fmt: skip
    ours = empty(shapes=shapes)
    reducer = ours.reducer(compressor, RANK)
    worst = 0.0
    for step in range(PLAIN_STEPS + COMPRESSED_STEPS):
        theirs = gradients(rank, step, shapes)
        ours.flat.copy_(theirs.flat / ranks)
        answers = {"index": 0, "is_last": True, "buffer": theirs.flat, "gradients": theirs.views}
        of_ddp = SimpleNamespace(**{name: lambda answer=answer: answer for name, answer in answers.items()})
        theirs.flat.copy_(hook_module.powerSGD_hook(state, of_ddp).wait())
        if step < PLAIN_STEPS:
            continue
        if step == PLAIN_STEPS:
            # PowerSGD's hook orthogonalises the random matrices that it draws, one call per group of equal shapes; ours
            # start with the result.
            for warm_start, factor in zip(warm_starts(reducer), drawn, strict=False):
                warm_start.copy_(factor)
        reduce(reducer, ours)
        for view, expected in zip(ours.views, theirs.views, strict=True):
            worst = max(worst, float((view - expected).norm() / expected.norm()))
    return worst


@BOTH
@pytest.mark.parametrize(
    "shapes",
    [SHAPES, pytest.param(of_layers(3, hidden=16), marks=pytest.mark.full)],
    ids=["six tensors", "layers"],
)
def test_equals_pytorchs_powersgd_hook_over_five_compressed_steps(compressor, shapes):
    # The tolerance of 1e-4 covers two orthogonalisations in fp32, fed back through the residual five times.
    assert max(run_ranks(3, _against_the_hook, compressor, shapes)) < 1e-4


def _own_shard(flat: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard, as the distributed optimizer cuts a bucket: equal parts, which end within matrices and
    rows.
    """
    return flat.view(dist.get_world_size(), -1)[dist.get_rank()]


def _in_shards(steps: int, error_feedback: bool, compressor) -> list[float]:
    """Return the largest differences from a whole reduction, in the shard and of whole gradients, and the rows changed
    outside.
    """
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything, part, asked = buckets = [empty() for _ in range(3)]
    shards = [None, _own_shard(part.flat), _own_shard(asked.flat)]
    reducers = [
        bucket.reducer(compressor, RANK, shard, dp_error_feedback=error_feedback)
        for bucket, shard in zip(buckets, shards, strict=True)
    ]
    start = _own_shard(part.flat).storage_offset()
    stop = start + _own_shard(part.flat).numel()
    gap = whole_gap = touched = 0.0
    for step in range(steps):
        offered = gradients(rank, step)
        offered.flat.div_(ranks)
        for bucket, reducer in zip(buckets, reducers, strict=True):
            bucket.flat.copy_(offered.flat)
            reduce(reducer, bucket, whole=bucket is asked)
        scale = float(everything.flat.abs().max())
        gap = max(gap, float((_own_shard(part.flat) - _own_shard(everything.flat)).abs().max()) / scale)
        whole_gap = max(whole_gap, float((asked.flat - everything.flat).abs().max()) / scale)
        for view, before in zip(part.matrices, offered.matrices, strict=True):
            touched += sum(
                not torch.equal(row, old)
                for row, old in zip(view, before, strict=True)
                if row.storage_offset() >= stop or row.storage_offset() + row.numel() <= start
            )
    return [gap, whole_gap, touched]


@pytest.mark.parametrize(
    "error_feedback", [True, pytest.param(False, marks=pytest.mark.full)], ids=["error feedback", "without"]
)
@BOTH
def test_a_replica_rebuilds_the_rows_of_its_shard_and_no_others(compressor, error_feedback):
    for gap, whole_gap, touched in run_ranks(3, _in_shards, 5, error_feedback, compressor):
        # A shard's rows come from the same products in another order; the gap is fp32 rounding, five times through the
        # residual.
        assert gap < 1e-5
        assert whole_gap < 1e-5, "asked for whole gradients, it gives them"
        assert touched == 0


def _conserves(steps: int, dtype: torch.dtype, sharded: bool) -> tuple[float, bool]:
    """Return the error of the account (offered gradients = read sums + residuals), and whether all ranks read the
    same.
    """
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bucket, held, missing = empty(dtype), empty(), empty()
    flat, equal = bucket.flat, True
    reducer = bucket.reducer(FastLowRank(), RANK, _own_shard(flat) if sharded else None)
    for step in range(steps):
        flat.copy_(gradients(rank, step).flat / ranks)
        missing.flat.add_(flat)
        # With shards, step 2 reduces whole gradients, which every replica reads: sent and missing values have to add up
        # there, too.
        reduce(reducer, bucket, whole=sharded and step == 2)
        if sharded and step != 2:
            _own_shard(missing.flat).sub_(_own_shard(flat))
        else:
            missing.flat.sub_(flat.float() / ranks)
            copies = [torch.empty_like(flat) for _ in range(ranks)]
            dist.all_gather(copies, flat)
            equal &= all(torch.equal(copy, flat) for copy in copies)
    for residual in reducer.states.residuals():
        views = [view for view in held.matrices if view.shape == residual.shape[1:]]
        for view, matrix in zip(views, residual, strict=True):
            view.copy_(matrix)
    dist.all_reduce(missing.flat)
    dist.all_reduce(held.flat)
    gaps = [(lacks - holds).abs().max() for lacks, holds in zip(missing.matrices, held.matrices, strict=True)]
    return float(max(gaps)), equal


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in shards"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_replicas_offered_is_what_they_got_plus_their_residuals(dtype, sharded):
    for gap, equal in run_ranks(3 if sharded else 2, _conserves, 6, dtype, sharded):
        # Gradients are of order 1: if the rounding error of the bf16 bucket got lost, the sum would be off by 1e-3.
        assert gap < 1e-5
        assert equal, "every replica applies the same gradient, bit for bit"


def counted_bytes() -> list[float]:
    """Count the bytes that this rank sends from now on, by the formulas of ring collectives; the list's entry is their
    sum.
    """
    sent, ranks = [0.0], dist.get_world_size()

    def counting(name: str, share: float) -> None:
        original = getattr(dist, name)

        def call(*tensors: Any, **how: Any) -> Any:
            sent[0] += [tensor for tensor in tensors if tensor is not None][-1].nbytes * share
            return original(*tensors, **how)

        setattr(calls.dist, name, call)

    counting("all_reduce", 2 * (ranks - 1) / ranks)
    counting("all_to_all_single", (ranks - 1) / ranks)
    counting("all_gather_into_tensor", ranks - 1)
    return sent


def _planned_and_counted() -> tuple[int, float]:
    """Return the bytes of a low-rank reduction, as planned and as counted."""
    dist.init_process_group("gloo")
    bucket, counted = gradients(dist.get_rank(), 0, LARGE), counted_bytes()
    reducer = bucket.reducer(FastLowRank(), 16)
    reduce(reducer, bucket)
    return bytes_of(reducer.plan.legs()).sent, counted[0]


LARGE = [(512, 256), (256, 768), (512, 256), (256,)]


def test_a_low_rank_reduction_sends_as_many_bytes_as_its_plan_says_before_it_is_made():
    for planned, counted in run_ranks(2, _planned_and_counted):
        assert planned == pytest.approx(counted, abs=8)


def _nan_on_one_rank() -> list[bool]:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bucket = empty()
    flat, reducer = bucket.flat, bucket.reducer(FastLowRank(), RANK)
    for step in range(2):
        flat.copy_(gradients(rank, step).flat / ranks)
        reduce(reducer, bucket)
    before = [t.clone() for t in (*reducer.states.residuals(), *warm_starts(reducer))]
    flat.copy_(gradients(rank, 2).flat / ranks)
    if rank == 1:
        flat[5] = torch.nan
    reduce(reducer, bucket)
    seen = bool(torch.isnan(flat).any())
    after = (*reducer.states.residuals(), *warm_starts(reducer))
    # Only the shape group of the poisoned matrix is held back; no kept tensor has a NaN.
    kept = [bool(torch.isfinite(t).all()) for t in after]
    poisoned_unchanged = torch.equal(before[0], after[0])
    return [seen, all(kept), poisoned_unchanged]


def test_nan_on_one_replica_is_seen_by_all_and_kept_by_none():
    assert run_ranks(2, _nan_on_one_rank) == [[True, True, True]] * 2


def _factorisations() -> list[int]:
    dist.init_process_group("gloo")
    bucket = gradients(0, 0)
    reducer = bucket.reducer(FastLowRank(), RANK)
    reduce(reducer, bucket)
    before = [start.clone() for start in warm_starts(reducer)]
    reducer.reduce(bucket.flat)
    reducer.states.rollback()
    reducer.states.commit({})
    assert all(map(torch.equal, warm_starts(reducer), before)), "of a step that was skipped"
    with Watch() as reducing:
        reducer.reduce(bucket.flat)
    assert all(map(torch.equal, warm_starts(reducer), before))
    with Watch() as committing:
        reducer.states.commit({})
    assert not any(map(torch.equal, warm_starts(reducer), before))
    assert committing.allocated == committing.read_by_host == []
    return [watch.count("cholesky") for watch in (reducing, committing)]


def test_all_shapes_share_a_factorisation_and_warm_starts_wait_until_the_optimizer_has_its_gradients():
    # Each of the two factorisations has two passes of Cholesky QR: one takes all P of a pack, one all Q of all buckets.
    assert run_ranks(1, _factorisations) == [[2, 2]]


def _two_norm_groups() -> dict[str, float]:
    """Return each state's residual norm, relative to the norm without unusual clipping."""
    dist.init_process_group("gloo")
    norms = []
    for shrinkage in ({}, {"mtp": 0.25}):
        bucket = gradients(0, 0)
        reducer = bucket.reducer(FastLowRank(), RANK, norm_groups=["main", "main", "mtp", "main"])
        reducer.reduce(bucket.flat)
        reducer.states.commit(shrinkage)
        norms.append({name: float(saved["residual"].norm()) for name, saved in reducer.states.state_dict().items()})
    return {name: norms[1][name] / norm for name, norm in norms[0].items()}


def test_matrices_of_a_gradient_norm_group_of_their_own_are_shrunk_by_their_own_clipping():
    (ratios,) = run_ranks(1, _two_norm_groups)
    # The two 48 x 32 matrices have one shape, but belong to two groups of gradients for clipping.
    assert ratios == pytest.approx(
        {"bucket 0: 48x32": 1.0, "bucket 0: 96x32": 1.0, "bucket 0: 48x32 mtp": 0.25, "bucket 0: 32x64": 1.0}
    )


def _beside_the_backward_pass(store: str) -> None:
    """Reduce on one rank with one GPU: on a side stream while the main stream is busy, and in line; compare the
    results.
    """
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", device_id=device, init_method=f"file://{store}", rank=0, world_size=1)
    flats = [gradients(0, step).flat.cuda() for step in range(3)]
    results = []
    for side in (SideStream(flats[0].device), None):
        bucket = Bucket(SHAPES, parts=6, device="cuda")
        flat, reducer = bucket.flat, bucket.reducer(FastLowRank(), RANK)
        reduced = []
        for gradient in flats:
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                busy = busy @ busy / 64
            # the gradient is written after long work on the stream: a reducer that does not wait for it reads the old
            # gradient
            flat.copy_(gradient)
            if side is None:
                reducer.reduce(bucket.flat)
            else:
                with side.work():
                    reducer.start(flat)
                with side.work():
                    reducer.finish()
                side.join()
            reducer.states.commit({})
            reduced.append(flat.clone())
        results.append(reduced)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there are no streams to order")
def test_on_a_gpu_a_side_stream_gives_the_same_bits(tmp_path):
    # This test runs outside of a forked rank, because forked ranks have the CPU runtime, whose streams follow the
    # program's own order.
    program = f"import {__name__} as tests; tests._beside_the_backward_pass('{tmp_path}/store')"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def _connected_before_training() -> tuple[list[int], int]:
    """Add two bucket groups; return the bytes that are sent, and those of messages."""
    dist.init_process_group("gloo")
    sent, all_to_all = [], dist.all_to_all_single
    dist.all_to_all_single = lambda out, tensor, *parts, **how: (
        sent.append(tensor.nbytes) or all_to_all(out, tensor, *parts, **how)
    )
    technique = SelectiveStageCompression(OptimusConfig(dp_compression_format="int4"), DP_GRADIENTS)
    technique.take_stage(0, 2)
    record = BucketRecord(
        numel=1024, dtype=torch.float32, parameters=[ParameterRecord(shape=(16, 64), start=0)]
    )  # fmt: skip
    for _ in range(2):
        plan = GroupPlan.of([record], BucketRules(ranks=2, format="int4"))
        technique.add_group(
            plan, [MegatronBucket.of(torch.zeros(1024))], Groups(dist.group.WORLD), overlapped=False, fused=None
        )
    return sent, technique.lane.ring.nbytes


def test_before_training_a_group_makes_one_small_all_to_all_and_messages_have_their_memory() -> None:
    """NCCL takes memory for connections at the first all-to-all."""
    for sent, messages in run_ranks(2, _connected_before_training, timeout=60):
        assert sent == [32]
        assert messages >= 1024 // 2, "messages in int4 to both ranks"
