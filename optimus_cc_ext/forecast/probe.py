"""How fast this run's own links are: a few transfers on the groups that training uses.

Both probes are collective over all ranks of the model, take the device where the group's transfers have their tensors,
and raise OptimusError, naming the ranks, where a transfer fails. `everyone` are the groups whose product is these ranks
(`Grid.groups`): all ranks begin each transfer together, and the slowest one says how long it took.
"""

import functools
import time
from collections.abc import Callable, Sequence
from enum import Enum

import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.forecast.timeline import Rate

__all__ = ["Collective", "probe_collective", "probe_link"]


class Collective(Enum):
    """A collective that carries gradients or parameters. Each collective has a rate of its own.

    If several replicas share a node, a ring sends their bytes out of the node once for all of them, and an all-to-all
    once for each of them.
    """

    ALL_REDUCE = "a sum"
    REDUCE_SCATTER = "a sum of shards"
    ALL_TO_ALL = "an all-to-all"
    ALL_GATHER = "a gather"


_SMALL = 1 << 14
_LARGE = 1 << 18
_LARGEST = {"cpu": 1 << 22, "cuda": 1 << 26}
_LONG_ENOUGH = 0.02
"""Seconds that the timed transfer takes at least, unless the largest is faster."""

_SMALL_TRIES, _LARGE_TRIES = 5, 2
"""How often a transfer is timed. Each time may be disturbed; the shortest is the link's."""


def probe_link(
    group: dist.ProcessGroup | None, device: torch.device, everyone: Sequence[dist.ProcessGroup]
) -> Rate | None:
    """The rate from each stage of the pipeline `group` to the next one; None with one stage, or without a pipeline."""
    if group is None or group.size() == 1:
        return _probed(_nothing, device, everyone, "the other ranks")
    stage, stages, ranks = group.rank(), group.size(), dist.get_process_group_ranks(group)

    def exchange(nbytes: int) -> float:
        # To the next and from the one before: on a full-duplex link the two do not disturb each other. Then an answer:
        # what is sent is only in a buffer of this machine's until it is known to have arrived.
        for size, to, source in ((nbytes, stage + 1, stage - 1), (1, stage - 1, stage + 1)):
            operations = [
                dist.P2POp(what, torch.zeros(size, dtype=torch.uint8, device=device), ranks[peer], group)
                for what, peer in ((dist.isend, to), (dist.irecv, source))
                if 0 <= peer < stages
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        return nbytes

    return _probed(exchange, device, everyone, f"a transfer between the stages on ranks {ranks}")


def probe_collective(
    group: dist.ProcessGroup | None,
    device: torch.device,
    everyone: Sequence[dist.ProcessGroup],
    collective: Collective,
) -> Rate | None:
    """Return the rate of a collective over `group`, in the bytes that a rank sends; None for a group of one rank.

    Args:
        group: the replicas of this rank; None: this rank has nothing to send, but joins what all ranks agree on.
    """
    ranks = group.size() if group is not None else 1
    if group is None or ranks == 1:
        return _probed(_nothing, device, everyone, "the other ranks")

    @functools.cache
    def buffers(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        # Allocated in the first exchange, which does not count: messages of a run lie in memory that is kept, too.
        return tuple(torch.zeros(2, numel, dtype=torch.float32, device=device))

    def exchange(nbytes: int) -> float:
        values, others = buffers(nbytes // 4 // ranks * ranks)
        part = others[: others.numel() // ranks]
        match collective:
            case Collective.ALL_REDUCE:
                dist.all_reduce(values, group=group)
            case Collective.REDUCE_SCATTER:
                dist.reduce_scatter_tensor(part, values, group=group)
            case Collective.ALL_TO_ALL:
                dist.all_to_all_single(others, values, group=group)
            case Collective.ALL_GATHER:
                dist.all_gather_into_tensor(values, part, group=group)
        return values.nbytes * (ranks - 1) / ranks * (2 if collective is Collective.ALL_REDUCE else 1)

    return _probed(
        exchange, device, everyone, f"{collective.value} over ranks {dist.get_process_group_ranks(group)}"
    )  # fmt: skip


def _nothing(nbytes: int) -> float:
    return 0.0


def _probed(
    exchange: Callable[[int], float], device: torch.device, everyone: Sequence[dist.ProcessGroup], purpose: str
) -> Rate | None:
    """Fit a rate to a small and a large exchange, which grows until it takes long enough on some rank.

    `exchange` takes about so many bytes, and returns how many it moved; where that is 0, there is no rate.
    """
    try:
        small, quick = _timed(exchange, _SMALL, device, everyone, _SMALL_TRIES)
        nbytes = _LARGE
        while True:
            large, slow = _timed(exchange, nbytes, device, everyone, _LARGE_TRIES)
            if nbytes >= _LARGEST[device.type] or _slowest(slow, device, everyone) > _LONG_ENOUGH:
                break
            nbytes *= 4
    except RuntimeError as error:
        raise OptimusError(f"rank {dist.get_rank()}: measuring the links: {purpose}: {error}") from error
    if not large:
        return None
    # Noise can make the small one the slower one; then latency is all that is known of it.
    rate = (large - small) / max(slow - quick, slow / 10)
    return Rate(max(quick - small / rate, 0.0), rate)


def _timed(
    exchange: Callable[[int], float],
    nbytes: int,
    device: torch.device,
    everyone: Sequence[dist.ProcessGroup],
    tries: int,
) -> tuple[float, float]:
    """(bytes moved, seconds) of one exchange. A first, which does not count, connects, and uses up what a shaped link
    has saved up."""
    _slowest(0.0, device, everyone)  # all begin together
    moved, seconds = 0.0, []
    for _ in range(1 + tries):
        began = time.perf_counter()
        moved = exchange(nbytes)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return moved, min(seconds[1:])


def _slowest(seconds: float, device: torch.device, everyone: Sequence[dist.ProcessGroup]) -> float:
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    for group in everyone:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value)
