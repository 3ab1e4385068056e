"""Measure the rates of this run's own links, with a few transfers on the process groups that training uses.

Both probes are collective over all ranks of the model. They take the device of the group's tensors, and raise
OptimusError, which names the ranks, if a transfer fails. `everyone` holds the process groups whose product is all ranks
of the model (`Grid.groups`): all ranks begin each transfer together, and its duration is that of the slowest rank.
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
"""Least duration of the timed transfer in seconds, unless the largest transfer is faster."""

_SMALL_TRIES, _LARGE_TRIES = 5, 2
"""Number of timed transfers of each size. Other traffic may disturb each of them, so the shortest counts."""


def probe_link(
    group: dist.ProcessGroup | None, device: torch.device, everyone: Sequence[dist.ProcessGroup], *, batched: bool
) -> Rate | None:
    """Return the rate from each stage of the pipeline `group` to the next stage; None with one stage, or without a
    pipeline.

    Args:
        batched: whether training posts its messages in batches. NCCL makes one communicator of the whole group for
            batches, and otherwise one for each pair of ranks. Communicators that training does not use take memory.
    """
    if group is None or group.size() == 1:
        return _probed(_nothing, device, everyone, "the other ranks")
    stage, stages, ranks = group.rank(), group.size(), dist.get_process_group_ranks(group)

    def exchange(nbytes: int) -> float:
        # Each stage sends to the next stage and receives from the previous one: on a full-duplex link the two transfers
        # do not disturb each other. The answer of one byte follows because a send is complete once its bytes are in a
        # buffer of this machine, and only the answer shows that they have arrived.
        for size, to, source in ((nbytes, stage + 1, stage - 1), (1, stage - 1, stage + 1)):
            operations = [
                (operation, torch.zeros(size, dtype=torch.uint8, device=device), ranks[peer], group)
                for operation, peer in ((dist.isend, to), (dist.irecv, source))
                if 0 <= peer < stages
            ]
            works: Sequence[dist.Work | None]
            if batched:
                works = dist.batch_isend_irecv([dist.P2POp(*operation) for operation in operations])
            else:
                works = [operation(tensor, peer, group) for operation, tensor, peer, group in operations]
            for work in filter(None, works):
                work.wait()
        return nbytes

    return _probed(exchange, device, everyone, f"a transfer between the stages on ranks {ranks}")


def probe_collective(
    group: dist.ProcessGroup | None,
    device: torch.device,
    everyone: Sequence[dist.ProcessGroup],
    collective: Collective,
) -> Rate | None:
    """Return the rate of a collective over `group`, in bytes that a rank sends; None for a group of one rank.

    Args:
        group: the replicas of this rank; None: this rank sends nothing, but takes part when all ranks agree on a time.
    """
    ranks = group.size() if group is not None else 1
    if group is None or ranks == 1:
        return _probed(_nothing, device, everyone, "the other ranks")

    @functools.cache
    def buffers(numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        # The first exchange, which is not timed, allocates the buffers, as training allocates its buffers only once.
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
    """Fit a rate to a small exchange and a large one, which grows until some rank needs `_LONG_ENOUGH` seconds for it.

    `exchange` moves about as many bytes as it is given, and returns how many it moved; if that is 0, there is no rate.
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
    # Noise can make the small exchange the slower one; then only an upper bound of the latency is known.
    rate = (large - small) / max(slow - quick, slow / 10)
    return Rate(max(quick - small / rate, 0.0), rate)


def _timed(
    exchange: Callable[[int], float],
    nbytes: int,
    device: torch.device,
    everyone: Sequence[dist.ProcessGroup],
    tries: int,
) -> tuple[float, float]:
    """Return (bytes moved, seconds) of one exchange.

    An exchange that is not timed comes first: it connects, and uses up the tokens that a shaped link has accumulated.
    """
    _slowest(0.0, device, everyone)  # the barrier lets all ranks begin together
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
