"""Wraps bucket groups of megatron/core/distributed/param_and_grad_buffer.py: gradient reductions and gathers are ours.

`start_grad_sync` is reached through the instance everywhere, so it is replaced on the instances that need it. Before
its collective it drains, waits, copies extra main gradients, checks for NaN and scales; after it nothing is left to
do. All that is kept, and only the collective replaced, by lending the original a data-parallel group of this rank
alone: its all-reduce then changes nothing, and ours follows. The same goes for `start_param_sync` and its gather.

Ours is always a sum. Megatron scales by 1/D before it, except that with --ddp-average-in-collective it leaves the
division to the collective, and with --calculate-per-token-loss divides by the number of tokens after everything.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.metrics.traffic import TrafficClass, all_reduce_bytes, reduce_scatter_bytes
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.block_reducer import ExchangePlan, Range, range_in, sent_alone
from optimus_cc_ext.techniques.bucket_reducer import reduced_bytes, worth_compressing
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP
from optimus_cc_ext.techniques.param_gather import Gather
from optimus_cc_ext.techniques.reducer import Reducer
from optimus_cc_ext.techniques.side_stream import SideStream

__all__ = ["attach", "own_shard"]


def attach(session: Session, bucket_group: Any, experts: Collection[Any] = ()) -> None:
    """Take over, or at least count, the reductions of one `_ParamAndGradBucketGroup`, and count its gathers.

    `experts` holds the weights of routed experts, whose gradients low rank does not compress.
    """
    buckets = _Buckets(session, bucket_group, experts)
    session.gradients.add_buckets(buckets)
    line = session.gradients.note_single_rank(buckets.kept_dense)
    if line is not None and dist.get_rank() == 0:
        print(f"optimus-cc: {line}", flush=True)
    bucket_group.start_grad_sync = buckets.start_grad_sync
    if buckets.gather_bytes:
        _take_over_gathers(session, bucket_group, buckets.gather_bytes)


def _take_over_gathers(session: Session, bucket_group: Any, nbytes: int) -> None:
    """Or count them. The optimizer's step starts them, or the forward pass that needs the parameters."""
    original = bucket_group.start_param_sync
    # Megatron's optimizer steps fp32 parameters in place: nobody could tell afterwards what has changed.
    stepped_in_place = any(bucket.param_data.dtype == torch.float32 for bucket in bucket_group.buckets)
    shards = [
        session.parameters.add_bucket(
            bucket, bucket.param_data.view(-1), _ranges(bucket, bucket.params_list), group=_group(bucket_group)
        )
        for bucket in bucket_group.buckets
        if session.parameters.codec is not None and not stepped_in_place
    ]

    session.parameters.dense_bytes += 0 if shards else nbytes

    def start_param_sync(force_sync: bool = False) -> None:
        if force_sync and bucket_group.param_gather_handle is not None:
            original(force_sync)  # it waits for the one that is under way
            return
        # The first gather, and one after a skipped step, have nothing to say but what all replicas know.
        ours = bool(shards) and all(shard.updated for shard in shards)
        if ours:
            assert session.alone is not None, "the session was placed without a group of its own"
            with _lent_group(bucket_group, session.alone):
                original(force_sync)
            gather = Gather(shards)
            if bucket_group.param_gather_handle is None:
                gather.wait()
            else:
                bucket_group.param_gather_handle.wait()
                bucket_group.param_gather_handle = gather
        else:
            original(force_sync)
        if session.grid is not None:
            sent = sum(shard.sent_bytes for shard in shards) if ours else nbytes
            session.traffic.add(TrafficClass.PARAM_GATHER, raw=nbytes, sent=sent)

    bucket_group.start_param_sync = start_param_sync


def _ranges(bucket: Any, parameters: Collection[Any]) -> tuple[list[Range], list[Range]]:
    """Where parameters lie in a bucket: matrices, and vectors."""
    ranges: tuple[list[Range], list[Range]] = ([], [])
    for parameter in parameters:
        start, end = bucket.param_to_index[parameter]
        ranges[parameter.dim() < 2].append((start, end - start))
    return ranges


