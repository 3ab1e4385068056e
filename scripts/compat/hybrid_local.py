"""A hybrid model of Megatron's local attention and MLP layers, for CPUs: `--spec scripts.compat.hybrid_local spec`."""

import importlib

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

__all__ = ["spec"]

try:
    _stacks, _kind = importlib.import_module("megatron.core.models.hybrid.hybrid_block"), "Hybrid"
except ImportError:  # before 0.19
    _stacks, _kind = importlib.import_module("megatron.core.ssm.mamba_block"), "Mamba"
_stacks.TENorm = WrappedTorchNorm  # type: ignore[attr-defined]
_layer = get_gpt_layer_local_spec(normalization="LayerNorm").submodules
_attention = TransformerLayerSubmodules(
    input_layernorm=_layer.input_layernorm, self_attention=_layer.self_attention, self_attn_bda=_layer.self_attn_bda
)
_mlp = TransformerLayerSubmodules(pre_mlp_layernorm=_layer.pre_mlp_layernorm, mlp=_layer.mlp, mlp_bda=_layer.mlp_bda)
spec = ModuleSpec(
    module=getattr(_stacks, f"{_kind}Stack"),
    submodules=getattr(_stacks, f"{_kind}StackSubmodules")(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=_attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=_mlp),
    ),
)
