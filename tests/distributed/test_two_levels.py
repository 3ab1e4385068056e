"""Gradient buckets in two levels over real ranks: exact inside a node, and as decoded by hand between nodes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives import calls
from optimus_cc_ext.collectives.exchange import Exchange, ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import bytes_of
from optimus_cc_ext.collectives.messages import BlockCodecs, Tools
from optimus_cc_ext.collectives.nodes import Levels, Node
from optimus_cc_ext.collectives.reducers import DensePlan, DenseReducer, Reducer
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.techniques.grid import RankPlace
from optimus_cc_ext.techniques.groups import NewGroups
from tests.allocations import Watch
from tests.distributed.buckets import Bucket, Shapes
from tests.forked_ranks import run_ranks

# Some matrices do not fill their last block. Shards of ranks and parts of nodes begin and end inside of matrices.
SHAPES: Shapes = [(48, 32), (96, 32), (7,), (5, 9), (3, 11), (32,), (32, 64), (3, 4, 5), (48,)]
TINY: Shapes = [(3, 4), (5,)]
KINDS = pytest.mark.parametrize(
    ("sharded", "whole"), [(False, False), (True, False), (True, True)], ids=["whole", "shards", "gathered shards"]
)
NODES = pytest.mark.parametrize(
    ("nodes", "members"), [(2, 2), pytest.param(3, 2, marks=pytest.mark.full)], ids=["2x2", "3x2"]
)


def codecs(format: str) -> BlockCodecs:
    names = ("fp32", "fp32") if format == "fp32" else (format, "int8")
    return BlockCodecs(*(fast_codec(name, seed=1, rotated=True) for name in names))


def gradients(rank: int, ranks: int, dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES) -> Bucket:
    bucket = Bucket(shapes, parts=ranks, dtype=dtype)
    for view in bucket.views:
        view.normal_(generator=torch.Generator().manual_seed(1000 * rank + view.storage_offset()))
    return bucket


def two_levels(members: int) -> Groups:
    """Return the groups of all ranks, if each node holds `members` of them."""
    dist.init_process_group("gloo")
    places = [
        RankPlace(rank=rank, stage=0, tensor_rank=0, node=Node(f"node {rank // members}"))
        for rank in range(dist.get_world_size())
    ]
    return NewGroups(places, dist.group.WORLD, None).in_levels(dist.group.WORLD, two=True)


def plan_of(bucket: Bucket, used: BlockCodecs, levels: Levels, place: int, sharded: bool) -> ExchangePlan:
    coded, dense = bucket.ranges
    return ExchangePlan(
        numel=bucket.flat.numel(), coded=coded, dense=dense, dtype=bucket.flat.dtype, levels=levels, place=place,
        ranks=levels.nodes * levels.members, sharded=sharded, formats=used.formats,
    )  # fmt: skip


def reducer_of(bucket: Bucket, used: BlockCodecs, groups: Groups, sharded: bool) -> Exchange:
    plan = plan_of(bucket, used, groups.levels, groups.place, sharded)
    return plan.bind(groups, Tools(device=bucket.flat.device, codecs=used))


def _reduce(members: int, format: str, sharded: bool, whole: bool, dtype: torch.dtype, shapes: Shapes) -> torch.Tensor:
    groups = two_levels(members)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    bucket = gradients(rank, ranks, dtype, shapes)
    reducer = reducer_of(bucket, codecs(format), groups, sharded)
    for _ in range(2):
        bucket.flat.copy_(gradients(rank, ranks, dtype, shapes).flat)
        reducer.start(bucket.flat, whole)
        reducer.second_phase()  # the bucket group that Megatron waits for first begins the second phase of all groups
        reducer.finish()
    return bucket.flat if whole or not sharded else bucket.flat.view(ranks, -1)[rank].clone()


def reduced(
    nodes: int, members: int, format: str, sharded: bool, whole: bool,
    dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES,
) -> torch.Tensor:  # fmt: skip
    """Return the reduced gradients of every replica, after checking that whole gradients are equal to the bit."""
    found = run_ranks(nodes * members, _reduce, members, format, sharded, whole, dtype, shapes)
    if sharded and not whole:
        return torch.cat(found)
    assert all(torch.equal(found[0], other) for other in found[1:]), "replicas"
    return found[0]


def literal_sum(ranks: int, dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES) -> torch.Tensor:
    return sum(
        (gradients(rank, ranks, dtype, shapes).flat.double() for rank in range(ranks)), start=torch.zeros(()).double()
    )


@KINDS
@NODES
def test_exact_messages_reproduce_the_sum_to_rounding(nodes, members, sharded, whole):
    found, literal = reduced(nodes, members, "fp32", sharded, whole), literal_sum(nodes * members)
    # Two orders of adding six fp32 values differ by some units in the last place, 6e-8 each.
    assert (found.double() - literal).norm() < 2e-7 * literal.norm()


def test_buckets_of_bf16_are_as_exact_as_bf16_sums():
    found, literal = reduced(2, 2, "fp32", True, False, torch.bfloat16), literal_sum(4, torch.bfloat16)
    assert (found.double() - literal).norm() < 2**-8 * literal.norm()


@pytest.mark.ci
@KINDS
def test_a_bucket_without_whole_blocks_for_each_rank_is_summed_all_the_same(sharded, whole):
    found, literal = reduced(2, 2, "int8", sharded, whole, shapes=TINY), literal_sum(4, shapes=TINY)
    assert (found.double() - literal).norm() < 0.02 * literal.norm()


def by_hand(nodes: int, members: int, used: BlockCodecs) -> torch.Tensor:
    """Return the shards of all ranks: the sums of nodes, encoded and decoded by hand, and added up."""
    ranks = nodes * members
    sums = [
        sum(
            (gradients(node * members + member, ranks).flat for member in range(1, members)),
            start=gradients(node * members, ranks).flat,
        )
        for node in range(nodes)
    ]
    result = torch.zeros_like(sums[0])
    for place in range(members):
        layout = plan_of(gradients(0, ranks), used, Levels(nodes=nodes, members=members), place, True).layouts[0]
        messages = []
        for flat in sums:
            messages.append(torch.zeros(nodes, used.gradients.message_bytes(layout, flat.dtype), dtype=torch.uint8))
            used.gradients.encode(flat, layout, messages[-1])
        for node in range(nodes):
            # The sum of a rank's own node is not encoded, so it is not rounded.
            others = [sent[node] for index, sent in enumerate(messages) if index != node]
            shard = slice((node * members + place) * result.numel() // ranks, None)
            used.gradients.decode_add(torch.stack(others), layout, node, result)
            result[shard][: result.numel() // ranks] += sums[node][shard][: result.numel() // ranks]
    return result


@pytest.mark.parametrize("format", ["int4", "int8"])
def test_shards_are_what_decoding_the_sums_of_nodes_by_hand_gives_to_the_bit(format):
    found, literal = reduced(2, 2, format, True, False), literal_sum(4)
    assert torch.equal(found, by_hand(2, 2, codecs(format)))
    error = (found.double() - literal).norm() / literal.norm()
    # Blocks of Gaussian values have relative errors of .117 (int4) and .0065 (int8), as with one level.
    assert 0 < error < {"int4": 0.12, "int8": 0.008}[format]


def _left_out() -> tuple[torch.Tensor, float]:
    """Leave a range in the middle of the bucket out of its sum, as Megatron's hook does with a tied embedding."""
    groups = two_levels(2)
    bucket = gradients(dist.get_rank(), 4, shapes=[(64, 32), (40, 32), (64, 32)])
    used = codecs("fp32")
    plan = plan_of(bucket, used, groups.levels, groups.place, False)
    plan = replace(plan, coded=[plan.coded[0], plan.coded[2]])
    before = bucket.views[1].clone()
    plan.bind(groups, Tools(device=bucket.flat.device, codecs=used)).reduce(bucket.flat)
    assert torch.equal(bucket.views[1], before)
    return bucket.views[0].clone(), float(bucket.views[2].sum())


