"""Wraps for the few places of Megatron that need a GPU in a way that the replacement of torch.cuda does not cover.

Each wraps one attribute of Megatron; nothing is copied from Megatron.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

import torch

from optimus_cc_ext.patching import Patches
from optimus_cc_ext.tools.cpu import cuda_means_cpu, torch_cuda

PARSER = "megatron.training.arguments:"
RNG_MODULE = "megatron.core.tensor_parallel.random"
ASYNC_CALLER = "megatron.core.dist_checkpointing.strategies.async_utils:PersistentAsyncCaller"
ASYNC_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async:FileSystemWriterAsync"

# Maps destinations in Megatron's parser to values. The fused kernels need CUDA, Apex or Transformer Engine.
CPU_DEFAULTS: MappingProxyType[str, Any] = MappingProxyType(
    {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "no_persist_layer_norm": True,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
    }
)


def _with_cpu_defaults(add_arguments: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # A flag on the command line still overrides them. What this version of Megatron does not have is left out.
    parser: argparse.ArgumentParser = add_arguments(*args, **kwargs)
    known = {action.dest for action in parser._actions}
    parser.set_defaults(**{name: value for name, value in CPU_DEFAULTS.items() if name in known})
    return parser


def _gloo_only(make_group: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    backends = [value for value in (*args, kwargs.get("backend")) if isinstance(value, str)]
    if any("nccl" in backend.lower() for backend in backends):
        raise RuntimeError(
            f"torch.distributed.{make_group.__name__}: the nccl backend needs GPUs, and this run is "
            "on a CPU; use --distributed-backend gloo (the default on a CPU)"
        )
    return make_group(*args, **kwargs)


def _compile_unless_importable(compile_helpers: Callable[[], None]) -> None:
    # The wheel contains the compiled dataset helper and no Makefile, but Megatron runs make nevertheless.
    try:
        importlib.import_module("megatron.core.datasets.helpers_cpp")
    except ImportError:
        compile_helpers()


def _keep_pipeline_outputs(post_init: Callable[[Any], None], config: Any) -> None:
    # With interleaving and overlapped sends, Megatron frees an output once its send is *ordered* on a stream; gloo
    # reads the buffer later, and finds NaN. Releases that wait for the send instead (0.19) lose the overlap. So outputs
    # are kept.
    post_init(config)
    config.deallocate_pipeline_outputs = False


def _allow_sequence_parallel_norm(build: Callable[..., Any], cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    # Torch's norms are right under sequence parallelism once their parameters are marked as sequence-parallel: Megatron
    # then sums their gradients over the tensor-parallel ranks (core/distributed/finalize_model_grads.py). Megatron's
    # wrapper refuses sequence parallelism only because it does not mark them.
    if not config.sequence_parallel:
        return build(cls, config, *args, **kwargs)
    unmarked = copy.copy(config)
    unmarked.sequence_parallel = False
    norm = build(cls, unmarked, *args, **kwargs)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


def _as_numbers(move: Callable[..., Any], tensor: Any, as_numpy: bool = False, *args: Any, **kwargs: Any) -> Any:
    # The all-to-all of expert parallelism needs its split sizes as numbers. Megatron converts the sizes when it moves
    # them from the GPU, and leaves tensors that are on the host already as they are.
    moved = move(tensor, as_numpy, *args, **kwargs)
    return moved.numpy() if as_numpy and torch.is_tensor(moved) else moved


# Torch's Adam under Megatron's distributed optimizer, as far as its checkpoints need it. With Apex or Transformer
# Engine, as on every GPU machine that trains with Megatron, Adam counts its steps per group of parameters. Torch's Adam
# counts them per parameter, in tensors that it makes in the first step. Megatron allows for the difference in some
# places only. In the others, a distributed optimizer on a CPU cannot be loaded, or resumes with another step count than
# the one that was saved.

_COUNT = "step"


def _count_from_the_start(state_dict: Callable[..., Any], self: Any) -> Any:
    # Loading reads the step count before any step was made.
    if _is_torchs(self.optimizer) and not self.optimizer.state:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[parameter] = {_COUNT: torch.zeros(()), **moments}
    return state_dict(self)


def _count_for_each(load_state_dict: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    # Megatron gives the same tensor to all parameters, and each parameter's update would increment it.
    _without_gradients(load_state_dict, self, *args, **kwargs)
    if _is_torchs(self.optimizer):
        for state in self.optimizer.state.values():
            state[_COUNT] = state[_COUNT].clone()


def _without_count(get_states: Callable[..., dict[str, Any]], self: Any, model_param: Any) -> dict[str, Any]:
    # Megatron would save the step count as one more shard of the parameter's size. The group saves the count, too.
    tensors = get_states(self, model_param)
    return {name: tensor for name, tensor in tensors.items() if name != _COUNT or not _is_torchs(self.optimizer)}


def _leave_count(set_states: Callable[..., None], self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
    set_states(self, model_param, {_COUNT: None, **tensors} if _is_torchs(self.optimizer) else tensors)


def _without_gradients(load: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    # fp32 parameters are their own main parameters: loading copies into leaves that require gradients.
    with torch.no_grad():
        load(*args, **kwargs)


def _is_torchs(optimizer: Any) -> bool:
    return isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)


_AROUND_ADAM: dict[str, Callable[..., Any]] = {
    "state_dict": _count_from_the_start,
    "load_state_dict": _count_for_each,
    "load_parameter_state": _without_gradients,
    "_get_main_param_and_optimizer_states": _without_count,
    "_set_main_param_and_optimizer_states": _leave_count,
}
"""Wraps of methods of Megatron's DistributedOptimizer, by the method's name."""

# (owner, attribute, wrap)
_AROUND: tuple[tuple[str, str, Callable[..., Any]], ...] = (
    ("megatron.core.datasets.utils:", "compile_helpers", _compile_unless_importable),
    ("megatron.core.model_parallel_config:ModelParallelConfig", "__post_init__", _keep_pipeline_outputs),
    ("megatron.core.transformer.torch_norm:WrappedTorchNorm", "__new__", _allow_sequence_parallel_norm),
    ("megatron.core.transformer.moe.token_dispatcher:", "maybe_move_tensor_to_cpu", _as_numbers),
    *(
        ("megatron.core.optimizer.distrib_optimizer:DistributedOptimizer", name, around)
        for name, around in _AROUND_ADAM.items()
    ),
)


def install(patches: Patches) -> None:
    """Wrap functions of Megatron, which is imported here. Call it after torch.cuda has been replaced.

    Raises:
        RuntimeError: Megatron was imported before torch.cuda was replaced, and still holds torch's originals.
    """
    module = sys.modules.get(RNG_MODULE)
    if module is not None and module._lazy_init is not torch.cuda._lazy_init:
        raise RuntimeError(
            "the CPU runtime was activated after Megatron had been imported with CUDA's functions; call "
            "optimus_cc_ext.tools.cpu.cpu_runtime.activate() before the first import of megatron, or start the "
            "program with `python -m optimus_cc_ext`"
        )
    for name in ("init_process_group", "new_group"):
        for owner in (torch.distributed, torch.distributed.distributed_c10d):
            patches.wrap(owner, name, _gloo_only)
    for target, name, around in _AROUND:
        patches.wrap(resolve_name(target), name, around)
    # Here the generator of the "GPU" is the CPU's, so Megatron warns of every draw.
    logger, warned = logging.getLogger(RNG_MODULE), set[Any]()

    def only_once(record: logging.LogRecord) -> bool:
        known = record.msg in warned
        warned.add(record.msg)
        return not known

    logger.addFilter(only_once)
    patches.callback(logger.removeFilter, only_once)
    if find_spec("megatron.training") is not None:
        patches.wrap(resolve_name(PARSER), "add_megatron_arguments", _with_cpu_defaults)
    # --async-save writes from a second process, which starts without the CPU runtime.
    patches.replace(resolve_name(ASYNC_CALLER), "async_loop", staticmethod(checkpoint_writer))


def use_compiled_helpers() -> None:
    """Prevent Megatron from running make, which its wheel does not need; used on a GPU as well as on a CPU.

    Imports Megatron's core. A second call changes nothing.
    """
    datasets = resolve_name("megatron.core.datasets.utils:")
    if not hasattr(datasets.compile_helpers, "__wrapped__"):
        Patches().wrap(datasets, "compile_helpers", _compile_unless_importable)


def checkpoint_writer(*args: Any, **kwargs: Any) -> None:
    """Run Megatron's asynchronous checkpoint writer (PersistentAsyncCaller.async_loop) with the CPU runtime installed.

    This is the main function of a new process, in which nothing has been replaced yet.
    """
    patches = Patches()
    torch_cuda.install(patches)
    cuda_means_cpu.install(patches)
    patches.wrap(resolve_name(ASYNC_WRITER), "preload_tensors", _preload_copies)
    resolve_name(ASYNC_CALLER).async_loop(*args, **kwargs)


def _preload_copies(preload: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # On a GPU preloading is the copy to the host, after which training may go on. A CPU tensor is passed through shared
    # memory, and Megatron's `.to("cpu")` would not copy it, so the writer would read what training overwrites.
    return [
        (file, key, (data, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (data, tensors) in preload(*args, **kwargs)
    ]
