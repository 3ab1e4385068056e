"""A torch.distributed backend through host memory and gloo, for ranks that share a GPU.

NCCL refuses two ranks on one GPU, and gloo itself takes CUDA tensors in two collectives only. Here every tensor is
copied to pinned memory behind what the current stream was given before, gloo moves that copy, and the result is copied
back where the operation is waited for, on the stream that waits. As in NCCL, the collectives of a group happen in the
order of their calls: one that is still under way is finished before the next begins. CPU tensors take the same way.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["NAME", "StagedGloo", "register"]

NAME = "shared-gpu"
"""What `torch.distributed.init_process_group` knows it by."""

_SUM, _AVERAGE = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def register() -> None:
    """Let torch.distributed know the backend; a second call changes nothing."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, StagedGloo, devices=["cpu", "cuda"])


class _Work(dist.Work):
    """An operation under way: what gloo does, then what brings its result to where it belongs."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], object]) -> None:
        super().__init__()
        self._works, self._finish = works, finish
        self._done: torch.cuda.Event | None = None
        self._under_way = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """As NCCL's: what the current stream is given from now on finds the result."""
        if self._under_way:
            for work in self._works:
                work.wait()
            self._under_way = False
            self._finish()
            # The group keeps its last operation, and that is not to keep the tensors.
            self._works, self._finish = (), lambda: None
            if torch.cuda.is_initialized():
                self._done = torch.cuda.current_stream().record_event()
        elif self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        """Whether it was waited for."""
        return not self._under_way


def _by(gloos: str) -> Callable[..., _Work]:
    """A collective that moves values and computes nothing; the first argument is what it writes."""

    def collective(self: "StagedGloo", written: Any, *arguments: Any) -> _Work:
        return self._collective(gloos, written, *arguments)

    return collective


def _reducing(gloos: str, options: type) -> Callable[..., _Work]:
    """A collective that adds up. gloo knows no averages: they are sums, divided in the tensor's dtype."""

    def collective(self: "StagedGloo", written: Any, *arguments: Any) -> _Work:
        given = arguments[-1] if arguments and hasattr(arguments[-1], "reduceOp") else options()
        average = given.reduceOp == _AVERAGE
        asked = options()
        asked.reduceOp = _SUM if average else given.reduceOp
        if hasattr(given, "rootRank"):
            asked.rootRank = given.rootRank
        read = [argument for argument in arguments if argument is not given]
        return self._collective(gloos, written, *read, asked, divisor=self.size() if average else 1)

    return collective


