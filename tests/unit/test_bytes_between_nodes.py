"""Bytes that leave a node, by the plans of a bucket: held against the formulas of a ring, one level and two levels."""

import pytest
import torch

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.legs import bytes_of, sent
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.reducers import DensePlan

MEMBERS = pytest.mark.parametrize("members", [1, 2, 4, 8])
NODES = pytest.mark.parametrize("nodes", [2, 4, 16])
CODED = {"int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128}
"""Bytes of a value in a format of blocks: its code, and its share of a scale of two bytes."""


def numel(nodes: int, members: int) -> int:
    """Return a number of values at which the sections of a message, multiples of 16 bytes, need no padding in any
    shard."""
    return nodes * members * 128 * 64


@MEMBERS
@NODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_crosses_each_node_once(nodes: int, members: int, dtype: torch.dtype) -> None:
    ranks, values = nodes * members, numel(nodes, members)
    plan = DensePlan(numel=values, dense=[(0, values)], dtype=dtype, ranks=ranks, sharded=True)
    of_a_node = members * bytes_of(plan.legs(members)).leaving
    assert of_a_node == dtype.itemsize * values * (ranks - 1) / ranks
    assert members * bytes_of(plan.legs(members, whole=True)).leaving == 2 * of_a_node


@MEMBERS
@NODES
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_one_level_sends_what_each_replica_of_a_node_has_and_two_levels_their_sum(
    nodes: int, members: int, format: str
) -> None:
    ranks, values = nodes * members, numel(nodes, members)
    of_a_node = {}
    for levels in (ONE_LEVEL, Levels(nodes=nodes, members=members)):
        of_a_node[levels.two] = sum(
            bytes_of(ExchangePlan(
                numel=values, coded=[(0, values)], dtype=torch.float32, ranks=ranks, sharded=True,
                formats=Formats(format, "int8"), levels=levels, place=place,
            ).legs(members)).leaving
            for place in range(members)
        )  # fmt: skip
    once = CODED[format] * values * (nodes - 1) / nodes
    assert of_a_node[False] == members * once
    if members > 1:
        assert of_a_node[True] == once


@pytest.mark.parametrize("nodes, members, bf16, fp32", [(2, 2, 0.34, 0.17), (2, 4, 0.29, 0.145)])
def test_int8_in_two_levels_sends_these_shares_of_a_ring(nodes: int, members: int, bf16: float, fp32: float) -> None:
    ranks, values = nodes * members, numel(nodes, members)
    plan = ExchangePlan(
        numel=values, coded=[(0, values)], dtype=torch.float32, ranks=ranks, sharded=True,
        formats=Formats("int8", "int8"), levels=Levels(nodes=nodes, members=members),
    )  # fmt: skip
    for dtype, share in ((torch.bfloat16, bf16), (torch.float32, fp32)):
        ring = DensePlan(numel=values, dense=[(0, values)], dtype=dtype, ranks=ranks, sharded=True)
        assert bytes_of(plan.legs(members)).leaving / bytes_of(ring.legs(members)).leaving == pytest.approx(
            share, rel=0.01
        )


@pytest.mark.parametrize("beside, inside, sums", [(2, 0, 3), (1, 4 / 2, 3), (4, 0, 2)])
def test_instances_send_dense_what_an_instance_sends_between_nodes_and_sums_in_few_bits(
    beside: int, inside: float, sums: int
) -> None:
    # 4 instances of 2 ranks each, on nodes that hold `beside` of the 8 ranks.
    levels, values = Levels(nodes=4, members=2, instances=True), numel(4, 8)
    plan = ExchangePlan(
        numel=values,
        coded=[(0, values)],
        dtype=torch.float32,
        ranks=8,
        sharded=True,
        formats=Formats("int8", "int8"),
        levels=levels,
    )
    # Each of 4 ranks holds the same half of the values, and sends a quarter of that half to each of the three others,
    # of which those on other nodes count. The sums come back in a ring, which leaves a node once for all of its ranks.
    there, back = sums * CODED["int8"] / 8, 3 * CODED["int8"] / 8 / max(1, beside // 2)
    assert bytes_of(plan.legs(beside)).leaving == pytest.approx(values * (inside + there + back))
    dense = DensePlan(numel=values, dense=[], dtype=torch.float32, ranks=8, sharded=True, instances=4)
    ring = 4 * 2 * 3 / 4 / 2 / max(1, beside // 2)
    assert bytes_of(dense.legs(beside)).leaving == pytest.approx(values * (inside + ring))
    assert sent(dense.legs()) == values * (4 / 2 + 4 * 2 * 3 / 4 / 2)


def test_nothing_leaves_a_node_that_holds_the_whole_group() -> None:
    plan = DensePlan(numel=1024, dense=[(0, 1024)], dtype=torch.float32, ranks=4, sharded=False)
    assert bytes_of(plan.legs(4)).leaving == 0
    coded = ExchangePlan(
        numel=1024,
        coded=[(0, 1024)],
        dtype=torch.float32,
        ranks=4,
        sharded=False,
        formats=Formats("int8", "int8"),
        levels=ONE_LEVEL,
    )
    assert bytes_of(coded.legs(4)).leaving == 0 < bytes_of(coded.legs(2)).leaving
