"""Gradient buckets in blocks of few bits over real ranks, compared with the literal sum and with decoding by hand."""

from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives import calls
from optimus_cc_ext.collectives.exchange import Exchange, ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.legs import Span, all_reduce, bytes_of, reduce_scatter, sent
from optimus_cc_ext.collectives.messages import BlockCodecs
from optimus_cc_ext.collectives.reducers import DensePlan, DenseReducer, Reduction
from optimus_cc_ext.compressors.blocks import BlockLayout
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import BLOCK
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import EMBEDDING
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from tests.allocations import Watch
from tests.distributed.buckets import Bucket
from tests.embedding_bytes import embedding_bytes
from tests.forked_ranks import run_ranks

# Some matrices do not fill their last block, and are followed by matrices and by vectors. The shards of the ranks begin
# and end inside of matrices and of vectors.
SHAPES = [(48, 32), (96, 32), (7,), (5, 9), (3, 11), (32,), (32, 64), (3, 4, 5), (48,)]
RANKS = 3
INT4, INT8 = 0.12, 0.008
"""Relative errors of blocks of Gaussian values (.117, .0065), rounded up. Two errors in int8 add up to sqrt(2) times
.0065.
"""


def codecs(format: Literal["int8", "int4"], *, exact: bool = False) -> BlockCodecs:
    names = ("fp32", "fp32") if exact else (format, "int8")
    return BlockCodecs(*(fast_codec(name, seed=1, rotated=True) for name in names))


