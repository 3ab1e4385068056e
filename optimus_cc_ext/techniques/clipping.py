"""What was clipped is remembered clipped: an outlier must not live on in the residuals at the size that it came with.

Residuals take gradients before they are clipped. A step whose gradients clipping shrank more than usual leaves
residuals that are shrunk by the same factor.
"""

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["MAIN_NORM_GROUP", "UsualClipping", "clip_coefficient"]

MAIN_NORM_GROUP = "main"
"""The parameters that Megatron clips by the norm that it logs; others have a `grad_norm_group`."""

_WEIGHT = 0.05
_BOUND = math.log(2.0)


def clip_coefficient(clip_grad: float, norm: float | None) -> float:
    """What Megatron multiplies gradients of this norm by, under `--clip-grad clip_grad` (0: it does not clip)."""
    if clip_grad <= 0.0 or norm is None:
        return 1.0
    if math.isnan(norm):
        return 0.0
    return min(1.0, clip_grad / (float(norm) + 1e-6))


class UsualClipping:
    """The usual clip coefficient: a running mean of logarithms, in which no step counts as further out than twice."""

    def __init__(self) -> None:
        self._log: float | None = None

    def shrinkage(self, coefficient: float) -> float:
        """By what the residuals of a step with this clip coefficient are multiplied; the step counts from now on."""
        if coefficient == 0.0:  # the norm was not finite: nothing of that step is kept anyway
            return 1.0
        log = math.log(coefficient)
        if self._log is None:
            self._log = log
        away = log - self._log
        self._log += _WEIGHT * max(-_BOUND, min(_BOUND, away))
        return min(1.0, math.exp(away))

    @property
    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it."""
        return {"log": self._log}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "UsualClipping":
        """What `state` was of."""
        usual = cls()
        usual._log = state["log"]
        return usual
