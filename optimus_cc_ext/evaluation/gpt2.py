"""A whole Megatron GPT's parameters -> those of Hugging Face's GPT2LMHeadModel. Pure functions.

The two differ in names; in linear layers, which GPT-2 keeps as [in, out] (Megatron: [out, in]); and in the joint
projection of queries, keys and values, which Megatron orders by heads and GPT-2 by kind.
"""

from typing import Any

import torch

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.evaluation.architecture import Architecture
from optimus_cc_ext.evaluation.merge import Weights

__all__ = ["gpt2_config", "gpt2_weights"]

_LAYER = {
    "input_layernorm.weight": "ln_1.weight",
    "input_layernorm.bias": "ln_1.bias",
    "self_attention.linear_qkv.weight": "attn.c_attn.weight",
    "self_attention.linear_qkv.bias": "attn.c_attn.bias",
    "self_attention.linear_proj.weight": "attn.c_proj.weight",
    "self_attention.linear_proj.bias": "attn.c_proj.bias",
    "pre_mlp_layernorm.weight": "ln_2.weight",
    "pre_mlp_layernorm.bias": "ln_2.bias",
    "mlp.linear_fc1.weight": "mlp.c_fc.weight",
    "mlp.linear_fc1.bias": "mlp.c_fc.bias",
    "mlp.linear_fc2.weight": "mlp.c_proj.weight",
    "mlp.linear_fc2.bias": "mlp.c_proj.bias",
}
_REST = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}


def gpt2_config(model: Architecture, *, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """Arguments of transformers.GPT2Config; `end_of_text` is the id of the token that stands between documents."""
    return {
        "vocab_size": vocab_size,
        "n_positions": model.positions,
        "n_embd": model.hidden_size,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.feed_forward_size,
        "activation_function": model.gelu,
        "layer_norm_epsilon": model.norm_epsilon,
        "resid_pdrop": model.hidden_dropout,
        "embd_pdrop": model.hidden_dropout,
        "attn_pdrop": model.attention_dropout,
        "tie_word_embeddings": model.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def gpt2_weights(weights: Weights, model: Architecture, *, vocab_size: int) -> Weights:
    """The state dict of GPT2LMHeadModel, without Megatron's padding of the vocabulary; dtypes stay.

    `weights` are named as merge.py says. Raises FlagError if a parameter is missing, unknown or of another shape.
    """
    names = _names(model)
    _check(weights, model, set(names))
    converted = {new: _converted(old, weights[old], model.heads) for old, new in names.items()}
    for name in ("transformer.wte.weight", "lm_head.weight"):
        if name in converted:
            converted[name] = converted[name][:vocab_size].clone()
    if model.tied:
        converted["lm_head.weight"] = converted["transformer.wte.weight"]
    return converted


def _names(model: Architecture) -> dict[str, str]:
    rest = {old: new for old, new in _REST.items() if old != "output_layer.weight" or not model.tied}
    return rest | {
        f"decoder.layers.{number}.{old}": f"transformer.h.{number}.{new}"
        for number in range(model.layers)
        for old, new in _LAYER.items()
    }


def _check(weights: Weights, model: Architecture, expected: set[str]) -> None:
    cure = "Give a checkpoint as Megatron's pretrain_gpt.py saves it, with the arguments that it was trained with"
    if unknown := sorted(set(weights) - expected):
        reason = f"holds parameters that GPT-2 does not have, such as {unknown[0]}"
        raise FlagError("--checkpoint", reason, cure)
    if missing := sorted(expected - set(weights)):
        raise FlagError("--checkpoint", f"lacks {len(missing)} of a GPT-2's parameters, such as {missing[0]}", cure)
    hidden = model.hidden_size
    shapes = {
        "word_embeddings.weight": (model.padded_vocab_size, hidden),
        "output_layer.weight": (model.padded_vocab_size, hidden),
        "position_embeddings.weight": (model.positions, hidden),
        "linear_qkv.weight": (3 * hidden, hidden),
        "linear_proj.weight": (hidden, hidden),
        "linear_fc1.weight": (model.feed_forward_size, hidden),
        "linear_fc2.weight": (hidden, model.feed_forward_size),
    }
    for name, value in weights.items():
        wanted = shapes.get(".".join(name.split(".")[-2:]))
        if wanted is not None and tuple(value.shape) != wanted:
            found = f"{name} has the shape {tuple(value.shape)}; its saved arguments say {wanted}"
            raise FlagError("--checkpoint", found, cure)


def _converted(name: str, value: torch.Tensor, heads: int) -> torch.Tensor:
    if ".linear_qkv." in name:
        value = _by_kind(value, heads)
    if ".linear_" in name and name.endswith(".weight"):
        value = value.t()
    return value.contiguous()


def _by_kind(value: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads x (query, key, value) x head size, ...] -> [(query, key, value) x heads x head size, ...]."""
    by_head = value.reshape(heads, 3, -1, *value.shape[1:])
    return by_head.transpose(0, 1).reshape(value.shape)
