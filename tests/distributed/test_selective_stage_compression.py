"""Selective stage compression against PyTorch's own PowerSGD hook, and its behaviour on several ranks."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook_module

from optimus_cc_ext.compressors import FastLowRank, ReferenceLowRank
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.techniques.bucket_reducer import BucketReducer
from optimus_cc_ext.techniques.side_stream import SideStream
from tests.forked_ranks import run_ranks

SHAPES = [(48, 32), (96, 32), (48, 32), (32,), (32, 64), (48,)]
RANK, PLAIN_STEPS, COMPRESSED_STEPS = 4, 2, 5


class _Bucket:
    """What the hook asks of a DDP bucket: one flat buffer, and its gradients."""

    def __init__(self, flat: torch.Tensor) -> None:
        self._flat = flat

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._flat

    def gradients(self) -> list[torch.Tensor]:
        return _views(self._flat)


def _views(flat: torch.Tensor) -> list[torch.Tensor]:
    views, start = [], 0
    for shape in SHAPES:
        views.append(flat[start : start + math.prod(shape)].view(shape))
        start += math.prod(shape)
    return views


def _gradients(rank: int, step: int) -> torch.Tensor:
    """A flat bucket of decaying spectra plus noise, different on every rank and step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    parts = []
    for shape in SHAPES:
        if len(shape) == 1:
            parts.append(torch.randn(shape, generator=generator))
            continue
        left, right = (torch.randn(size, 8, generator=generator) for size in shape)
        decay = torch.logspace(0, -2, 8)
        parts.append(((left * decay) @ right.T + 0.01 * torch.randn(shape, generator=generator)).reshape(-1))
    return torch.cat(parts)


def warm_starts(reducer: BucketReducer) -> list[torch.Tensor]:
    """The Q that the next step starts from, group by group."""
    return [state.warm_start.value for state in reducer.states]


def _reducer(flat: torch.Tensor, compressor, shard: torch.Tensor | None = None, **config) -> BucketReducer:
    views = _views(flat)
    return BucketReducer(
        [view for view in views if view.dim() == 2],
        [view for view in views if view.dim() == 1],
        shard=shard,
        group=dist.group.WORLD,
        compressor=compressor,
        config=DataParallelCompressionConfig(dp_compression=True, dp_compression_rank=RANK, **config),
        seed=1,
        salt="test",
    )


def _against_the_hook(compressor) -> float:
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
    ours = torch.empty(sum(math.prod(shape) for shape in SHAPES))
    reducer = _reducer(ours, compressor)
    worst = 0.0
    for step in range(PLAIN_STEPS + COMPRESSED_STEPS):
        theirs = _gradients(rank, step)
        ours.copy_(theirs / ranks)
        reduced = hook_module.powerSGD_hook(state, _Bucket(theirs)).wait()
        if step < PLAIN_STEPS:
            continue
        if step == PLAIN_STEPS:
            # The hook orthogonalises its draw first, one call per group of equal shapes: our factors start there.
            for warm_start, factor in zip(warm_starts(reducer), drawn, strict=False):
                warm_start.copy_(factor)
        reducer.reduce()
        reducer.states.commit({})
        for view, expected in zip(_views(ours), _views(reduced), strict=True):
            worst = max(worst, float((view - expected).norm() / expected.norm()))
    return worst


@pytest.mark.parametrize("compressor", [FastLowRank(), ReferenceLowRank()], ids=["fast", "reference"])
def test_equals_pytorchs_powersgd_hook_over_five_compressed_steps(compressor):
    # The issue asks for 1e-4: two orthogonalisations in fp32, fed back through the error five times.
    assert max(run_ranks(3, _against_the_hook, compressor)) < 1e-4


