"""Wraps bucket groups of megatron/core/distributed/param_and_grad_buffer.py: their gradient reduction is ours.

`start_grad_sync` is reached through the instance everywhere, so it is replaced on the instances that need it. Before
its collective it drains, waits, copies extra main gradients, checks for NaN and scales; after it nothing is left to
do. All that is kept, and only the collective replaced, by lending the original a data-parallel group of this rank
alone: its all-reduce then changes nothing, and ours follows.

Ours is always a sum. Megatron scales by 1/D before it, except that with --ddp-average-in-collective it leaves the
division to the collective, and with --calculate-per-token-loss divides by the number of tokens after everything.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.metrics.traffic import TrafficClass, all_reduce_bytes, reduce_scatter_bytes
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.bucket_reducer import BucketReducer, reduced_bytes, worth_compressing
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.side_stream import SideStream

__all__ = ["attach", "own_shard"]


def attach(session: Session, bucket_group: Any, never_compressed: Collection[Any] = ()) -> None:
    """Take over, or at least count, the gradient reduction of one `_ParamAndGradBucketGroup`.

    `never_compressed` holds parameters whose gradients stay dense.
    """
    buckets = _Buckets(session, bucket_group, never_compressed)
    session.gradients.add_buckets(buckets)
    bucket_group.start_grad_sync = buckets.start_grad_sync


class _Buckets:
    """A bucket group of Megatron's, and how its gradients are reduced; see `selective_stage_compression.Buckets`."""

    def __init__(self, session: Session, bucket_group: Any, never_compressed: Collection[Any]) -> None:
        self._session, self._bucket_group, self._never_compressed = session, bucket_group, never_compressed
        self._original: Callable[..., None] = type(bucket_group).start_grad_sync.__get__(bucket_group)
        self._sharded = bucket_group.ddp_config.use_distributed_optimizer
        overlapped = bucket_group.ddp_config.overlap_grad_reduce
        self._side = session.gradients.side_stream(bucket_group.buckets[0].grad_data.device) if overlapped else None
        self.overlapping = len(bucket_group.buckets) if overlapped else 0
        self.group = _group(bucket_group)
        self.tied_bytes = _tied_bytes(bucket_group)
        # The tied embedding is a traffic class of its own, also where it travels with its bucket.
        nbytes = sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets) - self.tied_bytes
        self.dense_bytes = (reduce_scatter_bytes if self._sharded else all_reduce_bytes)(nbytes, self.group.size())
        # The distributed optimizer reduces a tied embedding over the replicas as ever, and its shard over the stages.
        self._left_out = session.embedding is not None and self.tied_bytes > 0 and not self._sharded
        self._uncompressed: list[BucketReducer] = []
        self._compressed: list[BucketReducer] = []
        if self._left_out:
            self._uncompressed = _reducers(session, bucket_group, _none, leave_out_tied=True)

    @property
    def matrices(self) -> list[torch.Tensor]:
        """The gradients that can be compressed."""
        return [p.main_grad for p in self._bucket_group.params if self._compressible(p)]

    @property
    def compressed_bytes(self) -> int:
        """What is moved to reduce all gradients but a tied embedding's, if they are compressed."""
        matrices = self.matrices
        if not matrices:
            return self.dense_bytes
        dense = [p.main_grad for p in self._bucket_group.params if not self._compressible(p) and not _is_tied(p)]
        nbytes = reduced_bytes(matrices, dense, self._session.config.dp_compression_rank)
        return all_reduce_bytes(nbytes, self.group.size())

    def compress(self) -> None:
        """From now on, and after the warm-up of compression, gradients that can be compressed are."""
        if self.matrices:
            self._compressed = _reducers(
                self._session, self._bucket_group, self._compressible, leave_out_tied=self._left_out
            )

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """In place of `_ParamAndGradBucketGroup.start_grad_sync`."""
        session, bucket_group = self._session, self._bucket_group
        compressing = bool(self._compressed) and not session.gradients.in_warmup
        reducers = self._compressed if compressing else self._uncompressed
        started_already = bucket_group.is_first_batch and bucket_group.grad_reduce_handle is not None
        if not session.active or not reducers or started_already:
            self._original(force_all_reduce)
            if session.active and not started_already:
                session.traffic.add(TrafficClass.DP_GRADIENTS, raw=self.dense_bytes, sent=self.dense_bytes)
            return
        assert session.alone is not None, "the session was placed without a group of its own"
        with _lent_group(bucket_group, session.alone):
            self._original(force_all_reduce)
        if bucket_group.grad_reduce_handle is not None:
            # Alone as it is, the collective may still write what it read; ours must not run beside it.
            bucket_group.grad_reduce_handle.wait()
        handle = _Reduction(reducers, session.gradients.reducers, self._side, whole=bool(force_all_reduce))
        if self._side is not None:
            bucket_group.grad_reduce_handle = handle
        else:
            handle.wait()
        nbytes = sum(r.reduced_bytes for r in reducers) - (0 if self._left_out else self.tied_bytes)
        session.traffic.add(
            TrafficClass.DP_GRADIENTS, raw=self.dense_bytes, sent=all_reduce_bytes(nbytes, self.group.size())
        )

    def _compressible(self, parameter: Any) -> bool:
        return parameter not in self._never_compressed and _compressible(parameter, self._session.config)


