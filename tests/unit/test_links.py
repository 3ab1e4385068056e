"""Both ends of a pipeline link, joined by hand: the residual is the error of the message that was sent."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.config.classes import PIPELINE_BACKWARD
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.hooks import p2p_communication
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.metrics.traffic import Traffic
from optimus_cc_ext.techniques.compressed_backprop import CompressedBackprop, PipelineLink
from optimus_cc_ext.techniques.messages import LinkPlan
from optimus_cc_ext.techniques.schedule import Interleaved, NonInterleaved
from optimus_cc_ext.techniques.technique import Iteration
from tests.formats import formats_of
from tests.low_rank_steps import BOTH

SHAPE = (16, 2, 48)
"""Shape (sequence, micro-batch, hidden) of a 32 x 48 matrix."""


def link(compressor=None, force=False, state_dtype=torch.float32, seed=7, **config):
    config = {
        "compressed_backprop_format": "low-rank",
        "compressed_backprop_rank": 4,
        "compressed_backprop_messages": "all",
        "residual_across_iterations": "carry",  # carrying residuals needs more state than dropping them
    } | config
    config = OptimusConfig(
        _force_compression=force, compression_seed=seed,
        compression_state_dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[state_dtype], **config,
    )  # fmt: skip
    return ends_of(LinkPlan(config, sending_stage=1, receiving_stage=0), compressor)


def ends_of(plan, compressor=None):
    """Return the sending and the receiving end of a link."""
    sender, receiver = (CompressedBackprop(plan.config, PIPELINE_BACKWARD) for _ in range(2))
    sender.compressor = receiver.compressor = compressor or FastLowRank()
    sender.connect_to(0, 1, rank=1, peer_rank=0)
    return sender.sending, PipelineLink(plan, sender.sending._dense, receiver.messages(plan), 0, 1, "the next stage")


def states(sender):
    """Return the states of a link that sends low-rank messages."""
    return sender.messages.states


def commit(sender):
    """Commit a link's states, as for an applied step; block formats have no state."""
    if sender.plan.is_low_rank:
        states(sender).commit({})


def link_after_one_message(**settings):
    ends = link(**settings)
    run_iteration(*ends, [gradient(1)])
    return ends


def gradient(seed, dtype=torch.float32, shape=SHAPE):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def residual_of(keeper):
    (residual,) = (keeper.states if isinstance(keeper, CompressedBackprop) else states(keeper)).residuals()
    return residual.clone()


def pass_message(sender, receiver, sent):
    """Pass one message over a wire that copies bytes; return the gradient that the receiving stage gets."""
    arrived = torch.empty_like(sent)
    sending, receiving = sender.send(sent), receiver.receive(arrived)
    assert receiving.tensor.shape == sending.tensor.shape and receiving.tensor.dtype == sending.tensor.dtype
    receiving.tensor.copy_(sending.tensor)
    done(sending)
    done(receiving)
    return arrived


def done(transfer):
    """Post a transfer and wait for it; return its tensor."""
    transfer.after_post()
    transfer.after_wait()
    return transfer.tensor


def run_iteration(sender, receiver, gradients):
    sender.begin(NonInterleaved(2, len(gradients)))
    receiver.begin(NonInterleaved(2, len(gradients)))
    arrived = [pass_message(sender, receiver, g) for g in gradients]
    sender.end()
    receiver.end()
    commit(sender)
    return arrived


@BOTH
@pytest.mark.parametrize("messages", ["all", "epilogue"])
def test_offered_gradients_are_what_arrived_plus_the_residual(compressor, messages):
    sender, receiver = link(compressor, compressed_backprop_messages=messages)
    offered, got = torch.zeros(SHAPE), torch.zeros(SHAPE)
    for iteration in range(5):
        gradients = [gradient(10 * iteration + b) for b in range(4)]
        arrived = run_iteration(sender, receiver, gradients)
        for g, a, compressed in zip(gradients, arrived, sender.compressed, strict=True):
            if compressed:
                offered, got = offered + g, got + a
            else:
                assert torch.equal(a, g), "what is not compressed arrives as it was sent"
        assert sum(sender.compressed) == (4 if messages == "all" else 1)
    residual = residual_of(sender)
    # The tolerance is that of fp32 sums of up to 20 gradients of size 1; the residual itself has size 1.
    torch.testing.assert_close(got + residual.view(SHAPE), offered, rtol=0, atol=2e-5)
    assert residual.abs().max() > 0.1, "rank 4 of noise must leave something out"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, rank", [(SHAPE, 4), ((600, 1, 1024), 16)], ids=["small", "large"])
