"""Selective stage compression (paper section 7): data-parallel gradients are compressed on the first stages only.

1F1B ends last on the first stages, so their reduction is what an iteration waits for. `bucket_reducer` says how a
bucket is reduced as P and Q, `block_reducer` how in blocks of few bits, and docs/how-it-works.md what runs when.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from optimus_cc_ext.compressors.blocks import Codec
from optimus_cc_ext.compressors.low_rank import LowRank
from optimus_cc_ext.compressors.scratch import Scratch
from optimus_cc_ext.config import DataParallelCompressionConfig
from optimus_cc_ext.metrics.gauge import Gauge
from optimus_cc_ext.techniques.block_reducer import BlockCodecs, BlockReducer
from optimus_cc_ext.techniques.bucket_reducer import BucketReducer
from optimus_cc_ext.techniques.factor_state import FactorStates, state_bytes
from optimus_cc_ext.techniques.fused_embedding_sync import FusedEmbeddingSync
from optimus_cc_ext.techniques.reducer import DenseReducer, Reducer
from optimus_cc_ext.techniques.side_stream import SideStream
from optimus_cc_ext.techniques.technique import Iteration, Technique

__all__ = ["Buckets", "SelectiveStageCompression", "stages_to_compress"]


def stages_to_compress(config: DataParallelCompressionConfig, stages: int) -> frozenset[int] | None:
    """Which of the stages 0 .. stages - 1 compress their gradients; None: that is to be found out (`auto`)."""
    if not config.dp_compression:
        return frozenset()
    if config.dp_compression_stages == "auto":
        return None
    return frozenset(range(stages if config.dp_compression_stages == "all" else config.dp_compression_stages))


class Buckets(Protocol):
    """A group of gradient buckets that Megatron reduces together."""

    dense_bytes: int
    """What vanilla Megatron moves to reduce them, without a tied embedding, as in `metrics.traffic`."""

    tied_bytes: int
    """Of the gradient of a tied embedding among them."""

    tied_saved: int
    """Bytes that the last reduction saved on it, where that is not fused embedding synchronisation's."""

    gather_bytes: int
    """What the distributed optimizer's gather of the parameters moves; 0 without it."""

    overlapping: int
    """How many buckets are reduced while the backward pass goes on."""

    group: dist.ProcessGroup
    """The replicas that they are reduced over."""

    @property
    def compressed_bytes(self) -> int:
        """What is moved if they are compressed; where they cannot be, that of `dense_bytes`."""
        ...

    @property
    def matrices(self) -> Sequence[torch.Tensor]:
        """The gradients that can be compressed."""
        ...

    def compress(self) -> None:
        """Be compressed from now on."""


