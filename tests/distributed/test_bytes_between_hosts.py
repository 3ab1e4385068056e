"""Bytes that leave a host in a reduce-scatter, by the kernel's counters: a ring, gloo's own, one level and two levels.

Two hosts, which are network namespaces on one switch, hold 2 or 4 replicas each. What replicas of one host send each
other does not pass its interface.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, Tools
from optimus_cc_ext.collectives.nodes import Node
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.techniques.grid import RankPlace
from optimus_cc_ext.techniques.groups import NewGroups
from tests.distributed.hosts import enter, namespaces, needs_root, sent_bytes
from tests.forked_ranks import run_ranks

pytestmark = [needs_root, pytest.mark.full]

NUMEL = 1 << 21
"""Values of the gradient: so many that headers, acknowledgements and barriers stay below 5 %, and padding is none."""

ROUNDS = 3
"""Number of rounds, whose smallest count is taken: on a busy machine TCP sends segments again."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[str]]:
    with namespaces(2) as names:
        yield names


def _ring(flat: torch.Tensor) -> None:
    """Reduce-scatter `flat` in a ring: part by part to the next rank, which adds its own, for all parts but the own."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    parts, arrived = flat.view(ranks, -1), torch.empty_like(flat.view(ranks, -1)[0])
    for step in range(ranks - 1):
        sent = dist.isend(parts[(rank - step - 1) % ranks], (rank + 1) % ranks)
        dist.recv(arrived, (rank - 1) % ranks)
        sent.wait()
        parts[(rank - step - 2) % ranks].add_(arrived)


def _measure(hosts: list[str], members: int) -> dict[str, int]:
    """Return the bytes that left this rank's host, by the way of the reduction."""
    rank = enter(hosts[int(os.environ["RANK"]) // members])
    ranks = dist.get_world_size()
    places = [RankPlace(rank=r, stage=0, tensor_rank=0, node=Node(str(r // members))) for r in range(ranks)]
    two = NewGroups(places, dist.group.WORLD, None).in_levels(dist.group.WORLD, two=True)

    def blocks(format: str, groups: Groups) -> Callable[[torch.Tensor], None]:
        codecs = BlockCodecs(*(fast_codec(name, seed=1, rotated=True) for name in (format, "int8")))
        plan = ExchangePlan(
            numel=NUMEL, coded=[(0, NUMEL)], dtype=torch.float32, ranks=ranks, sharded=True, formats=codecs.formats,
            levels=groups.levels, place=groups.place,
        )  # fmt: skip
        return plan.bind(groups, Tools(device=torch.device("cpu"), codecs=codecs)).reduce

    ways: dict[str, tuple[torch.dtype, Callable[[torch.Tensor], None]]] = {
        "ring, fp32": (torch.float32, _ring),
        "ring, bf16": (torch.bfloat16, _ring),
        "gloo, fp32": (
            torch.float32, lambda flat: dist.reduce_scatter_tensor(flat.view(ranks, -1)[rank].clone(), flat)
        ),
        "one level, int8": (torch.float32, blocks("int8", Groups(dist.group.WORLD))),
        "one level, int4": (torch.float32, blocks("int4", Groups(dist.group.WORLD))),
        "two levels, int8": (torch.float32, blocks("int8", two)),
        "two levels, int4": (torch.float32, blocks("int4", two)),
    }  # fmt: skip
    found = {}
    for name, (dtype, reduce) in ways.items():
        reduce(torch.ones(NUMEL, dtype=dtype))  # gloo makes its connections on first use, which is not counted
        rounds = []
        for _ in range(ROUNDS):
            flat = torch.ones(NUMEL, dtype=dtype)
            dist.barrier()
            before = sent_bytes()
            dist.barrier()  # all ranks of a host read its counter before one of them sends
            reduce(flat)
            dist.barrier()
            rounds.append(sent_bytes() - before)
            if not name.startswith("gloo"):
                shard = flat.view(ranks, -1)[rank].float()
                # All ranks have equal gradients, whose rounding errors are equal, too, and do not average out.
                assert (shard - ranks).norm() < 0.2 * ranks * shard.numel() ** 0.5, name
        found[name] = min(rounds)
    return found


@pytest.mark.parametrize("members", [2, 4])
def test_two_levels_send_the_share_of_a_ring_that_the_format_has_and_one_level_that_of_every_replica(hosts, members):
    sent = run_ranks(2 * members, _measure, hosts, members, timeout=170)[0]
    ring = {dtype: sent[f"ring, {dtype}"] for dtype in ("fp32", "bf16")}
    ranks, size = 2 * members, NUMEL * 4
    for name, nbytes in sent.items():
        print(
            f"2 x {members}, {name}: {nbytes / ring['fp32']:.3f} of a ring of fp32, {nbytes / ring['bf16']:.3f} of bf16"
        )
    assert ring["fp32"] == pytest.approx(size * (ranks - 1) / ranks, rel=0.05)
    expected = {2: (0.34, 0.17), 4: (0.29, 0.145)}[members]
    two = sent["two levels, int8"]
    assert (two / ring["bf16"], two / ring["fp32"]) == pytest.approx(expected, rel=0.05)
    for format, bytes_a_value in (("int8", 1.016), ("int4", 0.516)):
        assert sent[f"two levels, {format}"] == pytest.approx(NUMEL * bytes_a_value / 2, rel=0.05)
        assert sent[f"one level, {format}"] == pytest.approx(members * NUMEL * bytes_a_value / 2, rel=0.05)
    if members == 4:
        assert sent["one level, int8"] / ring["bf16"] == pytest.approx(1.16, rel=0.05)


def _gather(hosts: list[str], members: int) -> int:
    """Return the bytes that left this rank's host in an all-gather."""
    rank = enter(hosts[int(os.environ["RANK"]) // members])
    ranks = dist.get_world_size()
    flat, rounds = torch.ones(NUMEL), []
    for _ in range(1 + ROUNDS):  # gloo makes its connections on first use
        dist.barrier()
        before = sent_bytes()
        dist.barrier()
        dist.all_gather_into_tensor(flat, flat.view(ranks, -1)[rank].clone())
        dist.barrier()
        rounds.append(sent_bytes() - before)
    return min(rounds[1:])


@pytest.mark.parametrize("members", [2, 4])
def test_a_gather_of_parameters_crosses_each_node_once_without_a_level_of_its_own(hosts, members):
    sent, ranks = run_ranks(2 * members, _gather, hosts, members, timeout=170)[0], 2 * members
    ring = NUMEL * 4 * (ranks - 1) / ranks
    print(f"2 x {members}, all-gather: {sent / ring:.3f} of a ring that crosses each node once")
    assert sent == pytest.approx(ring, rel=0.05)
