"""Place of a rank in 3D parallelism, and the ranks that hold one model together.

No function here waits for a rank outside of the model: a job may have ranks that train another model, or none.
"""

import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.collectives.nodes import Node
from optimus_cc_ext.errors import RanksDisagree
from optimus_cc_ext.placement import Placement, placement_line

_LONGEST_WAIT = timedelta(minutes=10)
"""Default time limit: NCCL's, which is the shorter one of torch's two defaults."""

_BEFORE_THE_WATCHDOG = 0.9
"""Share of the time limit after which we give up, because NCCL's own watchdog would end the process without our
reason.
"""


@dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Facts about a rank that all ranks of a model exchange."""

    rank: int
    stage: int
    tensor_rank: int
    names: int = 0
    """Number of names of process groups that the rank has used up, as `groups.names_of` counts them."""

    node: Node = field(default_factory=Node)

    pipeline: tuple[int, ...] = ()
    """The ranks of the rank's pipeline, by stage; empty: there is one stage."""

    experts: tuple[int, ...] = ()
    """The ranks over which the experts of the rank's layers are dealt out; empty: the rank has all of them."""

    frozen_embedding: bool = False
    """True if the rank holds a copy of the tied embedding that is not trained, so that nothing of it is summed."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Grid of a model: this rank's place, and the process groups that the model uses."""

    place: RankPlace
    stages: int
    chunks: int = 1
    """Number of model chunks per stage; more than one with interleaving."""

    data_parallel: int
    """Number of replicas, those of context parallelism included."""

    context_parallel: int = 1
    pipeline_group: dist.ProcessGroup | None = None
    tensor_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    """Group of the ranks that hold the same part of the model, with those of context parallelism."""

    expert_group: dist.ProcessGroup | None = None
    """Group of the ranks over which the experts of this rank's layers are dealt out."""

    embedding_group: dist.ProcessGroup | None = None
    """Pair of the first and the last stage; None on the stages between."""

    batched_messages: bool = True
    """True if messages between stages are posted in batches, as Megatron does without overlapped communication."""

    dtype: torch.dtype = torch.float32
    """Dtype of the parameters, and so of messages between stages."""

    align: int = 1
    """A number that divides the starts and lengths of the model's parameters in their buckets, and of its messages."""

    timeout: timedelta | None = None
    """Megatron's limit on every wait; None: torch's default."""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups of several ranks whose product is all ranks of the model: one collective over each of them
        reaches all.
        """
        every = (self.tensor_group, self.replica_group, self.pipeline_group)
        return [group for group in every if group is not None and group.size() > 1]

    @property
    def is_first(self) -> bool:
        """True on the model's first rank, which prints for all of them."""
        return all(group.rank() == 0 for group in self.groups)

    def placement(self, ranks_per_node: int) -> str | None:
        """Return the line that says which groups stay inside nodes; None for one rank, or unknown nodes (0)."""
        if not self.groups or not ranks_per_node:
            return None
        tensor = 1 if self.tensor_group is None else self.tensor_group.size()
        stages = [] if self.pipeline_group is None else dist.get_process_group_ranks(self.pipeline_group)
        context, data = self.context_parallel, self.data_parallel // self.context_parallel
        placement = Placement(
            tensor=tensor, context=context, data=data, pipeline=self.stages, ranks_per_node=ranks_per_node,
            pipeline_before_data=len(stages) > 1 and data > 1 and stages[1] - stages[0] == tensor * context,
        )  # fmt: skip
        return placement_line(placement)

    def is_pipeline(self, group: dist.ProcessGroup) -> bool:
        """Return whether `group` has the ranks of this model's pipeline; the user may have made another object for
        it.
        """
        return group is self.pipeline_group or _have_equal_ranks(group, self.pipeline_group)

    def has_experts_on(self, group: dist.ProcessGroup) -> bool:
        """Return whether this model's experts are dealt out over the ranks of `group`."""
        return group is self.expert_group or _have_equal_ranks(group, self.expert_group)

    def gather[T](self, value: T) -> list[T]:
        """Return the picklable values of all ranks of the model, in the order of the ranks. Collective over these
        ranks.
        """
        found = {self.place.rank: value}
        for group in self.groups:
            everyone: list[Any] = [None] * group.size()
            dist.all_gather_object(everyone, found, group=group)
            found = {rank: theirs for part in everyone for rank, theirs in part.items()}
        return [found[rank] for rank in sorted(found)]

    def reasons(self, mine: str | None) -> list[tuple[int, str]]:
        """Return the ranks that have a reason to refuse, with the reason. Collective over all ranks of the model."""
        everyone = self.gather((self.place.rank, mine))
        return [(rank, reason) for rank, reason in everyone if reason is not None]

    def sum(self, tensor: torch.Tensor) -> None:
        """Add `tensor` up over all ranks of the model, in place. Collective over these ranks."""
        for group in self.groups:
            dist.all_reduce(tensor, group=group)

    def largest(self, tensor: torch.Tensor) -> None:
        """Take the maximum of `tensor` over all ranks of the model, in place. Collective over these ranks."""
        for group in self.groups:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=group)

    def meet(self) -> None:
        """Wait until every rank of the model has come here. Collective over these ranks.

        Raises:
            RanksDisagree: not all ranks came within the time limit; the message names those that did not.
        """
        store = dist.distributed_c10d._get_default_store()
        times = store.add(_arrivals(self.place.rank), 1)
        give_up = time.monotonic() + _BEFORE_THE_WATCHDOG * (self.timeout or _LONGEST_WAIT).total_seconds()
        for group in self.groups:
            # NCCL would take the device number "global rank modulo devices", which may be another rank's.
            devices = [torch.cuda.current_device()] if "nccl" in dist.get_backend(group) else None
            arrived = dist.barrier(group=group, async_op=True, device_ids=devices)
            while not arrived.is_completed():
                if time.monotonic() > give_up:
                    ranks = dist.get_process_group_ranks(group)
                    missing = [rank for rank in ranks if store.add(_arrivals(rank), 0) < times]
                    raise RanksDisagree(
                        f"rank {self.place.rank} waited in vain for rank {', '.join(map(str, missing or ranks))} to "
                        "compress the same model. A rank that builds no model, or whose flags leave every technique "
                        "off, does not come. Start all ranks with the same flags."
                    )
                time.sleep(0.001)
            arrived.wait()


def _have_equal_ranks(group: dist.ProcessGroup, own: dist.ProcessGroup | None) -> bool:
    return own is not None and dist.get_process_group_ranks(group) == dist.get_process_group_ranks(own)


def _arrivals(rank: int) -> str:
    return f"optimus_cc/meetings/{rank}"
