"""Legs: the collectives in which a rank takes part, as data from which the bytes follow that it sends.

A plan returns its legs; the log, doctor and the tests of the planner add up the same list. These are logical bytes per
rank by the usual formulas: a ring all-reduce of V bytes over D ranks sends 2 V (D - 1) / D per rank, a reduce-scatter
or an all-gather half of that. The bytes on a real transport can differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Span:
    """The ranks that a leg connects."""

    ranks: int
    beside: int = 1
    """Number of these ranks on this rank's node, with this rank; all of them if nodes are unknown."""

    def inside(self, members: int) -> "Span":
        """Return the span of this rank's part, if the ranks are cut into parts of `members` consecutive ranks: into
        nodes, or into instances of the distributed optimizer.
        """
        return Span(members, min(self.beside, members))

    def across(self, members: int) -> "Span":
        """Return the span of one rank of each part, all with the same place in their parts of `members` ranks."""
        return Span(self.ranks // members, max(1, self.beside // members))


@dataclass(frozen=True, slots=True)
class Leg:
    """One collective, or several of one kind over the same ranks."""

    kind: Literal["ring", "exchange"]
    """A ring, which crosses each node once, whatever the number of its ranks there; or an exchange, in which a rank
    sends an equal part to every other rank.
    """

    nbytes: int
    """Bytes that this rank sends."""

    span: Span

    @property
    def leaving(self) -> float:
        """The rank's share of the bytes that leave its node."""
        ranks, beside = self.span.ranks, self.span.beside
        if self.kind == "ring":
            return self.nbytes / beside if beside < ranks else 0.0
        return self.nbytes * (ranks - beside) / max(1, ranks - 1)


class Bytes(NamedTuple):
    """Bytes that a rank sends, and its share of the bytes that leave its node."""

    sent: int
    leaving: float


def bytes_of(legs: Iterable[Leg]) -> Bytes:
    """Add up the bytes of legs."""
    legs = list(legs)
    return Bytes(sum(leg.nbytes for leg in legs), sum(leg.leaving for leg in legs))


def sent(legs: Iterable[Leg]) -> int:
    """Return the bytes that a rank sends in these legs."""
    return bytes_of(legs).sent


def all_reduce(nbytes: int, span: Span) -> Leg:
    """Return the leg of a ring all-reduce of `nbytes`."""
    return Leg("ring", 2 * nbytes * (span.ranks - 1) // span.ranks, span)


def reduce_scatter(nbytes: int, span: Span) -> Leg:
    """Return the leg of a ring that sums `nbytes`, or gathers them, so that each rank gives or gets an equal part."""
    return Leg("ring", nbytes * (span.ranks - 1) // span.ranks, span)


def sharded(nbytes: int, span: Span, instances: int = 1) -> list[Leg]:
    """Return the legs of a sum of `nbytes` for the distributed optimizer: a reduce-scatter inside an instance of it,
    and an all-reduce of the shard between instances.
    """
    owners = span.ranks // instances
    inside = reduce_scatter(nbytes, span.inside(owners))
    return [inside, all_reduce(nbytes // owners, span.across(owners))] if instances > 1 else [inside]


def exchange(message: int, span: Span) -> Leg:
    """Return the leg of an exchange in which every other rank gets a message of `message` bytes of its own."""
    return Leg("exchange", message * (span.ranks - 1), span)


def gather(message: int, span: Span) -> Leg:
    """Return the leg of an all-gather in a ring, which takes this rank's `message` bytes to every other rank."""
    return Leg("ring", message * (span.ranks - 1), span)
