"""One simulation for the forecast and the planner: its steady state continued, its numbers in both, and its trace."""

import itertools
import json

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.forecast.decide import Measured, forecast
from optimus_cc_ext.forecast.probe import Rate
from optimus_cc_ext.forecast.timeline import StageCost, last_backward_ends
from optimus_cc_ext.plan.hardware import CLUSTERS
from optimus_cc_ext.plan.iteration import CLASSES, backward_ends, breakdown, iteration, schedule_of
from optimus_cc_ext.plan.model import MODELS, Job
from optimus_cc_ext.plan.trace import trace

DENSE, EPILOGUE, ALL, BOTH = (
    OptimusConfig(),
    OptimusConfig(compressed_backprop=True),
    OptimusConfig(compressed_backprop_format="int8"),
    OptimusConfig(compressed_backprop_format="int8", pipeline_forward_format="int8"),
)
JOB = Job(model=MODELS["8.3b"], gpus=128, tp=8, pp=4, micro_batch=8, batch=512)
SLOW = CLUSTERS["paper"]


def stages(count: int, head: float = 1.3) -> list[StageCost]:
    cost = {"activation": 0.2, "gradient": 0.2, "compressed_gradient": 0.05, "compressed_activation": 0.1}
    coding = {"compress": 0.03, "decompress": 0.02, "remember": 0.04, "encode": 0.02, "decode": 0.02}
    plain = StageCost(forward=1.0, backward=2.0, **cost, **coding)
    last = StageCost(forward=head, backward=2.0 * head, **cost, **coding)
    return [plain] * (count - 1) + [last]


@pytest.mark.parametrize("config", [DENSE, EPILOGUE, ALL, BOTH], ids=["dense", "epilogue", "all", "both"])
@pytest.mark.parametrize(("count", "chunks", "micro_batches"), [
    (1, 1, 17), (2, 1, 31), (3, 1, 28), (4, 1, 43), (8, 1, 77), (2, 3, 24), (4, 2, 40),
])  # fmt: skip
def test_the_steady_state_continued_is_what_all_events_give(
    config: OptimusConfig, count: int, chunks: int, micro_batches: int
) -> None:
    costs, everything = stages(count), config.compressed_backprop_messages == "all"
    events = last_backward_ends(
        schedule_of(count, chunks, micro_batches),
        costs,
        lambda message: config.compressed_backprop and (everything or message.epilogue),
        compressed_activations=config.pipeline_forward_format != "dense",
    )
    # Equal but for rounding, or for a period that is longer than P micro-batches by a part of it.
    assert backward_ends(chunks, micro_batches, costs, config) == pytest.approx(events, rel=1e-3)


def test_the_schedule_is_megatrons() -> None:
    schedule = schedule_of(2, 2, 4)
    assert [work.chunk for work in schedule.passes(1) if work.forward] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [w.forward for w in schedule.passes(0)[:5]] == [True] * 5 and not schedule.passes(0)[5].forward


@pytest.mark.parametrize("config", [DENSE, EPILOGUE, ALL], ids=["dense", "epilogue", "all"])
def test_forecast_and_planner_say_the_same_when_they_are_given_the_same(config: OptimusConfig) -> None:
    ours = iteration(SLOW, JOB, config)
    everyone = [
        Measured(
            stage=stage,
            forward=cost.forward,
            backward=cost.backward,
            link=Rate(0.0, 1e9),
            dense_sum=Rate(0.0, 1e9),
            factor_sum=Rate(0.0, 1e9),
            message_bytes=round(1e9 * cost.activation),
            compressed_message_bytes=round(1e9 * cost.compressed_gradient),
            compress=cost.compress,
            decompress=cost.decompress,
            remember=cost.remember,
            dense_bytes=round(1e9 * left),
        )
        for stage, (cost, left) in enumerate(zip(ours.costs, ours.reductions, strict=True))
    ]
    theirs = forecast(everyone, schedule_of(JOB.pp, JOB.vpp, JOB.micro_batches), config, frozenset())
    reduced = ours.seconds - ours.step - ours.gather
    # The planner's embedding is reduced after that; the forecast here was given none.
    assert theirs.ours == pytest.approx(reduced, abs=ours.embedding + 1e-6)


@pytest.mark.parametrize("config", [DENSE, OptimusConfig(compressed_backprop=True, dp_compression=True), BOTH])
def test_where_the_seconds_go_adds_up_and_nothing_is_negative(config: OptimusConfig) -> None:
    whole = iteration(SLOW, JOB, config)
    parts = breakdown(JOB, config, whole)
    assert tuple(parts) == CLASSES and sum(parts.values()) == pytest.approx(whole.seconds)
    assert min(parts.values()) >= -1e-9
    assert (parts["compression"] > 0) == (config != DENSE)


def test_the_trace_shows_every_pass_once_and_ends_with_the_iteration() -> None:
    config = OptimusConfig(compressed_backprop=True, dp_compression=True)
    whole = iteration(SLOW, JOB, config)
    events = json.loads(json.dumps(trace(JOB, config, whole)))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    passes = [event for event in spans if event["cat"] == "computation" and event["pid"]]
    assert len(passes) == 2 * JOB.pp * JOB.micro_batches
    assert len({(event["pid"], event["name"]) for event in passes}) == len(passes)
    assert max(event["ts"] + event["dur"] for event in spans) == pytest.approx(1e6 * whole.seconds)
    # A stage computes one thing at a time, and no link carries two messages.
    for process in range(1, JOB.pp + 1):
        for thread in ("computation", "messages"):
            line = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["cat"]) == (process, thread))
            assert all(end <= begin + 1e-3 for (_, end), (begin, _) in itertools.pairwise(line))
    named = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert {"stage 0", "stage 3", "computation", "messages"} <= named