class StagedGloo(dist.ProcessGroup):
    """See above; made by torch.distributed, with the methods that it calls on a process group.

    Args:
        timeout: how long gloo waits for another rank, before the operation raises RuntimeError.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg, arg-type]
        self._gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._last: _Work | None = None
        self._messages: set[_Work] = set()

    broadcast = _by("broadcast")
    allgather = _by("allgather")
    gather = _by("gather")
    scatter = _by("scatter")
    # The names of torch until 2.12, and since.
    _allgather_base = all_gather_single = _by("_allgather_base")
    alltoall_base = all_to_all_single = _by("alltoall_base")
    allreduce = _reducing("allreduce", dist.AllreduceOptions)
    reduce = _reducing("reduce", dist.ReduceOptions)
    reduce_scatter = _reducing("reduce_scatter", dist.ReduceScatterOptions)
    _reduce_scatter_base = reduce_scatter_single = _reducing("_reduce_scatter_base", dist.ReduceScatterOptions)

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any) -> _Work:
        """In one piece: gloo has no other."""
        sizes = [[tensor.numel() for tensor in tensors] for tensors in (outputs, inputs)]
        arrived = torch.cat([tensor.reshape(-1) for tensor in outputs])
        work = self.all_to_all_single(arrived, torch.cat([tensor.reshape(-1) for tensor in inputs]), *sizes, *options)

        def hand_out() -> None:
            for tensor, part in zip(outputs, arrived.split(sizes[0]), strict=True):
                tensor.data.copy_(part.view(tensor.shape))

        return _Work([work], hand_out)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], *options: Any) -> _Work:
        """One by one, as all that is coalesced."""
        return _all([self.allreduce([tensor], *options) for tensor in tensors])

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any
    ) -> _Work:
        """Likewise."""
        return _all([self.all_gather_single(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options: Any
    ) -> _Work:
        """Likewise."""
        return _all([self.reduce_scatter_single(*pair, *options) for pair in zip(outputs, inputs, strict=True)])

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def send(self, tensors: list[torch.Tensor], to: int, tag: int) -> _Work:
        """A message; several in both directions can be under way."""
        return self._message("send", tensors, to, tag, written=())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> _Work:
        """Likewise."""
        return self._message("recv", tensors, source, tag, written=tensors)

    def barrier(self, opts: Any = None) -> Any:
        """As NCCL's, also behind what the current stream was given."""
        self._finish_last()
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        return self._gloo.barrier(dist.BarrierOptions())

    def _get_backend(self, device: torch.device) -> Any:
        """What torch sets timeouts of, and asks what it can do."""
        return self._gloo

    @property
    def _device_types(self) -> list[torch.device]:
        """Objects travel as CPU tensors where that is among them."""
        return [torch.device("cpu"), torch.device("cuda")]

    def getBackendName(self) -> str:
        """Torch asks for it."""
        return NAME

    def _collective(self, gloos: str, written: Any, *arguments: Any, divisor: int = 1) -> _Work:
        self._finish_last()
        hosts, *others = _to_host([written, *arguments], gloos)
        work = getattr(self._gloo, gloos)(hosts, *others)
        self._last = _Work([work], lambda: _from_host(written, hosts, divisor))
        return self._last

    def _message(self, gloos: str, tensors: list[torch.Tensor], *arguments: int, written: Sequence[Any]) -> _Work:
        self._finish_last()
        hosts = _to_host(tensors, gloos)
        work = getattr(self._gloo, gloos)(hosts, *arguments)

        def finish() -> None:
            self._messages.discard(message)
            _from_host(written, hosts[: len(written)])

        message = _Work([work], finish)
        # Also where nobody waits for it: what is being sent must stay.
        self._messages.add(message)
        return message

    def _finish_last(self) -> None:
        if self._last is not None and not self._last.is_completed():
            self._last.wait()
        self._last = None


def _all(works: list[_Work]) -> _Work:
    return _Work(works, lambda: None)


def _to_host(arguments: list[Any], gloos: str) -> list[Any]:
    """The same with copies on the host in the place of tensors, complete when it returns."""
    copies = [_copy(argument, gloos) for argument in arguments]
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copies


def _copy(argument: Any, gloos: str) -> Any:
    if isinstance(argument, list):
        return [_copy(each, gloos) for each in argument]
    if not isinstance(argument, torch.Tensor):
        return argument
    host = torch.empty(argument.shape, dtype=argument.dtype, pin_memory=argument.is_cuda)
    host.copy_(argument.detach(), non_blocking=True)
    # Unlike NCCL, gloo asks for more than equal numbers of values; an all-to-all's splits are of rows, though.
    flat = host if gloos == "alltoall_base" else host.view(-1)
    # It knows neither bool nor fp8.
    return flat.view(torch.uint8) if "reduce" not in gloos and flat.itemsize == 1 else flat


def _from_host(written: Any, hosts: Any, divisor: int = 1) -> None:
    if isinstance(written, torch.Tensor):
        result = hosts.div_(divisor) if divisor > 1 else hosts
        # Of `data`: autograd is not to see a change, as it sees none of NCCL's.
        written.data.copy_(result.view(written.dtype).view(written.shape), non_blocking=True)
        return
    for each, host in zip(written, hosts, strict=True):
        _from_host(each, host, divisor)
