"""Training whose block formats are encoded and decoded in almost no time, which shows what coding costs.

torchrun ... -m optimus_cc_ext scripts/bench/cluster/free_coding.py SHARES <flags>

Messages are as long as the formats make them, but the values are lost. Decoded gradients are zero, so the weights stay.
A row of experts' tokens keeps its first values and repeats them, so that routing stays about as even as it was.
Exact messages are as long as in a run with coding: SHARES are the shares of the gather's bytes that it sent in each
iteration, with commas between them. Low rank is not a block format, and takes its time.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from optimus_cc_ext.compressors import exact
from optimus_cc_ext.compressors.blocks import BLOCK, Codec
from optimus_cc_ext.compressors.triton.blocks import TritonCodec
from optimus_cc_ext.tools import pretrain_gpt


def encode(self: Codec, *unused: Any, **also_unused: Any) -> None:
    """Replace `Codec.encode`: write nothing into the message."""


def decode(self: Codec, messages: Tensor, layout: Any, out: Tensor) -> None:
    """Replace `Codec.decode`: write zeros in place of the decoded values."""
    out.zero_()


def decode_onto(self: Codec, *unused: Any) -> None:
    """Replace `Codec.decode_onto`: add nothing."""


def decode_add(self: Codec, messages: Tensor, layout: Any, index: int, out: Tensor, *, onto: bool = False) -> None:
    """Replace `Codec.decode_add`: write zeros in place of the sum, or with `onto` add nothing."""
    if not onto:
        for start, length in layout.spans(index):
            out[start : start + length].zero_()


def encode_rows(self: Codec, rows: Tensor) -> Tensor:
    """Replace `Codec.encode_rows`: return the first bytes of each row as its message."""
    return rows.view(torch.uint8)[:, : self.row_bytes(rows.shape[1])].contiguous()


def decode_rows(self: Codec, message: Tensor, dtype: torch.dtype) -> Tensor:
    """Replace `Codec.decode_rows`: repeat the values in each message until the row is full."""
    width = message.shape[1] // (self.code_bytes + 2) * BLOCK
    arrived = message[:, : message.shape[1] // dtype.itemsize * dtype.itemsize].contiguous().view(dtype)
    repeats = -(-width // arrived.shape[1])
    return arrived.repeat(1, repeats)[:, :width].contiguous()


def exact_encode(shares: list[float]) -> Any:
    """Return a function in place of `exact.encode`: it gives a message the length that `shares` have for the
    iteration.
    """
    from megatron import training

    def encode(old: Tensor, new: Tensor, message: Tensor, kernels: object = None) -> Tensor:
        share = shares[min(training.get_args().curr_iteration, len(shares) - 1)]
        length = max(exact.HEADER, int(share * new.nbytes))
        length = length if length <= message.numel() else exact.raw_bytes(new.numel())
        return torch.tensor(length, dtype=torch.int32, device=message.device)

    return encode


def exact_decode(message: Tensor, values: Tensor, kernels: object = None, *, raw: bool) -> Tensor:
    """Replace `exact.decode`: write nothing."""
    return torch.ones((), dtype=torch.bool, device=values.device)


FREE = (encode, decode, decode_onto, decode_add, encode_rows, decode_rows)


if __name__ == "__main__":
    exact.encode = exact_encode([float(share) for share in sys.argv.pop(1).split(",")])  # type: ignore[assignment]
    exact.decode = exact_decode  # type: ignore[assignment]
    for function in FREE:
        for codec in (Codec, TritonCodec):
            setattr(codec, function.__name__, function)
    pretrain_gpt.main()
