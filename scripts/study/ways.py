"""Training that compresses only some of the four ways of experts' tokens, and writes down where the tokens went.

torchrun ... -m optimus_cc_ext scripts/study/ways.py WAYS FOLDER <Megatron's flags>

WAYS are names of `WAYS` with commas between, or none. FOLDER gets the routes of each rank's tokens at all layers.
"""

import functools
import sys
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from optimus_cc_ext.hooks import token_dispatcher
from optimus_cc_ext.techniques.expert_rows import ExpertRows, RowExchange
from optimus_cc_ext.tools import pretrain_gpt

WAYS = ("dispatch-forward", "combine-forward", "dispatch-backward", "combine-backward")
"""Ways of a token: to the experts and back, in the forward pass, and of its gradient, in the backward pass."""


def compress_only(ways: Collection[str]) -> None:
    """Compress tokens on `ways` only; leave the other ways dense."""
    running: list[str] = []

    def noting(name: str) -> None:
        original = getattr(MoEAlltoAllTokenDispatcher, f"token_{name}")

        @functools.wraps(original)
        def noted(*args: Any, **kwargs: Any) -> Any:
            running.append(name)
            try:
                return original(*args, **kwargs)
            finally:
                running.pop()

        setattr(MoEAlltoAllTokenDispatcher, f"token_{name}", noted)

    def chosen(technique: ExpertRows, direction: str) -> ExpertRows:
        named = f"{running[-1]}-{direction}" in ways
        dense = technique.config.replace(**{technique.traffic.format_field: "dense"})
        return technique if named else ExpertRows(dense, technique.traffic)

    def apply(rows: torch.Tensor, forward: ExpertRows, backward: ExpertRows, *rest: Any) -> Any:
        return RowExchange.apply(rows, chosen(forward, "forward"), chosen(backward, "backward"), *rest)

    for name in ("dispatch", "combine"):
        noting(name)
    token_dispatcher.RowExchange = SimpleNamespace(apply=apply)  # type: ignore[assignment, misc]


def keep_routes(routes: list[torch.Tensor]) -> None:
    """Append where the tokens of each layer and micro-batch go, (tokens, experts), to `routes`."""
    original = TopKRouter.forward

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        routes.append(result[1].detach().cpu())
        return result

    TopKRouter.forward = routed


if __name__ == "__main__":
    script, ways, folder, *flags = sys.argv
    sys.argv = [script, *flags]
    routes: list[torch.Tensor] = []
    compress_only(ways.split(","))
    keep_routes(routes)
    pretrain_gpt.main()
    torch.save(routes, Path(folder) / f"routes{torch.distributed.get_rank()}.pt")
