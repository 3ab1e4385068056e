"""Forecast of the length of exact messages, from Megatron's flags of the learning rate."""

import math
from typing import Any

from optimus_cc_ext.compressors.formats import EXACT_FORECAST

_IN_THE_MEAN = {"constant": 1.0, "WSD": 1.0, "inverse-square-root": 0.2}
"""Mean learning rate of a run between the least and the highest one, by the style of its decay; other styles: 1/2. A
warm-up changes little of it, but for the inverse square root, whose bits are off by up to 30 %, and all others by 10 %.
"""

_DEVIATION = 0.02
"""Megatron's own standard deviation of a model's first weights."""


def exact_bits(rate: float, deviation: float = _DEVIATION, *, half: bool = False) -> float:
    """Return the bits of a value in exact messages at a learning rate.

    They are one bit, a tenth for tables, and one more for each doubling of the step where steps are long.
    Adam moves all values by about the same part of the rate, and a value's last place grows with its size. The factor
    fits the rows of docs/exact-bits.csv. Without clipping of gradients, it was up to a quarter too high.

    Args:
        deviation: standard deviation of the model's first weights.
        half: True for fp16, whose last places are an eighth of those of bf16.
    """
    return 1.1 + math.log2(1 + (2000 if half else 250) * rate / deviation)


def exact_forecast(options: Any) -> tuple[float, float]:
    """Return the bits of a value in exact messages, in the mean of a run and at the learning rate's peak.

    Args:
        options: Megatron's options by the names of its flags; without a learning rate, nothing is known of the run.
    """
    rate, least, style, deviation = (
        getattr(options, name, None) for name in ("lr", "min_lr", "lr_decay_style", "init_method_std")
    )
    if not rate:
        return EXACT_FORECAST
    mean = (least or 0.0) + _IN_THE_MEAN.get(str(style), 0.5) * (rate - (least or 0.0))
    half = bool(getattr(options, "fp16", False))
    mean_bits, peak_bits = (exact_bits(each, deviation or _DEVIATION, half=half) for each in (mean, rate))
    return mean_bits, peak_bits
