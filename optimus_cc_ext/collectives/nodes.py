"""Nodes of a run: which ranks share a node, and in how many levels a group of ranks adds up its gradients.

Inside a node sums cost little; between nodes every byte counts. If each of N nodes holds L ranks of a group, their
gradients are added up exactly inside the node, and only the N sums cross the network, in few bits: these are two
levels.
"""

import os
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "OPTIMUS_CC_NODE"
"""Environment variable that names the node of a rank, whatever its machine: containers, network namespaces, or a domain
of several machines. `ranks:L` stands for nodes of L consecutive ranks each.
"""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Node:
    """The node of one rank; ranks whose nodes have equal names share a node."""

    name: str = ""
    machine: str = ""
    """The machine as NCCL tells machines apart: NCCL_HOSTID, or the host name and the id of the last boot."""

    chosen: bool = False
    """True if `OPTIMUS_CC_NODE` gave the name."""


def this_node(rank: int, environment: Mapping[str, str] = os.environ) -> Node:
    """Return the node of this process, which is `rank` of the world."""
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    machine = environment.get("NCCL_HOSTID") or f"{socket.gethostname()} {boot}"
    chosen = environment.get(VARIABLE)
    if not chosen:
        return Node(machine, machine)
    kind, _, size = chosen.partition(":")
    by_rank = kind == "ranks" and size.isdecimal() and int(size) > 0
    return Node(f"ranks:{rank // int(size)}" if by_rank else chosen, machine, chosen=True)


def ranks_per_node(nodes: Sequence[Node], environment: Mapping[str, str] = os.environ) -> int:
    """Return the largest number of ranks on a node, given the node of each rank; 0 if it is unknown.

    Unless the user names nodes, a node is what one torchrun agent starts (LOCAL_WORLD_SIZE).
    """
    if nodes and nodes[0].chosen:
        return max(Counter(node.name for node in nodes).values())
    return int(environment.get("LOCAL_WORLD_SIZE", "0"))


def rdma_cards(folder: Path = Path("/sys/class/infiniband")) -> int:
    """Return the number of this machine's network cards that have an active port with RDMA."""
    states = [path for path in folder.glob("*/ports/*/state") if "ACTIVE" in path.read_text()]
    return len({path.parents[2] for path in states})


def nodes_line(nodes: Sequence[Node]) -> str | None:
    """Return the log line about a choice of nodes that splits a machine or joins several; None: it does neither."""
    names, machines = ({getattr(node, field) for node in nodes} for field in ("name", "machine"))
    pairs = {(node.name, node.machine) for node in nodes}
    if len(pairs) == len(names) == len(machines):
        return None
    return f"{VARIABLE} makes {_count(len(names), 'node')} of {_count(len(machines), 'machine')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The levels in which a group of ranks adds up its gradients."""

    nodes: int = 1
    """N: the number of nodes that hold ranks of the group."""

    members: int = 1
    """L: the ranks of the group on each node, which add up exactly. With 1, every rank sends to every other."""

    reason: str = ""
    """The reason for one level although a node holds several ranks of the group; empty: there is no such node."""

    instances: bool = False
    """True if the levels are Megatron's own: N is the number of distributed-optimizer instances, and L the number of
    replicas in each, whatever nodes they are on.
    """

    @property
    def two(self) -> bool:
        """True if sums over the ranks of a node are sent between nodes, and not the gradients of every rank."""
        return self.instances or (self.nodes > 1 and self.members > 1)

    @property
    def inside(self) -> bool:
        """True if nothing of the group leaves its node."""
        return self.nodes == 1

    @property
    def line(self) -> str | None:
        """The log line about the levels; None: each node holds one rank of the group, or all of them."""
        if self.reason:
            return f"one level, because {self.reason}"
        if not self.two:
            return None
        return (
            f"two levels: {self.members} replicas on each of {self.nodes} nodes are summed dense, and the sums "
            "of nodes are sent compressed"
        )


ONE_LEVEL = Levels()
"""The levels of a group about whose nodes nothing is known."""


def levels_of(nodes: Sequence[str]) -> Levels:
    """Return the levels of a group, given the node of each of its ranks, in the order of the group."""
    distinct = dict.fromkeys(nodes)
    members = len(nodes) // len(distinct)
    if len(distinct) == 1:
        return Levels(members=members)
    if len(distinct) == len(nodes):
        return Levels(nodes=len(distinct))
    if len({nodes.count(node) for node in distinct}) > 1:
        return Levels(nodes=len(distinct), reason="its nodes hold unequal numbers of its ranks")
    if list(nodes) != [node for node in distinct for _ in range(members)]:
        return Levels(nodes=len(distinct), reason="its ranks on a node do not follow each other")
    return Levels(nodes=len(distinct), members=members)
