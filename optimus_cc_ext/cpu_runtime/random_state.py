"""CUDA's generator is the CPU's default generator: one stream of numbers, really seeded, saved and restored.

``torch.cuda.get_rng_state()`` therefore equals ``torch.get_rng_state()``, and Megatron's
``CudaRNGStatesTracker`` (core/tensor_parallel/random.py) forks the generator that dropout and initialisation
really draw from.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
import torch.utils.data.dataloader

from optimus_cc_ext.cpu_runtime.patching import Patches

__all__ = ["install"]


class _Generators(Sequence[torch.Generator]):
    """``torch.cuda.default_generators``: the CPU's generator under every device index of this host."""

    def __len__(self) -> int:
        return torch.cuda.device_count()

    @overload
    def __getitem__(self, index: int) -> torch.Generator: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[torch.Generator]: ...
    def __getitem__(self, index: int | slice) -> torch.Generator | Sequence[torch.Generator]:
        everyone = [torch.default_generator] * len(self)
        return everyone[index]


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _get_rng_state_all() -> list[torch.Tensor]:
    return [_get_rng_state() for _ in range(torch.cuda.device_count())]


def _set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for state in new_states:
        _set_rng_state(state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed() -> None:
    torch.default_generator.seed()


def _initial_seed() -> int:
    return torch.default_generator.initial_seed()


def _keep_data_loading_apart(patches: Patches) -> None:
    """Starting a DataLoader draws from the CPU's generator, which on a GPU nothing else uses.

    Only the first tensor-parallel rank loads data. If its draw moved the one stream that dropout uses here,
    tensor-parallel ranks would drop different elements of what must be the same activation.
    """
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    init = iterator.__init__

    @functools.wraps(init)
    def init_and_restore(self: Any, *args: Any, **kwargs: Any) -> None:
        state = torch.default_generator.get_state()
        init(self, *args, **kwargs)
        torch.default_generator.set_state(state)

    patches.replace(iterator, "__init__", init_and_restore)


def install(patches: Patches) -> None:
    """Point torch.cuda's random number functions at the CPU's default generator."""
    functions = {
        "get_rng_state": _get_rng_state,
        "set_rng_state": _set_rng_state,
        "get_rng_state_all": _get_rng_state_all,
        "set_rng_state_all": _set_rng_state_all,
        "manual_seed": _manual_seed,
        "manual_seed_all": _manual_seed,
        "seed": _seed,
        "seed_all": _seed,
        "initial_seed": _initial_seed,
    }
    for name, function in functions.items():
        patches.replace(torch.cuda, name, function)
        patches.replace(torch.cuda.random, name, function)
    patches.replace(torch.cuda, "default_generators", _Generators())
    _keep_data_loading_apart(patches)
