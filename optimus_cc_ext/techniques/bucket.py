"""Megatron's buckets, whose tensors are read anew each time: between two steps a training loop may move them.

Loops that generate text with the model free its gradients meanwhile, or move its parameters to the CPU, and allocate
them anew afterwards. So no object keeps a bucket, or a view of one, from one step to the next; plans keep offsets.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from optimus_cc_ext.errors import OptimusError
from optimus_cc_ext.techniques.bucket_rules import BucketRecord


@dataclass(frozen=True, eq=False)
class Bucket:
    """One of Megatron's buckets: where its tensors are found, and what they were when compression began."""

    group: Any
    """Megatron's bucket group."""

    index: int
    """Place of the bucket in its group."""

    record: BucketRecord
    device: torch.device

    @classmethod
    def of(cls, flat: torch.Tensor) -> "Bucket":
        """Make a bucket without Megatron, whose parameters and gradients are both `flat`."""
        record = BucketRecord(numel=flat.numel(), dtype=flat.dtype, parameters=(), parameter_dtype=flat.dtype)
        group = SimpleNamespace(buckets=[SimpleNamespace(grad_data=flat, param_data=flat)])
        return cls(group, 0, record, flat.device)

    @property
    def of_megatron(self) -> Any:
        """Megatron's object."""
        return self.group.buckets[self.index]

    @property
    def gradients(self) -> torch.Tensor:
        """The gradients as they are now, one dimension.

        Raises:
            OptimusError: they do not fit the plans that were made when compression began.
        """
        return self._fitting(self.of_megatron.grad_data, self.record.dtype, "gradients")

    @property
    def parameters(self) -> torch.Tensor:
        """The parameters as they are now; see `gradients`."""
        return self._fitting(self.of_megatron.param_data, self.record.parameter_dtype, "parameters")

    def _fitting(self, flat: torch.Tensor | None, dtype: torch.dtype, name: str) -> torch.Tensor:
        planned = (self.record.numel, dtype, self.device)
        if flat is not None and (flat.numel(), flat.dtype, flat.device) == planned:
            return flat.view(-1)
        found = "none" if flat is None else _described(flat.numel(), flat.dtype, flat.device)
        raise OptimusError(
            f"rank {dist.get_rank()}: the {name} of a bucket are {found}, and were {_described(*planned)} when "
            "compression began, which its messages were planned for. Allocate the buffer as it was before the model is "
            "used, or call the handle's remove() before the buffer changes, and compress() afterwards"
        )


def _described(numel: int, dtype: torch.dtype, device: torch.device) -> str:
    return f"{numel} values in {dtype} on {device}"
