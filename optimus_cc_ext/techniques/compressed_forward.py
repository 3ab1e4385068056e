"""Activations between pipeline stages in 8 bits: nothing of the paper's, whose forward messages are dense.

A stage sends each activation as blocks (`block_messages`), and the next one computes with what it decodes, forward,
recomputed and backward alike. The gradient that comes back is that of the decoded activation.
"""

from collections.abc import Mapping

import torch

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.block_messages import BlockMessages
from optimus_cc_ext.techniques.factor_state import FactorStates
from optimus_cc_ext.techniques.technique import Technique
from optimus_cc_ext.techniques.transfer import Transfer

__all__ = ["CompressedForward"]


class CompressedForward(Technique):
    """Both directions in which activations pass this rank: from the stage before it, and to the one after it.

    Args:
        codec: of the messages; None: they are sent as they are.
    """

    def __init__(self, codec: Codec | None) -> None:
        # Nothing is remembered, so it has no part in checkpoints.
        super().__init__("pipeline_forward", on=False, states=FactorStates(1), gauge=Gauge())
        self.messages = None if codec is None else BlockMessages(codec, self.gauge)

    def end(self) -> None:
        """See `Technique.end`."""
        if self.messages is not None:
            self.messages.settle()

    def transfers(self, tensors: Mapping[str, torch.Tensor | None]) -> dict[str, Transfer]:
        """See `CompressedBackprop.transfers`."""
        send_next, recv_prev = tensors["send_next"], tensors["recv_prev"]
        transfers = {}
        if self.messages is not None and send_next is not None:
            transfers["send_next"] = self.messages.send(send_next)
        if self.messages is not None and recv_prev is not None:
            transfers["recv_prev"] = self.messages.receive(recv_prev)
        return transfers
