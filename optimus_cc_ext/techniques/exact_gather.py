"""The distributed optimizer's gather of the parameters to the bit, as differences to the values that all replicas have.

A message follows from the old and the new values of the own shard, which keeps the new ones, as in vanilla Megatron: a
gather that Megatron makes by itself needs no message. After a step the replicas tell each other how long their messages
are, so that all send as many bytes as the longest one has, and no message can be too long. The host reads these lengths
before the next gather, when they have usually arrived, and waits for nothing else.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.announce import say
from optimus_cc_ext.collectives.calls import PendingCollective, start_all_gather, start_max
from optimus_cc_ext.collectives.exact import ExactPlan, padded
from optimus_cc_ext.collectives.ring import Slice, has_streams
from optimus_cc_ext.compressors import exact, fast
from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.techniques.param_gather import ParamGather, Shards, Write

_PURPOSE = "exact parameter gather"
_SIZES = 16
"""Bytes of a slice in the search for its longest message: a ring of two numbers of 4 bytes in both directions."""

_MOST_RAW = 10
"""After this many successive steps in which a bucket was sent raw, a log line says so."""


class ExactShards(Shards):
    """Parameters of one bucket, of which each replica owns a shard; `Shards` has the arguments."""

    plan: ExactPlan
    longest: "Longest"
    _raw_steps = 0

    def _cut(self) -> list[Any]:
        return [_ExactSlice(self, *each) for each in zip(self.plan.spans, self.plan.kept, self.plan.raw, strict=True)]

    def encode(self, write: Write) -> None:
        """Encode the change that `write` makes; after a second step without a gather, Megatron's own has to follow."""
        unsent = self.updated
        super().encode(write)
        self.updated = not unsent

    def start(self) -> None:
        self.longest.settle()
        self._raw_steps = self._raw_steps + 1 if all(each.is_raw for each in self.slices) else 0
        if self._raw_steps == _MOST_RAW and self.groups.whole.rank() == 0:
            line = f"a bucket of {self.plan.numel} parameters was sent raw in {_MOST_RAW} steps in a row"
            say(f"optimus-cc: parameter gather: {line}, to the bit: it does not compress. dense takes less work")
        super().start()

    @property
    def sent_bytes(self) -> int:
        return sum(each.longest + _SIZES for each in self.slices)


