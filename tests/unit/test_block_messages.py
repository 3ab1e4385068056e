"""Both ends of a direction between stages, joined by hand: they keep no state, and lengths agree."""

import pytest
import torch

from optimus_cc_ext import OptimusConfig
from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.formats import FORMATS
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.messages import BlockMessages
from optimus_cc_ext.techniques.schedule import NonInterleaved
from optimus_cc_ext.techniques.session import Session
from optimus_cc_ext.techniques.technique import Iteration
from optimus_cc_ext.techniques.transfer import Transfer
from tests.formats import lossy

SHAPE = (16, 2, 48)
"""Shape (sequence, micro-batch, hidden) of twelve blocks, none of which ends at the end of a row."""

GAUSSIAN = {name: row.gaussian_error for name, row in lossy(FORMATS).items()}
"""Relative errors of Gaussian values, by format."""


def tensor(seed: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def ends(chosen: str, gauge: Gauge | None = None, **settings: bool) -> tuple[BlockMessages, BlockMessages]:
    settings = {"rotated": True} | settings
    sender, receiver = (BlockMessages(fast_codec(chosen, seed=7, **settings), gauge or Gauge()) for _ in range(2))
    return sender, receiver


def passed(sending: Transfer, receiving: Transfer) -> None:
    """Pass a message over a wire that copies bytes."""
    assert sending.tensor.shape == receiving.tensor.shape and sending.tensor.dtype == receiving.tensor.dtype
    receiving.tensor.copy_(sending.tensor)
    for transfer in (sending, receiving):
        transfer.after_post()
        transfer.after_wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", GAUSSIAN)
def test_a_tensor_arrives_with_the_formats_error_and_stays_as_it_was(chosen: str, dtype: torch.dtype) -> None:
    sender, receiver = ends(chosen)
    sent, arrived = tensor(1, dtype), torch.empty(SHAPE, dtype=dtype, requires_grad=True)
    passed(sender.send(sent), receiver.receive(arrived))
    error = float((arrived.detach().float() - sent.float()).norm() / sent.float().norm())
    # The error is that of 12 blocks of 128 values, plus one rounding to bf16 (2^-9).
    assert error == pytest.approx(GAUSSIAN[chosen], rel=0.15, abs=2**-9)
    assert torch.equal(sent, tensor(1, dtype))


def test_messages_are_independent_of_each_other_and_a_buffer_serves_again() -> None:
    sender, receiver = ends("int4")
    first, buffers = torch.empty(SHAPE), set()
    passed(sender.send(tensor(1)), receiver.receive(first))
    for seed in (2, 3, 1):
        again, sending = torch.empty(SHAPE), sender.send(tensor(seed))
        buffers.add(sending.tensor.data_ptr())
        passed(sending, receiver.receive(again))
    assert torch.equal(first, again), "what was sent in between left nothing"
    assert len(buffers) == 1
    in_flight = [sender.send(tensor(seed)) for seed in (1, 2)]
    assert in_flight[0].tensor.data_ptr() != in_flight[1].tensor.data_ptr()


def test_exact_blocks_arrive_to_the_bit_through_the_same_exchange() -> None:
    sender, receiver = ends("fp32")
    arrived = torch.empty(SHAPE)
    passed(sender.send(tensor(1)), receiver.receive(arrived))
    assert torch.equal(arrived, tensor(1))


def test_the_error_is_measured_in_measured_iterations_only() -> None:
    gauge = Gauge()
    sender, receiver = ends("int4", gauge)
    for measured in (False, True):
        gauge.begin(measured)
        arrived = torch.empty(SHAPE)
        passed(sender.send(tensor(1)), receiver.receive(arrived))
        error, of = gauge.squares()
        lost = float((arrived - tensor(1)).double().square().sum())
        assert (error, of) == (pytest.approx((lost, float(tensor(1).double().square().sum()))) if measured else (0, 0))


def session(**fields: object) -> Session:
    """Make a session of stage 1 of 3, placed by hand."""
    made = Session(OptimusConfig(**fields))  # type: ignore[arg-type]
    made.backprop.connect_to(0, 1, rank=1, peer_rank=0)
    return made


def posted(made: Session, *roles: str) -> dict[str, Transfer]:
    given = {role: None for role in ("send_prev", "recv_prev", "send_next", "recv_next")}
    return made.transfers(given | {role: tensor(1) for role in roles})


def test_each_direction_has_its_own_format() -> None:
    numel, both = tensor(1).numel(), ("send_next", "send_prev")
    schedule = NonInterleaved(2, 4)
    only_forward = session(pipeline_forward_format="int8")
    only_forward.backprop.sending = None
    with only_forward.iteration(schedule):
        assert posted(only_forward, *both).keys() == {"send_next"}
    two = session(pipeline_forward_format="int8", compressed_backprop_format="int4")
    with two.iteration(schedule):
        sizes = {role: transfer.tensor.numel() for role, transfer in posted(two, *both).items()}
        for _ in range(3):
            posted(two, "send_prev")
    scales = 32  # the scales take two bytes for each of 12 blocks, padded to 16
    assert sizes == {"send_next": numel + scales, "send_prev": numel // 2 + scales}
    assert two.state_dict().keys() == {"iteration"}, "nothing is remembered"


def test_a_warmup_sends_gradients_dense_and_epilogue_may_be_asked_for() -> None:
    made = session(compressed_backprop_format="int8", compressed_backprop_warmup=0.5)
    this = Iteration(schedule=NonInterleaved(2, 2), number=0, train_iters=2)
    for number, compressed in ((0, False), (1, True)):
        made.backprop.begin(Iteration(schedule=this.schedule, number=number, train_iters=2))
        assert (posted(made, "send_prev")["send_prev"].tensor.dtype == torch.uint8) == compressed
    made = session(compressed_backprop_format="int8", compressed_backprop_messages="epilogue")
    made.backprop.begin(this)
    dtypes = [posted(made, "send_prev")["send_prev"].tensor.dtype for _ in range(2)]
    assert dtypes == [torch.float32, torch.uint8]


def test_exact_blocks_put_the_pass_through_format_in_the_place_of_the_chosen_one() -> None:
    """Tests use `--exact-blocks` to see all that a run computes except the rounding; it takes four bytes a value and
    one scale.
    """
    made = session(pipeline_forward_format="int8", compressed_backprop_format="int4", _exact_blocks=True)
    schedule, scales = NonInterleaved(2, 1), 32
    with made.iteration(schedule):
        sizes = [transfer.tensor.numel() for transfer in posted(made, "send_next", "send_prev").values()]
    assert sizes == [4 * tensor(1).numel() + scales] * 2
    assert [codec.format.name for codec in made.backprop.new_codecs()] == ["fp32", "fp32"]
