"""Law: state follows the step. Changes by a repeated or skipped step do not reach a later step."""

import dataclasses

import pytest
import torch

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.presets import Layout
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.session import Session
from tests.unit.test_links import done, gradient, residual_of

MICRO_BATCHES = 2


def new_session(train_iters=8, **changes):
    """Make the session of the stage that sends gradients, the second of two."""
    config = OptimusConfig(
        compressed_backprop_format="low-rank", compressed_backprop_rank=2, compressed_backprop_messages="all",
        residual_across_iterations="carry", dp_compression_format="low-rank", dp_compression_warmup=0.5,
    ).replace(**changes)  # fmt: skip
    session = Session(config)
    session.layout = Layout(stages=2, data_parallel=2, tied_embeddings=True, train_iters=train_iters)
    session.backprop.connect_to(0, 1, rank=1, peer_rank=0)
    return session


@pytest.fixture
def session():
    return new_session()


def residual(session):
    return residual_of(session.backprop)


def in_warmup(session, iteration=None):
    session.begin_step(iteration)
    with session.iteration(NonInterleaved(2, 0)):
        found = session.gradients.in_warmup
    session.end_step(applied=True)
    return found


def forward_backward(session, seed):
    with session.iteration(NonInterleaved(2, MICRO_BATCHES)):
        gradients = [gradient(100 * seed + b, shape=(8, 2, 16)) for b in range(MICRO_BATCHES)]
        return [done(session.backprop.sending.send(g)).clone() for g in gradients]


def announced_step(session, iteration, seeds, applied=True):
    """Take an announced step; return its messages, pass by pass."""
    session.begin_step(iteration)
    messages = [forward_backward(session, seed) for seed in seeds]
    session.end_step(applied=applied)
    return messages


def test_a_repeated_step_sends_the_same_and_counts_once(session):
    announced_step(session, 0, [1])
    (expected,) = announced_step(session, 1, [2])
    twin = new_session()
    announced_step(twin, 0, [1])
    # Three passes are discarded, and the last one counts.
    first, *_, last = announced_step(twin, 1, [2, 7, 8, 2])
    for messages in (first, last):
        assert all(torch.equal(one, other) for one, other in zip(messages, expected, strict=True))
    assert torch.equal(residual(twin), residual(session))


def test_no_reduction_of_a_failed_pass_goes_on_in_the_next_one(session):
    with pytest.raises(RuntimeError, match="lost"), session.iteration(NonInterleaved(2, 0)):
        session.gradients.under_way.append("the last bucket's reducer, which nobody waited for")
        raise RuntimeError("a connection is lost")
    with session.iteration(NonInterleaved(2, 0)):
        assert session.gradients.under_way == []


def test_a_skipped_step_counts_for_nothing(session):
    announced_step(session, 0, [1])
    before = residual(session)
    announced_step(session, 1, [2], applied=False)
    assert torch.equal(residual(session), before)


def test_warmup_ends_after_its_fraction_of_the_iterations_which_a_custom_loop_counts_itself(session):
    expected = [True] * 4 + [False] * 4
    assert [in_warmup(session) for _ in range(8)] == expected
    assert [in_warmup(session, iteration) for iteration in range(8)] == expected
    assert not in_warmup(new_session(), 6), "a resumed run knows which iteration it is"
    rounded = new_session(train_iters=100, dp_compression_warmup=0.29)
    assert in_warmup(rounded, 28) and not in_warmup(rounded, 29), "rounded to whole iterations"


def test_a_residual_from_before_a_warmup_is_forgotten_in_it():
    session = new_session(compressed_backprop_warmup=0.25)
    announced_step(session, 2, [1])
    assert residual(session).any()
    session.layout = dataclasses.replace(
        session.layout, train_iters=100
    )  # a resumed run may have a larger --train-iters
    announced_step(session, 3, [2])
    assert not residual(session).any()


def test_outside_of_an_iteration_the_session_is_inactive(session):
    assert not session.active
    with pytest.raises(KeyError), session.iteration(NonInterleaved(2, 0)):
        assert session.active
        raise KeyError
    assert not session.active


def test_a_state_that_does_not_fit_changes_nothing(session):
    announced_step(session, None, [1])
    twin = new_session()
    twin.load_state_dict(session.state_dict())
    saved = session.state_dict() | {"iteration": 7, "dp_compression": {"states": {"bucket 0: 4x4": {}}}}
    with pytest.raises(ValueError, match="dp_compression: bucket 0: 4x4: either here or in the checkpoint"):
        twin.load_state_dict(saved)
    assert twin.state_dict()["iteration"] == 1
    for either in (session, twin):
        forward_backward(either, 2)
    assert torch.equal(residual(twin), residual(session))
