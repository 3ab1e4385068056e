"""Process groups: those of a sum in levels, and new ones that their members make alone."""

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.patching import Patches


@dataclass(frozen=True)
class Groups:
    """The process groups whose ranks exchange messages, in one level or in two (module `exchange`)."""

    whole: dist.ProcessGroup
    levels: Levels = ONE_LEVEL
    node: dist.ProcessGroup | None = None
    """The ranks of the group on this rank's node, or in its distributed-optimizer instance; None: one level."""

    rail: dist.ProcessGroup | None = None
    """The rail: one rank of each node, all with the same index inside their node. None means one level."""

    beside: int = 1
    """Number of ranks of the group on this rank's node, with this rank."""

    @property
    def across(self) -> dist.ProcessGroup:
        """The ranks that exchange messages: the rail, or in one level all ranks."""
        return self.rail or self.whole

    @property
    def place(self) -> int:
        """The place of this rank in its node, among the ranks of the group."""
        return self.whole.rank() % self.levels.members

    @property
    def owners(self) -> dist.ProcessGroup:
        """The ranks among which the distributed optimizer's shards are dealt: one instance of it, or all replicas."""
        return self.node if self.levels.instances and self.node is not None else self.whole

    def own_range(self, numel: int) -> Range:
        """Return the range of a flat bucket of `numel` elements that this rank's distributed optimizer reads."""
        length = numel // self.owners.size()
        return self.owners.rank() * length, length


def new_group(
    ranks: Sequence[int],
    *,
    name: str,
    like: dist.ProcessGroup | None,
    description: str,
    timeout: timedelta | None = None,
) -> dist.ProcessGroup:
    """Make a process group of which only the members, this rank among them, take part in making it.

    Args:
        ranks: the members' ranks, in any order; torch sorts them.
        name: the name by which members find each other, the same on all of them and never used before.
        like: the group that the new group replaces. If NCCL runs that group, the new group gets a copy of its options:
            the limits of `--nccl-communicator-config-path`, the priority of its streams, its time limit. gloo has no
            such options. None: torch's defaults.
        description: the name in NCCL's logs and in torch's flight recorder.
        timeout: the limit on every wait if NCCL does not run `like`; None: torch's default.
    """
    options, default = None if like is None else nccl_options(like), dist.distributed_c10d._get_default_group()
    # torch would make the group by splitting a default group that is bound to a device, and every rank has to take part
    # in a split.
    bound, default.bound_device_id = default.bound_device_id, None
    with Patches() as patches:
        patches.callback(setattr, default, "bound_device_id", bound)
        # torch would name a group by its ranks and by the number of groups of this process. Members with unequal
        # numbers would wait for each other for ever, and the name of a destroyed group would be used again.
        patches.replace(dist.distributed_c10d, "_hash_ranks_to_str", lambda _: name)
        try:
            return dist.new_group(
                list(ranks), timeout=timeout if options is None else options._timeout, pg_options=options,
                use_local_synchronization=True, group_desc=description,
            )  # fmt: skip
        except (NotImplementedError, RuntimeError, ValueError) as error:
            torchcomms = "TORCH_DISTRIBUTED_USE_TORCHCOMMS"
            cure = f". Unset {torchcomms}" if torchcomms in os.environ else ""
            raise OptimusError(
                f"the process group {description} of ranks {ranks} cannot be made: {error}{cure}"
            ) from error


def nccl_options(group: dist.ProcessGroup) -> Any:
    """Return a copy of a group's NCCL options, or None if the group's backend is not NCCL.

    It is a copy because torch writes the ranks and the name of the new group into the options. The copy of a group that
    was split off another one does not name that other one, in which all ranks would have to take part again.
    """
    if not dist.is_nccl_available():
        return None
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        options = getattr(getattr(backend, "wrapped_pg", backend), "options", None)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(options, dist.ProcessGroupNCCL.Options):
            copied, fresh = copy.deepcopy(options), dist.ProcessGroupNCCL.Options()
            copied.split_from, copied.split_color = fresh.split_from, fresh.split_color
            return copied
    return None


def names_of(rank: int, *, more: int = 0) -> int:
    """Add `more` to the number of process-group names that `rank` has used, and return that number.

    The default group's store counts them, so that counting starts anew with that group.
    """
    return int(dist.distributed_c10d._get_default_store().add(f"optimus_cc/names/{rank}", more))
