"""The Megatron flags that a run on a CPU needs, as defaults of Megatron's own parser."""

from __future__ import annotations

import argparse
from types import MappingProxyType
from typing import Any

__all__ = ["CPU_DEFAULTS", "apply_cpu_defaults"]

# Destination in Megatron's parser -> value. The fused kernels need CUDA, Apex or Transformer Engine.
CPU_DEFAULTS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "no_persist_layer_norm": True,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
)


def apply_cpu_defaults(parser: argparse.ArgumentParser) -> list[str]:
    """Set in ``parser`` (Megatron's) the defaults that a CPU needs; a flag on the command line still wins.

    Returns one ``name=value`` per default that was changed. A destination that this Megatron does not have is
    left out.
    """
    changed = []
    for name, value in CPU_DEFAULTS.items():
        actions = [action for action in parser._actions if action.dest == name]
        if actions and parser.get_default(name) != value:
            parser.set_defaults(**{name: value})
            changed.append(f"{name}={value}")
    return changed
