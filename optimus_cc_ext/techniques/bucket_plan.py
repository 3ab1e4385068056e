"""Plans of gradient buckets: every decision about a bucket is taken here, from plain records, before it is reduced.

    parameters = [ParameterRecord(shape=(1024, 3072), start=0), ParameterRecord(shape=(3072,), start=1024 * 3072)]
    bucket = BucketRecord(numel=1025 * 3072, dtype=torch.float32, parameters=parameters)
    plan = GroupPlan.of([bucket], BucketRules(format="int4", ranks=8, sharded=True))
    plan.bytes_by_class(None), plan.bytes_by_class(True)      # bytes of one reduction, vanilla's and compressed
    plan.buckets[0].compressed                                # plan of its reduction; it has legs()

A plan knows shapes, ranges of the flat bucket and names of formats; it holds no tensor, codec or process group. So the
hook makes it from Megatron's buckets, doctor from a model on the meta device, and a test from three numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from optimus_cc_ext.collectives.exact import ExactPlan
from optimus_cc_ext.collectives.exchange import ExchangePlan
from optimus_cc_ext.collectives.legs import Bytes, Leg, Span, all_reduce, bytes_of, reduce_scatter, sent, sharded
from optimus_cc_ext.collectives.messages import Formats
from optimus_cc_ext.collectives.reducers import DensePlan
from optimus_cc_ext.compressors.formats import EXACT, EXACT_FORECAST
from optimus_cc_ext.config.classes import DP_GRADIENTS, EMBEDDING, TrafficClass
from optimus_cc_ext.techniques.bucket_rules import BucketRecord, BucketRules, ParameterRecord
from optimus_cc_ext.techniques.low_rank_gradients import LowRankPlan

ReductionPlan = DensePlan | ExchangePlan | LowRankPlan
"""The plan of one reduction of a bucket: dense, in blocks of few bits in one level or in two, or as P and Q."""

NOT_BLOCKS = ("dense", "low-rank")
"""Formats of gradients that are not block formats."""


@dataclass(frozen=True, eq=False, kw_only=True)
class BucketPlan:
    """Plan of one bucket: its reductions, and the gather of its parameters."""

    record: BucketRecord
    warmup: ReductionPlan | None
    """Reduction while gradients are not compressed; None: Megatron's own."""

    compressed: ReductionPlan | None
    """Reduction while gradients are compressed; None: Megatron's own."""

    fused: bool
    """True if the bucket is a tied embedding's own, which is always reduced in the format of fused embedding
    synchronisation: `warmup` and `compressed` are one plan.
    """

    gather: ExchangePlan | ExactPlan | None
    """Gather of the bucket's parameters; None: Megatron's own."""

    @property
    def compresses(self) -> bool:
        """True if gradients of the bucket are compressed, other than those of a tied embedding's own bucket."""
        return not self.fused and self.compressed is not None and self.compressed.matrices > 0


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupPlan:
    """Plans of one of Megatron's bucket groups: buckets that it reduces together, over the same replicas."""

    rules: BucketRules
    buckets: tuple[BucketPlan, ...]

    @classmethod
    def of(cls, records: Sequence[BucketRecord], rules: BucketRules) -> "GroupPlan":
        """Plan all buckets of one of Megatron's bucket groups."""
        tied = any(record.tied_numel for record in records)
        # With fused embedding synchronisation the tied embedding is left out of its bucket's sum. With the distributed
        # optimizer it is reduced over the replicas as usual, in the technique's format if that is not dense.
        ours = rules.encodes and rules.fused is not None and tied and not (rules.sharded and rules.fused == "dense")
        gathers = _gathers(records, rules)
        buckets = tuple(_bucket_plan(record, rules, ours=ours, gathers=gathers) for record in records)
        if not any(bucket.compresses for bucket in buckets):
            buckets = tuple(replace(bucket, compressed=None) for bucket in buckets)
        plan = cls(rules=rules, buckets=buckets)
        if gathers and not plan._gather_pays:
            return cls(rules=rules, buckets=tuple(replace(bucket, gather=None) for bucket in buckets))
        return plan

    @property
    def compresses(self) -> bool:
        """True if any gradient of the bucket group can be compressed."""
        return any(bucket.compressed is not None for bucket in self.buckets)

    @property
    def leaves_out(self) -> bool:
        """True if the tied embedding is summed elsewhere, over the union of both stages' replicas."""
        return self.rules.fused is not None and not self.rules.sharded and self.tied_bytes > 0

    @property
    def keeps_its_reducers(self) -> bool:
        """True if we reduce the group at all times, because of a tied embedding in it."""
        return any(bucket.warmup is not None for bucket in self.buckets)

    @property
    def unpaid(self) -> int:
        """Number of buckets that stay dense because their compressed sum would send no fewer bytes than Megatron's."""
        return sum(
            not bucket.compresses and any(map(self.rules.compresses, bucket.record.parameters))
            for bucket in self.buckets
        )  # fmt: skip

    @property
    def ungathered(self) -> int:
        """Number of buckets that Megatron gathers because compressed messages would be no fewer bytes."""
        wanted = _gathers([bucket.record for bucket in self.buckets], self.rules)
        return sum(wanted and bucket.gather is None for bucket in self.buckets)

    @property
    def kept_dense(self) -> str | None:
        """Name of the gradients that would be compressed in a group of more than one rank; None if there are none."""
        if self.rules.encodes:
            return None
        parameters = [parameter for bucket in self.buckets for parameter in bucket.record.parameters]
        codes_tied = self.rules.sharded and self.rules.fused not in (None, "dense")
        if codes_tied and any(parameter.tied for parameter in parameters):
            return "gradients of the tied embedding"
        if not GroupPlan.of([bucket.record for bucket in self.buckets], replace(self.rules, ranks=2)).compresses:
            return None
        routed = any(parameter.expert for parameter in parameters)
        return "gradients of routed experts" if routed else "all gradients of a model chunk"

    # -- legs ---------------------------------------------------------------------------------------------------------

    @cached_property
    def tied_bytes(self) -> int:
        """Bytes of the tied embedding's gradient; 0 if the group holds none."""
        return sum(bucket.record.tied_numel * bucket.record.dtype.itemsize for bucket in self.buckets)

    def legs(self, compressing: bool | None, whole: bool = False) -> list[Leg]:
        """Return the collectives of one reduction of the group on one rank.

        Args:
            compressing: True if gradients are compressed, False if they are not; None: vanilla Megatron reduces them.
            whole: the argument of `Reducer.start`.
        """
        if (plans := self._plans(compressing)) is None:
            nbytes = sum(bucket.record.numel * bucket.record.dtype.itemsize for bucket in self.buckets)
            return self._megatrons(nbytes - self.tied_bytes) + self._megatrons(self.tied_bytes)
        return [leg for plan in plans for leg in plan.legs(self.rules.beside, whole)]

    def tied_legs(self, compressing: bool | None, whole: bool = False) -> list[Leg]:
        """Return the part of `legs` that sums a tied embedding, which is a class of traffic of its own. In a bucket
        that it shares with other parameters, its part is what it would send alone.
        """
        plans, rules, beside = self._plans(compressing), self.rules, self.rules.beside
        if self.tied_bytes == 0 or (plans is not None and self.leaves_out):
            return []
        if plans is None:
            return self._megatrons(self.tied_bytes)
        number, bucket = next((n, each) for n, each in enumerate(self.buckets) if each.record.tied_numel)
        if bucket.record.is_all_tied:
            return plans[number].legs(beside, whole)
        if rules.format in NOT_BLOCKS:
            return [all_reduce(self.tied_bytes, Span(rules.ranks, beside))]
        numel = bucket.record.tied_numel
        return ExchangePlan(
            numel=-(-numel // rules.ranks) * rules.ranks, coded=[(0, numel)], dtype=bucket.record.dtype,
            ranks=rules.ranks, sharded=rules.sharded, formats=Formats(rules.format, rules.sums), levels=rules.levels,
        ).legs(beside, whole)  # fmt: skip

    def gather_legs(self, *, coded: bool, messages: Sequence[int] | None = None) -> list[Leg]:
        """Return the collectives of one rank in a gather of the parameters, compressed or Megatron's; empty without
        the distributed optimizer.

        Args:
            messages: bytes of this rank's messages of each bucket that we gather, as measured; None: as planned.
        """
        rules = self.rules
        owners = Span(rules.ranks, rules.beside).inside(rules.owners)
        if coded:
            plans = [bucket.gather for bucket in self.buckets if bucket.gather is not None]
            messages = messages or [plan.message_bytes[0] for plan in plans]
            return [plan.gather_leg(owners.beside, nbytes) for plan, nbytes in zip(plans, messages, strict=True)]
        sizes = (bucket.record.numel * bucket.record.parameter_dtype.itemsize for bucket in self.buckets)
        return [reduce_scatter(nbytes, owners) for nbytes in sizes] if rules.sharded else []

    def bytes_by_class(self, compressing: bool | None, whole: bool = False) -> dict[TrafficClass, Bytes]:
        """Return the bytes of `legs` by class. Bytes that leave a node are not told apart: they count with those of
        gradients.
        """
        way = compressing, whole
        if way not in self._known:
            everything, tied = bytes_of(self.legs(*way)), sent(self.tied_legs(*way))
            self._known[way] = {DP_GRADIENTS: Bytes(everything.sent - tied, everything.leaving)}
            self._known[way] |= {EMBEDDING: Bytes(tied, 0)} if self.tied_bytes else {}
        return self._known[way]

    @cached_property
    def vanilla(self) -> dict[TrafficClass, Bytes]:
        """Bytes of Megatron's reduction, by class."""
        return self.bytes_by_class(None)

    @cached_property
    def gathered(self) -> tuple[Bytes, Bytes]:
        """Bytes of a gather of the parameters: Megatron's, and compressed."""
        return bytes_of(self.gather_legs(coded=False)), bytes_of(self.gather_legs(coded=True))

    @property
    def _gather_pays(self) -> bool:
        """True if the group's gather, which is compressed as a whole or not at all, sends fewer bytes than
        Megatron's.
        """
        megatrons, ours = self.gathered
        return self.rules.force or self.rules.gathered == "fp32" or ours.sent < megatrons.sent

    @cached_property
    def _known(self) -> dict[tuple[bool | None, bool], dict[TrafficClass, Bytes]]:
        return {}

    def _plans(self, compressing: bool | None) -> list[ReductionPlan] | None:
        """Return the plans of a reduction; None: Megatron reduces the group."""
        if compressing is None:
            return None
        plans = [bucket.compressed if compressing else bucket.warmup for bucket in self.buckets]
        return None if None in plans else plans  # type: ignore[return-value]

    def _megatrons(self, nbytes: int) -> list[Leg]:
        """Return the collectives in which vanilla Megatron sums `nbytes` of gradients."""
        rules, span = self.rules, Span(self.rules.ranks, self.rules.beside)
        if rules.in_fp32:
            return [Leg("exchange", reduce_scatter(nbytes, span).nbytes, span)]
        return sharded(nbytes, span, rules.instances) if rules.sharded else [all_reduce(nbytes, span)]


def _gathers(records: Sequence[BucketRecord], rules: BucketRules) -> bool:
    """Return whether the parameters of a group can be gathered in blocks."""
    # Megatron's optimizer updates fp32 parameters in place, so that their change would be unknown afterwards.
    halves = all(record.parameter_dtype != torch.float32 for record in records)
    return rules.gathered is not None and rules.sharded and rules.owners > 1 and halves


def _bucket_plan(
    record: BucketRecord, rules: BucketRules, *, ours: bool, gathers: bool
) -> BucketPlan:  # fmt: skip
    """Plan the reductions and the gather of one bucket.

    Args:
        ours: True if the group's tied embedding needs our reduction at all times.
        gathers: True if we gather the group's parameters.
    """
    fused = ours and rules.sharded and record.is_all_tied
    if fused:
        assert rules.fused is not None
        compressed = _reduction(record, rules, rules.fused, record.parameters, ())
        warmup: ReductionPlan | None = compressed
    else:
        left_out = ours and not rules.sharded
        parameters = [parameter for parameter in record.parameters if not (left_out and parameter.tied)]
        coded = [parameter for parameter in parameters if rules.compresses(parameter)]
        others = [parameter for parameter in parameters if not rules.compresses(parameter)]
        warmup = _reduction(record, rules, "dense", (), parameters) if ours else None
        compressed = _reduction(record, rules, rules.format, coded, others)
        if coded and not _pays(record, rules, coded, others):
            compressed = _reduction(record, rules, "dense", (), parameters)
    gather = None
    if gathers:
        assert rules.gathered is not None
        like = compressed if isinstance(compressed, ExchangePlan) else None
        gather = gather_plan(record, rules.gathered, rules.owners, rules.slot_bytes, like, rules.exact_bits)
    return BucketPlan(record=record, warmup=warmup, compressed=compressed, fused=fused, gather=gather)


def _reduction(
    record: BucketRecord,
    rules: BucketRules,
    format: str,
    coded: Sequence[ParameterRecord],
    others: Sequence[ParameterRecord],
) -> ReductionPlan:
    """Plan the sum of the gradients of `coded` in `format`, and of those of `others` uncompressed."""
    dense = [parameter.range for parameter in others]
    if not coded and not rules.in_fp32:  # with in_fp32, ranks add up dense values in fp32 by an exchange
        return DensePlan(
            numel=record.numel, dense=dense, dtype=record.dtype, ranks=rules.ranks, sharded=rules.sharded,
            instances=rules.instances,
        )  # fmt: skip
    if format == "low-rank":
        return LowRankPlan(
            numel=record.numel, low_rank=coded, dense=dense, dtype=record.dtype, ranks=rules.ranks,
            rank=rules.rank, sharded=rules.sharded,
        )  # fmt: skip
    return ExchangePlan(
        numel=record.numel, coded=[parameter.range for parameter in coded], dense=dense, dtype=record.dtype,
        ranks=rules.ranks, sharded=rules.sharded, formats=Formats(format if coded else rules.sums, rules.sums),
        levels=rules.levels, place=rules.place, in_fp32=rules.in_fp32, slot_bytes=rules.slot_bytes,
    )  # fmt: skip


def _pays(
    record: BucketRecord, rules: BucketRules, coded: Sequence[ParameterRecord], others: Sequence[ParameterRecord]
) -> bool:
    """Return whether a bucket's compressed sum sends fewer bytes than Megatron's, on all ranks of a group alike.

    With the distributed optimizer it may send more: low rank all-reduces factors and uncompressed gradients where
    Megatron needs a reduce-scatter, and messages in blocks are as long as their longest compressed and uncompressed
    parts together.
    """
    if rules.force or rules.format == "fp32":
        return True
    rules = replace(rules, place=0)  # in two levels, bytes depend on a rank's place in its node
    megatrons = _reduction(record, rules, "dense", (), [*coded, *others])
    return sent(_reduction(record, rules, rules.format, coded, others).legs()) < sent(megatrons.legs())


def gather_plan(
    record: BucketRecord, format: str, ranks: int, slot_bytes: int | None = None, like: ExchangePlan | None = None,
    exact_bits: tuple[float, float] = EXACT_FORECAST,
) -> ExchangePlan | ExactPlan:  # fmt: skip
    """Plan the gather of a bucket's parameters: in blocks, differences of matrices are encoded, those of vectors and
    routers not. `like` is the plan of the bucket's gradients.
    """
    if format == EXACT:
        return ExactPlan(
            numel=record.numel, dtype=record.parameter_dtype, ranks=ranks, slot_bytes=slot_bytes, bits=exact_bits
        )  # fmt: skip
    coded, dense = (
        [parameter.range for parameter in record.parameters if parameter.takes_blocks is encoded]
        for encoded in (True, False)
    )
    return ExchangePlan(
        numel=record.numel, coded=coded, dense=dense, dtype=record.parameter_dtype, ranks=ranks, sharded=True,
        formats=Formats(format, format), slot_bytes=slot_bytes, like=like,
    )  # fmt: skip
