"""Everything of ``torch.cuda`` that means nothing on a CPU: it raises an error that names it."""

from __future__ import annotations

import functools
from typing import Any

import torch

from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["NoCpuMeaningError", "install"]

# Names with a meaning of their own where no GPU is: exceptions, submodules and facts about the build.
KEPT = frozenset(("CudaError", "DeferredCudaCallError", "check_error", "cudaStatus", "get_gencode_flags"))
# Private, but the usual way to ask for a memory profile, or used by Megatron.
PRIVATE = {torch.cuda: ("_sleep",), torch.cuda.memory: ("_snapshot", "_dump_snapshot", "_record_memory_history")}


class NoCpuMeaningError(RuntimeError):
    """A CUDA function was called that has no counterpart on a CPU."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} has no meaning on a CPU, on which optimus-cc runs Megatron here. Leave out the option "
            "that asks for it, or run on a machine with a GPU (OPTIMUS_CC_DEVICE=cuda)."
        )


def _refusing(name: str, original: Any) -> Any:
    """A stand-in for ``original`` that raises NoCpuMeaningError; of a class, a subclass that does so."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NoCpuMeaningError(name)

    if isinstance(original, type):
        return type(original.__name__, (original,), {"__new__": refuse, "__module__": original.__module__})
    # With its attributes: from 2.15 on, torch._dynamo takes `use_mem_pool.__wrapped__` when it is imported.
    return functools.wraps(original)(refuse)


def install(patches: Patches) -> None:
    """Refuse what no other module of this package has replaced; to be called last."""
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.graphs, torch.cuda.profiler):
        for name in (*getattr(module, "__all__", ()), *PRIVATE.get(module, ())):
            original = getattr(module, name, None)
            if (module, name) not in patches.replaced and name not in KEPT and callable(original):
                patches.replace(module, name, _refusing(f"{module.__name__}.{name}", original))
