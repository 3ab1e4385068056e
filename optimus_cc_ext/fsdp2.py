"""torch's FSDP2 in few bits: the reduce-scatter of gradients, or for HSDP their all-reduce between nodes.

    fully_shard(model)
    compression = optimus_cc_ext.fsdp2.compress(model, "int8")      # docs/python.md shows a complete loop

It uses functions that torch offers for this, `set_custom_reduce_scatter` and `set_all_reduce_hook`, and has no state
across steps. Parameters are gathered as ever: the errors of a format would enter every forward pass.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from optimus_cc_ext.announce import say
from optimus_cc_ext.collectives import all_reduce, reduce_scatter_tensor
from optimus_cc_ext.collectives.functions import DTYPES
from optimus_cc_ext.collectives.nodes import this_node
from optimus_cc_ext.collectives.ranges import Range
from optimus_cc_ext.compressors.formats import format_named
from optimus_cc_ext.errors import OptimusError, is_first_rank

__all__ = ["ShardedCompression", "compress"]

_SEAMS = ("set_custom_reduce_scatter", "set_all_reduce_hook", "set_force_sum_reduction_for_comms")
_MARK = "_optimus_cc_unit"


def compress(
    model: torch.nn.Module, gradients: str = "int8", replicas: DeviceMesh | None = None
) -> "ShardedCompression":
    """Compress the gradients of a sharded model; the gradients of vectors are sent as they are.

    Collective over the ranks of the model, after `fully_shard` and before the first forward pass.

    Args:
        model: a model, or a part of one, to which `fully_shard` has been applied.
        gradients: "int8" or "int4".
        replicas: for HSDP, the mesh of the ranks that hold the same shard, one on each node. The model is sharded over
            the other mesh alone, inside of a node; there gradients are added up dense. This hook averages over the
            replicas with every reduce-scatter. If None, all ranks that shard the model exchange gradients in few bits.

    Raises:
        OptimusError: the model is not sharded, is sharded in a way that has no seam, or is compressed already.
        ValueError: there is no such format.
    """
    format = format_named(gradients).name
    if missing := [name for name in _SEAMS if not hasattr(FSDPModule, name)]:
        raise OptimusError(f"torch {torch.__version__}: its FSDPModule has no {missing[0]}. Install torch 2.9 or newer")
    units = [_Unit(name, modules, format, replicas) for name, modules in _groups_of(model)]
    if not units:
        raise OptimusError(
            f"model: this {type(model).__name__} is not sharded. Call torch.distributed.fsdp.fully_shard on it first"
        )
    if replicas is not None:
        _check_replicas(replicas, units)
    compression = ShardedCompression(units)
    try:
        for unit in units:
            unit.attach()
    except BaseException:
        compression.remove()
        raise
    return compression


class ShardedCompression:
    """Handle of a compressed model."""

    def __init__(self, units: "list[_Unit]") -> None:
        self._units = units

    def remove(self) -> None:
        """Let torch reduce the gradients again.

        A communication of the user's own, and a sum that the user forced, are the user's to set again.
        """
        for unit in self._units:
            unit.detach()


class _Unit:
    """Modules that FSDP2 reduces together, and the communication that they are given."""

    def __init__(self, name: str, modules: Sequence[Any], format: str, replicas: DeviceMesh | None) -> None:
        self.name, self._modules, self._format = name or type(modules[0]).__name__, modules, format
        self._replicas, self._said = None if replicas is None else replicas.get_group(), False
        if any(hasattr(module, _MARK) for module in modules):
            raise OptimusError(f"{self.name}: compressed already. Call remove() of its compression first")
        modules[0].reshard()  # after an evaluation, the first module of a model still holds gathered parameters
        places = {
            parameter: (module, name)
            for module in _below(modules)
            for name, parameter in module.named_parameters(recurse=False)
            if isinstance(parameter, DTensor)
        }
        if any(parameter.placements[0].is_replicate() for parameter in places):
            raise OptimusError(
                f"{self.name}: replicated over the first dimension of its mesh, and torch adds up replicas by itself. "
                'Shard it over the other one alone: fully_shard(module, mesh=mesh["shard"]), and then '
                'compress(model, replicas=mesh["replicate"])'
            )
        self.meshes = [parameter.device_mesh for parameter in places]
        # Parameters are found by their places, because load_state_dict(assign=True) puts others there.
        self._parts = [(*place, _length_in_row(each), each.ndim > 1) for each, place in places.items()]

    def attach(self) -> None:
        module = self._modules[0]
        try:
            if self._replicas is not None:
                module.set_all_reduce_hook(self.reduce_replicas)
            else:
                module.set_custom_reduce_scatter(self)
                module.set_force_sum_reduction_for_comms(True)  # no other factor reaches the reduce-scatter as a number
        except ValueError as error:
            raise OptimusError(f"{self.name}: {error}. Shard it without shard_placement_fn's meshes") from error
        for each in self._modules:
            setattr(each, _MARK, self)

    def detach(self) -> None:
        module = self._modules[0]
        if getattr(module, _MARK, None) is not self:
            return
        if self._replicas is not None:
            module.set_all_reduce_hook(None)
        else:
            module.set_custom_reduce_scatter(_Torchs())
            module.set_force_sum_reduction_for_comms(False)
        for each in self._modules:
            delattr(each, _MARK)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for the input or the output of a reduce-scatter."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any,
        async_op: bool = False,
    ) -> Any:  # fmt: skip
        """Give each rank its row of the sum. Rows lie one after the other in the input."""
        row = output_tensor.numel()
        ranges = self._ranges(output_tensor)
        coded = [(rank * row + start, length) for rank in range(group.size()) for start, length in ranges]
        how = {"format": self._format, "coded": coded}
        return reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op, **how)  # type: ignore[arg-type]

    def reduce_replicas(self, row: torch.Tensor) -> None:
        """Average a rank's row of the sum over the replicas, in place."""
        if row.device.type == "cuda":
            row.record_stream(torch.cuda.current_stream(row.device))  # torch keeps it only for its own all-reduce
        all_reduce(row, dist.ReduceOp.AVG, self._replicas, format=self._format, coded=self._ranges(row))

    def _ranges(self, row: torch.Tensor) -> list[Range]:
        """Return the parts of a row that belong to matrices; none if parameters without a gradient are missing."""
        if row.dtype not in DTYPES:
            raise OptimusError(
                f"{self.name}: its gradients are reduced in {row.dtype}, which has no format of few bits. Give "
                "fully_shard MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
        at, ranges = 0, []
        for module, name, length, is_matrix in self._parts:
            if getattr(module, name).requires_grad:
                if is_matrix:
                    ranges.append((at, length))
                at += length
        if at == row.numel():
            return ranges
        if not self._said and is_first_rank():
            reason = "some of its parameters have no gradient" if row.numel() < at else "its parameters have changed"
            say(f"optimus-cc: {self.name}: gradients are sent dense, because {reason}", logging.WARNING)
        self._said = True
        return []


class _Torchs:
    """The reduce-scatter of torch."""

    allocate = _Unit.allocate

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, **how: Any) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, **how)