def test_values_that_are_left_out_stay_as_they_are():
    found = run_ranks(4, _left_out)
    expected = sum(gradients(rank, 4, shapes=[(64, 32)]).flat.double() for rank in range(4))
    for first, _ in found:
        assert torch.allclose(first.view(-1).double(), expected, atol=1e-5)


def _bytes_and_memory(members: int, sharded: bool, whole: bool) -> tuple[int, int, list[str]]:
    groups, sent = two_levels(members), [0]

    def counting(name: str, nbytes: Any) -> None:
        original = getattr(dist, name)

        def counted(out: torch.Tensor, *rest: Any, group: dist.ProcessGroup, **how: Any) -> Any:
            sent[0] += nbytes(out, *rest, group.size())
            return original(out, *rest, group=group, **how)

        setattr(calls.dist, name, counted)

    counting("all_reduce", lambda tensor, ranks: 2 * tensor.nbytes * (ranks - 1) // ranks)
    counting("reduce_scatter_tensor", lambda part, _, ranks: part.nbytes * (ranks - 1))
    counting("all_to_all_single", lambda _, tensor, *rest: tensor.nbytes * (rest[-1] - 1) // rest[-1])
    counting("all_gather_into_tensor", lambda _, part, ranks: part.nbytes * (ranks - 1))
    bucket = gradients(dist.get_rank(), dist.get_world_size())
    reducer = reducer_of(bucket, codecs("int4"), groups, sharded)
    reducer.reduce(bucket.flat, whole)
    counted, sent[0] = sent[0], 0
    with Watch() as watch:
        reducer.reduce(bucket.flat, whole)
    assert sent[0] == counted
    return counted, bytes_of(reducer.plan.legs(whole=whole)).sent, watch.allocated + watch.read_by_host


@KINDS
@NODES
def test_bytes_are_as_counted_and_memory_is_made_once(nodes, members, sharded, whole):
    for counted, said, asked in run_ranks(nodes * members, _bytes_and_memory, members, sharded, whole):
        assert counted == said > 0
        assert asked == []


def _in_fp32(at_once: int) -> tuple[float, int, torch.Tensor]:
    """Sum in fp32 inside nodes of three, `at_once` values of a part at once."""
    groups = two_levels(3)
    value = 256.0 if dist.get_rank() % 3 == 0 else 1.0
    bucket, used = Bucket([(96, 32)], parts=dist.get_world_size(), dtype=torch.bfloat16), codecs("fp32")
    plan = replace(
        plan_of(bucket, used, groups.levels, groups.place, True), in_fp32=True, slot_bytes=at_once * (3 * 2 + 4)
    )
    reducer = plan.bind(groups, tools := Tools(device=bucket.flat.device, codecs=used))
    for _ in range(2):
        bucket.flat.fill_(value)
        reducer.reduce(bucket.flat)
    own = bucket.flat.view(dist.get_world_size(), -1)[dist.get_rank()]
    (found,) = own.unique().tolist()
    bucket.flat.normal_(generator=torch.Generator().manual_seed(dist.get_rank()))
    reducer.reduce(bucket.flat)
    assert tools.scratch.nbytes == reducer.shared_bytes == plan.inside_bytes
    return found, plan.inside_bytes, own.clone()


def test_a_node_can_add_up_bf16_in_fp32_some_values_at_once():
    wholes = run_ranks(6, _in_fp32, 10**6)
    for at_once in (250, 256, 511):  # a part has 512 values
        for (sums, nbytes, own), (_, most, expected) in zip(run_ranks(6, _in_fp32, at_once), wholes, strict=True):
            # In bf16 256 + 1 is 256, so a sum in bf16 would lose both ones of each of the two nodes.
            assert sums == 2 * (256.0 + 1 + 1) and torch.equal(own, expected)
            assert nbytes == at_once * (3 * 2 + 4) < most == 512 * (3 * 2 + 4)


def _between_instances(members: int, format: str | None) -> torch.Tensor:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    groups = two_levels_of_instances(members)
    bucket = gradients(rank, ranks)
    if format is None:
        plan = DensePlan(
            numel=bucket.flat.numel(), dense=(), dtype=bucket.flat.dtype, ranks=ranks, sharded=True,
            instances=ranks // members,
        )  # fmt: skip
        reducer: Reducer = DenseReducer(plan, groups)
    else:
        reducer = reducer_of(bucket, codecs(format), groups, True)
    for _ in range(2):
        bucket.flat.copy_(gradients(rank, ranks).flat)
        reducer.start(bucket.flat)
        reducer.second_phase()
        reducer.finish()
    start, length = groups.own_range(bucket.flat.numel())
    return bucket.flat[start : start + length].clone()


def two_levels_of_instances(members: int) -> Groups:
    """Return the groups of Megatron's distributed-optimizer instances, each with `members` consecutive ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    instances = ranks // members
    node, _ = dist.new_subgroups_by_enumeration([[n * members + i for i in range(members)] for n in range(instances)])
    rail, _ = dist.new_subgroups_by_enumeration([list(range(place, ranks, members)) for place in range(members)])
    assert dist.get_rank(node) == rank % members
    levels = Levels(nodes=instances, members=members, instances=True)
    return Groups(dist.group.WORLD, levels, node, rail)


@NODES
@pytest.mark.parametrize("format", [pytest.param(None, marks=pytest.mark.ci), "fp32", "int8"])
def test_each_instance_of_the_distributed_optimizer_gets_all_shards_of_the_sum(nodes, members, format):
    found = run_ranks(nodes * members, _between_instances, members, format)
    literal = literal_sum(nodes * members)
    first = torch.cat(found[:members])
    assert (first.double() - literal).norm() < (0.01 if format == "int8" else 2e-7) * literal.norm()
    for instance in range(1, nodes):
        assert torch.equal(torch.cat(found[instance * members : (instance + 1) * members]), first), "instances"
