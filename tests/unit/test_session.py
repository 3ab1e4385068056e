"""Law: state follows the step. What a repeated or skipped step left behind reaches no later one."""

import dataclasses

import pytest
import torch

from optimus_cc_ext.compressors import FastLowRank
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.resolve import Layout
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.compressed_backprop import LinkPlan, SendingLink
from optimus_cc_ext.techniques.schedule import NonInterleaved

MICRO_BATCHES = 2


@pytest.fixture
def session():
    config = OptimusConfig(
        compressed_backprop=True, compressed_backprop_rank=2, compressed_backprop_messages="all",
        residual_across_iterations="carry",
        dp_compression=True, dp_compression_warmup=0.5,
    )  # fmt: skip
    session = Session(config, Layout(stages=2, data_parallel=2, tied_embeddings=True, train_iters=8))
    session.sending = SendingLink(
        LinkPlan(config=config, sending_stage=1, receiving_stage=0, seed=1), FastLowRank(), 1, 0
    )
    return session


def forward_backward(session, seed):
    with session.iteration(NonInterleaved(2, MICRO_BATCHES)):
        for b in range(MICRO_BATCHES):
            g = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(100 * seed + b))
            session.sending.send(g)[1]()


def residual(session):
    return session.sending.residuals()[0].clone()


def announced_step(session, iteration, seeds, applied=True):
    session.begin_step(iteration)
    for seed in seeds:
        forward_backward(session, seed)
    session.end_step(applied=applied)


def test_a_repeated_step_counts_once(session):
    announced_step(session, 0, [1])
    announced_step(session, 1, [2])
    expected = residual(session)
    twin = Session(session.config, session.layout)
    twin.sending = SendingLink(session.sending.plan, FastLowRank(), 1, 0)
    announced_step(twin, 0, [1])
    announced_step(twin, 1, [7, 8, 2])  # two passes that were thrown away, and the one that counted
    assert torch.equal(residual(twin), expected)


def test_a_skipped_step_counts_for_nothing(session):
    announced_step(session, 0, [1])
    before = residual(session)
    announced_step(session, 1, [2], applied=False)
    assert torch.equal(residual(session), before)


def test_without_announced_steps_every_pass_counts(session):
    forward_backward(session, 1)
    after_first = residual(session)
    forward_backward(session, 2)
    assert not torch.equal(residual(session), after_first)


def test_an_own_loop_and_megatrons_end_in_the_same_state(session):
    for seed in (1, 2, 3):
        forward_backward(session, seed)
    twin = Session(session.config, session.layout)
    twin.sending = SendingLink(session.sending.plan, FastLowRank(), 1, 0)
    for iteration, seed in enumerate((1, 2, 3)):
        announced_step(twin, iteration, [seed])
    assert torch.equal(residual(twin), residual(session))


def test_warmup_ends_after_its_fraction_of_the_iterations(session):
    in_warmup = []
    for iteration in range(8):
        session.begin_step(iteration)
        with session.iteration(NonInterleaved(2, 0)):
            in_warmup.append(session.in_warmup())
        session.end_step(applied=True)
    assert in_warmup == [True] * 4 + [False] * 4


def test_messages_travel_as_they_are_until_their_own_warmup_ends(session):
    session.config = session.config.replace(compressed_backprop_warmup=0.25)
    compressed = []
    for iteration in range(4):
        announced_step(session, iteration, [iteration])
        compressed.append(session.sending.compressed)
    assert compressed == [[False] * MICRO_BATCHES] * 2 + [[True] * MICRO_BATCHES] * 2


def test_a_residual_from_before_a_warmup_is_forgotten_in_it(session):
    announced_step(session, 0, [1])
    assert residual(session).any()
    session.config = session.config.replace(compressed_backprop_warmup=0.25)  # as where the run got longer
    announced_step(session, 1, [2])
    assert not residual(session).any()


def test_a_fraction_of_the_iterations_is_rounded_to_whole_ones(session):
    session.config = session.config.replace(dp_compression_warmup=0.29)
    session.layout = dataclasses.replace(session.layout, train_iters=100)
    session.begin_step(28)
    assert session.in_warmup()


def test_a_resumed_run_knows_which_iteration_it_is(session):
    session.begin_step(6)
    assert not session.in_warmup()


def test_an_own_loop_counts_its_iterations_itself(session):
    in_warmup = []
    for _ in range(8):
        with session.iteration(NonInterleaved(2, 0)):
            in_warmup.append(session.in_warmup())
    assert in_warmup == [True] * 4 + [False] * 4


def test_outside_of_an_iteration_the_session_is_inactive(session):
    assert not session.active
    with pytest.raises(KeyError), session.iteration(NonInterleaved(2, 0)):
        assert session.active
        raise KeyError
    assert not session.active


def resumed_from(session):
    twin = Session(session.config, session.layout)
    twin.sending = SendingLink(session.sending.plan, FastLowRank(), 1, 0)
    twin.load_state_dict(session.state_dict())
    return twin


def test_a_state_dict_within_a_step_is_of_the_step_before(session):
    announced_step(session, 0, [1])
    session.begin_step(1)
    forward_backward(session, 2)
    twin = resumed_from(session)  # as Megatron's rerun state machine saves, before the update
    session.end_step(applied=True)
    announced_step(twin, 1, [2])
    assert torch.equal(residual(twin), residual(session))


def test_a_state_dict_in_an_own_loop_is_of_all_passes(session):
    forward_backward(session, 1)
    twin = resumed_from(session)
    assert twin.state_dict()["iteration"] == 1
    for either in (session, twin):
        forward_backward(either, 2)
    assert torch.equal(residual(twin), residual(session))


def test_a_state_dict_that_does_not_fit_changes_nothing(session):
    announced_step(session, 0, [1])
    twin = resumed_from(session)
    saved = session.state_dict() | {"iteration": 7, "dp_compression": {"buckets": [{"groups": []}]}}
    with pytest.raises(ValueError, match="dp_compression: 1 gradient buckets where there are 0"):
        twin.load_state_dict(saved)
    assert twin.state_dict()["iteration"] == 1