def own_shard(bucket_group: Any, bucket: Any) -> torch.Tensor:
    """The flat part of a bucket that this rank's distributed optimizer reads."""
    shards: torch.Tensor = bucket.grad_data.view(bucket_group.intra_distributed_optimizer_instance_size, -1)
    return shards[bucket_group.intra_distributed_optimizer_instance_rank]


class _Reduction:
    """A bucket group's reduction: begun when it is made, finished by `wait`, which `finish_grad_sync` calls.

    Args:
        everyones: the reducers of all buckets of this rank. The first reduction that is waited for lets all that were
            started `all_reduce_q`, so that their second phases travel one behind the other; bucket by bucket, each
            would begin when the one before it had ended. Replicas wait in the same order, so they agree on it.
        side: where it runs, if the backward pass goes on meanwhile.
        whole: whether each replica gets whole gradients, also where its optimizer reads a shard.
    """

    def __init__(
        self, reducers: list[BucketReducer], everyones: list[BucketReducer], side: SideStream | None, *, whole: bool
    ) -> None:
        self._reducers, self._everyones, self._side, self._whole = reducers, everyones, side, whole
        with self._beside():
            for reducer in reducers:
                reducer.start()

    def wait(self) -> None:
        with self._beside():
            for reducer in self._everyones:
                reducer.all_reduce_q()
            for reducer in self._reducers:
                reducer.finish(self._whole)
        if self._side is not None:
            self._side.join()

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.work()


def _none(parameter: Any) -> bool:
    return False


def _reducers(
    session: Session, bucket_group: Any, compressible: Callable[[Any], bool], *, leave_out_tied: bool
) -> list[BucketReducer]:
    """One reducer per bucket: what is `compressible` compressed, a tied embedding left out or not."""
    sharded = bucket_group.ddp_config.use_distributed_optimizer
    reducers = []
    for bucket in bucket_group.buckets:
        if bucket.params_with_extra_main_grads:
            raise FlagError(
                "--ddp-param-name-patterns-for-fp32-local-accumulation",
                "gradients that are accumulated outside of the gradient buffer are not supported by Optimus-CC",
                "Leave it out",
            )
        matrices, norm_groups, dense = [], [], []
        for parameter in bucket.params_list:
            if leave_out_tied and _is_tied(parameter):
                continue
            if compressible(parameter):
                matrices.append(parameter.main_grad)
                norm_groups.append(getattr(parameter, "grad_norm_group", None) or MAIN_NORM_GROUP)
            else:
                dense.append(parameter.main_grad.view(-1))
        shard = own_shard(bucket_group, bucket) if sharded else None
        reducers.append(
            session.gradients.add_reducer(
                matrices, dense, norm_groups=norm_groups, shard=shard, group=_group(bucket_group)
            )
        )
    return reducers


def _compressible(parameter: Any, config: OptimusConfig) -> bool:
    """Word embeddings and output layers stay dense: their gradients have a row per word, and a high rank."""
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return False
    return worth_compressing(parameter.main_grad, config.dp_compression_rank, config.force_compression)


def _is_tied(parameter: Any) -> bool:
    return getattr(parameter, "shared_embedding", False)


def _tied_bytes(bucket_group: Any) -> int:
    return sum(parameter.main_grad.nbytes for parameter in bucket_group.params if _is_tied(parameter))


def _group(bucket_group: Any) -> dist.ProcessGroup:
    return getattr(bucket_group, _group_attribute(bucket_group))


def _group_attribute(bucket_group: Any) -> str:
    sharded = bucket_group.ddp_config.use_distributed_optimizer
    return "intra_distributed_optimizer_instance_group" if sharded else "data_parallel_group"


@contextmanager
def _lent_group(bucket_group: Any, group: dist.ProcessGroup) -> Iterator[None]:
    """For a moment the replicas are this rank alone, and the only shard is the whole buffer."""
    lent: dict[str, Any] = {_group_attribute(bucket_group): group}
    if bucket_group.ddp_config.use_distributed_optimizer:
        lent |= {
            "intra_distributed_optimizer_instance_size": 1,
            "intra_distributed_optimizer_instance_rank": 0,
            "cached_grad_buffer_shard_list": [None] * len(bucket_group.buckets),
        }
    own = {name: getattr(bucket_group, name) for name in lent}
    scales = [bucket.gradient_scaling_factor for bucket in bucket_group.buckets]
    vars(bucket_group).update(lent)
    if bucket_group.ddp_config.average_in_collective:
        # An average over one rank divides by nothing, so what is left to the collective has to happen before it.
        for bucket, scale in zip(bucket_group.buckets, scales, strict=True):
            bucket.gradient_scaling_factor = scale / own[_group_attribute(bucket_group)].size()
    try:
        yield
    finally:
        vars(bucket_group).update(own)
        for bucket, scale in zip(bucket_group.buckets, scales, strict=True):
            bucket.gradient_scaling_factor = scale
