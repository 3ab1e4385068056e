"""Where a process stands in 3D parallelism."""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["Grid", "RankPlace"]


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """What all ranks tell each other about themselves."""

    rank: int
    stage: int
    tensor_rank: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """This rank's place, and the groups that Megatron made for it."""

    place: RankPlace
    stages: int
    chunks: int = 1
    """Model chunks per stage; more than one with interleaving."""

    data_parallel: int
    pipeline_group: dist.ProcessGroup
    embedding_group: dist.ProcessGroup | None = None
    """The pair of first and last stage; None on the stages between."""

    dtype: torch.dtype = torch.float32
    """Of parameters, and with them of messages between stages."""

    timeout: timedelta | None = None
    """Megatron's limit on every wait; None: torch's default."""
