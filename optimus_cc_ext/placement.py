"""Placement of ranks on nodes: one pure rule for the launcher, the log, doctor and the planner.

Megatron numbers ranks by tensor, context, data, then pipeline parallelism. A node then holds replicas of few stages,
and every pipeline hop may cross the network. With `--use-tp-pp-dp-mapping` pipeline comes before data parallelism: a
node holds whole pipelines, and only gradients and parameters cross nodes (megatron/core/parallel_state.py,
RankGenerator).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

_MEGATRONS = {"tensor": "tp", "context": "cp", "data": "dp", "pipeline": "pp"}
"""Megatron's abbreviations of the kinds of parallelism."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The grid of ranks of a run, on nodes that each hold `ranks_per_node` consecutive ranks."""

    tensor: int = 1
    context: int = 1
    data: int = 1
    pipeline: int = 1
    ranks_per_node: int = 8
    pipeline_before_data: bool = False
    """True with Megatron's `--use-tp-pp-dp-mapping`."""

    expert: int = 1
    """Expert-parallel size: the number of ranks that share the experts of a layer."""

    expert_tensor: int = 1
    """The number of ranks over which an expert is sharded."""

    @property
    def order(self) -> tuple[str, ...]:
        """The kinds of parallelism, from the one whose ranks are consecutive to the one whose ranks are
        farthest apart.
        """
        last = ("pipeline", "data") if self.pipeline_before_data else ("data", "pipeline")
        return ("tensor", "context", *last)

    def size(self, kind: str) -> int:
        """Return the number of ranks in a group of this kind."""
        return int(getattr(self, kind))

    def stride(self, kind: str) -> int:
        """Return the distance between neighbouring ranks of a group of this kind."""
        stride = 1
        for other in self.order[: self.order.index(kind)]:
            stride *= self.size(other)
        return stride

    def groups(self, kind: str) -> Iterator[list[int]]:
        """Yield all groups of this kind, each as the sorted list of its ranks."""
        others = [other for other in self.order if other != kind]
        for places in product(*(range(self.size(other)) for other in others)):
            first = sum(place * self.stride(other) for place, other in zip(places, others, strict=True))
            yield [first + place * self.stride(kind) for place in range(self.size(kind))]

    def experts(self, rank: int) -> list[int]:
        """Return the ranks that share the experts of `rank`, which are neighbours in both of Megatron's orders."""
        together, place = self.expert * self.expert_tensor, rank % self.expert_tensor
        return [rank // together * together + place + self.expert_tensor * index for index in range(self.expert)]

    def node(self, rank: int) -> int:
        """Return the number of the node that holds `rank`."""
        return rank // self.ranks_per_node

    def members_on_a_node(self, kind: str) -> int:
        """Return the largest number of ranks of one group of this kind that share a node."""
        return max(max(map(nodes.count, nodes)) for nodes in self._nodes(kind))

    def stays_inside(self, kind: str) -> bool:
        """Return True if no group of this kind spans nodes."""
        return all(len(set(nodes)) == 1 for nodes in self._nodes(kind))

    def crossing_hops(self) -> tuple[int, int]:
        """Return (crossing, hops): the number of hops between stages that cross nodes, in the pipeline with the most
        such hops, and the number of hops of a pipeline.
        """
        crossings = (sum(a != b for a, b in pairwise(nodes)) for nodes in self._nodes("pipeline"))
        return max(crossings), self.pipeline - 1

    def _nodes(self, kind: str) -> Iterator[list[int]]:
        """Yield, for each group of this kind, the node of each of its ranks."""
        return ([self.node(rank) for rank in group] for group in self.groups(kind))


def placement_line(placement: Placement) -> str:
    """Return the line that says which groups stay inside nodes and how many pipeline hops cross nodes."""
    parts = []
    kinds = [kind for kind in placement.order if placement.size(kind) > 1 and kind != "pipeline"]
    for stays, words in ((True, "stay inside nodes"), (False, "span nodes")):
        names = [f"{kind}-parallel groups" for kind in kinds if placement.stays_inside(kind) is stays]
        if names:
            parts.append(f"{' and '.join(names)} {words}")
    if placement.pipeline > 1:
        crossing, hops = placement.crossing_hops()
        parts.append(f"{crossing} of {hops} pipeline hops cross nodes")
    order = "-".join(_MEGATRONS[kind] for kind in placement.order)
    return f"placement {order}, {placement.ranks_per_node} ranks a node: {', '.join(parts) or 'one rank'}"
