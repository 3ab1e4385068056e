"""Is this checkpoint's model a GPT-2? Read from the arguments that Megatron saves with it; what is not is named."""

import argparse
from dataclasses import dataclass
from typing import Any, Literal

from optimus_cc_ext.errors import FlagError

__all__ = ["Architecture", "architecture_of", "padded_to"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """A GPT-2, in numbers."""

    layers: int
    hidden_size: int
    heads: int
    feed_forward_size: int
    positions: int
    padded_vocab_size: int
    """Rows of the word embedding in the checkpoint."""
    vocab_multiple: int
    """Megatron rounded the tokenizer's size up to a multiple of it; 1 where it was told not to."""
    norm_epsilon: float
    gelu: Literal["gelu", "gelu_new"]
    """Hugging Face's name: the exact one, or its approximation by a tanh."""
    tied: bool
    """Whether the output layer is the word embedding."""
    hidden_dropout: float
    attention_dropout: float


@dataclass(frozen=True, slots=True)
class _Need:
    """What one of Megatron's arguments must be; an argument that a checkpoint does not have cannot have been set."""

    name: str
    value: Any
    flag: str


# Only what changes the forward pass without adding or removing a parameter has to be here; the others are here for
# an error that names a flag rather than a parameter.
_NEEDS = (
    _Need("position_embedding_type", "learned_absolute", "--position-embedding-type {}"),
    _Need("add_position_embedding", True, "--no-position-embedding"),
    _Need("normalization", "LayerNorm", "--normalization {}"),
    _Need("layernorm_zero_centered_gamma", False, "--apply-layernorm-1p"),
    _Need("apply_layernorm_1p", False, "--apply-layernorm-1p"),
    _Need("apply_residual_connection_post_layernorm", False, "--apply-residual-connection-post-layernorm"),
    _Need("add_bias_linear", True, "--disable-bias-linear"),
    _Need("swiglu", False, "--swiglu"),
    _Need("squared_relu", False, "--squared-relu"),
    _Need("quick_geglu", False, "--quick-geglu"),
    # Which gelu these run is Transformer Engine's choice, not visible in the checkpoint.
    _Need("use_te_activation_func", False, "--use-te-activation-func"),
    _Need("use_transformer_engine_op_fuser", False, "--use-transformer-engine-op-fuser"),
    _Need("qk_layernorm", False, "--qk-layernorm"),
    _Need("qk_l2_norm", False, "--qk-l2-norm"),
    _Need("attention_output_gate", False, "--attention-output-gate"),
    _Need("softmax_type", "vanilla", "--softmax-type {}"),
    _Need("window_size", None, "--window-size {}"),
    _Need("multi_latent_attention", False, "--multi-latent-attention"),
    _Need("experimental_attention_variant", None, "--experimental-attention-variant {}"),
    _Need("num_experts", None, "--num-experts {}"),
    _Need("mtp_num_layers", None, "--mtp-num-layers {}"),
    _Need("hybrid_layer_pattern", None, "--hybrid-layer-pattern {}"),
    _Need("hybrid_override_pattern", None, "--hybrid-override-pattern {}"),
    _Need("heterogeneous_layers_config_path", None, "--heterogeneous-layers-config-path {}"),
    _Need("use_mup", False, "--use-mup"),
    _Need("spec", None, "--spec {}"),
)


def architecture_of(args: argparse.Namespace) -> Architecture:
    """The architecture that Megatron built from `args`, as saved in its checkpoint.

    Raises FlagError for one that Hugging Face's GPT-2 is not: the message names the flags it was trained with.
    """
    odd = [need for need in _NEEDS if getattr(args, need.name, need.value) != need.value]
    flags = [need.flag.format(getattr(args, need.name)) for need in odd]
    # Megatron writes the number of heads where no groups were asked for.
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
    pads = getattr(args, "pad_vocab_size", True)
    return Architecture(
        layers=args.num_layers,
        hidden_size=args.hidden_size,
        heads=args.num_attention_heads,
        feed_forward_size=args.ffn_hidden_size,
        positions=args.max_position_embeddings,
        padded_vocab_size=args.padded_vocab_size,
        vocab_multiple=args.make_vocab_size_divisible_by * args.tensor_model_parallel_size if pads else 1,
        norm_epsilon=args.layernorm_epsilon if hasattr(args, "layernorm_epsilon") else args.norm_epsilon,
        # Megatron fuses bias and gelu by default, and the fused one is the approximation: fused_bias_gelu.py.
        gelu="gelu_new" if args.bias_gelu_fusion else "gelu",
        tied=not args.untie_embeddings_and_output_weights,
        hidden_dropout=args.hidden_dropout,
        attention_dropout=args.attention_dropout,
    )


def padded_to(vocab_size: int, multiple: int) -> int:
    """`vocab_size` rounded up to a multiple, as Megatron does to split it evenly over tensor-parallel ranks."""
    return -(-vocab_size // multiple) * multiple
