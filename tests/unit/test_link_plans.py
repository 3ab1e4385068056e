"""Both ends of a link know the lengths of its messages beforehand, in every format."""

import pytest
import torch

from optimus_cc_ext.techniques.schedule import NonInterleaved
from tests.unit.test_links import SHAPE, gradient, link


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chosen", ["low-rank", "int8", "int4"])
def test_a_plan_says_how_many_bytes_a_message_has(chosen, dtype):
    sender, receiver = link(compressed_backprop_format=chosen)
    for end in (sender, receiver):
        end.begin(NonInterleaved(2, 1))
    expected = sender.plan.message_bytes(torch.Size(SHAPE), dtype)
    assert sender.send(gradient(1, dtype)).tensor.nbytes == expected
    assert receiver.receive(torch.empty(SHAPE, dtype=dtype)).tensor.nbytes == expected
