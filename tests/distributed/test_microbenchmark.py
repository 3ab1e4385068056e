"""Microbenchmarks time the work of training: messages and gradients of any shape, in seconds, and change nothing."""

from dataclasses import replace
from itertools import accumulate

import pytest
import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.groups import Groups
from optimus_cc_ext.collectives.messages import BlockCodecs, Formats, MessagePool
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import CLASSES
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.forecast import measure as measuring
from optimus_cc_ext.forecast import microbenchmark
from optimus_cc_ext.forecast.forecast import forecast
from optimus_cc_ext.forecast.measure import measure
from optimus_cc_ext.forecast.probe import Collective
from optimus_cc_ext.forecast.timeline import Link, Rate, When
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.stopwatch import Stopwatch
from optimus_cc_ext.techniques.bucket import Bucket
from optimus_cc_ext.techniques.bucket_plan import BucketRecord, BucketRules, GroupPlan
from optimus_cc_ext.techniques.bucket_rules import ParameterRecord
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop
from optimus_cc_ext.techniques.grid import Grid, RankPlace
from optimus_cc_ext.techniques.messages import BlockMessages, LinkPlan
from optimus_cc_ext.techniques.param_gather import Shards
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.session import Session
from tests.forked_ranks import run_ranks

CONFIG = OptimusConfig(compressed_backprop=True, dp_compression=True, dp_compression_rank=4)
SHAPES = [(24, 8), (8, 8), (24, 8), (8, 32)]


def _measure() -> list[float]:
    dist.init_process_group("gloo")
    random_state = torch.get_rng_state()
    matrices = [torch.ones(shape) for shape in SHAPES]  # each matrix has a storage of its own
    keep = {
        "alone": dist.group.WORLD, "compressor": FastLowRank(), "config": CONFIG, "state_dtype": torch.float32,
        "codecs": None, "sharded": False,
    }  # fmt: skip
    seconds = [microbenchmark.time_gradients(matrices, **keep), microbenchmark.time_gradients([], **keep)]
    int8 = fast_codec("int8", seed=1, rotated=True)
    plan = ExchangePlan(
        numel=4096, coded=[(0, 4096)], dtype=torch.bfloat16, ranks=1, sharded=True, formats=Formats("int8", "int8")
    )
    weights = torch.ones(4096, dtype=torch.bfloat16)
    shards = Shards(
        Bucket.of(weights), plan, Groups(dist.group.WORLD), int8, gauge=Gauge(),
        scratch=Scratch(), pool=MessagePool(),
    )  # fmt: skip
    seconds.append(microbenchmark.time_parameters([shards], alone=dist.group.WORLD, codec=int8))
    assert bool((weights == 1).all())
    microbenchmark._SAMPLE_BYTES = 1  # the benchmark times a single matrix, and extrapolates to all
    seconds.append(microbenchmark.time_gradients(matrices, **keep))
    messages = CompressedBackprop(CONFIG, FastLowRank(), None).messages(LinkPlan(CONFIG, 1, 0))
    seconds += microbenchmark.time_message(messages, torch.empty(64, 2, 32))
    blocks = BlockMessages(fast_codec("int8", seed=1, rotated=False), Gauge())
    *coding, nothing = microbenchmark.time_message(blocks, torch.empty(64, 2, 32))
    assert nothing < min(coding), "an activation leaves no residual"
    seconds += coding
    codecs = BlockCodecs(*(fast_codec(chosen, seed=1, rotated=True) for chosen in ("int4", "int8")))
    seconds += [
        microbenchmark.time_gradients(matrices, **keep | {"codecs": codecs, "sharded": s}) for s in (True, False)
    ]
    assert all(bool((matrix == 1).all()) for matrix in matrices)
    assert torch.equal(torch.get_rng_state(), random_state)
    return seconds


def _passes() -> Stopwatch:
    stopwatch = Stopwatch(on=True)
    for name in ("forward", "backward"):
        with stopwatch.timed(name, torch.device("cpu")):
            pass
    return stopwatch


