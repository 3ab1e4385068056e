"""Wraps megatron/core/optimizer/distrib_optimizer.py: a step's change of this replica's shard becomes a message."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.hooks.registry import Seam
from optimus_cc_ext.hooks.sessions import Sessions
from optimus_cc_ext.patching import around

_TARGET = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params"

_Part = tuple[Any, Any, Any]
"""Master values, their parameter, and their range in its bucket."""


def wraps(sessions: Sessions) -> list[tuple[Seam, Callable[[Any], Any]]]:
    return [(Seam(_TARGET, ("self",)), around(copy_parameters, sessions))]


def copy_parameters(sessions: Sessions, original: Callable[..., None], optimizer: Any) -> None:
    """Encode a step's changes of this replica's shards as messages, in place of Megatron's gather of whole
    parameters.
    """
    buckets = [bucket for buffer in getattr(optimizer, "buffers", ()) for bucket in buffer.buckets]
    gathers = [session.parameters for session in sessions if session.parameters.of(buckets)]
    if not gathers:
        original(optimizer)
        return
    if optimizer.config.use_precision_aware_optimizer:
        # Only a custom training loop gets here: the configuration of its optimizer was not known before.
        reason = "a precision-aware optimizer writes parameters by itself, so that their change is unknown"
        raise FlagError("--param-gather-format", reason, "Leave out one of the two")
    parts = _parts(optimizer)

    def write(bucket: Any, start: int, end: int) -> None:
        with _only(optimizer, _within(parts[id(bucket)], start, end), shard_fp32_groups=[], model_fp32_groups=[]):
            original(optimizer)

    written = {id(bucket) for parameters in gathers for bucket in parameters.update(buckets, write)}
    with _only(optimizer, [part for bucket, found in parts.items() if bucket not in written for part in found]):
        original(optimizer)


def _parts(optimizer: Any) -> dict[int, list[_Part]]:
    """Return the master weights that Megatron copies to its 16-bit parameters, grouped by `id(bucket)`."""
    found = defaultdict[int, list[_Part]](list)
    groups = optimizer.shard_fp32_from_float16_groups, optimizer.model_float16_groups
    for masters, parameters in zip(*groups, strict=True):
        for master, parameter in zip(masters, parameters, strict=True):
            buffer, _, bucket = optimizer.model_param_gbuf_map[parameter]
            values = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"]
            found[id(optimizer.buffers[buffer].buckets[bucket])].append((master, parameter, values))
    return found


def _within(parts: Sequence[_Part], first: int, last: int) -> Iterator[_Part]:
    """Return the portions of `parts` that lie in a range of their bucket."""
    for master, parameter, values in parts:
        start, end = max(first, values.start), min(last, values.end)
        if start < end:
            yield master[start - values.start : end - values.start], parameter, type(values)(start, end)


@contextmanager
def _only(optimizer: Any, parts: Iterator[_Part] | Sequence[_Part], **swapped: Any) -> Iterator[None]:
    """Let Megatron copy only these parts while the context lasts, and with `swapped` other lists of its own."""
    masters, parameters, values = zip(*parts, strict=True) if (parts := list(parts)) else ((), (), ())
    ranges = {parameter: {"gbuf_world_in_bucket": each} for parameter, each in zip(parameters, values, strict=True)}
    swapped |= {"shard_fp32_from_float16_groups": [masters], "model_float16_groups": [parameters]}
    kept = {name: getattr(optimizer, name) for name in swapped}
    find = optimizer._get_model_param_range_map
    vars(optimizer).update(swapped)
    # The range of a part can be smaller than that of its parameter.
    optimizer._get_model_param_range_map = lambda parameter: ranges.get(parameter) or find(parameter)
    try:
        yield
    finally:
        vars(optimizer).update(kept)
        del optimizer._get_model_param_range_map
