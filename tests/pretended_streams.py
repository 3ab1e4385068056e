"""A GPU's streams, pretended on a CPU: what runs at once there, and whether anything orders it.

`pretend()`, in a rank whose torch.cuda is the CPU runtime's, makes streams and events objects with vector clocks, and
lets the collectives of each process group run on a stream of its own, as NCCL's do. A TorchDispatchMode notes which
bytes each operator reads and writes, and on which stream. `report()` then tells

- races: two accesses of the same bytes on two streams, one of them a write, and no wait between them;
- memory that is used too early: its owner freed it, and the stream to which the allocator gives it back has not waited
  for another stream that still uses it;
- the streams on which each `Scratch` was used.

Each operator and collective also takes a modelled time, on two GPUs at once: one with a queue of work for each stream,
where a kernel starts when its stream is ready; and one with a single queue (CUDA_DEVICE_MAX_CONNECTIONS=1), where
kernels also start in the order in which the host launched them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.stream_memory import Access, Memory, Place, Report

__all__ = ["Stream", "pretend", "report"]

MICROSECONDS = {"aten::mm": 10.0, "aten::bmm": 10.0, "aten::addmm": 10.0, "aten::baddbmm": 10.0}
"""Modelled time of operators; others take 2 microseconds, and those of a compressor a tenth of that."""

READ_BY_HOST = ("aten::_local_scalar_dense", "aten::item", "aten::equal", "aten::nonzero", "aten::is_nonzero")
COLLECTIVES = {
    "allreduce": 0, "allreduce_coalesced": 0, "broadcast": 0, "reduce": 0, "allgather": 0, "gather": 0, "scatter": 0,
    "_allgather_base": 0, "all_gather_single": 0, "allgather_into_tensor_coalesced": 0,
    "all_gather_single_coalesced": 0, "reduce_scatter": 0, "_reduce_scatter_base": 0, "reduce_scatter_single": 0,
    "reduce_scatter_tensor_coalesced": 0, "reduce_scatter_single_coalesced": 0, "alltoall": 0, "alltoall_base": 0,
    "all_to_all_single": 0, "recv": 0, "recv_anysource": 0, "send": None, "barrier": None,
}  # fmt: skip
"""Methods of a process group, and the argument that each writes."""


class Stream:
    """Stand-in for torch.cuda.Stream: its clock holds, for each stream, the last launch that precedes its next one."""

    cuda_stream, device, priority = 0, torch.device("cpu"), 0
    priority_range = staticmethod(lambda: (0, 0))

    def __init__(self, device: Any = None, priority: int = 0, name: str | None = None, **_: Any) -> None:
        self.clock: dict[Stream, int] = {}
        self.ready = [0.0, 0.0]
        self.name = name or f"stream {len(GPU.streams)}"
        GPU.streams.append(self)

    def after(self, other: Stream | Event) -> None:
        """Order the later work of this stream after the present work of another one."""
        for stream, launches in other.clock.items():
            self.clock[stream] = max(launches, self.clock.get(stream, 0))
        self.ready = [max(times) for times in zip(self.ready, other.ready, strict=True)]

    wait_stream = wait_event = after

    def launched(self) -> int:
        """Advance this stream by one launch, ordered after everything that the host has waited for."""
        self.after(GPU.host)
        self.clock[self] = self.clock.get(self, 0) + 1
        return self.clock[self]

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        GPU.host.after(self)

    def query(self) -> bool:
        return True

    def __enter__(self) -> Stream:
        GPU.entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        GPU.entered.pop()


class Event:
    """Stand-in for torch.cuda.Event."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.clock: dict[Stream, int] = {}
        self.ready = [0.0, 0.0]

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or GPU.current
        stream.launched()
        self.clock, self.ready = dict(stream.clock), list(stream.ready)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or GPU.current).after(self)

    def synchronize(self) -> None:
        GPU.host.after(self)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Event) -> float:
        return 0.0


class _Pretended:
    """The pretended GPU of this process."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.last_start = 0.0
        self.scratch: dict[int, tuple[Any, dict[Stream, None]]] = {}
        self.memory, self.quiet, self.bytes_per_us = Memory(), False, 1.0

    def begin(self) -> None:
        self.host, self.main = Stream(name="host"), Stream(name="main")
        self.entered = [self.main]

    @property
    def current(self) -> Stream:
        return self.entered[-1]

    def takes(self, stream: Stream, microseconds: float) -> None:
        """Let a kernel of this length start as soon as it can on both pretended GPUs."""
        many, one = (max(times) for times in zip(stream.ready, self.host.ready, strict=True))
        self.last_start = one = max(one, self.last_start)
        stream.ready = [many + microseconds, one + microseconds]


GPU = _Pretended()


class _Operators(TorchDispatchMode):
    """Notes what each operator reads and writes, on the current stream."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not GPU.quiet and not func._schema.name.startswith(("c10d::", "_c10d")):
            GPU.quiet = True
            try:
                self._note(func._schema, args, kwargs or {}, out)
            finally:
                GPU.quiet = False
        return out

    def _note(self, schema: Any, args: Any, kwargs: Any, out: Any) -> None:
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        if any(r.alias_info is not None for r in schema.returns) and not any(written):
            return  # a view touches no memory
        stream, place = GPU.current, Place(schema.name)
        given = [args[i] if i < len(args) else kwargs.get(a.name) for i, a in enumerate(schema.arguments)]
        reads, writes = (
            [leaf for value, of in zip(given, written, strict=True) if of is kind for leaf in tree_leaves(value)]
            for kind in (False, True)
        )
        there = {id(leaf) for leaf in (*reads, *writes)}
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and id(leaf) not in there]
        at = stream.launched()
        GPU.memory.touch(reads, place, stream, at, writes=False)
        GPU.memory.touch(writes, place, stream, at, writes=True)
        GPU.memory.collect()
        if made:
            GPU.memory.allocates(stream)
        GPU.memory.touch(made, place, stream, at, writes=True)
        GPU.takes(stream, 0.2 if place.of_compressor else MICROSECONDS.get(schema.name, 2.0))
        GPU.memory.report.counts["operators"] += 1
        if schema.name in READ_BY_HOST:
            stream.synchronize()


