"""Backend of torch.distributed that goes through host memory and gloo, for ranks that share a GPU.

NCCL refuses two ranks on one GPU, and gloo itself takes CUDA tensors in two collectives only. Here every tensor is
copied to pinned memory after the work that the current stream already has; gloo sends that copy. When the operation is
waited for, the result is copied back on the stream that waits. As in NCCL, the collectives of a group happen in the
order of their calls: a collective that is still under way is finished before the next one begins. CPU tensors take the
same way.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NAME", "StagedGloo", "register"]

NAME = "shared-gpu"
"""Name of the backend in `torch.distributed.init_process_group`."""

_SUM, _AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def register() -> None:
    """Register the backend with torch.distributed; a second call changes nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StagedGloo, devices=["cpu", "cuda"])


class _Work(dist.Work):
    """Operation under way: gloo's operations, followed by the function that copies their result back."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object]) -> None:
        super().__init__()
        self._works, self._finish = works, finish
        self._done: torch.cuda.Event | None = None
        self._under_way = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for the operation. As with NCCL, work that is given to the current stream afterwards sees the result."""
        if self._under_way:
            for work in self._works:
                work.wait()
            self._under_way = False
            self._finish()
            # The group keeps a reference to its last operation, which must not keep the tensors alive.
            self._works, self._finish = (), lambda: None
            if torch.cuda.is_initialized():
                self._done = torch.cuda.current_stream().record_event()
        elif self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        """Return whether `wait` has been called."""
        return not self._under_way


def _moving(operation: str) -> Callable[..., _Work]:
    """Make a collective that moves values and computes nothing; its first argument is the tensor, or tensors, that it
    writes.
    """

    def collective(self: "StagedGloo", written: Any, *arguments: Any) -> _Work:
        return self._collective(operation, written, *arguments)

    return collective


def _reducing(operation: str, options: type) -> Callable[..., _Work]:
    """Make a collective that adds up. gloo has no averages: they are computed as sums, divided in the tensor's
    dtype.
    """

    def collective(self: "StagedGloo", written: Any, *arguments: Any) -> _Work:
        given = arguments[-1] if arguments and hasattr(arguments[-1], "reduceOp") else options()
        average = given.reduceOp == _AVERAGE
        asked = options()
        asked.reduceOp = _SUM if average else given.reduceOp
        if hasattr(given, "rootRank"):
            asked.rootRank = given.rootRank
        read = [argument for argument in arguments if argument is not given]
        return self._collective(operation, written, *read, asked, divisor=self.size() if average else 1)

    return collective


class StagedGloo(dist.ProcessGroup):
    """Process group of this backend. torch.distributed makes it and calls its methods.

    Args:
        timeout: how long gloo waits for another rank before the operation raises RuntimeError.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._last: _Work | None = None
        self._messages: set[_Work] = set()

    broadcast = _moving("broadcast")
    allgather = _moving("allgather")
    gather = _moving("gather")
    scatter = _moving("scatter")
    # Operations with two names: the name in torch before 2.12, and the later one.
    _allgather_base = all_gather_single = _moving("_allgather_base")
    alltoall_base = all_to_all_single = _moving("alltoall_base")
    allreduce = _reducing("allreduce", dist.AllreduceOptions)
    reduce = _reducing("reduce", dist.ReduceOptions)
    reduce_scatter = _reducing("reduce_scatter", dist.ReduceScatterOptions)
    _reduce_scatter_base = reduce_scatter_single = _reducing("_reduce_scatter_base", dist.ReduceScatterOptions)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any) -> _Work:
        """Send the tensors as one piece, because gloo has no all-to-all of lists."""
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        arrived = torch.cat([tensor.reshape(-1) for tensor in outputs])
        work = self.all_to_all_single(arrived, torch.cat([tensor.reshape(-1) for tensor in inputs]), *sizes, *options)

        def hand_out() -> None:
            for tensor, part in zip(outputs, arrived.split(sizes[0]), strict=True):
                tensor.data.copy_(part.view(tensor.shape))

        return _Work([work], hand_out)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], *options: Any) -> _Work:
        """Reduce the tensors one by one, as all coalesced operations are done here."""
        return _all([self.allreduce([tensor], *options) for tensor in tensors])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any
    ) -> _Work:
        return _all([self.all_gather_single(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any
    ) -> _Work:
        return _all([self.reduce_scatter_single(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work:
        """Send a message; several messages in both directions can be under way."""
        return self._message("send", tensors, to, tag, written=())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work:
        """Receive a message; several messages in both directions can be under way."""
        return self._message("recv", tensors, source, tag, written=tensors)

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks, as NCCL's barrier does: also for the work that the current stream was given."""
        self._finish_last()
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._gloo.barrier(dist.BarrierOptions())

    def _get_backend(self, device: torch.device) -> Any:
        """Return gloo's backend: torch sets its timeout, and asks which operations it supports."""
        return self._gloo

    @property
    def _device_types(self) -> list[torch.device]:
        """Devices of this group. torch.distributed sends objects as CPU tensors if the CPU is among them."""
        return [torch.device("cpu"), torch.device("cuda")]

    def getBackendName(self) -> str:
        return NAME

    def _collective(self, operation: str, written: Any, *arguments: Any, divisor: int = 1) -> _Work:
        self._finish_last()
        hosts, *others = _to_host([written, *arguments], operation)
        work = getattr(self._gloo, operation)(hosts, *others)
        self._last = _Work([work], lambda: _from_host(written, hosts, divisor))
        return self._last

    def _message(self, operation: str, tensors: list[torch.Tensor], *arguments: int, written: Sequence[Any]) -> _Work:
        self._finish_last()
        hosts = _to_host(tensors, operation)
        work = getattr(self._gloo, operation)(hosts, *arguments)

        def finish() -> None:
            self._messages.discard(message)
            _from_host(written, hosts[: len(written)])

        message = _Work([work], finish)
        # The operation is kept even if nobody waits for it, because the tensor that is being sent must stay allocated.
        self._messages.add(message)
        return message

    def _finish_last(self) -> None:
        if self._last is not None and not self._last.is_completed():
            self._last.wait()
        self._last = None


def _all(works: list[_Work]) -> _Work:
    return _Work(works, lambda: None)


def _to_host(arguments: list[Any], operation: str) -> list[Any]:
    """Return the arguments with copies on the host in place of tensors. The copies are complete on return."""
    copies = [_copy(argument, operation) for argument in arguments]
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copies


def _copy(argument: Any, operation: str) -> Any:
    if isinstance(argument, list):
        return [_copy(each, operation) for each in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    host = torch.empty(argument.shape, dtype=argument.dtype, pin_memory=argument.is_cuda)
    host.copy_(argument.detach(), non_blocking=True)
    # Unlike NCCL, gloo compares more than the numbers of values, so tensors are passed flat; only the splits of an
    # all-to-all count rows.
    flat = host if operation == "alltoall_base" else host.view(-1)
    # gloo supports neither bool nor fp8.
    return flat.view(torch.uint8) if "reduce" not in operation and flat.itemsize == 1 else flat


def _from_host(written: Any, hosts: Any, divisor: int = 1) -> None:
    if isinstance(written, torch.Tensor):
        result = hosts.div_(divisor) if divisor > 1 else hosts
        # Written through `data`, because autograd must not see the change, as it sees none of NCCL's changes.
        written.data.copy_(result.view(written.dtype).view(written.shape), non_blocking=True)
        return
    for each, host in zip(written, hosts, strict=True):
        _from_host(each, host, divisor)
