"""What both ends of a link between two stages know of its messages, and so agree on."""

from dataclasses import dataclass

import torch

from optimus_cc_ext.compressors.blocks import BlockLayout, Codec
from optimus_cc_ext.compressors.low_rank import PackedFactors, effective_rank, pays
from optimus_cc_ext.config import CompressedBackpropConfig
from optimus_cc_ext.techniques.schedule import Message

__all__ = ["LinkPlan", "matrix_shape"]


@dataclass(frozen=True, kw_only=True)
class LinkPlan:
    """What both ends of a link know: enough to agree on every message without asking each other."""

    config: CompressedBackpropConfig
    sending_stage: int
    receiving_stage: int
    """The stage before, or with interleaving the last one for messages of stage 0."""

    seed: int
    state_dtype: torch.dtype = torch.float32
    """What the sender keeps residuals and warm starts in: float32 or bfloat16."""

    codec: Codec | None = None
    """Of block formats; None: low-rank."""

    factor_codec: Codec | None = None
    """Of low-rank messages; None: [P | Q] travels as it is."""

    force: bool = False
    """Compress even where nothing is saved (tests)."""

    def compresses(self, message: Message, shape: torch.Size) -> bool:
        """Whether this message travels compressed once the warm-up is over."""
        rows, columns = matrix_shape(shape)
        worth_it = self.force or self.codec or pays(rows, columns, self.config.compressed_backprop_rank)
        return bool(worth_it) and (self.config.compressed_backprop_messages == "all" or message.epilogue)

    def wire(self, shape: torch.Size, dtype: torch.dtype) -> PackedFactors:
        """The layout of the low-rank message for a gradient of this shape and dtype."""
        rows, columns = matrix_shape(shape)
        return PackedFactors(rows, columns, effective_rank(rows, columns, self.config.compressed_backprop_rank), dtype)

    def factor_bytes(self, shape: torch.Size, dtype: torch.dtype) -> int:
        """Bytes of the low-rank message for a gradient of this shape and dtype."""
        numel = self.wire(shape, dtype).numel
        if self.factor_codec is None:
            return numel * dtype.itemsize
        return self.factor_codec.message_bytes(BlockLayout.of_one(numel), dtype)


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """The matrix that a gradient of shape (sequence, micro-batch, hidden) is compressed as: all rows by hidden."""
    columns = shape[-1]
    return shape.numel() // columns, columns