def test_the_residual_is_exactly_what_the_receiver_lacks_and_the_callers_gradient_is_not_changed(shape, rank, dtype):
    sender, receiver = link(compressed_backprop_rank=rank)
    sent = gradient(1, dtype, shape)
    (arrived,) = run_iteration(sender, receiver, [sent])
    # The residual and the test's error are the same fp32 subtraction of values rounded to the wire's dtype, so all bits
    # are equal.
    assert torch.equal(residual_of(sender).view(shape), sent.float() - arrived.float())
    assert arrived.dtype == dtype
    assert torch.equal(sent, gradient(1, dtype, shape))


def blocks(chosen="int4", **config):
    return link(compressed_backprop_format=chosen, **config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", formats_of("compressed_backprop_format"))
def test_what_blocks_leave_out_goes_with_the_next_message_and_is_dropped_with_the_iteration(chosen, dtype):
    ends, alone = blocks(chosen, lazy_error_propagation=True), blocks(chosen)
    gradients = [gradient(b, dtype) for b in range(4)]
    first, second, by_themselves = (run_iteration(*each, gradients) for each in (ends, ends, alone))
    lost, without = (
        float(sum(sent.float() - got.float() for sent, got in zip(gradients, arrived, strict=True)).norm())
        for arrived in (first, by_themselves)
    )
    # The error of all four messages together is that of the last one; without LEP it is twice as large, because four
    # errors add up.
    assert lost == pytest.approx(without / 2, rel=0.2)
    assert all(map(torch.equal, first, second)), "the first iteration left nothing to the second"
    assert torch.equal(first[0], by_themselves[0]) and not torch.equal(first[1], by_themselves[1])
    assert all(torch.equal(sent, gradient(b, dtype)) for b, sent in enumerate(gradients))


def test_chunks_do_not_hear_of_what_each_others_blocks_left_out():
    sender, _ = blocks(lazy_error_propagation=True)
    sender.begin(Interleaved(stages=2, chunks=2, forward_order=(0, 0, 1, 1), warmups=(4, 2)))
    chunks = [message.chunk for message in sender._expected]
    sent = [done(sender.send(gradient(1))).clone() for _ in chunks]
    first = {chunk: sent[chunks.index(chunk)] for chunk in chunks}
    assert len(first) == 2 and torch.equal(*first.values())
    assert not torch.equal(sent[0], sent[chunks.index(chunks[0], 1)]), "the same chunk's next one is another"


def test_without_lep_every_message_stands_alone():
    sender, receiver = link(lazy_error_propagation=False)
    run_iteration(sender, receiver, [gradient(b) for b in range(3)])
    assert torch.count_nonzero(residual_of(sender)) == 0


def technique(policy, compressor=None):
    config = OptimusConfig(
        compressed_backprop_format="low-rank", compressed_backprop_rank=4, compressed_backprop_messages="all",
        residual_across_iterations=policy, compression_seed=7,
    )  # fmt: skip
    technique = CompressedBackprop(config, PIPELINE_BACKWARD)
    technique.compressor = compressor or FastLowRank()
    technique.connect_to(0, 1, rank=1, peer_rank=0)
    return technique


def send_one(technique, seed):
    technique.begin(Iteration(schedule=NonInterleaved(2, 1), number=0))
    message = done(
        technique.transfers({"send_prev": gradient(seed), "recv_next": None, "recv_prev": None})["send_prev"]
    )
    technique.end()
    technique.states.commit({})
    return message.clone()


@pytest.mark.parametrize(("policy", "kept"), [("carry", True), ("drop", False)])
def test_drop_forgets_the_residual_between_iterations_carry_keeps_it_and_a_resumed_run_goes_on_from_either(
    policy, kept
):
    ours, twin = technique(policy), technique(policy)
    send_one(ours, 1)
    twin.load_state_dict(ours.state_dict())
    assert torch.equal(send_one(twin, 2), send_one(ours, 2))
    ours.begin(Iteration(schedule=NonInterleaved(2, 1), number=1))
    assert bool(residual_of(ours).any()) is kept


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_non_finite_gradients_arrive_as_such_and_are_not_remembered(poison):
    sender, receiver = link_after_one_message()
    before = residual_of(sender)
    bad = gradient(2)
    bad[3, 1, 5] = poison
    (arrived,) = run_iteration(sender, receiver, [bad])
    assert not torch.isfinite(arrived).all(), "Megatron's own checks must see it"
    assert torch.equal(residual_of(sender), before)
    (healthy,) = run_iteration(sender, receiver, [gradient(3)])
    assert torch.isfinite(healthy).all()


@pytest.mark.parametrize(
    ("size", "rtol"),
    [
        # The values are nearly fp16's largest number. Unscaled, Q = M^T P would be sqrt(32) times as large; fp16 keeps
        # 11 bits of P and Q.
        pytest.param(60000.0, 4 * torch.finfo(torch.float16).eps, id="large"),
        # Q divided by the scale, 16, is subnormal: its relative error in fp16 is 2^-24 / 6e-6, one part in a hundred.
        pytest.param(1e-4, 1e-2, id="small"),
    ],
)
def test_an_fp16_wire_neither_overflows_nor_loses_small_gradients(size, rtol):
    sent = torch.full(SHAPE, size, dtype=torch.float16)
    (arrived,) = run_iteration(*link(), [sent])
    assert (sent[0, 0, 0] * 32**0.5 == torch.inf) == (size > 1), "unscaled, the large one would"
    torch.testing.assert_close(arrived, sent, rtol=rtol, atol=0)


def test_residuals_follow_the_loss_scale():
    """At twice the loss scale, gradients are twice as large, and so are the messages, to the bit."""
    arrived = []
    for scale in (1.0, 2.0):
        ends = link_after_one_message()
        states(ends[0]).rescale_residuals(torch.tensor(scale))
        arrived.append(run_iteration(*ends, [scale * gradient(2)])[0] / scale)
    assert torch.equal(*arrived)


def test_a_state_in_bf16_takes_half_and_forgets_no_more_than_its_rounding():
    plain, halved = link(), link(state_dtype=torch.bfloat16)
    gradients = [gradient(b) for b in range(4)]
    for ends in (plain, halved):
        arrived = run_iteration(*ends, gradients)
    residual = residual_of(halved[0])
    assert residual.dtype == torch.bfloat16
    # Each of four messages rounds a residual of up to 5 to bf16's 8 bits, by 0.01 at most.
    lost = sum(gradients) - sum(arrived) - residual.view(SHAPE).float()
    assert 0 < lost.abs().max() < 4 * 0.02
    # Both links also keep the first Q in fp32, which is small.
    assert states(halved[0]).nbytes < 0.6 * states(plain[0]).nbytes


def test_room_is_made_before_the_first_message():
    sender, _ = link(compressed_backprop_messages="epilogue")
    sender.preallocate(NonInterleaved(2, 4), torch.empty(1).expand(SHAPE))
    expected = states(sender).nbytes
    assert expected > 2 * 32 * 48 * 4
    sender.begin(NonInterleaved(2, 4))
    for b in range(4):
        done(sender.send(gradient(b)))
    assert states(sender).nbytes == expected


def test_a_zero_gradient_does_not_kill_the_link():
    ends = link(lazy_error_propagation=False)
    (nothing,) = run_iteration(*ends, [torch.zeros(SHAPE)])
    assert torch.count_nonzero(nothing) == 0
    (arrived,) = run_iteration(*ends, [gradient(1)])
    assert arrived.abs().max() > 0


def test_a_buffer_in_flight_is_not_written_again():
    sender, _ = link()
    sender.begin(NonInterleaved(2, 2))
    first = sender.send(gradient(1))
    first.after_post()
    copy = first.tensor.clone()
    second = sender.send(gradient(2))
    assert torch.equal(first.tensor, copy) and first.tensor.data_ptr() != second.tensor.data_ptr()


@pytest.mark.parametrize("force", [False, True])
def test_small_gradients_are_sent_as_they_are_unless_forced(force):
    sender, _ = link_after_one_message(force=force, compressed_backprop_rank=64)
    assert sender.compressed == [force]


def test_links_of_different_seeds_start_differently_and_equal_ones_alike():
    def first_message(seed):
        sender, _ = link(seed=seed)
        sender.begin(NonInterleaved(2, 1))
        return sender.send(gradient(1)).tensor

    assert torch.equal(first_message(1), first_message(1))
    assert not torch.equal(first_message(1), first_message(2))


@pytest.mark.parametrize(("scheduled", "sent"), [(2, 1), (1, 2)], ids=["missing", "too many"])
def test_a_message_missing_or_too_many_names_both_ranks(scheduled, sent):
    sender, _ = link()
    sender.begin(NonInterleaved(2, scheduled))
    says = rf"rank 1 exchanged {sent} gradient messages with rank 0 .* schedule has {scheduled}"
    for b in range(min(sent, scheduled)):
        sender.send(gradient(b))
    with pytest.raises(RanksDisagree, match=says):
        sender.end() if sent < scheduled else sender.send(gradient(2))


def test_model_chunks_have_residuals_of_their_own():
    sender, _ = link()
    sender.begin(Interleaved(stages=2, chunks=2, forward_order=(0, 0, 1, 1), warmups=(4, 2)))
    for seed in range(4):
        done(sender.send(gradient(seed)))
    first, second = states(sender).residuals()
    assert not torch.equal(first, second)


def test_a_link_goes_on_from_its_state_dict_as_if_nothing_had_happened():
    sender, receiver = link()
    run_iteration(sender, receiver, [gradient(1), gradient(2)])
    (twin, its_receiver), (again, _), (rescaled, _) = link(), link(), link()
    # the state of `twin` is saved before `twin` sends its first message
    for saved, resumed in ((sender, twin), (twin, again), (sender, rescaled)):
        states(resumed).load_state_dict(states(saved).state_dict())
    states(rescaled).rescale_residuals(torch.tensor(0.5))
    (loaded,) = states(rescaled).state_dict().values()
    assert torch.equal(loaded["residual"], residual_of(sender) * 0.5), "before the first message, too"
    expected = run_iteration(sender, receiver, [gradient(3)])
    for resumed in (twin, again):
        assert torch.equal(run_iteration(resumed, its_receiver, [gradient(3)])[0], expected[0])
        assert torch.equal(residual_of(resumed), residual_of(sender))


def test_the_state_of_another_compression_rank_is_refused_and_changes_nothing():
    (sender, _), (other, _) = link_after_one_message(), link_after_one_message(compressed_backprop_rank=2)
    before = residual_of(other)
    with pytest.raises(ValueError, match="are needed here"):
        states(other).load_state_dict(states(sender).state_dict())
    assert torch.equal(residual_of(other), before)


class _Recording(FastLowRank):
    """Compressor that appends the name of each call to `log`, so that a test sees the order of events."""

    def __init__(self, log):
        super().__init__()
        self._log = log

    def back_project(self, *args, **kwargs):
        self._log.append("back-project")
        return super().back_project(*args, **kwargs)

    def subtract_reconstruction(self, *args, **kwargs):
        self._log.append("residual")
        super().subtract_reconstruction(*args, **kwargs)


@pytest.mark.parametrize("batched", [True, False], ids=["batched", "one by one"])
def test_a_message_is_posted_before_its_residual_is_computed_and_waited_for_at_the_end_of_the_iteration(batched):
    log = []
    ours = technique("drop", _Recording(log))
    ours.begin(Iteration(schedule=NonInterleaved(2, 1), number=0))
    group = object()
    session = SimpleNamespace(transfers=ours.transfers, traffic=Traffic(), leaving_roles=frozenset())

    def original(*, tensor_send_prev, **rest):
        log.append("posted")
        request = SimpleNamespace(wait=lambda: log.append("waited"))
        return [request] if batched else {"send_prev": request}

    (_, wrap), _ = p2p_communication.wraps(SimpleNamespace(with_pipeline={group: session}.get))
    requests = wrap(original)(
        tensor_send_prev=gradient(1), tensor_recv_prev=None, tensor_recv_next=None, tensor_send_next=None, group=group,
        prev_pipeline_rank=0, next_pipeline_rank=0,
    )  # fmt: skip
    assert log == ["back-project", "posted", "residual"]
    for request in requests if batched else requests.values():
        request.wait()
    assert log == ["back-project", "posted", "residual"], "what lies in a buffer of ours, nobody waits for yet"
    ours.end()
    assert log == ["back-project", "posted", "residual", "waited"]


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_became_of_the_gradient_once_it_is_posted_the_same_is_remembered(dtype, state_dtype):
    outcomes = []
    for overwritten in (False, True):
        sender, _ = link(state_dtype=state_dtype)
        messages = []
        for iteration in range(2):
            sender.begin(NonInterleaved(2, 3))
            for b in range(3):
                mine = gradient(10 * iteration + b, dtype)
                message = sender.send(mine)
                if overwritten:
                    mine.fill_(torch.nan)  # NaN stands for other code's writes, after the owner has freed the tensor
                messages.append(done(message).clone())
            sender.end()
            commit(sender)
        (counted,) = states(sender).state_dict().values()
        outcomes.append([*messages, counted["residual"], counted["warm_start"]])
    assert all(torch.equal(one, other) for one, other in zip(*outcomes, strict=True))


def test_the_time_of_both_parts_is_counted(monkeypatch):
    """The clock goes on by one second per reading, so each timed part takes one second."""
    gauge = Gauge()
    ticks = itertools.count()
    monkeypatch.setattr("optimus_cc_ext.metrics.stopwatch.time.perf_counter", lambda: float(next(ticks)))
    sender, _ = link()
    sender.messages._gauge = gauge
    gauge.begin(True)
    sender.begin(NonInterleaved(2, 1))
    message = sender.send(gradient(1))
    assert gauge.seconds() == 1.0
    message.after_post()
    assert gauge.seconds() == 2.0
