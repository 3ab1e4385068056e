"""``torch.cuda`` for processes in which every device is the same CPU: queries, memory, random numbers, streams.

One table maps each name to its answer; every other function that means nothing on a CPU raises an error with its name.
CUDA's generator is the CPU's default generator: one stream of numbers, really seeded, saved and restored, which
Megatron's ``CudaRNGStatesTracker`` (core/tensor_parallel/random.py) forks, and from which dropout and initialisation
draw.
"""

from __future__ import annotations

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils.data.dataloader

from optimus_cc_ext.patching import Patches

_PAGE = os.sysconf("SC_PAGE_SIZE")
# Names that have a meaning without a GPU: exceptions, submodules and facts about the build.
KEPT = frozenset(("CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "get_gencode_flags"))
# Private functions that are refused as well: the usual ones for a memory profile, and one that Megatron uses.
PRIVATE = {torch.cuda: ("_sleep",), torch.cuda.memory: ("_snapshot", "_dump_snapshot", "_record_memory_history")}
_RESETS = ("peak_memory_stats", "accumulated_memory_stats", "max_memory_allocated", "max_memory_cached")


class NoCpuMeaningError(RuntimeError):
    """A CUDA function was called that has no counterpart on a CPU."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} has no meaning on a CPU, on which optimus-cc runs Megatron here. Leave out the option "
            "that asks for it, or run on a machine with a GPU (OPTIMUS_CC_DEVICE=cuda)."
        )


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _device_count() -> int:
    # LOCAL_WORLD_SIZE is read at every call: ranks forked from one prepared process learn it after the fork.
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class _CurrentDevice:
    """Index of the device that was set last, as on a GPU, although every index is the same CPU."""

    index = 0

    def set(self, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        if index is not None and index >= 0:  # a device without an index changes nothing, as on a GPU
            self.index = index


class _Generators:
    """Stand-in for ``torch.cuda.default_generators``: the CPU's generator under every device index of this host."""

    def __len__(self) -> int:
        return _device_count()

    def __getitem__(self, index: Any) -> Any:
        return ([torch.default_generator] * len(self))[index]


class HostEvent:
    """Stand-in for ``torch.cuda.Event``: on a CPU, recorded work is finished by the time that ``record`` is called."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        if interprocess:
            raise NoCpuMeaningError("torch.cuda.Event(interprocess=True)")
        self._timed = enable_timing
        self._seconds: float | None = None

    wait = synchronize = _nothing

    def query(self) -> bool:
        return True

    def record(self, stream: HostStream | None = None) -> None:
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: HostEvent) -> float:
        """Return the milliseconds from this event to ``end_event``.

        Raises:
            ValueError: as on a GPU, unless both were created with ``enable_timing=True`` and recorded.
        """
        if not (self._timed and end_event._timed):
            raise ValueError("both events must be created with enable_timing=True to measure an elapsed time")
        if self._seconds is None or end_event._seconds is None:
            raise ValueError("both events must be recorded before an elapsed time can be measured")
        return (end_event._seconds - self._seconds) * 1e3


class HostStream:
    """Stand-in for ``torch.cuda.Stream``: every stream is the program's own order, so all streams are equal."""

    cuda_stream = 0
    device = torch.device("cpu")

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None:
        self.priority = priority

    wait_stream = wait_event = synchronize = __exit__ = _nothing

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = event if event is not None else HostEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def __enter__(self) -> HostStream:
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HostStream)

    def __hash__(self) -> int:
        return hash(HostStream)


def _answers() -> dict[str, Any]:
    current, generator = _CurrentDevice(), torch.default_generator
    memory = _PAGE * os.sysconf("SC_PHYS_PAGES")
    properties = SimpleNamespace(
        name="cpu",
        total_memory=memory,
        multi_processor_count=os.cpu_count() or 1,
        # This compute capability is lower than every GPU's, so that no code infers a feature from it.
        major=0,
        minor=0,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_call": lambda call, **kwargs: call(),
        "device_count": _device_count,
        "set_device": current.set,
        "current_device": lambda: current.index,
        "device": nullcontext,
        "device_of": nullcontext,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_tf32_supported": lambda: False,
        "get_arch_list": lambda: [],
        "mem_get_info": lambda device=None: (_PAGE * os.sysconf("SC_AVPHYS_PAGES"), memory),
        # No byte of a GPU's memory is in use, and Megatron logs these values as they are.
        "memory_stats": lambda device=None: defaultdict(int),
        "default_generators": _Generators(),
        "get_rng_state": lambda device="cuda": generator.get_state(),
        "set_rng_state": lambda new_state, device="cuda": generator.set_state(new_state),
        "get_rng_state_all": lambda: [generator.get_state() for _ in range(_device_count())],
        "set_rng_state_all": lambda new_states: [generator.set_state(state) for state in new_states],
        "manual_seed": lambda seed: generator.manual_seed(int(seed)),
        "manual_seed_all": lambda seed: generator.manual_seed(int(seed)),
        # These are functions of our own, because torch._dynamo has rules for the generator's methods, and refuses a
        # second name for one of them.
        "seed": lambda: generator.seed(),
        "seed_all": lambda: generator.seed(),
        "initial_seed": lambda: generator.initial_seed(),
        "Stream": HostStream,
        "Event": HostEvent,
        "StreamContext": nullcontext,
        "stream": nullcontext,
        "current_stream": lambda device=None: HostStream(),
        "default_stream": lambda device=None: HostStream(),
        "is_current_stream_capturing": lambda: False,
    }
    resets = (f"reset_{name}" for name in _RESETS)
    counters = (f"{prefix}memory_{name}" for prefix in ("", "max_") for name in ("allocated", "reserved", "cached"))
    answers |= dict.fromkeys(("init", "_lazy_init", "synchronize", "set_stream", "empty_cache", *resets), _nothing)
    return answers | dict.fromkeys(counters, lambda device=None: 0)


def _without_a_draw(init: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # Starting a DataLoader draws from the CPU's generator, which on a GPU nothing else uses. Only the first
    # tensor-parallel rank loads data. If its draw moved the one stream that dropout uses here, tensor-parallel ranks
    # would drop different elements of what must be the same activation.
    state = torch.default_generator.get_state()
    init(*args, **kwargs)
    torch.default_generator.set_state(state)


def install(patches: Patches) -> None:
    """Replace the functions and classes of ``torch.cuda`` and its modules by the table's answers."""
    for name, answer in _answers().items():
        patches.replace(torch.cuda, name, answer)
        for module in (torch.cuda.memory, torch.cuda.random, torch.cuda.streams, torch.cuda.graphs):
            if name in vars(module):
                patches.replace(module, name, answer)
    for name in ("range_push", "range_pop", "mark", "range_start", "range_end"):
        patches.replace(torch.cuda.nvtx, name, _nothing)
    # A CUDA build of PyTorch reports CUDA as the accelerator even on a machine without one, and the DataLoader asks for
    # it.
    patches.replace(torch.accelerator, "is_available", lambda: False)
    patches.replace(torch.accelerator, "device_count", lambda: 0)
    patches.replace(torch.accelerator, "current_accelerator", lambda check_available=False: None)
    patches.wrap(torch.utils.data.dataloader._BaseDataLoaderIter, "__init__", _without_a_draw)


def _refusing(name: str, original: Any) -> Any:
    """Make a stand-in for ``original`` that raises NoCpuMeaningError; for a class, a subclass whose instances cannot be
    made.
    """

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NoCpuMeaningError(name)

    if isinstance(original, type):
        return type(original.__name__, (original,), {"__new__": refuse, "__module__": original.__module__})
    # The stand-in keeps the original's attributes: from 2.15 on, torch._dynamo reads `use_mem_pool.__wrapped__` when it
    # is imported.
    return functools.wraps(original)(refuse)


def refuse_the_rest(patches: Patches) -> None:
    """Refuse all functions of ``torch.cuda`` that no other module has replaced; call it after the other
    replacements.
    """
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.graphs, torch.cuda.profiler):
        for name in (*getattr(module, "__all__", ()), *PRIVATE.get(module, ())):
            original = getattr(module, name, None)
            if not patches.has_replaced(module, name) and name not in KEPT and callable(original):
                patches.replace(module, name, _refusing(f"{module.__name__}.{name}", original))