class SelectiveStageCompression(Technique):
    """All gradient buckets of this rank, and which of the pipeline's stages compress theirs.

    Args:
        codecs: of blocks; None: P and Q are what is sent.
        wire: encodes these; None: they travel as they are.
        force: compress also where nothing is sent, in groups of one rank (tests).
    """

    def __init__(
        self,
        config: DataParallelCompressionConfig,
        compressor: LowRank,
        *,
        seed: int,
        state_dtype: torch.dtype,
        codecs: BlockCodecs | None = None,
        wire: Codec | None = None,
        force: bool = False,
    ) -> None:
        self._scratch = Scratch()
        super().__init__(
            "dp_compression",
            on=config.gradients_remember,
            states=FactorStates(config.dp_compression_rank),
            gauge=Gauge(self._scratch),
        )
        self._config, self._seed, self.state_dtype, self._force = config, seed, state_dtype, force
        self.compressor, self.codecs, self.wire = compressor, codecs, wire
        self.stage: int | None = None
        """This rank's; None: it has no place yet."""

        self.compressed_stages: frozenset[int] | None = None
        """None: not decided yet."""

        self.in_warmup = False
        """Whether gradients are reduced dense in this iteration."""

        self.buckets: list[Buckets] = []
        """All of this rank's, in the order in which Megatron made them."""

        self.reducers: list[Reducer] = []
        """Of those that we reduce, in the order in which they were made."""

        self._stream: SideStream | None = None
        self._single_rank: set[str] = set()
        """The kinds of gradients that stay dense because nothing of them is sent."""

    def encodes(self, ranks: int) -> bool:
        """Return whether gradients are compressed in a group of so many ranks; one rank alone sends nothing.

        In a group of one rank, coding would change the gradients and save no byte. Routed experts have such a group
        where every expert has one replica (EP x ETP = TP x CP x DP).
        """
        return ranks > 1 or self._force

    def note_single_rank(self, kept_dense: str | None) -> str | None:
        """Return the log line about gradients of this kind that stay dense in a group of one rank; once for a kind."""
        if kept_dense is None or kept_dense in self._single_rank:
            return None
        self._single_rank.add(kept_dense)
        return f"dense, because their data-parallel group is one rank and nothing is sent: {kept_dense}"

    def place(self, stage: int, stages: int) -> None:
        """Take a place among the pipeline's stages."""
        self.stage, self.compressed_stages = stage, stages_to_compress(self._config, stages)

    def begin(self, this: Iteration) -> None:
        """See `Technique.begin`."""
        super().begin(this)
        self.in_warmup = this.is_among_the_first(self._config.dp_compression_warmup)

    @property
    def compresses_this_stage(self) -> bool:
        """Whether this rank's stage compresses its gradients."""
        return self.stage in (self.compressed_stages or ())

    @property
    def stages_are_open(self) -> bool:
        """Whether it is still to be decided which stages do."""
        return self.stage is not None and self.compressed_stages is None

    def choose_stages(self, stages: Collection[int]) -> None:
        """Decide which stages compress their gradients, between two iterations, on all ranks alike."""
        self.compressed_stages = frozenset(stages)
        if self.compresses_this_stage:
            for buckets in self.buckets:
                buckets.compress()

    def add_buckets(self, buckets: Buckets) -> None:
        """Megatron made one more group of buckets on this rank."""
        self.buckets.append(buckets)
        if self.compresses_this_stage:
            buckets.compress()

    @property
    def replicas(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same part of the model as this one."""
        return self.buckets[0].group if self.buckets else None

    @property
    def state_bytes(self) -> int:
        """What residuals and factors of all buckets take on this rank if its stage is compressed."""
        if self.codecs is not None:
            return 0
        rank, dtype = self._config.dp_compression_rank, self.state_dtype
        matrices = [matrix for buckets in self.buckets for matrix in buckets.matrices]
        return sum(state_bytes(m.shape[0], m.numel() // m.shape[0], rank, dtype) for m in matrices)

    def add_reducer(
        self,
        flat: torch.Tensor,
        matrices: Sequence[torch.Tensor],
        dense: Sequence[torch.Tensor],
        *,
        norm_groups: Sequence[str],
        sharded: bool,
        group: dist.ProcessGroup,
        fused: FusedEmbeddingSync | None = None,
    ) -> Reducer:
        """Make the reducer of one more bucket.

        Args:
            flat: the bucket, one dimension.
            matrices, dense: views into it: what is compressed, and what is not.
            norm_groups: the gradient-norm group of each of `matrices`.
            sharded: whether this replica's optimizer reads its part of the bucket only.
            group: its replicas.
            fused: the bucket is a tied embedding, whose format this says.
        """
        reducer: Reducer
        codecs, gauge = (self.codecs, self.gauge) if fused is None else (fused.codecs, fused.gauge)
        if not matrices:
            reducer = DenseReducer(flat, dense, sharded=sharded, group=group)
        elif codecs is not None:
            reducer = BlockReducer(flat, matrices, dense, sharded=sharded, group=group, codecs=codecs, gauge=gauge)
        else:
            number = sum(isinstance(reducer, BucketReducer) for reducer in self.reducers)
            reducer = BucketReducer(
                matrices, [gradient.view(-1) for gradient in dense], norm_groups=norm_groups, group=group,
                shard=flat.view(group.size(), -1)[group.rank()] if sharded else None, compressor=self.compressor,
                config=self._config, seed=self._seed, salt=f"stage {self.stage} bucket {len(self.reducers)}",
                states=self.states, name=f"bucket {number}", state_dtype=self.state_dtype,
                # All buckets share their memory, and so one stream.
                scratch=self._scratch, gauge=self.gauge, wire=self.wire,
            )  # fmt: skip
        self.reducers.append(reducer)
        return reducer

    def side_stream(self, device: torch.device) -> SideStream:
        """Where reductions run that the backward pass goes on beside."""
        if self._stream is None:
            self._stream = SideStream(device)
        return self._stream

    def state_dict(self) -> dict[str, Any]:
        """See `Technique.state_dict`; the stages that `auto` chose are part of it."""
        state = super().state_dict()
        if self._config.dp_compression_stages == "auto" and self.compressed_stages is not None:
            state["stages"] = sorted(self.compressed_stages)
        return state

    def mismatch(self, state_dict: Mapping[str, Any]) -> str | None:
        """See `Technique.mismatch`. Where the run that saved it had chosen its stages, they are taken over."""
        if self.stages_are_open and (stages := state_dict.get("stages")) is not None:
            self.choose_stages(stages)
        return super().mismatch(state_dict)
