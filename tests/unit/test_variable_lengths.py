"""Memory of links whose messages have many lengths (a custom loop's `variable_seq_lengths`): it stays bounded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from optimus_cc_ext.compressors.fast import fast_codec
from optimus_cc_ext.compressors.low_rank import FastLowRank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import OptimusConfig
from optimus_cc_ext.metrics.error_statistics import ErrorStatistics
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.messages import BlockMessages, DenseMessages, LinkPlan, LowRankMessages
from optimus_cc_ext.techniques.state import FactorStates
from optimus_cc_ext.techniques.transfer import MessageBuffers, Recent

HIDDEN = 128


def blocks(**how: Any) -> BlockMessages:
    return BlockMessages(fast_codec("int8", seed=1, rotated=False), Gauge(), **how)


def low_rank() -> LowRankMessages:
    plan = LinkPlan(OptimusConfig(compressed_backprop_format="low-rank", compressed_backprop_rank=2), 1, 0)
    return LowRankMessages(
        plan, FastLowRank(), states=FactorStates(2, made_on_demand=True), scratch=Scratch(), gauge=Gauge(),
        statistics=ErrorStatistics(),
    )  # fmt: skip


def kept(messages: DenseMessages) -> int:
    """Return the bytes of a link's buffers, residuals and states."""
    nbytes = messages._buffers.nbytes
    if isinstance(messages, BlockMessages):
        nbytes += sum(each.nbytes for chunk in messages._residuals.values() for each in chunk.values())
    return nbytes + (messages.states.nbytes if isinstance(messages, LowRankMessages) else 0)


def pass_through(messages: DenseMessages, rows: int) -> torch.Tensor:
    """Send and receive one tensor of this many rows; return what arrives."""
    tensor, arrived = torch.full((rows, 1, HIDDEN), 1.0), torch.zeros(rows, 1, HIDDEN)
    sent, received = messages.send(tensor), messages.receive(arrived)
    received.tensor.copy_(sent.tensor)
    for step in (sent.after_post, sent.after_wait, received.after_wait):
        step()
    return arrived


@pytest.mark.parametrize("make", [blocks, lambda: blocks(residual=True), low_rank], ids=["int8", "LEP", "low rank"])
def test_64_lengths_take_little_more_memory_than_the_longest_ones(make: Callable[[], DenseMessages]) -> None:
    longest = make()
    pass_through(longest, 64)
    many = make()
    for rows in range(1, 65):
        assert torch.allclose(pass_through(many, rows), torch.ones(rows, 1, HIDDEN), rtol=2e-2)
    # The bound holds residuals of four shapes, and for each direction one buffer of each power of two up to the longest
    # length, which together have twice that length: 3.1 to 4.0 times the memory of one length.
    assert kept(many) < 4.2 * kept(longest)


def test_few_lengths_have_buffers_of_their_own_size() -> None:
    buffers = MessageBuffers()
    for numel in (100, 300, 1000, 3000) * 2:
        buffers.give_back(buffers.take(numel, torch.uint8, torch.device("cpu")))
    assert buffers.nbytes == 4400


def test_a_fifth_length_shares_the_buffer_of_its_power_of_two() -> None:
    buffers = MessageBuffers()
    for numel in (1, 2, 3, 4, 900, 600, 1024):
        taken = buffers.take(numel, torch.uint8, torch.device("cpu"))
        assert taken.numel() == numel
        buffers.give_back(taken)
    assert buffers.nbytes == 1 + 2 + 3 + 4 + 1024


def test_the_value_that_was_not_used_longest_is_forgotten_first() -> None:
    recent, made = Recent[str, str](2), []
    for key in "abacab":
        recent.get(key, lambda key=key: made.append(key) or key)
    assert made == ["a", "b", "c", "b"] and list(recent.values()) == ["a", "b"]
