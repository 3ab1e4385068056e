"""Plans of gradient buckets from plain records, without Megatron: compressed and dense parameters, and bytes."""

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.legs import Span, all_reduce, reduce_scatter, sent
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.reducers import DensePlan
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan, gather_plan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord, replaced_group
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan

RANKS = 4
LAYER: Sequence[dict[str, Any]] = ({"shape": (256, 128)}, {"shape": (256,)}, {"shape": (128, 256)}, {"shape": (128,)})
EXPERTS: Sequence[dict[str, Any]] = ({"shape": (64, 128), "expert": True}, {"shape": (128, 64), "expert": True})
TIED: Sequence[dict[str, Any]] = ({"shape": (512, 128), "tied": True, "embedding": True},)
WORDS: Sequence[dict[str, Any]] = ({"shape": (512, 128), "embedding": True},)


def bucket(*parameters: dict[str, Any], dtype: torch.dtype = torch.float32, **how: Any) -> BucketRecord:
    """Make a record of parameters one after the other, padded so that every number of ranks here divides it."""
    sizes = [torch.Size(parameter["shape"]).numel() for parameter in parameters]
    ends = list(accumulate(sizes))
    records = [ParameterRecord(**p, start=end - n) for p, end, n in zip(parameters, ends, sizes, strict=True)]
    return BucketRecord(numel=-(-ends[-1] // 512) * 512, dtype=dtype, parameters=records, **how)


def plan(*records: BucketRecord, **rules: Any) -> GroupPlan:
    return GroupPlan.of(records, BucketRules(**{"ranks": RANKS, "format": "int4", **rules}))


def ways(found: GroupPlan) -> list[tuple[Any, Any]]:
    """Return the kinds of each bucket's reductions, in the warm-up and after it."""
    return [(kind(each.warmup), kind(each.compressed)) for each in found.buckets]


def gradients(found: GroupPlan, compressing: bool | None = None) -> int:
    """Return the bytes of gradients, without a tied embedding; vanilla Megatron's by default."""
    return found.bytes_by_class(compressing)[DP_GRADIENTS].sent


def kind(reduction: Any) -> str | None:
    names = {DensePlan: "dense", LowRankPlan: "low-rank"}
    if isinstance(reduction, ExchangePlan):
        return reduction.formats.gradients
    return None if reduction is None else names[type(reduction)]


# -- which gradients are compressed -----------------------------------------------------------------------------------


def test_matrices_are_coded_in_blocks_and_vectors_sent_as_they_are():
    (only,) = plan(bucket(*LAYER, *EXPERTS, *WORDS)).buckets
    assert only.warmup is None, "Megatron reduces it until compression begins"
    starts = [record.range for record in only.record.parameters]
    assert list(only.compressed.coded) == [starts[i] for i in (0, 2, 4, 5, 6)]
    assert list(only.compressed.dense) == [starts[i] for i in (1, 3)]


def test_routers_stay_as_they_are_in_block_formats_and_in_the_gather_of_parameters():
    records = bucket(*LAYER, {"shape": (8, 128), "router": True})
    (only,) = plan(records, gathered="int4").buckets
    router = records.parameters[-1].range
    assert router in only.compressed.dense and router not in only.compressed.coded
    gather = gather_plan(records, "int4", 4)
    assert router in gather.dense and router not in gather.coded


def test_low_rank_leaves_experts_and_embeddings_dense_and_matrices_on_which_it_saves_nothing():
    records = bucket(*LAYER, *EXPERTS, *WORDS, {"shape": (8, 8)})
    (only,) = plan(records, format="low-rank", rank=16).buckets
    assert [parameter.start for parameter in only.compressed.low_rank] == [records.parameters[i].start for i in (0, 2)]
    (forced,) = plan(records, format="low-rank", rank=128, force=True).buckets
    assert [p.shape for p in forced.compressed.low_rank] == [(256, 128), (128, 256), (8, 8)]
    assert ways(plan(records, format="low-rank", rank=128)) == [(None, None)], "nothing is saved at full rank"


def test_low_rank_leaves_a_bucket_to_megatron_whose_factors_and_dense_rest_are_more_bytes_than_its_sum():
    """Low rank all-reduces what stays dense, twice the bytes of the distributed optimizer's reduce-scatter."""
    experts = bucket(*LAYER, *EXPERTS * 5)
    rules = {"format": "low-rank", "rank": 16}
    whole, shards = (plan(experts, **rules, sharded=sharded) for sharded in (False, True))
    assert ways(whole) == [(None, "low-rank")] and gradients(whole, True) < 0.7 * gradients(whole)
    assert ways(shards) == [(None, None)] and not shards.compresses
    assert gradients(shards, True) == gradients(shards) and shards.kept_dense is None
    assert ways(plan(experts, **rules, sharded=True, force=True)) == [(None, "low-rank")], "a test forces it"
    assert plan(experts, **rules, sharded=True, ranks=1).kept_dense is None, "two ranks would not compress it either"
    # In a group, a bucket that stays dense is reduced by the same collective as Megatron's, beside one that does not.
    both = plan(bucket(*LAYER), experts, **rules, sharded=True)
    assert ways(both) == [(None, "low-rank"), (None, "dense")]
    assert (shards.unpaid, both.unpaid, whole.unpaid) == (1, 1, 0)
    dense = both.buckets[1].compressed
    assert sent(dense.legs()) == gradients(shards) and dense.runs == [(0, experts.numel)]
    assert both.buckets[0].compressed.matrices == 2
    in_fp32 = plan(bucket(*LAYER), experts, **rules, sharded=True, in_fp32=True).buckets[1].compressed
    assert in_fp32.matrices == 0 and sent(in_fp32.legs()) == gradients(shards)


def test_equal_bytes_are_no_gain_and_blocks_that_tests_pass_through_are_kept():
    """A matrix of 64 x 64 values in rank 16 is half as many, and an all-reduce sends them twice."""
    square = bucket({"shape": (64, 64)})
    rules = {"format": "low-rank", "sharded": True}
    found = [plan(square, **rules, rank=rank) for rank in (15, 16)]
    assert list(map(ways, found)) == [[(None, "low-rank")], [(None, None)]]
    exact = plan(bucket(*LAYER, parameter_dtype=torch.bfloat16), format="fp32", gathered="fp32", sharded=True)
    assert ways(exact) == [(None, "fp32")] and exact.buckets[0].gather is not None
    # A block is one rank's, and all messages are as long as its: with 8 ranks more bytes than the values themselves.
    tiny = plan(bucket(*LAYER), bucket({"shape": (16, 8)}, {"shape": (8,)}), format="int8", ranks=8)
    assert ways(tiny) == [(None, "int8"), (None, "dense")]
    assert tiny.buckets[1].compressed.runs == [(0, 16 * 8 + 8)], "all its gradients are summed"


def test_blocks_leave_dense_what_a_large_router_makes_as_long_as_it_was():
    """Messages are as long as the longest, so the shard with the router lengthens those of all others."""
    record = bucket(
        {"shape": (48, 128), "router": True}, *LAYER[:1], {"shape": (128, 64)}, parameter_dtype=torch.bfloat16
    )
    rules = {"format": "int8", "sharded": True, "gathered": "int8", "ranks": 8}
    found = plan(record, **rules)
    assert ways(found) == [(None, None)] and found.buckets[0].gather is None
    assert (found.unpaid, found.ungathered) == (1, 1)
    small = plan(bucket({"shape": (8, 128), "router": True}, *LAYER, parameter_dtype=torch.bfloat16), **rules)
    assert ways(small) == [(None, "int8")] and small.buckets[0].gather is not None
    assert (small.unpaid, small.ungathered) == (0, 0)
    several = plan(record, *[small.buckets[0].record] * 3, **rules)
    assert all(each.gather is not None for each in several.buckets), "a group is gathered as a whole, or by Megatron"
    assert sum(each.gather.gather_leg().nbytes for each in several.buckets) < several.gathered[0].sent


@pytest.mark.parametrize("seed", range(40))
def test_a_bucket_is_compressed_where_that_sends_less_than_megatron_and_all_ranks_of_a_group_choose_alike(seed: int):
    draw = random.Random(seed)
    sizes = [64, 128, 192, 384]
    parameters = [
        {"shape": (draw.choice(sizes),)} if draw.random() < 0.3
        else {"shape": (draw.choice(sizes), draw.choice(sizes)), draw.choice(["expert", "embedding", "router"]): True}
        if draw.random() < 0.5 else {"shape": (draw.choice(sizes), draw.choice(sizes))}
        for _ in range(draw.randint(1, 9))
    ]  # fmt: skip
    record = bucket(*parameters, dtype=draw.choice([torch.float32, torch.bfloat16]))
    levels = draw.choice([ONE_LEVEL, Levels(nodes=2, members=4)])
    rules = {
        "ranks": 8, "levels": levels, "sharded": draw.random() < 0.5, "rank": draw.choice([4, 16, 64]),
    }  # fmt: skip
    for format in ("low-rank", "int8", "int4"):
        places = [plan(record, **rules, format=format, place=place) for place in range(levels.members)]
        assert len({found.compresses for found in places}) == 1
        first = places[0]
        assert gradients(first, True) < gradients(first) if first.compresses else (
            gradients(first, True) == gradients(first)
        )  # fmt: skip
        tied = plan(record, bucket(*TIED), **rules, format=format, fused="int8")
        assert len({each.compressed is None for each in tied.buckets}) == 1, "all buckets of a group, or none"


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("format", ["int4", "low-rank"])
def test_a_group_of_one_rank_is_megatrons_unless_a_test_forces_it(format, sharded):
    rules = {"ranks": 1, "format": format, "rank": 4, "sharded": sharded, "fused": "int8", "gathered": "int4"}
    records = bucket(*LAYER, parameter_dtype=torch.bfloat16), bucket(*TIED, parameter_dtype=torch.bfloat16)
    alone = plan(*records, **rules)
    assert ways(alone) == [(None, None)] * 2 and [each.gather for each in alone.buckets] == [None, None]
    assert gradients(alone, True) == gradients(alone) == alone.gathered[0].sent == 0
    assert ways(plan(*records, **rules | {"force": True}))[0][1] == format
    assert [each.gather is None for each in plan(*records, **rules | {"ranks": 2}).buckets] == [not sharded] * 2


@pytest.mark.parametrize(
    ("parameters", "rules", "named"),
    [
        ([LAYER], {"ranks": 2}, None),
        ([EXPERTS], {}, "gradients of routed experts"),
        ([LAYER], {}, "all gradients of a model chunk"),
        ([EXPERTS], {"format": "low-rank"}, None),
        ([EXPERTS], {"format": "dense"}, None),
        ([TIED], {"format": "dense", "sharded": True, "fused": "int4"}, "gradients of the tied embedding"),
        ([TIED], {"format": "dense", "sharded": True, "fused": "dense"}, None),
    ],
    ids=["two replicas", "experts", "a chunk", "experts are dense anyway", "off", "tied, coded", "tied, dense"],
)
def test_what_one_rank_alone_keeps_dense_has_a_name(parameters, rules, named):
    assert plan(*(bucket(*each) for each in parameters), **{"ranks": 1, "rank": 4} | rules).kept_dense == named


# -- the tied embedding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "of_layers", "of_tied"),
    [
        ({}, (None, "int4"), (None, "int4")),
        ({"format": "low-rank", "rank": 16}, (None, "low-rank"), (None, "dense")),
        # The embedding is always left out of the sum over the replicas, because the union of both stages' replicas sums
        # it.
        ({"fused": "dense"}, ("dense", "int4"), ("dense", "dense")),
        ({"fused": "int8"}, ("dense", "int4"), ("dense", "dense")),
        ({"fused": "int8", "format": "dense"}, ("dense", None), ("dense", None)),
        # The embedding is always reduced over the replicas, in the format of fused embedding synchronisation.
        ({"fused": "dense", "sharded": True}, (None, "int4"), (None, "dense")),
        ({"fused": "int8", "sharded": True}, ("dense", "int4"), ("int8", "int8")),
        ({"fused": "int8", "sharded": True, "format": "dense"}, ("dense", None), ("int8", None)),
    ],
    ids=str,
)
def test_a_tied_embeddings_bucket_is_reduced_by_its_own_technique_in_the_warm_up_as_well(rules, of_layers, of_tied):
    found = plan(bucket(*LAYER), bucket(*TIED), **rules)
    assert ways(found) == [of_layers, of_tied]
    left_out = "fused" in rules and not rules.get("sharded")
    assert found.leaves_out == left_out
    tied = found.buckets[1]
    assert tied.fused == (rules.get("fused") == "int8" and rules.get("sharded", False))
    if left_out:
        assert tied.warmup.runs == [] and found.buckets[0].warmup.runs == [(0, 256 * 128 + 256 + 128 * 256 + 128)]


def test_bytes_of_a_tied_embedding_are_its_own_class_wherever_it_lies():
    apart = plan(bucket(*LAYER), bucket(*TIED))
    nbytes, tied = 4 * apart.buckets[0].record.numel, 4 * 512 * 128
    assert apart.tied_bytes == tied and gradients(apart) == all_reduce(nbytes, Span(RANKS)).nbytes
    of_layer = sent(apart.buckets[0].compressed.legs())
    of_tied = sent(apart.buckets[1].compressed.legs())
    assert apart.vanilla[EMBEDDING].sent == all_reduce(tied, Span(RANKS)).nbytes
    assert apart.bytes_by_class(True)[EMBEDDING].sent == of_tied
    assert gradients(apart, True) == of_layer < 0.3 * gradients(apart)
    # In a shared bucket, the embedding's share of the bytes equals the bytes that it would send by itself.
    among = plan(bucket(*LAYER, *TIED))
    assert gradients(among, True) == sent(among.buckets[0].compressed.legs()) - of_tied
    assert apart.bytes_by_class(False) == apart.vanilla, "Megatron's"


# -- from settings, and from a model ----------------------------------------------------------------------------------


def test_rules_are_what_the_configuration_says_and_tests_may_put_a_format_that_loses_nothing_in_its_place():
    config = OptimusConfig(
        dp_compression_format="int4", fused_embedding_sync=True, fused_embedding_sync_format="int8",
        param_gather_format="int4", dp_compression_rank=7, message_memory=30,
    )  # fmt: skip
    rules = BucketRules.of(config, ranks=8, sharded=True, fused=True)
    assert rules == BucketRules(
        ranks=8, sharded=True, format="int4", sums="int8", rank=7, fused="int8", gathered="int4", slot_bytes=7_500_000
    )  # fmt: skip
    assert BucketRules.of(config, ranks=8, sharded=True, fused=False).fused is None
    in_exact = OptimusConfig(dp_compression_format="int4", _exact_blocks=True)
    exact = BucketRules.of(in_exact, ranks=2, sharded=False, fused=True)
    assert (exact.format, exact.sums, exact.fused) == ("fp32", "fp32", "dense")
    assert (
        BucketRules.of(OptimusConfig(dp_compression_format="low-rank"), ranks=2, sharded=False, fused=False).format
        == "low-rank"
    )
    assert BucketRules.of(OptimusConfig(), ranks=2, sharded=False, fused=False).format == "dense"
    assert [replaced_group(sharded) for sharded in (False, True)] == [
        "data_parallel_group", "intra_distributed_optimizer_instance_group",
    ]  # fmt: skip


def test_a_model_on_the_meta_device_has_a_plan_that_answers_for_bytes_and_memory():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.Linear(4096, 1024))
    record = bucket(*({"shape": tuple(parameter.shape)} for parameter in model.parameters()))
    (only,) = plan(record, format="low-rank", rank=32).buckets
    factors = 4 * 2 * 32 * (1024 + 4096)
    assert sent(only.compressed.legs()) == all_reduce(factors + 4 * (1024 + 4096), Span(RANKS)).nbytes
    assert only.compressed.wire_bytes == factors + 4 * (1024 + 4096)
    residuals, warm_starts = 2 * 4 * 2 * 1024 * 4096, (2 + 1) * 4 * 32 * (1024 + 4096)
    assert only.compressed.state_bytes(torch.float32) == residuals + warm_starts
    (blocks,) = plan(record, sharded=True).buckets
    # The message with the biases is the longest, and all others are padded to its length: 20 KB of 1.1 MB.
    values = 2 * 1024 * 4096
    assert sent(blocks.compressed.legs()) == pytest.approx(values * (0.5 + 2 / 128) * 3 / 4, rel=0.02)
    assert sum(blocks.compressed.slice_bytes) == pytest.approx(2 * values * (0.5 + 2 / 128), rel=0.02)


def test_parameters_are_gathered_in_blocks_where_an_optimizer_keeps_master_copies_of_all_of_them():
    half, full = (bucket(*LAYER, parameter_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    rules = {"format": "dense", "sharded": True, "gathered": "int8"}
    (only,) = plan(half, **rules).buckets
    assert only.gather.formats == Formats("int8", "int8") and only.compressed is None
    assert only.gather.gather_leg().nbytes < 0.55 * plan(half, **rules).gathered[0].sent
    assert plan(half, **rules).gathered[0].sent == reduce_scatter(2 * half.numel, Span(RANKS)).nbytes
    assert [each.gather for each in plan(half, full, **rules).buckets] == [None, None], "some are stepped in place"
    assert [each.gather for each in plan(half, **rules | {"sharded": False}).buckets] == [None]
