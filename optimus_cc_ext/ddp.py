"""Communication hook of torch's DistributedDataParallel: gradients travel in few bits.

    ddp.register_comm_hook(*optimus_cc_ext.ddp_hook("int8"))        # docs/python.md

The hook has no state across steps. A bucket is looked at anew in each step, because DDP makes other buckets after the
first backward pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from optimus_cc_ext.collectives import all_reduce
from optimus_cc_ext.collectives.functions import Group
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.compressors.formats import format_named

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


@dataclass(frozen=True)
class Averaging:
    """Format and group of the sums of a model's gradients."""

    format: str
    group: Group


def ddp_hook(format: str = "int8", group: Group = None) -> tuple[Averaging, Hook]:
    """Return what `DistributedDataParallel.register_comm_hook` takes: matrices travel in `format`, vectors and sparse
    gradients as they are.

    Args:
        format: "int8" or "int4".
        group: the process group of the model; or the result of `collectives.levels` for it, with which a node adds up
            exactly. If None, the default group.

    Raises:
        ValueError: there is no such format.
    """
    return Averaging(format_named(format).name, group), _average


def _average(state: Averaging, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Replace the gradients of a bucket by their average over all ranks."""
    flat, whole = bucket.buffer(), state.group.whole if isinstance(state.group, Groups) else state.group
    if flat.is_sparse:
        return default_hooks.allreduce_hook(whole, bucket)  # type: ignore[arg-type]  # None is the default group
    at, coded = 0, []
    for parameter in bucket.parameters():
        if parameter.ndim > 1:
            coded.append((at, parameter.numel()))
        at += parameter.numel()
    flat.div_(dist.get_world_size(whole))
    add_up = partial(all_reduce, flat, group=state.group, format=state.format, coded=coded)
    if flat.device.type != "cuda":
        add_up()
        done = torch.futures.Future[torch.Tensor]()
        done.set_result(flat)
        return done
    stream = _stream(flat.device)  # backward goes on meanwhile, on its own stream
    stream.wait_stream(torch.cuda.current_stream(flat.device))
    with torch.cuda.stream(stream):
        add_up()
        flat.record_stream(stream)
        done = torch.futures.Future[torch.Tensor](devices=[flat.device])
        done.set_result(flat)  # DDP waits for what is on this stream
    return done


@lru_cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
