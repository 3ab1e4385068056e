"""The simulated iteration: how long the passes take together, what messages delay, and which stages gain anything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from optimus_cc_ext.forecast.timeline import (
    INDIFFERENT,
    StageCost,
    iteration_seconds,
    last_backward_ends,
    left_after_backward,
    smallest_useful,
)
from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved, Pass

FREE = {"activation": 0.0, "gradient": 0.0, "compressed_gradient": 0.0}
never, always, in_epilogue = (lambda message: False), (lambda message: True), (lambda message: message.epilogue)


def alike(stages: int, **cost: float) -> list[StageCost]:
    return [StageCost(**{"forward": 1.0, "backward": 2.0} | FREE | cost)] * stages


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (2, 8), (4, 2), (4, 8)])
def test_on_free_links_1f1b_takes_m_plus_p_minus_1_passes_and_later_stages_end_earlier(
    stages: int, micro_batches: int
) -> None:
    ends = last_backward_ends(NonInterleaved(stages, micro_batches), alike(stages), never)
    # A stage ends one backward pass before the stage before it.
    assert ends == [3.0 * (micro_batches + stages - 1) - 2.0 * stage for stage in range(stages)]


def test_interleaving_shortens_the_bubble_by_the_number_of_chunks() -> None:
    # Forward passes of chunk 0 for both micro-batches, then of chunk 1; warm-ups by Megatron's rule.
    schedule = Interleaved(2, 2, forward_order=(0, 0, 1, 1), warmups=(3, 2))
    ends = last_backward_ends(schedule, alike(2, forward=0.5, backward=1.0), never)
    whole = last_backward_ends(NonInterleaved(2, 2), alike(2), never)
    assert ends[0] == 4 * 1.5 + 1.5 and whole[0] == 2 * 3.0 + 3.0


def test_a_stage_runs_its_warmups_then_one_forward_one_backward() -> None:
    forward, backward = (lambda k: Pass(True, 0, k)), (lambda k: Pass(False, 0, k))
    assert NonInterleaved(3, 4).passes(0) == (
        *map(forward, (0, 1)), forward(2), backward(0), forward(3), backward(1), backward(2), backward(3),
    )  # fmt: skip
    assert NonInterleaved(3, 2).passes(2) == (forward(0), backward(0), forward(1), backward(1))


def test_a_message_delays_who_waits_for_it_and_the_wire_carries_one_after_the_other() -> None:
    # Two stages, one micro-batch: forward, activation (3), forward, backward, gradient (5), backward.
    costs = alike(2, activation=3.0, gradient=5.0)
    assert last_backward_ends(NonInterleaved(2, 1), costs, never) == [1 + 3 + 1 + 2 + 5 + 2, 1 + 3 + 1 + 2]
    # Activations that travel longer than anything is computed: the k-th arrives after k of them.
    slow = alike(2, activation=100.0)
    assert last_backward_ends(NonInterleaved(2, 3), slow, never)[1] == 1 + 3 * 100 + 3


def test_compressing_costs_the_sender_decompressing_the_receiver() -> None:
    costs = alike(2, gradient=5.0, compressed_gradient=1.0, compress=0.25, decompress=0.5)
    assert last_backward_ends(NonInterleaved(2, 1), costs, always) == [1 + 1 + 2 + 0.25 + 1 + 0.5 + 2, 4.25]


def test_the_epilogue_alone_is_compressed_where_only_that_is_asked_for() -> None:
    costs = alike(4, gradient=0.5)
    ends = {rule: last_backward_ends(NonInterleaved(4, 8), costs, rule)[0] for rule in (never, in_epilogue, always)}
    # Three gradients follow each other down the pipeline in the cooldown, and that is all that waits for them there.
    assert ends[never] - ends[in_epilogue] == 1.5
    assert ends[always] < ends[in_epilogue]


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
    costs = alike(
        stages, forward=forward, backward=backward, activation=activation,
        gradient=gradient, compressed_gradient=gradient * faster,
    )  # fmt: skip
    schedule = NonInterleaved(stages, micro_batches)
    plain, compressed = (last_backward_ends(schedule, costs, rule) for rule in (never, always))
    assert all(c <= p + 1e-9 for c, p in zip(compressed, plain, strict=True))
    assert min(plain) >= micro_batches * (forward + backward) - 1e-9


@pytest.mark.parametrize(
    ("ends", "reductions", "embedding", "seconds"),
    [([10, 8, 6], [1, 5, 2], 0, 13), ([10, 8, 6], [1, 5, 6], 4, 16), ([10], [3], 0, 13)],
)
def test_the_iteration_ends_with_the_last_reduction_and_the_embedding_waits_for_both_its_stages(
    ends, reductions, embedding, seconds
) -> None:
    assert iteration_seconds(ends, reductions, embedding) == seconds


@pytest.mark.parametrize(("reduction", "buckets", "left"), [(8.0, 1, 8.0), (8.0, 4, 8.0 - 3.0), (2.0, 4, 0.5)])
def test_a_reduction_hides_behind_the_last_backward_pass_but_for_its_last_bucket(reduction, buckets, left) -> None:
    assert left_after_backward(reduction, 4.0, buckets=buckets) == left


@pytest.mark.parametrize(
    ("dense", "compressed", "chosen"),
    [
        (3, 1, {0}),  # the paper's case: reductions that fit into the slack of the later stages
        (30, 1, {0, 1, 2, 3}),  # much longer than the cooldown; whoever stays dense is what everyone waits for
        (9, 3, {0, 1, 2}),
        (1, 2, set()),  # compression that takes longer than what it saves
        (INDIFFERENT / 2, 0, set()),  # nor is accuracy given up for nothing
    ],
)
def test_a_stage_whose_dense_reduction_fits_into_its_slack_stays_dense(dense, compressed, chosen) -> None:
    assert smallest_useful([10.0, 8.0, 6.0, 4.0], [dense] * 4, [compressed] * 4, 0) == chosen


@given(
    st.lists(st.tuples(st.floats(0, 20), st.floats(0, 20), st.floats(0, 20)), min_size=1, max_size=5), st.floats(0, 5)
)
def test_no_choice_of_stages_is_faster_than_the_chosen_one(
    stages: list[tuple[float, float, float]], embedding: float
) -> None:
    ends, dense, compressed = zip(*stages, strict=True)

    def seconds(choice: frozenset[int]) -> float:
        reductions = [compressed[s] if s in choice else dense[s] for s in range(len(stages))]
        return iteration_seconds(ends, reductions, embedding)

    chosen = smallest_useful(ends, dense, compressed, embedding)
    every_choice = [frozenset(s for s in range(len(stages)) if mask >> s & 1) for mask in range(1 << len(stages))]
    assert seconds(chosen) <= min(map(seconds, every_choice)) * (1 + INDIFFERENT) + 1e-9
