"""Wraps megatron/core/distributed/finalize_model_grads.py: the tied embedding is reduced in one collective."""

from collections.abc import Callable
from typing import Any

import torch

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.fused_embedding_sync import unfused_bytes
from optimus_cc_ext.traffic import TrafficClass, all_reduce_bytes

__all__ = ["tied_embedding", "wraps"]

_MODULE = "megatron.core.distributed.finalize_model_grads"


def tied_embedding(module: torch.nn.Module) -> Any:
    """The word embedding parameter that this stage shares with another one, or None where it holds none.

    Megatron marks it in `LanguageModule.setup_embeddings_and_output_layer`
    (megatron/core/models/common/language_module/language_module.py).
    """
    for parameter in module.parameters():
        if getattr(parameter, "shared_embedding", False) and parameter.requires_grad:
            return parameter
    return None


def wraps(session: Session) -> list[tuple[Seam, Callable[[Any], Any]]]:
    """The seam of this file, with what wraps it."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def _allreduce_word_embedding_grads(
            model: list[torch.nn.Module], config: Any, *args: Any, **kwargs: Any
        ) -> None:
            embedding = next((p for chunk in model if (p := tied_embedding(chunk)) is not None), None)
            if not session.active or (embedding is None and session.embedding is None):
                original(model, config, *args, **kwargs)
                return
            if embedding is None:
                raise FlagError(
                    "--fused-embedding-sync",
                    "this stage's model holds no embedding that is tied to another stage's",
                    "Leave it out, or tie the embeddings",
                )
            if session.embedding is not None:
                session.embedding.reduce(embedding.main_grad)
            else:
                original(model, config, *args, **kwargs)
            _count(session, embedding.main_grad.nbytes)

        return _allreduce_word_embedding_grads

    return [(Seam(f"{_MODULE}:_allreduce_word_embedding_grads", ("model", "config")), wrap)]


def _count(session: Session, nbytes: int) -> None:
    """The embedding's whole way: over the replicas (else a part of its bucket) and over the pair of stages."""
    assert session.grid is not None
    raw = unfused_bytes(nbytes, session.grid.data_parallel)
    fused = session.embedding
    sent = raw if fused is None else all_reduce_bytes(nbytes, fused.ranks)
    session.traffic.add(TrafficClass.EMBEDDING, raw=raw, sent=sent)
