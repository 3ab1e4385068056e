"""Torch's Adam under Megatron's distributed optimizer, as far as checkpoints of it need it.

With Apex or Transformer Engine, as on every GPU machine that trains with Megatron, Adam counts its steps per group
of parameters. Torch's Adam counts them per parameter, in tensors that it makes in the first step. Megatron knows of
the difference in some places only; in the others, a distributed optimizer on a CPU cannot be loaded, or goes on
with another step count than it was saved with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["AROUND"]

_COUNT = "step"


def _count_from_the_start(state_dict: Callable[..., Any], self: Any) -> Any:
    # Loading asks for the step count before any step was made.
    if _is_torchs(self.optimizer) and not self.optimizer.state:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {_COUNT: torch.zeros(()), **moments}
    return state_dict(self)


def _count_for_each(load_state_dict: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # Megatron gives one tensor to all parameters, which each of them would count up.
    _without_gradients(load_state_dict, self, *args, **kwargs)
    if _is_torchs(self.optimizer):
        for state in self.optimizer.state.values():
            state[_COUNT] = state[_COUNT].clone()


def _without_count(get_states: Callable[..., dict[str, Any]], self: Any, model_param: Any) -> dict[str, Any]:
    # It would be saved as one more shard of the parameter's size; it is saved with the group already.
    tensors = get_states(self, model_param)
    return {name: tensor for name, tensor in tensors.items() if name != _COUNT or not _is_torchs(self.optimizer)}


def _leave_count(set_states: Callable[..., None], self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    set_states(self, model_param, {_COUNT: None, **tensors} if _is_torchs(self.optimizer) else tensors)


def _without_gradients(load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # fp32 parameters are their own main parameters: leaves that require gradients, and are copied into.
    with torch.no_grad():
        load(*args, **kwargs)


def _is_torchs(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


AROUND: dict[str, Callable[..., Any]] = {
    "state_dict": _count_from_the_start,
    "load_state_dict": _count_for_each,
    "load_parameter_state": _without_gradients,
    "_get_main_param_and_optimizer_states": _without_count,
    "_set_main_param_and_optimizer_states": _leave_count,
}
"""By method of Megatron's DistributedOptimizer: what is called around it."""
