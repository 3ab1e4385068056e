"""All-reduce with a name: a failed or timed-out collective says what it was and whom it waited for."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError

__all__ = ["PendingSum", "all_reduce_sum"]


class PendingSum:
    """Sums a tensor over a group, in place; started when made, finished by `wait`."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> None:
        self._group, self._purpose = group, purpose
        self._work: Any = self._named(lambda: dist.all_reduce(tensor, group=group, async_op=True))

    def wait(self) -> None:
        """Wait until the sum is there.

        Raises:
            OptimusError: the collective failed, or ran into the group's timeout; names the purpose and the ranks.
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


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup, purpose: str) -> None:
    """Sum `tensor` over `group`, in place. Raises what `PendingSum.wait` raises."""
    PendingSum(tensor, group, purpose).wait()