def _error_feedback_conserves(steps: int, dtype: torch.dtype) -> tuple[float, bool]:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat = torch.empty(sum(math.prod(shape) for shape in SHAPES), dtype=dtype)
    reducer = _reducer(flat, FastLowRank())
    offered, applied = torch.zeros(flat.shape), torch.zeros(flat.shape)
    for step in range(steps):
        flat.copy_(_gradients(rank, step) / ranks)
        offered += flat
        reducer.reduce()
        reducer.states.commit({})
        applied += flat
    dist.all_reduce(offered)
    residual = [r.clone() for r in reducer.states.residuals()]
    for r in residual:
        dist.all_reduce(r)
    missing = torch.cat(
        [v.reshape(-1) for v, shape in zip(_views(offered - applied), SHAPES, strict=True) if len(shape) == 2]
    )
    by_group = torch.cat([r.reshape(-1) for r in residual])
    gap = float((missing.sort().values - by_group.sort().values).abs().max() / offered.abs().max())
    copies = [torch.empty_like(flat) for _ in range(ranks)]
    dist.all_gather(copies, flat)
    return gap, all(torch.equal(copy, flat) for copy in copies)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_replicas_offered_is_what_they_got_plus_their_residuals(dtype):
    for gap, equal in run_ranks(2, _error_feedback_conserves, 6, dtype):
        assert gap < 1e-5, "fp32 sums of 6 steps, also where a bf16 bucket rounds what the replicas get"
        assert equal, "every replica applies the same gradient, bit for bit"


def _padded_gradients(rank: int, step: int) -> torch.Tensor:
    """`_gradients`, filled up so that it can be cut into equal shards."""
    flat = _gradients(rank, step)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % dist.get_world_size()))


def _own_shard(flat: torch.Tensor) -> torch.Tensor:
    """As the distributed optimizer cuts a bucket: equal parts, which end in the midst of matrices and of rows."""
    return flat.view(dist.get_world_size(), -1)[dist.get_rank()]


