"""The ring of message buffers: exchanges cut into slices give the same bits, within the memory that they were given."""

from contextlib import nullcontext
from functools import partial
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives import division
from optimus_cc_ext.collectives.exchange import Exchange, ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, Tools
from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.ranges import portions
from optimus_cc_ext.collectives.reducers import Reducer, Reduction
from optimus_cc_ext.collectives.ring import Ring, Slice, _Slot
from optimus_cc_ext.compressors import blocks
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PARAM_GATHER
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.slots import slot_bytes
from optimus_cc_ext.techniques.bucket import Bucket as MegatronBucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, gather_plan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.param_gather import ParamGather
from tests.distributed.buckets import Bucket
from tests.forked_ranks import run_ranks
from tests.pretended_streams import Stream, pretend, report
from tests.stream_memory import Report

RANKS = 4
SHAPES = [(48, 128), (7,), (96, 128), (300,), (5, 9), (33, 128), (32,)]
BUCKETS = 5
PART = 4
"""Blocks that the encoder takes at once in these tests, in place of 2,048: slices are cut between such parts."""


class Found(NamedTuple):
    flats: list[torch.Tensor]
    slices: int
    nbytes: int
    """Bytes of message memory, as the ring counts them beforehand."""

    allocated: int


def codecs() -> BlockCodecs:
    return BlockCodecs(*(fast_codec(name, seed=1, rotated=True) for name in ("int4", "int8")))


def bucket_of(index: int, dtype: torch.dtype) -> Bucket:
    bucket = Bucket(SHAPES, parts=RANKS * 64, dtype=dtype)
    bucket.flat.normal_(generator=torch.Generator().manual_seed(100 * index + dist.get_rank()))
    return bucket


def _slot(limit: float | None, slots: int) -> int | None:
    blocks.AT_ONCE = division.AT_ONCE = division.GRAIN = PART
    return None if limit is None else int(limit) // slots


def _groups(levels: Levels) -> Groups:
    if not levels.two:
        return Groups(dist.group.WORLD)
    nodes = [dist.new_group([2 * node, 2 * node + 1]) for node in range(2)]
    rails = [dist.new_group([place, place + 2]) for place in range(2)]
    rank = dist.get_rank()
    return Groups(dist.group.WORLD, levels, nodes[rank // 2], rails[rank % 2], 2)


def _reduced(sharded: bool, whole: bool, levels: Levels, dtype: torch.dtype, limit: float | None, slots: int) -> Found:
    """Begin the reductions of all buckets one after the other, as a backward pass does, and then wait for each."""
    dist.init_process_group("gloo")
    ring, slot, groups = Ring(slots), _slot(limit, slots), _groups(levels)
    lane, used = ring.lane(urgent=True), codecs()
    buckets, reducers = [bucket_of(index, dtype) for index in range(BUCKETS)], list[Exchange]()
    for bucket in buckets:
        coded, dense = bucket.ranges
        plan = ExchangePlan(
            numel=bucket.flat.numel(), coded=coded, dense=dense, dtype=dtype, ranks=RANKS, sharded=sharded,
            formats=used.formats, levels=levels, place=groups.place, slot_bytes=slot,
        )  # fmt: skip
        reducers.append(plan.bind(groups, Tools(device=bucket.flat.device, codecs=used, lane=lane, together=True)))
    expected, under_way = ring.nbytes, list[Reducer]()
    for _ in range(2):
        reductions = [
            Reduction([reducer], [bucket.flat], under_way, None, whole=whole)
            for reducer, bucket in zip(reducers, buckets, strict=True)
        ]
        for reduction in reductions:
            reduction.wait()
    read = slice(None) if whole or not sharded else slice(*_own(groups, buckets[0].flat.numel()))
    return Found([bucket.flat[read].clone() for bucket in buckets], len(plan.layouts), expected, _allocated(ring))


def _own(groups: Groups, numel: int) -> tuple[int, int]:
    start, length = groups.own_range(numel)
    return start, start + length


def _allocated(ring: Ring) -> int:
    assert not ring._under_way and not ring._waiting
    return sum(slot.nbytes for slot in ring._free)


def _write(new: torch.Tensor, of_megatron: Any, start: int, end: int) -> None:
    of_megatron.param_data[start:end].copy_(new[start:end])


def _gathered(dtype: torch.dtype, limit: float | None, slots: int) -> Found:
    """Update all shards of all buckets, begin all gathers, and then wait for each, as a forward pass does."""
    dist.init_process_group("gloo")
    ring, slot = Ring(slots), _slot(limit, slots)
    config = OptimusConfig(param_gather_format="int4", compression_seed=1)
    gathers, groups = ParamGather(config, PARAM_GATHER, ring), Groups(dist.group.WORLD)
    found, flats = [], []
    for index in range(BUCKETS):
        bucket = Bucket(SHAPES, parts=RANKS * 64, dtype=dtype)
        bucket.flat.normal_(generator=torch.Generator().manual_seed(index))
        parameters = [ParameterRecord(shape=tuple(v.shape), start=int(v.storage_offset())) for v in bucket.views]
        record = BucketRecord(numel=bucket.flat.numel(), dtype=dtype, parameter_dtype=dtype, parameters=parameters)
        plan = gather_plan(record, "int4", RANKS, slot)
        found.append(gathers.add_bucket(MegatronBucket.of(bucket.flat), plan, groups, together=True))
        flats.append(bucket.flat)
    expected = ring.nbytes
    for _ in range(2):
        targets = [
            torch.randn(f.shape, generator=torch.Generator().manual_seed(n)).add_(f) for n, f in enumerate(flats)
        ]
        for shards, target in zip(found, targets, strict=True):
            gathers.update([shards.bucket.of_megatron], partial(_write, target))
        under_way = [gathers.gather([shards]) for shards in found]
        for each in under_way:
            each.wait()
    return Found(flats, len(plan.layouts), expected, _allocated(ring))


KINDS: dict[str, Any] = {
    "shards": partial(_reduced, True, False, ONE_LEVEL),
    "gathered shards": partial(_reduced, True, True, ONE_LEVEL),
    "whole": partial(_reduced, False, False, ONE_LEVEL),
    "whole, two levels": partial(_reduced, False, False, Levels(nodes=2, members=2)),
    "shards, two levels": partial(_reduced, True, False, Levels(nodes=2, members=2)),
    "instances": partial(_reduced, True, False, Levels(nodes=2, members=2, instances=True)),
    "parameters": _gathered,
}


DEFAULT, FULL = ("shards, two levels", "parameters"), ("gathered shards", "whole, two levels")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in DEFAULT else pytest.mark.full if kind in FULL else pytest.mark.ci)
        for kind in KINDS
    ],
)
def test_slices_give_the_bits_of_one_message_and_memory_stays_below_its_bound(kind: str, dtype: torch.dtype) -> None:
    one = run_ranks(RANKS, KINDS[kind], dtype, None, 3)
    for slots in (1, 3):
        bound = slots * one[0].nbytes / 3 / 2.5
        for alone, sliced in zip(one, run_ranks(RANKS, KINDS[kind], dtype, bound, slots), strict=True):
            assert alone.slices == 1 and sliced.slices > 2
            assert all(map(torch.equal, alone.flats, sliced.flats))
            assert sliced.allocated == sliced.nbytes <= bound < alone.nbytes == alone.allocated


