"""Shadow calls: every dispatch that goes once a node is compared with Megatron's own all-to-all of the same tensor."""

from __future__ import annotations

from typing import Any

import torch

_shadowed: list[int] = []


def shadow_dispatches() -> None:
    """Compare every dispatch that goes once a node with Megatron's own."""
    from optimus_cc_ext.hooks import token_dispatcher

    taken_over = token_dispatcher._all_to_all

    def with_shadow(
        sessions: Any, hops: Any, original: Any, group: Any, input_: torch.Tensor, received: Any, sent: Any, **rest: Any
    ) -> Any:
        result = taken_over(sessions, hops, original, group, input_, received, sent, **rest)
        dispatcher, combines = hops._calls.dispatcher, hops._calls.combines
        if not combines and input_.dim() == 2 and hops._ways.get(dispatcher) is not None:
            assert torch.equal(result.detach(), original(group, input_.detach(), received, sent, **rest))
            _shadowed.append(input_.shape[0])
        return result

    token_dispatcher._all_to_all = with_shadow


def shadowed(*_: Any) -> list[int]:
    """Return the numbers of rows of the dispatches that were compared (a probe)."""
    return _shadowed


def numbers_at_the_all_to_all() -> None:
    """Let dispatchers copy numbers of rows to the host where they do with partial CUDA graphs, whose replay sets their
    attributes anew: just before the all-to-all.
    """
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher as Dispatcher

    build = Dispatcher.__init__

    def built(self: Any, *args: Any, **kwargs: Any) -> None:
        build(self, *args, **kwargs)
        self.cuda_dtoh_point = "before_ep_alltoall"

    Dispatcher.__init__ = built


def experts_by_sequence() -> None:
    """Let a micro-batch choose --moe-router-topk experts a token in the mean: some tokens get more, and some fewer."""
    from megatron.core.transformer.moe import router

    def by_sequence(logits: torch.Tensor, topk: int, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = logits.softmax(1)
        chosen = scores.flatten().topk(logits.shape[0] * topk).indices
        routing = torch.zeros_like(scores, dtype=torch.bool).flatten().index_fill(0, chosen, True).view_as(scores)
        return scores * routing, routing

    router.topk_routing_with_score_function = by_sequence
