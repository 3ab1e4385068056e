"""Wraps megatron/core/distributed/finalize_model_grads.py: the tied embedding is reduced in one collective."""

from collections.abc import Callable
from typing import Any

import torch

from optimus_cc_ext.collectives.legs import bytes_of
from optimus_cc_ext.config.classes import EMBEDDING
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.hooks.facts import tied_embedding
from optimus_cc_ext.hooks.param_and_grad_buffer import own_shard
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.hooks.steps import check_messages
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.session import Session

_MODULE = "megatron.core.distributed.finalize_model_grads"


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    seam = Seam(f"{_MODULE}:_allreduce_word_embedding_grads", ("model", "config"))
    return [(seam, around(all_reduce_word_embedding, sessions))]


def all_reduce_word_embedding(
    sessions: Sessions, original: Callable[..., Any], model: list[Any], *args: Any, **kwargs: Any
) -> None:
    """Sum the tied embedding's gradient, and judge the messages of steps whose optimizer is unknown, in time.

    Megatron calls `_allreduce_word_embedding_grads` on all ranks of the models, after the reductions of their buckets.
    """
    found = sessions.of(model)
    tied = {chunk: embedding for chunk in model if (embedding := tied_embedding(chunk)) is not None}
    chunk, embedding = next(iter(tied.items()), (None, None))
    owners = found if chunk is None or len(model) == 1 else sessions.of([chunk])
    frozen = chunk is None and any(tied_embedding(each, trained=False) is not None for each in model)
    if owners and not frozen:
        _sum_word_embedding(owners[0], chunk, embedding, lambda: original(model, *args, **kwargs))
    else:
        original(model, *args, **kwargs)
    for session in found:
        if session.steps_are_announced:
            check_messages(session)


def _sum_word_embedding(session: Session, chunk: Any, embedding: Any, vanilla: Callable[[], None]) -> None:
    """Sum the tied embedding's gradient in place of Megatron, or count Megatron's sum.

    Args:
        chunk: the model chunk of this stage that holds a tied embedding; None: no chunk does.
        embedding: its tied embedding.
        vanilla: Megatron's sum.
    """
    fused = session.embedding
    ours = chunk is not None and fused.takes_over(session.in_step)
    if ours:
        gradient = _to_reduce(fused, chunk, embedding)
        fused.reduce(gradient)
    else:
        vanilla()
    if ours or (chunk is not None and session.in_step):
        # The sum over the replicas was counted with the embedding's bucket.
        raw = bytes_of([fused.of_pair(embedding.main_grad)])
        session.traffic.add(EMBEDDING, raw, bytes_of(fused.legs(gradient)) if ours else raw)


def _to_reduce(technique: FusedEmbeddingSync, chunk: Any, embedding: Any) -> torch.Tensor:
    """Return the embedding's gradient, or the part of it that this rank's optimizer will read."""
    if not technique.sharded or getattr(chunk, "force_all_reduce", False):
        return embedding.main_grad
    bucket_group = chunk.param_to_bucket_group[embedding]
    bucket = bucket_group.param_to_bucket[embedding]
    if bucket.params != {embedding}:
        raise OptimusError(
            "--fused-embedding-sync: the tied embedding shares a bucket with other parameters, so the shards of the "
            "first and the last stage are not alike. Leave --fused-embedding-sync out with the distributed optimizer"
        )
    return own_shard(bucket_group, bucket)
