"""Conversion of a whole Megatron GPT to Hugging Face's GPT2LMHeadModel: its configuration and its parameters. Pure
functions.

Parameters differ in names; in linear layers, which GPT-2 keeps as [in, out] (Megatron: [out, in]); and in the joint
projection of queries, keys and values, which Megatron orders by heads and GPT-2 by kind.
"""

import argparse
from typing import Any

import torch

from optimus_cc_ext.errors import FlagError
from scripts.eval.merge import Weights

# GPT-2 fixes these values of Megatron's arguments. Some change the forward pass without adding or removing a parameter;
# the others are listed so that the error names a flag rather than a parameter. An argument that a checkpoint lacks
# cannot have been set.
_OFF = (
    *("layernorm_zero_centered_gamma", "apply_layernorm_1p", "apply_residual_connection_post_layernorm", "swiglu"),
    *("squared_relu", "quick_geglu", "qk_layernorm", "qk_l2_norm", "attention_output_gate", "multi_latent_attention"),
    # Transformer Engine chooses which gelu these two run, and the checkpoint does not show it.
    *("use_te_activation_func", "use_transformer_engine_op_fuser", "use_mup"),
)
_UNSET = (
    *("window_size", "experimental_attention_variant", "num_experts", "mtp_num_layers", "spec"),
    *("hybrid_layer_pattern", "hybrid_override_pattern", "heterogeneous_layers_config_path"),
)
_NEEDED: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "softmax_type": "vanilla",
    "add_position_embedding": True,
    "add_bias_linear": True,
    **dict.fromkeys(_OFF, False),
    **dict.fromkeys(_UNSET),
}
_FLAGS = {
    "add_position_embedding": "--no-position-embedding",
    "add_bias_linear": "--disable-bias-linear",
    "layernorm_zero_centered_gamma": "--apply-layernorm-1p",
}
_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}
_REST = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
}


def gpt2_config(args: argparse.Namespace, *, vocab_size: int, end_of_text: int | None) -> dict[str, Any]:
    """Return the arguments of transformers.GPT2Config for the model that Megatron built from the checkpoint's `args`.

    `end_of_text` is the id of the token that stands between documents. Raises FlagError for an architecture that is not
    GPT-2's: the message names the flags it was trained with.
    """
    flags = []
    for name, needed in _NEEDED.items():
        value = getattr(args, name, needed)
        if value != needed:
            flag = _FLAGS.get(name, "--" + name.replace("_", "-"))
            flags.append(flag if isinstance(needed, bool) else f"{flag} {value}")
    # Megatron writes the number of heads as the number of groups if no groups were asked for.
    groups = getattr(args, "num_query_groups", None) or args.num_attention_heads
    if getattr(args, "group_query_attention", False) and groups != args.num_attention_heads:
        flags.append(f"--group-query-attention --num-query-groups {groups}")
    head_size = getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads
    if head_size * args.num_attention_heads != args.hidden_size:
        flags.append(f"--kv-channels {head_size}")
    if flags:
        raise FlagError(
            "--checkpoint",
            f"the model was trained with {', '.join(dict.fromkeys(flags))}, which Hugging Face's GPT-2 does not have",
            "Only learned positions, LayerNorm before each sublayer, gelu, biases and full attention make a GPT-2;"
            " convert this model with a tool for its own architecture",
        )
    return {
        "vocab_size": vocab_size,
        "n_positions": args.max_position_embeddings,
        "n_embd": args.hidden_size,
        "n_layer": args.num_layers,
        "n_head": args.num_attention_heads,
        "n_inner": args.ffn_hidden_size,
        # Megatron fuses bias and gelu by default, and the fused gelu is the approximation by a tanh:
        # fused_bias_gelu.py.
        "activation_function": "gelu_new" if args.bias_gelu_fusion else "gelu",
        "layer_norm_epsilon": args.layernorm_epsilon if hasattr(args, "layernorm_epsilon") else args.norm_epsilon,
        "resid_pdrop": args.hidden_dropout,
        "embd_pdrop": args.hidden_dropout,
        "attn_pdrop": args.attention_dropout,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def padded_vocab_size(args: argparse.Namespace, vocab_size: int) -> int:
    """Return the rows of the embedding that Megatron makes for `vocab_size` tokens, to split it over tensor-parallel
    ranks.
    """
    if not getattr(args, "pad_vocab_size", True):
        return vocab_size
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-vocab_size // multiple) * multiple)


def gpt2_weights(weights: Weights, config: dict[str, Any]) -> Weights:
    """Return the state dict of GPT2LMHeadModel, without Megatron's padding of the vocabulary; dtypes stay.

    `weights` have the names of merge.py, and `config` is the result of gpt2_config. Raises FlagError if a parameter is
    missing or unknown; shapes are compared when the state dict is loaded.
    """
    names = _REST if config["tie_word_embeddings"] else {**_REST, "output_layer.weight": "lm_head.weight"}
    names = names | {
        f"decoder.layers.{number}.{old}.{kind}": f"transformer.h.{number}.{new}.{kind}"
        for number in range(config["n_layer"])
        for old, new in _LAYER.items()
        for kind in ("weight", "bias")
    }
    cure = "Give a checkpoint as Megatron's pretrain_gpt.py saves it, with the arguments that it was trained with"
    if unknown := sorted(weights.keys() - names.keys()):
        reason = f"holds parameters that GPT-2 does not have, such as {unknown[0]}"
        raise FlagError("--checkpoint", reason, cure)
    if missing := sorted(names.keys() - weights.keys()):
        raise FlagError("--checkpoint", f"lacks {len(missing)} of a GPT-2's parameters, such as {missing[0]}", cure)
    converted = {new: _converted(old, weights[old], config) for old, new in names.items()}
    converted.setdefault("lm_head.weight", converted["transformer.wte.weight"])
    return converted


def _converted(name: str, value: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return value[: config["vocab_size"]].clone()
    if ".linear_qkv." in name:
        # Megatron orders rows as [heads x (query, key, value) x head size], GPT-2 as [(query, key, value) x heads x
        # head size].
        by_head = value.unflatten(0, (config["n_head"], 3, -1))
        value = by_head.transpose(0, 1).reshape(value.shape)
    if ".linear_" in name and name.endswith(".weight"):
        value = value.t()
    return value.contiguous()
