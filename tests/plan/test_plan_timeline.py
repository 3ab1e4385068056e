"""The simulation of the planner: its steady state continued, and its numbers."""

from dataclasses import replace

import pytest

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.tools.plan.hardware import CLUSTERS
from optimus_cc_ext.tools.plan.iteration import CLASSES, backward_ends, breakdown, iteration, rank_costs, schedule_of
from optimus_cc_ext.tools.plan.model import Job
from optimus_cc_ext.tools.plan.shapes import MODELS
from optimus_cc_ext.tools.plan.timeline import Sent, StageCost, last_backward_ends

DENSE, EPILOGUE, ALL, GRADIENTS, BOTH = (
    OptimusConfig(),
    OptimusConfig(compressed_backprop_format="low-rank"),
    OptimusConfig(compressed_backprop_format="int8"),
    OptimusConfig(dp_compression_format="int8"),
    OptimusConfig(compressed_backprop_format="int8", pipeline_forward_format="int8"),
)
JOB = Job(model=MODELS["8.3b"], gpus=128, tp=8, pp=4, micro_batch=8, batch=512)
SLOW = CLUSTERS["paper"]


ACTIVATIONS = {"dense": Sent(transfer=0.2), "int8": Sent(transfer=0.1, encode=0.02, decode=0.02)}
DENSE_GRADIENT, COMPRESSED = Sent(transfer=0.2), Sent(transfer=0.05, encode=0.03, decode=0.02, remember=0.04)


def stages(count: int, activation: Sent, gradient: Sent, epilogue: Sent, head: float = 1.3) -> tuple[StageCost, ...]:
    messages = {"activation": activation, "gradient": gradient, "epilogue": epilogue}
    plain = StageCost(forward=1.0, backward=2.0, **messages)
    return (*[plain] * (count - 1), StageCost(forward=head, backward=2.0 * head, **messages))


@pytest.mark.parametrize(("form", "gradient", "epilogue"), [
    ("dense", DENSE_GRADIENT, DENSE_GRADIENT), ("dense", DENSE_GRADIENT, COMPRESSED),
    ("dense", COMPRESSED, COMPRESSED), ("int8", COMPRESSED, COMPRESSED),
], ids=["dense", "epilogue", "all", "both"])  # fmt: skip
@pytest.mark.parametrize(("count", "chunks", "micro_batches"), [
    (1, 1, 17), (2, 1, 31), (3, 1, 28), (4, 1, 43), (8, 1, 77), (2, 3, 24), (4, 2, 40),
])  # fmt: skip
def test_the_steady_state_continued_is_what_all_events_give(
    form: str, gradient: Sent, epilogue: Sent, count: int, chunks: int, micro_batches: int
) -> None:
    costs = stages(count, ACTIVATIONS[form], gradient, epilogue)
    events = last_backward_ends(schedule_of(count, chunks, micro_batches), costs)
    # The times are equal up to rounding, or up to a part of a period that is longer than P micro-batches.
    assert backward_ends(chunks, micro_batches, costs) == pytest.approx(events, rel=1e-3)


def test_the_schedule_is_megatrons() -> None:
    schedule = schedule_of(2, 2, 4)
    assert [work.chunk for work in schedule.passes(1) if work.forward] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [w.forward for w in schedule.passes(0)[:5]] == [True] * 5 and not schedule.passes(0)[5].forward


def test_tensor_parallelism_lengthens_both_passes_and_the_embeddings_sum_follows_both_reductions() -> None:
    job = JOB.replace(recompute="full")
    whole, first = iteration(SLOW, job), rank_costs(SLOW, job)[0]
    forward, backward = whole.times.costs[0].forward - first.forward, whole.times.costs[0].backward - first.backward
    # A backward pass with full recomputation repeats the transfers of the forward pass.
    assert backward == pytest.approx(2 * forward) and forward > 0
    untied = iteration(SLOW, job.replace(model=replace(job.model, tied=False)))
    assert whole.times.embedding > 0 == untied.times.embedding
    assert whole.times.reductions == untied.times.reductions


@pytest.mark.parametrize(
    "config", [DENSE, OptimusConfig(compressed_backprop_format="low-rank", dp_compression_format="low-rank"), BOTH]
)
def test_where_the_seconds_go_adds_up_and_nothing_is_negative(config: OptimusConfig) -> None:
    whole = iteration(SLOW, JOB, config)
    parts = breakdown(JOB, whole)
    assert tuple(parts) == CLASSES and sum(parts.values()) == pytest.approx(whole.seconds)
    assert min(parts.values()) >= -1e-9
    assert (parts["compression"] > 0) == (config != DENSE)
