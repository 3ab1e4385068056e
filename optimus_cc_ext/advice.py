"""What a command line does that it does not show: flags without effect, and defaults that it inherits."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from optimus_cc_ext.config import (
    CompressedBackpropConfig,
    DataParallelCompressionConfig,
    FusedEmbeddingSyncConfig,
    OptimusConfig,
    flag_of,
)

__all__ = ["inherited", "without_effect"]

_TECHNIQUES = {
    "compressed_backprop": CompressedBackpropConfig,
    "fused_embedding_sync": FusedEmbeddingSyncConfig,
    "dp_compression": DataParallelCompressionConfig,
}


def without_effect(spelling: Mapping[str, str], config: OptimusConfig) -> Iterator[str]:
    """A line for each flag that does nothing.

    Args:
        spelling: by field, the flag that the user gave it by.
        config: what is done.
    """
    idle: dict[str, str] = {}
    working: set[str] = set()
    for technique, options in _TECHNIQUES.items():
        itself = (technique, f"{technique}_format")
        flags = [spelling[f.name] for f in dataclasses.fields(options) if f.name in spelling and f.name not in itself]
        if getattr(config, technique):
            working.update(flags)
        else:
            idle |= dict.fromkeys(flags, technique)
    # The artifact's --use_error_feedback is an option of two techniques.
    for flag, technique in idle.items():
        if flag not in working:
            yield f"{flag}: no effect: {flag_of(technique)} is off"
    low_rank = config.backprop_remembers or (config.dp_compression and config.dp_compression_format == "low-rank")
    if "low_rank_wire" in spelling and not low_rank:
        yield "--low-rank-wire: no effect: nothing is sent as low-rank"
    lep = config.lazy_error_propagation or not config.compressed_backprop
    if "residual_across_iterations" in spelling and not lep:
        yield "--residual-across-iterations: no effect: --lazy-error-propagation is off"


def inherited(defaults: Mapping[str, Any], spelling: Mapping[str, str], config: OptimusConfig) -> Iterator[str]:
    """A line that names which of `defaults` are in force although no flag says so, and ours are others."""
    ours = {field.name: field.default for field in dataclasses.fields(OptimusConfig)}
    # What the residual does has a line of its own.
    of_what_is_on = {f.name for name, t in _TECHNIQUES.items() if getattr(config, name) for f in dataclasses.fields(t)}
    of_what_is_on = of_what_is_on - {"residual_across_iterations"} | {"compression_seed"}
    named = [
        _written(name, value)
        for name, value in defaults.items()
        if name not in spelling and value != ours[name] and name in of_what_is_on
    ]
    if named and config.any_technique:
        yield f"the published artifact's defaults: {', '.join(named)}"


def _written(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag_of(name) if value else flag_of("no_" + name)
    return f"{flag_of(name)} {value}"
