"""Training of a mixture of experts that also prints the load of the experts, with a control of the study on demand.

torchrun ... -m optimus_cc_ext scripts/study/experts.py MODE <flags>

MODE is `plain`; `noise`, which multiplies all values of tokens on their way to experts and back, and of their
gradients, by 1 + Gaussian noise of 1e-6; or `coded-validation`, which validates with tokens rounded to int8 on both
ways, as in training, while the product validates with dense tokens.
"""

import functools
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.training import get_args

from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.tools import pretrain_gpt
from scripts.study.noise import relative_noise

Rounding = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns changed rows of tokens."""


class _Noisy(torch.autograd.Function):
    """Noise on rows in the forward pass, and on their gradients in the backward pass."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        ctx.generator = generator
        return _with_noise(rows, generator)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _with_noise(*gradients, ctx.generator), None


def _with_noise(rows: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    noisy = rows.clone()
    relative_noise(noisy, generator)
    return noisy


def noise_in_training() -> Rounding:
    """Return the function that adds noise to rows in training."""

    @functools.cache
    def generator() -> torch.Generator:
        return torch.Generator().manual_seed(1_000_003 * get_args().seed + torch.distributed.get_rank())

    return lambda rows: _Noisy.apply(rows, generator()) if torch.is_grad_enabled() else rows


def coded_in_validation() -> Rounding:
    """Return the function that rounds rows to int8 outside of training."""

    @functools.cache
    def codec() -> Any:
        return fast_codec("int8", seed=get_args().seed, rotated=True)

    def rounded(rows: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            return rows
        decoded: torch.Tensor = codec().decode_rows(codec().encode_rows(rows.contiguous()), rows.dtype)
        return decoded

    return rounded


MODES: dict[str, Callable[[], Rounding | None]] = {
    "plain": lambda: None, "noise": noise_in_training, "coded-validation": coded_in_validation,
}  # fmt: skip


def change_rows(change: Rounding) -> None:
    """Apply `change` to all rows before they are sent. A row is encoded by itself, whichever rank receives it."""
    for name in ("token_dispatch", "token_combine"):
        original = getattr(MoEAlltoAllTokenDispatcher, name)

        @functools.wraps(original)
        def changed(self: Any, rows: torch.Tensor, *rest: Any, original: Any = original) -> Any:
            return original(self, change(rows), *rest)

        setattr(MoEAlltoAllTokenDispatcher, name, changed)


def note_loads(loads: list[float]) -> None:
    """Append the load of a layer in each forward pass of the training: the most tokens of an expert over the mean."""
    original = TopKRouter.forward

    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if torch.is_grad_enabled():
            tokens = result[1].detach().sum(0).float()
            loads.append(float(tokens.max() / tokens.mean()))
        return result

    TopKRouter.forward = routed


if __name__ == "__main__":
    script, mode, *flags = sys.argv
    sys.argv = [script, *flags]
    if change := MODES[mode]():
        change_rows(change)
    loads: list[float] = []
    note_loads(loads)
    pretrain_gpt.main()
    print(f"expert load in the second half: {statistics.fmean(loads[len(loads) // 2 :]):.4f}", flush=True)