class _Buckets:
    """A bucket group of Megatron's, and how its gradients are reduced; see `selective_stage_compression.Buckets`."""

    def __init__(self, session: Session, bucket_group: Any, experts: Collection[Any]) -> None:
        self._session, self._bucket_group, self._experts = session, bucket_group, experts
        self._original: Callable[..., None] = type(bucket_group).start_grad_sync.__get__(bucket_group)
        self._sharded = bucket_group.ddp_config.use_distributed_optimizer
        overlapped = bucket_group.ddp_config.overlap_grad_reduce
        self._side = session.gradients.side_stream(bucket_group.buckets[0].grad_data.device) if overlapped else None
        self.overlapping = len(bucket_group.buckets) if overlapped else 0
        self.group = _group(bucket_group)
        self.tied_bytes = _tied_bytes(bucket_group)
        self.tied_saved = 0
        self.gather_bytes = 0
        if self._sharded:
            parameters = (bucket.param_data.nbytes for bucket in bucket_group.buckets)
            self.gather_bytes = sum(reduce_scatter_bytes(nbytes, self.group.size()) for nbytes in parameters)
        self._grad_dtype: torch.dtype = bucket_group.buckets[0].grad_data.dtype
        # The tied embedding is a traffic class of its own, also where it travels with its bucket.
        self._dense = reduce_scatter_bytes if self._sharded else all_reduce_bytes
        nbytes = sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets) - self.tied_bytes
        self.dense_bytes = self._dense(nbytes, self.group.size())
        # The distributed optimizer reduces a tied embedding over the replicas as ever, and its shard over the stages:
        # in a bucket of its own, in the format of fused embedding synchronisation.
        self._fused = session.embedding if self.tied_bytes else None
        self._left_out = self._fused is not None and not self._sharded
        if self._fused is not None:
            bucket, tied = next((bucket, p) for bucket in bucket_group.buckets for p in bucket.params if _is_tied(p))
            self._fused.preallocate(own_shard(bucket_group, bucket) if self._is_fused(bucket) else tied.main_grad)
        self._uncompressed: list[Reducer] = []
        self._compressed: list[Reducer] = []
        self._encodes = session.gradients.encodes(self.group.size())
        if not self._encodes:
            # Nothing is sent: Megatron's own collective changes nothing, with and without a tied embedding.
            return
        if self._left_out or (self._fused is not None and self._fused.codecs is not None):
            self._uncompressed = [self._reducer(bucket, compressing=False) for bucket in bucket_group.buckets]

    @property
    def matrices(self) -> list[torch.Tensor]:
        """The gradients that can be compressed."""
        return [p.main_grad for p in self._bucket_group.params if self._encodes and self._compressible(p)]

    @property
    def kept_dense(self) -> str | None:
        """The name of the gradients that only a group of more than one rank would compress; None: there are none."""
        if self._encodes:
            return None
        if self._fused is not None and self._sharded and self._fused.codecs is not None:
            return "gradients of the tied embedding"
        if not self._session.config.dp_compression or not any(map(self._compressible, self._bucket_group.params)):
            return None
        routed = any(parameter in self._experts for parameter in self._bucket_group.params)
        return "gradients of routed experts" if routed else "all gradients of a model chunk"

    @property
    def compressed_bytes(self) -> int:
        """What is moved to reduce all gradients but a tied embedding's, if they are compressed."""
        codecs, ranks, matrices = self._session.gradients.codecs, self.group.size(), self.matrices
        if not matrices:
            return self.dense_bytes
        if codecs is None:
            dense = [p.main_grad for p in self._bucket_group.params if not self._compressible(p) and not _is_tied(p)]
            rank, wire = self._session.config.dp_compression_rank, self._session.gradients.wire
            return reduced_bytes(matrices, dense, rank, ranks, wire)
        sent = 0
        for bucket in self._bucket_group.buckets:
            if not _is_all_tied(bucket):
                flat = bucket.grad_data
                coded, plain = ([range_in(flat, p.main_grad) for p in ps] for ps in self._split(bucket, True))
                plan = ExchangePlan(flat.numel(), coded, plain, flat.dtype, ranks, self._sharded, codecs)
                tied = self._part_of_tied() if _is_partly_tied(bucket) and not self._left_out else 0
                sent += plan.sent_bytes() - tied
        return sent

    def compress(self) -> None:
        """From now on, and after the warm-up of compression, gradients that can be compressed are."""
        if self.matrices:
            buckets = self._bucket_group.buckets
            # What fused embedding synchronisation reduces is the same in the warm-up.
            self._compressed = [
                self._uncompressed[index]
                if self._uncompressed and self._is_fused(bucket)
                else self._reducer(bucket, compressing=True)
                for index, bucket in enumerate(buckets)
            ]

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """In place of `_ParamAndGradBucketGroup.start_grad_sync`."""
        session, bucket_group = self._session, self._bucket_group
        compressing = bool(self._compressed) and not session.gradients.in_warmup
        reducers = self._compressed if compressing else self._uncompressed
        started_already = bucket_group.is_first_batch and bucket_group.grad_reduce_handle is not None
        if not session.active or not reducers or started_already:
            self._original(force_all_reduce)
            if session.active and not started_already:
                self.tied_saved = 0
                session.traffic.add(TrafficClass.DP_GRADIENTS, raw=self.dense_bytes, sent=self.dense_bytes)
            return
        assert session.alone is not None, "the session was placed without a group of its own"
        with _lent_group(bucket_group, session.alone):
            self._original(force_all_reduce)
        if bucket_group.grad_reduce_handle is not None:
            # Alone as it is, the collective may still write what it read; ours must not run beside it.
            bucket_group.grad_reduce_handle.wait()
        whole = bool(force_all_reduce)
        handle = _Reduction(reducers, session.gradients.reducers, self._side, whole=whole)
        if self._side is not None:
            bucket_group.grad_reduce_handle = handle
        else:
            handle.wait()
        session.traffic.add(TrafficClass.DP_GRADIENTS, raw=self.dense_bytes, sent=self._sent_bytes(reducers, whole))

    def _sent_bytes(self, reducers: list[Reducer], whole: bool) -> int:
        """What they send but for a tied embedding, which is counted with its own class."""
        sent = tied = 0
        for bucket, reducer in zip(self._bucket_group.buckets, reducers, strict=True):
            sent += reducer.sent_bytes(whole)
            if _is_all_tied(bucket):
                tied += reducer.sent_bytes(whole)
            elif _is_partly_tied(bucket) and not self._left_out:
                tied += self._part_of_tied(whole)
        self.tied_saved = self._dense(self.tied_bytes, self.group.size()) - tied
        return sent - tied

    def _part_of_tied(self, whole: bool = False) -> int:
        """Of the bytes that are sent of a bucket, those of a tied embedding in it."""
        codecs, ranks, dtype = self._session.gradients.codecs, self.group.size(), self._grad_dtype
        if codecs is None:
            return all_reduce_bytes(self.tied_bytes, ranks)
        numel = self.tied_bytes // dtype.itemsize
        return sent_alone(numel, dtype, ranks, self._sharded, codecs, whole)

    def _is_fused(self, bucket: Any) -> bool:
        """Whether it is a tied embedding's own, reduced in the format of fused embedding synchronisation."""
        return self._fused is not None and self._sharded and _is_all_tied(bucket)

    def _compressible(self, parameter: Any) -> bool:
        gradients, config = self._session.gradients, self._session.config
        if self._fused is not None and _is_tied(parameter):
            return False
        if gradients.codecs is not None:
            return bool(parameter.main_grad.dim() >= 2)
        # Word embeddings and output layers stay dense: their gradients have a row per word, and a high rank.
        if parameter in self._experts or getattr(parameter, "is_embedding_or_output_parameter", False):
            return False
        return worth_compressing(parameter.main_grad, config.dp_compression_rank, config.force_compression)

    def _split(self, bucket: Any, compressing: bool) -> tuple[list[Any], list[Any]]:
        """The parameters of a bucket that are compressed, and the others; a tied embedding may be neither."""
        parameters = [p for p in bucket.params_list if not (self._left_out and _is_tied(p))]
        fused = self._fused.codecs is not None if self._fused is not None and self._is_fused(bucket) else None
        compressed = [p for p in parameters if (compressing and self._compressible(p) if fused is None else fused)]
        return compressed, [p for p in parameters if all(p is not other for other in compressed)]

    def _reducer(self, bucket: Any, *, compressing: bool) -> Reducer:
        """What is compressible in a bucket compressed, or nothing; a tied embedding left out or not."""
        if bucket.params_with_extra_main_grads:
            raise FlagError(
                "--ddp-param-name-patterns-for-fp32-local-accumulation",
                "gradients that are accumulated outside of the gradient buffer are not supported by Optimus-CC",
                "Leave it out",
            )
        compressed, others = self._split(bucket, compressing)
        return self._session.gradients.add_reducer(
            bucket.grad_data,
            [p.main_grad for p in compressed],
            [p.main_grad for p in others],
            norm_groups=[getattr(p, "grad_norm_group", None) or MAIN_NORM_GROUP for p in compressed],
            sharded=self._sharded,
            group=self.group,
            fused=self._fused if self._is_fused(bucket) else None,
        )


