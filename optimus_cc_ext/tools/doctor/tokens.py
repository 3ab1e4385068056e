"""Estimates of the tokens that a mixture's ranks send to experts: their bytes, memory and nodes, if every expert gets
equally many.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import cycle, islice

import torch

from optimus_cc_ext.collectives.legs import Bytes
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.formats import block_format
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import EXPERT_DISPATCH, EXPERT_GRADIENT, TrafficClass
from optimus_cc_ext.config.presets import Layout, share_of_copies
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.techniques.crossing import levels_of_experts
from optimus_cc_ext.techniques.grid import RankPlace
from optimus_cc_ext.tools.doctor.findings import Finding


@dataclass(frozen=True, kw_only=True)
class ExpertLayers:
    """Facts about a model's mixture of experts."""

    layers: int = 0
    """Number of layers whose tokens are sent to the experts of other ranks, also of multi-token prediction."""

    experts: int = 0
    probability: int = 4
    """Bytes of the probability of an expert, which is sent to the expert with each token."""

    rows_per_token: float = 0
    """Mean number of rows per token: one for each of its experts, times the capacity factor if experts are padded."""

    recomputed: bool = False
    """True if the backward pass computes the experts' layers once more, and sends their tokens again."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> "ExpertLayers":
        """Return the facts in Megatron's arguments."""
        if not args.num_experts or args.expert_model_parallel_size == 1:
            return cls()
        frequency = args.moe_layer_freq
        pattern = [not index % frequency for index in range(frequency)] if isinstance(frequency, int) else frequency
        layers = [bool(each) for each in islice(cycle(pattern), args.num_layers)]
        capacity = (args.moe_pad_expert_input_to_capacity and args.moe_expert_capacity_factor) or 1
        selected = args.recompute_granularity == "selective" and "moe" in (args.recompute_modules or ())
        return cls(
            layers=sum(layers) + layers[-1] * (getattr(args, "mtp_num_layers", None) or 0),
            experts=args.num_experts,
            probability={"fp32": 4, "fp64": 8}.get(args.moe_router_dtype, args.params_dtype.itemsize),
            rows_per_token=capacity * args.moe_router_topk,
            recomputed=args.recompute_granularity == "full" or getattr(args, "moe_layer_recompute", False) or selected,
        )


