"""The simulated iteration: the duration of all passes, the delays by messages, and the stages that gain."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved, Pass
from optimus_cc_ext.tools.plan.timeline import (
    ClassCost,
    IterationTimes,
    Link,
    RankCost,
    Sent,
    StageCost,
    Switches,
    When,
    iteration,
    last_backward_ends,
    left_after_backward,
    reduced_after,
)


def alike(stages: int, forward: float = 1.0, backward: float = 2.0, **messages: Sent | float) -> list[StageCost]:
    """Make stages with equal costs; a message's number is its transfer's seconds."""
    sent = {name: each if isinstance(each, Sent) else Sent(transfer=each) for name, each in messages.items()}
    return [StageCost(forward=forward, backward=backward, **sent)] * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 8), (4, 2), (4, 8)])
def test_on_free_links_1f1b_takes_m_plus_p_minus_1_passes_and_later_stages_end_earlier(
    stages: int, micro_batches: int
) -> None:
    ends = last_backward_ends(NonInterleaved(stages, micro_batches), alike(stages))
    # Each stage ends one backward pass earlier than the stage before it.
    assert ends == [3.0 * (micro_batches + stages - 1) - 2.0 * stage for stage in range(stages)]


def test_interleaving_shortens_the_bubble_by_the_number_of_chunks() -> None:
    # Both micro-batches pass chunk 0, then chunk 1; the numbers of warm-up passes follow Megatron's rule.
    schedule = Interleaved(2, 2, forward_order=(0, 0, 1, 1), warmups=(3, 2))
    ends = last_backward_ends(schedule, alike(2, forward=0.5, backward=1.0))
    whole = last_backward_ends(NonInterleaved(2, 2), alike(2))
    assert ends[0] == 4 * 1.5 + 1.5 and whole[0] == 2 * 3.0 + 3.0


def test_a_stage_runs_its_warmups_then_one_forward_one_backward() -> None:
    forward, backward = (lambda k: Pass(True, 0, k)), (lambda k: Pass(False, 0, k))
    assert NonInterleaved(3, 4).passes(0) == (
        *map(forward, (0, 1)), forward(2), backward(0), forward(3), backward(1), backward(2), backward(3),
    )  # fmt: skip
    assert NonInterleaved(3, 2).passes(2) == (forward(0), backward(0), forward(1), backward(1))


def test_a_message_delays_who_waits_for_it_and_the_wire_carries_one_after_the_other() -> None:
    # Two stages pass one micro-batch: forward, activation (3 s), forward, backward, gradient (5 s), backward.
    costs = alike(2, activation=3.0, gradient=5.0, epilogue=5.0)
    assert last_backward_ends(NonInterleaved(2, 1), costs) == [1 + 3 + 1 + 2 + 5 + 2, 1 + 3 + 1 + 2]
    # An activation's transfer takes longer than any computation, so the k-th one arrives after k transfers.
    slow = alike(2, activation=100.0)
    assert last_backward_ends(NonInterleaved(2, 3), slow)[1] == 1 + 3 * 100 + 3


def test_compressing_costs_the_sender_decompressing_the_receiver() -> None:
    costs = alike(2, epilogue=Sent(transfer=1.0, encode=0.25, decode=0.5))
    assert last_backward_ends(NonInterleaved(2, 1), costs) == [1 + 1 + 2 + 0.25 + 1 + 0.5 + 2, 4.25]
    remembering = alike(2, epilogue=Sent(transfer=1.0, remember=3.0))
    # Only the sender computes a residual, during its message's transfer, so the receiver waits no longer.
    assert last_backward_ends(NonInterleaved(2, 1), remembering) == [1 + 1 + 2 + 1 + 2, 4 + 3]


def test_the_epilogue_alone_is_compressed_where_only_that_is_asked_for() -> None:
    never, in_epilogue, always = (
        last_backward_ends(NonInterleaved(4, 8), alike(4, gradient=gradient, epilogue=epilogue))[0]
        for gradient, epilogue in ((0.5, 0.5), (0.5, 0.0), (0.0, 0.0))
    )
    # Three gradients follow each other down the pipeline in the cooldown; no other pass waits for gradients there.
    assert never - in_epilogue == 1.5
    assert always < in_epilogue


@given(
    stages=st.integers(1, 5),
    micro_batches=st.integers(1, 8),
    times=st.tuples(*[st.floats(0, 10) for _ in range(4)]),
    faster=st.floats(0, 1),
)
def test_faster_messages_never_make_it_longer(
    stages: int, micro_batches: int, times: tuple[float, ...], faster: float
) -> None:
    forward, backward, activation, gradient = times
    schedule = NonInterleaved(stages, micro_batches)
    plain, compressed = (
        last_backward_ends(schedule, alike(stages, forward, backward, activation=activation, gradient=g, epilogue=g))
        for g in (gradient, gradient * faster)
    )
    assert all(c <= p + 1e-9 for c, p in zip(compressed, plain, strict=True))
    assert min(plain) >= micro_batches * (forward + backward) - 1e-9


@pytest.mark.parametrize(
    ("ends", "reductions", "embedding", "seconds"),
    [([10, 8, 6], [1, 5, 2], 0, 13), ([10, 8, 6], [1, 5, 6], 4, 16), ([10], [3], 0, 13)],
)
def test_the_iteration_ends_with_the_last_reduction_and_the_embedding_waits_for_both_its_stages(
    ends, reductions, embedding, seconds
) -> None:
    assert reduced_after(ends, reductions, embedding) == seconds


@pytest.mark.parametrize(("reduction", "buckets", "left"), [(8.0, 1, 8.0), (8.0, 4, 8.0 - 3.0), (2.0, 4, 0.5)])
def test_a_reduction_hides_behind_the_last_backward_pass_but_for_its_last_bucket(reduction, buckets, left) -> None:
    assert left_after_backward(reduction, 4.0, buckets=buckets) == left


def placed(when: When, link: Link, dense: Sent, compressed: Sent | None = None) -> ClassCost:
    return ClassCost("sixth", when, link, dense, compressed or Sent())


def times(*ranks: RankCost, on: tuple[int, ...] = (), epilogue_only: bool = False, **more: Any) -> IterationTimes:
    """Compute the times of two micro-batches on two stages, whose passes take 1 and 2 seconds; stages `on` compress."""
    return iteration(ranks, NonInterleaved(2, 2), Switches({"sixth": frozenset(on)}, epilogue_only), **more)


def both_stages(*classes: ClassCost, **more: Any) -> tuple[RankCost, RankCost]:
    first, last = (RankCost(stage=stage, forward=1.0, backward=2.0, classes=classes, **more) for stage in (0, 1))
    return first, last


@pytest.mark.parametrize(
    ("when", "link", "ends", "reductions", "embedding", "after_step"),
    [
        # A longer pass counts in each of the 3 (M + P - 1) consecutive passes: 9 passes of 10 more seconds each.
        (When.FORWARD_PASS, Link.TENSOR, [9 + 3 * 10.0, 7 + 3 * 10.0], [0, 0], 0, 0),
        (When.BACKWARD_PASS, Link.TENSOR, [9 + 3 * 10.0, 7 + 2 * 10.0], [0, 0], 0, 0),
        # The first activation arrives after 11 s, the second one 10 s later; the last stage's passes follow it.
        (When.ACTIVATION, Link.STAGES, [1 + 20 + 3 + 2, 1 + 20 + 3], [0, 0], 0, 0),
        (When.GRADIENT, Link.STAGES, [4 + 20 + 2, 7], [0, 0], 0, 0),
        (When.AFTER_BACKWARD, Link.REPLICAS, [9, 7], [10, 10], 0, 0),
        (When.AFTER_BACKWARD, Link.ENDS, [9, 7], [0, 0], 10, 0),
        (When.AFTER_STEP, Link.REPLICAS, [9, 7], [0, 0], 0, 10),
    ],
)
def test_a_class_of_traffic_is_one_row_that_says_where_its_seconds_fall(
    when: When, link: Link, ends: list[float], reductions: list[float], embedding: float, after_step: float
) -> None:
    found = times(*both_stages(placed(when, link, Sent(transfer=10.0))))
    assert list(found.ends) == ends and list(found.reductions) == reductions
    assert (found.embedding, found.after_step) == (embedding, after_step)
    free = times(*both_stages(placed(when, link, Sent(transfer=10.0))), on=(0, 1))
    assert list(free.ends) == [9, 7] and not any((*free.reductions, free.embedding, free.after_step))


def test_a_stage_computes_as_its_ranks_do_on_average_and_waits_for_the_slowest_transfer() -> None:
    sent = Sent(transfer=1.0, encode=1.0), Sent(transfer=5.0, encode=3.0)
    ranks = [
        RankCost(stage=s, forward=f, backward=2.0, classes=(placed(When.ACTIVATION, Link.STAGES, each),))
        for s in (0, 1)
        for f, each in zip((0.5, 1.5), sent, strict=True)
    ]
    (cost, _) = times(*ranks).costs
    assert (cost.forward, cost.activation.transfer, cost.activation.encode) == (1.0, 5.0, 2.0)
    reducing = [
        RankCost(stage=s, forward=1.0, backward=2.0, classes=(placed(When.AFTER_BACKWARD, Link.REPLICAS, each),))
        for s in (0, 1)
        for each in (Sent(transfer=1.0), Sent(transfer=3.0, second_phase=4.0))
    ]
    assert times(*reducing).reductions == (7.0, 7.0)


def test_only_the_epilogue_is_compressed_where_the_switches_say_so() -> None:
    ranks = both_stages(placed(When.GRADIENT, Link.STAGES, Sent(transfer=4.0), Sent(transfer=1.0)))
    for epilogue_only, on, sent in ((False, (0, 1), (1, 1)), (True, (0, 1), (4, 1)), (True, (), (4, 4))):
        (cost, _) = times(*ranks, on=on, epilogue_only=epilogue_only).costs
        assert (cost.gradient.transfer, cost.epilogue.transfer) == sent


def test_what_is_hidden_of_a_reduction_slows_the_passes_that_hide_it() -> None:
    reduced = placed(When.AFTER_BACKWARD, Link.REPLICAS, Sent(transfer=8.0, second_phase=1.0))
    for last_passes, left in ((1, 8.0 - 2.0 * 3 / 4), (2, 8.0 - 2 * 2.0 * 3 / 4)):
        ranks = both_stages(reduced, buckets=4, last_passes=last_passes)
        assert times(*ranks).reductions == (left + 1.0,) * 2
        assert times(*ranks, contention=0.5).reductions == (left + 0.5 * (8.0 - left) + 1.0,) * 2


def test_the_second_phases_of_all_buckets_but_the_last_two_are_hidden_by_a_long_pass() -> None:
    reduced = placed(When.AFTER_BACKWARD, Link.REPLICAS, Sent(transfer=1.0, second_phase=3.0))
    for buckets, left in ((1, 4.0), (2, 0.5 + 3.0), (10, 0.1 + 2 * 0.3)):
        ranks = both_stages(reduced, buckets=buckets, last_passes=10)
        assert times(*ranks).reductions == (pytest.approx(left),) * 2
