"""Wraps bucket groups of megatron/core/distributed/param_and_grad_buffer.py: their gradient reduction is ours.

`start_grad_sync` is reached through the instance everywhere, so it is replaced on the instances that need it. Before
its collective it drains, waits, copies extra main gradients, checks for NaN and scales; after it nothing is left to
do. All that is kept, and only the collective replaced, by lending the original a data-parallel group of this rank
alone: its all-reduce then changes nothing, and ours follows.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.selective_stage_compression import BucketReducer, worth_compressing
from optimus_cc_ext.traffic import TrafficClass, all_reduce_bytes

__all__ = ["attach"]


def attach(session: Session, bucket_group: Any) -> None:
    """Take over, or at least count, the gradient reduction of one `_ParamAndGradBucketGroup`."""
    original: Callable[..., None] = type(bucket_group).start_grad_sync.__get__(bucket_group)
    tied_bytes = _tied_bytes(bucket_group)
    uncompressed = _reducers(session, bucket_group, compress=False) if session.embedding and tied_bytes else []
    compressed = _reducers(session, bucket_group, compress=True) if session.compresses_this_stage else []
    # The tied embedding is a traffic class of its own; where it is not fused it still travels with its bucket.
    counted_elsewhere = 0 if session.embedding else tied_bytes

    def start_grad_sync(force_all_reduce: bool | None = False) -> None:
        reducers = uncompressed if not compressed or session.in_warmup() else compressed
        if not session.active:
            original(force_all_reduce)
        elif not reducers:
            original(force_all_reduce)
            nbytes = sum(bucket.grad_data.nbytes for bucket in bucket_group.buckets)
            _count(session, bucket_group, raw=nbytes - counted_elsewhere, sent=nbytes - counted_elsewhere)
        else:
            assert session.alone is not None, "the session was placed without a group of its own"
            with _lent_group(bucket_group, session.alone):
                original(force_all_reduce)
            for reducer in reducers:
                reducer.reduce()
            _count(
                session, bucket_group,
                raw=sum(reducer.raw_bytes for reducer in reducers) - counted_elsewhere,
                sent=sum(reducer.reduced_bytes for reducer in reducers) - counted_elsewhere,
            )  # fmt: skip

    bucket_group.start_grad_sync = start_grad_sync


def _reducers(session: Session, bucket_group: Any, *, compress: bool) -> list[BucketReducer]:
    """One reducer per bucket: its matrices compressed or not, a fused embedding left out."""
    config = session.config

    def make(bucket: Any) -> Callable[[str], BucketReducer]:
        matrices, dense = [], []
        for parameter in bucket.params_list:
            gradient = parameter.main_grad
            if session.embedding is not None and getattr(parameter, "shared_embedding", False):
                continue
            if compress and _compressible(parameter, config):
                matrices.append(gradient)
            else:
                dense.append(gradient.view(-1))
        return lambda salt: BucketReducer(
            matrices, dense, group=bucket_group.data_parallel_group, compressor=session.compressor,
            config=config, seed=config.compression_seed, salt=salt,
        )  # fmt: skip

    return [session.add_reducer(make(bucket)) for bucket in bucket_group.buckets]


def _compressible(parameter: Any, config: OptimusConfig) -> bool:
    """Word embeddings and output layers stay dense: their gradients have a row per word, and a high rank."""
    if getattr(parameter, "is_embedding_or_output_parameter", False):
        return False
    return worth_compressing(parameter.main_grad, config.dp_compression_rank, config.force_compression)


def _tied_bytes(bucket_group: Any) -> int:
    return sum(
        parameter.main_grad.nbytes for parameter in bucket_group.params if getattr(parameter, "shared_embedding", False)
    )


def _count(session: Session, bucket_group: Any, *, raw: int, sent: int) -> None:
    ranks = bucket_group.data_parallel_group.size()
    session.traffic.add(TrafficClass.DP_GRADIENTS, raw=all_reduce_bytes(raw, ranks), sent=all_reduce_bytes(sent, ranks))


@contextmanager
def _lent_group(bucket_group: Any, group: dist.ProcessGroup) -> Iterator[None]:
    own = bucket_group.data_parallel_group
    bucket_group.data_parallel_group = group
    try:
        yield
    finally:
        bucket_group.data_parallel_group = own