def gradients(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Bucket:
    """Make gradients that differ on every rank and step; the padding, which nobody reads, is zero."""
    bucket = Bucket(SHAPES, parts=6 * 64, dtype=dtype)
    generator = torch.Generator().manual_seed(1000 * rank + step)
    for view in bucket.views:
        view.normal_(generator=generator)
    return bucket


def reducer_of(bucket: Bucket, used: BlockCodecs, sharded: bool, gauge: Gauge | None = None) -> Exchange:
    return bucket.block_reducer(used, sharded, gauge=gauge or Gauge())


def plan_of(bucket: Bucket, used: BlockCodecs, ranks: int, sharded: bool) -> ExchangePlan:
    return bucket.exchange(used, ranks, sharded)


def by_hand(step: int, ranks: int, used: BlockCodecs, sharded: bool, dtype: torch.dtype, whole: bool) -> torch.Tensor:
    """Compute every replica's result shard by shard: sums of decoded messages, encoded and decoded again."""
    template = gradients(0, step, dtype)
    plan = plan_of(template, used, ranks, sharded)
    layout, message_bytes = plan.layouts[0], plan.message_bytes
    sent = []
    for rank in range(ranks):
        sent.append(torch.zeros(ranks, message_bytes[0], dtype=torch.uint8))
        used.gradients.encode(gradients(rank, step, dtype).flat, layout, sent[-1])
    result = torch.zeros_like(template.flat)
    for shard in range(ranks):
        others = [sent[rank] for rank in range(ranks) if rank != shard]
        parts = [torch.zeros_like(result) for _ in others]
        if dtype == torch.float32:
            for part, messages in zip(parts, others, strict=True):
                used.gradients.decode_add(messages[shard : shard + 1], layout, shard, part)
            total = sum(parts[1:], start=parts[0])
        else:  # the message holds bf16, and cannot be read as another dtype
            used.gradients.decode_add(torch.stack([s[shard] for s in others]), layout, shard, total := parts[0])
        own = gradients(shard, step, dtype).flat  # a rank's own gradients are exact, because they are in no message
        for start, length in (*((p.start, p.numel) for p in layout.pieces[shard]), *layout.dense[shard]):
            result[start : start + length] = (own + total)[start : start + length]
    if whole:
        sums = torch.zeros(ranks, message_bytes[1], dtype=torch.uint8)
        used.sums.encode(result, layout, sums)
        used.sums.decode(sums, layout, result)
    return result


def places() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return each view of a bucket, and the indices of its elements in the bucket."""
    return [(v, torch.arange(v.numel()) + v.storage_offset()) for v in gradients(0, 0).views]


def mine(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(dist.get_world_size(), -1)[dist.get_rank()]


def _reduce(format: str, sharded: bool, whole: bool, dtype: torch.dtype, how: dict[str, bool]) -> list[torch.Tensor]:
    """Reduce two steps with one reducer; return the results, or the shard of them that is read."""
    dist.init_process_group("gloo")
    bucket = gradients(dist.get_rank(), 0, dtype)
    reducer, found = reducer_of(bucket, codecs(format, **how), sharded), []
    for step in range(2):
        bucket.flat.copy_(gradients(dist.get_rank(), step, dtype).flat)
        reducer.start(bucket.flat, whole)
        reducer.second_phase()  # the bucket group that Megatron waits for first begins the second phase of all groups
        reducer.finish()
        found.append(bucket.flat.clone() if whole or not sharded else mine(bucket.flat).clone())
    return found


def reduced(
    format: str, sharded: bool, whole: bool = False, dtype: torch.dtype = torch.float32, **how: bool
) -> list[list[torch.Tensor]]:
    """Return the results by step and replica, after checking that replicas with whole results have the same bits."""
    steps = [list(step) for step in zip(*run_ranks(RANKS, _reduce, format, sharded, whole, dtype, how), strict=True)]
    for found in steps:
        if whole or not sharded:
            assert all(torch.equal(found[0], other) for other in found[1:]), "replicas"
        else:
            found[:] = [torch.cat(found)] * RANKS
    return steps


KINDS = pytest.mark.parametrize(
    ("sharded", "whole"), [(False, False), (True, False), (True, True)], ids=["whole", "shards", "gathered shards"]
)


@KINDS
@pytest.mark.parametrize(
    ("format", "dtype"), [("int4", torch.float32), pytest.param("int8", torch.bfloat16, marks=pytest.mark.ci)], ids=str
)
def test_every_replica_has_what_decoding_by_hand_gives_to_the_bit_and_vectors_are_summed_as_they_are(
    format, dtype, sharded, whole
):
    used = codecs(format)
    for step, found in enumerate(reduced(format, sharded, whole, dtype)):
        expected = by_hand(step, RANKS, used, sharded, dtype, whole or not sharded)
        assert torch.equal(found[0], expected)
        literal = sum(gradients(rank, step, dtype).flat.double() for rank in range(RANKS))
        error = found[0].double() - literal
        for coded, bound in (
            (False, 2e-7 if dtype == torch.float32 else 2**-8),
            (True, INT4 if format == "int4" else 2 * INT8),
        ):
            kind = torch.cat([place for view, place in places() if (view.dim() > 1) is coded])
            assert error[kind].norm() < bound * literal[kind].norm()


@KINDS
def test_an_exact_codec_reproduces_the_sum_to_rounding(sharded, whole):
    for step, found in enumerate(reduced("int4", sharded, whole, exact=True)):
        literal = sum(gradients(rank, step).flat.double() for rank in range(RANKS))
        assert (found[0].double() - literal).norm() < 1e-7 * literal.norm()


def _poisoned(sharded: bool) -> list[bool]:
    dist.init_process_group("gloo")
    bucket = gradients(dist.get_rank(), 0)
    reducer = reducer_of(bucket, codecs("int4"), sharded)
    found = []
    for place in (0, bucket.views[2].storage_offset()):  # NaN is the first value of a matrix, then that of a vector
        bucket.flat.copy_(gradients(dist.get_rank(), 0).flat)
        if dist.get_rank() == 1:
            bucket.flat[place] = float("nan")
        reducer.reduce(bucket.flat, whole=True)
        found.append(bool(bucket.flat[place].isnan()))
    return found


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])
def test_a_nan_on_one_replica_reaches_all(sharded):
    assert run_ranks(RANKS, _poisoned, sharded) == [[True, True]] * RANKS


def lost_by_hand(bucket: Bucket, ranks: int, sharded: bool, rank: int) -> tuple[float, float]:
    """Return (|error|^2, |matrices|^2) of the messages that `rank` sends to others, decoded by hand."""
    used = codecs("int4")
    plan, decoded = plan_of(bucket, used, ranks, sharded), torch.zeros_like(bucket.flat)
    messages = torch.zeros(ranks, plan.message_bytes[0], dtype=torch.uint8)
    used.gradients.encode(bucket.flat, plan.layouts[0], messages)
    used.gradients.decode(messages, plan.layouts[0], decoded)
    others = [piece for index, pieces in enumerate(plan.layouts[0].pieces) if index != rank for piece in pieces]
    values = torch.cat([bucket.flat[piece.start : piece.start + piece.numel] for piece in others]).double()
    found = torch.cat([decoded[piece.start : piece.start + piece.numel] for piece in others]).double()
    return float((values - found).square().sum()), float(values.square().sum())


def _bytes_and_memory(sharded: bool, whole: bool) -> tuple[int, int, list[str], int, tuple[float, float]]:
    dist.init_process_group("gloo")
    ranks, sent = dist.get_world_size(), [0]

    def counting(name: str, part: int) -> None:
        original = getattr(dist, name)

        def collective_(out: torch.Tensor, tensor: torch.Tensor, *parts: Any, **how: Any) -> Any:
            assert tensor.dtype == torch.uint8
            sent[0] += tensor.nbytes * (ranks - 1) // part
            return original(out, tensor, *parts, **how)

        setattr(calls.dist, name, collective_)

    counting("all_to_all_single", ranks)
    counting("all_gather_into_tensor", 1)
    bucket, gauge = gradients(dist.get_rank(), 0), Gauge()
    reducer = bucket.block_reducer(codecs("int4"), sharded, gauge=gauge)
    gauge.begin(True)
    reducer.reduce(bucket.flat, whole)
    measured = gauge.squares()
    gauge.begin(False)
    counted, sent[0] = sent[0], 0
    with Watch() as watch:
        reducer.reduce(bucket.flat, whole)
    assert sent[0] == counted and gauge.squares() == measured
    assert measured == pytest.approx(
        lost_by_hand(gradients(dist.get_rank(), 0), ranks, sharded, dist.get_rank()), rel=1e-5
    )
    plan = plan_of(bucket, codecs("int4"), ranks, sharded)
    memory = sum(plan.slice_bytes)
    assert sum(each.nbytes for each in reducer.slices) == memory and reducer.nbytes == 0
    assert reducer.plan.legs(whole=whole) == plan.legs(whole=whole)
    return counted, bytes_of(plan.legs(whole=whole)).sent, watch.allocated + watch.read_by_host, memory, measured


@KINDS
def test_bytes_are_as_counted_and_memory_is_made_once(sharded, whole):
    for counted, said, asked, memory, (lost, of) in run_ranks(RANKS, _bytes_and_memory, sharded, whole):
        assert counted == said > 0
        assert asked == []
        assert memory > 0
        assert lost > 0.01 * of > 0, "of matrices alone, in iterations that are measured"


def _alone() -> bool:
    dist.init_process_group("gloo")
    bucket = gradients(0, 0)
    before = bucket.flat.clone()
    reducer = reducer_of(bucket, codecs("int4"), sharded=False)
    reducer.reduce(bucket.flat)
    return sent(reducer.plan.legs()) == 0 and 0 < float((bucket.flat - before).norm()) < 2 * INT4 * float(before.norm())


def test_one_replica_alone_encodes_and_decodes_and_sends_nothing():
    assert run_ranks(1, _alone) == [True]


def _late() -> str:
    from datetime import timedelta

    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    if dist.get_rank() == 0:
        bucket = gradients(0, 0)
        reducer = reducer_of(bucket, codecs("int4"), sharded=True)
        with pytest.raises(OptimusError) as raised:
            reducer.reduce(bucket.flat)
        return str(raised.value)
    return ""


def test_a_replica_that_stays_away_is_named_with_the_purpose():
    message, _ = run_ranks(2, _late, timeout=60)
    assert "rank 0: compressed gradient reduction (exchange) failed among ranks [0, 1]" in message


# -- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "shards"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_shards_hold_every_value_once_and_no_block_holds_values_of_two_parameters(ranks, sharded):
    bucket = gradients(0, 0)
    plan = plan_of(bucket, codecs("int4"), ranks, sharded)
    owner = torch.full(bucket.flat.shape, -1)
    for number, view in enumerate(bucket.views):
        owner[view.storage_offset() : view.storage_offset() + view.numel()] = number
    seen = torch.zeros_like(owner)
    layout = plan.layouts[0]
    for shard in range(ranks):
        for piece in layout.pieces[shard]:
            for start in range(piece.start, piece.start + piece.numel, BLOCK):
                block = slice(start, min(start + BLOCK, piece.start + piece.numel))
                assert len(owner[block].unique()) == 1
                seen[block] += 1
                if sharded:
                    edge = (shard + 1) * bucket.flat.numel() // ranks
                    assert edge - bucket.flat.numel() // ranks <= block.start < block.stop <= edge
        for start, length in layout.dense[shard]:
            seen[start : start + length] += 1
        own = plan.own_layouts(shard)[0]
        assert own.pieces[0] == layout.pieces[shard] and own.dense[0] == layout.dense[shard]
        assert own.sections(64, 4) == layout.sections(64, 4)
    assert torch.equal(seen, (owner >= 0).long())


def test_a_large_bucket_sends_and_keeps_what_was_promised():
    layer = [(3 * 512, 512), (3 * 512,), (512, 512), (512,), (2048, 512), (2048,), (512, 2048), (512,)]
    ends = torch.tensor([torch.Size(shape).numel() for shape in layer * 4]).cumsum(0).tolist()
    ranges = list(zip([0, *ends[:-1]], [b - a for a, b in zip([0, *ends[:-1]], ends, strict=True)], strict=True))
    coded, dense = ([r for r, s in zip(ranges, layer * 4, strict=True) if len(s) == d] for d in (2, 1))
    for sharded, share in ((True, 0.14), (False, 0.20)):
        plan = ExchangePlan(
            numel=ends[-1], coded=coded, dense=dense, dtype=torch.float32, ranks=8, sharded=sharded,
            formats=codecs("int4").formats,
        )  # fmt: skip
        ring = (reduce_scatter if sharded else all_reduce)(4 * ends[-1], Span(8))
        assert 0.9 * share < sent(plan.legs()) / ring.nbytes < share
        assert sum(plan.slice_bytes) < 1.15 * ends[-1]


def _in_line(factors: bool, sharded: bool = False) -> tuple[list[str], list[torch.Tensor], list[torch.Tensor]]:
    """Do three overlapping reductions, then one by one: return the order of starts and waits, and both sums."""
    dist.init_process_group("gloo")
    log: list[str] = []
    start, wait = calls.PendingCollective.__init__, calls.PendingCollective.wait

    def starting(self: Any, begin: Any, group: Any, purpose: str) -> None:
        log.append(f"start {purpose.split('(')[1]}")
        start(self, begin, group, purpose)

    def waiting(self: Any) -> None:
        log.append(f"wait {self._purpose.split('(')[1]}")
        wait(self)

    calls.PendingCollective.__init__, calls.PendingCollective.wait = starting, waiting  # type: ignore[method-assign]
    found = []
    for in_line in (True, False):
        buckets = [gradients(dist.get_rank(), step) for step in range(3)]
        under_way: list[Any] = []
        reductions = []
        for bucket in buckets:
            log.append("hook")
            reducer = bucket.reducer(FastLowRank(), 2) if factors else reducer_of(bucket, codecs("int8"), sharded)
            reductions.append(Reduction([reducer], [bucket.flat], under_way, None, whole=False))
            if not in_line:
                reductions.pop().wait()
        for reduction in reductions:
            log.append("finish")
            reduction.wait()
        assert under_way == []
        found.append([bucket.flat for bucket in buckets])
    return log[: log.index("hook", log.index("finish"))], *found


@pytest.mark.parametrize(
    ("factors", "first", "second"), [(False, "exchange)", "sums)"), (True, "P)", "Q)")], ids=["blocks", "factors"]
)
def test_later_phases_begin_with_the_hook_of_the_next_bucket_and_change_no_bit(factors, first, second):
    for log, in_line, one_by_one in run_ranks(2, _in_line, factors):
        goes_on = [f"wait {first}", f"start {second}"]
        assert log == [
            "hook", f"start {first}",
            "hook", f"start {first}", *goes_on,
            "hook", f"start {first}", *goes_on,
            "finish", *goes_on, f"wait {second}",
            "finish", f"wait {second}",
            "finish", f"wait {second}",
        ]  # fmt: skip
        assert all(map(torch.equal, in_line, one_by_one))


def test_sums_of_shards_that_nobody_else_needs_are_added_up_where_they_are_waited_for():
    for log, *_ in run_ranks(2, _in_line, False, True):
        assert log == ["hook", "start exchange)"] * 3 + ["finish", "wait exchange)"] * 3


# -- the tied embedding -----------------------------------------------------------------------------------------------

NUMEL = 3000


def _embedding(sharded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    dist.init_process_group("gloo")
    technique = FusedEmbeddingSync(OptimusConfig(fused_embedding_sync_format="int8", compression_seed=1), EMBEDDING)
    technique.join(dist.group.WORLD, sharded=sharded)
    technique.gauge.begin(True)
    gradient = torch.randn(60, NUMEL // 60, generator=torch.Generator().manual_seed(dist.get_rank()))
    mine = gradient.clone()
    sent, all_to_all = [], dist.all_to_all_single
    dist.all_to_all_single = lambda out, tensor, *parts, **how: (
        sent.append(tensor.nbytes) or all_to_all(out, tensor, *parts, **how)
    )
    technique.make_room(gradient.numel(), gradient.dtype, gradient.device)
    # `make_room` makes one small all-to-all over the union, so that NCCL allocates memory for its connections then. The
    # pair of stages needs no all-to-all.
    assert sent == ([] if sharded else [16 * dist.get_world_size()])
    memory = technique.message_bytes, technique.lane.ring.nbytes
    technique.reduce(gradient)
    assert (technique.message_bytes, technique.lane.ring.nbytes) == memory and sum(memory) > 0
    lost, of = technique.gauge.squares()
    assert 0.004 < (lost / of) ** 0.5 < INT8
    return mine, gradient


@pytest.mark.parametrize("sharded", [False, True], ids=["union", "pair"])
def test_copies_of_the_tied_embedding_are_bit_identical_sums(sharded):
    found = run_ranks(2 if sharded else 4, _embedding, sharded)
    expected = sum(gradient for gradient, _ in found)
    for _, result in found:
        assert torch.equal(result, found[0][1])
        assert float((result - expected).norm()) < 2 * INT8 * float(expected.norm())
    if sharded:
        codec, layout = codecs("int8").gradients, BlockLayout.of_one(NUMEL)
        messages = torch.zeros(2, codec.message_bytes(layout, torch.float32), dtype=torch.uint8)
        for (gradient, _), message in zip(found, messages, strict=True):
            codec.encode(gradient.view(-1), layout, message)
        by_hand = torch.zeros(NUMEL)
        codec.decode_add(messages, layout, 0, by_hand)
        assert torch.equal(found[0][1].view(-1), by_hand)


def test_the_embeddings_bytes_are_a_quarter_of_dense_ones_in_int8():
    for sharded in (False, True):
        dense, int8 = (embedding_bytes(1 << 20, 4, sharded=sharded, fused=format) for format in ("dense", "int8"))
        assert 0.25 < int8 / dense < 0.26


# -- dense ------------------------------------------------------------------------------------------------------------


def _dense(sharded: bool, whole: bool) -> tuple[torch.Tensor, int]:
    dist.init_process_group("gloo")
    bucket = gradients(dist.get_rank(), 0)
    ranges = [place for kind in bucket.ranges for place in kind]
    plan = DensePlan(
        numel=bucket.flat.numel(), dense=ranges, dtype=bucket.flat.dtype, ranks=dist.get_world_size(), sharded=sharded
    )
    reducer = DenseReducer(plan, Groups(dist.group.WORLD))
    reducer.start(bucket.flat, whole)
    reducer.finish()
    return (bucket.flat if whole or not sharded else mine(bucket.flat)).clone(), sent(plan.legs(whole=whole))


@KINDS
def test_a_bucket_without_matrices_is_summed_with_as_few_bytes_as_megatron(sharded, whole):
    found = run_ranks(RANKS, _dense, sharded, whole)
    literal = sum(gradients(rank, 0).flat.double() for rank in range(RANKS))
    results = [result for result, _ in found] if whole or not sharded else [torch.cat([r for r, _ in found])]
    assert all((result.double() - literal).norm() < 1e-6 * literal.norm() for result in results)
    values = gradients(0, 0).flat if sharded else torch.cat([v.flatten() for v in gradients(0, 0).views])
    times = 1 if sharded and not whole else 2
    assert {nbytes for _, nbytes in found} == {times * values.nbytes * (RANKS - 1) // RANKS}
