"""Both ends of a link know the lengths of its messages beforehand, in every format."""

import pytest
import torch

from optimus_cc_ext.techniques.schedule import NonInterleaved
from tests.unit.test_links import SHAPE, gradient, link, run_iteration


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen, wire", [("low-rank", None), ("low-rank", "int8"), ("int8", "int8"), ("int4", None)])
def test_a_plan_says_how_many_bytes_a_message_has(chosen, wire, dtype):
    sender, receiver = link(compressed_backprop_format=chosen, wire=wire)
    for end in (sender, receiver):
        end.begin(NonInterleaved(2, 1))
    expected = sender.plan.message_bytes(torch.Size(SHAPE), dtype)
    assert sender.send(gradient(1, dtype)).tensor.nbytes == expected
    assert receiver.receive(torch.empty(SHAPE, dtype=dtype)).tensor.nbytes == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_in_int8_take_a_byte_a_value_and_cost_no_more_than_their_rounding(dtype):
    sent, bytes_of, lost = gradient(1, dtype, (600, 1, 1024)), [], []
    for wire in (None, "int8"):
        ends = link(compressed_backprop_rank=16, wire=wire)
        bytes_of.append(ends[0].plan.message_bytes(sent.shape, dtype))
        (arrived,) = run_iteration(*ends, [sent])
        lost.append(float((sent.float() - arrived.float()).norm() / sent.float().norm()))
    assert bytes_of[1] / bytes_of[0] == pytest.approx(1.016 / dtype.itemsize, rel=1e-3)
    # int8 changes P and Q by 0.7 % each. Low rank keeps little of a noise gradient, so the total error hardly grows.
    assert lost[1] - lost[0] < 1e-3
