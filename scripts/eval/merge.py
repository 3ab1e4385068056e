"""Merge of many ranks' weights into one model's: tensor-parallel shards, pipeline stages, stacked layers. Pure
functions.

All functions take and return dictionaries from Megatron's parameter names to tensors. In the result, layers are
numbered over the whole model, `decoder.layers.<number>.<rest>`, and norms have the names of Megatron's local
implementation (Transformer Engine's layers hold a norm inside the linear layer that follows it).
"""

import re
from collections.abc import Sequence

import torch

from optimus_cc_ext.errors import FlagError

Weights = dict[str, torch.Tensor]

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_STACKED = re.compile(r"decoder\.layers\.(?!\d)(.+)")
_NORMS = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
# Dimensions that Megatron splits over tensor-parallel ranks; all other parameters are replicas.
_SPLIT_ROWS = re.compile(r"(word_embeddings|output_layer|linear_qkv|linear_fc1)\.(weight|bias)$")
_SPLIT_COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")


def with_local_names(weights: dict[str, object]) -> Weights:
    """Return tensors under one set of names, without Transformer Engine's extra state (`_extra_state`)."""
    renamed: Weights = {}
    for name, value in weights.items():
        if name.endswith("_extra_state") or not isinstance(value, torch.Tensor):
            continue
        for fused, local in _NORMS:
            name = name.replace(fused, local)
        renamed[name] = value
    return renamed


def merge_tensor_ranks(ranks: Sequence[Weights]) -> Weights:
    """Merge one stage's parameters from its tensor-parallel ranks, in rank order.

    Raises FlagError if replicas differ, because then it is unknown which of them is the model's.
    """
    return {name: _merge(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def _merge(name: str, shards: list[torch.Tensor]) -> torch.Tensor:
    if len(shards) == 1:
        return shards[0]
    if _SPLIT_ROWS.search(name):
        return torch.cat(shards, dim=0)
    if _SPLIT_COLUMNS.search(name):
        return torch.cat(shards, dim=1)
    if any(not torch.equal(shards[0], other) for other in shards[1:]):
        raise _replicas_differ(name, "tensor-parallel ranks")
    return shards[0]


def join_stages(stages: Sequence[Weights], *, tied: bool) -> Weights:
    """Join the stages, in the order in which a token passes them, into the whole model; each stage numbers its layers
    from 0.

    With interleaved stages that order is: the first chunk of all stages, then the second chunk of all, and so on. The
    last stage's copy of a tied embedding is left out. Raises FlagError if it differs from the first stage's embedding.
    """
    joined: Weights = {}
    first_layer = 0
    for stage in stages:
        numbers = {int(match[1]) for match in map(_LAYER.match, stage) if match}
        for name, value in stage.items():
            match = _LAYER.match(name)
            joined[f"decoder.layers.{first_layer + int(match[1])}.{match[2]}" if match else name] = value
        first_layer += len(numbers)
    if tied and (copy := joined.pop("output_layer.weight", None)) is not None:
        original = joined.get("embedding.word_embeddings.weight")
        if original is not None and not torch.equal(copy, original):
            raise _replicas_differ("the tied word embedding", "first and the last stage")
    return joined


def unstack_layers(weights: Weights) -> Weights:
    """Return one tensor per layer, in place of the distributed format's one tensor [layers, ...] for all."""
    unstacked: Weights = {}
    for name, value in weights.items():
        if match := _STACKED.match(name):
            unstacked |= {f"decoder.layers.{number}.{match[1]}": layer for number, layer in enumerate(value.unbind(0))}
        else:
            unstacked[name] = value
    return unstacked


def _replicas_differ(parameter: str, where: str) -> FlagError:
    return FlagError(
        "--checkpoint",
        f"the {where} hold different copies of {parameter}, so that the checkpoint is not one model",
        "Take another iteration: training went wrong before this one was saved, or its files were mixed up",
    )
