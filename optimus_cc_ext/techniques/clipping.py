"""Scale residuals by the step's clip factor, so that an outlier gradient does not dominate them for many steps.

Residuals contain gradients from before clipping. If clipping scales a step's gradients down more than usual, the
residuals of that step are scaled by the same factor relative to the usual one.
"""

import math
from collections.abc import Mapping
from typing import Any

MAIN_NORM_GROUP = "main"
"""Name of the parameters that Megatron clips by the norm in its log; other parameters have a `grad_norm_group`."""

_WEIGHT = 0.05
_BOUND = math.log(2.0)


def clip_coefficient(clip_grad: float, norm: float | None) -> float:
    """Return the factor by which Megatron scales gradients of this norm under `--clip-grad clip_grad` (0: 1, no
    clipping).
    """
    if clip_grad <= 0.0 or norm is None:
        return 1.0
    if math.isnan(norm):
        return 0.0
    return min(1.0, clip_grad / (float(norm) + 1e-6))


class UsualClipping:
    """Running mean of log(clip coefficient). One step contributes at most a factor of two."""

    def __init__(self) -> None:
        self._log: float | None = None

    def shrinkage(self, coefficient: float) -> float:
        """Return the factor for the residuals of a step with this clip coefficient, and include the step in the
        mean.
        """
        if coefficient == 0.0:  # a step whose norm is not finite leaves no residuals
            return 1.0
        log = math.log(coefficient)
        if self._log is None:
            self._log = log
        away = log - self._log
        self._log += _WEIGHT * max(-_BOUND, min(_BOUND, away))
        return min(1.0, math.exp(away))

    @property
    def state(self) -> dict[str, Any]:
        """Running mean in the form in which checkpoints store it."""
        return {"log": self._log}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> "UsualClipping":
        """Rebuild the running mean from a checkpointed `state`."""
        usual = cls()
        usual._log = state["log"]
        return usual
