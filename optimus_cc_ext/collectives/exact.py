"""Plan of a gather of exact differences, whose messages are as long as the differences need it."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from optimus_cc_ext.collectives.legs import Leg, Span, gather
from optimus_cc_ext.compressors.exact import HEADER, raw_bytes
from optimus_cc_ext.compressors.formats import EXACT_FORECAST, EXACT_KEPT_BITS
from optimus_cc_ext.errors import FlagError
from optimus_cc_ext.slots import SLOTS

_ROUNDED = 512
"""Bytes to whose multiples messages are padded."""

_LEAST = 1 << 10
"""Smallest number of values in a slice. With fewer values, a message would be mostly header."""

_KEPT_BITS = {torch.bfloat16: EXACT_KEPT_BITS, torch.float16: 9}


def padded(nbytes: int) -> int:
    """Return the bytes of a message as it is sent."""
    return -(-nbytes // _ROUNDED) * _ROUNDED


@dataclass(frozen=True, eq=False, kw_only=True)
class ExactPlan:
    """Plan of a gather of one bucket's parameters: the slices in which each rank sends its shard.

    Args:
        numel: elements of the flat tensor, of which each rank owns an equal part.
        dtype: dtype of the flat tensor, of 16 bits.
        ranks: number of ranks.
        slot_bytes: the most bytes of messages under way at once, raw ones if need be; None: no limit.
        bits: bits of a value, in the mean of the run and at the learning rate's peak, as forecast.
    """

    numel: int
    dtype: torch.dtype
    ranks: int
    slot_bytes: int | None = None
    bits: tuple[float, float] = EXACT_FORECAST

    @cached_property
    def spans(self) -> list[slice]:
        """Part of a shard that each slice sends.

        Raises:
            FlagError: a slot holds too few values of each rank.
        """
        length = most = self.numel // self.ranks
        if self.slot_bytes is not None:
            most = min(length, (self.slot_bytes // self.ranks // _ROUNDED * _ROUNDED - HEADER) // 2)
        if most < min(length, _LEAST):
            needed = SLOTS * self.ranks * padded(raw_bytes(_LEAST)) / 1e6
            reason = f"messages of {_LEAST} values from each of {self.ranks} ranks need {needed:.2f} MB"
            raise FlagError("--message-memory", reason, f"Give at least {math.ceil(needed)}")
        return [slice(start, min(start + most, length)) for start in range(0, length, max(1, most))]

    @property
    def raw(self) -> list[int]:
        """Bytes of each slice's longest message, as it is sent."""
        return [padded(raw_bytes(span.stop - span.start)) for span in self.spans]

    @property
    def gather_bytes(self) -> list[int]:
        """Bytes of memory for the messages of all ranks, of each slice."""
        return [self.ranks * nbytes for nbytes in self.raw]

    @property
    def kept(self) -> list[int]:
        """Bytes of memory for this rank's message of each slice, until it is sent."""
        bits = _KEPT_BITS[self.dtype]
        return [padded((span.stop - span.start) * bits // 8 + HEADER) for span in self.spans]

    @property
    def message_bytes(self) -> tuple[int, int]:
        """Expected bytes of one rank's messages in all slices, in the mean of a run; twice, as an exchange has them."""
        nbytes = sum(padded(int((span.stop - span.start) * self.bits[0] / 8) + HEADER) for span in self.spans)
        return nbytes, nbytes

    def gather_leg(self, beside: int = 1, nbytes: int | None = None) -> Leg:
        """Return the leg of the gather, of `nbytes` as measured; None: as expected."""
        return gather(self.message_bytes[0] if nbytes is None else nbytes, Span(self.ranks, beside))
