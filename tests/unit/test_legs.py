"""Legs of plans, over thousands of random plans, beside closed formulas that this file states once more."""

import random
from collections.abc import Iterable

import pytest
import torch

from optimus_cc_ext.collectives.legs import bytes_of
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.collectives.reducers import DensePlan
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan, ParameterRecord, ReductionPlan
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan

Moved = tuple[int, float]
"""Bytes that a rank sends, and those that leave its node."""

GROUPS = 2000
SHAPES = [(64, 96), (128, 256), (300,), (513,), (32, 640), (300_000,)]


def random_records(chosen: random.Random, unit: int, *, alone: bool) -> list[BucketRecord]:
    """Return one to three buckets, of which the first may hold a tied embedding.

    Args:
        unit: a number that divides the length of each bucket.
        alone: True if the tied embedding's bucket holds nothing else.
    """
    dtype, records = chosen.choice([torch.float32, torch.bfloat16]), []
    for number in range(chosen.randint(1, 3)):
        parameters: list[ParameterRecord] = []
        tied, end = number == 0 and chosen.random() < 0.6, 0
        for index in range(1 if tied and alone else chosen.randint(1, 5)):
            is_tied = tied and index == 0
            shape = (512, 128) if is_tied else chosen.choice(SHAPES)
            parameters.append(ParameterRecord(shape=shape, start=end, tied=is_tied))
            end += parameters[-1].range[1]
        numel = -(-end // unit) * unit
        records.append(
            BucketRecord(numel=numel, dtype=dtype, parameter_dtype=torch.bfloat16, parameters=parameters)
        )  # fmt: skip
    return records


def random_group(chosen: random.Random) -> GroupPlan:
    """Return the plan of a group of two to eight replicas on one to four nodes, with any form of compression."""
    nodes, members = chosen.choice([(1, 4), (2, 2), (4, 1), (2, 4), (4, 2), (3, 2), (1, 3), (3, 1), (2, 3)])
    ranks, instances = nodes * members, nodes > 1 and chosen.random() < 0.25
    sharded, two = instances or chosen.random() < 0.5, instances or chosen.random() < 0.6
    fused = chosen.choice([None, None, "dense", "int8"])
    format = chosen.choice(["dense", "int8", "int4", *([] if instances else ["low-rank"])])
    alone = (fused is not None and sharded) or chosen.random() < 0.5
    rules = BucketRules(
        ranks=ranks, sharded=sharded, format=format, rank=8, fused=fused, force=chosen.random() < 0.3,
        gathered=chosen.choice([None, "int8"]) if sharded else None,
        levels=Levels(nodes=nodes, members=members if two else 1, instances=instances),
        beside=chosen.choice([members, 1]) if instances else members,
        in_fp32=sharded and not instances and format != "low-rank" and chosen.random() < 0.2,
    )  # fmt: skip
    return GroupPlan.of(random_records(chosen, ranks * 128 if sharded else 1, alone=alone), rules)


@pytest.fixture(scope="module")
def groups() -> list[GroupPlan]:
    return [random_group(random.Random(seed)) for seed in range(GROUPS)]


def ring(nbytes: float, ranks: int, beside: int) -> Moved:
    """Return what one rank sends in a ring: each node is crossed once, whatever the number of its ranks."""
    sent = int(nbytes * (ranks - 1) // ranks)
    return sent, sent / beside if ranks > beside else 0


def to_each(message: int, ranks: int, beside: int) -> Moved:
    """Return what one rank sends if every other rank gets a message of its own."""
    return message * (ranks - 1), message * (ranks - beside)


def total(parts: Iterable[Moved]) -> Moved:
    parts = list(parts)
    return sum(sent for sent, _ in parts), sum(leaving for _, leaving in parts)


def shards(nbytes: int, rules: BucketRules) -> list[Moved]:
    """Return what one rank sends to sum `nbytes` of which its optimizer reads a shard."""
    each = rules.ranks // rules.instances
    inside = ring(nbytes, each, min(rules.beside, each))
    return [inside, ring(2 * (nbytes // each), rules.instances, max(1, rules.beside // each))]


def by_formula(plan: ReductionPlan, rules: BucketRules, whole: bool) -> Moved:
    """Return what one rank sends by closed formulas, from the lengths of a plan alone."""
    ranks, beside, size = rules.ranks, rules.beside, plan.dtype.itemsize
    if isinstance(plan, LowRankPlan):
        return ring(2 * (plan.wire_bytes + size * sum(n for _, n in plan.runs)), ranks, beside)
    if isinstance(plan, DensePlan):
        nbytes = size * (plan.numel if plan.sharded else sum(n for _, n in plan.dense))
        return total(shards(nbytes, rules)) if plan.sharded and not whole else ring(2 * nbytes, ranks, beside)
    members = plan.levels.members if plan.levels.two else 1
    nodes, there = ranks // members, max(1, beside // members)
    gradients, sums = plan.message_bytes
    parts = [to_each(gradients, nodes, there)]
    if not plan.sharded or rules.instances > 1 or (whole and members == 1):
        parts.append(ring(sums * nodes, nodes, there))
    for _, length in plan.slabs:
        parts += [ring(size * length, members, min(beside, members))] * (1 if plan.sharded else 2)
    if plan.sharded and whole and members > 1:
        parts.append(ring(size * plan.numel, ranks, beside))
    return total(parts + [ring(2 * size * length, ranks, beside) for _, length in plan.remainders])


def of_megatron(nbytes: int, rules: BucketRules) -> Moved:
    if rules.in_fp32:  # an all-to-all
        return nbytes * (rules.ranks - 1) // rules.ranks, nbytes // rules.ranks * (rules.ranks - rules.beside)
    return total(shards(nbytes, rules)) if rules.sharded else ring(2 * nbytes, rules.ranks, rules.beside)


def ways(group: GroupPlan) -> list[bool]:
    """Return the values of `whole` that a run uses; Megatron sums whole gradients inside one instance itself."""
    return [False] if group.rules.instances > 1 else [False, True]


def test_the_legs_of_a_plan_add_up_to_closed_formulas(groups: list[GroupPlan]) -> None:
    counted = 0
    for group in groups:
        plans = [plan for bucket in group.buckets for plan in (bucket.warmup, bucket.compressed) if plan is not None]
        for plan in plans:
            for whole in ways(group):
                found = bytes_of(plan.legs(group.rules.beside, whole))
                sent, leaving = by_formula(plan, group.rules, whole)
                assert found.sent == sent and found.leaving == pytest.approx(leaving, abs=1e-3), (plan, whole)
                counted += 1
    assert counted > GROUPS


def test_vanillas_legs_are_megatrons_collectives_and_a_tied_embedding_is_counted_apart(groups: list[GroupPlan]) -> None:
    for group in groups:
        nbytes = sum(bucket.record.numel * bucket.record.dtype.itemsize for bucket in group.buckets)
        gradients, tied = (of_megatron(n, group.rules) for n in (nbytes - group.tied_bytes, group.tied_bytes))
        assert group.vanilla[DP_GRADIENTS].sent == gradients[0]
        assert group.vanilla.get(EMBEDDING, (0, 0))[0] == tied[0]
        # Three or six replicas do not divide the embedding's bytes, and its part rounds down by itself.
        _, leaving = of_megatron(nbytes, group.rules)
        assert group.vanilla[DP_GRADIENTS].leaving == pytest.approx(leaving, abs=4 if group.rules.ranks % 3 == 0 else 0)


def test_of_a_compressed_group_the_embedding_counts_what_its_bucket_sends(groups: list[GroupPlan]) -> None:
    apart = 0
    for group in groups:
        if not group.tied_bytes or not group.compresses:
            continue
        found, first = group.bytes_by_class(True), group.buckets[0]
        assert first.compressed is not None
        everything = bytes_of(
            leg for b in group.buckets if b.compressed for leg in b.compressed.legs(group.rules.beside)
        )
        assert found[DP_GRADIENTS].sent + found[EMBEDDING].sent == everything.sent
        assert found[DP_GRADIENTS].leaving == everything.leaving
        if group.leaves_out:
            assert found[EMBEDDING].sent == 0, "the union of both stages' replicas sums it"
        elif first.record.is_all_tied:
            apart += 1
            assert found[EMBEDDING].sent == by_formula(first.compressed, group.rules, False)[0]
    assert apart


def test_the_legs_of_a_gather_are_rings_inside_an_instance(groups: list[GroupPlan]) -> None:
    for group in groups:
        rules = group.rules
        owners = rules.ranks // rules.instances
        beside = min(rules.beside, owners)
        megatrons = [ring(2 * bucket.record.numel, owners, beside) for bucket in group.buckets if rules.sharded]
        gathers = [bucket.gather for bucket in group.buckets if bucket.gather is not None]
        ours = [ring(each.message_bytes[0] * owners, owners, beside) for each in gathers]
        for found, expected in zip(group.gathered, (megatrons, ours), strict=True):
            sent, leaving = total(expected)
            assert found.sent == sent and found.leaving == pytest.approx(leaving, abs=1e-3)