def own_shard(bucket_group: Any, bucket: Any) -> torch.Tensor:
    """The flat part of a bucket that this rank's distributed optimizer reads."""
    shards: torch.Tensor = bucket.grad_data.view(bucket_group.intra_distributed_optimizer_instance_size, -1)
    return shards[bucket_group.intra_distributed_optimizer_instance_rank]


class _Reduction:
    """A bucket group's reduction: begun when it is made, finished by `wait`, which `finish_grad_sync` calls.

    Args:
        everyones: the reducers of all buckets of this rank. The first reduction that is waited for lets all that were
            started go on to the `second_phase`, so that what follows travels one behind the other; bucket by bucket,
            each would begin when the one before it had ended. Replicas wait in the same order, so they agree on it.
        side: where it runs, if the backward pass goes on meanwhile.
        whole: whether each replica gets whole gradients, also where its optimizer reads a shard.
    """

    def __init__(
        self, reducers: list[Reducer], everyones: list[Reducer], side: SideStream | None, *, whole: bool
    ) -> None:
        self._reducers, self._everyones, self._side = reducers, everyones, side
        with self._beside():
            for reducer in reducers:
                reducer.start(whole)

    def wait(self) -> None:
        with self._beside():
            for reducer in self._everyones:
                reducer.second_phase()
            for reducer in self._reducers:
                reducer.finish()
        if self._side is not None:
            self._side.join()

    def _beside(self) -> AbstractContextManager[None]:
        return nullcontext() if self._side is None else self._side.work()


def _is_tied(parameter: Any) -> bool:
    return getattr(parameter, "shared_embedding", False)


def _is_all_tied(bucket: Any) -> bool:
    return all(_is_tied(parameter) for parameter in bucket.params)


def _is_partly_tied(bucket: Any) -> bool:
    return any(_is_tied(parameter) for parameter in bucket.params)


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
            "cached_param_buffer_shard_list": [None] * len(bucket_group.buckets),
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
