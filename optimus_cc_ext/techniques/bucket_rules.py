"""Records of Megatron's buckets, and the rules by which a group of replicas reduces and gathers its buckets."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from optimus_cc_ext.collectives.nodes import ONE_LEVEL, Levels
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.compressors.formats import EXACT, EXACT_FORECAST, SUM_FORMAT, block_format
from optimus_cc_ext.compressors.low_rank import pays
from optimus_cc_ext.config import OptimusConfig, classes
from optimus_cc_ext.config.classes import TrafficClass
from optimus_cc_ext.slots import SLOTS, slot_bytes
from optimus_cc_ext.techniques.clipping import MAIN_NORM_GROUP


def replaced_group(sharded: bool) -> str:
    """Return the attribute of Megatron's bucket group that holds the group of the replicas.

    While Megatron's own collective runs, the attribute holds a single-rank group instead; then our collective follows.

    Args:
        sharded: True if the distributed optimizer is used.
    """
    return "intra_distributed_optimizer_instance_group" if sharded else "data_parallel_group"


@dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """Facts about a parameter on which plans depend."""

    shape: tuple[int, ...]
    start: int = 0
    """Offset of its gradient in the flat bucket."""

    tied: bool = False
    """True for a word embedding that another stage holds, too."""

    expert: bool = False

    router: bool = False
    """True for the weight of a router, which is small and decides which experts see a token."""

    embedding: bool = False
    """True for a word embedding or an output layer, whose gradient has one row per word, and a high rank."""

    norm_group: str = MAIN_NORM_GROUP

    @property
    def range(self) -> Range:
        """Range of its gradient in the flat bucket."""
        return self.start, math.prod(self.shape)

    @property
    def takes_blocks(self) -> bool:
        """True if the parameter's values can be encoded in blocks: a matrix, but not a router's."""
        return len(self.shape) >= 2 and not self.router

    @property
    def rows(self) -> int:
        """Rows of the parameter as a matrix; all dimensions but the first are columns."""
        return self.shape[0]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])


@dataclass(frozen=True, kw_only=True)
class BucketRecord:
    """Record of one of Megatron's buckets: one flat buffer of gradients, and one of parameters."""

    numel: int
    dtype: torch.dtype

    parameters: Sequence[ParameterRecord]
    """Records of the bucket's parameters, in the order in which Megatron lists them."""

    parameter_dtype: torch.dtype = torch.float32

    @property
    def tied_numel(self) -> int:
        """Number of a tied embedding's values in the bucket; 0 if it holds none."""
        return sum(record.range[1] for record in self.parameters if record.tied)

    @property
    def is_all_tied(self) -> bool:
        """True if the bucket holds nothing but a tied embedding."""
        return all(record.tied for record in self.parameters)


@dataclass(frozen=True, kw_only=True)
class BucketRules:
    """Rules for the buckets of one group of replicas: how they are reduced and gathered.

    Formats are "dense", "low-rank" or the name of a block format.
    """

    ranks: int
    """Number of replicas: ranks of the group over which the messages are sent."""

    sharded: bool = False
    """True if each replica's optimizer reads only an equal part of the bucket (the distributed optimizer)."""

    format: str = "dense"
    """Format of gradients; "dense": none are compressed on any stage."""

    sums: str = SUM_FORMAT
    """Block format in which sums of blocks are sent to all ranks."""

    rank: int = 128
    """Compression rank of low-rank gradients."""

    fused: str | None = None
    """Format of fused embedding synchronisation; None: it is off, or this stage takes no part in it."""

    gathered: str | None = None
    """Format of the distributed optimizer's gather of the parameters; None: Megatron gathers them."""

    levels: Levels = ONE_LEVEL
    """The levels in which the group adds up blocks: one, or two if its nodes allow that; or those of instances of the
    distributed optimizer.
    """

    place: int = 0
    """The place of this rank in its node, among the ranks of the group."""

    beside: int = 1
    """Number of replicas on this rank's node, this rank included."""

    in_fp32: bool = False
    """True if a reduce-scatter adds up in fp32, whatever the dtype of the bucket; then it is an all-to-all in vanilla
    Megatron, too.
    """

    exact_bits: tuple[float, float] = EXACT_FORECAST
    """Bits of a value in exact messages, in the mean of the run and at the learning rate's peak, as forecast."""

    slot_bytes: int | None = None
    """The most bytes of messages that an exchange has under way at once (module `ring`); None: no limit."""

    force: bool = False
    """True to compress even if nothing is saved: low rank of small matrices, and groups of one rank (tests)."""

    @classmethod
    def of(
        cls,
        config: OptimusConfig,
        *,
        ranks: int,
        sharded: bool,
        fused: bool,
        levels: Levels = ONE_LEVEL,
        place: int = 0,
        beside: int = 1,
        left_dense: Collection[TrafficClass] = (),
        in_fp32: bool = False,
        exact_bits: tuple[float, float] = EXACT_FORECAST,
    ) -> "BucketRules":
        """Return the rules of a run.

        Args:
            fused: True if this stage takes part in fused embedding synchronisation.
            left_dense: the classes of traffic that are dense because nothing of them leaves a node.
        """

        def format_of(traffic: TrafficClass) -> str:
            return "dense" if traffic in left_dense else config.format_of(traffic)

        def blocks(chosen: str) -> str | None:
            """Return the name of the block format, or of the pass-through format (tests); None if `chosen` is no block
            format.
            """
            return None if block_format(chosen) is None else "fp32" if config._exact_blocks else chosen

        gradients = format_of(classes.DP_GRADIENTS)
        return cls(
            ranks=ranks, sharded=sharded, levels=levels, place=place, beside=beside, in_fp32=in_fp32 and sharded,
            exact_bits=exact_bits,
            # With sums in fp32 inside a node, one more part of the bound is memory for these sums.
            slot_bytes=slot_bytes(config.message_memory, SLOTS + (in_fp32 and sharded)),
            rank=config.dp_compression_rank, force=config._force_compression,
            format=blocks(gradients) or gradients,
            sums=blocks(SUM_FORMAT) or SUM_FORMAT,
            fused=(blocks(format_of(classes.EMBEDDING)) or "dense") if fused else None,
            gathered=EXACT if (gathered := format_of(classes.PARAM_GATHER)) == EXACT else blocks(gathered),
        )  # fmt: skip

    @property
    def instances(self) -> int:
        return self.levels.nodes if self.levels.instances else 1

    @property
    def owners(self) -> int:
        """Number of ranks among which the distributed optimizer's shards are dealt."""
        return self.ranks // self.instances

    @property
    def encodes(self) -> bool:
        """True if this group compresses anything. A single rank does not, because it sends nothing: encoding would
        change its gradients and save no byte.

        Routed experts have a group of one rank if every expert has one replica (EP x ETP = TP x CP x DP, with the
        expert-parallel size EP and the experts' tensor-parallel size ETP).
        """
        return self.ranks > 1 or self.force

    def compresses(self, record: ParameterRecord) -> bool:
        """Return whether a parameter's gradient can be compressed in the format of gradients."""
        if not self.encodes or self.format == "dense" or (self.fused is not None and record.tied):
            return False
        if self.format != "low-rank":
            return record.takes_blocks
        # Word embeddings and output layers stay dense, and so do experts, which see few tokens.
        if record.expert or record.embedding or len(record.shape) < 2:
            return False
        return self.force or pays(record.rows, record.columns, self.rank)
