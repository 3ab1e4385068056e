"""Process groups of this package: made by their members alone, with the options of the group that they replace."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist

from optimus_cc_ext.announce import COMMUNICATORS
from optimus_cc_ext.collectives.groups import Groups, names_of, nccl_options, new_group
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.techniques.crossing import levels_of_group
from optimus_cc_ext.techniques.grid import Grid, RankPlace


class NewGroups:
    """Maker of the process groups of one session on one rank.

    Groups are named by numbers. All ranks of the model begin behind the largest number that one of them has used, so
    that a name is new to every member, whatever other models the members hold.

    Args:
        places: the places of all ranks of the model.
        like: the group of the replicas, which the new groups replace; see `new_group`.
        timeout: the time limit of the groups if NCCL does not run `like`.
    """

    def __init__(self, places: Sequence[RankPlace], like: dist.ProcessGroup | None, timeout: timedelta | None) -> None:
        self.places = places
        self.made: dict[str, dist.ProcessGroup] = {}
        """The groups that techniques have asked for, by description."""

        self._names = max(place.names for place in places)
        self._like, self._timeout = like, timeout
        self._levels: dict[tuple[int, ...], Groups] = {}
        self._experts: Groups | None = None

    def in_levels(self, group: dist.ProcessGroup, *, two: bool) -> Groups:
        """Return `group` with the groups of its two levels, if its nodes allow them; these are made once.

        All ranks of the model call this for the same kinds of groups, in the same order.

        Args:
            two: True if two levels may be used.
        """
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._levels:
            levels = levels_of_group(self.places, ranks)
            levels = levels if two else replace(levels, members=1, reason="")
            self._levels[ranks] = self._made(group, levels, f"_{len(self._levels)}" if self._levels else "")
        return self._levels[ranks]

    def of_experts(self, group: dist.ProcessGroup, levels: Levels) -> Groups:
        """Return the group of experts' ranks with a node and a rail of its own, which are made once: in those of
        gradients, tokens would wait for buckets. All ranks of the model call this.
        """
        self._experts = self._experts or self._made(group, levels, "_EXPERTS")
        return self._experts

    def _made(self, group: dist.ProcessGroup, levels: Levels, suffix: str) -> Groups:
        ranks, members = dist.get_process_group_ranks(group), levels.members
        first, place = group.rank() // members * members, group.rank() % members
        node, rail = (
            self.make([chosen] if levels.two else [], f"OPTIMUS_CC_{name}{suffix}")
            for name, chosen in (("NODE", ranks[first : first + members]), ("RAIL", ranks[place::members]))
        )
        return Groups(group, levels, node, rail, self.beside(group))

    def beside(self, group: dist.ProcessGroup) -> int:
        """Return the number of ranks of `group` on this rank's node, with this rank."""
        nodes = {place.rank: place.node.name for place in self.places}
        return sum(nodes[rank] == nodes[dist.get_rank()] for rank in dist.get_process_group_ranks(group))

    def alone(self) -> dist.ProcessGroup:
        """Return the group of this rank alone, which all techniques share."""
        name = "OPTIMUS_CC_ALONE"
        if name not in self.made:
            self.make([[dist.get_rank()]], name)
        return self.made[name]

    def make(self, members: Sequence[Sequence[int]], description: str) -> dist.ProcessGroup | None:
        """Make the groups `members`, which are disjoint; return this rank's group, None if this rank is in none.

        All ranks of the model call this for the same groups, in the same order. Only members wait for one another.
        """
        rank = dist.get_rank()
        self._names += 1
        names_of(rank, more=self._names - names_of(rank))
        mine = next((ranks for ranks in members if rank in ranks), None)
        if mine is None:
            return None
        self.made[description] = new_group(
            mine, name=f"optimus_cc/{self._names}/{min(mine)}", like=self._like, description=description,
            timeout=self._timeout,
        )  # fmt: skip
        return self.made[description]

    def close(self, these: Collection[str] | None = None) -> None:
        """Destroy the groups that were made, unless the default group was destroyed before, and they with it.

        Args:
            these: names of the only groups to destroy; None: all.
        """
        for description, group in list(self.made.items()):
            if group in dist.distributed_c10d._world.pg_map:
                if these is not None and group.group_name not in these:
                    continue
                dist.destroy_process_group(group)
            del self.made[description]
        self._levels.clear()
        self._experts = None

    @property
    def line(self) -> str | None:
        """The line of `communicator_line` for these groups; None if NCCL does not run them."""
        if all(nccl_options(group) is None for group in self.made.values()):
            return None
        return communicator_line({name: group.size() for name, group in self.made.items()})


def close_abandoned(abandoned: Sequence[NewGroups], grid: Grid) -> None:
    """Destroy the groups of models that were dropped, where every member has dropped its model: members of a node may
    wait for one another in NCCL. Collective over all ranks of the model of `grid`.
    """
    groups = [group for each in abandoned for group in each.made.values()]
    alive = [group for group in groups if group in dist.distributed_c10d._world.pg_map]
    theirs = dict(grid.gather((grid.place.rank, [group.group_name for group in alive])))
    agreed = [
        group.group_name
        for group in alive
        if all(group.group_name in theirs.get(rank, ()) for rank in dist.get_process_group_ranks(group))
    ]
    for each in abandoned:
        each.close(agreed)


_OF_A_PAIR, _OF_MORE = 544 << 20, 688 << 20
"""Bytes of GPU memory that NCCL takes for a communicator of two ranks, and of more, at its first collective.

Measured on A100 GPUs with NVLink, at NCCL's default number of channels (https://github.com/NVIDIA/nccl/issues/964)."""


def communicator_bytes(ranks: int) -> int:
    """Return an upper bound in bytes of the GPU memory that NCCL takes for one more communicator of `ranks` ranks.

    A communicator of one rank has no connections and counts as 0.
    """
    return 0 if ranks < 2 else _OF_A_PAIR if ranks == 2 else _OF_MORE


def communicator_line(sizes: dict[str, int]) -> str | None:
    """Return the log line about the memory of new groups, given as names with numbers of ranks; None without groups."""
    if not sizes:
        return None
    named = ", ".join(f"{name} of {ranks} {'rank' if ranks == 1 else 'ranks'}" for name, ranks in sizes.items())
    nbytes = sum(map(communicator_bytes, sizes.values()))
    return (
        f"{COMMUNICATORS} on a rank: {len(sizes)} ({named}), up to {nbytes / 1e6:.0f} MB of GPU memory "
        "outside of PyTorch's (544 MiB for a pair, 688 MiB for more ranks: NVIDIA/nccl#964)"
    )