NO_EXPERT_LAYERS = ExpertLayers()
"""The facts about a model whose ranks send no token to each other."""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens that one rank sends in one exchange, those that stay on the rank included."""

    number: float
    """Number of rows: tokens of the rank in a micro-batch, times the experts of each."""

    dtype: torch.dtype
    hidden: int
    """Number of values of a token."""

    mixture: "ExpertLayers"

    def row_bytes(self, chosen: str) -> int:
        """Return the bytes of a token in a format."""
        format = block_format(chosen)
        return self.hidden * self.dtype.itemsize if format is None else Codec(format).row_bytes(self.hidden)

    def sent_bytes(self, traffic: TrafficClass, chosen: str) -> float:
        """Return the bytes that a rank sends in one direction of one layer and micro-batch, to all ranks and itself."""
        times = 2 if traffic is EXPERT_DISPATCH and self.mixture.recomputed else 1
        return times * self.number * (2 * self.row_bytes(chosen) + self.mixture.probability)

    def once(self, traffic: TrafficClass, chosen: str, levels: Levels, routing: tuple[int, int, int]) -> Bytes:
        """Return the bytes that a rank sends in one direction of one layer and micro-batch, once to each node.

        Args:
            levels: the nodes that share the experts.
            routing: `Layout.routing`.
        """
        nodes, members, experts = levels.nodes, levels.members, self.mixture.experts
        row, dense, ranks = self.row_bytes(chosen), self.row_bytes("dense"), levels.nodes * levels.members
        away = self.number * (nodes - 1) / nodes
        probabilities = self.number * self.mixture.probability
        leaving = 2 * share_of_copies(routing, nodes) * away * row
        inside = self.number * (members - 1) / members * (row + dense)
        if traffic is EXPERT_DISPATCH:
            # Experts' bits of a row, and the numbers of rows.
            leaving += share_of_copies(routing, nodes) * away * -(-experts // nodes // 8) + 8 * (1 + members) * (
                nodes - 1
            )
        sent = leaving + inside + probabilities * (ranks - 1) / ranks
        times = 2 if traffic is EXPERT_DISPATCH and self.mixture.recomputed else 1
        return Bytes(round(times * sent), times * (leaving + probabilities * (nodes - 1) / nodes))

    def memory(self, config: OptimusConfig, share: float | None = None) -> float:
        """Return the bytes of an exchange: two messages and the decoded tokens. As many arrive as are sent.

        Args:
            share: rows between nodes, of all copies, if a token goes once to each; both hops' rows are then held, and
                the sums. None: tokens go direct.
        """
        if share is not None:
            return self.number * self.row_bytes("dense") * max(2 + share, 1 + 3 * share)
        chosen = (config.format_of(each) for each in (EXPERT_DISPATCH, EXPERT_GRADIENT))
        largest = max((self.row_bytes(each) for each in chosen if each != "dense"), default=0)
        return self.number * (2 * largest + self.row_bytes("dense")) if largest else 0

    def lines(self, config: OptimusConfig, share: float | None = None) -> Iterator[str]:
        """Yield the lines about the assumptions of the estimates; `share` as `memory` takes it."""
        yield "counted as if every expert got equally many tokens; the log counts the real ones, by destination rank"
        if self.mixture.recomputed:
            yield "recomputation sends the tokens of the forward pass twice"
        if nbytes := self.memory(config, share):
            what = "two messages and the decoded tokens" if share is None else "the rows of both hops and their sums"
            yield (
                f"an exchange of experts' tokens takes {nbytes / 1e6:.1f} MB on a rank for {what}, and more in "
                "proportion on a rank that gets more than its share"
            )


def away(places: Sequence[RankPlace], *, nodes: bool) -> float:
    """Return the share of the tokens that leave their rank, or with `nodes` their node."""
    node = {place.rank: place.node.name if nodes else place.rank for place in places}
    shares = [
        sum(node[other] != node[place.rank] for other in place.experts) / len(place.experts)
        for place in places
        if place.experts
    ]
    return sum(shares) / max(1, len(shares))


def about_dispatchers(args: argparse.Namespace, places: Sequence[RankPlace], layout: Layout) -> list[Finding]:
    """Return the findings about a dispatcher whose tokens are not counted; empty: all tokens are counted."""
    chosen = args.moe_token_dispatcher_type
    if chosen == "alltoall" or not ExpertLayers.of(args).layers:
        return []
    flag = f"--moe-token-dispatcher-type {chosen}"
    found = [Finding("tokens", f"{flag}: neither doctor nor the log counts the bytes of tokens, except of alltoall")]
    if chosen == "allgather" and away(places, nodes=True):
        advice = (
            f"{flag}, Megatron's default, sends every token to all ranks of an expert group, and these ranks are on "
            "several nodes: alltoall sends a token only to the ranks of its experts, and compressed with "
            "--expert-dispatch-format and --expert-gradient-format"
        )
        forced = OptimusConfig(expert_exchange="once-a-node")
        with suppress(FlagError):
            levels, top = levels_of_experts(forced, places, layout), layout.routing[2]
            ring = (levels.nodes * levels.members - 1) / levels.members
            direct = top * (levels.nodes - 1) / levels.nodes
            once = share_of_copies(layout.routing, levels.nodes) * direct
            advice += (
                f". Rows that leave a node for each token, on one way: {ring:.1f} with allgather, {once:.1f} with "
                f"alltoall and --expert-exchange once-a-node, {direct:.1f} with alltoall alone"
            )
        found.append(Finding("tokens", advice, "warn"))
    return found
