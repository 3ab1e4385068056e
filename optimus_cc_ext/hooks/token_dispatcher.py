"""Wraps megatron/core/transformer/moe/token_dispatcher.py: compresses the all-to-all of a mixture's tokens.

The wrap is around the name `all_to_all` of this module, because other modules of Megatron use the function for other
traffic. The dispatcher `alltoall` calls it for rows of tokens, and for their probabilities, which stay dense.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.patching import around
from optimus_cc_ext.techniques.expert_rows import RowExchange

_TARGET = "megatron.core.transformer.moe.token_dispatcher:all_to_all"


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    parameters = ("group", "input_", "output_split_sizes_", "input_split_sizes")
    return [(Seam(_TARGET, parameters), around(_all_to_all, sessions))]


def _all_to_all(
    sessions: Sessions, original: Callable[..., Any], group: torch.distributed.ProcessGroup, input_: torch.Tensor,
    output_split_sizes_: Any = None, input_split_sizes: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    """Exchange tokens or probabilities; compress tokens that belong to an open pass of a session."""
    session = sessions.with_experts_on(group) if group.size() > 1 else None
    if session is None:
        return original(group, input_, output_split_sizes_, input_split_sizes, **rest)
    received, sent = _numbers(output_split_sizes_), _numbers(input_split_sizes)
    equal = [input_.shape[0] // group.size()] * group.size()
    forward, backward = session.rows
    forward.count(session.traffic, input_, group, sent or equal)
    backward.seen |= forward.seen
    # Without gradients, in the first forward pass of a recomputed layer, no backward pass follows.
    if torch.is_grad_enabled() and input_.requires_grad:
        backward.count(session.traffic, input_, group, received or equal)
    if forward.codec_of(input_) is None and backward.codec_of(input_) is None:
        return original(group, input_, output_split_sizes_, input_split_sizes, **rest)
    return RowExchange.apply(input_, forward, backward, group, received, sent)


def _numbers(splits: Any) -> Sequence[int] | None:
    """Return Megatron's split sizes, a NumPy array or a list on the host, as numbers; None: all parts are equal."""
    return None if splits is None else [int(size) for size in splits]