class _Work:
    """A collective that is under way: on a GPU the current stream waits for it, and the host goes on."""

    def __init__(self, work: Any, event: Event) -> None:
        self._work, self._event = work, event

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._event.wait()
        return _quietly(self._work.wait, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call what copies between buffers of the CPU's own collectives."""
    before, GPU.quiet = GPU.quiet, True
    try:
        return call(*args, **kwargs)
    finally:
        GPU.quiet = before


def _on_a_stream_of_its_own(name: str, written: int | None) -> None:
    original, streams, events = getattr(dist.ProcessGroup, name), _STREAMS_OF_GROUPS, _EVENTS

    @wraps(original)
    def called(group: Any, *args: Any, **kwargs: Any) -> Any:
        if GPU.quiet:
            return original(group, *args, **kwargs)
        stream = streams[group] if group in streams else streams.setdefault(group, Stream(name=f"NCCL {len(streams)}"))
        stream.after(GPU.current)
        at, place, given = stream.launched(), Place(f"c10d::{name}"), [*args, *kwargs.values()]
        leaves = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)] for value in given]
        for number, some in enumerate(leaves):
            GPU.memory.touch(some, place, stream, at, writes=number == written)
        moved = sum(leaf.nbytes for leaf in leaves[written or 0]) if leaves else 0
        share = (group.size() - 1) / group.size() * (2 if name.startswith("allreduce") else 1)
        GPU.takes(stream, 5.0 + share * moved / GPU.bytes_per_us if group.size() > 1 else 0.0)
        GPU.memory.report.counts["collectives"] += 1
        work = _quietly(original, group, *args, **kwargs)
        if work is None:
            return None
        event = Event()
        event.clock, event.ready = dict(stream.clock), list(stream.ready)
        if not isinstance(work, torch._C._distributed_c10d.Work):
            return _Work(work, event)
        events[id(work)] = work, event  # the work is kept, so that its number stays its own
        return work

    setattr(dist.ProcessGroup, name, called)


_STREAMS_OF_GROUPS: dict[Any, Stream] = {}
_EVENTS: dict[int, tuple[Any, Event]] = {}


def _wait_on_the_current_stream() -> None:
    work = torch._C._distributed_c10d.Work
    original = work.wait

    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        if id(self) in _EVENTS:
            _EVENTS[id(self)][1].wait()
        return _quietly(original, self, *args, **kwargs)

    work.wait = wait


def _resize(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Resize as on a GPU: copy to a new block on the current stream, and give the old one back to its owner."""
    stream, whole = GPU.current, storage.nbytes()
    at, place = stream.launched(), Place("resize_")
    if whole and not GPU.quiet:
        GPU.memory.note(storage, Access(0, whole, stream, at, False, place))
        GPU.memory.leave(storage)
        GPU.memory.allocates(stream)
    return _resize_on_cpu(storage, nbytes)


_resize_on_cpu = torch.UntypedStorage.resize_


def pretend(bytes_per_us: float = 1.0) -> None:
    """Pretend streams from now on, in this process, over a network of this rate."""
    from megatron.training import training

    from optimus_cc_ext.collectives import ring
    from optimus_cc_ext.collectives.reducers import SideStream
    from optimus_cc_ext.compressors.scratch import Scratch

    ring.has_streams = lambda device: True
    GPU.bytes_per_us = bytes_per_us
    GPU.begin()
    SideStream.__init__ = lambda self, device: setattr(self, "_stream", Stream(name="side"))  # type: ignore[method-assign]
    for module in (torch.cuda, torch.cuda.streams):
        module.Stream, module.Event = Stream, Event  # type: ignore[attr-defined, misc]
    torch.cuda.stream = torch.cuda.StreamContext = lambda stream: stream or GPU.current  # type: ignore[assignment, misc]
    torch.cuda.current_stream = lambda device=None: GPU.current  # type: ignore[assignment, return-value]
    torch.cuda.default_stream = lambda device=None: GPU.main  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = _synchronize
    torch.UntypedStorage.resize_ = _resize  # type: ignore[method-assign]
    for name, written in COLLECTIVES.items():
        if hasattr(dist.ProcessGroup, name):
            _on_a_stream_of_its_own(name, written)
    _wait_on_the_current_stream()
    take, step = Scratch.take, training.train_step

    def noting_take(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        GPU.scratch.setdefault(id(self), (self, {}))[1][GPU.current] = None
        return take(self, *args, **kwargs)

    @wraps(step)
    def timed(*args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        _synchronize()
        GPU.memory.report.steps.append(tuple(GPU.host.ready))
        return result

    Scratch.take, training.train_step = noting_take, timed  # type: ignore[method-assign]
    _Operators().__enter__()


def _synchronize(device: Any = None) -> None:
    for stream in GPU.streams:
        GPU.host.after(stream)


def report(*_: Any) -> Report:
    """Return what was found on this rank (a probe)."""
    GPU.memory.report.scratch = [tuple(stream.name for stream in streams) for _, streams in GPU.scratch.values()]
    return GPU.memory.report