def _groups_of(model: torch.nn.Module) -> Iterator[tuple[str, Sequence[torch.nn.Module]]]:
    """Yield the modules that were given to one call of `fully_shard`, with the name of the first."""
    states: dict[Any, list[tuple[str, Any]]] = {}
    for name, module in model.named_modules():
        state = fully_shard.state(module) if isinstance(module, FSDPModule) else None  # type: ignore[attr-defined]
        if state is not None:
            states.setdefault(state, []).append((name, module))
    for state, members in states.items():
        yield members[0][0], getattr(state, "_modules", None) or [module for _, module in members]  # in FSDP's order


def _below(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the modules whose parameters FSDP2 reduces with these modules, in its order."""
    for module in modules:
        yield from _below([child for child in module.children() if not isinstance(child, FSDPModule)])
        yield module


def _length_in_row(parameter: DTensor) -> int:
    """Return the length of a parameter's part in each row, padded if it does not divide evenly."""
    sizes = list(parameter.shape)
    # The mesh's first dimension is FSDP's; the others are those of tensor parallelism.
    for dimension, placement in enumerate(parameter.placements):
        if (cut := getattr(placement, "dim", None)) is not None:
            sizes[cut] = -(-sizes[cut] // parameter.device_mesh.size(dimension))
    return math.prod(sizes)


def _check_replicas(replicas: DeviceMesh, units: "list[_Unit]") -> None:
    """Refuse replicas that are not one rank of each node."""
    mesh = next(mesh for unit in units for mesh in unit.meshes)
    shard, others = (dist.get_process_group_ranks(each.get_group()) for each in (mesh, replicas))
    nodes: list[Any] = [None] * len(shard)
    dist.all_gather_object(nodes, this_node(dist.get_rank()).name, group=mesh.get_group())
    cure = 'Make the mesh of (nodes, ranks of a node), shard over mesh["shard"], and give mesh["replicate"]'
    if set(shard) & set(others) != {dist.get_rank()}:
        raise OptimusError(f"replicas: ranks {others} are no replicas of ranks {shard}, which shard the model. {cure}")
    if len(set(nodes)) > 1:
        raise OptimusError(f"replicas: ranks {shard}, which shard the model, are on {len(set(nodes))} nodes. {cure}")
