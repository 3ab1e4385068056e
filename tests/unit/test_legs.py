"""Legs of plans, over thousands of random plans."""

import random

import pytest
import torch

from optimus_cc_ext.collectives.legs import bytes_of
from optimus_cc_ext.collectives.nodes import Levels
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan, ParameterRecord, ReductionPlan

Moved = tuple[int, float]
"""Bytes that a rank sends, and those that leave its node."""

GROUPS = 3000


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
            shape = (512, 128) if is_tied else chosen.choice([(64, 96), (128, 256), (300,), (513,), (32, 640)])
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


def by_formula(plan: ReductionPlan, beside: int, whole: bool) -> Moved:
    return plan.sent_bytes(whole), plan.leaving_bytes(beside, whole)


def ways(group: GroupPlan) -> list[bool]:
    """Return the values of `whole` that a run uses; Megatron sums whole gradients inside one instance itself."""
    return [False] if group.rules.instances > 1 else [False, True]


def test_the_legs_of_a_plan_add_up_to_the_formulas_of_its_collectives(groups: list[GroupPlan]) -> None:
    counted = 0
    for group in groups:
        plans = [plan for bucket in group.buckets for plan in (bucket.warmup, bucket.compressed) if plan is not None]
        for plan in plans:
            for whole in ways(group):
                found = bytes_of(plan.legs(group.rules.beside, whole))
                sent, leaving = by_formula(plan, group.rules.beside, whole)
                assert found.sent == sent and found.leaving == pytest.approx(leaving, abs=1e-3), (plan, whole)
                counted += 1
    assert counted > GROUPS


def test_the_legs_of_a_group_add_up_by_class(groups: list[GroupPlan]) -> None:
    for group in groups:
        for whole in ways(group):
            for compressing in (False, True):
                found = group.bytes_by_class(compressing, whole)
                sent, saved = group.sent_bytes(compressing=compressing, whole=whole)
                tied = 0 if group.leaves_out and group._plans(compressing) else group._dense(group.tied_bytes) - saved
                assert (found[DP_GRADIENTS].sent, found[EMBEDDING].sent) == (sent, tied)
                # Parts of a sum round down by themselves where the number of replicas does not divide their bytes.
                leaving = group.leaving_bytes(compressing=compressing, whole=whole)
                assert found[DP_GRADIENTS].leaving == pytest.approx(leaving, abs=4 if group.rules.ranks % 3 == 0 else 0)
        vanilla = group.bytes_by_class(None)
        assert vanilla[DP_GRADIENTS].sent == group.dense_bytes
        assert vanilla[EMBEDDING].sent == group._dense(group.tied_bytes)


def test_the_legs_of_a_gather_add_up_to_the_formulas_of_its_rings(groups: list[GroupPlan]) -> None:
    for group in groups:
        coded = sum(bucket.gather.gathered_bytes() for bucket in group.buckets if bucket.gather is not None)
        for sent, is_coded in ((coded, True), (group.gather_bytes, False)):
            found = bytes_of(group.gather_legs(coded=is_coded))
            assert found.sent == sent
            assert found.leaving == pytest.approx(group.gather_leaving_bytes(sent), abs=1e-3)