def _chosen_stages(sharded: bool, fraction: float) -> tuple[set[int], str]:
    """Return the stages that `auto` chooses for int4 on a group whose all-to-all has this fraction of its all-reduce's
    rate.

    The rate is 100 kB/s, so that a reduction takes seconds and coding almost none.
    """
    dist.init_process_group("gloo")
    config = OptimusConfig(dp_compression_format="int4", dp_compression_stages="auto")
    layout = Layout(stages=1, data_parallel=2, tied_embeddings=False, distributed_optimizer=sharded)
    session, world = Session(config), dist.group.WORLD
    place = RankPlace(rank=dist.get_rank(), stage=0, tensor_rank=0)
    session.place(Grid(place=place, stages=1, data_parallel=2, replica_group=world), layout)
    record = BucketRecord(
        numel=512 * 512, dtype=torch.float32, parameters=[ParameterRecord(shape=(512, 512), start=0)]
    )  # fmt: skip
    rules = BucketRules.of(config, ranks=2, sharded=sharded, fused=False)
    flat = torch.ones(record.numel)
    session.gradients.add_group(
        GroupPlan.of([record], rules), [Bucket.of(flat)], Groups(world), overlapped=False, fused=None
    )
    measuring.probe_collective = lambda *_: Rate(0.0, 1e5 * (fraction if _[-1] is Collective.ALL_TO_ALL else 1.0))
    measured = measure(session, _passes(), None, torch.device("cpu"))
    found = forecast(session.grid.gather(measured), NonInterleaved(1, 4), config, None)
    return set(found.compressed_stages), found.lines()[0]


@pytest.mark.parametrize("sharded", [False, True])
def test_an_all_to_all_that_is_slower_than_an_all_reduce_changes_what_auto_chooses(sharded):
    """int4 sends an eighth of fp32's bytes by the all-to-all, so at less than an eighth of the rate it loses."""
    for fraction, stages in ((1.0, {0}), (0.05, set())):
        for chosen, line in run_ranks(2, _chosen_stages, sharded, fraction, timeout=60):
            assert chosen == stages
            assert f"0.1 MB/s among replicas, {0.1 * fraction:.1f} MB/s in their all-to-all" in line


def _scratch_after_measuring() -> list[int]:
    dist.init_process_group("gloo")
    rank, layout = dist.get_rank(), Layout(stages=2, data_parallel=2, tied_embeddings=False)
    session = Session(CONFIG)
    place = RankPlace(rank=rank, stage=rank, tensor_rank=0)
    session.place(Grid(place=place, stages=2, data_parallel=2, pipeline_group=dist.group.WORLD), layout)
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    starts = [end - size for end, size in zip(accumulate(sizes), sizes, strict=True)]
    parameters = [ParameterRecord(shape=shape, start=start) for shape, start in zip(SHAPES, starts, strict=True)]
    record = BucketRecord(numel=sum(sizes), dtype=torch.float32, parameters=parameters)
    rules = BucketRules.of(CONFIG, ranks=1, sharded=False, fused=False)
    assert session.alone is not None
    session.gradients.add_group(
        GroupPlan.of([record], replace(rules, force=True)), [Bucket.of(torch.ones(sum(sizes)))], Groups(session.alone),
        overlapped=False, fused=None,
    )  # fmt: skip
    measured = measure(session, _passes(), torch.empty(64, 2, 32), torch.device("cpu"))
    assert [(cost.name, cost.when, cost.link) for cost in measured.cost.classes] == [
        ("pipeline forward", When.ACTIVATION, Link.STAGES),
        ("pipeline backward", When.GRADIENT, Link.STAGES),
        ("DP gradients", When.AFTER_BACKWARD, Link.REPLICAS),
        ("embedding", When.AFTER_BACKWARD, Link.REPLICAS),
        ("embedding", When.AFTER_BACKWARD, Link.ENDS),
        ("parameter gather", When.AFTER_STEP, Link.REPLICAS),
    ]
    sent = {cost.name: cost.compressed for cost in measured.cost.classes}
    assert sent["DP gradients"].second_phase > 0 and sent["pipeline backward"].encode > 0
    tokens = {"expert dispatch", "expert gradient"}  # measured below; this model has no experts
    assert set(sent) == {row.tag for row in CLASSES} - tokens, "a class of the table that nobody measures"
    return [technique.compressor._scratch.nbytes for technique in (session.gradients, session.backprop)]


def test_what_is_tried_has_memory_of_its_own():
    assert run_ranks(2, _scratch_after_measuring, timeout=60) == [[0, 0]] * 2


