"""Law: routed experts are recognised by Megatron's treatment of them, whatever a model calls them."""

import torch
from torch import nn

from optimus_cc_ext.hooks.distributed_data_parallel import _expert_parameters


def _layer(experts: nn.Module | None) -> nn.Module:
    """Make Megatron's layer, without the sizes and groups that it would need to compute."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    layer = MoELayer.__new__(MoELayer)
    nn.Module.__init__(layer)
    layer.router, layer.experts = nn.Linear(2, 2), experts
    return layer


def test_by_megatrons_mark_and_by_its_layer_and_not_by_name():
    torch.manual_seed(0)
    routed, own = nn.Linear(2, 3), nn.Linear(2, 4)
    for parameter in own.parameters():
        parameter.allreduce = False
    model = nn.ModuleDict(
        {"ffn": _layer(routed), "no_experts_yet": _layer(None), "mine": own,
         "board": nn.ModuleDict({"experts": nn.ModuleDict({"0": nn.Linear(2, 5)})})}
    )  # fmt: skip
    assert ".experts." in " ".join(name for name, _ in model["board"].named_parameters(prefix="board"))
    assert _expert_parameters(model) == {*routed.parameters(), *own.parameters()}
