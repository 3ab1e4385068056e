"""Process groups of our own: made by their members alone, with the options of the group whose work they take over."""

import copy
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.techniques.grid import RankPlace

__all__ = ["NewGroups", "communicator_bytes", "communicator_line", "groups_of_this_rank", "new_group"]


def new_group(
    ranks: Sequence[int], *, like: dist.ProcessGroup | None, description: str, timeout: timedelta | None = None
) -> dist.ProcessGroup:
    """Make a process group of which only the members, this rank among them, take part in making it.

    Args:
        ranks: of the members, in any order; the group sorts them.
        like: the group whose work the new one takes over. Where NCCL does that work the new group gets its options:
            the limits of `--nccl-communicator-config-path`, the priority of its streams, its time limit. gloo has no
            such options. None: torch's defaults.
        description: what NCCL's logs and torch's flight recorder show.
        timeout: the limit on every wait, where `like` says nothing; None: torch's default.
    """
    options = None if like is None else _nccl_options(like)
    return dist.new_group(
        list(ranks), timeout=timeout if options is None else options._timeout, pg_options=options,
        use_local_synchronization=True, group_desc=description,
    )  # fmt: skip


def _nccl_options(group: dist.ProcessGroup) -> Any:
    """Return a copy of the options that NCCL runs a group with; None where NCCL does not run it.

    A copy, because torch writes the ranks and the name of the new group into the options that it is given.
    """
    if not dist.is_nccl_available():
        return None
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(options, dist.ProcessGroupNCCL.Options):
            return copy.deepcopy(options)
    return None


def groups_of_this_rank() -> int:
    """The number of process groups that this rank is a member of, which torch makes names of."""
    return len(dist.distributed_c10d._world.pg_names)


class NewGroups:
    """Makes the process groups of one session on one rank.

    torch names such a group by its ranks and by the number of groups that a process has. Megatron's first stage has one
    more than its last, and a process with a second model many more: named differently, members would wait for each
    other for ever. So each rank first fills up with groups of itself alone to the largest number in the model.

    Args:
        places: of all ranks of the model.
        like: the group of the replicas, whose work ours take over; see `new_group`.
        timeout: the time limit of the groups, where `like` says nothing.
    """

    def __init__(self, places: Sequence[RankPlace], like: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
        self.places = places
        self.made: dict[str, dist.ProcessGroup] = {}
        """By description, the groups that were made for techniques."""

        self._names = max(place.groups for place in places)
        self._like, self._timeout = like, timeout

    def alone(self) -> dist.ProcessGroup:
        """The group of this rank only, which all techniques that need one share."""
        name = "OPTIMUS_CC_ALONE"
        if name not in self.made:
            self.make([[dist.get_rank()]], name)
        return self.made[name]

    def make(self, members: Sequence[Sequence[int]], description: str) -> dist.ProcessGroup | None:
        """The group of this rank among disjoint `members`; None where it is in none of them.

        All ranks of the model call this for the same groups, in the same order. Only members wait for one another.
        """
        rank = dist.get_rank()
        while groups_of_this_rank() < self._names:
            new_group([rank], like=None, description="OPTIMUS_CC_NAME", timeout=self._timeout)
        self._names += 1
        mine = next((ranks for ranks in members if rank in ranks), None)
        if mine is None:
            return None
        self.made[description] = new_group(mine, like=self._like, description=description, timeout=self._timeout)
        return self.made[description]

    @property
    def line(self) -> str | None:
        """See `communicator_line`; None where NCCL does not run the groups."""
        if all(_nccl_options(group) is None for group in self.made.values()):
            return None
        return communicator_line({name: group.size() for name, group in self.made.items()})


_OF_A_PAIR, _OF_MORE = 544 << 20, 688 << 20
"""Bytes of GPU memory that NCCL takes for a communicator of two ranks, and of more, at its first collective.

Measured on A100 GPUs with NVLink, at NCCL's default number of channels (https://github.com/NVIDIA/nccl/issues/964)."""


def communicator_bytes(ranks: int) -> int:
    """Return the GPU memory that NCCL takes for one more communicator of so many ranks, at most.

    One rank alone is connected to nobody, and counts as nothing.
    """
    return 0 if ranks < 2 else _OF_A_PAIR if ranks == 2 else _OF_MORE


def communicator_line(sizes: dict[str, int]) -> str | None:
    """Return what groups of our own take on a rank, by their names and numbers of ranks; None where there are none."""
    if not sizes:
        return None
    named = ", ".join(f"{name} of {ranks} {'rank' if ranks == 1 else 'ranks'}" for name, ranks in sizes.items())
    nbytes = sum(map(communicator_bytes, sizes.values()))
    return (
        f"more NCCL communicators on a rank: {len(sizes)} ({named}), up to {nbytes / 1e6:.0f} MB of GPU memory "
        "outside of PyTorch's (544 MiB for a pair, 688 MiB for more ranks: NVIDIA/nccl#964)"
    )
