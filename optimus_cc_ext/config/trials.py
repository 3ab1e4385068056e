"""Rules of a trial, which a run makes (techniques/trial.py) and a plan foresees: the classes, and the least gain."""

from collections.abc import Collection

from optimus_cc_ext.config import classes
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.config.optimus_config import OptimusConfig

LEAST_GAIN = 0.025
"""Share of the dense seconds that compression has to save."""


def on_trial(config: OptimusConfig, inside: Collection[TrafficClass] = ()) -> frozenset[TrafficClass]:
    """Return the classes that are dense in one way and compressed in the other; none: there is no trial.

    They are those that a preset alone asks for, and gradients whose stages are `auto`. Low rank has state, which a
    dense step would not carry on.

    Args:
        inside: the classes that stay dense because nothing of them leaves a node.
    """
    on = [traffic for traffic in classes.CLASSES if config.is_on(traffic)]
    if not config.compression_trial or any(config.format_of(traffic) == "low-rank" for traffic in on):
        return frozenset()
    tried = {traffic for traffic in on if config.only_by_preset(traffic)}
    if classes.DP_GRADIENTS in on and config.dp_compression_stages == "auto":
        tried.add(classes.DP_GRADIENTS)
    elif classes.DP_GRADIENTS in on and classes.DP_GRADIENTS not in tried:
        # The reducers of gradients that are compressed in both ways leave the tied embedding out.
        tried.discard(classes.EMBEDDING)
    return frozenset(tried.difference(inside))
