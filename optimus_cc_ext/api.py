"""Functions for custom training loops.

    compression = compress(model, optimizer, "balanced", train_iters=1000)   # after DistributedDataParallel
    for iteration in range(1000):
        model.zero_grad_buffer()
        ...                                    # megatron-core's forward_backward_func
        optimizer.step()                       # ends the step

docs/python.md shows a complete loop.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.errors import require_torch

if TYPE_CHECKING:
    import torch

    from optimus_cc_ext.hooks import Handle

__all__ = ["compress", "pad_buckets"]

Preset = Literal["paper", "balanced", "exact"]
"""The names of presets."""


def compress(
    models: "torch.nn.Module | Sequence[torch.nn.Module]",
    optimizer: Any,
    config: "OptimusConfig | Preset | None" = "balanced",
    *,
    train_iters: int | None = None,
    measure_every: int = 10,
    **changes: Any,
) -> "Handle":
    """Compress the communication of one model; all other models of this process stay vanilla.

    Process groups, layout and tied embedding are those of the model. Collective over all ranks of the model, after
    `DistributedDataParallel`. A step begins with `zero_grad_buffer()`, and ends when the optimizer, or one inside it,
    updates the parameters by `step()` or `step_with_ready_grads()`.

    Args:
        models: a model in megatron-core's DistributedDataParallel, or the list of its chunks on this rank.
        optimizer: Megatron's (the outermost one), or torch's, whose clipping is not known; None: `Handle.step`
            announces the steps.
        config: "paper", "balanced", "exact", or an OptimusConfig; None: the model stays vanilla, and the handle does
            nothing.
        train_iters: iterations of the whole run, which warm-ups are a fraction of.
        measure_every: errors and times are measured in each step whose number this divides; 0: in none.
        changes: fields of OptimusConfig that override those of `config`.

    Raises:
        OptimusError: a model is not wrapped in DistributedDataParallel, or has a handle already.
        FlagError: a setting cannot work on this model.
        UnsupportedMegatron: Megatron is missing, of an untested version, or a seam has moved.
    """
    require_torch()
    from optimus_cc_ext.hooks import compress

    return compress(models, optimizer, config, train_iters=train_iters, measure_every=measure_every, changes=changes)


def pad_buckets[T](ddp_config: T) -> T:
    """Return a copy of `ddp_config` with which DistributedDataParallel pads its buckets, so that kernels load 16 bytes
    at once.

    Wrap the model with the copy if the log says that shards begin at multiples of less than 8 values. Padding adds up
    to 65,535 values to each bucket of the distributed optimizer; Megatron's checkpoints do not contain the padding.

    Args:
        ddp_config: megatron-core's DistributedDataParallelConfig.
    """
    return dataclasses.replace(ddp_config, pad_buckets_for_high_nccl_busbw=True)  # type: ignore[type-var]