def _in_shards(steps: int, dtype: torch.dtype, error_feedback: bool, compressor) -> list[float]:
    """Worst gaps to a reduction of everything, inside the shard and of whole gradients; rows touched outside."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    everything, part, asked = (_padded_gradients(0, 0).to(dtype) for _ in range(3))
    reducers = [
        _reducer(everything, compressor, dp_error_feedback=error_feedback),
        _reducer(part, compressor, _own_shard(part), dp_error_feedback=error_feedback),
        _reducer(asked, compressor, _own_shard(asked), dp_error_feedback=error_feedback),
    ]
    start = _own_shard(part).storage_offset()
    stop = start + _own_shard(part).numel()
    gap = whole_gap = touched = 0.0
    for step in range(steps):
        gradients = (_padded_gradients(rank, step) / ranks).to(dtype)
        for flat, reducer in zip((everything, part, asked), reducers, strict=True):
            flat.copy_(gradients)
            reducer.reduce(whole=flat is asked)
            reducer.states.commit({})
        scale = float(everything.abs().max())
        gap = max(gap, float((_own_shard(part).float() - _own_shard(everything)).abs().max()) / scale)
        whole_gap = max(whole_gap, float((asked.float() - everything).abs().max()) / scale)
        for view, before in zip(_views(part), _views(gradients), strict=True):
            if view.dim() == 2:
                outside = [
                    torch.equal(row, old)
                    for row, old in zip(view, before, strict=True)
                    if row.storage_offset() >= stop or row.storage_offset() + row.numel() <= start
                ]
                touched += outside.count(False)
    return [gap, whole_gap, touched]


@pytest.mark.parametrize("error_feedback", [True, False], ids=["error feedback", "without"])
@pytest.mark.parametrize("compressor", [FastLowRank(), ReferenceLowRank()], ids=["fast", "reference"])
def test_a_replica_rebuilds_the_rows_of_its_shard_and_no_others(compressor, error_feedback):
    for gap, whole_gap, touched in run_ranks(3, _in_shards, 5, torch.float32, error_feedback, compressor):
        # The same products in another order, five times through the residual: rounding of fp32.
        assert gap < 1e-5
        assert whole_gap < 1e-5, "asked for whole gradients, it gives them"
        assert touched == 0


def _conserves_in_shards(steps: int, dtype: torch.dtype) -> float:
    """How far what all offered is from what the owners of the shards read plus what all still hold back."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat = _padded_gradients(0, 0).to(dtype)
    reducer = _reducer(flat, FastLowRank(), _own_shard(flat))
    missing = torch.zeros(flat.shape)
    for step in range(steps):
        flat.copy_(_padded_gradients(rank, step) / ranks)
        missing += flat
        # Whole gradients in between, which every replica reads: the account has to hold all the same.
        whole = step == 2
        reducer.reduce(whole=whole)
        reducer.states.commit({})
        if whole:
            missing -= flat.float() / ranks
        else:
            _own_shard(missing).sub_(_own_shard(flat))
    held = torch.zeros(flat.shape)
    by_shape = [[v for v in _views(held) if v.shape == r.shape[1:]] for r in reducer.states.residuals()]
    for views, residual in zip(by_shape, reducer.states.residuals(), strict=True):
        for view, matrix in zip(views, residual, strict=True):
            view.copy_(matrix)
    dist.all_reduce(missing)
    dist.all_reduce(held)
    return max(
        float((lacks - holds).abs().max())
        for lacks, holds in zip(_views(missing), _views(held), strict=True)
        if lacks.dim() == 2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_shards_too_nothing_that_was_offered_is_lost(dtype):
    # Gradients are of order 1; a rounding of the bf16 bucket that went nowhere would show as 1e-3.
    assert max(run_ranks(3, _conserves_in_shards, 6, dtype)) < 1e-5


def _nan_on_one_rank() -> list[bool]:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    flat = torch.empty(sum(math.prod(shape) for shape in SHAPES))
    reducer = _reducer(flat, FastLowRank())
    for step in range(2):
        flat.copy_(_gradients(rank, step) / ranks)
        reducer.reduce()
        reducer.states.commit({})
    before = [t.clone() for t in (*reducer.states.residuals(), *warm_starts(reducer))]
    flat.copy_(_gradients(rank, 2) / ranks)
    if rank == 1:
        flat[5] = torch.nan
    reducer.reduce()
    seen = bool(torch.isnan(flat).any())
    reducer.states.commit({})
    after = (*reducer.states.residuals(), *warm_starts(reducer))
    # Only the group of the poisoned matrix is held back; nothing kept anywhere is NaN.
    kept = [bool(torch.isfinite(t).all()) for t in after]
    poisoned_unchanged = torch.equal(before[0], after[0])
    return [seen, all(kept), poisoned_unchanged]


def test_nan_on_one_replica_is_seen_by_all_and_kept_by_none():
    assert run_ranks(2, _nan_on_one_rank) == [[True, True, True]] * 2


def _two_norm_groups() -> dict[str, float]:
    """By state: the residual's norm, over what it is where nothing was clipped more than usual."""
    dist.init_process_group("gloo")
    norms = []
    for shrinkage in ({}, {"mtp": 0.25}):
        flat = _gradients(0, 0)
        matrices = [view for view in _views(flat) if view.dim() == 2]
        reducer = BucketReducer(
            matrices, [], norm_groups=["main", "main", "mtp", "main"], group=dist.group.WORLD, seed=1, salt="test",
            compressor=FastLowRank(), config=DataParallelCompressionConfig(dp_compression_rank=RANK),
        )  # fmt: skip
        reducer.reduce()
        reducer.states.commit(shrinkage)
        norms.append({name: float(saved["residual"].norm()) for name, saved in reducer.states.state_dict().items()})
    return {name: norms[1][name] / norm for name, norm in norms[0].items()}


def test_matrices_of_a_gradient_norm_group_of_their_own_are_shrunk_by_their_own_clipping():
    (ratios,) = run_ranks(1, _two_norm_groups)
    # The two 48 x 32 matrices, of one shape, are of two groups.
    assert ratios == pytest.approx(
        {"bucket 0: 48x32": 1.0, "bucket 0: 96x32": 1.0, "bucket 0: 48x32 mtp": 0.25, "bucket 0: 32x64": 1.0}
    )


def _beside_the_backward_pass() -> bool:
    """One rank on one GPU: reduced on a side stream while the main stream is busy, and in line."""
    dist.init_process_group("nccl", device_id=torch.device("cuda", 0))
    flats = [_gradients(0, step).cuda() for step in range(3)]
    results = []
    for side in (SideStream(flats[0].device), None):
        flat = torch.empty_like(flats[0])
        reducer = _reducer(flat, FastLowRank())
        reduced = []
        for gradient in flats:
            busy = torch.randn(4096, 4096, device="cuda")
            for _ in range(20):
                busy = busy @ busy / 64
            flat.copy_(gradient)  # behind what keeps the stream busy: a reducer that does not wait reads the old one
            if side is None:
                reducer.reduce()
            else:
                with side.work():
                    reducer.start()
                with side.work():
                    reducer.finish()
                side.join()
            reducer.states.commit({})
            reduced.append(flat.clone())
        results.append(reduced)
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: there are no streams to order")
def test_on_a_gpu_a_side_stream_gives_the_same_bits():
    assert run_ranks(1, _beside_the_backward_pass) == [True]
