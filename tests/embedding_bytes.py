"""Bytes of a tied embedding by itself, from the plans of training."""

import torch

from optimus_cc_ext.collectives.legs import Span, all_reduce, sent
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.nodes import ONE_LEVEL
from optimus_cc_ext.config.classes import EMBEDDING
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan, ParameterRecord
from optimus_cc_ext.techniques.fused_embedding_sync import legs_of_sum

__all__ = ["embedding_bytes"]


def embedding_bytes(values: int, replicas: int, *, sharded: bool = False, fused: str | None = None) -> int:
    """Return the bytes that a rank sends to sum an embedding of fp32 `values` over the replicas and over both stages.

    Args:
        fused: the format of fused embedding synchronisation; None: it is off.
    """
    record = BucketRecord(
        numel=values, dtype=torch.float32, parameters=[ParameterRecord(shape=(values, 1), start=0, tied=True)]
    )
    plan = GroupPlan.of([record], BucketRules(ranks=replicas, sharded=sharded, fused=fused))
    over_replicas = plan.bytes_by_class(plan.compresses)[EMBEDDING].sent
    if fused is None:
        return over_replicas + all_reduce(4 * values, Span(2)).nbytes
    formats, union = Formats.of(fused), None if sharded else Span(2 * replicas)
    shard = values // replicas if sharded else values
    return over_replicas + sent(legs_of_sum(shard, torch.float32, formats, Span(2), union, ONE_LEVEL))