@pytest.mark.parametrize("seed", range(12))
def test_ranges_are_cut_where_the_encoder_and_the_sum_of_messages_compute_the_same_bits(seed: int) -> None:
    random = Random(seed)
    tail = random.choice([0, 1, 2, 3, 4, 63, 64 + 2, random.randrange(blocks.AT_ONCE)])
    coded = random.randrange(3) * blocks.AT_ONCE + tail + 1
    numel = coded * blocks.BLOCK - random.randrange(blocks.BLOCK)
    used, senders = codecs().gradients, [torch.randn(numel, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]

    def summed(ranges: list[tuple[int, int]]) -> torch.Tensor:
        layout, out = blocks.BlockLayout([ranges]), torch.zeros(numel)
        messages = torch.zeros(2, used.message_bytes(layout, torch.float32), dtype=torch.uint8)
        for values, message in zip(senders, messages, strict=True):
            used.encode(values, layout, message[None])
        used.decode_add(messages, layout, 0, out)
        return out

    for count in (2, 3, 7):
        cut = portions([(0, numel)], count, blocks.BLOCK, partial(division._unit, blocks.AT_ONCE))
        assert torch.equal(sum(map(summed, filter(None, cut)), start=torch.zeros(numel)), summed([(0, numel)]))


def test_no_cut_leaves_one_to_three_blocks_alone_that_one_message_encodes_with_others() -> None:
    # torch's product of one to three rows with the rotation differs in the last place from that of more rows.
    at_once = blocks.AT_ONCE
    for coded in [*range(1, 200), *range(at_once - 5, at_once + 200), *range(2 * at_once - 5, 2 * at_once + 70)]:
        for count in (2, 3, 7):
            for part in portions([(0, coded)], count, 1, partial(division._unit, at_once)):
                for start, length in part:
                    rest, last = length % at_once, start + length == coded
                    assert rest not in (1, 2, 3) or (last and start % at_once == 0)
                    assert not last or coded % at_once not in (1, 2, 3) or start % at_once == 0


def test_a_bound_below_a_block_to_each_rank_is_refused_with_the_smallest_that_works() -> None:
    plan = partial(
        ExchangePlan, numel=1 << 20, coded=[(0, 1 << 20)], dtype=torch.float32, ranks=512, sharded=True,
        formats=codecs().formats,
    )  # fmt: skip
    with pytest.raises(FlagError) as refused:
        assert plan(slot_bytes=1000).layouts
    assert refused.value.args[0].startswith("--message-memory: messages of one block to each of 512 ranks need 0.39 MB")
    assert "Give at least 1" in str(refused.value)
    assert len(plan(slot_bytes=slot_bytes(1)).layouts) > 1


class _Written(Slice):
    """Slice that writes its memory when it begins, and reads it when it ends."""

    memory = torch.empty(0)

    def cut(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (memory,)

    def begin(self, memory: torch.Tensor) -> None:
        self.memory = memory.add_(1)

    def end(self) -> None:
        self.memory.add(1)


def _on_two_streams(waits: bool) -> Report:
    """Let slices of two streams, which never wait for each other, use one slot."""
    pretend()
    if not waits:
        _Slot.take = lambda self: self._memory  # type: ignore[method-assign]
    ring, side = Ring(slots=1), Stream(name="side")
    lane = ring.lane(urgent=True)
    slices = [_Written(64, torch.device("cpu")) for _ in range(4)]
    lane.reserve(slices, together=True)
    for index, each in enumerate(slices):
        with torch.cuda.stream(side) if index % 2 else nullcontext():
            lane.submit([each])
    with torch.cuda.stream(side):
        lane.end(slices)
    return report()


def test_a_slot_that_another_stream_used_last_is_waited_for() -> None:
    [waiting] = run_ranks(1, _on_two_streams, True)
    [early] = run_ranks(1, _on_two_streams, False)
    assert waiting.faults == [] and early.faults


class _Noted(_Written):
    """Slice that records when it begins and when it ends."""

    def __init__(self, name: int, events: list[tuple[str, int]]) -> None:
        super().__init__(64, torch.device("cpu"))
        self.name, self.events = name, events

    def begin(self, memory: torch.Tensor) -> None:
        self.events.append(("begin", self.name))

    def end(self) -> None:
        self.events.append(("end", self.name))


@pytest.mark.parametrize("urgent", [False, True])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_slices_begin_and_end_in_the_order_in_which_they_were_submitted(slots: int, urgent: bool) -> None:
    events: list[tuple[str, int]] = []
    lane = Ring(slots).lane(urgent=urgent)
    exchanges = [[_Noted(10 * number + place, events) for place in range(3)] for number in range(3)]
    for slices in exchanges:
        lane.reserve(slices, together=True)
    for slices in exchanges:
        lane.submit(slices)
    lane.end(exchanges[1])
    assert [kind for kind, _ in events].count("end") == 6, "those of the third exchange are still under way"
    lane.end(exchanges[2])
    names = [each.name for slices in exchanges for each in slices]
    for kind in ("begin", "end"):
        assert [name for found, name in events if found == kind] == names
    under_way = [sum(1 if kind == "begin" else -1 for kind, _ in events[: n + 1]) for n in range(len(events))]
    assert max(under_way) == slots


def _forgotten() -> tuple[list[int], int]:
    """Begin slices of a pass that fails, and then those of the next pass."""
    dist.init_process_group("gloo")
    lane = (ring := Ring(slots=2)).lane()
    left, after = ([_Written(64, torch.device("cpu")) for _ in range(3)] for _ in range(2))
    for slices in (left, after):
        lane.reserve(slices, together=False)
    lane.submit(left)
    lane.forget()
    lane.submit(after)
    lane.end(after)
    return [int(each.memory.sum()) for each in (*left, *after)], len(ring._free)


def test_what_a_failed_pass_left_under_way_neither_ends_nor_gives_its_slot_to_another() -> None:
    [(written, free)] = run_ranks(1, _forgotten)
    # The third one of the next pass uses the slot of the first one again.
    assert written == [64, 64, 0, 128, 64, 128] and free == 2


def _after_a_failed_pass(failed: bool) -> torch.Tensor:
    """Reduce to shards, after a pass that failed while it gathered whole gradients."""
    dist.init_process_group("gloo")
    bucket, used, lane = bucket_of(0, torch.float32), codecs(), Ring().lane(urgent=True)
    coded, dense = bucket.ranges
    plan = ExchangePlan(
        numel=bucket.flat.numel(), coded=coded, dense=dense, dtype=torch.float32, ranks=RANKS, sharded=True,
        formats=used.formats,
    )  # fmt: skip
    exchange = plan.bind(Groups(dist.group.WORLD), Tools(device=bucket.flat.device, codecs=used, lane=lane))
    if failed:
        exchange.start(bucket.flat.clone(), whole=True)
        exchange.second_phase()
        lane.forget()
    exchange.start(bucket.flat)
    exchange.finish()
    return bucket.flat


def test_a_gather_of_whole_gradients_that_failed_is_not_decoded_in_the_next_pass() -> None:
    failed, new = (run_ranks(RANKS, partial(_after_a_failed_pass, before)) for before in (True, False))
    assert all(map(torch.equal, failed, new))
