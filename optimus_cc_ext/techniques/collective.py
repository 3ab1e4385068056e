"""All-reduce with a name: a failed or timed-out collective says what it was and whom it waited for."""

import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError

__all__ = ["all_reduce_sum"]


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> None:
    """Sum `tensor` over `group`, in place.

    Raises:
        OptimusError: the collective failed, or ran into the group's timeout; names `purpose` and the group's ranks.
    """
    try:
        dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
    except RuntimeError as error:
        raise OptimusError(
            f"rank {dist.get_rank()}: {purpose} failed among ranks {dist.get_process_group_ranks(group)}: {error}"
        ) from error