class _ExactSlice(Slice):
    """Slice of a gather: the same part of every shard.

    Args:
        span: the part of a shard.
        kept: bytes of memory for the own message until it is sent.
        raw: bytes of the longest message.
    """

    def __init__(self, shards: ExactShards, span: slice, kept: int, raw: int) -> None:
        self._ranks, self._rank = shards.groups.whole.size(), shards.groups.whole.rank()
        super().__init__(self._ranks * raw, shards.bucket.device)
        self._shards, self._span, self.raw = shards, span, exact.raw_bytes(span.stop - span.start)
        self._start = self._rank * shards.plan.numel // self._ranks + span.start
        self.change_bytes = self._values(self._rank).nbytes
        self.message = torch.zeros(kept, dtype=torch.uint8, device=self.device)
        self.length = self.unlike = self.message.new_zeros((), dtype=torch.int32)
        """Bytes of the own message, and 1 + the index of a replica whose shard differed from its owner's, or 0. Both
        stay on the device.
        """

        self.longest = 0
        """Bytes of the longest message of all ranks."""

        peak = exact.HEADER + int((span.stop - span.start) * shards.plan.bits[1] / 8)
        self.at_peak = peak if peak <= kept else self.raw
        """Bytes of a message at the learning rate's peak, as forecast."""

        self.is_raw = False
        """True if all ranks send their values as they are."""

        self._messages = self.message.new_empty(0)
        self._pending: PendingCollective | None = None

    def encode(self, write: Write) -> None:
        """Encode the change that `write` makes to this slice's part of the shard, which keeps it."""
        shards, own = self._shards, self._values(self._rank)
        before = shards.scratch.take("before", tuple(own.shape), own.dtype, self.device).copy_(own)
        write(shards.bucket.of_megatron, self._start, self._start + own.numel())
        with shards.gauge.timed(self.device):
            self.length = exact.encode(before, own, self.message, fast.exact_kernels())

    def cut(self, memory: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (memory[: self.nbytes],)

    @torch.no_grad()
    def begin(self, *views: torch.Tensor) -> None:
        """Send the message to all ranks, with the values themselves if a rank's code would be no shorter."""
        (memory,) = views
        self._messages = memory[: self._ranks * self.longest].view(self._ranks, self.longest)
        own = self._messages[self._rank]
        coded = exact.HEADER if self.is_raw else min(self.longest, len(self.message))
        own[:coded].copy_(self.message[:coded])
        if self.is_raw:
            own[exact.HEADER : self.raw].copy_(self._values(self._rank).view(torch.uint8))
        self._pending = start_all_gather(self._messages.view(-1), own, self._shards.groups.whole, _PURPOSE)

    @torch.no_grad()
    def end(self) -> None:
        """Wait for all messages, and write the new values of all other ranks."""
        assert self._pending is not None, "the slice has begun"
        self._pending.wait()
        with self._shards.gauge.timed(self.device):
            for rank, message in enumerate(self._messages):
                if rank != self._rank:
                    whole = exact.decode(message, self._values(rank), fast.exact_kernels(), raw=self.is_raw)
                    self.unlike = torch.where(whole, self.unlike, rank + 1)

    def _values(self, rank: int) -> torch.Tensor:
        """Return the slice's part of a rank's shard, as it is now."""
        shards, length = self._shards, self._shards.plan.numel // self._ranks
        return shards.bucket.parameters[rank * length :][self._span]


class Longest:
    """Search over all replicas for the longest message of each slice, and for a shard whose old values differed between
    replicas in the last gather. All replicas make it for the same buckets, in the same order.

    Args:
        at_peak: True if messages are to be no shorter than at the learning rate's peak.
    """

    def __init__(self, written: Sequence[ExactShards], *, at_peak: bool) -> None:
        self._slices = [each for shards in written for each in shards.slices]
        found = torch.stack([getattr(each, name) for name in ("length", "unlike") for each in self._slices])
        if at_peak:
            peaks = torch.tensor([each.at_peak for each in self._slices], dtype=found.dtype)
            found[: len(peaks)].clamp_(min=peaks.to(found.device, non_blocking=True))
        start_max(found, written[0].groups.whole, _PURPOSE).wait()
        self._found: torch.Tensor | None = found.to("cpu", non_blocking=True)
        self._arrived = torch.cuda.Event() if has_streams(found.device) else None
        if self._arrived is not None:
            self._arrived.record()
        for shards in written:
            shards.longest = self

    def settle(self) -> None:
        """Give each slice the length of its longest message. The host waits if the lengths have not arrived.

        Raises:
            OptimusError: in the gather before this one, a replica's old values differed from their owner's.
        """
        if self._found is None:
            return
        if self._arrived is not None:
            self._arrived.synchronize()
        lengths, unlike = self._found.view(2, -1).tolist()
        self._found = None
        for each, length in zip(self._slices, lengths, strict=True):
            each.longest, each.is_raw = padded(length), length == each.raw
        if any(unlike):
            raise OptimusError(
                f"rank {dist.get_rank()}: in the gather before this one, parameters of replica {max(unlike) - 1}'s "
                "shard differed between replicas, because some of these had written them alone, or between the step "
                "and its gather. Call each model's start_param_sync(force_sync=True) before, or give "
                "--param-gather-format dense"
            )


class ExactGather(ParamGather):
    """Gathers of all buckets of this rank to the bit."""

    kind = ExactShards

    def update(self, buckets: Sequence[object], write: Write) -> list[object]:
        written = super().update(buckets, write)
        groups: dict[dist.ProcessGroup, list[Any]] = {}
        for shards in self.of(written):
            if shards.updated:
                groups.setdefault(shards.groups.whole, []).append(shards)
        for found in groups.values():
            Longest(found, at_peak=self.on_trial)
        return written
