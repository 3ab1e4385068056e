"""Rows that leave a node once: an all-to-all in two hops, between nodes and then inside a node.

A token is one row, and its experts are on ranks of several nodes. Hop 1 takes the row once to each of these nodes, over
the rail: to the rank that has the sender's place there. Hop 2 takes the row on to the ranks of its experts. Rows for
the own node take the same way, on which hop 1 is a copy. Rows arrive in the order of a plain all-to-all.

    spread: a row goes to every expert of its token.
    collect: the results that the experts of a node have for a token are added up there; the sum comes back in the place
        of the token's first copy for that node, with zeros in the places of the other copies.

Both are each other's transpose, so that the gradient of one is the other.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from optimus_cc_ext.collectives.calls import start_all_to_all
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Bytes


class Coding(Protocol):
    """Encoder and decoder of rows."""

    tag: str
    """The name of the traffic in errors."""

    def encode(self, rows: Tensor) -> Tensor: ...
    def decode(self, message: Tensor, dtype: torch.dtype) -> Tensor: ...


def exchange(
    rows: Tensor, group: dist.ProcessGroup, received: Sequence[int] | None, sent: Sequence[int] | None, purpose: str
) -> Tensor:  # fmt: skip
    """Send rows (n, width) to the ranks of `group`; return the rows (m, width) that have arrived from them.

    Args:
        received, sent: numbers of rows from and to each rank of the group; None: the same number for each.

    Raises:
        OptimusError: the all-to-all failed.
    """
    number = rows.shape[0] if received is None else sum(received)
    arrived = rows.new_empty(number, *rows.shape[1:])
    start_all_to_all(arrived, rows.contiguous(), group, purpose, received, sent).wait()
    return arrived


class Numbers:
    """Numbers of rows for the two hops, which one small exchange over the rail completes.

    Args:
        routing: true where a token goes to an expert, (tokens, experts).
        splits: the number of copies for each rank of the group, on the device.
        groups: the group of the experts' ranks, in two levels.
    """

    def __init__(self, routing: Tensor, splits: Tensor, groups: Groups) -> None:
        nodes, members = groups.levels.nodes, groups.levels.members
        self.routing, self.groups = routing, groups
        self.touched = routing.view(routing.shape[0], nodes, routing.shape[1] // nodes).any(2).T
        """True where a token has an expert on a node, (nodes, tokens)."""

        mine = torch.cat([self.touched.sum(1, keepdim=True), splits.view(nodes, members)], 1)
        self.theirs = exchange(mine, groups.across, None, None, "the exchange of the numbers of tokens between nodes")
        """Rows from each rank of the rail, and their copies for each rank of this node: (nodes, 1 + members)."""

        self.host = self._counted = torch.cat([mine[:, :1], self.theirs], 1)

    def to_host(self) -> None:
        """Copy the numbers to the host in the current stream, which the host has to wait for before it reads them.

        Until then the device's numbers stay: another stream, whose memory they are, would write over them.
        """
        self.host = self._counted.to("cpu", non_blocking=True)

    @property
    def nbytes(self) -> int:
        """Bytes of the small exchange that leave this rank."""
        return self.theirs[1:].nbytes


class TwoHops:
    """Way of the rows of one dispatch, and back. The device computes places; the host knows only numbers of rows.

    Args:
        numbers: the numbers of this dispatch, which have reached the host.
        numel: the number of this rank's rows: each token once for each of its experts, sorted by expert and token.
        arriving: the number of rows that arrive from each rank of the group.
    """

    def __init__(self, numbers: Numbers, numel: int, arriving: Sequence[int]) -> None:
        groups, routing = numbers.groups, numbers.routing
        nodes, members = groups.levels.nodes, groups.levels.members
        self._rail, self._node, self._numel = groups.across, groups.node or groups.whole, numel
        self._sent, self._received, *copies = numbers.host.T.tolist()
        self._forwarded = [sum(of_rank) for of_rank in copies]
        self._arriving = [list(arriving[node * members :][:members]) for node in range(nodes)]
        tokens, experts = routing.shape[0], routing.shape[1] // nodes
        by_node = routing.T.reshape(nodes, experts, tokens)
        row = by_node.reshape(-1).cumsum(0).view(by_node.shape) - 1
        first = row.gather(1, by_node.int().argmax(1, keepdim=True)).squeeze(1)
        self._first = _packed(numbers.touched, first, sum(self._sent))
        """The row of each token's first copy for each node."""

        which = _packed(numbers.touched, torch.arange(nodes * tokens, device=routing.device), sum(self._sent))
        bits = _to_bits(by_node.transpose(1, 2).reshape(nodes * tokens, experts).index_select(0, which))
        self._ahead = numbers.nbytes + bits.shape[1] * self._others(self._sent, self._rail)
        arrived = exchange(bits, self._rail, self._received, self._sent, "the exchange of tokens' experts")
        self._forward(_from_bits(arrived, experts), numbers.theirs[:, 0])

    def _forward(self, chosen: Tensor, received: Tensor) -> None:
        """Compute the places of copies, sorted by (rank of this node, source node, expert, token).

        Args:
            chosen: true where a row that hop 1 brings goes to an expert of this node, (rows, experts).
            received: the number of these rows from each node, on the device.
        """
        (rows, experts), nodes, members = chosen.shape, len(self._received), len(self._forwarded)
        total, device = sum(self._forwarded), chosen.device
        source = torch.arange(nodes, device=device).repeat_interleave(received, output_size=rows)
        counts = torch.zeros(nodes, experts, dtype=torch.long, device=device).index_add_(0, source, chosen.long())
        ordered = counts.view(nodes, members, -1).transpose(0, 1)
        starts = (ordered.reshape(-1).cumsum(0) - ordered.reshape(-1)).view(ordered.shape).transpose(0, 1)
        # Rows of earlier nodes are in the running count of an expert's rows.
        starts = starts.reshape(counts.shape) - (counts.cumsum(0) - counts)
        place = torch.where(chosen, starts.index_select(0, source) + chosen.cumsum(0) - 1, total)
        row = torch.arange(rows, device=device).unsqueeze(1).expand(rows, experts)
        self._row_of_copy = _scattered(place, row, total)
        # A router may give a token more experts than --moe-router-topk.
        self._copies, of_row = _packed(chosen, place, total), chosen.sum(1)
        """The places of all copies: row after row, and those of a row in the order of its experts."""

        self._starts = of_row.cumsum(0) - of_row
        """The beginning of each row's copies in `_copies`."""

    def spread(self, rows: Tensor, coding: Coding) -> Tensor:
        """Return the rows at their experts, sorted by source rank, expert and token; coded once, and decoded once."""
        purposes = (f"hop 1 of {coding.tag}, between nodes", f"hop 2 of {coding.tag}, in a node")
        once = coding.encode(rows.index_select(0, self._first))
        once = exchange(once, self._rail, self._received, self._sent, purposes[0])
        copies = once.index_select(0, self._row_of_copy)
        copies = exchange(copies, self._node, self._from_members, self._forwarded, purposes[1])
        return coding.decode(self._turned(copies, by_node=False), rows.dtype)

    def collect(self, rows: Tensor, coding: Coding) -> Tensor:
        """Return the sum of each token's results on each node, as it was spread: added up in fp32, and coded then."""
        purposes = (f"hop 1 of {coding.tag}, between nodes", f"hop 2 of {coding.tag}, in a node")
        copies = self._turned(rows, by_node=True)
        copies = exchange(copies, self._node, self._forwarded, self._from_members, purposes[1])
        # CUDA's kernel adds up in fp32, copy by copy, and rounds once; the CPU's rounds bf16 in its own way.
        copies = copies if copies.is_cuda else copies.to(torch.promote_types(rows.dtype, torch.float32))
        sums = torch.nn.functional.embedding_bag(self._copies, copies, self._starts, mode="sum").to(rows.dtype)
        del copies
        once = exchange(coding.encode(sums), self._rail, self._sent, self._received, purposes[0])
        arrived = coding.decode(once, rows.dtype)
        return rows.new_zeros(self._numel, rows.shape[1]).index_copy_(0, self._first, arrived)

    def nbytes(self, row: int, dense: int, *, spread: bool, first: bool = False) -> Bytes:
        """Return the bytes that this rank sends in `spread` or `collect`.

        Args:
            row, dense: bytes of a row in its wire format, and uncompressed.
            spread: True for `spread`, False for `collect`.
            first: True for the dispatch, ahead of whose rows numbers and experts' bits are sent.
        """
        numbers, inside = (self._sent, self._forwarded) if spread else (self._received, self._from_members)
        leaving = self._others(numbers, self._rail) * row + (self._ahead if first else 0)
        return Bytes(leaving + self._others(inside, self._node) * (row if spread else dense), leaving)

    @property
    def _from_members(self) -> list[int]:
        """Numbers of rows that hop 2 brings from each rank of this node."""
        return [sum(of_rank) for of_rank in zip(*self._arriving, strict=True)]

    @staticmethod
    def _others(numbers: Sequence[int], group: dist.ProcessGroup) -> int:
        return sum(numbers) - numbers[group.rank()]

    def _turned(self, rows: Tensor, *, by_node: bool) -> Tensor:
        """Sort parts by rank of the node and source node, given by source node and rank; or the other way round."""
        nodes, members = len(self._arriving), len(self._arriving[0])
        keys = [(node, member) for node in range(nodes) for member in range(members)]
        turned = sorted(keys, key=lambda key: key[::-1])
        given, wanted = (keys, turned) if by_node else (turned, keys)
        parts = dict(zip(given, rows.split([self._arriving[node][member] for node, member in given]), strict=True))
        return torch.cat([parts[key] for key in wanted])


def _scattered(places: Tensor, values: Tensor, number: int) -> Tensor:
    """Return the values at their places, which are below `number`; those of other values are `number`."""
    return values.new_empty(number + 1).scatter_(0, places.reshape(-1), values.reshape(-1))[:number]


def _packed(mask: Tensor, values: Tensor, number: int) -> Tensor:
    """Return `values[mask]`, whose length `number` the host knows, so that it waits for no device."""
    mask = mask.reshape(-1)
    return _scattered(torch.where(mask, mask.cumsum(0) - 1, number), values, number)


def _to_bits(chosen: Tensor) -> Tensor:
    """Pack booleans (rows, numel) into bytes, eight to a byte, the first one in the lowest bit."""
    rows, numel = chosen.shape
    padded = torch.nn.functional.pad(chosen.to(torch.uint8), (0, -numel % 8)).view(rows, -(-numel // 8), 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=chosen.device)).sum(2, dtype=torch.uint8)


def _from_bits(bits: Tensor, numel: int) -> Tensor:
    """Unpack bytes (rows, bytes) into booleans (rows, numel)."""
    powers = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return ((bits.unsqueeze(2) >> powers) & 1).flatten(1)[:, :numel].bool()
