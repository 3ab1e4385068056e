"""Law: state follows the step. What a repeated or skipped step left behind reaches no later one."""

import dataclasses

import pytest
import torch

from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.resolve import Layout
from optimus_cc_ext.session import Session
from optimus_cc_ext.techniques.schedule import NonInterleaved
from tests.unit.test_links import done

MICRO_BATCHES = 2


def new_session(train_iters=8, **changes):
    config = OptimusConfig(
        compressed_backprop=True, compressed_backprop_rank=2, compressed_backprop_messages="all",
        residual_across_iterations="carry", dp_compression=True, dp_compression_warmup=0.5,
    ).replace(**changes)  # fmt: skip
    session = Session(config, Layout(stages=2, data_parallel=2, tied_embeddings=True, train_iters=train_iters))
    session.backprop.connect_to(0, 1, rank=1, peer_rank=0)
    return session


@pytest.fixture
def session():
    return new_session()


def in_warmup(session, iteration):
    session.begin_step(iteration)
    with session.iteration(NonInterleaved(2, 0)):
        return session.gradients.in_warmup


def forward_backward(session, seed):
    with session.iteration(NonInterleaved(2, MICRO_BATCHES)):
        for b in range(MICRO_BATCHES):
            g = torch.randn(8, 2, 16, generator=torch.Generator().manual_seed(100 * seed + b))
            done(session.backprop.sending.send(g))


def residual(session):
    return session.backprop.states.residuals()[0].clone()


def announced_step(session, iteration, seeds, applied=True):
    session.begin_step(iteration)
    for seed in seeds:
        forward_backward(session, seed)
    session.end_step(applied=applied)


def test_a_repeated_step_counts_once(session):
    announced_step(session, 0, [1])
    announced_step(session, 1, [2])
    expected = residual(session)
    twin = new_session()
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


def test_an_custom_loop_and_megatrons_end_in_the_same_state(session):
    for seed in (1, 2, 3):
        forward_backward(session, seed)
    twin = new_session()
    for iteration, seed in enumerate((1, 2, 3)):
        announced_step(twin, iteration, [seed])
    assert torch.equal(residual(twin), residual(session))


def test_warmup_ends_after_its_fraction_of_the_iterations(session):
    assert [in_warmup(session, iteration) for iteration in range(8)] == [True] * 4 + [False] * 4


def test_messages_travel_as_they_are_until_their_own_warmup_ends():
    session = new_session(compressed_backprop_warmup=0.25)
    compressed = []
    for iteration in range(4):
        announced_step(session, iteration, [iteration])
        compressed.append(session.backprop.sending.compressed)
    assert compressed == [[False] * MICRO_BATCHES] * 2 + [[True] * MICRO_BATCHES] * 2


def test_a_residual_from_before_a_warmup_is_forgotten_in_it():
    session = new_session(compressed_backprop_warmup=0.25)
    announced_step(session, 2, [1])
    assert residual(session).any()
    session.layout = dataclasses.replace(session.layout, train_iters=100)  # as where the run got longer
    announced_step(session, 3, [2])
    assert not residual(session).any()


def test_a_fraction_of_the_iterations_is_rounded_to_whole_ones():
    session = new_session(train_iters=100, dp_compression_warmup=0.29)
    assert in_warmup(session, 28) and not in_warmup(session, 29)


def test_a_resumed_run_knows_which_iteration_it_is(session):
    assert not in_warmup(session, 6)


def test_a_custom_loop_counts_its_iterations_itself(session):
    warmups = []
    for _ in range(8):
        with session.iteration(NonInterleaved(2, 0)):
            warmups.append(session.gradients.in_warmup)
    assert warmups == [True] * 4 + [False] * 4


def test_outside_of_an_iteration_the_session_is_inactive(session):
    assert not session.active
    with pytest.raises(KeyError), session.iteration(NonInterleaved(2, 0)):
        assert session.active
        raise KeyError
    assert not session.active


def resumed_from(session):
    twin = new_session()
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


def test_a_state_dict_in_an_custom_loop_is_of_all_passes(session):
    forward_backward(session, 1)
    twin = resumed_from(session)
    assert twin.state_dict()["iteration"] == 1
    for either in (session, twin):
        forward_backward(either, 2)
    assert torch.equal(residual(twin), residual(session))


@pytest.mark.parametrize(
    ("technique", "of_old"), [("compressed_backprop", {"states": []}), ("dp_compression", {"buckets": []})]
)
def test_a_state_dict_of_a_version_without_names_is_refused_with_the_cure(session, technique, of_old):
    with pytest.raises(ValueError, match=f"{technique}: it was saved by a version .* leave it out"):
        session.load_state_dict({"iteration": 1, technique: of_old})


def test_a_state_dict_that_does_not_fit_changes_nothing(session):
    announced_step(session, 0, [1])
    twin = resumed_from(session)
    saved = session.state_dict() | {"iteration": 7, "dp_compression": {"states": {"bucket 0: 4x4": {}}}}
    with pytest.raises(ValueError, match="dp_compression: bucket 0: 4x4: either here or in the checkpoint"):
        twin.load_state_dict(saved)
    assert twin.state_dict()["iteration"] == 1
