"""Collectives with a name: the error of a collective that failed or timed out names its purpose and its ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError


class PendingCollective:
    """Collective over a group; it is started when this object is made, and finished by `wait`.

    Args:
        start: starts the collective, and returns torch's work object.
    """

    def __init__(self, start: Callable[[], Any], group: dist.ProcessGroup, purpose: str) -> None:
        self._group, self._purpose = group, purpose
        self._work: Any = self._named(start)

    def wait(self) -> None:
        """Wait until the collective's result is there.

        Raises:
            OptimusError: the collective failed, or ran into the group's timeout; the message names the purpose and the
                ranks.
        """
        self._named(self._work.wait)

    def _named(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError as error:
            ranks = dist.get_process_group_ranks(self._group)
            raise OptimusError(
                f"rank {dist.get_rank()}: {self._purpose} failed among ranks {ranks}: {error}"
            ) from error


def start_sum(tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> PendingCollective:
    """Sum `tensor` over `group`, in place."""
    return PendingCollective(lambda: dist.all_reduce(tensor, group=group, async_op=True), group, purpose)


def start_max(tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> PendingCollective:
    """Start an all-reduce of `tensor` with MAX over `group`, in place."""
    start = partial(dist.all_reduce, tensor, dist.ReduceOp.MAX, group, async_op=True)
    return PendingCollective(start, group, purpose)


def start_reduce_scatter(
    out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str
) -> PendingCollective:
    """Start the sum over `group` of this rank's part of `tensor`; `out` may be a view of that part."""
    return PendingCollective(
        lambda: dist.reduce_scatter_tensor(out, tensor, group=group, async_op=True), group, purpose
    )


def start_reduce_scatters(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup, purpose: str
) -> PendingCollective:
    """Sum over `group` this rank's part of several tensors, given as (part, tensor); NCCL runs all as one operation."""

    def start() -> Any:
        with dist._coalescing_manager(group, async_ops=True) as all_of_them:
            for out, tensor in parts:
                dist.reduce_scatter_tensor(out, tensor, group=group, async_op=True)
        return all_of_them

    return PendingCollective(start, group, purpose)


@torch.no_grad()
def reduce_scatters_in_fp32(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    received: torch.Tensor,
    total: torch.Tensor,
    group: dist.ProcessGroup,
    purpose: str,
) -> None:
    """Sum over `group` this rank's part of several tensors in fp32, and round each sum once to the tensors' dtype.

    All-to-alls bring the parts, as with Megatron's `--ddp-reduce-scatter-with-fp32-accumulation`.

    Args:
        total: fp32 memory for the sum of so many values of a part at once.
        received: memory for as many values from each rank.
    """
    ranks, room = group.size(), total.numel()
    for out, tensor in parts:
        portions = zip(*(sent.split(room) for sent in tensor.view(ranks, -1)), strict=True)
        for portion, sent in zip(out.split(room), portions, strict=True):
            into = received[: ranks * portion.numel()].view(ranks, -1)
            start = partial(dist.all_to_all, list(into), list(sent), group=group, async_op=True)
            PendingCollective(start, group, purpose).wait()
            portion.copy_(torch.sum(into, dim=0, dtype=torch.float32, out=total[: portion.numel()]))


def start_all_to_all(
    out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str,
    received: Sequence[int] | None = None, sent: Sequence[int] | None = None,
) -> PendingCollective:  # fmt: skip
    """Send part d of `tensor` to rank d of `group`, and receive part d of `out` from it.

    Args:
        received, sent: lengths of the parts of `out` and of `tensor`, in rows; None: all parts are equally long.
    """
    return PendingCollective(
        lambda: dist.all_to_all_single(out, tensor, received, sent, group=group, async_op=True), group, purpose
    )


def start_all_gather(
    out: torch.Tensor, tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str
) -> PendingCollective:
    """Gather `tensor` of rank d of `group` into part d of `out`; `tensor` may be a view of this rank's part."""
    return PendingCollective(
        lambda: dist.all_gather_into_tensor(out, tensor, group=group, async_op=True), group, purpose
    )


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> None:
    """Sum `tensor` over `group`, in place. Raises the errors of `PendingCollective.wait`."""
    start_sum(tensor, group, purpose).wait()


def connect(group: dist.ProcessGroup, device: torch.device, *, pairs: bool) -> None:
    """Make one small collective of `group`, an all-to-all if `pairs`. Collective over its ranks.

    NCCL makes a group's communicator at its first collective, and at its first all-to-all it allocates memory for the
    connections of all pairs. In the middle of training PyTorch would hold nearly all memory.
    """
    out, tensor = torch.zeros(2, 16 * group.size(), dtype=torch.uint8, device=device)
    if pairs:
        start_all_to_all(out, tensor, group, "first all-to-all of gradients").wait()
    else:
        all_reduce_sum(tensor, group, "first sum of a process group")
