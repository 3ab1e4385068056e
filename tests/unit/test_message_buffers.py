"""Buffers of messages between stages: there are few, and none is written while its message is being sent."""

import pytest
import torch

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.techniques.transfer import MessageBuffers


def test_messages_that_are_being_sent_take_a_bounded_number_of_buffers_and_the_oldest_is_waited_for_first():
    buffers, waited = MessageBuffers(), []
    most = MessageBuffers.MOST_PARKED

    def send(number, numel=8):
        buffer = buffers.take(numel, torch.uint8, torch.device("cpu"))
        buffers.park(buffer, lambda: waited.append(number))
        return buffer.data_ptr()

    places = [send(number) for number in range(3 * most)]
    assert len(set(places)) == most
    assert waited == list(range(2 * most)), "each when the message after the next few needs its buffer, none before"
    send(-1, numel=16)
    assert waited == list(range(2 * most)), "a message of another length has a buffer of its own"
    buffers.settle()
    assert sorted(waited) == sorted([-1, *range(3 * most)])
    assert {send(number) for number in range(most)} <= set(places), "the next iteration makes none"
    buffers.settle()


def test_a_message_whose_sending_failed_is_no_free_buffer():
    buffers = MessageBuffers()

    def fail():
        raise OptimusError("rank 0 could not send")

    buffers.park(buffers.take(8, torch.uint8, torch.device("cpu")), fail)
    with pytest.raises(OptimusError, match="rank 0 could not send"):
        buffers.settle()