def _tokens_measured(recomputed: bool) -> list[tuple[str, When, float, float]]:
    dist.init_process_group("gloo")
    config = OptimusConfig(expert_dispatch_format="int8")
    layout = Layout(stages=1, data_parallel=2, tied_embeddings=False, expert_parallel=2, row_width=256)
    world, session = dist.group.WORLD, Session(config)
    place = RankPlace(rank=dist.get_rank(), stage=0, tensor_rank=0)
    session.place(Grid(place=place, stages=1, data_parallel=2, replica_group=world, expert_group=world), layout)
    rows = torch.ones(64, 256)
    for _ in range(2):  # two forward passes, each with one exchange there and back; `_passes` took 3 of each kind
        for grad in (False, True) if recomputed else (True,):
            with torch.set_grad_enabled(grad):
                session.dispatch.count(session.traffic, rows, world, [48, 16])
                session.dispatch.count(session.traffic, rows, world, [32, 32])
        session.expert_gradients.count(session.traffic, rows, world, [16, 48])
    measuring.probe_collective = lambda *_: Rate(0.0, 1e6)
    measured = measure(session, _passes(), None, torch.device("cpu"))
    tokens = [cost for cost in measured.cost.classes if cost.link is Link.EXPERTS]
    assert measured.experts is not None and all(cost.dense.encode == 0 for cost in tokens)
    assert all((cost.compressed.encode > 0) == (cost.dense.nbytes > cost.compressed.nbytes) for cost in tokens)
    return [(cost.name, cost.when, cost.dense.nbytes, cost.compressed.nbytes) for cost in tokens]


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_are_measured_inside_the_passes_that_send_them(recomputed):
    first, other = run_ranks(2, _tokens_measured, recomputed, timeout=60)
    # 2 passes send 16 + 32 rows of 1,024 or 260 bytes from the first rank, and 48 + 32 from the other one.
    passes = len(_passes()._seconds["forward"])
    for tokens, there, back in ((first, 48, 48), (other, 80, 16)):
        (name, when, raw, sent), again, gradient = tokens
        assert (name, when) == ("expert dispatch", When.FORWARD_PASS)
        assert (raw, sent) == (pytest.approx(2 * there * 1024 / passes), pytest.approx(2 * there * 260 / passes))
        assert again[:2] == (name, When.BACKWARD_PASS) and again[2:] == ((raw, sent) if recomputed else (0, 0))
        assert gradient[:2] == ("expert gradient", When.BACKWARD_PASS)
        assert gradient[2] == gradient[3] == pytest.approx(2 * back * 1024 / passes)


@pytest.mark.parametrize(
    "few, many, total, seconds",
    [
        ((10, 1.0), (20, 1.1), 100, 1.9),  # a launch takes 0.9 s, and each byte 0.01 s
        ((10, 1.0), (20, 2.0), 100, 10.0),  # bytes only
        ((20, 1.0), (20, 1.0), 100, 5.0),
        ((10, 1.0), (20, 0.9), 100, 4.5),
        ((10, 0.1), (20, 1.1), 5, 0.0),
    ],
    ids=["mostly launches", "bytes only", "one sample", "noise", "less than both"],
)
def test_two_samples_give_a_fixed_part_and_what_bytes_take(few, many, total, seconds):
    assert microbenchmark.extrapolated(few, many, total) == pytest.approx(seconds)


def test_samples_have_each_shape_once_and_more_often_within_the_limit(monkeypatch):
    shapes = [torch.Size(shape) for shape in SHAPES] * 10
    monkeypatch.setattr(microbenchmark, "_SAMPLE_BYTES", 4 * 2560)
    once, more = microbenchmark._samples(shapes, 4)
    assert sorted(once) == [(8, 8), (8, 32), (24, 8)] and more == once * 5, "5 x 512 values"
    monkeypatch.setattr(microbenchmark, "_SAMPLE_BYTES", 1)
    assert microbenchmark._samples(shapes, 4) == ([(24, 8)], [(24, 8)])


def test_a_microbenchmark_takes_time_of_its_own_and_leaves_everything_as_it_was():
    [[all_of_them, none, *others]] = run_ranks(1, _measure, timeout=60)
    assert none == 0 and min(all_of_them, *others) > 0
    assert max(all_of_them, *others) < 10
